"""The optimizer half of rank files: state in the shapes of flat parameters or of slices becomes ordinary state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ckpttool.core.checkpoint import Checkpoint, Section, TensorEntry
from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.core.keys import is_flat
from ckpttool.core.names import Names, OptimizerParam, RuntimeTensor
from ckpttool.core.optimizer_state import FQN, ID, PARAM_NAMES, OptimizerState, Param, ParamGroup, renamed
from ckpttool.core.text import plural
from ckpttool.evaluate.chunks import in_own_storage
from ckpttool.formats.ranks.sharded import OF_ONE_STEP, is_held_alike, is_of_ranks, parts_of
from ckpttool.naming.flat import unit_paths
from ckpttool.optimizers import forms
from ckpttool.optimizers.identify import Parameters, ParamMap, owners
from ckpttool.remapping.optimizer import OptimizerRequest, remap_optimizers
from ckpttool.remapping.plan import Remap
from ckpttool.remapping.sharding.gather import DIFFERS, Gathered, Unit, cut_out, is_a_copy, resolved

_LEAVE_OUT = "convert the model alone: PATTERN::SECTION"


def with_gathered_optimizers(done: Remap, gathered: Gathered, names: Names) -> Remap:
    """What was `done` to the model of `gathered`, and every optimizer as that of the model before it was wrapped.

    Ids are numbered in ``model.parameters()`` order again. Raises `Refused`, all problems at once, where it cannot be
    told whose some state is, or where it does not fit.
    """
    done = gathered.before(done)
    return replace(done, result=gather_optimizers(done.result, gathered.units, names))


def gather_optimizers(checkpoint: Checkpoint, units: Mapping[str, Unit], names: Names) -> Checkpoint:
    """The checkpoint with every optimizer as that of the unwrapped model; `units` are its flat parameters."""
    sections = [
        _gathered(section, units, names)
        if section.kind == "optimizer" and (units or any(map(is_of_ranks, section.tensors)))
        else section
        for section in checkpoint.sections
    ]
    return replace(checkpoint, sections=tuple(sections))


def _gathered(section: Section, units: Mapping[str, Unit], names: Names) -> Section:
    where = section.title
    state = forms.read(section)
    problems: list[Problem] = []
    of_unit = _units_of(state, units, names, where) if units else {}
    made = _of_flat(state, of_unit, names, problems) if of_unit else _of_slices(state, names, where, problems)
    if any(problem.problem == DIFFERS for problem in problems):
        raise CkptError(f"{where}: the files are not of one step", hint=OF_ONE_STEP, problems=problems)
    if problems:
        raise Refused(f"{where}: its state does not fit the parameters", hint=_LEAVE_OUT, problems=problems)
    named = forms.write(made, section)
    if state.form != ID:
        return named
    alone = Checkpoint("", "", 0, (named,))
    return remap_optimizers(alone, OptimizerRequest(keys=ID, names=names))[0].sections[0]


# State with the shapes of flat parameters


def _units_of(state: OptimizerState, units: Mapping[str, Unit], names: Names, where: str) -> dict[Param, Unit]:
    """The unit whose flat parameter each parameter of the optimizer is; empty where none of them is one."""
    listed = {p: str(n) for g in state.groups for p, n in zip(g.params, g.param_names or ())}
    called = listed or {param: str(param) for param in state.params if isinstance(param, str)}
    if called:
        flat = {name for name in called.values() if is_flat(name)}
        paths = unit_paths(flat)
        problems = [Problem("is no flat parameter, as others are", n) for n in called.values() if n not in flat]
        problems += [Problem("the model section has no such flat parameter", n) for n in flat if paths[n] not in units]
        if flat and problems:
            raise Refused(f"{where}: not all of its parameters are known", hint=_LEAVE_OUT, problems=problems)
        return {param: units[paths[name]] for param, name in called.items()} if flat else {}
    if len(state.params) != len(units):
        raise Refused(
            f"{where} has {plural(len(state.params), 'parameter')}, and the model section "
            f"{plural(len(units), 'flat parameter')}: which is which?",
            hint="save it with names: the optimizer made of named_parameters() (torch 2.6 and later); or " + _LEAVE_OUT,
        )
    by_key = {unit.key: unit for unit in units.values()}
    found = owners(state, _as_parameters(units, names), where).settled(where)
    return {param: by_key[key] for param, key in found.names.items()}


def _as_parameters(units: Mapping[str, Unit], names: Names) -> Names:
    """The units as the parameters of a model, each as long as the part of it that a rank steps.

    A group of the model's optimizer holds the units of whose parameters it has any.
    """
    flat = [
        RuntimeTensor(u.key, u.key, "parameter", True, True, u.entry.dtype, (_chunk(u),), None) for u in units.values()
    ]
    canonical = Parameters(names).canonical
    groups = [
        [u.key for u in units.values() if any(canonical[slot.fqns[0]] in own for slot in u.slots)]
        for own in map(set, Parameters(names).groups)
    ]
    pairs = [(key, index) for index, keys in enumerate(groups) for key in keys]
    ids = tuple(OptimizerParam(at, key, group) for at, (key, group) in enumerate(pairs))
    return replace(names, runtime=tuple(flat), serialized=(), load=(), optimizer=ids)


def _chunk(unit: Unit) -> int:
    return -(-unit.entry.numel // len(unit.parts))


def _of_flat(
    state: OptimizerState, of_unit: Mapping[Param, Unit], names: Names, problems: list[Problem]
) -> OptimizerState:
    canonical = Parameters(names).canonical
    own = {param: [canonical[slot.fqns[0]] for slot in unit.slots] for param, unit in of_unit.items()}
    made: dict[Param, dict[Any, Any]] = {}
    for param, values in state.state.items():
        made.update({name: {} for name in own[param]})
        for key, value in values.items():
            for name, part in zip(own[param], _split(value, of_unit[param], problems)):
                made[name][key] = part
    groups = tuple(_group(group, [name for param in group.params for name in own[param]]) for group in state.groups)
    return replace(state, form=FQN, groups=groups, state=made)


def _group(group: ParamGroup, params: Sequence[str]) -> ParamGroup:
    options = dict(group.options)
    if PARAM_NAMES in options:
        options[PARAM_NAMES] = list(params)
    return replace(group, params=tuple(params), options=options)


def _split(value: Any, unit: Unit, problems: list[Problem]) -> list[Any]:
    """What each parameter of the unit gets of one value of the flat parameter's state."""
    if not isinstance(value, TensorEntry):
        return [value] * len(unit.slots)
    parts = parts_of(value)
    have = [part for part in parts if part is not None]
    chunk = _chunk(unit)
    if len(have) == len(unit.parts) and all(_is_chunk(part, chunk, value.dtype) for part in have):
        return [cut_out(value.dtype, parts, slot) for slot in unit.slots]
    if any(part.numel > 1 or part.storage is None for part in have):
        shapes = ", ".join(str(list(part.shape)) for part in have)
        problems.append(Problem(f"is {shapes} on the ranks, {unit.key} is [{chunk}] on each", value.key))
        return [value] * len(unit.slots)
    if not is_held_alike(value):
        problems.append(Problem(DIFFERS, value.key))
    return [in_own_storage(have[0]) for _ in unit.slots]  # a step counter: each parameter has one of its own


