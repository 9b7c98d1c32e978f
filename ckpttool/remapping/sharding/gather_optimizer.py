"""Assemble the optimizers of rank files: state of flat parameters or of slices becomes ordinary state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ckpttool.core.checkpoint import Checkpoint, Section, TensorEntry
from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.core.keys import is_flat
from ckpttool.core.names import Names, OptimizerParam, RuntimeTensor
from ckpttool.core.optimizer_state import FQN, ID, OptimizerState, Param, renamed
from ckpttool.core.text import plural
from ckpttool.evaluate.chunks import in_own_storage
from ckpttool.formats.ranks.shards import ONE_STEP, is_of_ranks, parts_of, ranks_agree
from ckpttool.naming.flat import unit_paths
from ckpttool.optimizers import forms
from ckpttool.optimizers.identify import Parameters, ParamMap, owners
from ckpttool.optimizers.transform import grouped
from ckpttool.remapping.optimizer import OptimizerRequest, remap_optimizers
from ckpttool.remapping.plan import Remap
from ckpttool.remapping.sharding.gather import DIFFERS, Gathered, Unit, cut_out, is_a_copy, resolved

_LEAVE_OUT = "convert the model alone: PATTERN::SECTION"


def with_gathered_optimizers(done: Remap, gathered: Gathered, names: Names) -> Remap:
    """Return the remap with every optimizer as it would be for the model before it was wrapped.

    Ids are numbered in ``model.parameters()`` order again. Raises `Refused`, all problems at once, if the owner of
    some state is unknown, or if it does not fit.
    """
    done = gathered.before(done)
    sections = [
        _gathered(section, gathered.units, names)
        if section.kind == "optimizer" and (gathered.units or any(map(is_of_ranks, section.tensors)))
        else section
        for section in done.result.sections
    ]
    return replace(done, result=replace(done.result, sections=tuple(sections)))


def _gathered(section: Section, units: Mapping[str, Unit], names: Names) -> Section:
    where = section.title
    state = forms.read(section)
    problems: list[Problem] = []
    unit_of = _units_of(state, units, names, where) if units else {}
    if unit_of:
        whole = _of_units(state, unit_of, names, problems)
    else:  # ``use_orig_params=True``: each rank holds a slice of each parameter's state, or none of it
        name_of = _owners(state, names, where).names
        shapes = Parameters(names).shapes
        states = {param: _joined(own, shapes[name_of[param]], problems) for param, own in state.state.items()}
        whole = renamed(replace(state, state=states), name_of)
    if any(problem.problem == DIFFERS for problem in problems):
        raise CkptError(f"{where}: the files are not of one step", hint=ONE_STEP, problems=problems)
    if problems:
        raise Refused(f"{where}: its state does not fit the parameters", hint=_LEAVE_OUT, problems=problems)
    named = forms.write(whole, section)
    if state.form != ID:
        return named
    alone = Checkpoint("", "", 0, (named,))
    return remap_optimizers(alone, OptimizerRequest(keys=ID, names=names))[0].sections[0]


# State of flat parameters


def _units_of(state: OptimizerState, units: Mapping[str, Unit], names: Names, where: str) -> dict[Param, Unit]:
    """Return the unit of each parameter of the optimizer; empty if none of them is a flat parameter."""
    listed = {p: str(n) for g in state.groups for p, n in zip(g.params, g.param_names or ())}
    name_of = listed or {param: str(param) for param in state.params if isinstance(param, str)}
    if name_of:
        flat = {name for name in name_of.values() if is_flat(name)}
        paths = unit_paths(flat)
        problems = [Problem("not a flat parameter, as others are", n) for n in name_of.values() if n not in flat]
        problems += [Problem("the model section has no such flat parameter", n) for n in flat if paths[n] not in units]
        if flat and problems:
            raise Refused(f"{where}: not all of its parameters are known", hint=_LEAVE_OUT, problems=problems)
        return {param: units[paths[name]] for param, name in name_of.items()} if flat else {}
    if len(state.params) != len(units):
        raise Refused(
            f"{where} has {plural(len(state.params), 'parameter')}, and the model section "
            f"{plural(len(units), 'flat parameter')}: which is which?",
            hint="save it with names: the optimizer made of named_parameters() (torch 2.6 and later); or " + _LEAVE_OUT,
        )
    # Take the units for the parameters of a model, each as long as the part of it that a rank steps. A group of the
    # model's optimizer holds the units of whose parameters it has any.
    flat_params = [
        RuntimeTensor(unit.key, unit.key, "parameter", True, True, unit.entry.dtype, (_chunk(unit),), None)
        for unit in units.values()
    ]
    canonical = Parameters(names).canonical
    in_groups = [
        (unit.key, index)
        for index, own in enumerate(map(set, Parameters(names).groups))
        for unit in units.values()
        if any(canonical[slot.fqns[0]] in own for slot in unit.slots)
    ]
    ids = tuple(OptimizerParam(at, key, group) for at, (key, group) in enumerate(in_groups))
    model = replace(names, runtime=tuple(flat_params), serialized=(), load=(), optimizer=ids)
    by_key = {unit.key: unit for unit in units.values()}
    return {param: by_key[key] for param, key in owners(state, model, where).settled(where).names.items()}


def _chunk(unit: Unit) -> int:
    return -(-unit.entry.numel // len(unit.parts))


def _of_units(
    state: OptimizerState, unit_of: Mapping[Param, Unit], names: Names, problems: list[Problem]
) -> OptimizerState:
    canonical = Parameters(names).canonical
    members = {param: [canonical[slot.fqns[0]] for slot in unit.slots] for param, unit in unit_of.items()}
    states: dict[Param, dict[Any, Any]] = {}
    for param, values in state.state.items():
        states.update({name: {} for name in members[param]})
        for key, value in values.items():
            for name, part in zip(members[param], _split(value, unit_of[param], problems)):
                states[name][key] = part
    groups = tuple(
        grouped([name for param in group.params for name in members[param]], group.options) for group in state.groups
    )
    return replace(state, form=FQN, groups=groups, state=states)


def _split(value: Any, unit: Unit, problems: list[Problem]) -> Sequence[Any]:
    """Return the part of each parameter of the unit in one value of the flat parameter's state."""
    if not isinstance(value, TensorEntry):
        return [value] * len(unit.slots)
    parts = parts_of(value)
    present = [part for part in parts if part is not None]
    chunk = _chunk(unit)
    if len(present) == len(unit.parts) and all(p.shape == (chunk,) and p.dtype == value.dtype for p in present):
        return [cut_out(value.dtype, parts, slot) for slot in unit.slots]
    if any(part.numel > 1 or part.storage is None for part in present):
        shapes = ", ".join(str(list(part.shape)) for part in present)
        problems.append(Problem(f"is {shapes} on the ranks, {unit.key} is [{chunk}] on each", value.key))
        return [value] * len(unit.slots)
    if not ranks_agree(value):
        problems.append(Problem(DIFFERS, value.key))
    return [in_own_storage(present[0]) for _ in unit.slots]  # a step counter: each parameter has its own


