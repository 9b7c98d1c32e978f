"""Compare a checkpoint with the model that loads it."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.core import expression as ex
from ckpttool.core.checkpoint import AnyEntry, Entries, ExtraEntry, Section, TensorEntry
from ckpttool.core.expression import Expression, Op, Ref
from ckpttool.core.names import RUNTIME, SERIALIZED, Hook, Names, SerializedKey
from ckpttool.core.tables import by_key, inverse, sources_of
from ckpttool.core.text import is_flat
from ckpttool.diffing.causes import Cause, Code, segment_change, wrapper_cause
from ckpttool.diffing.names import computed_cause
from ckpttool.diffing.one_model import components, other_keys
from ckpttool.diffing.pairs import shape_or_dtype, under_another_name
from ckpttool.diffing.result import Entry, only_left, only_right
from ckpttool.evaluate.compare import same_values
from ckpttool.naming.convert import read_keys
from ckpttool.naming.match import NameTables, aliases_with_variants, base_names

if TYPE_CHECKING:
    from ckpttool.tracing.loading import Verdict


class Unpaired:
    """The keys that no entry names yet: `saved` of the checkpoint, and `expected` of the model
    (None for an extra state).
    """

    def __init__(self, saved: Entries, expected: dict[str, SerializedKey | None]) -> None:
        self.saved = {key: entry for key, entry in saved.items() if key not in expected}
        self.expected = {key: tensor for key, tensor in expected.items() if key not in saved}

    def take(self, saved: Iterable[str], expected: Iterable[str]) -> None:
        """Remove these keys: an entry names them."""
        for key in saved:
            del self.saved[key]
        for key in expected:
            del self.expected[key]


def compare_load(
    names: Names, section: Section, verdict: Verdict | None, by_pretrained: bool = False
) -> tuple[Entry, ...]:
    """Compare a checkpoint (left) with the serialized keys that the model loads (right).

    `verdict` is what torch says about loading it; without one (a names file) keys and shapes
    decide. `by_pretrained`: it is the answer of from_pretrained, which ignores some keys.
    """
    saved = dict(section.by_key())
    expected: dict[str, SerializedKey | None] = {**by_key(names.serialized)}
    for name in names.extra_state:
        expected.setdefault(name, None)
    if verdict is not None:
        verdict = replace(verdict, reads=_under_expected_keys(verdict.reads, section, expected))
    rejected = () if verdict is None else verdict.unexpected
    unknown = () if verdict is None else verdict.unknown
    entries: list[Entry] = []
    for key, tensor in expected.items():
        if key in saved and key in unknown and tensor is not None:
            entries.append(Entry("shape", (key,), (key,), Cause(Code.OBJECT_UNKNOWN)))
        elif key in saved:
            entries.append(_under_one_key(saved[key], tensor, key in rejected))
    unpaired = Unpaired(saved, expected)
    entries += _in_other_form(NameTables(names), section, unpaired)
    entries += _call_variants(names, section, unpaired)
    if verdict is not None:
        entries += _by_load_hook(names, verdict, unpaired)
    readers = _readers(verdict)
    entries += _only_in_file(unpaired.saved, names, verdict, readers, by_pretrained)
    entries += _only_in_model(unpaired.expected, names, saved, verdict)
    return tuple(_with_lost_values(entries, names, saved, verdict, readers))


def _under_expected_keys(
    reads: Mapping[str, Expression | None], section: Section, expected: Container[str]
) -> Mapping[str, Expression | None]:
    """Return what loading reads, a tensor with several names in the file under one that the model
    has: a recorded load knows tensors, and not which of its names was read.
    """
    first = aliases_with_variants(section)
    if not first:
        return reads
    names: dict[str, str] = {}
    for key in section.by_key():
        if key in expected:
            names.setdefault(first.get(key, key), key)

    def expected_key(key: Any) -> Expression:
        return Ref(names.get(first.get(key, key), key))

    renamed: dict[str, Expression | None] = {}
    for fqn, source in reads.items():
        renamed[fqn] = None if source is None else ex.substitute(source, expected_key)
    return renamed


def _under_one_key(entry: AnyEntry, expected: SerializedKey | None, rejected: bool) -> Entry:
    """Return the entry of a key that both have; loading may have `rejected` it."""
    key = (entry.key,)
    if rejected and expected is not None:
        is_named = entry.key.rpartition(".")[2] == "_extra_state"
        code = Code.NAMED_EXTRA_STATE if is_named else Code.NOT_READ_BACK
        return only_left(entry.key, Cause(code))
    if expected is None:
        return Entry("extra_state", key, key, Cause(Code.EXTRA_STATE))
    if isinstance(entry, ExtraEntry):
        return Entry("shape", key, key, Cause(Code.OBJECT))
    unlike = shape_or_dtype(entry, expected.dtype, expected.shape, key, key)
    return unlike or Entry("same", key, key)


def _only_in_model(
    keys: Iterable[str], names: Names, saved: Entries, verdict: Verdict | None
) -> Iterator[Entry]:
    """Yield an entry for each key that the file does not have; a tied one may be there under
    another name.
    """
    optional = Cause(Code.OPTIONAL) if verdict is not None and verdict.ok else None
    sources = sources_of(names.serialized)
    # runtime tensor -> the first key of it in the file
    present: dict[object, str] = {}
    for key, source in sources.items():
        if key in saved and isinstance(source, Ref):
            present.setdefault(source, key)
    for key in keys:
        other = present.get(sources.get(key))
        if other is None:
            yield only_right(key, Cause(Code.MISSING).and_also(optional))
        else:
            cause = Cause(Code.TIED).and_also(optional)
            yield only_right(key, cause, None, f"same as {other}")


# Keys that name a tensor in another way


def _in_other_form(tables: NameTables, section: Section, unpaired: Unpaired) -> list[Entry]:
    """Pair keys that name a tensor of the model in another form (wrapped, runtime)."""
    entries = []
    wrapped = read_keys(tables, section, SERIALIZED).match.names
    for key, name in wrapped.items():
        if key in unpaired.saved and name in unpaired.expected:
            entries.append(_renamed(key, name, wrapper_cause(key, name), unpaired))
    runtime = read_keys(tables, section, RUNTIME).match.names
    entries += _under_runtime_names(tables, runtime, unpaired)
    keys = inverse(runtime)
    return entries + _computed_from(tables, keys, unpaired)


def _under_runtime_names(
    tables: NameTables, runtime: Mapping[str, str], unpaired: Unpaired
) -> list[Entry]:
    """Pair keys that are runtime FQNs with the serialized keys of the same tensors."""
    entries = []
    for key, fqn in runtime.items():
        targets = tables.keys_of.get(tables.first.get(fqn, fqn), ())
        open_targets = [name for name in targets if name in unpaired.expected]
        if not open_targets or key not in unpaired.saved:
            continue
        target, hook = open_targets[0], None
        cause = wrapper_cause(key, fqn)
        if fqn != target:
            hook = tables.hooks.get(target)
            cause = Cause(Code.RUNTIME_KEY, (segment_change(fqn, target),)).and_also(cause)
        entries.append(_renamed(key, target, cause, unpaired, hook))
    return entries


def _renamed(
    key: str, target: str, cause: Cause | None, unpaired: Unpaired, hook: Hook | None = None
) -> Entry:
    """Return the entry of a tensor under another key than `target`, and remove both keys."""
    entry, expected = unpaired.saved[key], unpaired.expected[target]
    unpaired.take([key], [target])
    unlike = None
    if isinstance(entry, TensorEntry) and expected is not None:
        unlike = shape_or_dtype(entry, expected.dtype, expected.shape, (key,), (target,))
    return under_another_name(unlike or Entry("renamed", (key,), (target,)), cause, hook)


def _computed_from(tables: NameTables, keys: Mapping[str, str], unpaired: Unpaired) -> list[Entry]:
    """Pair serialized keys with the runtime tensors of the file that saving computes them from
    (`keys`: by FQN).
    """
    first_keys: dict[str, str] = {}
    for fqn, key in keys.items():
        if fqn in tables.first:
            first_keys.setdefault(tables.first[fqn], key)
    links: dict[str, list[str]] = {}
    for key in unpaired.expected:
        source = tables.saved.get(key)
        if isinstance(source, Op):
            links[key] = list(ex.refs(source))
    entries = []
    for targets, fqns in components(links):
        file_keys = [first_keys[fqn] for fqn in fqns if fqn in first_keys]
        lefts = [key for key in file_keys if key in unpaired.saved]
        source = tables.saved[targets[0]]
        if not lefts or source is None:
            continue
        cause = Cause(Code.RUNTIME_TENSORS).and_also(computed_cause(source))
        hook = tables.hooks[targets[0]]
        entries.append(Entry("transformed", tuple(lefts), tuple(targets), cause, hook))
        unpaired.take(lefts, targets)
    return entries


def _call_variants(names: Names, section: Section, unpaired: Unpaired) -> list[Entry]:
    """Return entries of an unflattened program's call variants of tensors that both have."""
    saved, first = section.by_key(), aliases_with_variants(section)
    sources = sources_of(names.serialized)
    cause = Cause(Code.CALL_VARIANT)
    entries = []
    for key in [*unpaired.saved]:
        if "@" in key and key in first and first[key] not in unpaired.saved:
            unpaired.take([key], [])
            entries.append(Entry("alias", (key,), (), cause, None, f"same as {first[key]}"))
    for key in [*unpaired.expected]:
        if sources.get(key) is None:
            continue
        for base in base_names(key):
            is_paired = base in saved and base not in unpaired.saved
            if is_paired and sources.get(base) == sources[key]:
                unpaired.take([], [key])
                entries.append(Entry("alias", (), (key,), cause, None, f"same as {base}"))
                break
    return entries


