"""Which of a model's names a checkpoint's keys are: recognises the form, and takes wrappers' segments out on evidence.

A key matches where it is a name, or becomes one when segments that wrappers add are taken out of it. Nothing else is
tried: what matches in two ways, or not at all, is a problem and no guess.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import field, replace
from itertools import combinations

from ckpttool.errors import Problem
from ckpttool.naming.call_variants import base_names
from ckpttool.naming.wrappers.chain import infer, recognise
from ckpttool.naming.wrappers.table import SEGMENTS, strip
from ckpttool.values import dataclass

_BY_EVIDENCE = ("base_model", "base_layer", "original_module")  # PEFT's, which are not tried one by one
WRAPPER = re.compile("|".join(map(re.escape, SEGMENTS)))  # in every key that has a wrapper's segment
_MOST_SEGMENTS = 8  # a key with more segments that look like wrappers is not searched through


@dataclass(frozen=True, slots=True)
class Match:
    """`names`: key -> name, for every key that matched. `wrapped`: segments taken out, with how often.

    `variants`: key -> name, for keys that by their name are call variants (``foo@1.w``) of a name that has its key;
    who uses them compares the values.
    """

    names: Mapping[str, str]
    unmatched: tuple[str, ...]
    missing: tuple[str, ...]
    wrapped: Mapping[str, int]
    problems: tuple[Problem, ...] = ()
    variants: Mapping[str, str] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Every key is a name and every name has its key."""
        return not (self.unmatched or self.missing or self.problems)

    @property
    def score(self) -> tuple[bool, int]:
        """For comparing two readings of the same keys: complete ones first, then the one with fewer faults."""
        return self.complete, -len(self.unmatched) - len(self.missing) - len(self.problems)


def match(keys: Sequence[str], names: Mapping[str, str], optional: Iterable[str] = ()) -> Match:
    """Matches `keys` with the model's names; `names` maps each name to its canonical name.

    `optional` are names that may be absent without being missing (aliases, non-persistent buffers). Where that leaves
    something open, and all keys together are the names inside of wrappers around the whole model, they are those.
    """
    found = _key_by_key(keys, names, optional)
    root = () if found.complete else infer(keys).root
    if not root:
        return found
    inner = {key: strip(key, root) for key in keys}
    whole = _key_by_key(list(inner.values()), names, optional, below=False)
    if not whole.complete or len(set(inner.values())) < len(keys):
        return found
    segments = Counter(path.rpartition(".")[2] for path in root for _ in keys)
    return replace(
        whole,
        names={key: whole.names[name] for key, name in inner.items() if name in whole.names},
        wrapped=Counter(whole.wrapped) + segments,
        variants={key: whole.variants[name] for key, name in inner.items() if name in whole.variants},
    )


def _key_by_key(keys: Sequence[str], names: Mapping[str, str], optional: Iterable[str], below: bool = True) -> Match:
    """With `below` the model may also be a part of another, all of whose keys are below that part's name."""
    count = Counter(names.values())
    by_canonical = {canonical: name for name, canonical in names.items() if count[canonical] == 1}
    by_canonical.update((name, name) for name in names)
    prefix = common_prefix(keys, by_canonical) if below else ""
    text = "\n".join(keys)  # most keys have nothing of a wrapper: asking each by itself would take longer than all else
    paths = recognise(keys) if any(part in text for part in _BY_EVIDENCE) else frozenset[str]()
    may_be_wrapped = bool(prefix or WRAPPER.search(text))
    found: dict[str, str] = {}
    wrapped: defaultdict[str, int] = defaultdict(int)
    problems: list[Problem] = []
    for key in keys:
        if key in by_canonical:
            found[key] = by_canonical[key]
            continue
        if not may_be_wrapped and not paths:
            continue
        hits = _unwrapped(key, prefix, by_canonical)
        hits = hits or (_by_evidence(key, paths, by_canonical) if paths else [])
        targets = {by_canonical[name] for name, _ in hits}
        if len(targets) > 1:
            problems.append(Problem(f"could be {' or '.join(sorted(targets))}", key))
        elif targets:
            found[key] = targets.pop()
            for segment in hits[0][1]:
                wrapped[segment] += 1
    variants = _variants([key for key in keys if key not in found], found, prefix, by_canonical)
    problems += _collisions(found)
    ambiguous = {problem.key for problem in problems}
    reached = set(found.values())
    spare = set(optional)
    return Match(
        found,
        tuple(key for key in keys if key not in found and key not in variants and key not in ambiguous),
        tuple(name for name in names if name not in reached and name not in spare),
        dict(wrapped),
        tuple(problems),
        variants,
    )


def _variants(keys: Iterable[str], found: dict[str, str], prefix: str, known: Mapping[str, str]) -> dict[str, str]:
    """Keys that are a call variant of a name. Where the name has no key of its own, the first variant becomes it."""
    reached = set(found.values())
    variants: dict[str, str] = {}
    for key in keys:
        for name in base_names(key):
            hits = [name] if name in known else [hit for hit, _ in _unwrapped(name, prefix, known)]
            targets = {known[hit] for hit in hits}
            if len(targets) == 1:
                target = targets.pop()
                (variants if target in reached else found)[key] = target
                reached.add(target)
                break
    return variants


def _unwrapped(key: str, prefix: str, known: Mapping[str, str]) -> list[tuple[str, tuple[str, ...]]]:
    """Names that the key becomes when some wrapper segments are taken out, as few as will do, and which they were."""
    if not WRAPPER.search(key):
        name = key.removeprefix(f"{prefix}.") if prefix else key
        return [(name, (prefix,))] if name != key and name in known else []
    parts = key.split(".")
    places = [i for i, part in enumerate(parts[:-1]) if part in SEGMENTS or (i == 0 and part == prefix)]
    if len(places) > _MOST_SEGMENTS:
        return []
    for count in range(1, len(places) + 1):
        hits = []
        for taken in combinations(places, count):
            name = ".".join(part for i, part in enumerate(parts) if i not in taken)
            if name in known:
                hits.append((name, tuple(parts[i] for i in taken)))
        if hits:
            return hits
    return []


def _by_evidence(key: str, paths: Collection[str], known: Mapping[str, str]) -> list[tuple[str, tuple[str, ...]]]:
    """The name that the key becomes without the segments at `paths`, and which they were: PEFT's, among others'."""
    name = strip(key, paths)
    parts = key.split(".")
    taken = tuple(part for depth, part in enumerate(parts) if ".".join(parts[: depth + 1]) in paths)
    return [(name, taken)] if name in known else []


def common_prefix(keys: Sequence[str], known: Iterable[str]) -> str:
    """A first segment that every key has and no name begins with: an attribute that holds the whole model."""
    heads = {key.partition(".")[0] for key in keys}
    if len(heads) != 1 or any(name.partition(".")[0] in heads for name in known):
        return ""
    return heads.pop()


def _collisions(found: Mapping[str, str]) -> list[Problem]:
    if len(set(found.values())) == len(found):
        return []
    by_name: defaultdict[str, list[str]] = defaultdict(list)
    for key, name in found.items():
        by_name[name].append(key)
    return [
        Problem(f"{' and '.join(keys)} are both this name", name) for name, keys in by_name.items() if len(keys) > 1
    ]