# State of slices


def _owners(state: OptimizerState, names: Names, where: str) -> ParamMap:
    """Return the owners of the slices. Ids in several groups without names are told apart by their total elements."""
    groups = state.nonempty_groups
    if state.form != ID or all(group.param_names for group in groups) or names.optimizer or len(groups) < 2:
        bare = replace(state, state={})  # the shapes of slices are not the parameters'
        return owners(bare, names, where).settled(where)
    counted = {
        param: {name: _counted(value) if isinstance(value, TensorEntry) else value for name, value in own.items()}
        for param, own in state.state.items()
    }
    flat = replace(names, runtime=tuple(replace(t, shape=t.shape and (prod(t.shape),)) for t in names.runtime))
    return owners(replace(state, state=counted), flat, where).settled(where)


def _counted(entry: TensorEntry) -> TensorEntry:
    numel = sum(part.numel for part in parts_of(entry) if part is not None)
    return replace(entry, shape=(numel,)) if entry.shape else entry


def _joined(own: Mapping[Any, Any], shape: tuple[int, ...] | None, problems: list[Problem]) -> dict[Any, Any]:
    joined = dict(own)
    for name, value in own.items():
        if isinstance(value, TensorEntry):
            whole = resolved(value, shape if value.shape else ())
            if whole is None:
                held = sum(part.numel for part in parts_of(value) if part is not None)
                text = f"the ranks hold {held:,} elements, the parameter is {list(shape or ())}"
                problems.append(Problem(text, value.key))
            elif is_a_copy(whole, value) and not ranks_agree(value):
                problems.append(Problem(DIFFERS, value.key))
            else:
                joined[name] = whole
    return joined
