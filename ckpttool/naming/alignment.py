"""Which keys of two checkpoints of one model are the same tensor's, where only wrappers make their names differ."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence

from ckpttool.naming.match import WRAPPER, common_prefix, match
from ckpttool.naming.wrappers.chain import recognise
from ckpttool.naming.wrappers.table import SEGMENTS, strip

_MARK = re.compile(f"{WRAPPER.pattern}|@")  # in every name that is another one inside of a wrapper, or a call variant


def align(left: Collection[str], right: Collection[str]) -> dict[str, str]:
    """Left key -> right key: equal keys, else keys that wrappers' segments alone tell apart, in one way only."""
    have, want = set(left), set(right)
    mine, theirs = [key for key in left if key not in want], [key for key in right if key not in have]
    found = unlike(left, right, mine, theirs)
    return {key: found.get(key, key) for key in left if key in found or key in want}


def unlike(left: Collection[str], right: Collection[str], mine: Sequence[str], theirs: Sequence[str]) -> dict[str, str]:
    """Left key -> right key, of those that are on one side only (`mine`, `theirs`); in their order on the left."""
    if not mine or not theirs:
        return {}
    found = _by_evidence(left, right, mine, theirs)
    taken = set(found.values())
    found.update(_by_segments([k for k in mine if k not in found], [k for k in theirs if k not in taken]))
    return {key: found[key] for key in mine if key in found}


def _by_evidence(
    left: Collection[str], right: Collection[str], mine: Sequence[str], theirs: Sequence[str]
) -> dict[str, str]:
    """Those that have one canonical name, by the evidence of each checkpoint as a whole."""
    paths = recognise(left), recognise(right)
    if not any(paths):
        return {}
    ours, others = ({key: strip(key, own) or key for key in keys} for keys, own in zip((mine, theirs), paths))
    count, counts = Counter(ours.values()), Counter(others.values())
    by_name = {name: key for key, name in others.items()}
    return {key: by_name[ours[key]] for key in mine if count[ours[key]] == counts[ours[key]] == 1}


def _by_segments(left: Sequence[str], right: Sequence[str]) -> dict[str, str]:
    """Those of which taking wrappers' segments out of either gives the other, and no other pair."""
    if not _MARK.search("\n".join((*left, *right))):
        return _by_prefix(left, right)
    bare = {key: ".".join(part for part in key.split(".") if part not in SEGMENTS) for key in right}
    found = list(match(left, bare).names.items())
    mine, theirs = {key for key, _ in found}, {other for _, other in found}
    rest = match([key for key in right if key not in theirs], {key: key for key in left if key not in mine})
    found += [(key, other) for other, key in rest.names.items()]
    lefts, rights = Counter(key for key, _ in found), Counter(other for _, other in found)
    return {key: other for key, other in found if lefts[key] == rights[other] == 1}


def _by_prefix(left: Sequence[str], right: Sequence[str]) -> dict[str, str]:
    """As `_by_segments`, where no name has a segment of a wrapper: one may hold all of the other side's names."""
    found = _held(left, right)
    taken = set(found.values())
    rest = _held([key for key in right if key not in taken], [key for key in left if key not in found])
    return {**found, **{key: other for other, key in rest.items()}}


def _held(keys: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Key -> name, of keys that have a segment in common which holds names."""
    prefix = common_prefix(keys, names)
    known = set(names) if prefix else ()
    return {key: key[len(prefix) + 1 :] for key in keys if key[len(prefix) + 1 :] in known} if prefix else {}
