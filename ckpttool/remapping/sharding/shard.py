"""Split an ordinary checkpoint into the files that the ranks of an FSDP1 run load."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Protocol

from ckpttool.core.checkpoint import Checkpoint, Part, Section, TensorEntry
from ckpttool.core.dtypes import itemsize
from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.core.expression import Ref, refs
from ckpttool.core.keys import FLAT_PARAM
from ckpttool.core.names import FSDP_FLAT, Names, RuntimeTensor
from ckpttool.core.optimizer_state import FQN, ID, PARAM_NAMES, OptimizerState, Param, ParamGroup, numbered
from ckpttool.core.text import plural
from ckpttool.core.values import dataclass
from ckpttool.evaluate.chunks import across, concatenated, in_own_storage, row_major, window
from ckpttool.evaluate.compare import same_values
from ckpttool.formats.ranks.sharded import sharded
from ckpttool.naming.flat import Slot, named_units, shard_sizes, slots
from ckpttool.naming.match import NameTables
from ckpttool.optimizers import forms
from ckpttool.optimizers.identify import Parameters, owners
from ckpttool.remapping.optimizer import OptimizerRequest, remap_optimizers

Units = Mapping[str, tuple[Slot, ...]]


@dataclass(frozen=True, slots=True)
class FlatCut:
    """Cuts a checkpoint of the model of `names`: the parameters of each unit, by its path, over `world_size` ranks.

    `unknown` are patterns of units that name no module.
    """

    names: Names
    units: Units
    world_size: int
    unknown: tuple[Problem, ...]

    @staticmethod
    def of(names: Names, patterns: Sequence[str], world_size: int) -> FlatCut:
        """`patterns` name the modules that are wrapped on their own (``layers.*``); the root always is."""
        paths, problems = named_units(names, patterns)
        units = {unit: own for unit, own in slots(names, paths).items() if own}
        return FlatCut(names, units, world_size, tuple(problems))

    def model(self, section: Section) -> list[Section]:
        """The model's section on each rank. Raises `Refused`, all problems at once, for what FSDP1 cannot flatten."""
        problems = list(self.unknown)
        shards = _model(section, self, problems)
        if problems:
            raise Refused(
                f"{section.path or 'the checkpoint'} cannot be flattened: {plural(len(problems), 'problem')}",
                hint="`ckpttool trace MODEL` lists the model's parameters; --units names the modules that are wrapped",
                problems=problems,
            )
        return shards

    def optimizer(self, section: Section) -> list[Section]:
        """The optimizer's section on each rank: a flat parameter's state in place of those of its parameters."""
        return _optimizer(section, self)


def flat_key(unit: str) -> str:
    """The key of a unit's flat parameter in a rank's file."""
    return f"{unit}.{FLAT_PARAM}" if unit else FLAT_PARAM


# The model


def _model(section: Section, ranks: FlatCut, problems: list[Problem]) -> list[Section]:
    tables, have = NameTables(ranks.names), {entry.key: entry for entry in section.tensors}
    keys = {fqn: key for key, fqn in tables.fqn_of.items() if key in have}
    flat: dict[str, list[TensorEntry]] = {}
    for unit, own in ranks.units.items():
        entries = [_entry(slot, have, keys, problems) for slot in own]
        flat[unit] = [row_major(entry) for entry in entries if entry is not None]  # once for all ranks
        dtypes = {entry.dtype for entry in flat[unit]}
        if len(dtypes) > 1:
            text = f"its parameters are {', '.join(sorted(dtypes))}, and one flat parameter has one dtype"
            problems.append(Problem(text, unit or "(root)"))
    parameters = {tensor.fqn for tensor in ranks.names.runtime if tensor.kind == "parameter"}
    rest = tuple(entry for entry in section.tensors if not _reads(tables, entry.key, parameters, problems))
    if problems:
        return []
    shards = [_rank_of(flat, ranks, rank) for rank in range(ranks.world_size)]
    return [replace(section, tensors=(*own, *rest), modules=None, form=None) for own in shards]


def _entry(
    slot: Slot, have: Mapping[str, TensorEntry], keys: Mapping[str, str], problems: list[Problem]
) -> TensorEntry | None:
    named = [have[keys[fqn]] for fqn in slot.fqns if fqn in keys]
    entry = named[0] if named else None
    if entry is None or entry.storage is None:
        text = "not in the checkpoint" if entry is None else f"{entry.layout}: only dense tensors can be flattened"
        problems.append(Problem(text, slot.fqns[0]))
        return None
    lost = [other.key for other in named if not same_values(entry, other)]
    problems += [Problem(f"other values than {entry.key}, and one flat parameter holds both", key) for key in lost]
    if entry.shape != slot.shape or not slot.shape:
        text = (
            "FSDP1 flattens no scalars" if not slot.shape else f"{list(entry.shape)}, the model's is {list(slot.shape)}"
        )
        problems.append(Problem(text, entry.key))
    return entry


def _reads(tables: NameTables, key: str, parameters: set[str], problems: list[Problem]) -> bool:
    """Whether the key is a parameter, which is in a flat one."""
    source = tables.saved.get(key)
    if source is None or isinstance(source, Ref):
        return source is not None and source.key in parameters
    problems.append(Problem("a hook computes it, and FSDP1 saves the parameters as they are", key))
    return True


def _rank_of(units: Mapping[str, list[TensorEntry]], ranks: FlatCut, rank: int) -> Iterator[TensorEntry]:
    for unit, entries in units.items():
        numel = ranks.units[unit][-1].end
        sizes = shard_sizes(numel, ranks.world_size)
        storage = concatenated(across(entries, sum(sizes[:rank]), sizes[rank]))
        yield sharded(flat_key(unit), storage, entries[0].dtype, (numel,), sizes, rank)