def _by_load_hook(names: Names, verdict: Verdict, unpaired: Unpaired) -> list[Entry]:
    """Pair keys that a load hook accepts with the keys that the model saves."""
    tied = _tied(names)
    links: dict[str, list[str]] = {}
    computed: set[str] = set()
    for loading in _loadings(names, verdict):
        others = other_keys(loading.expected, loading.source)
        for key in ex.refs(loading.expected):
            file_keys = loading.keys_read if others is None else [others[key]]
            lefts = [name for name in file_keys if name in unpaired.saved]
            targets = [name for name in tied.get(key, ()) if name in unpaired.expected]
            if not lefts:
                continue
            for name in targets:
                links.setdefault(name, []).extend(lefts)
            if others is None:
                computed.update(targets)
    entries = []
    for keys, lefts in components(links):
        is_whole = len(keys) == len(lefts) == 1 and computed.isdisjoint(keys)
        status = "renamed" if is_whole else "transformed"
        entries.append(Entry(status, tuple(lefts), tuple(keys), Cause(Code.LOAD_HOOK)))
        unpaired.take(lefts, keys)
    return entries


def _only_in_file(
    keys: Iterable[str],
    names: Names,
    verdict: Verdict | None,
    readers: Mapping[str, Sequence[str]],
    by_pretrained: bool,
) -> list[Entry]:
    """Return entries of keys that the model does not write: unexpected, unless its load hooks
    accept them.

    from_pretrained lists all unexpected keys: a key that it does not list is ignored, also if the
    load fails.
    """
    unexpected = set(keys if verdict is None else verdict.unexpected)
    not_saved = {tensor.fqn for tensor in names.runtime if not tensor.persistent}
    cause = Cause(Code.UNEXPECTED)
    entries = []
    for key in keys:
        if key in readers:
            target = f"goes to {', '.join(readers[key])}"
            entries.append(Entry("renamed", (key,), (), Cause(Code.LOAD_HOOK), None, target))
        elif key not in unexpected and by_pretrained:  # not a difference: others stop the load
            entries.append(only_left(key, Cause(Code.LOAD_HOOK_DROPS)))
        elif key not in unexpected and verdict is not None and verdict.ok:
            entries.append(only_left(key, cause.and_also(Cause(Code.LOAD_HOOK_DROPS))))
        elif is_flat(key):
            entries.append(only_left(key, Cause(Code.FLAT)))
        elif key in not_saved:
            entries.append(only_left(key, cause.and_also(Cause(Code.NON_PERSISTENT))))
        else:
            entries.append(only_left(key, cause))
    return entries


