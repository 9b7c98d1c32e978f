"""Move optimizer state to other names, orders and groups of parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpttool.core import expression as ex
from ckpttool.core.checkpoint import ExtraEntry, Section, Storage, TensorEntry
from ckpttool.core.errors import Problem, Refused
from ckpttool.core.expression import Expression, Op, Ref
from ckpttool.core.names import Names
from ckpttool.core.optimizer_state import ID, PARAM_NAMES, OptimizerState, Param, ParamGroup, numbered, renamed
from ckpttool.core.plan import GroupMove, OptimizerMove
from ckpttool.evaluate.apply import entry_of
from ckpttool.evaluate.ops import OPS
from ckpttool.naming.convert import with_keys
from ckpttool.naming.match import NameTables
from ckpttool.optimizers import forms
from ckpttool.optimizers.classes import ELEMENTWISE, WHOLE
from ckpttool.optimizers.forms import same_option, same_options
from ckpttool.optimizers.identify import Parameters

Sources = Mapping[str, Expression]  # new name of a parameter -> what it is of the old ones
Shapes = Mapping[str, "tuple[int, ...] | None"]


def identity(params: Sequence[Param]) -> dict[str, Expression]:
    """Every parameter under its own name."""
    return {str(param): Ref(str(param)) for param in params}


def between(old: Names, new: Names, renamed: Mapping[str, str]) -> dict[str, Expression]:
    """Each parameter of `new` as an expression over those of `old`; without those that they do not give.

    `renamed` are the old parameters with what the user's rules call them. Equal canonical names are one parameter;
    others meet where the new model loads the keys that the old one writes.
    """
    have, by_new_name = set(renamed), {new: old for old, new in renamed.items()}
    mine, theirs = Parameters(old), Parameters(new)
    by_name: dict[str, Expression] = {name: Ref(by_new_name[name]) for name in theirs.shapes if name in by_new_name}
    taken = {key for source in by_name.values() for key in ex.refs(source)}
    saved = {key: source for key, source in NameTables(old).saved.items() if source is not None}
    for name, source in _of_parameters(theirs, saved).items():
        made = _canonical(ex.substitute(source, lambda key: saved[key]), mine)
        if made is not None and have.issuperset(ex.refs(made)) and not taken.intersection(ex.refs(made)):
            by_name.setdefault(name, made)
    return {name: by_name[name] for name in theirs.shapes if name in by_name}


def to_serialized(names: Names, params: Sequence[Param]) -> dict[str, Expression]:
    """Each serialized key that is made of parameters as an expression over them; one of the keys of a tied one."""
    have, parameters = set(map(str, params)), Parameters(names)
    found: dict[Expression, str] = {}
    for key, source in NameTables(names).saved.items():
        made = None if source is None else _canonical(source, parameters)
        if made is not None and have.issuperset(ex.refs(made)):
            found.setdefault(made, key)
    return {key: source for source, key in found.items()}


def from_serialized(names: Names, params: Sequence[Param]) -> dict[str, Expression] | None:
    """Each parameter as an expression over `params`, where these are serialized keys and some of them are computed.

    None where they are not: then each is a parameter under one of its names.
    """
    saved = NameTables(names).saved
    sources = [saved.get(str(param)) for param in params]
    if None in sources or not any(isinstance(source, Op) for source in sources):
        return None
    return _of_parameters(Parameters(names), map(str, params))


def _of_parameters(parameters: Parameters, present: Iterable[str]) -> dict[str, Expression]:
    """Each parameter as an expression over the serialized keys in `present`; without those that they do not give."""
    values = NameTables(parameters.names).runtime_values(present)
    return {parameters.canonical[fqn]: source for fqn, source in values.items() if fqn in parameters.canonical}


def _canonical(source: Expression, parameters: Parameters) -> Expression | None:
    """The expression over canonical names; None where it reads something that is no parameter."""
    if not all(fqn in parameters.canonical for fqn in ex.refs(source)):
        return None
    return with_keys(source, parameters.canonical)


def carry(state: OptimizerState, sources: Sources, shapes: Shapes, where: str) -> dict[Param, Mapping[Any, Any]]:
    """The state of every new parameter that has one. `shapes` are those of the old parameters.

    Raises `Refused`, all problems at once, where a state is not what the same expression makes of it.
    """
    problems: list[Problem] = []
    found: dict[Param, Mapping[Any, Any]] = {}
    for name, source in sources.items():
        own = (
            state.state.get(source.key) if isinstance(source, Ref) else _computed(name, source, state, shapes, problems)
        )
        if own is not None:
            found[name] = own
    whole = {str(name) for own in state.state.values() for name in own} & WHOLE
    if whole and [ref for source in sources.values() for ref in ex.refs(source)] != list(state.params):
        problems.append(Problem("belongs to all parameters together, in their order", ", ".join(sorted(whole))))
    if problems:
        raise Refused(
            f"{where}: the state of {len(problems)} parameters cannot follow them",
            hint="convert the model alone (CKPT::SECTION), and start the optimizer afresh",
            problems=problems,
        )
    return found


def _computed(
    name: str, source: Expression, state: OptimizerState, shapes: Shapes, problems: list[Problem]
) -> Mapping[Any, Any] | None:
    refs = list(dict.fromkeys(ex.refs(source)))
    owned = [state.state.get(ref, {}) for ref in refs]
    if not any(owned):
        return None
    if any(own.keys() != owned[0].keys() for own in owned):
        problems.append(Problem(f"{' and '.join(refs)} have not taken the same steps", name))
        return None
    bad = next((op for op in ex.operators(source) if op not in OPS or not OPS[op].moves), None)
    if bad is not None:
        name_of_op = ".".join(bad.split(".")[:2])  # without its overload: `aten.mul`
        problems.append(Problem(f"computed by {name_of_op}, which changes values: moments do not follow it", name))
        return None
    made = {}
    for entry in owned[0]:
        values = {ref: own[entry] for ref, own in zip(refs, owned)}
        try:
            made[entry] = _value(f"{name}.{entry}", source, values, shapes)
        except Refused as error:
            problems.append(Problem(f"{entry}: {error.message}", name))
    return made


def _value(key: str, source: Expression, values: Mapping[str, Any], shapes: Shapes) -> Any:
    """One entry of a parameter's state: moments by the parameter's own expression, a step where all agree on it."""
    if all(_is_moment(key.rpartition(".")[2], value, shapes.get(ref)) for ref, value in values.items()):
        return entry_of(key, source, values)
    first, *others = values.values()
    if isinstance(first, ExtraEntry) or (isinstance(first, TensorEntry) and first.numel != 1):
        raise Refused("it has not the shape of its parameter", hint="")
    if not all(same_option(first, other) for other in others):
        raise Refused(f"not the same in {', '.join(values)}", hint="")
    if isinstance(first, TensorEntry) and first.storage is not None:  # a step of its own: each is counted up in place
        return replace(first, storage=Storage(first.storage.data), payload=None)
    return first


def _is_moment(name: str, value: Any, shape: tuple[int, ...] | None) -> bool:
    """Whether it has an element for each of the parameter's. Of a parameter without dimensions only the name tells."""
    return isinstance(value, TensorEntry) and value.shape == shape and (bool(shape) or name in ELEMENTWISE)


