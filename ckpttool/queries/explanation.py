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
    """`serialized` are the keys that hold the tensor or a part of it; `forms` maps a form to the name that it uses."""

    name: str
    tensor: RuntimeTensor
    serialized: tuple[str, ...]
    forms: dict[str, str]
    aliases: tuple[str, ...]
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
    tensor = _find(names, tables, name)
    first = tables.first[tensor.fqn]
    own = tuple(key for key, fqn in tables.fqn_of.items() if fqn == tensor.fqn)
    keys = own or tuple(k for k, source in tables.saved.items() if source is not None and first in ex.refs(source))
    forms = {"runtime": tensor.fqn, "exported": tensor.fqn, "canonical": tensor.canonical}
    if own:
        forms["serialized"] = own[0]
    group = set(tables.groups[first])
    return Explanation(
        name=name,
        tensor=tensor,
        serialized=keys,
        forms=forms,
        aliases=tuple(fqn for fqn in tables.groups[first] if fqn != tensor.fqn),
        optimizer=next((p for p in names.ids if p.fqn in group), None),
        hook=next((s.hook for s in names.serialized if s.key in keys and s.hook is not None), None),
    )


def _find(names: Names, tables: NameTables, name: str) -> RuntimeTensor:
    by_fqn = {tensor.fqn: tensor for tensor in names.runtime}
    by_canonical = {tensor.canonical: tensor for tensor in names.runtime}
    by_key = {key: by_fqn[fqn] for key, fqn in tables.fqn_of.items()}
    made_of = {key: next(ex.refs(source), "") for key, source in tables.saved.items() if source is not None}
    found = by_fqn.get(name) or by_key.get(name) or by_canonical.get(name) or by_fqn.get(made_of.get(name, ""))
    if found is None:
        near = difflib.get_close_matches(name, {*by_fqn, *by_key, *by_canonical}, 3)
        hint = (
            f"names that are like it: {', '.join(near)}" if near else f"list them: ckpttool trace {names.model} --all"
        )
        raise CkptError(f"{names.model} has no tensor {name!r}", hint=hint)
    return found
