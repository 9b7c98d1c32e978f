"""The optimizer part of a remap: whose state it is, and the new names, order and groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ckpttool.core import expression as ex
from ckpttool.core.checkpoint import Checkpoint, Section
from ckpttool.core.errors import Refused, same_problem
from ckpttool.core.expression import Expression, Op, Ref
from ckpttool.core.names import Names
from ckpttool.core.optimizer_state import ID, OptimizerState, Param, ParamGroup, params_of, renamed
from ckpttool.core.tables import selected, shapes_of
from ckpttool.core.text import some
from ckpttool.optimizers import forms
from ckpttool.optimizers.classes import class_of, missing_for_step
from ckpttool.optimizers.created import created_state
from ckpttool.optimizers.groups import (
    changed_options,
    keep_groups,
    new_groups,
    notes_on_change,
    with_groups,
    with_new_names,
)
from ckpttool.optimizers.identify import (
    Basis,
    ParamMap,
    by_optimizer_names,
    identify_params,
    listed_names,
    match_to_model,
    names_without_model,
    with_shape_doubt,
)
from ckpttool.optimizers.key_order import compare_key_order
from ckpttool.optimizers.left_out import check_names_are_keys, without_left_out
from ckpttool.optimizers.new_params import sources_of_new_params, under_names_of
from ckpttool.optimizers.parameters import Parameters
from ckpttool.optimizers.request import OptimizerRemap, OptimizerRequest, OptimizerTask
from ckpttool.optimizers.spelling import spelled_names, without_wrappers
from ckpttool.optimizers.transform import (
    Shapes,
    from_serialized,
    identity,
    in_form,
    move_of,
    move_state,
    start_from_scratch,
)


def remap_optimizers(
    source: Checkpoint, request: OptimizerRequest
) -> tuple[Checkpoint, tuple[OptimizerRemap, ...]]:
    """Return `source` with every optimizer as requested, and a record of each optimizer that
    changed.

    Raise `Refused` if ids are ambiguous, if state cannot follow its parameter, and if
    `request.keys` is set but the file has no optimizer.
    """
    if request.keys is not None and not source.optimizers:
        raise Refused(
            f"{source.source} holds no optimizer",
            hint=f"`{source.inspect_call}` lists its sections; leave the option out",
        )
    sections: list[Section] = []
    remaps: list[OptimizerRemap] = []
    for section in source.sections:
        changed = None
        if section.kind == "optimizer":
            changed = remap_optimizer(section, request.of(section))
        if changed is None:
            sections.append(section)
        else:
            sections.append(changed[0])
            remaps.append(changed[1])
    if not remaps:
        return source, ()
    return replace(source, sections=tuple(sections)), tuple(remaps)


def remap_optimizer(
    section: Section, request: OptimizerRequest
) -> tuple[Section, OptimizerRemap] | None:
    """Return the section as requested, and the record of the change; None if nothing changes.

    A change to the names or the order of a model is recorded even if the section is so already: its
    notes say what was checked.
    """
    state = forms.read(section)
    if not state.params:
        return None
    task = OptimizerTask(request, section.title, state.form, request.keys or state.form)
    task = _follow_narrowed(state, task)
    request = task.request
    is_by_model = request.keys is not None and request.names is not None
    is_recorded = request.to_names is not None or is_by_model
    if not is_recorded and task.to == state.form and not _is_renamed(state, task):
        return None
    task = _rules_first(state, task)
    request = task.request
    is_renamed = request.names is not None or request.ruled is not None
    if request.to_names is not None and not is_renamed and listed_names(state) is None:
        raise Refused(
            f"{task.where}: the names of the model that saved the checkpoint are needed",
            hint="pass --model MODEL too",
        )
    result, report = _moved(section, state, task)
    if result == state and not is_recorded:
        return None
    return forms.write(result, section), report


class _CanonicalState(NamedTuple):
    """An optimizer's state under canonical names.

    `in_file` is each name as an expression over the names in the file, `ids` whose state the ids
    are, if it has ids.
    """

    state: OptimizerState
    in_file: Mapping[str, Expression]
    ids: ParamMap | None = None


class _NewState(NamedTuple):
    """The state under its new names, before they are spelled as the model's keys.

    `sources` are the parameters as expressions over canonical names, `created` is the state of
    parameters without any, as a new optimizer has it.
    """

    state: OptimizerState
    sources: Mapping[str, Expression]
    created: Mapping[Param, Mapping[Any, Any]]
    notes: Sequence[str]

    @property
    def held(self) -> dict[str, Expression]:
        """The sources of the parameters that the new optimizer has."""
        return selected(self.sources, map(str, self.state.params))


def _moved(
    section: Section, state: OptimizerState, task: OptimizerTask
) -> tuple[OptimizerState, OptimizerRemap]:
    """Return the state under the requested names, in the requested form, and the record of the
    change.

    name in the file ─ `_canonical_state` ─▶ canonical name ─ `_new_state` ─▶ new name
    new name ─ `spelled_names` ─▶ name as it is written
    """
    request = task.request
    named = _canonical_state(state, task)
    shapes = _shapes(named.state, request)
    new = _new_state(named.state, shapes, task)
    spelled = spelled_names(state, new.state, task)
    written = renamed(new.state, spelled)
    sources = {spelled[name]: source for name, source in new.held.items()}
    over_file_names = {
        name: ex.substitute(source, named.in_file.__getitem__) for name, source in sources.items()
    }
    file_shapes = _file_shapes(named.in_file, shapes, request.names)
    move = move_of(section, state, task.to, written.groups, over_file_names, file_shapes)
    created = {spelled[param]: tuple(slots) for param, slots in new.created.items()}

    read = set(ex.refs(tuple(new.held.values())))
    dropped = tuple(str(param) for param in named.state.state if param not in read)
    without_source = [spelled[param] for param in new.state.params if param not in new.sources]
    without_state = [name for name in without_source if name not in created]
    notes = notes_on_change(task.where, state, written, task.to, without_state, dropped)
    notes += new.notes
    notes += _notes_on_names(named, task)
    return in_form(written, task.to), OptimizerRemap(
        section.path,
        was=task.was,
        to=task.to,
        params=len(written.params),
        new=tuple(without_source),
        dropped=dropped,
        notes=tuple(notes),
        move=replace(move, created=created),
        loaded_by=request.to_names,
        ids=named.ids,
    )


def _new_state(named: OptimizerState, shapes: Shapes, task: OptimizerTask) -> _NewState:
    """Return the state under its new names, with all groups and values. `shapes` are the shapes of
    the parameters of `named`.
    """
    request, where = task.request, task.where
    to_names = request.to_names
    sources, follow_keys = sources_of_new_params(named, task)
    if to_names is not None:
        sources = under_names_of(sources, to_names, where)
    saved_by = request.names
    if follow_keys and to_names is None:
        saved_by = None  # the parameters may have other names than this model's
    groups = _groups(named, sources, saved_by, task)
    held = selected(sources, map(str, params_of(groups)))
    states = move_state(named, held, shapes, where)
    loaded_by = to_names or request.names
    created, notes = created_state(groups, states, loaded_by, request.create, task.to, where)
    moved = with_groups(named, groups, {**states, **created})
    _check_loads(moved, saved_by, to_names, where)
    changed = changed_options(named, sources, groups)
    if changed:
        names = some(changed, 20)
        notes = [*notes, f"{where}: new param groups have the values that the code sets: {names}"]
    return _NewState(moved, sources, created, notes)


def _groups(
    named: OptimizerState,
    sources: Mapping[str, Expression],
    saved_by: Names | None,
    task: OptimizerTask,
) -> tuple[ParamGroup, ...]:
    """Return the param groups of the new state.

    Without some of its parameters the state keeps its groups. Ids that no other model loads keep
    their order, under new names. Otherwise the model that loads the state decides.
    """
    request, key_forms = task.request, (task.was, task.to)
    if request.left_out:
        return keep_groups(named, sources)
    if task.keeps_ids:
        same = identity(named.params)
        old_groups = new_groups(named, same, request.names, None, *key_forms, task.where)
        return with_new_names(old_groups, sources)
    return new_groups(named, sources, saved_by, request.to_names, *key_forms, task.where)


def _notes_on_names(named: _CanonicalState, task: OptimizerTask) -> list[str]:
    """Return the notes on what the names, or the new ids, rest on."""
    notes = []
    if named.ids is not None and named.ids.is_assumed:
        notes.append(named.ids.rests_on(task.where))
    if task.keeps_ids and task.was != ID and task.request.names is None:
        notes.append(
            f"{task.where}: its ids are in the order of the file, which may not be the order of the"
            " model that loads them: --model MODEL takes that order"
        )
    return notes


def _follow_narrowed(state: OptimizerState, task: OptimizerTask) -> OptimizerTask:
    """Return the task for an optimizer next to a model some of whose tensors are left out (the
    narrowed model): its parameters follow their keys, or stay if all of them are kept.
    """
    request = task.request
    narrowed = request.narrowed
    if narrowed is None:
        return task
    listed = listed_names(state)
    if listed is not None and request.names is None and request.model is not None:
        check_names_are_keys(list(listed.values()), narrowed, task.where)
    stays = replace(request, narrowed=None)
    if task.was == ID and task.keeps_ids and narrowed.keeps_rest:
        left_out = without_left_out(state, request, narrowed, task.where)
        return task.with_request(left_out or stays)
    if listed is None:
        follows = task.to != ID
    else:
        follows = request.model is None or narrowed.loses(list(listed.values()))
    if not follows:
        return task.with_request(stays)
    return task.with_request(replace(request, ruled=narrowed, model=narrowed))


def _shapes(named: OptimizerState, request: OptimizerRequest) -> Shapes:
    """Return the shapes of parameters, by canonical name, as far as models or rules say them."""
    shapes: dict[str, tuple[int, ...] | None] = {}
    if request.ruled is not None:
        shapes.update(request.ruled.shapes(list(map(str, named.params))))
    if request.names is not None:
        shapes.update(Parameters(request.names).shapes)
    return shapes


def _file_shapes(
    file_sources: Mapping[str, Expression], shapes: Shapes, names: Names | None
) -> Shapes:
    """Return the shapes of parameters by the names that the file gives them."""
    if names is not None and any(isinstance(source, Op) for source in file_sources.values()):
        # the keys are the file's parameters
        return shapes_of(names.serialized)
    by_file_name = {}
    for name, source in file_sources.items():
        for file_name in ex.refs(source):
            by_file_name[file_name] = shapes.get(name)
    return by_file_name


def _is_renamed(state: OptimizerState, task: OptimizerTask) -> bool:
    """Return True if parameters change, or their names in the file."""
    request = task.request
    ruled = request.ruled
    if ruled is not None and not ruled.keeps_places:
        return True
    renames = request.called is not None
    if ruled is not None and ruled.renames(ruled.section.keys):  # a function, without rules
        renames = True
    if task.to != ID and (renames or request.form is not None):
        return True
    listed = listed_names(state)
    if listed is None:
        return False
    names = list(listed.values())
    if renames or (request.narrowed is not None and request.narrowed.loses(names)):
        return True
    return request.model is not None and request.model.renames(names)


def _canonical_state(state: OptimizerState, task: OptimizerTask) -> _CanonicalState:
    """Return the state under the canonical names of the model that saved it; without a model, under
    the names in the file.
    """
    request, where = task.request, task.where
    names = request.names
    as_written = {param: str(param) for param in state.params}
    if names is not None and state.form != ID:
        sources = from_serialized(names, state.params)
        if sources is not None:
            shapes = shapes_of(names.serialized)
            named = renamed(state, as_written)
            moved = move_state(named, sources, shapes, where)
            return _CanonicalState(with_groups(named, keep_groups(named, sources), moved), sources)
    canonical: Mapping[Param, str] = as_written
    param_map: ParamMap | None = None
    if names is not None or state.form == ID:
        param_map = _identified(state, request, where)
        doubt = param_map.doubt
        if doubt is not None and doubt.by_another and request.old_model is not None:
            param_map = replace(param_map, doubt=replace(doubt, hint=request.old_model))
        canonical = param_map.without_doubt(where).names
    if names is None and listed_names(state) is not None:
        canonical = without_wrappers(canonical, request)
    file_names: dict[str, Expression] = {}
    for param, name in canonical.items():
        file_names[name] = Ref(str(param))
    ids = param_map if state.form == ID else None
    return _CanonicalState(renamed(state, canonical), file_names, ids)


def _rules_first(state: OptimizerState, task: OptimizerTask) -> OptimizerTask:
    """Return the task with the named model as the model that loads the state, if its names fit the
    file after the rules, and not before.

    `--model` usually names the model that saved the file.
    """
    request = task.request
    listed, names = listed_names(state), request.names
    if listed is None or names is None or request.to_names is not None or request.called is None:
        return task
    if not match_to_model(listed.values(), names)[1]:
        return task
    if by_optimizer_names(state, names) is not None:
        return task
    after = task.with_request(replace(request, names=None, to_names=names))
    sources, _ = sources_of_new_params(renamed(state, listed), after)
    return task if match_to_model(sources, names)[1] else after


def _identified(state: OptimizerState, request: OptimizerRequest, where: str) -> ParamMap:
    """Identify the parameters of the ids; with rules only, the file's own keys count too if they
    can be these.
    """
    if request.owners is not None:
        return request.owners
    state_dicts = request.state_dicts
    names, ruled = request.names, request.ruled
    if ruled is None:
        return identify_params(state, names, where, state_dicts)
    if names is None:
        by_keys = names_without_model(state, state_dicts)
        return by_keys if by_keys is not None else identify_params(state, None, where, state_dicts)
    # it may be the model after the rules
    if not compare_key_order(state_dicts, names, set(Parameters(names).shapes)).is_shown:
        state_dicts = (ruled.after,)
    return identify_params(state, names, where, state_dicts)


def _check_loads(moved: OptimizerState, old: Names | None, new: Names | None, where: str) -> None:
    """Raise `Refused` if the optimizer that will load the state cannot take a step with it."""
    if new is not None:
        param_map = ParamMap(moved, {param: str(param) for param in moved.params}, Basis.KEYS)
        with_shape_doubt(param_map, new).without_doubt(where)
    target = new or old
    if target is None:
        return
    missing = missing_for_step(moved, target.optimizer_groups, Parameters(target).first_step)
    names = dict.fromkeys(key.rpartition(".")[2] for key in missing)
    if names:
        saved_class = class_of(moved) or "another optimizer"
        problem = "the optimizer needs it, and the saved state does not have it"
        raise Refused(
            f"{where}: this is the state of {saved_class}; {target.optimizer_class} loads it, and"
            " fails at the next step",
            hint=start_from_scratch(where),
            problems=same_problem(problem, names),
        )
