"""Which of a model's names a checkpoint's keys are."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from itertools import combinations

from ckpttool.core import expression as ex
from ckpttool.core.errors import Problem
from ckpttool.core.expression import Expression, Ref
from ckpttool.core.names import Hook, Names, RuntimeTensor
from ckpttool.core.values import dataclass
from ckpttool.naming.call_variants import base_names
from ckpttool.naming.wrappers import SEGMENTS, infer, recognise, strip, stripped_paths

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
    found = _aligned_by_evidence(left, right, mine, theirs)
    taken = set(found.values())
    found.update(_by_segments([k for k in mine if k not in found], [k for k in theirs if k not in taken]))
    return {key: found[key] for key in mine if key in found}


def _aligned_by_evidence(
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


Likeness = tuple[str, "tuple[int, ...] | None"]  # dtype and shape


@dataclass(frozen=True)
class NameTables:
    """The tables of one model's names; each is made when it is first asked for."""

    names: Names

    @cached_property
    def tensors(self) -> dict[str, RuntimeTensor]:
        """FQN -> the tensor."""
        return {tensor.fqn: tensor for tensor in self.names.runtime}

    @cached_property
    def first(self) -> dict[str, str]:
        """FQN -> the first FQN of the same tensor."""
        return {tensor.fqn: tensor.alias_of or tensor.fqn for tensor in self.names.runtime}

    @cached_property
    def groups(self) -> dict[str, list[str]]:
        """First FQN -> every FQN of that tensor, in runtime order."""
        groups: defaultdict[str, list[str]] = defaultdict(list)
        for fqn, first in self.first.items():
            groups[first].append(fqn)
        return dict(groups)

    @cached_property
    def saved(self) -> dict[str, Expression | None]:
        """Serialized key -> what it is of runtime tensors."""
        return {s.key: s.source for s in self.names.serialized}

    @cached_property
    def hooks(self) -> dict[str, Hook | None]:
        """Serialized key -> the hook that renames or computes it."""
        return {s.key: s.hook for s in self.names.serialized}

    @cached_property
    def keys_of(self) -> dict[str, list[str]]:
        """First FQN -> the serialized keys that are this tensor under another name, or its own."""
        keys: defaultdict[str, list[str]] = defaultdict(list)
        for key, source in self.saved.items():
            if isinstance(source, Ref):
                keys[source.key].append(key)
        return dict(keys)

    @cached_property
    def fqn_of(self) -> dict[str, str]:
        """Serialized key -> FQN, for the keys that are a runtime tensor renamed; each FQN has one key at most."""
        pairs = [pair(fqns, self.keys_of.get(first, ())) for first, fqns in self.groups.items()]
        return {key: fqn for group in pairs for fqn, key in group.items()}

    @cached_property
    def forms_agree(self) -> bool:
        """Whether a key that is both a serialized key and an FQN has the same value as both."""
        return all(
            source == Ref(self.first[key])
            for key, source in self.saved.items()
            if source is not None and key in self.first
        )

    def runtime_values(self, present: Iterable[str]) -> dict[str, Expression]:
        """Each FQN as an expression over the serialized keys in `present`; without those that they do not give.

        A key that saving only renames is that tensor; any other is what the model's own loading makes of the keys.
        """
        have = set(present)
        values: dict[str, Expression] = {fqn: Ref(key) for key, fqn in self.fqn_of.items() if key in have}
        known = {self.first[fqn] for fqn in values}
        for loaded in self.names.load:
            first = self.first.get(loaded.fqn)  # loading may make tensors that the model has not before
            if first is None or first in known:
                continue
            if loaded.source is not None and have.issuperset(ex.refs(loaded.source)):
                values[loaded.fqn] = loaded.source
                known.add(first)
        return values

    # What `match` is given: the names of each form, and those that a checkpoint may do without.

    @cached_property
    def serialized_names(self) -> dict[str, str]:
        """Every serialized key with its canonical name: what wrappers added to it is taken out."""
        paths = stripped_paths((tensor.fqn, tensor.canonical) for tensor in self.names.runtime)
        return {key: strip(key, paths) for key in (*self.saved, *self.names.extra_state)}

    @cached_property
    def runtime_names(self) -> dict[str, str]:
        """Every FQN with its canonical name, and the keys that stand for no runtime tensor under their own."""
        found = {tensor.fqn: tensor.canonical for tensor in self.names.runtime}
        for key in (*(key for key, source in self.saved.items() if source is None), *self.names.extra_state):
            found.setdefault(key, key)
        return found

    @cached_property
    def spare_keys(self) -> list[str]:
        """Serialized keys that may be absent: second names of one tensor, and all that is no tensor."""
        count: Counter[Expression] = Counter()
        seconds = []
        for key, source in self.saved.items():
            if source is not None and not ex.is_opaque(source):  # of what cannot be followed nobody knows
                count[source] += 1
                seconds += [key] if count[source] > 1 else []
        return [*seconds, *self.names.extra_state]

    @cached_property
    def spare_fqns(self) -> list[str]:
        """FQNs that may be absent: second names, and all that ``state_dict()`` does not hold as a tensor."""
        spare = [t.fqn for t in self.names.runtime if t.alias_of is not None or not t.persistent]
        made = [key for key, source in self.saved.items() if source is None]
        return [*spare, *made, *self.names.extra_state, *self.names.not_serialized]

    @cached_property
    def serialized_likeness(self) -> Mapping[str, Likeness]:
        """Serialized key -> dtype and shape."""
        return {s.key: (s.dtype, s.shape) for s in self.names.serialized}

    @cached_property
    def runtime_likeness(self) -> Mapping[str, Likeness]:
        """FQN -> dtype and shape."""
        return {t.fqn: (t.dtype, t.shape) for t in self.names.runtime}


def pair(fqns: Sequence[str], keys: Sequence[str]) -> dict[str, str]:
    """Which is which among the names of one tensor on two sides: equal names first, the rest in order."""
    own = set(keys)
    pairs = {fqn: fqn for fqn in fqns if fqn in own}
    rest = [fqn for fqn in fqns if fqn not in pairs]
    pairs.update(zip(rest, [key for key in keys if key not in pairs]))
    return pairs
