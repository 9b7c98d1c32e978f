"""The optimizer part of a remap: whose state it is, and the new names, order and groups."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ckpttool.core import expression as ex
from ckpttool.core.checkpoint import Checkpoint, Section
from ckpttool.core.errors import Problem, Refused, same_problem
from ckpttool.core.expression import Expression, Op, Ref
from ckpttool.core.names import SERIALIZED, Names
from ckpttool.core.optimizer_state import ID, OptimizerState, Param, ParamGroup, params_of, renamed
from ckpttool.core.strides import Shape
from ckpttool.core.tables import selected, shapes_of
from ckpttool.core.text import shell, some
from ckpttool.naming import wrappers
from ckpttool.naming.model_change import ModelChange, copied, is_whole
from ckpttool.naming.wrappers import strip
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
from ckpttool.optimizers.parameters import Parameters
from ckpttool.optimizers.request import OptimizerRemap, OptimizerRequest
from ckpttool.optimizers.transform import (
    Shapes,
    from_serialized,
    identity,
    in_form,
    move_of,
    move_state,
    sources_between,
    start_from_scratch,
    to_serialized,
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


class _OptimizerTask(NamedTuple):
    """The change of one optimizer. `where` is its place in the file, as messages call it, `was` the
    form of its keys in the file, `to` the form in which it is written.
    """

    request: OptimizerRequest
    where: str
    was: str
    to: str

    def with_request(self, request: OptimizerRequest) -> _OptimizerTask:
        return self._replace(request=request)

    @property
    def keeps_ids(self) -> bool:
        """Whether ids are written and no other model loads them."""
        return self.to == ID and self.request.to_names is None


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
    task = _OptimizerTask(request, section.title, state.form, request.keys or state.form)
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
    section: Section, state: OptimizerState, task: _OptimizerTask
) -> tuple[OptimizerState, OptimizerRemap]:
    """Return the state under the requested names, in the requested form, and the record of the
    change.

    name in the file ─ `_canonical_state` ─▶ canonical name ─ `_new_state` ─▶ new name
    new name ─ `_spelled` ─▶ name as it is written
    """
    request = task.request
    named = _canonical_state(state, task)
    shapes = _shapes(named.state, request)
    new = _new_state(named.state, shapes, task)
    spelled = _spelled(state, new.state, task)
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


def _new_state(named: OptimizerState, shapes: Shapes, task: _OptimizerTask) -> _NewState:
    """Return the state under its new names, with all groups and values. `shapes` are the shapes of
    the parameters of `named`.
    """
    request, where = task.request, task.where
    to_names = request.to_names
    sources, follow_keys = _sources(named, task)
    if to_names is not None:
        sources = _of_new_model(sources, to_names, where)
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
    task: _OptimizerTask,
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


def _notes_on_names(named: _CanonicalState, task: _OptimizerTask) -> list[str]:
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


def _follow_narrowed(state: OptimizerState, task: _OptimizerTask) -> _OptimizerTask:
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
    shapes: dict[str, Shape | None] = {}
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


def _is_renamed(state: OptimizerState, task: _OptimizerTask) -> bool:
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


def _canonical_state(state: OptimizerState, task: _OptimizerTask) -> _CanonicalState:
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
        canonical = _unwrapped(canonical, request)
    file_names: dict[str, Expression] = {}
    for param, name in canonical.items():
        file_names[name] = Ref(str(param))
    ids = param_map if state.form == ID else None
    return _CanonicalState(renamed(state, canonical), file_names, ids)


def _unwrapped(names: Mapping[Param, str], request: OptimizerRequest) -> dict[Param, str]:
    """Return the names without the wrappers that the remap removes from the model's keys, or
    replaces.
    """
    model = request.model
    if request.ruled is not None or model is None or not model.renames(list(names.values())):
        return dict(names)
    paths = wrappers.recognize(model.section.keys)
    return {param: strip(name, paths) for param, name in names.items()}


def _rules_first(state: OptimizerState, task: _OptimizerTask) -> _OptimizerTask:
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
    sources, _ = _sources(renamed(state, listed), after)
    return task if match_to_model(sources, names)[1] else after


def _of_new_model(
    sources: Mapping[str, Expression], names: Names, where: str
) -> dict[str, Expression]:
    """Return `sources` under the canonical names of the model that will load them, if it has these
    names.
    """
    canonical, problems = match_to_model(sources, names)
    if not canonical:
        raise Refused(
            f"{where}: none of its parameters has a name of {names.model}",
            hint="--rule 'FROM => TO' says which parameter is which",
            problems=problems,
        )
    return {canonical[name]: source for name, source in sources.items() if name in canonical}


def _spelled(
    state: OptimizerState, moved: OptimizerState, task: _OptimizerTask
) -> dict[Param, str]:
    """Return the name of each parameter as it is written: names next to ids are spelled as the
    model's keys, with wrappers.

    Raise `Refused` for other forms if the names would have no wrappers next to a model whose keys
    get some.
    """
    request = task.request
    names = {param: str(param) for param in moved.params}
    wrapped = _wrapped_names(moved, request)
    if task.to == ID:
        has_names = all(group.param_names for group in moved.nonempty_groups)
        return names | wrapped if has_names else names
    old_keys = set() if request.model is None else set(request.model.section.keys)
    # torch.distributed.checkpoint names parameters without the wrappers of the keys next to them
    are_apart = state.form != ID and old_keys.isdisjoint(map(str, state.params))
    if wrapped and not are_apart:
        param, name = next(iter(wrapped.items()))
        raise Refused(
            f"{task.where}: the names of its parameters have no wrappers, and the model's keys"
            " would have some",
            hint="--to serialized removes the wrappers from the keys, --optimizer-keys id removes"
            " the names from the optimizer",
            problems=[Problem(f"the key is {name}", str(param))],
        )
    return names


def _wrapped_names(moved: OptimizerState, request: OptimizerRequest) -> dict[Param, str]:
    """Return the parameters whose keys in the model have wrappers, with these keys."""
    keys = set(request.model_keys)
    evidence = wrappers.infer(request.model_keys)
    prefix = f"{evidence.root[-1]}." if evidence.root else ""
    by_name = {strip(key, evidence.paths): key for key in request.model_keys}
    wrapped: dict[Param, str] = {}
    for param in moved.params:
        if param in keys or str(param).startswith(prefix or "."):
            continue
        name = copied(by_name.get(str(param), "")) or prefix + str(param)
        if name != param:
            wrapped[param] = name
    return wrapped


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


def _by_rules(named: OptimizerState, task: _OptimizerTask) -> dict[str, Expression] | None:
    """Return the parameters after the rules; None without rules, or if no parameter is a tensor of
    the model.
    """
    request, where = task.request, task.where
    ruled = request.ruled
    if ruled is None:
        return None
    before = identity(named.params)
    if request.names is not None:
        serialized = to_serialized(request.names, named.params)
        if len(ruled.shapes(list(serialized))) > len(ruled.shapes(list(before))):
            before = serialized
    after = ruled.sources(before, where)
    if after is None:
        if not ruled.keeps_places and len(request.state_dicts) == 1:
            raise Refused(
                f"{where}: none of its parameters is a tensor of the model, so that its state"
                " cannot follow the tensors",
                hint=start_from_scratch(where),
                problems=[Problem("no tensor of the model", str(param)) for param in named.params],
            )
        return None
    if task.keeps_ids:
        _check_places(named, after, ruled is request.narrowed, where)
    return after


def _kept(
    named: OptimizerState, left_out: Container[str], change: ModelChange
) -> dict[str, Expression]:
    """Return the parameters that are not left out, under the new names of their keys."""
    names = [str(param) for param in named.params if param not in left_out]
    new_names = change.new_names(names)
    return {new_names.get(name, name): Ref(name) for name in names}


def _check_places(
    named: OptimizerState, after: Mapping[str, Expression], is_narrowed: bool, where: str
) -> None:
    """Raise `Refused` unless each parameter stays one, so that ids can stay what they are."""
    kept = set(ex.refs(tuple(after.values())))
    if len(after) == len(kept) == len(named.params) and all(map(is_whole, after.values())):
        return
    if is_narrowed:
        left_out = [str(param) for param in named.params if str(param) not in kept]
        raise Refused(
            f"{where}: parameters of the model are left out, and the optimizer still numbers them",
            hint=f"drop the optimizer too: {shell('--drop', where)}; or pass --optimizer-keys fqn,"
            " to keep the state of the other parameters under their names",
            problems=same_problem("left out of the model", left_out),
        )
    raise Refused(
        f"{where}: the model gets other parameters, and nothing says in which order it registers"
        " them",
        hint="pass --to-model NEW, the model that is to load it; or --optimizer-keys fqn,"
        " which names them",
    )


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


def _sources(named: OptimizerState, task: _OptimizerTask) -> tuple[dict[str, Expression], bool]:
    """Return the new parameters as expressions over the old ones, and whether they follow the keys
    of the model.

    The first that applies decides: parameters that are left out, the rules, the names of another
    model, a function that renames.
    """
    request = task.request
    if request.left_out and request.ruled is not None:
        return _kept(named, request.left_out, request.ruled), True
    ruled = _by_rules(named, task)
    if ruled is not None:
        return ruled, True
    names, called = request.names, request.called or str
    if request.to_names is not None and names is not None:
        new_names = {str(param): called(str(param)) for param in named.params}
        return sources_between(names, request.to_names, new_names), False
    if request.form == SERIALIZED and names is not None and task.to != ID:
        before = to_serialized(names, named.params)
    else:
        before = identity(named.params)
    after = {called(name): source for name, source in before.items()}
    if len(after) < len(before):
        raise Refused(
            "the rules give several parameters of the optimizer one name",
            hint="`--dry-run` shows the names",
        )
    return after, False
