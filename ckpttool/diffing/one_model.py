"""Compare two checkpoints of one model, each with keys in any form: both are read as the model's
runtime tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, product
from typing import NamedTuple

from ckpttool.core import expression as ex
from ckpttool.core.checkpoint import AnyEntry, Entries, Section
from ckpttool.core.errors import CkptError, Refused
from ckpttool.core.expression import Expression, Ref, substitute
from ckpttool.core.names import RUNTIME, SERIALIZED, Hook, Names
from ckpttool.core.tables import inverse
from ckpttool.core.values import dataclass
from ckpttool.diffing.causes import Cause, Code, segment_change, wrapper_cause
from ckpttool.diffing.pairs import Values, compare_pair, renamed
from ckpttool.diffing.result import Entry, only_left, only_right
from ckpttool.diffing.sections import leftover
from ckpttool.diffing.sides import BothSides
from ckpttool.evaluate.apply import entry_of
from ckpttool.naming import wrappers
from ckpttool.naming.convert import other_versions, read_keys, with_keys
from ckpttool.naming.match import NameTables, aliases_with_variants


@dataclass(frozen=True, slots=True)
class Computed:
    """A value that the two checkpoints hold in different keys. `name` is the runtime FQN or the
    serialized key.
    """

    name: str
    left: Expression
    right: Expression


def compare_through(
    names: Names, left_section: Section, right_section: Section, values: Values | None = None
) -> tuple[Entry, ...]:
    """Compare two checkpoints of one model: every tensor of the model, then the keys that only one
    side has.

    A tensor that both have under one key each is compared as it is. If a hook computes it (fused,
    split, cast), both sides are computed and compared; a value that cannot be computed is never the
    same. Raises `CkptError` if the two have different module versions, which the model reads
    differently.
    """
    tables = NameTables(names)
    _check_versions(tables, left_section, right_section)
    left, right = _ReadSection.of(tables, left_section), _ReadSection.of(tables, right_section)
    pairs, computed = _paired(left, right)
    entries: list[Entry] = []
    for key, name in pairs:
        entries.append(_same_tensor(left.entries[key], right.entries[name], tables.hooks, values))
    entries += _compare_computed(computed, left, right, values)
    for key, value in _saved_again(tables, left, right):
        difference = _difference(Computed(key, Ref(key), value), left, right, values)
        entries.append(_transformed((key,), (), [(key, difference)]))
    for key, value in _saved_again(tables, right, left):
        difference = _difference(Computed(key, value, Ref(key)), left, right, values)
        entries.append(_transformed((), (key,), [(key, difference)]))
    entries += _of_no_tensor(left, right, entries, values)
    named_left, named_right = _named_keys(entries)
    rest_left = [key for key in left.entries if key not in named_left]
    rest_right = [key for key in right.entries if key not in named_right]
    entries += leftover(only_left, left_section, rest_left, named_left)
    entries += leftover(only_right, right_section, rest_right, named_right)
    return tuple(entries)


def _named_keys(entries: Iterable[Entry]) -> tuple[set[str], set[str]]:
    """Return the keys of each side that the entries name."""
    left: set[str] = set()
    right: set[str] = set()
    for entry in entries:
        left.update(entry.left)
        right.update(entry.right)
    return left, right


class _ReadSection(NamedTuple):
    """A section as the model reads it: its entries by key, and each runtime FQN as an expression
    over these keys, as well as each entry that is not a runtime tensor.
    """

    section: Section
    form: str
    names: Mapping[str, str]  # key -> name in the form
    entries: Entries
    values: Mapping[str, Expression]

    @staticmethod
    def of(tables: NameTables, section: Section) -> _ReadSection:
        """Read the section with the names of the model."""
        reading = read_keys(tables, section)
        names = reading.match.names
        keys = inverse(names)
        values: dict[str, Expression] = {}
        if reading.form == RUNTIME:
            for name, key in keys.items():
                values[name] = Ref(key)
            return _ReadSection(section, reading.form, names, section.by_key(), values)
        for fqn, source in tables.runtime_values(keys).items():
            values[fqn] = with_keys(source, keys)
        for name in (*tables.names.extra_state, *tables.keys_without_tensor):
            if name in keys:
                values[name] = Ref(keys[name])
        return _ReadSection(section, reading.form, names, section.by_key(), values)

    @property
    def keys_read(self) -> set[str]:
        """The keys that the model's tensors are computed from."""
        return set(chain.from_iterable(map(ex.refs, self.values.values())))