def _is_chunk(part: TensorEntry, numel: int, dtype: str) -> bool:
    return part.shape == (numel,) and part.dtype == dtype


# State with the shapes of slices


def _of_slices(state: OptimizerState, names: Names, where: str, problems: list[Problem]) -> OptimizerState:
    """``use_orig_params=True``: each rank holds a slice of each parameter's state, or none of it."""
    found = _owners(state, names, where).names
    shapes = Parameters(names).shapes
    made = {param: _joined(own, shapes[found[param]], problems) for param, own in state.state.items()}
    return renamed(replace(state, state=made), found)


def _owners(state: OptimizerState, names: Names, where: str) -> ParamMap:
    """Whose slices they are: of ids in several groups that nobody names, by how many elements all ranks hold."""
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
    held = [part.numel for part in parts_of(entry) if part is not None]
    return replace(entry, shape=(sum(held),)) if entry.shape else entry


def _joined(own: Mapping[Any, Any], shape: tuple[int, ...] | None, problems: list[Problem]) -> dict[Any, Any]:
    made = {}
    for name, value in own.items():
        made[name] = value
        if isinstance(value, TensorEntry):
            whole = resolved(value, shape if value.shape else ())
            if whole is None:
                held = sum(part.numel for part in parts_of(value) if part is not None)
                problems.append(
                    Problem(f"the ranks hold {held:,} elements, the parameter is {list(shape or ())}", value.key)
                )
            elif is_a_copy(whole, value) and not is_held_alike(value):
                problems.append(Problem(DIFFERS, value.key))
            else:
                made[name] = whole
    return made
