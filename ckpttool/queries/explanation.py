"""One tensor under all its names: what `explain` answers."""

from __future__ import annotations

import difflib
from typing import Any

from ckpttool import expression as ex
from ckpttool.errors import CkptError
from ckpttool.json_schema import COUNT, SHAPE, TEXT, TEXTS, either, map_of, nullable, record
from ckpttool.names import HOOK, Hook, Names, OptimizerParam, RuntimeTensor
from ckpttool.naming.name_tables import NameTables
from ckpttool.values import dataclass


@dataclass(frozen=True, slots=True)
class Explanation:
    """`serialized` are the keys that hold the tensor or a part of it; `forms` maps a form to the name that it uses.

    `also` are the FQNs of other tensors that `name` is a name of in another form, or a key that they are a part of.
    """

    name: str
    tensor: RuntimeTensor
    serialized: tuple[str, ...]
    forms: dict[str, str]
    aliases: tuple[str, ...]
    also: tuple[str, ...]
    optimizer: OptimizerParam | None
    hook: Hook | None

    @property
    def states(self) -> tuple[str, ...]:
        """The keys of the tensor's state in ``optimizer.state_dict()``."""
        own = self.optimizer
        return () if own is None else tuple(f"state.{own.id}.{name}" for name in own.state)

    def to_json(self) -> dict[str, Any]:
        """The `explain` object of the contract."""
        return dict(EXPLAIN.write(self))


EXPLAIN = record(
    Explanation,
    {
        "name": TEXT,
        "canonical": TEXT,
        "runtime": TEXT,
        "serialized": nullable(either(TEXT, TEXTS)),
        "forms": map_of(TEXT),
        "aliases": TEXTS,
        "also": TEXTS,
        "optimizer_id": nullable(COUNT),
        "optimizer_group": nullable(COUNT),
        "optimizer_state": TEXTS,
        "hook": nullable(HOOK),
        "dtype": TEXT,
        "shape": nullable(SHAPE),
    },
    called={
        "canonical": "tensor.canonical",
        "runtime": "tensor.fqn",
        "serialized": lambda found: found.serialized[0] if len(found.serialized) == 1 else found.serialized or None,
        "optimizer_id": lambda found: found.optimizer and found.optimizer.id,
        "optimizer_group": lambda found: found.optimizer and found.optimizer.group,
        "optimizer_state": "states",
        "dtype": "tensor.dtype",
        "shape": "tensor.shape",
    },
    title="ckpttool.explain/1",
)


def explain(names: Names, name: str) -> Explanation:
    """The tensor that `name` names in any form: runtime, canonical or serialized.

    Raises `CkptError`, with names that are like it, where the model has none of this name.
    """
    tables = NameTables(names)
    tensor, *others = _named(names, tables, name)
    first = tables.first[tensor.fqn]
    held = [key for key, source in tables.saved.items() if source is not None and first in ex.refs(source)]
    of_others = {key for key, fqn in tables.fqn_of.items() if fqn != tensor.fqn}
    forms = {"runtime": tensor.fqn, "exported": tensor.fqn, "canonical": tensor.canonical}
    forms.update(("serialized", key) for key, fqn in tables.fqn_of.items() if fqn == tensor.fqn)
    keys = tuple(key for key in held if key not in of_others) or tuple(held)
    group = tables.groups[first]
    return Explanation(
        name=name,
        tensor=tensor,
        serialized=keys,
        forms=forms,
        aliases=tuple(fqn for fqn in group if fqn != tensor.fqn),
        also=tuple(other.fqn for other in others if other.fqn not in group),
        optimizer=next((p for p in names.ids if p.fqn in group), None),
        hook=next((s.hook for s in names.serialized if s.key in keys and s.hook is not None), None),
    )


def _named(names: Names, tables: NameTables, name: str) -> list[RuntimeTensor]:
    """The tensors that have the name: at runtime, as their key, without wrappers, or as a part of what has that key."""
    source = tables.saved.get(name)
    parts = () if source is None else ex.refs(source)
    canonical = (tensor.fqn for tensor in names.runtime if tensor.canonical == name)
    named = dict.fromkeys((name, tables.fqn_of.get(name, name), *canonical, *parts))
    found = [tables.tensors[fqn] for fqn in named if fqn in tables.tensors]
    if not found:
        near = difflib.get_close_matches(
            name, {*tables.tensors, *tables.fqn_of, *(t.canonical for t in names.runtime)}, 3
        )
        hint = (
            f"names that are like it: {', '.join(near)}" if near else f"list them: ckpttool trace {names.model} --all"
        )
        raise CkptError(f"{names.model} has no tensor {name!r}", hint=hint)
    return found
