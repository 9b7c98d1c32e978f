"""Split an ordinary checkpoint into the files that the ranks of an FSDP1 run load."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ckpttool.core.checkpoint import Checkpoint, Part, Section, TensorEntry
from ckpttool.core.dtypes import itemsize
from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.core.expression import Ref, refs
from ckpttool.core.names import FSDP_FLAT, Names, RuntimeTensor
from ckpttool.core.optimizer_state import FQN, ID, PARAM_NAMES, OptimizerState, Param, ParamGroup, numbered
from ckpttool.core.text import FLAT_PARAM, dotted, plural
from ckpttool.evaluate.chunks import across, concatenated, in_own_storage, row_major
from ckpttool.evaluate.compare import same_values
from ckpttool.formats.rank_shards import sharded_tensor
from ckpttool.naming.flat import Slot, named_units, shard_sizes, slots
from ckpttool.naming.match import NameTables
from ckpttool.optimizers import forms
from ckpttool.optimizers.identify import Parameters
from ckpttool.remapping.optimizer import OptimizerRequest, remap_optimizers
from ckpttool.remapping.options import RankForm

_MOST_RANKS = 65_536


def scatter(source: Checkpoint, models: Collection[str], form: RankForm, names: Names) -> list[Checkpoint]:
    """Return the checkpoint of each rank in `form`. State dicts other than `models` are complete in each.

    `models` are the paths of sections with the model's serialized keys. The root is always a unit. Raises `Refused`,
    all problems at once, for tensors that FSDP1 cannot shard.
    """
    world_size = form.world_size or 0
    if not 2 <= world_size <= _MOST_RANKS:
        raise CkptError(
            f"world_size={world_size}: FSDP1 shards over 2 to {_MOST_RANKS:,} ranks",
            hint="for one process write an ordinary checkpoint: --to serialized",
        )
    sharding: _FlatSharding | _RowSharding
    flat = form.name == FSDP_FLAT
    sharding = _FlatSharding(names, world_size, form.units) if flat else _RowSharding(names, world_size)
    named = remap_optimizers(source, OptimizerRequest(keys=FQN, names=names))[0] if source.optimizers else source
    ranks = range(world_size)
    sections: list[list[Section]] = []
    for section in named.sections:
        if section.path in models:
            columns = sharding.model(section)
            tensors = (tuple(column[rank] for column in columns) for rank in ranks)
            sections.append([replace(section, tensors=own, modules=None, form=None) for own in tensors])
        elif section.kind == "optimizer":
            state, values = sharding.optimizer(section)
            states = (
                {param: {name: column[rank] for name, column in own.items()} for param, own in values.items()}
                for rank in ranks
            )
            made = (replace(state, state=own) for own in states)
            sections.append([forms.write(numbered(one) if one.form == ID else one, section) for one in made])
        else:
            sections.append([section] * world_size)
    return [replace(source, sections=tuple(rank), container=None) for rank in zip(*sections)]


def _sharded(key: str, entries: Sequence[TensorEntry], shape: tuple[int, ...], world_size: int) -> list[TensorEntry]:
    """Return each rank's shard of the tensor of `shape` that the entries are end to end, cut in its first dimension."""
    whole, row, sizes = [*map(row_major, entries)], prod(shape[1:]), shard_sizes(shape[0], world_size)
    parts = (across(whole, sum(sizes[:rank]) * row, size * row) for rank, size in enumerate(sizes))
    return [
        sharded_tensor(key, concatenated(own), entries[0].dtype, shape, sizes, rank) for rank, own in enumerate(parts)
    ]


Columns = list[list[TensorEntry]]  # of each tensor what each rank holds
Values = dict[Param, dict[Any, Sequence[Any]]]  # of each value in an optimizer's state what each rank holds


