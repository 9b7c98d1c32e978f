"""Match the keys of a checkpoint with a model's names."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

from ckpttool.core import expression as ex
from ckpttool.core.checkpoint import Section, once_per_section
from ckpttool.core.errors import Problem
from ckpttool.core.expression import Expression, Ref
from ckpttool.core.names import SERIALIZED, Hook, Names, RuntimeTensor
from ckpttool.core.plan import Dropped, Output
from ckpttool.core.strides import Shape
from ckpttool.core.tables import by_key, inverse, selected, sources_of
from ckpttool.core.text import dotted, may_mention
from ckpttool.core.values import dataclass
from ckpttool.evaluate.compare import same_values
from ckpttool.naming.wrappers import SEGMENTS, infer, recognize, strip, stripped, stripped_paths

# Call variants: ``foo@1.w`` is ``foo.w`` if `torch.export.unflatten` made it. A user's own module
# may be called ``foo@1``, so a name alone is never enough: a segment loses its ``@N`` only if the
# base name is known, and the caller knows that both are one tensor (by storage, bytes, or a model's
# names).

_CALL = re.compile(r"(.+)@([1-9]\d*)")
_MOST_CALLS = 8  # segments of a name that are tried; others keep their ``@N``


def split_call(segment: str) -> tuple[str, int]:
    """Return a segment's base and the number of its call: ``foo@2`` -> (``foo``, 2), ``foo`` ->
    (``foo``, 0).
    """
    match = _CALL.fullmatch(segment)
    return (match[1], int(match[2])) if match else (segment, 0)


def base_names(fqn: str) -> Iterator[str]:
    """Yield every name that `fqn` may be a call variant of, names without any ``@N`` first."""
    if "@" not in fqn:
        return
    segments = fqn.split(".")
    places = [i for i, segment in enumerate(segments[:-1]) if split_call(segment)[1]]
    places = places[:_MOST_CALLS]
    for count in range(len(places), 0, -1):
        for chosen in combinations(places, count):
            base = segments.copy()
            for place in chosen:
                base[place], _ = split_call(base[place])
            yield ".".join(base)


@once_per_section
def aliases_with_variants(section: Section) -> Mapping[str, str]:
    """Return key -> first key of the same tensor: shared storage, and call variants with the bytes
    of their base.
    """
    if not any("@" in entry.key for entry in section.tensors):
        return section.aliases()
    firsts = dict(section.aliases())
    entries = by_key(section.tensors)
    for key in entries:
        if key in firsts:
            continue
        for base in base_names(key):
            if base in entries and same_values(entries[key], entries[base]):
                firsts[key] = firsts.get(base, base)
                break
    return firsts


def drop_variants(
    variants: Mapping[str, str], names: Mapping[str, str], section: Section
) -> tuple[list[Dropped], list[Problem]]:
    """Drop the keys that are call variants of a name with its own key, or return a problem if their
    values differ.

    `variants` and `names` come from a `Match`: key -> name.
    """
    entries = section.by_key()
    keys = inverse(names)
    dropped, problems = [], []
    for key, name in variants.items():
        base = keys[name]
        if same_values(entries[key], entries[base]):
            dropped.append(_dropped_variant(section, key, base))
        else:
            problems.append(_other_value(key, base))
    return dropped, problems


def _dropped_variant(section: Section, key: str, base: str) -> Dropped:
    return Dropped(section.path, key, f"a call variant of {base}")


def _other_value(key: str, base: str) -> Problem:
    return Problem(f"a call variant of {base} with another value", key)


def without_variants(
    outputs: Sequence[Output], first: Mapping[str, str], section: Section
) -> tuple[list[Output], list[Dropped], list[Problem]]:
    """Return the outputs that are not call variants of others, the dropped variants, and a problem
    for each variant with another value.

    `first`: FQN -> first FQN of the same tensor; so the model confirms that two names are one.
    """
    output_of = by_key(outputs)
    entries = section.by_key()
    kept, dropped, problems = [], [], []
    for output in outputs:
        base = _confirmed_base(output.key, output_of, first)
        if base is None:
            kept.append(output)
            continue
        source, base_source = output.source, output_of[base].source
        is_same = source == base_source
        if not is_same and isinstance(source, Ref) and isinstance(base_source, Ref):
            is_same = same_values(entries[source.key], entries[base_source.key])
        if not is_same:
            problems.append(_other_value(output.key, base))
        # with the source of its base it is only a second name: nothing of the file is dropped
        elif isinstance(source, Ref) and source != base_source:
            dropped.append(_dropped_variant(section, source.key, base))
    return kept, dropped, problems


def with_variants(outputs: Sequence[Output], first: Mapping[str, str]) -> list[Output]:
    """Return `outputs` with every call variant that the model has, next to its base."""
    output_of = by_key(outputs)
    variants: defaultdict[str, list[str]] = defaultdict(list)
    for name in first:
        base = _confirmed_base(name, output_of, first)
        if base is not None and name not in output_of:
            variants[base].append(name)
    result = []
    for output in outputs:
        result.append(output)
        for name in variants[output.key]:
            result.append(replace(output, key=name))
    return result


def _confirmed_base(name: str, names: Collection[str], first: Mapping[str, str]) -> str | None:
    """Return the first base name of `name` that is one of `names` and of the same tensor."""
    for base in base_names(name):
        if base in names and first.get(base, base) == first.get(name, name):
            return base
    return None


# One model

# of PEFT: removed where the keys show a wrapper
_BY_EVIDENCE = ("base_model", "base_layer", "original_module")
WRAPPER = re.compile("|".join(map(re.escape, SEGMENTS)))  # in every key with a wrapper's segment
# in every key with a wrapper's segment, and in every call variant
_MARKS = (*SEGMENTS, "@")
_MOST_SEGMENTS = 8  # a key with more segments that look like wrappers is not searched through


@dataclass(frozen=True, slots=True)
class Match:
    """`names`: key -> name, for every key that matched. `wrapped`: how often each wrapper segment
    was removed.

    `variants`: key -> name, for keys that by their name are call variants (``foo@1.w``) of a name
    that has its own key; who uses them compares the values.
    """

    names: Mapping[str, str]
    unmatched: tuple[str, ...]
    missing: tuple[str, ...]
    wrapped: Mapping[str, int]
    problems: tuple[Problem, ...] = ()
    variants: Mapping[str, str] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether every key is a name and every name has its key."""
        return not (self.unmatched or self.missing or self.problems)

    @property
    def score(self) -> tuple[bool, int]:
        """For comparing two readings of the same keys: complete ones first, then the one with fewer
        faults.
        """
        return self.complete, -len(self.unmatched) - len(self.missing) - len(self.problems)