def placed(state: OptimizerState, sources: Sources) -> tuple[ParamGroup, ...]:
    """The old groups with the new parameters where the old ones stood; a group that loses all of them goes."""
    home = {str(param): index for index, group in enumerate(state.groups) for param in group.params}
    place = {str(param): at for at, param in enumerate(state.params)}
    ordered = sorted(sources, key=lambda name: min(place[ref] for ref in ex.refs(sources[name])))
    members: list[list[Param]] = [[] for _ in state.groups]
    for name in ordered:
        homes = {home[ref] for ref in ex.refs(sources[name])}
        if len({id(_first_alike(state.groups, index)) for index in homes}) > 1:
            raise Refused(
                f"{name} is made of parameters of different param groups",
                hint="pass --to-optimizer O, the function that makes the new optimizer",
                problems=[Problem(f"param group {home[ref]}", ref) for ref in dict.fromkeys(ex.refs(sources[name]))],
            )
        members[min(homes)].append(name)
    return tuple(
        grouped(params, group.options) for params, group in zip(members, state.groups) if params or not group.params
    )


def _first_alike(groups: Sequence[ParamGroup], index: int) -> ParamGroup:
    own = groups[index].hyperparameters
    return next(group for group in groups if same_options(group.hyperparameters, own))


def grouped(params: Sequence[Param], options: Mapping[str, Any]) -> ParamGroup:
    """A group of `params` with these options, its ``param_names``, where it has any, those of `params`."""
    if PARAM_NAMES in options:
        options = {**options, PARAM_NAMES: [str(param) for param in params]}
    return ParamGroup(tuple(params), options)


def arranged(
    state: OptimizerState, sources: Sources, layout: Sequence[Sequence[str]], defaults: Sequence[Mapping[str, Any]]
) -> tuple[ParamGroup, ...]:
    """The groups of `layout`, each with the hyperparameters of the group that its parameters come from.

    `defaults` are the new optimizer's own hyperparameters, for groups that hold new parameters only. Raises `Refused`
    where parameters of groups with different hyperparameters come together.
    """
    home = {str(param): index for index, group in enumerate(state.groups) for param in group.params}
    problems: list[Problem] = []
    groups = []
    for index, params in enumerate(layout):
        homes = sorted({home[ref] for name in params if name in sources for ref in ex.refs(sources[name])})
        options = _options_of(state, homes, index, defaults)
        for other in homes[1:]:
            differing = different(state.groups[homes[0]].hyperparameters, state.groups[other].hyperparameters)
            problems += [
                Problem(f"{name} is {a} in param group {homes[0]} and {b} in {other}", f"param_groups.{index}")
                for name, (a, b) in differing.items()
            ]
        groups.append(grouped(params, options))
    if problems:
        raise Refused(
            "parameters of groups with different hyperparameters come together in one group",
            hint="let the new optimizer keep them in groups of their own",
            problems=problems,
        )
    return tuple(groups)