class _RowSharding:
    """Shards every parameter along its first dimension."""

    def __init__(self, names: Names, world_size: int) -> None:
        self.names = names
        self.world_size = world_size

    def model(self, section: Section) -> Columns:
        tables = NameTables(self.names)
        parameters = {t.canonical: t for t in self.names.runtime if t.kind == "parameter"}
        problems = [problem for entry in section.tensors for problem in _row_problems(entry, tables, parameters)]
        problems += [Problem("not in the checkpoint", key) for key in parameters if key not in section.by_key()]
        if problems:
            raise Refused(
                f"{section.path or 'the checkpoint'} cannot be sharded: {plural(len(problems), 'problem')}",
                hint="write a folder for torch.distributed.checkpoint, which shards while it loads: "
                "--to serialized -o OUT.dcp",
                problems=problems,
            )
        return [
            _sharded(entry.key, [entry], entry.shape, self.world_size)
            if entry.key in parameters
            else [entry] * self.world_size
            for entry in section.tensors
        ]

    def optimizer(self, section: Section) -> tuple[OptimizerState, Values]:
        state, shapes = forms.read(section), Parameters(self.names).shapes

        def column(value: Any, shape: tuple[int, ...] | None) -> Sequence[Any]:
            if shape and isinstance(value, TensorEntry) and value.storage is not None and value.shape == shape:
                return _sharded(value.key, [value], value.shape, self.world_size)
            return [value] * self.world_size

        return state, {
            param: {name: column(value, shapes[str(param)]) for name, value in own.items()}
            for param, own in state.state.items()
        }


def _row_problems(entry: TensorEntry, tables: NameTables, parameters: Mapping[str, RuntimeTensor]) -> list[Problem]:
    """Return why FSDP1 does not load the model's `entry` in shards. `parameters` are by canonical name."""
    source, own = tables.saved.get(entry.key), parameters.get(entry.key)
    if own is None or source != Ref(tables.first[own.fqn]):
        read = set() if source is None else set(refs(source)) & {tables.first[t.fqn] for t in parameters.values()}
        how = f"a hook computes it from {', '.join(sorted(read))}, and FSDP1 saves the parameters as they are"
        return [Problem(how, entry.key)] if read else []
    if entry.storage is None:
        return [Problem(f"{entry.layout}: only dense tensors can be sharded", entry.key)]
    if not entry.shape:
        return [Problem("FSDP1 cannot shard scalars", entry.key)]
    if own.shape not in (None, entry.shape):
        return [Problem(f"{list(entry.shape)}, the model's is {list(own.shape or ())}", entry.key)]
    return []


