"""Match the keys of a checkpoint with a model's names."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from itertools import combinations

from ckpttool.core import expression as ex
from ckpttool.core.checkpoint import Section
from ckpttool.core.errors import Problem
from ckpttool.core.expression import Expression, Ref
from ckpttool.core.names import Hook, Names, RuntimeTensor
from ckpttool.core.plan import Dropped, Output
from ckpttool.core.values import dataclass
from ckpttool.evaluate.compare import same_values
from ckpttool.naming.wrappers import SEGMENTS, infer, recognise, strip, stripped_paths

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
    parts = fqn.split(".")
    places = [i for i, part in enumerate(parts[:-1]) if split_call(part)[1]][:_MOST_CALLS]
    for count in range(len(places), 0, -1):
        for taken in combinations(places, count):
            yield ".".join(
                split_call(part)[0] if i in taken else part for i, part in enumerate(parts)
            )


def base_name(fqn: str, known: Collection[str]) -> str | None:
    """Return the name among `known` that `fqn` may be a call variant of, or None."""
    return next((name for name in base_names(fqn) if name in known), None)


def aliases(section: Section) -> dict[str, str]:
    """Return key -> first key of the same tensor: shared storage, and call variants with the bytes
    of their base.
    """
    found = section.aliases()
    variants = [
        entry.key for entry in section.tensors if "@" in entry.key and entry.key not in found
    ]
    entries = {entry.key: entry for entry in section.tensors} if variants else {}
    for key in variants:
        base = base_name(key, entries)
        if base is not None and same_values(entries[key], entries[base]):
            found[key] = found.get(base, base)
    return found


def drop_variants(
    variants: Mapping[str, str], names: Mapping[str, str], section: Section
) -> tuple[list[Dropped], list[Problem]]:
    """Drop the keys that are call variants of a name with its own key, or return a problem if their
    values differ.

    `variants` and `names` come from a `Match`: key -> name.
    """
    entries, keys = section.by_key(), {name: key for key, name in names.items()}
    dropped, problems = [], []
    for key, name in variants.items():
        base = keys[name]
        if same_values(entries[key], entries[base]):
            dropped.append(Dropped(section.path, key, f"a call variant of {base}"))
        else:
            problems.append(Problem(f"a call variant of {base} with another value", key))
    return dropped, problems


def without_variants(
    outputs: Sequence[Output], first: Mapping[str, str], section: Section
) -> tuple[list[Output], list[Dropped], list[Problem]]:
    """Return `outputs` without call variants of others among them; a variant with another value is
    a problem.

    `first`: FQN -> first FQN of the same tensor; so the model confirms that two names are one.
    """
    by_key = {output.key: output for output in outputs}
    bases = {
        key: base for key in by_key if (base := _confirmed_base(key, by_key, first)) is not None
    }
    entries = section.by_key()
    dropped, problems = [], []
    for key, base in bases.items():
        one, other = by_key[key].source, by_key[base].source
        if isinstance(one, Ref) and isinstance(other, Ref):
            is_same = same_values(entries[one.key], entries[other.key])
        else:
            is_same = one == other
        if not is_same:
            problems.append(Problem(f"a call variant of {base} with another value", key))
        elif isinstance(one, Ref) and one != other:
            dropped.append(Dropped(section.path, one.key, f"a call variant of {base}"))
    return [output for output in outputs if output.key not in bases], dropped, problems


def with_variants(outputs: Sequence[Output], first: Mapping[str, str]) -> list[Output]:
    """Return `outputs` with every call variant that the model has, next to its base."""
    by_key = {output.key: output for output in outputs}
    added: defaultdict[str, list[Output]] = defaultdict(list)
    for name in first:
        base = _confirmed_base(name, by_key, first) if name not in by_key else None
        if base is not None:
            added[base].append(replace(by_key[base], key=name))
    return [one for output in outputs for one in (output, *added[output.key])]


def _confirmed_base(name: str, known: Collection[str], first: Mapping[str, str]) -> str | None:
    base = base_name(name, known)
    return base if base is not None and first.get(base, base) == first.get(name, name) else None


# of PEFT: removed where the keys show a wrapper
_BY_EVIDENCE = ("base_model", "base_layer", "original_module")
WRAPPER = re.compile("|".join(map(re.escape, SEGMENTS)))  # in every key with a wrapper's segment
# in every key with a wrapper's segment, and in every call variant
_MARK = re.compile(f"{WRAPPER.pattern}|@")
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
    found = _match_each(keys, names, optional)
    root = () if found.complete else infer(keys).root
    if not root:
        return found
    inner = {key: strip(key, root) for key in keys}
    inside = _match_each(list(inner.values()), names, optional, may_be_part=False)
    if not inside.complete or len(set(inner.values())) < len(keys):
        return found
    return replace(
        inside,
        names={key: inside.names[name] for key, name in inner.items() if name in inside.names},
        wrapped=Counter(inside.wrapped)
        + Counter(path.rpartition(".")[2] for path in root for _ in keys),
        variants={
            key: inside.variants[name] for key, name in inner.items() if name in inside.variants
        },
    )


def _match_each(
    keys: Sequence[str], names: Mapping[str, str], optional: Iterable[str], may_be_part: bool = True
) -> Match:
    """Match key by key. With `may_be_part` all keys may be below one attribute, which holds the
    model.
    """
    count = Counter(names.values())
    known = {canonical: name for name, canonical in names.items() if count[canonical] == 1}
    known.update((name, name) for name in names)
    spare = set(optional)
    prefix = ""
    if may_be_part and not known.keys() >= set(keys):
        prefix = _prefix_of_all(
            [name for name in names if name not in spare], keys
        ) or common_prefix(keys, known)
    # one search is much faster than a search of each key, and most have no wrapper
    text = "\n".join(keys)
    paths = recognise(keys) if any(part in text for part in _BY_EVIDENCE) else frozenset[str]()
    may_be_wrapped = bool(prefix or WRAPPER.search(text))
    found: dict[str, str] = {}
    wrapped: Counter[str] = Counter()
    problems: list[Problem] = []
    for key in keys:
        if key in known:
            found[key] = known[key]
            continue
        hits = _unwrapped(key, prefix, known) if may_be_wrapped else []
        if paths and not hits and (name := strip(key, paths)) in known:
            parts = key.split(".")
            at = (depth for depth in range(len(parts)) if ".".join(parts[: depth + 1]) in paths)
            hits = [(name, tuple(parts[depth] for depth in at))]
        targets = {known[name] for name, _ in hits}
        if len(targets) > 1:
            problems.append(Problem(f"could be {' or '.join(sorted(targets))}", key))
        elif targets:
            found[key] = targets.pop()
            wrapped.update(hits[0][1])
    ambiguous = {problem.key for problem in problems}
    variants = _variants([key for key in keys if key not in found], found, prefix, known)
    by_name: defaultdict[str, list[str]] = defaultdict(list)
    for key, name in found.items():
        by_name[name].append(key)
    for name, same in by_name.items():
        if len(same) > 1:
            problems.append(Problem(f"{' and '.join(same)} are both this name", name))
    return Match(
        found,
        tuple(
            key for key in keys if key not in found and key not in variants and key not in ambiguous
        ),
        tuple(name for name in names if name not in by_name and name not in spare),
        dict(wrapped),
        tuple(problems),
        variants,
    )


def _variants(
    keys: Iterable[str], found: dict[str, str], prefix: str, known: Mapping[str, str]
) -> dict[str, str]:
    """Return the keys that are a call variant of a name. If the name has no key, add the first
    variant to `found`.
    """
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


def _unwrapped(
    key: str, prefix: str, known: Mapping[str, str]
) -> list[tuple[str, tuple[str, ...]]]:
    """Return the names that the key becomes without wrapper segments, as few as possible, and these
    segments.
    """
    if not WRAPPER.search(key):
        name = key.removeprefix(f"{prefix}.") if prefix else key
        return [(name, (prefix,))] if name != key and name in known else []
    parts = key.split(".")
    places = [
        i for i, part in enumerate(parts[:-1]) if part in SEGMENTS or (i == 0 and part == prefix)
    ]
    for count in range(1, len(places) + 1) if len(places) <= _MOST_SEGMENTS else ():
        hits = []
        for taken in combinations(places, count):
            name = ".".join(part for i, part in enumerate(parts) if i not in taken)
            if name in known:
                hits.append((name, tuple(parts[i] for i in taken)))
        if hits:
            return hits
    return []


def common_prefix(keys: Sequence[str], known: Iterable[str]) -> str:
    """Return a first segment that every key has and no name begins with: an attribute that holds
    the whole model.
    """
    heads = {key.partition(".")[0] for key in keys}
    if (
        len(heads) != 1
        or not heads.isdisjoint(keys)
        or any(name.partition(".")[0] in heads for name in known)
    ):
        return ""
    return heads.pop()


def _prefix_of_all(names: Sequence[str], keys: Sequence[str]) -> str:
    """Return the only prefix below which the keys, without segments of wrappers, have all of the
    names.
    """
    inner = {key if not WRAPPER.search(key) else ".".join(_own(key.split("."))) for key in keys}
    if not names or len(names) > len(inner) or not inner.isdisjoint(names):
        return ""
    longest = max(names, key=len)
    places = [key[: -len(longest) - 1] for key in inner if key.endswith(f".{longest}")]
    found = [place for place in places if all(f"{place}.{name}" in inner for name in names)]
    return found[0] if len(found) == 1 else ""


def _own(parts: Iterable[str]) -> list[str]:
    return [part for part in parts if part not in SEGMENTS]


def prefixes(keys: Collection[str], names: Collection[str]) -> list[str]:
    """Return the dotted prefixes below which the keys have the most of the names, if that is more
    than half of them.
    """
    count: Counter[str] = Counter()
    depths = {name.count(".") for name in names}
    for key in keys:
        dots = key.count(".")
        for depth in depths:
            if depth <= dots and (name := key.split(".", dots - depth)[-1]) in names:
                count[key[: max(len(key) - len(name) - 1, 0)]] += 1
    most = max(count.values(), default=0)
    return (
        sorted(prefix for prefix, hits in count.items() if hits == most)
        if 2 * most > len(names)
        else []
    )


# Two checkpoints


def align(left: Collection[str], right: Collection[str]) -> dict[str, str]:
    """Return left key -> right key: equal keys, and keys that differ only in wrapper segments, in
    one way.
    """
    lefts, rights = set(left), set(right)
    found = unlike(
        left,
        right,
        [key for key in left if key not in rights],
        [key for key in right if key not in lefts],
    )
    return {key: found.get(key, key) for key in left if key in found or key in rights}


def unlike(
    left: Collection[str],
    right: Collection[str],
    only_left: Sequence[str],
    only_right: Sequence[str],
) -> dict[str, str]:
    """Return left key -> right key for keys of one side only, in the order of the left."""
    if not only_left or not only_right:
        return {}
    order, found = only_left, dict[str, str]()
    paths = recognise(left), recognise(right)
    if any(paths):  # canonical names, as each checkpoint shows them
        lefts, rights = (
            {key: strip(key, own) or key for key in keys}
            for keys, own in zip((only_left, only_right), paths)
        )
        count, counts = Counter(lefts.values()), Counter(rights.values())
        by_name = {name: key for key, name in rights.items()}
        found = {
            key: by_name[name] for key, name in lefts.items() if count[name] == counts[name] == 1
        }
    taken = set(found.values())
    only_left = [key for key in only_left if key not in found]
    only_right = [key for key in only_right if key not in taken]
    # Without wrapper segments a key of one side is a key of the other; if there are none, one side
    # may have a prefix.
    canonical, pair = {key: key for key in only_right}, _below_prefix
    if _MARK.search("\n".join((*only_left, *only_right))):
        canonical = {key: ".".join(_own(key.split("."))) for key in only_right}
        pair = _match_names
    pairs = [*pair(only_left, canonical).items()]
    done, taken = {key for key, _ in pairs}, {other for _, other in pairs}
    rest = {key: key for key in only_left if key not in done}
    pairs += [
        (key, other)
        for other, key in pair([key for key in only_right if key not in taken], rest).items()
    ]
    count, counts = Counter(key for key, _ in pairs), Counter(other for _, other in pairs)
    found.update({key: other for key, other in pairs if count[key] == counts[other] == 1})
    return {key: found[key] for key in order if key in found}


def _match_names(keys: Sequence[str], names: Mapping[str, str]) -> Mapping[str, str]:
    return match(keys, names).names


def _below_prefix(keys: Sequence[str], names: Mapping[str, str]) -> Mapping[str, str]:
    prefix = common_prefix(keys, names)
    inner = {key: key[len(prefix) + 1 :] for key in keys} if prefix else {}
    return {key: name for key, name in inner.items() if name in names}


# The names of a model

Likeness = tuple[str, "tuple[int, ...] | None"]  # dtype and shape


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
        """Serialized key -> its expression over runtime tensors."""
        return {s.key: s.source for s in self.names.serialized}

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
        found: dict[str, str] = {}
        for first, fqns in self.groups.items():
            keys = self.keys_of.get(first, ())
            pairs = {fqn: fqn for fqn in fqns if fqn in keys}
            pairs.update(
                zip(
                    [fqn for fqn in fqns if fqn not in pairs],
                    [key for key in keys if key not in pairs],
                )
            )
            found.update((key, fqn) for fqn, key in pairs.items())
        return found

    @cached_property
    def forms_agree(self) -> bool:
        """Whether a key that is both a serialized key and an FQN has the same value as both."""
        saved = (
            (key, source)
            for key, source in self.saved.items()
            if source is not None and key in self.first
        )
        return all(source == Ref(self.first[key]) for key, source in saved)

    def runtime_values(self, present: Iterable[str]) -> dict[str, Expression]:
        """Return FQN -> expression over the serialized keys in `present`, without FQNs that need
        other keys.

        A key that saving only renames is that tensor; any other tensor is what the model's loading
        makes of the keys.
        """
        keys = set(present)
        values: dict[str, Expression] = {
            fqn: Ref(key) for key, fqn in self.fqn_of.items() if key in keys
        }
        known = {self.first[fqn] for fqn in values}
        for loaded in self.names.load:
            first = self.first.get(loaded.fqn)  # loading may create tensors
            if (
                first is None
                or first in known
                or loaded.source is None
                or not keys.issuperset(ex.refs(loaded.source))
            ):
                continue
            values[loaded.fqn] = loaded.source
            known.add(first)
        return values

    # The arguments of `match` for each form: names, and names that may be absent

    @cached_property
    def serialized_names(self) -> dict[str, str]:
        """Serialized key -> its canonical name, without wrappers."""
        paths = stripped_paths((tensor.fqn, tensor.canonical) for tensor in self.names.runtime)
        return {key: strip(key, paths) for key in (*self.saved, *self.names.extra_state)}

    @cached_property
    def runtime_names(self) -> dict[str, str]:
        """FQN -> its canonical name; also keys that are not runtime tensors, as they are."""
        found = {tensor.fqn: tensor.canonical for tensor in self.names.runtime}
        for key in (
            *(key for key, source in self.saved.items() if source is None),
            *self.names.extra_state,
        ):
            found.setdefault(key, key)
        return found

    @cached_property
    def spare_keys(self) -> list[str]:
        """Serialized keys that may be absent: second names of a tensor, and everything that is not
        a tensor.
        """
        seen, seconds = set[Expression](), []
        for key, source in self.saved.items():
            if source is not None and not ex.is_opaque(source):  # opaque values may differ
                seconds += [key] if source in seen else []
                seen.add(source)
        return [*seconds, *self.names.extra_state]

    @cached_property
    def spare_fqns(self) -> list[str]:
        """FQNs that may be absent: second names, and everything that ``state_dict()`` does not hold
        as a tensor.
        """
        spare = [t.fqn for t in self.names.runtime if t.alias_of is not None or not t.persistent]
        others = [key for key, source in self.saved.items() if source is None]
        return [*spare, *others, *self.names.extra_state, *self.names.not_serialized]

    @cached_property
    def serialized_likeness(self) -> Mapping[str, Likeness]:
        """Serialized key -> dtype and shape."""
        return {s.key: (s.dtype, s.shape) for s in self.names.serialized}

    @cached_property
    def runtime_likeness(self) -> Mapping[str, Likeness]:
        """FQN -> dtype and shape."""
        return {t.fqn: (t.dtype, t.shape) for t in self.names.runtime}
