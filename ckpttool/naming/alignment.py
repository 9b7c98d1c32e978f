"""Which keys of two checkpoints of one model are the same tensor's, where only wrappers make their names differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from ckpttool.naming.match import match
from ckpttool.naming.wrappers.chain import canonical_keys
from ckpttool.naming.wrappers.table import SEGMENTS


def align(left: Collection[str], right: Collection[str]) -> dict[str, str]:
    """Left key -> right key: equal keys, else keys that wrappers' segments alone tell apart, in one way only."""
    have, want = set(left), set(right)
    found = {key: key for key in left if key in want}
    mine, theirs = [key for key in left if key not in want], [key for key in right if key not in have]
    if mine and theirs:
        found.update(_by_evidence(left, right, mine, theirs))
        taken = set(found.values())
        found.update(_by_segments([k for k in mine if k not in found], [k for k in theirs if k not in taken]))
    return {key: found[key] for key in left if key in found}


def _by_evidence(
    left: Collection[str], right: Collection[str], mine: Sequence[str], theirs: Sequence[str]
) -> dict[str, str]:
    """Those that have one canonical name, by the evidence of each checkpoint as a whole."""
    ours, others = canonical_keys(left), canonical_keys(right)
    count, counts = Counter(ours[key] for key in mine), Counter(others[key] for key in theirs)
    by_name = {others[key]: key for key in theirs}
    return {key: by_name[ours[key]] for key in mine if count[ours[key]] == counts[ours[key]] == 1}


def _by_segments(left: Sequence[str], right: Sequence[str]) -> dict[str, str]:
    """Those of which taking wrappers' segments out of either gives the other, and no other pair."""
    bare = {key: ".".join(part for part in key.split(".") if part not in SEGMENTS) for key in right}
    found = list(match(left, bare).names.items())
    mine, theirs = {key for key, _ in found}, {other for _, other in found}
    rest = match([key for key in right if key not in theirs], {key: key for key in left if key not in mine})
    found += [(key, other) for other, key in rest.names.items()]
    lefts, rights = Counter(key for key, _ in found), Counter(other for _, other in found)
    return {key: other for key, other in found if lefts[key] == rights[other] == 1}