class _FlatSharding:
    """Lays the parameters of each unit end to end, and shards these flat parameters.

    `patterns` name the modules that are wrapped on their own (``layers.*``); the root always is.
    """

    def __init__(self, names: Names, world_size: int, patterns: Sequence[str]) -> None:
        self.names = names
        self.world_size = world_size
        paths, self.unknown = named_units(names, patterns)
        self.units = {unit: own for unit, own in slots(names, paths).items() if own}

    def model(self, section: Section) -> Columns:
        problems = list(self.unknown)
        tables, by_key = NameTables(self.names), {entry.key: entry for entry in section.tensors}
        keys = {fqn: key for key, fqn in tables.fqn_of.items() if key in by_key}
        flat: dict[str, list[TensorEntry]] = {}
        for unit, own in self.units.items():
            entries = [_flattened(slot, [by_key[keys[f]] for f in slot.fqns if f in keys], problems) for slot in own]
            flat[unit] = [entry for entry in entries if entry is not None]
            dtypes = {entry.dtype for entry in flat[unit]}
            if len(dtypes) > 1:
                text = f"its parameters are {', '.join(sorted(dtypes))}, and one flat parameter has one dtype"
                problems.append(Problem(text, unit or "(root)"))
        parameters = {tensor.fqn for tensor in self.names.runtime if tensor.kind == "parameter"}
        rest = []
        for entry in section.tensors:
            source = tables.saved.get(entry.key)
            if source is not None and not isinstance(source, Ref):
                text = "a hook computes it, and FSDP1 saves the parameters as they are"
                problems.append(Problem(text, entry.key))
            elif source is None or source.key not in parameters:
                rest.append(entry)
        if problems:
            raise Refused(
                f"{section.path or 'the checkpoint'} cannot be flattened: {plural(len(problems), 'problem')}",
                hint="`ckpttool trace MODEL` lists the model's parameters; units names the modules that are wrapped",
                problems=problems,
            )
        shards = [
            _sharded(dotted(unit, FLAT_PARAM), params, (self.units[unit][-1].end,), self.world_size)
            for unit, params in flat.items()
        ]
        return [*shards, *([entry] * self.world_size for entry in rest)]

    def optimizer(self, section: Section) -> tuple[OptimizerState, Values]:
        state = forms.read(section)
        canonical = Parameters(self.names).canonical
        members = {unit: [canonical[slot.fqns[0]] for slot in own] for unit, own in self.units.items()}
        unit_of = {name: unit for unit, own in members.items() for name in own}
        problems: list[Problem] = []
        group_of = {str(param): index for index, group in enumerate(state.groups) for param in group.params}
        for unit, own in members.items():
            if len({group_of.get(name) for name in own}) > 1:
                text = "its parameters are in several param groups, or only some in any"
                problems.append(Problem(text, unit or "(root)"))
        columns: Values = {}
        if not problems:
            for unit, own in members.items():
                values = self._values(self.units[unit], [state.state.get(name, {}) for name in own], problems)
                if values:
                    columns[unit] = values
        if problems:
            raise Refused(
                f"{section.title}: FSDP1 with use_orig_params=False has one state for each flat parameter",
                hint="convert the model alone (CKPT::SECTION), and start the optimizer afresh",
                problems=problems,
            )
        groups = []
        for group in state.groups:
            units = {unit_of[str(param)] for param in group.params}
            options = {name: value for name, value in group.options.items() if name != PARAM_NAMES}
            groups.append(ParamGroup(tuple(unit for unit in self.units if unit in units), options))
        return OptimizerState(ID, tuple(groups), {}, state.loose, state.rest), columns

    def _values(
        self, own: Sequence[Slot], states: Sequence[Mapping[Any, Any]], problems: list[Problem]
    ) -> dict[Any, Sequence[Any]]:
        """Return each value of a unit's state for each rank: chunks of a flat tensor, or the one value of all slots."""
        columns: dict[Any, Sequence[Any]] = {}
        for name in dict.fromkeys(name for state in states for name in state):
            values = [state.get(name) for state in states]
            first = values[0]
            entries = [value for value in values if isinstance(value, TensorEntry) and value.storage is not None]
            shaped = len(entries) == len(values) and all(e.shape == slot.shape for e, slot in zip(entries, own))
            if shaped and len({entry.dtype for entry in entries}) == 1:
                columns[name] = self._chunks(entries)
            elif not all(_same(first, value) for value in values):
                text = f"{name} has neither its shape nor one value for all of the unit"
                problems.append(Problem(text, own[0].fqns[0]))
            elif isinstance(first, TensorEntry):
                columns[name] = [in_own_storage(first) for _ in range(self.world_size)]
            else:
                columns[name] = [first] * self.world_size
        return columns

    def _chunks(self, entries: Sequence[TensorEntry]) -> list[TensorEntry]:
        """Return each rank's chunk of the entries laid end to end. The last chunks are padded with zeros."""
        first, whole = entries[0], [row_major(entry) for entry in entries]
        sizes = shard_sizes(sum(entry.numel for entry in entries), self.world_size)
        chunks = []
        for rank, size in enumerate(sizes):
            parts: list[Part] = across(whole, sum(sizes[:rank]), size)
            if size < sizes[0]:
                parts.append(bytes((sizes[0] - size) * itemsize(first.dtype)))
            chunks.append(TensorEntry(first.key, first.dtype, (sizes[0],), (1,), 0, concatenated(parts)))
        return chunks


def _flattened(slot: Slot, entries: Sequence[TensorEntry], problems: list[Problem]) -> TensorEntry | None:
    """Return the entry of a slot's parameter, which may have several names; None, and a problem, if it has no data."""
    entry = entries[0] if entries else None
    if entry is None or entry.storage is None:
        text = "not in the checkpoint" if entry is None else f"{entry.layout}: only dense tensors can be flattened"
        problems.append(Problem(text, slot.fqns[0]))
        return None
    for other in entries:
        if not same_values(entry, other):
            problems.append(Problem(f"other values than {entry.key}, and one flat parameter holds both", other.key))
    if not slot.shape:
        problems.append(Problem("FSDP1 cannot flatten scalars", entry.key))
    elif entry.shape != slot.shape:
        problems.append(Problem(f"{list(entry.shape)}, the model's is {list(slot.shape)}", entry.key))
    return entry


def _same(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    return same_values(left, right) if isinstance(left, TensorEntry) else bool(left == right)
