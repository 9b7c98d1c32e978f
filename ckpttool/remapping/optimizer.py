"""The optimizer part of a remap: whose state it is, and the new names, order and groups."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from itertools import chain
from typing import Any

from ckpttool.core import expression as ex
from ckpttool.core.checkpoint import Checkpoint, Section, TensorEntry
from ckpttool.core.errors import Problem, Refused
from ckpttool.core.expression import Expression, Op, Ref
from ckpttool.core.names import SERIALIZED, Names
from ckpttool.core.optimizer_state import (
    FLAT,
    ID,
    Filled,
    OptimizerState,
    Param,
    ParamGroup,
    renamed,
)
from ckpttool.core.plan import OptimizerMove, Plan
from ckpttool.core.text import Info, plural, some
from ckpttool.core.values import dataclass
from ckpttool.evaluate.apply import entry_of
from ckpttool.naming import wrappers
from ckpttool.naming.wrappers import strip
from ckpttool.operands.checkpoint import saved_state_dicts
from ckpttool.optimizers import forms
from ckpttool.optimizers.forms import WHOLE, class_of, lacking, with_new_options
from ckpttool.optimizers.identify import (
    Parameters,
    ParamMap,
    check,
    in_file,
    in_model,
    own_names,
    owners,
    saved_order,
)
from ckpttool.optimizers.transform import (
    arranged,
    between,
    carry,
    changed_options,
    from_serialized,
    grouped,
    identity,
    in_form,
    in_groups,
    move_of,
    placed,
    plain_options,
    to_serialized,
)
from ckpttool.ruleset.patterns import Renaming


def new_groups(
    named: OptimizerState,
    sources: Mapping[str, Expression],
    old: Names | None,
    new: Names | None,
    was: str,
    to: str,
    where: str,
) -> tuple[ParamGroup, ...]:
    """Return the new param groups: the new optimizer's, or else the old ones in the new model's
    order.

    `named` is the state under canonical names, `sources` each new parameter as an expression over
    these, `was` and `to` are the old and the new form of the keys; `old` are the names of the model
    that saved it, `new` of the model that loads it, None for the same one. Raise `Refused` if it is
    unknown to which group a parameter belongs.
    """
    target = new or old
    if target is None:
        return placed(named, sources)
    parameters = Parameters(target)
    if new is None and to != ID:
        return _ordered_like(placed(named, sources), parameters.groups)
    if parameters.groups and (target.optimizer or target.optimizer_groups):
        if new is None:
            _same_parameters(named, parameters, where)
        groups = arranged(
            named, sources, parameters.groups, target.optimizer_groups, by_parameter=was == FLAT
        )
        if new is None:
            return groups
        return with_new_options(groups, parameters.fresh_optimizer, parameters.first_step, named)
    layout = _in_model_order(named, sources, old, parameters)
    if layout is not None:
        return arranged(named, sources, [layout], ())
    if to != ID:
        return placed(named, sources)
    added = [name for name in parameters.trainable if name not in sources]
    if added:
        raise Refused(
            f"{where} has {len(named.groups)} param groups, and the new model has parameters that"
            " it has not",
            hint="pass --to-optimizer O, the function that makes the new optimizer",
            problems=[Problem("in which group?", name) for name in added],
        )
    rank = {name: place for place, name in enumerate(parameters.shapes)}
    ordered = []
    for group in placed(named, sources):
        params = sorted(group.params, key=lambda name: rank[str(name)])
        ordered.append(grouped(params, group.options))
    return tuple(ordered)


def _ordered_like(
    groups: tuple[ParamGroup, ...], order: Sequence[Sequence[str]]
) -> tuple[ParamGroup, ...]:
    """Return the groups in the optimizer's order, if they are the same, so that loading by position
    works too.
    """
    by_params = {frozenset(map(str, group.params)): group for group in groups}
    if len(by_params) != len(groups) or by_params.keys() != set(map(frozenset, order)):
        return groups
    return tuple(grouped(params, by_params[frozenset(params)].options) for params in order)


def _same_parameters(named: OptimizerState, parameters: Parameters, where: str) -> None:
    """Raise `Refused` if the optimizer has other parameters than the file: a change of form loses
    nothing.
    """
    saved, expected = set(map(str, named.params)), set(chain.from_iterable(parameters.groups))
    problems = []
    for name in sorted(saved - expected):
        problems.append(Problem("in the file, and not in the optimizer", name))
    for name in sorted(expected - saved):
        problems.append(Problem("in the optimizer, and not in the file", name))
    if problems:
        raise Refused(
            f"{where} was not saved by this optimizer: its parameters are others",
            hint="--to-model and --to-optimizer name what is to load it",
            problems=problems,
        )


def _in_model_order(
    named: OptimizerState,
    sources: Mapping[str, Expression],
    saved_by: Names | None,
    parameters: Parameters,
) -> list[str] | None:
    """Return the parameters of an optimizer with one group, in ``model.parameters()`` order; None
    if it has more.

    It holds the same as before: all parameters of the model, or all trainable ones, or only its
    own.
    """
    if len(named.nonempty_groups) != 1:
        return None
    old = Parameters(saved_by) if saved_by is not None else parameters
    saved = set(map(str, named.params))
    if saved == set(old.shapes):
        return list(parameters.shapes)
    if saved == set(old.trainable):
        return list(parameters.trainable)
    return [name for name in parameters.shapes if name in sources]


Create = Callable[
    [Mapping[str, Mapping[str, Any]]], tuple[Mapping[str, Mapping[str, Any]], Mapping[str, str]]
]
OfSection = tuple[Names | None, Names | None, Create | None]

AFRESH = "load the model alone (CKPT::SECTION), and start the optimizer from scratch"


@dataclass(frozen=True, slots=True)
class OptimizerRequest:
    """The form of the keys that the optimizers get, and the models that saved them and will load
    them.

    `names` are the names of the model (and the optimizer) that saved the checkpoint, `to_names` of
    the model that will load it. `form` ``serialized`` gives parameters the names of the model's
    keys; otherwise they get canonical names. `ruled` is the effect of the rules on the model,
    `model` the effect of the complete remap, `model_keys` its keys. `narrowed` is `model` if some
    of its tensors are left out: then parameters that have names follow their keys. `state_dicts`
    are those of the file as it was saved (`operands.checkpoint.saved_state_dicts`): the order of
    their keys is evidence for the ids. `old_model` is the same command with the model named that
    saved the file, `output` the file to write. `of_sections` are `names` and `to_names` for the
    optimizers that are named by their sections.
    """

    keys: str | None = None
    names: Names | None = None
    to_names: Names | None = None
    rules: Sequence[Renaming] = ()
    form: str | None = None
    ruled: RuleEffect | None = None
    model: RuleEffect | None = None
    narrowed: RuleEffect | None = None
    model_keys: Sequence[str] = ()
    state_dicts: Sequence[Section] | None = None
    old_model: str | None = None
    output: str | None = None
    create: Create | None = None
    of_sections: Mapping[str, OfSection] = field(default_factory=dict)

    def of(self, section: Section) -> OptimizerRequest:
        """Return the request with the names for the optimizer of a section."""
        if section.path not in self.of_sections:
            return self
        names, to_names, create = self.of_sections[section.path]
        return replace(self, names=names, to_names=to_names, create=create)


@dataclass(frozen=True, slots=True)
class OptimizerRemap:
    """The result for one optimizer.

    `evidence` is what identified its ids; `new` are parameters without state, `dropped` are
    parameters whose state has no place in the new optimizer. `move` is the change as a plan records
    it. `loaded_by` are the names of the model that will load it, if that is known.
    """

    section: str
    was: str
    to: str
    params: int
    evidence: str | None = None
    new: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())
    move: OptimizerMove | None = field(default=None, compare=False)
    loaded_by: Names | None = field(default=None, compare=False)


def remap_optimizers(
    source: Checkpoint, request: OptimizerRequest
) -> tuple[Checkpoint, tuple[OptimizerRemap, ...]]:
    """Return `source` with every optimizer as requested, and a record of each optimizer that
    changed.

    Raise `Refused` if ids are ambiguous, if state cannot follow its parameter, and if
    `request.keys` is set but the file has no optimizer.
    """
    if request.state_dicts is None:
        request = replace(request, state_dicts=saved_state_dicts(source))
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
            changed = _remapped(section, request.of(section))
        if changed is None:
            sections.append(section)
        else:
            sections.append(changed[0])
            remaps.append(changed[1])
    if not remaps:
        return source, ()
    return replace(source, sections=tuple(sections)), tuple(remaps)


def _remapped(section: Section, request: OptimizerRequest) -> tuple[Section, OptimizerRemap] | None:
    """Return the section as requested; None if it is so already."""
    where = section.title
    state = forms.read(section)
    to = request.keys or state.form
    listed = in_file(state)[0]
    narrowed = request.narrowed
    if narrowed is not None:
        if state.form == to == ID and request.to_names is None and narrowed.keeps_rest:
            rest = _without_left_out(section, state, request, narrowed)
            if rest is not None:
                return rest
        request = _follow_narrowed(request, narrowed, listed, to)
    to_names = request.to_names
    must_write = to_names is not None or (request.keys is not None and request.names is not None)
    if not state.params:
        return None
    if not must_write and to == state.form and not _is_renamed(state, request, to):
        return None
    request = _rules_first(state, request, where)
    to_names = request.to_names
    if to_names is not None and request.names is None and request.ruled is None and listed is None:
        raise Refused(
            "the names of the model that saved the checkpoint are needed",
            hint="pass --model MODEL too",
        )
    result, report = _moved(section, state, request, to)
    return None if result == state and not must_write else (forms.write(result, section), report)


def _moved(
    section: Section, state: OptimizerState, request: OptimizerRequest, to: str
) -> tuple[OptimizerState, OptimizerRemap]:
    """Return the state under the requested names, in form `to`, and the record of the change.

    file's name ─ `_named` ─▶ canonical name ─ `_sources` ─▶ new name ─ `_as_the_keys` ─▶ written
    """
    where, to_names = section.title, request.to_names
    named, param_map, file_sources = _named(state, request, where)
    sources, follow_keys = _sources(named, request, to, where)
    if to_names is not None:
        sources = _of_new_model(sources, to_names, where)
    # the parameters may have other names than this model's
    saved_by = None if follow_keys else request.names
    if to == ID and to_names is None:
        same = identity(named.params)
        old_groups = new_groups(named, same, request.names, None, state.form, to, where)
        groups = _with_new_names(old_groups, sources)
    else:
        groups = new_groups(named, sources, saved_by, to_names, state.form, to, where)
    params = map(str, chain.from_iterable(group.params for group in groups))
    held = {name: sources[name] for name in params if name in sources}
    shapes = _shapes(named, request)
    states = carry(named, held, shapes, where)
    created, notes_on_created = _created(groups, states, request, to, where)
    moved = in_groups(named, groups, {**states, **created})
    _check_loads(moved, saved_by, to_names, where)

    spelled = {param: str(param) for param in moved.params}
    spelled |= _as_the_keys(state, moved, request, to, where)
    new = tuple(spelled[param] for param in moved.params if param not in sources)
    names_created = {spelled[param]: tuple(created[param]) for param in created}
    moved = renamed(moved, spelled)
    over = {}
    for name, source in held.items():
        over[spelled[name]] = ex.substitute(source, file_sources.__getitem__)
    file_shapes = _file_shapes(file_sources, shapes, request.names)
    move = move_of(section, state, to, moved.groups, over, file_shapes)
    move = replace(move, created=names_created)
    read = set(ex.refs(tuple(held.values())))
    dropped = tuple(str(param) for param in named.state if param not in read)
    without_state = [name for name in new if name not in names_created]
    notes = _notes(where, state, moved, to, without_state, dropped) + notes_on_created
    changed = changed_options(named, sources, groups)
    if changed:
        notes.append(
            f"{where}: new param groups have the values that the code sets: {some(changed, 20)}"
        )
    if param_map is not None and param_map.assumed:
        notes.append(param_map.rests_on(where))
    return in_form(moved, to), OptimizerRemap(
        section.path,
        was=state.form,
        to=to,
        params=len(moved.params),
        evidence=None if param_map is None else param_map.evidence,
        new=new,
        dropped=dropped,
        notes=tuple(notes),
        move=move,
        loaded_by=to_names,
    )


def _created(
    groups: Sequence[ParamGroup],
    states: Mapping[Param, Mapping[Any, Any]],
    request: OptimizerRequest,
    to: str,
    where: str,
) -> tuple[dict[Param, Mapping[Any, Any]], list[str]]:
    """Return the state that the optimizer creates for trainable parameters without state, if that
    was requested, and notes on it.

    ``Optimizer.load_state_dict``, which reads ids, lets the next step create it.
    """
    target = request.to_names or request.names
    if to == ID or target is None or not target.optimizer:
        return {}, []
    parameters = Parameters(target)
    options_of = _without_state(groups, states, parameters)
    if not options_of:
        return {}, []
    if request.create is None:
        names = [parameters.canonical[fqn] for fqn in options_of]
        text = (
            f"{where}: {plural(len(names), 'trainable parameter')} without state, which"
            f" set_optimizer_state_dict refuses; with --partial, {target.optimizer_class} creates"
            f" it: {some(names)}"
        )
        return {}, [text]
    filled, unknown = request.create(options_of)
    created: dict[Param, Mapping[Any, Any]] = {}
    for fqn, state in filled.items():
        name = parameters.canonical[fqn]
        created[name] = {slot: _entry(value) for slot, value in state.items()}
    notes: list[str] = []
    if created:
        count = plural(len(created), "parameter")
        text = f"{where}: new state of {count}, as {target.optimizer_class} creates it"
        notes.append(Info(f"{text}: {some(list(map(str, created)))}", "remap"))
    for reason in dict.fromkeys(unknown.values()):
        names = [parameters.canonical[fqn] for fqn in unknown if unknown[fqn] == reason]
        notes.append(f"{where}: no state is created for {some(names)}: {reason}")
    return created, notes


def _without_state(
    groups: Sequence[ParamGroup],
    states: Mapping[Param, Mapping[Any, Any]],
    parameters: Parameters,
) -> dict[str, Mapping[str, Any]]:
    """Return the FQN of each trainable parameter that has no state while others have some, with the
    hyperparameters of its group.
    """
    slots = set(map(str, chain.from_iterable(states.values())))
    if not slots or slots & WHOLE:
        return {}
    trainable = set(parameters.trainable)
    options_of: dict[str, Mapping[str, Any]] = {}
    for group in groups:
        options = plain_options(group.hyperparameters)
        for param in group.params:
            if param in trainable and not states.get(param):
                options_of[parameters.fqns[str(param)]] = options
    return options_of


def _entry(value: Any) -> Any:
    if not isinstance(value, Filled):
        return value
    return entry_of("", ex.filled(value.shape, value.dtype, value.fill), {})


def _follow_narrowed(
    request: OptimizerRequest,
    narrowed: RuleEffect,
    listed: Mapping[Param, str] | None,
    to: str,
) -> OptimizerRequest:
    """Return the request for an optimizer of a model without some of its tensors: its parameters
    follow their keys, or stay if all of them are kept.
    """
    if listed is None:
        follows = to != ID
    else:
        follows = request.model is None or narrowed.loses(list(listed.values()))
    if follows:
        return replace(request, ruled=narrowed, model=narrowed)
    return replace(request, narrowed=None)


def _with_new_names(
    groups: Sequence[ParamGroup], sources: Mapping[str, Expression]
) -> tuple[ParamGroup, ...]:
    """Return the groups with the new name of each parameter: there is one for each old one."""
    new_names: dict[Param, Param] = {}
    for name, source in sources.items():
        for old_name in ex.refs(source):
            new_names[old_name] = name
    renamed_groups = []
    for group in groups:
        params = [new_names.get(str(param), param) for param in group.params]
        renamed_groups.append(grouped(params, group.options))
    return tuple(renamed_groups)


def _shapes(named: OptimizerState, request: OptimizerRequest) -> dict[str, tuple[int, ...] | None]:
    """Return the shapes of parameters, by canonical name, as far as models or rules say them."""
    shapes: dict[str, tuple[int, ...] | None] = {}
    if request.ruled is not None:
        shapes.update(request.ruled.shapes(list(map(str, named.params))))
    if request.names is not None:
        shapes.update(Parameters(request.names).shapes)
    return shapes


def _file_shapes(
    file_sources: Mapping[str, Expression],
    shapes: Mapping[str, tuple[int, ...] | None],
    names: Names | None,
) -> dict[str, tuple[int, ...] | None]:
    """Return the shapes of parameters by the names that the file gives them."""
    if names is not None and any(isinstance(source, Op) for source in file_sources.values()):
        # the keys are the file's parameters
        return {saved.key: saved.shape for saved in names.serialized}
    by_file_name = {}
    for name, source in file_sources.items():
        for file_name in ex.refs(source):
            by_file_name[file_name] = shapes.get(name)
    return by_file_name


def _without_left_out(
    section: Section, state: OptimizerState, request: OptimizerRequest, narrowed: RuleEffect
) -> tuple[Section, OptimizerRemap] | None:
    """Return an optimizer with ids without the parameters whose tensors are left out; None if it
    keeps all of them.

    The other parameters are numbered again, as an optimizer of the smaller model does. Raise
    `Refused` if nothing says whose state the ids are, and one of them may belong to a tensor that
    is left out.
    """
    where = section.title
    param_map = _identified(state, request, where)
    if param_map is None:
        # else --select: a note says that it is the state of all parameters
        if request.model is not None:
            _check_none_left_out(state, narrowed, where)
        return None
    keys_of = _serialized_keys(request.names)
    left_out = {}
    for param, name in param_map.names.items():
        if narrowed.loses([name, *keys_of.get(name, ())]):
            left_out[param] = name
    if not left_out:
        return None
    if len(left_out) == len(state.params):
        raise Refused(
            f"{where}: all of its parameters are left out of the model",
            hint=f"drop the optimizer too: --drop {where}",
            problems=[Problem("left out of the model", name) for name in left_out.values()],
        )
    named = param_map.state
    kept: dict[str, Expression] = {}
    for param in state.params:
        if param not in left_out:
            kept[param_map.names[param]] = Ref(str(param))
    groups = placed(named, identity(list(kept)))
    kept_state: dict[Param, Any] = {name: named.state[name] for name in kept if name in named.state}
    rest = in_groups(named, groups, kept_state)
    dropped = tuple(left_out.values())
    notes = _notes(where, state, rest, ID, (), dropped)
    if param_map.assumed:
        notes.append(param_map.rests_on(where))
    move = move_of(section, state, ID, rest.groups, kept, {})
    result = forms.write(in_form(rest, ID), section)
    report = OptimizerRemap(
        section.path,
        was=ID,
        to=ID,
        params=len(kept),
        evidence=param_map.evidence,
        dropped=dropped,
        notes=tuple(notes),
        move=move,
    )
    if in_file(state)[0] is None:
        return result, report

    # The names of the parameters follow their keys.
    by_keys = replace(request, names=None, ruled=narrowed, model=narrowed, narrowed=None)
    follows = _remapped(result, by_keys)
    if follows is None or follows[1].move is None:
        return result, report
    notes += follows[1].notes
    move = _one_move(move, follows[1].move, list(kept.values()))
    return follows[0], replace(report, move=move, notes=tuple(dict.fromkeys(notes)))


def _one_move(
    first: OptimizerMove, second: OptimizerMove, sources: Sequence[Expression]
) -> OptimizerMove:
    """Return the second move as a move of what the first moves; `sources` are the parameters
    between the two, by id.
    """
    over = {}
    for name, source in second.sources.items():
        over[name] = ex.substitute(source, lambda number: sources[int(number)])
    groups = []
    for group in second.groups:
        if group.like is None:
            groups.append(group)
        else:
            groups.append(replace(first.groups[group.like], params=group.params))
    return replace(second, sources=over, groups=tuple(groups))


def _identified(state: OptimizerState, request: OptimizerRequest, where: str) -> ParamMap | None:
    """Return whose state the ids are, if the file or the model says it without a contradiction."""
    state_dicts = request.state_dicts or ()
    if request.names is None:
        return own_names(state, state_dicts)
    try:
        param_map = owners(state, request.names, where, state_dicts)
    except Refused:
        return None
    return param_map if param_map.doubt is None else None


def _serialized_keys(names: Names | None) -> dict[str, list[str]]:
    """Map the canonical name of each parameter to the serialized keys that are computed from it."""
    keys: dict[str, list[str]] = {}
    if names is None:
        return keys
    canonical = Parameters(names).canonical
    for saved in names.serialized:
        if saved.source is None:
            continue
        for fqn in ex.refs(saved.source):
            if fqn in canonical:
                keys.setdefault(canonical[fqn], []).append(saved.key)
    return keys


def _check_none_left_out(state: OptimizerState, narrowed: RuleEffect, where: str) -> None:
    """Raise `Refused` if a tensor that is left out may be one of the parameters that the optimizer
    numbers.
    """
    shapes: set[tuple[int, ...]] = set()  # of parameters, as far as their state shows them
    has_unknown = False
    for param in state.params:
        param_shapes = set(filter(None, state.shapes(param).values()))
        shapes |= param_shapes
        has_unknown |= not param_shapes
    entries = narrowed.section.by_key()
    problems = []
    for dropped in narrowed.plan.dropped:
        entry = entries.get(dropped.key)
        if not isinstance(entry, TensorEntry):
            continue
        is_float = entry.dtype.startswith(("float", "bfloat", "complex"))
        if is_float and (has_unknown or entry.shape in shapes):
            problems.append(Problem("left out of the model", dropped.key))
    if problems:
        raise Refused(
            f"{where}: parameters may be left out of the model, and nothing says which of its ids"
            " are theirs",
            hint="pass --model MODEL (and --optimizer O), which says whose state it is; or drop"
            f" the optimizer too: --drop {where}",
            problems=problems,
        )


def _is_renamed(state: OptimizerState, request: OptimizerRequest, to: str) -> bool:
    """Return True if parameters change, or their names in the file."""
    ruled = request.ruled
    if ruled is not None and not ruled.keeps_places:
        return True
    # a function renames without rules
    renames = bool(request.rules) or (ruled is not None and ruled.renames(ruled.section.keys))
    if to != ID and (renames or request.form is not None):
        return True
    listed = in_file(state)[0]
    if listed is None:
        return False
    names = list(listed.values())
    if renames or (request.narrowed is not None and request.narrowed.loses(names)):
        return True
    return request.model is not None and request.model.renames(names)


def _named(
    state: OptimizerState, request: OptimizerRequest, where: str
) -> tuple[OptimizerState, ParamMap | None, dict[str, Expression]]:
    """Return the state under canonical names, how they were identified, and each name as the file
    has it.
    """
    names = request.names
    if names is not None and state.form != ID:
        sources = from_serialized(names, state.params)
        if sources is not None:
            shapes = {saved.key: saved.shape for saved in names.serialized}
            named = renamed(state, {param: str(param) for param in state.params})
            moved = carry(named, sources, shapes, where)
            return in_groups(named, placed(named, sources), moved), None, sources
    canonical: Mapping[Param, str] = {param: str(param) for param in state.params}
    param_map: ParamMap | None = None
    if names is not None or state.form == ID:
        param_map = _owners(state, request, where)
        doubt = param_map.doubt
        if doubt is not None and doubt.by_another and request.old_model is not None:
            param_map = replace(param_map, doubt=replace(doubt, hint=request.old_model))
        canonical = param_map.settled(where).names
    if names is None and in_file(state)[0] is not None:
        canonical = _unwrapped(canonical, request)
    if state.form != ID:
        param_map = None
    file_names: dict[str, Expression] = {name: Ref(str(param)) for param, name in canonical.items()}
    return renamed(state, canonical), param_map, file_names


def _unwrapped(names: Mapping[Param, str], request: OptimizerRequest) -> dict[Param, str]:
    """Return the names without the wrappers that the remap removes from the model's keys, or
    replaces.
    """
    model = request.model
    if request.ruled is not None or model is None or not model.renames(list(names.values())):
        return dict(names)
    paths = wrappers.recognise(model.section.keys)
    return {param: strip(name, paths) for param, name in names.items()}


def _rules_first(state: OptimizerState, request: OptimizerRequest, where: str) -> OptimizerRequest:
    """Let the named model load the state, if the file has its names only after the rules."""
    listed, names = in_file(state)[0], request.names
    if listed is None or names is None or request.to_names is not None or not request.rules:
        return request
    if not in_model(listed.values(), names)[1]:
        return request
    after = replace(request, names=None, to_names=names)
    sources, _ = _sources(renamed(state, listed), after, request.keys or state.form, where)
    return request if in_model(sources, names)[1] else after


def _of_new_model(
    sources: Mapping[str, Expression], names: Names, where: str
) -> dict[str, Expression]:
    """Return `sources` under the canonical names of the model that will load them, if it has these
    names.
    """
    canonical, problems = in_model(sources, names)
    if not canonical:
        raise Refused(
            f"{where}: none of its parameters has a name of {names.model}",
            hint="--rule 'FROM => TO' says which parameter is which",
            problems=problems,
        )
    return {canonical[name]: source for name, source in sources.items() if name in canonical}


def _as_the_keys(
    state: OptimizerState, moved: OptimizerState, request: OptimizerRequest, to: str, where: str
) -> dict[Param, str]:
    """Return the parameters whose keys in the model have wrappers, with these keys as their names.

    Raise `Refused` if the names would have no wrappers next to a model whose keys get some.
    """
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
    if to == ID:
        return wrapped if all(group.param_names for group in moved.nonempty_groups) else {}
    old_keys = set() if request.model is None else set(request.model.section.keys)
    # as torch names them next to a wrapped model
    are_apart = state.form != ID and old_keys.isdisjoint(map(str, state.params))
    if wrapped and not are_apart:
        param, name = next(iter(wrapped.items()))
        raise Refused(
            f"{where}: the names of its parameters have no wrappers, and the model's keys would"
            " have some",
            hint="--to serialized takes wrappers out of the keys, --optimizer-keys id the names"
            " out of the optimizer",
            problems=[Problem(f"the key is {name}", str(param))],
        )
    return {}


def _owners(state: OptimizerState, request: OptimizerRequest, where: str) -> ParamMap:
    """Identify the parameters of the ids; with rules only, the file's own keys count too if they
    can be these.
    """
    state_dicts = request.state_dicts or ()
    names, ruled = request.names, request.ruled
    if ruled is None:
        return owners(state, names, where, state_dicts)
    if names is None:
        by_keys = own_names(state, state_dicts)
        return by_keys if by_keys is not None else owners(state, None, where, state_dicts)
    # it may be the model after the rules
    if saved_order(state_dicts, names, set(Parameters(names).shapes)) is None:
        state_dicts = (ruled.after,)
    return owners(state, names, where, state_dicts)


def _by_rules_file(
    named: OptimizerState, request: OptimizerRequest, to: str, where: str
) -> dict[str, Expression] | None:
    """Return the parameters after the rules; None without rules, or if no parameter is a tensor of
    the model.
    """
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
        if not ruled.keeps_places and len(request.state_dicts or ()) == 1:
            raise Refused(
                f"{where}: none of its parameters is a tensor of the model, so that it cannot"
                " follow the model's",
                hint=AFRESH,
                problems=[Problem("no tensor of the model", str(param)) for param in named.params],
            )
        return None
    if to == ID and request.to_names is None:
        _check_places(named, after, ruled is request.narrowed, where)
    return after


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
            hint=f"drop the optimizer too: --drop {where}; or pass --optimizer-keys fqn, to"
            " keep the state of the other parameters under their names",
            problems=[Problem("left out of the model", name) for name in left_out],
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
        param_map = ParamMap(moved, {param: str(param) for param in moved.params}, "names")
        check(param_map, new).settled(where)
    target = new or old
    if target is None:
        return
    missing = lacking(moved, target.optimizer_groups, Parameters(target).first_step)
    names = dict.fromkeys(key.rpartition(".")[2] for key in missing)
    if names:
        saved_class = class_of(moved) or "another optimizer"
        problem = "the optimizer needs it, and the saved state does not have it"
        raise Refused(
            f"{where}: this is the state of {saved_class}; {target.optimizer_class} loads it, and"
            " fails at the next step",
            hint=AFRESH,
            problems=[Problem(problem, name) for name in names],
        )


def _sources(
    named: OptimizerState, request: OptimizerRequest, to: str, where: str
) -> tuple[dict[str, Expression], bool]:
    """Return the new parameters as expressions over the old ones, and whether they follow the keys
    of the model.
    """
    ruled = _by_rules_file(named, request, to, where)
    if ruled is not None:
        return ruled, True
    names, rules = request.names, request.rules
    if request.to_names is not None and names is not None:
        new_names = {str(param): by_rules(str(param), rules) for param in named.params}
        return between(names, request.to_names, new_names), False
    if request.form == SERIALIZED and names is not None and to != ID:
        before = to_serialized(names, named.params)
    else:
        before = identity(named.params)
    after = {by_rules(name, rules): source for name, source in before.items()}
    if len(after) < len(before):
        raise Refused(
            "the rules give several parameters of the optimizer one name",
            hint="`--dry-run` shows the names",
        )
    return after, False


def by_rules(name: str, rules: Sequence[Renaming]) -> str:
    """Return the name after the first rule that matches it."""
    for rule in rules:
        new_name = rule.apply(name)
        if new_name is not None:
            return new_name
    return name


def _notes(
    where: str,
    state: OptimizerState,
    moved: OptimizerState,
    to: str,
    new: Sequence[str],
    dropped: Sequence[str],
) -> list[str]:
    notes = []
    if len(moved.groups) != len(state.groups):
        notes.append(
            f"{where}: {plural(len(moved.groups), 'param group')}, not {len(state.groups)}: a"
            " learning-rate scheduler that was saved has one value for each of the old ones"
        )
    old_options = set(chain.from_iterable(group.options for group in state.groups))
    options = dict.fromkeys(chain.from_iterable(group.options for group in moved.groups))
    added = [name for name in options if name not in old_options]
    if added and old_options:
        notes.append(
            f"{where}: added to the param groups, as the new optimizer has them: {some(added)}"
        )
    if new:
        notes.append(f"{where}: new, and without state: {some(new)}")
    if dropped:
        notes.append(
            f"{where}: left out, the state of {plural(len(dropped), 'parameter')}: {some(dropped)}"
        )
    if state.form == FLAT and to != FLAT and not any(group.param_names for group in state.groups):
        notes.append(
            f"{where}: the flattened form does not say which param groups there were; parameters"
            f" with the same hyperparameters are one group now ({len(state.groups)} in all)"
        )
    return notes


@dataclass(frozen=True)
class RuleEffect:
    """The model's section before a change (by rules, or all of it), and the plan of the change."""

    section: Section
    plan: Plan

    @cached_property
    def keeps_places(self) -> bool:
        """Whether every tensor stays one, of the same elements in the same order: ids stay what
        they are.
        """
        return self.keeps_rest and all(_is_counter(entry.key) for entry in self.plan.dropped)

    @property
    def keeps_rest(self) -> bool:
        """Whether every tensor that is not left out stays one, of the same elements in the same
        order.
        """
        return all(
            is_whole(output.source) for output in self.plan.outputs if not _is_counter(output.key)
        )

    def renames(self, names: Sequence[str]) -> bool:
        """Return True if one of the names is a tensor whose key changes."""
        keys = set(self._keys(names).values())
        for output in self.plan.outputs:
            if any(key in keys and key != output.key for key in ex.refs(output.source)):
                return True
        return False

    def loses(self, names: Sequence[str]) -> bool:
        """Return True if one of the names is a tensor that is left out."""
        first = self.section.aliases()
        kept: set[str] = set()
        for output in self.plan.outputs:
            kept.update(first.get(key, key) for key in ex.refs(output.source))
        return any(first.get(key, key) not in kept for key in self._keys(names).values())

    @cached_property
    def after(self) -> Section:
        entries = self.section.by_key()
        tensors = []
        for output in self.plan.outputs:
            source = ex.without_cast(output.source)
            entry = entries[source.key] if isinstance(source, Ref) else None
            if isinstance(entry, TensorEntry):
                tensors.append(replace(entry, key=output.key))
        return replace(self.section, tensors=tuple(tensors))

    @cached_property
    def called(self) -> dict[str, str]:
        """Old name -> new name of each tensor that stays complete, without the segments of
        wrappers.
        """
        pairs = []
        for output in self.plan.outputs:
            pairs += [(key, output.key) for key in ex.refs(output.source)]
        before = wrappers.canonical_keys([old for old, _ in pairs])
        after = wrappers.canonical_keys([new for _, new in pairs])
        return {before[old]: after[new] for old, new in pairs}

    def shapes(self, names: Sequence[str]) -> dict[str, tuple[int, ...]]:
        entries = self.section.by_key()
        shapes = {}
        for name, key in self._keys(names).items():
            entry = entries.get(key)
            if isinstance(entry, TensorEntry):
                shapes[name] = entry.shape
        return shapes

    def sources(self, before: Mapping[str, Expression], where: str) -> dict[str, Expression] | None:
        """The parameters after the rules, from those before them; None where none is a tensor of
        this model.

        Raise `Refused`, all problems at once, if only some are.
        """
        keys = self._keys(list(before))
        if not keys:
            return None
        problems = []
        for name in before:
            if name not in keys:
                problem = "is not a tensor of the model that the rules change"
                problems.append(Problem(problem, name))
        first = self.section.aliases()
        by_first = {first.get(key, key): before[name] for name, key in keys.items()}

        def value_before(key: str) -> Expression:
            return by_first[first.get(key, key)]

        paths: Collection[str] = ()
        if any(name != key for name, key in keys.items()):
            paths = wrappers.recognise([output.key for output in self.plan.outputs])
        after: dict[Expression, str] = {}
        for output in self.plan.outputs:
            read = list(dict.fromkeys(first.get(key, key) for key in ex.refs(output.source)))
            others = [key for key in read if key not in by_first]
            if others and len(others) < len(read):
                problem = f"is made of {', '.join(others)} too, which the optimizer has not"
                problems.append(Problem(problem, output.key))
            elif read and not others:
                source = ex.substitute(output.source, value_before)
                after.setdefault(source, copied(strip(output.key, paths)))
        if problems:
            raise Refused(
                f"{where}: the rules do not fit its parameters",
                hint="--model MODEL says which key each parameter has",
                problems=problems,
            )
        return {name: source for source, name in after.items()}

    def _keys(self, names: Sequence[str]) -> dict[str, str]:
        """Which of the names are which keys: as they are, or without the wrappers' segments of the
        keys.
        """
        keys = self.section.keys
        paths = wrappers.recognise(keys)
        by_name = {strip(key, paths): key for key in reversed(keys)}
        by_name.update(zip(keys, keys))
        return {name: by_name[name] for name in names if name in by_name}


def copied(text: str) -> str:
    """Return an equal string that is a new object: pickle would write a shared one as a
    reference.
    """
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "surrogatepass")


def _is_counter(key: str) -> bool:
    """Whether it is the counter of an AveragedModel, which wrappers bring and take along."""
    return key.rpartition(".")[2] == wrappers.COUNTER


def is_whole(source: Expression) -> bool:
    """Whether it is one tensor as it is, but perhaps for a cast."""
    return isinstance(ex.without_cast(source), Ref)
