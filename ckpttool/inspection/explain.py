"""Explain one tensor: all its names, its optimizer id and its hook."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

from ckpttool.core import expression as ex
from ckpttool.core.errors import CkptError
from ckpttool.core.names import HOOK, Hook, Names, OptimizerParam, RuntimeTensor
from ckpttool.core.options import OptimizerOptions, expand_options
from ckpttool.core.schema import COUNT, SHAPE, TEXT, TEXTS, either, map_of, nullable, record
from ckpttool.core.text import shell
from ckpttool.core.values import dataclass, public
from ckpttool.naming.match import NameTables, base_names
from ckpttool.naming.wrappers import TABLE
from ckpttool.operands.model import trace

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckpttool.keywords import OptimizerKeywords

_SEGMENTS = frozenset(row.segment for row in TABLE)
_MOST_SEGMENTS = 10  # of wrappers in one name, all combinations of which are tried
_STATE = re.compile(r"(?:(?:optimizer|optim)\.)?state\.(.+)\.[^.]+")


@public
@dataclass(frozen=True, slots=True)
class Explanation:
    """The names of one tensor of a model.

    Attributes:
        name: The name that was given.
        tensor: The runtime tensor.
        serialized: The keys that hold the tensor or a part of it.
        forms: Form -> the name of the tensor in it.
        aliases: The other FQNs of the same tensor.
        also: FQNs of other tensors that `name` names in another form.
        optimizer: The position of the parameter in ``optimizer.state_dict()``; None for a buffer.
        hook: The state_dict hook that renames or computes a key of the tensor.
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
        """Its keys in ``optimizer.state_dict()``."""
        param = self.optimizer
        if param is None:
            return ()
        return tuple(f"state.{param.id}.{name}" for name in param.state)

    def to_json(self) -> dict[str, Any]:
        """Return the `explain` object of the contract."""
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
        "serialized": lambda explained: (
            explained.serialized[0]
            if len(explained.serialized) == 1
            else explained.serialized or None
        ),
        "optimizer_id": lambda explained: explained.optimizer and explained.optimizer.id,
        "optimizer_group": lambda explained: explained.optimizer and explained.optimizer.group,
        "optimizer_state": "states",
        "dtype": "tensor.dtype",
        "shape": "tensor.shape",
    },
    title="ckpttool.explain/1",
)


@expand_options(OptimizerOptions)
def explain(name: str, model: Any, **options: Unpack[OptimizerKeywords]) -> Explanation:
    """Return a tensor's name in every form, its aliases, its optimizer id and the hook that renames
    it.

    Args:
        name: Its name in any form: runtime, canonical or serialized, inside of wrappers, or as the
            key of its optimizer's state.
        model: Anything that `trace` takes.
        **options: As for `trace`.

    Returns:
        The names of the one tensor that is called so.

    Raises:
        CkptError: The model has no tensor of this name; the hint has similar ones.

    Example::

        explanation = ckpttool.explain("0.weight", "model.py:build")
        print(explanation.tensor.fqn, explanation.serialized)
    """
    names = trace(model, **options)
    tables = NameTables(names)
    operand = model if isinstance(model, str) else names.model
    tensor, *others = _named(names, tables, name, operand)
    group = tables.groups[tables.first[tensor.fqn]]
    keys = _keys_with(tensor, tables)
    forms = {"runtime": tensor.fqn, "exported": tensor.fqn, "canonical": tensor.canonical}
    for key, fqn in tables.fqn_of.items():
        if fqn == tensor.fqn:
            forms["serialized"] = key
    hooks = [tables.hooks[key] for key in tables.saved if key in keys]
    params = [param for param in names.ids if param.fqn in group]
    return Explanation(
        name=name,
        tensor=tensor,
        serialized=keys,
        forms=forms,
        aliases=tuple(fqn for fqn in group if fqn != tensor.fqn),
        also=tuple(other.fqn for other in others if other.fqn not in group),
        optimizer=params[0] if params else None,
        hook=next(filter(None, hooks), None),
    )


def _keys_with(tensor: RuntimeTensor, tables: NameTables) -> tuple[str, ...]:
    """Return the keys that hold the tensor, completely or in part. Keys of its aliases are left out
    if there are others.
    """
    first = tables.first[tensor.fqn]
    keys = []
    for key, source in tables.saved.items():
        if source is not None and first in ex.refs(source):
            keys.append(key)
    by_this_name = [key for key in keys if tables.fqn_of.get(key, tensor.fqn) == tensor.fqn]
    return tuple(by_this_name or keys)


def _named(names: Names, tables: NameTables, name: str, operand: str) -> list[RuntimeTensor]:
    """Return the tensors with this name: as it is, or without the fewest segments of wrappers and
    optimizers. `operand` is the model on a command line.
    """
    by_canonical: dict[str, list[str]] = {}
    for key, canonical in tables.serialized_names.items():
        by_canonical.setdefault(canonical, []).append(key)
    for tensor in names.runtime:
        by_canonical.setdefault(tensor.canonical, []).append(tensor.fqn)
    for candidates in _readings(names, name):
        tensors: dict[str, RuntimeTensor] = {}
        for candidate in candidates:
            for spelled in (candidate, *by_canonical.get(candidate, ())):
                for fqn in _fqns_of(tables, spelled):
                    if fqn in tables.tensors:
                        tensors[fqn] = tables.tensors[fqn]
        if tensors:
            return list(tensors.values())
    all_names = {*tables.tensors, *tables.fqn_of, *(t.canonical for t in names.runtime)}
    similar = difflib.get_close_matches(name, all_names, 3)
    hint = f"list them: {shell('ckpttool', 'trace', operand, '--all')}"
    if similar:
        hint = f"similar names: {', '.join(similar)}"
    raise CkptError(f"{names.model} has no tensor {name!r}", hint=hint)


def _fqns_of(tables: NameTables, name: str) -> list[str]:
    """Return the names that it may refer to: itself, the FQN of the key, and the names from which
    the key is computed.
    """
    source = tables.saved.get(name)
    parts = () if source is None else ex.refs(source)
    return list(dict.fromkeys((name, tables.fqn_of.get(name, name), *parts)))


def _without(parts: Sequence[str], places: Collection[int]) -> str:
    """Return the name without the segments at these places."""
    return ".".join(part for place, part in enumerate(parts) if place not in places)


def _readings(names: Names, name: str) -> Iterator[list[str]]:
    """Yield the names that `name` may mean, with the fewest segments removed first."""
    for inner in dict.fromkeys((name, *base_names(name))):
        yield [inner]
        parts = inner.split(".")
        places = [place for place, part in enumerate(parts[:-1]) if part in _SEGMENTS]
        del places[_MOST_SEGMENTS:]
        for count in range(1, len(places) + 1):
            yield [_without(parts, removed) for removed in combinations(places, count)]
    of_state = _STATE.fullmatch(name)
    if of_state is not None:  # the key of an optimizer's state, by FQN or by id
        param_name = of_state[1]
        yield [param.fqn for param in names.ids if str(param.id) == param_name]
        yield from _readings(names, param_name)