def _readers(verdict: Verdict | None) -> dict[str, list[str]]:
    """Return the runtime tensors that loading makes from each key of the file."""
    readers: dict[str, list[str]] = {}
    if verdict is None:
        return readers
    for fqn, source in verdict.reads.items():
        if source is not None:
            for key in dict.fromkeys(ex.refs(source)):
                readers.setdefault(key, []).append(fqn)
    return readers


# Values that loading loses or changes


def _with_lost_values(
    entries: Iterable[Entry],
    names: Names,
    saved: Entries,
    verdict: Verdict | None,
    readers: Container[str],
) -> Iterator[Entry]:
    """Yield the entries; a key whose value the model does not get by loading it is not the same."""
    lost: dict[str, Entry] = {}
    altered: Collection[str] = ()
    if verdict is not None:
        lost = _read_otherwise(names, saved, verdict, readers)
        altered = set(verdict.altered)
    lost |= _overwritten(names, saved, verdict, readers)
    for entry in entries:
        key = entry.left[0] if len(entry.left) == 1 else ""
        if entry.status == "same" and key in lost:
            yield lost[key]
        elif len(entry.left) == 1 and key in altered:
            yield Entry("value", entry.left, entry.right, Cause(Code.ALTERED))
        else:
            yield entry


def _tied(names: Names) -> dict[str, list[str]]:
    """Map each key that the model saves to the keys with the same value: itself, and its tied
    ones.
    """
    groups: dict[Expression | str, list[str]] = {}
    tied: dict[str, list[str]] = {}
    for key in names.serialized:
        value: Expression | str = key.key
        if key.source is not None and not ex.is_opaque(key.source):
            value = key.source
        tied[key.key] = groups.setdefault(value, [])
        tied[key.key].append(key.key)
    return tied