def _options_of(
    state: OptimizerState, homes: Sequence[int], index: int, defaults: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any]:
    if homes:
        return state.groups[homes[0]].options
    if not state.groups or (index < len(defaults) and defaults[index]):
        return defaults[index] if index < len(defaults) else {}
    return state.groups[0].options


def different(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Hyperparameters that differ, with both values in words."""
    return {
        name: (_words(left, name), _words(right, name))
        for name in dict.fromkeys((*left, *right))
        if name not in left or name not in right or not same_option(left[name], right[name])
    }


def _words(options: Mapping[str, Any], name: str) -> str:
    if name not in options:
        return "absent"
    value = options[name]
    return (
        "a tensor" if isinstance(value, TensorEntry) else "an object" if isinstance(value, ExtraEntry) else str(value)
    )


def in_groups(state: OptimizerState, groups: tuple[ParamGroup, ...], own: Mapping[Param, Any]) -> OptimizerState:
    """`state` with these groups and this state, in the order of the groups."""
    params = [param for group in groups for param in group.params]
    return replace(state, groups=groups, state={param: own[param] for param in params if param in own})


# As a plan


def move_of(
    section: Section, state: OptimizerState, to: str, groups: Sequence[ParamGroup], sources: Sources, shapes: Shapes
) -> OptimizerMove:
    """What becomes of the optimizer in `section`, as data: `sources` are over the parameters as `state` calls them.

    `shapes` are those of these parameters.
    """
    held = {str(param): sources[str(param)] for group in groups for param in group.params if str(param) in sources}
    parts = dict.fromkeys(ref for source in held.values() if isinstance(source, Op) for ref in ex.refs(source))
    known = {ref: shape for ref in parts if (shape := shapes.get(ref)) is not None}
    return OptimizerMove(section.path, to, tuple(_group_move(group, state) for group in groups), held, known)


def _group_move(group: ParamGroup, state: OptimizerState) -> GroupMove:
    params = tuple(map(str, group.params))
    alike = (n for n, own in enumerate(state.groups) if same_options(own.hyperparameters, group.hyperparameters))
    like = next((n for n in alike if (PARAM_NAMES in state.groups[n].options) == (PARAM_NAMES in group.options)), None)
    return GroupMove(params, like, {} if like is not None else group.hyperparameters)


def moved_by(move: OptimizerMove, state: OptimizerState, where: str) -> OptimizerState:
    """The state as the plan has it, its parameters by name. Raises `Refused` where it cannot follow the parameters."""
    named = renamed(state, {param: str(param) for param in state.params})
    _check(move, named, where)
    groups = tuple(
        grouped(group.params, group.options if group.like is None else named.groups[group.like].options)
        for group in move.groups
    )
    return in_groups(named, groups, carry(named, move.sources, move.shapes, where))


def in_form(state: OptimizerState, form: str) -> OptimizerState:
    """The state, whose parameters have names, in one of the three forms."""
    return numbered(state) if form == ID else replace(state, form=form)


def carried_out(move: OptimizerMove, section: Section) -> Section:
    """The optimizer's section as the plan has it. Raises `Refused` where its state cannot follow the parameters."""
    moved = moved_by(move, forms.read(section), section.title)
    return forms.write(in_form(moved, move.form), section)


def _check(move: OptimizerMove, state: OptimizerState, where: str) -> None:
    """Raises `Refused`, all problems at once, where the plan is not one for this optimizer."""
    have = set(map(str, state.params))
    read = dict.fromkeys(ref for source in move.sources.values() for ref in ex.refs(source))
    counts = Counter(param for group in move.groups for param in group.params)
    problems = [
        Problem("the plan reads a parameter that the optimizer has not", ref) for ref in read if ref not in have
    ]
    problems += [
        Problem("stands in more than one place of the plan's groups", one) for one, n in counts.items() if n > 1
    ]
    problems += [Problem("is in no group of the plan", name) for name in move.sources if name not in counts]
    problems += [
        Problem(f"the plan takes the options of param group {group.like}, and there are {len(state.groups)}", where)
        for group in move.groups
        if group.like is not None and group.like >= len(state.groups)
    ]
    if problems:
        raise Refused(f"{where}: the plan is not one for this optimizer", hint="make it anew", problems=problems)
