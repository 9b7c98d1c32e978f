"""Compare the names of one model: the keys that it saves with its runtime names."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ckpttool.core import expression as ex
from ckpttool.core.expression import Expression, Op, Ref
from ckpttool.core.names import Hook, Names, RuntimeTensor
from ckpttool.diffing.causes import Cause, Code, segment_change
from ckpttool.diffing.one_model import components
from ckpttool.diffing.result import Entry, only_left
from ckpttool.naming.match import NameTables


def compare_names(names: Names) -> tuple[Entry, ...]:
    """Compare what the model's ``state_dict()`` writes (left) with its runtime names (right)."""
    tables = NameTables(names)
    entries = [_renamed(key, fqn, tables.hooks.get(key)) for key, fqn in tables.fqn_of.items()]
    entries += _computed_keys(tables)
    for key, source in tables.saved.items():
        if source is None:
            entries.append(only_left(key, Cause(Code.ADDED_BY_HOOK), tables.hooks[key]))
        elif isinstance(source, Ref) and key not in tables.fqn_of:
            entries.append(_alias((key,), (), source.key, tables.hooks[key]))
    for key in names.extra_state:
        entries.append(Entry("extra_state", (key,), (), Cause(Code.EXTRA_STATE)))

    named = {fqn for entry in entries for fqn in entry.right}
    problems = {problem.key: str(problem) for problem in reversed(names.roundtrip_problems)}
    left_out = set(names.not_serialized)
    for tensor in names.runtime:
        if tensor.fqn not in named:
            entries.append(_without_key(tensor, named, problems, tensor.fqn in left_out))
    return tuple(entries)


def _renamed(key: str, fqn: str, hook: Hook | None) -> Entry:
    if key == fqn:
        return Entry("same", (key,), (fqn,))
    code = Code.SAVING if hook is None else Code.HOOK
    return Entry("renamed", (key,), (fqn,), Cause(code, (segment_change(fqn, key),)), hook)


def _computed_keys(tables: NameTables) -> list[Entry]:
    """Return the keys with computed values, with the tensors that they are computed from."""
    taken = set(tables.fqn_of.values())
    links: dict[str, list[str]] = {}
    for key, source in tables.saved.items():
        if isinstance(source, Op):
            links[key] = list(ex.refs(source))
    entries = []
    for keys, fqns in components(links):
        source = tables.saved[keys[0]]
        assert source is not None
        right = tuple(fqn for fqn in fqns if fqn not in taken)
        hook = tables.hooks[keys[0]]
        entries.append(Entry("transformed", tuple(keys), right, computed_cause(source), hook))
    return entries


def _alias(
    left: tuple[str, ...], right: tuple[str, ...], first: str, hook: Hook | None = None
) -> Entry:
    return Entry("alias", left, right, Cause(Code.SECOND_NAME), hook, f"same as {first}")


def _without_key(
    tensor: RuntimeTensor, named: Collection[str], problems: Mapping[str, str], left_out: bool
) -> Entry:
    """Return the entry of a runtime tensor that no key names."""
    fqn, first = tensor.fqn, tensor.alias_of
    if first is not None and first in named:
        return _alias((), (fqn,), first)
    if not left_out:
        # a program expects the first among its weights
        status = "missing" if tensor.persistent else "extra_state"
        return Entry(status, (), (fqn,), Cause(Code.INSIDE_OBJECT))
    if not tensor.persistent:
        return Entry("not_serialized", (), (fqn,), Cause(Code.NON_PERSISTENT))
    return Entry("not_serialized", (), (fqn,), Cause(Code.NOT_SAVED), None, problems.get(fqn))


def computed_cause(source: Expression) -> Cause:
    """Return the cause of a key with a computed value: the operators that compute it."""
    if ex.is_opaque(source):
        return Cause(Code.OPAQUE)
    names: dict[str, None] = {}
    for operator in ex.operators(source):
        names[operator.removeprefix("aten.").partition(".")[0]] = None
    names.pop("getitem", None)
    return Cause(Code.COMPUTED, (", ".join(names),))