def _overwritten(
    names: Names, saved: Entries, verdict: Verdict | None, readers: Container[str]
) -> dict[str, Entry]:
    """Return entries of tied keys for which the file has different values: loading keeps one of
    them.
    """
    sources = sources_of(names.serialized)
    entries: dict[str, Entry] = {}
    for first, group in _tied(names).items():
        source = sources[first]
        if first != group[0] or len(group) < 2 or source is None:
            continue
        keys = [key for key in group if key in saved]
        if len(keys) < 2:
            continue
        kept = keys[-1]
        loaded = None if verdict is None else verdict.reads.get(next(ex.refs(source), ""))
        if loaded is not None:
            kept = next((key for key in ex.refs(loaded) if key in keys), kept)
        for key in keys:
            if key not in readers and not same_values(saved[key], saved[kept]):
                detail = f"loading keeps {kept}"
                entries[key] = Entry("value", (key,), (key,), Cause(Code.TIED_VALUE), None, detail)
    return entries


class _TensorLoad(NamedTuple):
    """The value that a runtime tensor gets: `usual` from the model's own state dict, `source` from
    this file (None: no value). `expected` is the key that saves it, or else the usual value.
    """

    usual: Expression | None
    expected: Expression
    source: Expression | None

    @property
    def keys_read(self) -> list[str]:
        return [] if self.source is None else list(ex.refs(self.source))


def _loadings(names: Names, verdict: Verdict) -> Iterator[_TensorLoad]:
    """Yield what each tensor of a known kind gets."""
    key_of: dict[Ref, str] = {}
    for key in names.serialized:
        if isinstance(key.source, Ref):
            key_of.setdefault(key.source, key.key)
    for tensor in names.load:
        if tensor.fqn not in verdict.reads or tensor.fqn in verdict.special:
            continue
        usual = tensor.source and ex.without_cast(tensor.source)
        source = verdict.reads[tensor.fqn]
        saved_by = key_of.get(Ref(tensor.fqn))
        expected = usual if saved_by is None else Ref(saved_by)
        if expected is not None:
            yield _TensorLoad(usual, expected, source and ex.without_cast(source))


def _read_otherwise(
    names: Names, saved: Entries, verdict: Verdict, readers: Container[str]
) -> dict[str, Entry]:
    """Return entries of keys that the model saves, and whose values it does not get by loading
    them.

    They are lost if loading takes other keys here, and not whenever the model loads its own state
    dict.
    """
    tied = _tied(names)
    fqn_of: dict[str, str] = {}
    for serialized in names.serialized:
        if isinstance(serialized.source, Ref):
            fqn_of[serialized.key] = serialized.source.key
    entries: dict[str, Entry] = {}
    for loading in _loadings(names, verdict):
        if _takes_the_same(loading, tied, saved) or (loading.source is None and not verdict.ok):
            continue
        keys, taken = dict.fromkeys(ex.refs(loading.expected)), dict.fromkeys(loading.keys_read)
        detail = None
        if not taken.keys() <= keys.keys():
            detail = f"it takes {', '.join(taken)}"
        for key in keys:
            if key not in saved or verdict.reads.get(fqn_of.get(key, "")) == Ref(key):
                # its own tensor has it, and another one of the tied tensors has another key
                continue
            twins = [name for name in tied.get(key, ()) if name in taken]
            if _has_equal_twin(saved, key, twins):
                # its module is at several paths, and the file has the same for two of them
                continue
            is_dropped = loading.source is None and key not in verdict.replaced
            status, code = "value", Code.LOST_VALUE
            if loading.source == loading.usual or key in readers or is_dropped:
                status, code = "transformed", Code.LOAD_HOOK_CHANGES
            entries[key] = Entry(status, (key,), (key,), Cause(code), None, detail)
    return entries


def _has_equal_twin(saved: Entries, key: str, twins: Iterable[str]) -> bool:
    """Return whether another one of the tied keys has the same value."""
    for twin in twins:
        if twin != key and _have_same_values(saved, key, twin):
            return True
    return False


def _takes_the_same(loading: _TensorLoad, tied: Mapping[str, list[str]], saved: Entries) -> bool:
    """Return whether the tensor gets what saves it, a tied key, or other keys with the same
    values.
    """
    source, expected = loading.source, loading.expected
    if source == expected:
        return True
    twins = tied.get(expected.key, ()) if isinstance(expected, Ref) else ()
    if isinstance(source, Ref) and source.key in twins:
        return True
    others = other_keys(expected, source)
    if others is None:
        return False
    return all(_have_same_values(saved, key, other) for key, other in others.items())


def _have_same_values(saved: Entries, key: str, other: str) -> bool:
    return key in saved and other in saved and same_values(saved[key], saved[other])


def loads(entries: Iterable[Entry]) -> bool:
    """Return True if every key is there with its shape, and no other: what is known without the
    model's code.
    """
    for entry in entries:
        if entry.status not in ("same", "extra_state", "dtype") or entry.left != entry.right:
            return False
    return True