def _paired(
    left: _ReadSection, right: _ReadSection
) -> tuple[list[tuple[str, str]], list[Computed]]:
    """Return the pairs of keys that are one tensor, and the tensors that the files compute in
    different ways. Pairs that hold a tensor as it is come first, in the order of the model.
    """
    direct: dict[tuple[str, str], None] = {}
    by_operators: dict[tuple[str, str], None] = {}
    computed: list[Computed] = []
    split_keys: set[str] = set()
    for fqn, source in left.values.items():
        other = right.values.get(fqn)
        if other is None:
            continue
        if isinstance(source, Ref) and isinstance(other, Ref):
            direct[source.key, other.key] = None
            continue
        keys = other_keys(source, other)
        if keys is None:
            computed.append(Computed(fqn, source, other))
            split_keys.update(ex.refs(source))
        else:
            by_operators.update(dict.fromkeys(keys.items()))
    pairs = list(direct)
    for pair in by_operators:
        if pair[0] not in split_keys and pair not in direct:
            pairs.append(pair)
    return pairs, computed


def explain_program(entries: Iterable[Entry], names: Names, sides: BothSides) -> tuple[Entry, ...]:
    """Return the entries, with a cause for tensors that a program never has, or that only a program
    has.

    A program has no counter of an AveragedModel and no state of the model's code. An archive of
    TorchScript also has the buffers that the model does not save.
    """
    tables = NameTables(names)
    left_causes = _causes_in_program(tables, sides.left.section)
    right_causes = _causes_in_program(tables, sides.right.section)
    explained = []
    for entry in entries:
        if entry.status in ("unexpected", "missing"):
            causes = left_causes if entry.left else right_causes
            (key,) = entry.left or entry.right
            entry = replace(entry, cause=causes.get(key, entry.cause))
        explained.append(entry)
    return tuple(explained)


def _causes_in_program(tables: NameTables, section: Section) -> dict[str, Cause]:
    """Return the causes for keys of one side that the other side of a program and its weights does
    not have.
    """
    causes = dict.fromkeys(wrappers.counters(section.keys), Cause(Code.COUNTER))
    for key, name in read_keys(tables, section).match.names.items():
        tensor = tables.tensors.get(name)
        if tensor is not None and not tensor.persistent and section.has_runtime_names:
            causes[key] = Cause(Code.NON_PERSISTENT)
        elif name in tables.names.extra_state or tables.saved.get(name, tensor) is None:
            causes[key] = Cause(Code.STATE_OF_CODE)
    return causes


def _of_no_tensor(
    left: _ReadSection, right: _ReadSection, entries: Sequence[Entry], values: Values | None
) -> list[Entry]:
    """Compare other keys that both sides have: unknown to the model, or second names of a tensor
    that the `entries` compare.
    """
    named_left, named_right = _named_keys(entries)
    left_first, right_first = (
        aliases_with_variants(left.section),
        aliases_with_variants(right.section),
    )
    tensors = set[tuple[str, str]]()
    for entry in entries:
        for key, name in product(entry.left, entry.right):
            tensors.add((left_first.get(key, key), right_first.get(name, name)))
    of_model = left.keys_read | right.keys_read
    others = []
    for key, tensor in left.entries.items():
        if key not in right.entries or key in named_left or key in named_right:
            continue
        first = left_first.get(key), right_first.get(key)
        is_unknown = first == (None, None) and key not in of_model
        if first in tensors or is_unknown:
            others.append(compare_pair(tensor, right.entries[key], values))
    return others


def other_keys(value: Expression, source: Expression | None) -> dict[str, str] | None:
    """Map each key in `value` to the key in its place in `source`; None if more than the keys
    differs.
    """
    if source is None:
        return None
    keys = dict(zip(ex.refs(value), ex.refs(source)))
    renamed_value = substitute(value, lambda key: Ref(keys.get(str(key), "")))
    return keys if renamed_value == source else None


def _check_versions(tables: NameTables, left: Section, right: Section) -> None:
    """Raise `CkptError` if the two have module versions that the model reads differently."""
    if tables.names.versions is None:
        return
    others = []
    for section in (left, right):
        reading = read_keys(tables, section)
        if reading.form == SERIALIZED:
            others.append(other_versions(tables.names, section, reading))
    if not any(others) or (len(others) == 2 and others[0] == others[1]):
        return
    raise CkptError(
        f"{tables.names.model} reads other versions of its modules differently, and the two"
        " files have different versions",
        hint="load both into the model and save them again: then they can be compared",
        problems=[*chain(*others)],
    )


