"""The files that the ranks of an FSDP1 run load with ``SHARDED_STATE_DICT``: each parameter is cut by its rows.

What modules are wrapped, and whether with ``use_orig_params``, makes no difference to them. The optimizer's state that
has its parameter's shape is cut like it, as ``FSDP.optim_state_dict`` does; all else is whole in every file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

from ckpttool.checkpoint import Section, TensorEntry
from ckpttool.errors import Problem, Refused
from ckpttool.evaluate.parts import concatenated, row_major, window
from ckpttool.expression import Ref, refs
from ckpttool.formats.ranks.sharded_tensor import sharded
from ckpttool.names import Names, RuntimeTensor
from ckpttool.naming.flat_param import shard_sizes
from ckpttool.naming.name_tables import NameTables
from ckpttool.naming.optimizers import forms
from ckpttool.naming.optimizers.ids import owners
from ckpttool.naming.optimizers.parameters import Parameters
from ckpttool.values import dataclass
from ckpttool.words import plural


@dataclass(frozen=True, slots=True)
class RowCut:
    """Cuts a checkpoint of the model of `names` for `world_size` ranks."""

    names: Names
    world_size: int

    def model(self, section: Section) -> list[Section]:
        """The model's section on each rank. Raises `Refused`, all problems at once, for what cannot be cut by rows."""
        tables = NameTables(self.names)
        parameters = {t.canonical: t for t in self.names.runtime if t.kind == "parameter"}
        problems = [problem for entry in section.tensors for problem in _problems(entry, tables, parameters)]
        problems += [Problem("not in the checkpoint", key) for key in parameters if key not in section.by_key()]
        if problems:
            raise Refused(
                f"{section.path or 'the checkpoint'} cannot be sharded: {plural(len(problems), 'problem')}",
                hint="write a folder for torch.distributed.checkpoint, which shards while it loads: "
                "--to serialized -o OUT.dcp",
                problems=problems,
            )
        cut = {entry.key: self._rows(entry) for entry in section.tensors if entry.key in parameters}
        return [
            replace(
                section,
                tensors=tuple(cut[entry.key][rank] if entry.key in cut else entry for entry in section.tensors),
                modules=None,
                form=None,
            )
            for rank in range(self.world_size)
        ]

    def optimizer(self, section: Section) -> list[Section]:
        """The optimizer's section on each rank, its parameters under their names."""
        state = owners(forms.read(section), self.names, section.title).state
        shapes = Parameters(self.names).shapes
        cut = {
            param: {name: self._value(value, shapes[str(param)]) for name, value in own.items()}
            for param, own in state.state.items()
        }
        return [
            forms.write(replace(state, state={param: _of(own, rank) for param, own in cut.items()}), section)
            for rank in range(self.world_size)
        ]

    def _value(self, value: Any, shape: tuple[int, ...] | None) -> Any:
        """What each rank holds of a value of the state, or the one value that all hold."""
        if not isinstance(value, TensorEntry) or value.storage is None:
            return value
        return _Cut(tuple(self._rows(value))) if shape and value.shape == shape else value

    def _rows(self, entry: TensorEntry) -> list[TensorEntry]:
        row, whole = prod(entry.shape[1:]), row_major(entry)
        sizes = shard_sizes(entry.shape[0], self.world_size)
        return [
            sharded(
                entry.key,
                concatenated([window(whole, sum(sizes[:rank]) * row, size * row)]),
                entry.dtype,
                entry.shape,
                sizes,
                rank,
            )
            for rank, size in enumerate(sizes)
        ]


@dataclass(frozen=True, slots=True)
class _Cut:
    """A value of which each rank has another part."""

    parts: tuple[TensorEntry, ...]


def _of(own: Mapping[Any, Any], rank: int) -> dict[Any, Any]:
    return {name: value.parts[rank] if isinstance(value, _Cut) else value for name, value in own.items()}


def _problems(entry: TensorEntry, tables: NameTables, parameters: Mapping[str, RuntimeTensor]) -> list[Problem]:
    """What keeps the model's `entry` from being what FSDP1 loads; `parameters` are by canonical name."""
    source, own = tables.saved.get(entry.key), parameters.get(entry.key)
    if own is None or source != Ref(tables.first[own.fqn]):
        read = set() if source is None else set(refs(source)) & {tables.first[t.fqn] for t in parameters.values()}
        how = f"a hook makes it of {', '.join(sorted(read))}, and FSDP1 saves the parameters as they are"
        return [Problem(how, entry.key)] if read else []
    if entry.storage is None:
        return [Problem(f"{entry.layout}: only dense tensors can be sharded", entry.key)]
    if not entry.shape:
        return [Problem("FSDP1 shards no scalars", entry.key)]
    if own.shape not in (None, entry.shape):
        return [Problem(f"{list(entry.shape)}, the model's is {list(own.shape or ())}", entry.key)]
    return []
