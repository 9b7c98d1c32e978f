"""Compare the names of one model: the keys that it saves with its runtime names."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ckpttool.core import expression as ex
from ckpttool.core.expression import Expression, Op, Ref
from ckpttool.core.names import Hook, Names, RuntimeTensor
from ckpttool.core.text import Note
from ckpttool.diffing.causes import Cause, Code, segment_change
from ckpttool.diffing.one_model import components
from ckpttool.diffing.result import HARMLESS, Diff, Entry, names_outlines, only_left, statuses_of
from ckpttool.naming.evidence import Tensor
from ckpttool.naming.match import NameTables
from ckpttool.naming.shapes import exchangeable
from ckpttool.operands.model import ModelOperand

FQN_MODIFIERS = Note(
    "torch.distributed.checkpoint's get_model_state_dict raises an AttributeError for keys that"
    " hooks rename, unless "
    "the module has a method `_fqn_modifiers` (pytorch#146557)",
    "fqn-modifiers",
)


def names_alone(model: ModelOperand) -> Diff:
    """Compare a model's serialized keys with its runtime names."""
    names = model.names()
    entries = compare_names(names)
    notes: list[str] = []
    for problem in names.roundtrip_problems:
        notes.append(Note(f"does not load what it saves: {problem}", "roundtrip"))
    notes += names.notes
    by_hooks = statuses_of(entry for entry in entries if entry.hook)
    if by_hooks & {"renamed", "transformed"}:
        notes.append(FQN_MODIFIERS)
    loses = False
    for entry in entries:
        if entry.status == "not_serialized" and not entry.has(Code.NON_PERSISTENT):
            loses = True
    return Diff(
        f"{names.model} (serialized)",
        f"{names.model} (runtime)",
        identical=not loses and statuses_of(entries) <= HARMLESS,
        entries=entries,
        notes=tuple(notes),
        other_failure="does not load what it saves" if loses else "",
        asks="names",
        names=(names.model, names.model),
        compared=dict.fromkeys(("keys", "shapes", "dtypes", "aliases"), True) | {"values": False},
        outlines=names_outlines(names),
    )


def exchangeable_keys(names: Names) -> tuple[tuple[str, ...], ...]:
    """Return the keys whose tensors have one shape in the same layers, a tuple for each shape.

    Of tied keys only the first counts.
    """
    tensors, seen = [], set[object]()
    for key in names.serialized:
        if key.shape is not None and key.source not in seen:
            tensors.append(Tensor(key.key, key.dtype, key.shape))
        if key.source is not None and not ex.is_opaque(key.source):
            seen.add(key.source)
    return exchangeable(tensors)


def compare_names(names: Names) -> tuple[Entry, ...]:
    """Compare what the model's ``state_dict()`` writes (left) with its runtime names (right)."""
    tables = NameTables(names)
    entries = []
    for key, fqn in tables.fqn_of.items():
        entries.append(_renamed(key, fqn, tables.hooks.get(key)))
    entries += _computed_keys(tables)
    for key, source in tables.saved.items():
        if source is None:
            entries.append(only_left(key, Cause(Code.ADDED_BY_HOOK), tables.hooks[key]))
        elif isinstance(source, Ref) and key not in tables.fqn_of:
            entries.append(_alias((key,), (), source.key, tables.hooks[key]))
    for key in names.extra_state:
        entries.append(Entry("extra_state", (key,), (), Cause(Code.EXTRA_STATE)))

    named: set[str] = set()
    for entry in entries:
        named.update(entry.right)
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
    cause = Cause(code, (segment_change(fqn, key),))
    return Entry("renamed", (key,), (fqn,), cause, hook)


def _computed_keys(tables: NameTables) -> list[Entry]:
    """Return the keys with computed values, with the tensors that they are computed from."""
    taken = set(tables.fqn_of.values())
    links: dict[str, list[str]] = {}
    for key, source in tables.saved.items():
        if isinstance(source, Op):
            links[key] = list(ex.refs(source))
    entries = []
    for keys, fqns in components(links):
        source, hook = tables.saved[keys[0]], tables.hooks[keys[0]]
        assert source is not None
        right = tuple(fqn for fqn in fqns if fqn not in taken)
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