# Optimizers


def _optimizer(section: Section, ranks: FlatCut) -> list[Section]:
    where = section.title
    state = owners(forms.read(section), ranks.names, where).state
    canonical = Parameters(ranks.names).canonical
    owner = {canonical[slot.fqns[0]]: unit for unit, own in ranks.units.items() for slot in own}
    problems: list[Problem] = []
    groups = tuple(_group(group, owner, ranks) for group in state.groups)
    places = {str(param): index for index, group in enumerate(state.groups) for param in group.params}
    for unit, own in ranks.units.items():
        if len({places.get(canonical[slot.fqns[0]]) for slot in own}) > 1:
            problems.append(
                Problem("its parameters are in several param groups, or only some in any", unit or "(root)")
            )
    flat = {} if problems else {u: _flat_state(own, state, canonical, problems) for u, own in ranks.units.items()}
    if problems:
        raise Refused(
            f"{where}: FSDP1 with use_orig_params=False has one state for each flat parameter",
            hint="convert the model alone (CKPT::SECTION), and start the optimizer afresh",
            problems=problems,
        )
    made = []
    for rank in range(ranks.world_size):
        values: dict[Param, Mapping[Any, Any]] = {
            unit: {name: _on_rank(value, ranks, rank) for name, value in own.items()}
            for unit, own in flat.items()
            if own
        }
        made.append(forms.write(numbered(replace(state, form=ID, groups=groups, state=values)), section))
    return made


def _group(group: ParamGroup, owner: Mapping[str, str], ranks: FlatCut) -> ParamGroup:
    units = {owner[str(param)] for param in group.params}
    options = {name: value for name, value in group.options.items() if name != PARAM_NAMES}
    return ParamGroup(tuple(unit for unit in ranks.units if unit in units), options)


@dataclass(frozen=True, slots=True)
class _Flat:
    """The state of a unit's parameters that has their shapes, in the order in which they are laid end to end."""

    entries: tuple[TensorEntry, ...]


def _flat_state(
    own: Sequence[Slot], state: OptimizerState, canonical: Mapping[str, str], problems: list[Problem]
) -> dict[Any, Any]:
    """Name -> `_Flat` for state that has the parameters' shapes, or the one value that they all have."""
    states = [state.state.get(canonical[slot.fqns[0]], {}) for slot in own]
    made: dict[Any, Any] = {}
    for name in dict.fromkeys(name for values in states for name in values):
        values = [values.get(name) for values in states]
        entries = [value for value in values if isinstance(value, TensorEntry) and value.storage is not None]
        shaped = len(entries) == len(values) and all(e.shape == slot.shape for e, slot in zip(entries, own))
        if shaped and len({entry.dtype for entry in entries}) == 1:
            made[name] = _Flat(tuple(map(row_major, entries)))
        elif all(_same(values[0], value) for value in values):
            made[name] = values[0]
        else:
            problems.append(Problem(f"{name} has neither its shape nor one value for all of the unit", own[0].fqns[0]))
    return made


def _same(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    return same_values(left, right) if isinstance(left, TensorEntry) else bool(left == right)


def _on_rank(value: Any, ranks: FlatCut, rank: int) -> Any:
    """What a rank holds of a value: of a flat one its chunk, the last ones filled up with zeros."""
    if isinstance(value, TensorEntry):
        return in_own_storage(value)
    if not isinstance(value, _Flat):
        return value
    numel = sum(entry.numel for entry in value.entries)
    sizes, first = shard_sizes(numel, ranks.world_size), value.entries[0]
    parts: list[Part] = across(value.entries, sum(sizes[:rank]), sizes[rank])
    missing = sizes[0] - sizes[rank]
    if missing:
        parts.append(bytes(missing * itemsize(first.dtype)))
    return TensorEntry(first.key, first.dtype, (sizes[0],), (1,), 0, concatenated(parts))


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


_MOST_RANKS = 65_536


class Cut(Protocol):
    """A way to cut sections into those of the ranks, from rank 0 on.

    `Refused`, all problems at once, for what cannot be cut.
    """

    def model(self, section: Section) -> list[Section]:
        """Of the model, in its serialized keys."""

    def optimizer(self, section: Section) -> list[Section]:
        """Of an optimizer whose parameters are named by their FQNs."""


def scatter(
    source: Checkpoint, models: Collection[str], form: str, names: Names, units: Sequence[str], world_size: int
) -> list[Checkpoint]:
    """The checkpoint of each rank, from rank 0 on, in `form`; other state dicts than the `models` are whole in each.

    The sections at these paths have the model's serialized keys. `units` name the modules with flat parameters of their
    own (``layers.*``); the root always has one. Raises `Refused`, all problems at once, for what FSDP1 cannot shard.
    """
    if not 2 <= world_size <= _MOST_RANKS:
        raise CkptError(
            f"--world-size {world_size}: FSDP1 shards over two ranks or more, and {_MOST_RANKS:,} files are the most",
            hint="for one process write an ordinary checkpoint: --to serialized",
        )
    cut: Cut = FlatCut.of(names, units, world_size) if form == FSDP_FLAT else RowCut(names, world_size)
    named = remap_optimizers(source, OptimizerRequest(keys=FQN, names=names))[0] if source.optimizers else source
    columns = [
        cut.model(own) if own.path in models else cut.optimizer(own) if own.kind == "optimizer" else [own] * world_size
        for own in named.sections
    ]
    return [replace(source, sections=tuple(rank), container=None) for rank in zip(*columns)]
