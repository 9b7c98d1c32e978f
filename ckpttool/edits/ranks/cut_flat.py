"""The files that the ranks of an FSDP1 run load with ``LOCAL_STATE_DICT``.

Each rank's file holds its part of every unit's flat parameter, of the optimizer's state the same part with its padding,
and all else whole, as FSDP1 with ``use_orig_params=False`` saves it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpttool.checkpoint import Part, Section, TensorEntry
from ckpttool.dtypes import itemsize
from ckpttool.errors import Problem, Refused
from ckpttool.evaluate.compare import same_values
from ckpttool.evaluate.parts import across, concatenated, in_own_storage, row_major
from ckpttool.expression import Ref
from ckpttool.formats.ranks.sharded_tensor import sharded
from ckpttool.keys import FLAT_PARAM
from ckpttool.names import Names
from ckpttool.naming.flat_param import Slot, named_units, shard_sizes, slots
from ckpttool.naming.name_tables import NameTables
from ckpttool.naming.optimizers import forms
from ckpttool.naming.optimizers.ids import owners
from ckpttool.naming.optimizers.parameters import Parameters
from ckpttool.optimizer_state import ID, PARAM_NAMES, OptimizerState, Param, ParamGroup, numbered
from ckpttool.values import dataclass
from ckpttool.words import plural

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