def match(keys: Sequence[str], names: Mapping[str, str], optional: Iterable[str] = ()) -> Match:
    """Match `keys` with the model's names; `names` maps each name to its canonical name.

    `optional` names may be absent (aliases, non-persistent buffers). If keys remain, and all keys
    together are the names inside of wrappers around the whole model, these wrappers are removed.
    """
    outside = _match_each(keys, names, optional)
    root = () if outside.complete else infer(keys).root
    if not root:
        return outside
    inner = {key: strip(key, root) for key in keys}
    inside = _match_each(list(inner.values()), names, optional, may_be_part=False)
    if not inside.complete or len(set(inner.values())) < len(keys):
        return outside
    wrapped = Counter(inside.wrapped)
    for path in root:
        _, _, segment = path.rpartition(".")
        wrapped[segment] += len(keys)
    return replace(
        inside,
        names=_through(inner, inside.names),
        wrapped=wrapped,
        variants=_through(inner, inside.variants),
    )


def _through(inner: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    """Return the names of the keys by the names of their inner keys."""
    return {key: names[name] for key, name in inner.items() if name in names}


def _match_each(
    keys: Sequence[str], names: Mapping[str, str], optional: Iterable[str], may_be_part: bool = True
) -> Match:
    """Match key by key. With `may_be_part` all keys may be below one attribute, which holds the
    model.
    """
    spellings = _spellings(names)
    spare = set(optional)
    prefix = ""
    if may_be_part and not spellings.keys() >= set(keys):
        required = [name for name in names if name not in spare]
        prefix = _prefix_of_all(required, keys) or common_prefix(keys, spellings)
    # one search is much faster than a search of each key, and most have no wrapper
    text = "\n".join(keys)
    paths: Collection[str] = ()
    if any(part in text for part in _BY_EVIDENCE):
        paths = recognize(keys)
    may_be_wrapped = bool(prefix or WRAPPER.search(text))
    matched: dict[str, str] = {}
    wrapped: Counter[str] = Counter()
    problems: list[Problem] = []
    rest: list[str] = []  # keys that match no name in any spelling
    for key in keys:
        if key in spellings:
            matched[key] = spellings[key]
            continue
        readings = _unwrapped(key, prefix, spellings) if may_be_wrapped else []
        if paths and not readings:
            readings = _without_paths(key, paths, spellings)
        targets = {spellings[reading.name] for reading in readings}
        if not targets:
            rest.append(key)
        elif len(targets) == 1:
            matched[key] = targets.pop()
            wrapped.update(readings[0].segments)
        else:
            problems.append(Problem(f"could be {' or '.join(sorted(targets))}", key))
    first_variants, variants = _variants(rest, set(matched.values()), prefix, spellings)
    matched.update(first_variants)
    present = spare.union(matched.values())
    return Match(
        matched,
        tuple(key for key in rest if key not in first_variants and key not in variants),
        tuple(name for name in names if name not in present),
        dict(wrapped),
        (*problems, *_several_keys(matched)),
        variants,
    )


def _several_keys(matched: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a problem for each name that several keys match."""
    by_name: defaultdict[str, list[str]] = defaultdict(list)
    for key, name in matched.items():
        by_name[name].append(key)
    for name, keys in by_name.items():
        if len(keys) > 1:
            yield Problem(f"several keys match this name: {', '.join(keys)}", name)


def _spellings(names: Mapping[str, str]) -> dict[str, str]:
    """Return each name, and each canonical name that only one name has, with the name it means."""
    count = Counter(names.values())
    spellings = {canonical: name for name, canonical in names.items() if count[canonical] == 1}
    spellings.update(zip(names, names))
    return spellings


def _variants(
    keys: Iterable[str], reached: Collection[str], prefix: str, spellings: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return key -> name for the keys that are a call variant of a name: the first variant of each
    name that has no key, and all other variants. `reached` are the names with a key.
    """
    first_variants: dict[str, str] = {}
    variants: dict[str, str] = {}
    with_key = set(reached)
    for key in keys:
        target = _name_of_variant(key, prefix, spellings)
        if target is None:
            continue
        if target in with_key:
            variants[key] = target
        else:
            first_variants[key] = target
            with_key.add(target)
    return first_variants, variants


def _name_of_variant(key: str, prefix: str, spellings: Mapping[str, str]) -> str | None:
    """Return the name that the key is a call variant of, if it is one of exactly one name."""
    for base in base_names(key):
        if base in spellings:
            return spellings[base]
        readings = _unwrapped(base, prefix, spellings)
        targets = {spellings[reading.name] for reading in readings}
        if len(targets) == 1:
            return targets.pop()
    return None


class _Unwrapped(NamedTuple):
    """What a key becomes without some segments, and these segments."""

    name: str
    segments: tuple[str, ...]


def _unwrapped(key: str, prefix: str, spellings: Collection[str]) -> list[_Unwrapped]:
    """Return the names that the key becomes without wrapper segments, as few as possible, and these
    segments.
    """
    if not WRAPPER.search(key):
        name = key.removeprefix(f"{prefix}.") if prefix else key
        return [_Unwrapped(name, (prefix,))] if name != key and name in spellings else []
    segments = key.split(".")
    places = [i for i, segment in enumerate(segments[:-1]) if segment in SEGMENTS]
    if segments[0] == prefix and 0 not in places and len(segments) > 1:
        places.insert(0, 0)
    if len(places) > _MOST_SEGMENTS:
        return []
    for count in range(1, len(places) + 1):
        readings = []
        for chosen in combinations(places, count):
            kept = segments.copy()
            removed = [kept.pop(place) for place in reversed(chosen)]
            name = ".".join(kept)
            if name in spellings:
                readings.append(_Unwrapped(name, tuple(reversed(removed))))
        if readings:
            return readings
    return []


def _without_paths(
    key: str, paths: Collection[str], spellings: Collection[str]
) -> list[_Unwrapped]:
    """Return what `_unwrapped` returns, if the keys together show the wrappers at these paths."""
    name = strip(key, paths)
    if name not in spellings:
        return []
    wrappers = []
    path = ""
    for segment in key.split("."):
        path = dotted(path, segment)
        if path in paths:
            wrappers.append(segment)
    return [_Unwrapped(name, tuple(wrappers))]


def common_prefix(keys: Sequence[str], names: Iterable[str]) -> str:
    """Return a first segment that every key has and no name begins with: an attribute that holds
    the whole model.
    """
    heads = {key.partition(".")[0] for key in keys}
    if len(heads) != 1 or not heads.isdisjoint(keys):
        return ""
    if any(name.partition(".")[0] in heads for name in names):
        return ""
    return heads.pop()


def _prefix_of_all(names: Sequence[str], keys: Sequence[str]) -> str:
    """Return the only prefix below which the keys, without segments of wrappers, have all of the
    names.

    names  enc.w, enc.b        keys  student.enc.w, student.enc.b, teacher.w  ─▶  student
    """
    inner = set(map(_without_wrappers, keys))
    if not names or len(names) > len(inner) or not inner.isdisjoint(names):
        return ""
    longest = max(names, key=len)
    prefixes_with_all = []
    for key in inner:
        if key.endswith(f".{longest}"):
            prefix = key[: -len(longest) - 1]
            if all(f"{prefix}.{name}" in inner for name in names):
                prefixes_with_all.append(prefix)
    return prefixes_with_all[0] if len(prefixes_with_all) == 1 else ""


def _without_wrappers(key: str) -> str:
    """Return the key without any segment that is a wrapper's in every model."""
    if not WRAPPER.search(key):
        return key
    return ".".join(segment for segment in key.split(".") if segment not in SEGMENTS)


def prefixes(keys: Collection[str], names: Collection[str]) -> list[str]:
    """Return the dotted prefixes below which the keys have the most of the names, if that is more
    than half of them.
    """
    count: Counter[str] = Counter()
    heads = {name.partition(".")[0] for name in names}
    for key in keys:
        start = 0
        for segment in key.split("."):
            if segment in heads and key[start:] in names:
                count[key[:start].removesuffix(".")] += 1
            start += len(segment) + 1
    most = max(count.values(), default=0)
    if 2 * most <= len(names):
        return []
    return sorted(prefix for prefix, hits in count.items() if hits == most)


# Two checkpoints


def align(left: Collection[str], right: Collection[str]) -> dict[str, str]:
    """Return left key -> right key: equal keys, and keys that differ only in wrapper segments, in
    one way.
    """
    lefts, rights = set(left), set(right)
    only_left = [key for key in left if key not in rights]
    only_right = [key for key in right if key not in lefts]
    paths = (recognize(left), recognize(right))
    renamed = pair_different_keys(paths, only_left, only_right)
    pairs = {}
    for key in left:
        if key in renamed:
            pairs[key] = renamed[key]
        elif key in rights:
            pairs[key] = key
    return pairs


def pair_different_keys(
    wrapper_paths: tuple[Collection[str], Collection[str]],
    only_left: Sequence[str],
    only_right: Sequence[str],
) -> dict[str, str]:
    """Return left key -> right key for keys of one side only, in the order of the left.

    `wrapper_paths` are the wrappers that all keys of each side show.
    """
    if not only_left or not only_right:
        return {}
    pairs: dict[str, str] = {}
    left_paths, right_paths = wrapper_paths
    if left_paths or right_paths:
        pairs = _pair_by_canonical_name(
            stripped(only_left, left_paths), stripped(only_right, right_paths)
        )
    paired_rights = set(pairs.values())
    open_left = [key for key in only_left if key not in pairs]
    open_right = [key for key in only_right if key not in paired_rights]
    pairs.update(_pair_without_segments(open_left, open_right))
    return selected(pairs, only_left)


def _pair_by_canonical_name(lefts: Mapping[str, str], rights: Mapping[str, str]) -> dict[str, str]:
    """Pair keys with the same canonical name, if no other key of either side has it; the arguments
    map keys to canonical names.
    """
    left_count, right_count = Counter(lefts.values()), Counter(rights.values())
    right_by_name = inverse(rights)
    pairs = {}
    for key, name in lefts.items():
        if left_count[name] == right_count[name] == 1:
            pairs[key] = right_by_name[name]
    return pairs


def _pair_without_segments(lefts: Sequence[str], rights: Sequence[str]) -> dict[str, str]:
    """Pair keys of one side that, without wrapper segments or a prefix of all keys, are keys of the
    other side.
    """
    right_names = dict(zip(rights, rights))
    pair_below = _pair_below_prefix
    if may_mention((*lefts, *rights), _MARKS):
        pair_below = _pair_by_match
        right_names = {key: _without_wrappers(key) for key in rights}
    pairs = list(pair_below(lefts, right_names).items())
    paired_lefts = {left for left, _ in pairs}
    paired_rights = {right for _, right in pairs}
    # with the segments of both removed, only rights below a prefix are left to find
    left_names = {key: key for key in lefts if key not in paired_lefts}
    open_rights = [key for key in rights if key not in paired_rights]
    for right, left in pair_below(open_rights, left_names).items():
        pairs.append((left, right))
    left_count = Counter(left for left, _ in pairs)
    right_count = Counter(right for _, right in pairs)
    unambiguous = {}
    for left, right in pairs:
        if left_count[left] == right_count[right] == 1:
            unambiguous[left] = right
    return unambiguous


def _pair_by_match(keys: Sequence[str], names: Mapping[str, str]) -> Mapping[str, str]:
    """Pair keys with names whose segments of wrappers they lack, or that lack theirs."""
    return match(keys, names).names


def _pair_below_prefix(keys: Sequence[str], names: Mapping[str, str]) -> Mapping[str, str]:
    """Pair keys with the names that they are below a first segment which all of them have."""
    prefix = common_prefix(keys, names)
    pairs: dict[str, str] = {}
    for key in keys if prefix else ():
        name = key[len(prefix) + 1 :]
        if name in names:
            pairs[key] = name
    return pairs


# The names of a model


class Likeness(NamedTuple):
    """The dtype and shape of a tensor of the model. The shape of an opaque value may be unknown."""

    dtype: str
    shape: Shape | None


@dataclass(frozen=True)
class NameTables:
    """Tables of one model's names; each is computed when it is first needed."""

    names: Names

    @cached_property
    def tensors(self) -> dict[str, RuntimeTensor]:
        """FQN -> the tensor."""
        return {tensor.fqn: tensor for tensor in self.names.runtime}

    @cached_property
    def first(self) -> dict[str, str]:
        """FQN -> the first FQN of the same tensor."""
        return {tensor.fqn: tensor.first_name for tensor in self.names.runtime}

    @cached_property
    def groups(self) -> dict[str, list[str]]:
        """First FQN -> every FQN of that tensor, in runtime order."""
        groups: defaultdict[str, list[str]] = defaultdict(list)
        for fqn, first in self.first.items():
            groups[first].append(fqn)
        return dict(groups)

    @cached_property
    def saved(self) -> dict[str, Expression | None]:
        """Serialized key -> its expression over runtime tensors."""
        return sources_of(self.names.serialized)

    @cached_property
    def hooks(self) -> dict[str, Hook | None]:
        """Serialized key -> the hook that renames or computes it."""
        return {s.key: s.hook for s in self.names.serialized}

    @cached_property
    def keys_of(self) -> dict[str, list[str]]:
        """First FQN -> the serialized keys that are this tensor, perhaps renamed."""
        keys: defaultdict[str, list[str]] = defaultdict(list)
        for key, source in self.saved.items():
            if isinstance(source, Ref):
                keys[source.key].append(key)
        return dict(keys)

    @cached_property
    def fqn_of(self) -> dict[str, str]:
        """Serialized key -> FQN, for keys that are a runtime tensor, perhaps renamed; each FQN has
        one key at most.

        If a tensor has several FQNs and keys, equal names belong together, and the others in order.
        """
        fqn_of: dict[str, str] = {}
        for first, fqns in self.groups.items():
            keys = self.keys_of.get(first, ())
            same = {fqn: fqn for fqn in fqns if fqn in keys}
            other_fqns = [fqn for fqn in fqns if fqn not in same]
            other_keys = [key for key in keys if key not in same]
            fqn_of.update(same)
            fqn_of.update(zip(other_keys, other_fqns))
        return fqn_of

    @cached_property
    def forms_agree(self) -> bool:
        """Whether a key that is both a serialized key and an FQN has the same value as both."""
        for key, source in self.saved.items():
            if source is not None and key in self.first and source != Ref(self.first[key]):
                return False
        return True

    def runtime_values(self, present: Iterable[str]) -> dict[str, Expression]:
        """Return FQN -> expression over the serialized keys in `present`, without FQNs that need
        other keys.

        A key that saving only renames is that tensor; any other tensor is what the model's loading
        makes of the keys.
        """
        keys = set(present)
        values: dict[str, Expression] = {}
        for key, fqn in self.fqn_of.items():
            if key in keys:
                values[fqn] = Ref(key)
        reached = {self.first[fqn] for fqn in values}  # first FQNs of tensors with a value
        for loaded in self.names.load:
            first = self.first.get(loaded.fqn)  # loading may create tensors
            if first is None or first in reached or loaded.source is None:
                continue
            if keys.issuperset(ex.refs(loaded.source)):
                values[loaded.fqn] = loaded.source
                reached.add(first)
        return values

    # The arguments of `match` for each form: names, and names that may be absent

    @cached_property
    def serialized_names(self) -> dict[str, str]:
        """Serialized key -> its canonical name, without wrappers."""
        paths = stripped_paths(self._canonical().items())
        return {key: strip(key, paths) for key in (*self.saved, *self.names.extra_state)}

    def _canonical(self) -> dict[str, str]:
        return {tensor.fqn: tensor.canonical for tensor in self.names.runtime}

    @property
    def keys_without_tensor(self) -> list[str]:
        """Serialized keys that are computed from no runtime tensor."""
        return [key for key, source in self.saved.items() if source is None]

    @cached_property
    def runtime_names(self) -> dict[str, str]:
        """FQN -> its canonical name; also keys that are not runtime tensors, as they are."""
        canonical = self._canonical()
        for key in (*self.keys_without_tensor, *self.names.extra_state):
            canonical.setdefault(key, key)
        return canonical

    @cached_property
    def spare_keys(self) -> list[str]:
        """Serialized keys that may be absent: second names of a tensor, and everything that is not
        a tensor.
        """
        seen: set[Expression] = set()
        seconds = []
        for key, source in self.saved.items():
            if source is None or ex.is_opaque(source):  # opaque values may differ
                continue
            if source in seen:
                seconds.append(key)
            seen.add(source)
        return [*seconds, *self.names.extra_state]

    @cached_property
    def spare_fqns(self) -> list[str]:
        """FQNs that may be absent: second names, and everything that ``state_dict()`` does not hold
        as a tensor.
        """
        spare = [*self.keys_without_tensor]
        for tensor in self.names.runtime:
            if tensor.alias_of is not None or not tensor.persistent:
                spare.append(tensor.fqn)
        return [*spare, *self.names.extra_state, *self.names.not_serialized]

    @cached_property
    def serialized_likeness(self) -> Mapping[str, Likeness]:
        """Serialized key -> dtype and shape."""
        return {saved.key: Likeness(saved.dtype, saved.shape) for saved in self.names.serialized}

    @cached_property
    def runtime_likeness(self) -> Mapping[str, Likeness]:
        """FQN -> dtype and shape."""
        return {tensor.fqn: Likeness(tensor.dtype, tensor.shape) for tensor in self.names.runtime}

    # The same for ``serialized`` or ``runtime`` names

    def canonical_names(self, form: str) -> dict[str, str]:
        """Return name -> canonical name."""
        return self.serialized_names if form == SERIALIZED else self.runtime_names

    def likeness(self, name: str, form: str) -> Likeness | None:
        """Return dtype and shape of a tensor of the model; None if the name is not one."""
        table = self.serialized_likeness if form == SERIALIZED else self.runtime_likeness
        return table.get(name)

    def shape_of(self, name: str, form: str) -> Shape | None:
        """Return the shape of a tensor of the model; None if it is not known."""
        likeness = self.likeness(name, form)
        return None if likeness is None else likeness.shape
