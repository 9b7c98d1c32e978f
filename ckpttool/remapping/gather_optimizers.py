"""Assemble the optimizer state of rank files."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ckpttool.containers.rank_shards import ONE_STEP, is_of_ranks, parts_of, ranks_agree
from ckpttool.core.checkpoint import Checkpoint, Section, TensorEntry
from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.core.names import Names, OptimizerParam, RuntimeTensor
from ckpttool.core.optimizer_state import FQN, ID, OptimizerState, Param, renamed
from ckpttool.core.strides import Shape
from ckpttool.core.tables import present
from ckpttool.core.text import is_flat, plural, shape_text
from ckpttool.evaluate.chunks import in_own_storage
from ckpttool.naming.flat import unit_paths
from ckpttool.optimizers import forms
from ckpttool.optimizers.groups import group_of
from ckpttool.optimizers.identify import ParamMap, identify_params, listed_names
from ckpttool.optimizers.move import remap_optimizers
from ckpttool.optimizers.parameters import Parameters
from ckpttool.optimizers.request import OptimizerRequest
from ckpttool.remapping.gather import (
    Gathered,
    Unit,
    assembled,
    cut_out,
    held_elements,
    not_of_one_step,
)
from ckpttool.remapping.result import Remap

_LEAVE_OUT = "convert the model alone: PATTERN::SECTION"


def with_gathered_optimizers(outcome: Remap, gathered: Gathered, names: Names) -> Remap:
    """Return the remap with every optimizer as it would be for the model before it was wrapped.

    Ids are numbered in ``model.parameters()`` order again. Raises `Refused`, all problems at once,
    if the owner of some state is unknown, or if it does not fit.
    """
    outcome = gathered.as_remap_of_files(outcome)
    sections = []
    for section in outcome.result.sections:
        is_split = bool(gathered.units) or any(map(is_of_ranks, section.tensors))
        if section.kind == "optimizer" and is_split:
            section = _gathered(section, gathered.units, names)
        sections.append(section)
    return replace(outcome, result=replace(outcome.result, sections=tuple(sections)))


def _gathered(section: Section, units: Mapping[str, Unit], names: Names) -> Section:
    where = section.title
    state = forms.read(section)
    problems: list[Problem] = []
    unit_of = _units_of(state, units, names, where) if units else {}
    if unit_of:
        whole = _of_units(state, unit_of, names, problems)
    # ``use_orig_params=True``: each rank holds a slice of each parameter's state, or none of it
    else:
        name_of = _identify_sliced_params(state, names, where).names
        shapes = Parameters(names).shapes
        states = {}
        for param, param_state in state.state.items():
            states[param] = _joined(param_state, shapes[name_of[param]], problems)
        whole = renamed(replace(state, state=states), name_of)
    if any(problem.kind == "other-step" for problem in problems):
        raise CkptError(f"{where}: the files are not of one step", hint=ONE_STEP, problems=problems)
    if problems:
        raise Refused(
            f"{where}: its state does not fit the parameters", hint=_LEAVE_OUT, problems=problems
        )
    named = forms.write(whole, section)
    if state.form != ID:
        return named
    request = OptimizerRequest(keys=ID, names=names)
    result, _ = remap_optimizers(Checkpoint.of(named), request)
    return result.sections[0]


def _units_of(
    state: OptimizerState, units: Mapping[str, Unit], names: Names, where: str
) -> dict[Param, Unit]:
    """Return the unit of each parameter of the optimizer; empty if none of them is a flat
    parameter.
    """
    listed = listed_names(state)
    if listed is not None:
        return _units_by_name(listed, units, where)
    if len(state.params) != len(units):
        raise Refused(
            f"{where} has {plural(len(state.params), 'parameter')}, and the model section "
            f"{plural(len(units), 'flat parameter')}: which is which?",
            hint="save it with names: the optimizer made of named_parameters() (torch 2.6 and"
            " later); or " + _LEAVE_OUT,
        )
    by_key = {unit.entry.key: unit for unit in units.values()}
    model = _model_of_units(units.values(), names)
    keys = identify_params(state, model, where).without_doubt(where).names
    return {param: by_key[key] for param, key in keys.items()}


def _units_by_name(
    name_of: Mapping[Param, str], units: Mapping[str, Unit], where: str
) -> dict[Param, Unit]:
    """Return the unit of each parameter, whose names the file has; empty if none of them is a flat
    parameter.
    """
    flat = {name for name in name_of.values() if is_flat(name)}
    if not flat:
        return {}
    paths = unit_paths(flat)
    problems = []
    for name in name_of.values():
        if name not in flat:
            problems.append(Problem("not a flat parameter, as others are", name))
    for name in flat:
        if paths[name] not in units:
            problems.append(Problem("the model section has no such flat parameter", name))
    if problems:
        raise Refused(
            f"{where}: not all of its parameters are known", hint=_LEAVE_OUT, problems=problems
        )
    return {param: units[paths[name]] for param, name in name_of.items()}


def _model_of_units(units: Collection[Unit], names: Names) -> Names:
    """Return the names of a model whose parameters are the units, each as long as the part of it
    that a rank steps. A group of the model's optimizer holds the units of whose parameters it has
    any.
    """
    runtime = []
    for unit in units:
        key, dtype, shape = unit.entry.key, unit.entry.dtype, (unit.elements_per_rank,)
        runtime.append(RuntimeTensor(key, key, "parameter", True, True, dtype, shape, None))
    parameters = Parameters(names)
    ids: list[OptimizerParam] = []
    for group_index, group in enumerate(parameters.groups):
        for unit in units:
            members = {parameters.canonical[slot.fqns[0]] for slot in unit.slots}
            if not members.isdisjoint(group):
                ids.append(OptimizerParam(len(ids), unit.entry.key, group_index))
    return replace(names, runtime=tuple(runtime), serialized=(), load=(), optimizer=tuple(ids))


def _of_units(
    state: OptimizerState, unit_of: Mapping[Param, Unit], names: Names, problems: list[Problem]
) -> OptimizerState:
    canonical = Parameters(names).canonical
    # names of the parameters in each flat one
    members: dict[Param, list[str]] = {}
    for param, unit in unit_of.items():
        members[param] = [canonical[slot.fqns[0]] for slot in unit.slots]
    states: dict[Param, dict[Any, Any]] = {}
    for param, values in state.state.items():
        for name in members[param]:
            states[name] = {}
        for key, value in values.items():
            parts = _split(value, unit_of[param], problems)
            for name, part in zip(members[param], parts):
                states[name][key] = part
    groups = []
    for group in state.groups:
        params: list[str] = []
        for param in group.params:
            params += members[param]
        groups.append(group_of(params, group.options))
    return replace(state, form=FQN, groups=tuple(groups), state=states)


def _split(value: Any, unit: Unit, problems: list[Problem]) -> Sequence[Any]:
    """Return the part of each parameter of the unit in one value of the flat parameter's state."""
    if not isinstance(value, TensorEntry):
        return [value] * len(unit.slots)
    parts = present(parts_of(value))
    if _are_cut_as(unit, parts, value.dtype):
        return [cut_out(value, slot) for slot in unit.slots]
    if all(map(_is_number, parts)):  # a step counter: each parameter has its own
        if not ranks_agree(value):
            problems.append(not_of_one_step(value.key))
        return [in_own_storage(parts[0]) for _ in unit.slots]
    shapes = ", ".join(shape_text(part.shape) for part in parts)
    text = f"is {shapes} on the ranks, {unit.entry.key} is [{unit.elements_per_rank}] on each"
    problems.append(Problem(text, value.key))
    return [value] * len(unit.slots)