def _same_tensor(
    left: AnyEntry,
    right: AnyEntry,
    hooks: Mapping[str, Hook | None],
    values: Values | None,
) -> Entry:
    if left.key == right.key:
        return compare_pair(left, right, values)
    hook, saved, runtime = hooks.get(left.key), left.key, right.key
    if hook is None:
        hook, saved, runtime = hooks.get(right.key), right.key, left.key
    if hook is None:
        return renamed(left, right, wrapper_cause(left.key, right.key), values)
    return renamed(left, right, Cause(Code.HOOK, (segment_change(runtime, saved),)), values, hook)


# Values that hooks compute


def _saved_again(
    tables: NameTables, saved: _ReadSection, runtime: _ReadSection
) -> Iterator[tuple[str, Expression]]:
    """Yield keys that a hook adds when the model is saved and that loading does not read.

    Each comes with its value, computed from the keys of the other side, which has the runtime
    tensors only.
    """
    if saved.form != SERIALIZED or runtime.form == SERIALIZED:
        return
    loaded = saved.keys_read
    for key, name in saved.names.items():
        source = tables.saved.get(name)
        if key in loaded or source is None:
            continue
        if runtime.values.keys() >= set(ex.refs(source)):
            yield key, substitute(source, lambda fqn: runtime.values[str(fqn)])


def _compare_computed(
    computed: Sequence[Computed], left: _ReadSection, right: _ReadSection, values: Values | None
) -> Iterator[Entry]:
    """Yield an entry for each group of keys that compute the same tensors."""
    links: dict[str, list[str]] = {}
    for value in computed:
        for key in ex.refs(value.left):
            links.setdefault(key, []).extend(ex.refs(value.right))
    groups = components(links)
    differences: dict[str, list[tuple[str, Entry]]] = {}
    for left_keys, _ in groups:
        of_group: list[tuple[str, Entry]] = []
        differences.update(dict.fromkeys(left_keys, of_group))
    for value in computed:
        first = next(ex.refs(value.left), None)
        if first is not None:
            differences[first].append((value.name, _difference(value, left, right, values)))
    for left_keys, right_keys in groups:
        yield _transformed(tuple(left_keys), tuple(right_keys), differences[left_keys[0]])


def _transformed(
    left: tuple[str, ...], right: tuple[str, ...], differences: Sequence[tuple[str, Entry]]
) -> Entry:
    """Return the entry of keys that compute the same tensors, with the worst difference of these
    tensors.
    """
    cause = Cause(Code.BY_HOOK)
    for status in ("shape", "value", "dtype"):
        for name, entry in differences:
            if entry.status == status and entry.cause is not None:
                shown = None if left == (name,) else name  # a report begins with the key
                detail = ": ".join(filter(None, (shown, entry.detail)))
                return Entry(
                    status, left, right, entry.cause.and_also(cause), None, detail, entry.spread
                )
    return Entry("transformed", left, right, cause)


def _difference(
    value: Computed, left: _ReadSection, right: _ReadSection, values: Values | None
) -> Entry:
    """Compute both sides and compare them. A value that cannot be computed is reported as not
    compared.
    """
    key = (value.name,)
    reason = "it is computed by code outside of torch operators"
    if not ex.is_opaque(value.left) and not ex.is_opaque(value.right):
        try:
            left_value = _entry(value.name, value.left, left.entries)
            right_value = _entry(value.name, value.right, right.entries)
            return compare_pair(left_value, right_value, values)
        except Refused as error:
            reason = error.message
    elif values is None:
        return Entry("same", key, key)
    return Entry("value", key, key, Cause(Code.UNREAD), None, reason)


def _entry(name: str, source: Expression, entries: Entries) -> AnyEntry:
    if isinstance(source, Ref):
        return entries[source.key].under(name)
    return entry_of(name, source, entries)


def components(links: Mapping[str, Sequence[str]]) -> list[tuple[list[str], list[str]]]:
    """Group left names with the right names that they are linked to, so that no link leaves its
    group::

        a -> x, y
        b -> y        [a, b] with [x, y]
        c -> z        [c] with [z]
    """
    groups: list[tuple[list[str], list[str]]] = []
    group_of: dict[str, tuple[list[str], list[str]]] = {}  # by right name
    for left, rights in links.items():
        new_names: list[str] = []
        linked = {}
        for name in dict.fromkeys(rights):
            if name in group_of:
                linked[id(group_of[name])] = group_of[name]
            else:
                new_names.append(name)
        group = [left], new_names
        for other in linked.values():
            group = other[0] + group[0], other[1] + group[1]
            groups.remove(other)
        groups.append(group)
        group_of.update(dict.fromkeys(group[1], group))
    return groups