def _is_number(part: TensorEntry) -> bool:
    return part.numel <= 1 and part.storage is not None


def _are_cut_as(unit: Unit, parts: Sequence[TensorEntry], dtype: str) -> bool:
    """Return whether each rank has a part of the size of its part of the flat parameter."""
    if len(parts) != len(parts_of(unit.entry)):
        return False
    return all(part.shape == (unit.elements_per_rank,) and part.dtype == dtype for part in parts)


def _identify_sliced_params(state: OptimizerState, names: Names, where: str) -> ParamMap:
    """Return the parameters whose slices the state holds. Ids in several groups without names are
    told apart by their total elements.
    """
    groups = state.nonempty_groups
    has_names = state.form != ID or all(group.param_names for group in groups)
    if has_names or names.optimizer or len(groups) < 2:
        # the shapes of slices are not the parameters'
        state = replace(state, state={})
    else:
        states: dict[Param, dict[Any, Any]] = {}
        for param, param_state in state.state.items():
            states[param] = {name: _counted(value) for name, value in param_state.items()}
        state = replace(state, state=states)
        runtime = []
        for tensor in names.runtime:
            shape = tensor.shape and (prod(tensor.shape),)
            runtime.append(replace(tensor, shape=shape))
        names = replace(names, runtime=tuple(runtime))
    return identify_params(state, names, where).without_doubt(where)


def _counted(value: Any) -> Any:
    """Return a tensor of the state with the number of its elements as its shape."""
    if not isinstance(value, TensorEntry) or not value.shape:
        return value
    return replace(value, shape=(held_elements(value),))


def _joined(
    param_state: Mapping[Any, Any], shape: Shape | None, problems: list[Problem]
) -> dict[Any, Any]:
    """Return the state of a parameter of this shape, each tensor joined from the ranks' slices."""
    joined = dict(param_state)
    for name, value in param_state.items():
        if not isinstance(value, TensorEntry):
            continue
        assembly = assembled(value, shape if value.shape else (), "the parameter's")
        joined[name] = assembly.tensor
        if assembly.problem is not None:
            problems.append(assembly.problem)
        elif assembly.copies_differ:
            problems.append(not_of_one_step(value.key))
    return joined
