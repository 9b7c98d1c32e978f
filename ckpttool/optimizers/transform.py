"""Move optimizer state to other names, orders and groups of parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpttool.core import expression as ex
from ckpttool.core.checkpoint import ExtraEntry, Section, Storage, TensorEntry
from ckpttool.core.errors import Problem, Refused
from ckpttool.core.expression import Expression, Op, Ref
from ckpttool.core.names import Names
from ckpttool.core.optimizer_state import (
    ID,
    PARAM_NAMES,
    OptimizerState,
    Param,
    ParamGroup,
    numbered,
)
from ckpttool.core.plan import GroupMove, OptimizerMove
from ckpttool.evaluate.apply import entry_of
from ckpttool.evaluate.compare import elements
from ckpttool.evaluate.ops import OPS
from ckpttool.naming.convert import with_keys
from ckpttool.naming.match import NameTables
from ckpttool.optimizers.forms import ELEMENTWISE, WHOLE, same_option, same_options
from ckpttool.optimizers.identify import Parameters

Sources = Mapping[str, Expression]  # new name of a parameter -> an expression over the old ones
Shapes = Mapping[str, "tuple[int, ...] | None"]


def identity(params: Sequence[Param]) -> dict[str, Expression]:
    return {str(param): Ref(str(param)) for param in params}


def between(old: Names, new: Names, renamed: Mapping[str, str]) -> dict[str, Expression]:
    """Return the parameters of `new` as expressions over the parameters of `old`, if they can be
    computed.

    `renamed` maps the old parameters to their names after the user's rules. Equal canonical names
    are one parameter; others are matched by the keys that the old model writes and the new one
    loads.
    """
    by_new_name = {new: old for old, new in renamed.items()}
    old_parameters, new_parameters = Parameters(old), Parameters(new)
    sources: dict[str, Expression] = {
        n: Ref(by_new_name[n]) for n in new_parameters.shapes if n in by_new_name
    }
    used = {key for source in sources.values() for key in ex.refs(source)}
    saved = {key: source for key, source in NameTables(old).saved.items() if source is not None}
    for name, source in _of_keys(new_parameters, saved).items():
        whole = _canonical(ex.substitute(source, lambda key: saved[key]), old_parameters)
        if (
            whole is not None
            and renamed.keys() >= set(ex.refs(whole))
            and used.isdisjoint(ex.refs(whole))
        ):
            sources.setdefault(name, whole)
    return {name: sources[name] for name in new_parameters.shapes if name in sources}


def to_serialized(names: Names, params: Sequence[Param]) -> dict[str, Expression]:
    """Return each serialized key that is computed from `params`, with its expression. Of tied keys
    one is returned.
    """
    available, parameters = set(map(str, params)), Parameters(names)
    key_of: dict[Expression, str] = {}
    for key, source in NameTables(names).saved.items():
        canonical = None if source is None else _canonical(source, parameters)
        if canonical is not None and available.issuperset(ex.refs(canonical)):
            key_of.setdefault(canonical, key)
    return {key: source for source, key in key_of.items()}


def from_serialized(names: Names, params: Sequence[Param]) -> dict[str, Expression] | None:
    """Return each parameter as an expression over `params`, if these are serialized keys and some
    are computed.

    Otherwise return None: then each of `params` is a parameter under one of its names.
    """
    saved = NameTables(names).saved
    sources = [saved.get(str(param)) for param in params]
    if None in sources or not any(isinstance(source, Op) for source in sources):
        return None
    return _of_keys(Parameters(names), map(str, params))


def _of_keys(parameters: Parameters, keys: Iterable[str]) -> dict[str, Expression]:
    """Return the parameters that these serialized keys give, as expressions over them."""
    values = NameTables(parameters.names).runtime_values(keys)
    return {
        parameters.canonical[fqn]: source
        for fqn, source in values.items()
        if fqn in parameters.canonical
    }


def _canonical(source: Expression, parameters: Parameters) -> Expression | None:
    """Return the expression over canonical names; None if it reads anything but parameters."""
    if not all(fqn in parameters.canonical for fqn in ex.refs(source)):
        return None
    return with_keys(source, parameters.canonical)


# State


def carry(
    state: OptimizerState, sources: Sources, shapes: Shapes, where: str
) -> dict[Param, Mapping[Any, Any]]:
    """Return the state of every new parameter that has one. `shapes` has the shapes of the old
    parameters.

    Raises `Refused`, all problems at once, for state that the parameter's expression cannot be
    applied to.
    """
    problems: list[Problem] = []
    carried: dict[Param, Mapping[Any, Any]] = {}
    for name, source in sources.items():
        own = (
            state.state.get(source.key)
            if isinstance(source, Ref)
            else _computed(name, source, state, shapes, problems)
        )
        if own is not None:
            carried[name] = own
    shared = {str(name) for own in state.state.values() for name in own} & WHOLE
    if shared and [ref for source in sources.values() for ref in ex.refs(source)] != list(
        state.params
    ):
        problems.append(
            Problem("belongs to all parameters together, in their order", ", ".join(sorted(shared)))
        )
    if problems:
        raise Refused(
            f"{where}: the state of {len(problems)} parameters cannot follow them",
            hint="convert the model alone (CKPT::SECTION), and start the optimizer afresh",
            problems=problems,
        )
    return carried


def _computed(
    name: str, source: Expression, state: OptimizerState, shapes: Shapes, problems: list[Problem]
) -> Mapping[Any, Any] | None:
    refs = list(dict.fromkeys(ex.refs(source)))
    states = [state.state.get(ref, {}) for ref in refs]
    if not any(states):
        return None
    if any(own.keys() != states[0].keys() for own in states):
        problems.append(Problem(f"{' and '.join(refs)} have not taken the same steps", name))
        return None
    other = next((op for op in ex.operators(source) if op not in OPS or not OPS[op].moves), None)
    if other is not None:
        name_of_op = ".".join(other.split(".")[:2])  # without its overload: `aten.mul`
        problems.append(
            Problem(
                f"computed by {name_of_op}, which changes values: moments do not follow it", name
            )
        )
        return None
    computed = {}
    for entry in states[0]:
        values = {ref: own[entry] for ref, own in zip(refs, states)}
        try:
            computed[entry] = _value(f"{name}.{entry}", source, values, shapes)
        except Refused as error:
            problems.append(Problem(f"{entry}: {error.message}", name))
    return computed


def _value(key: str, source: Expression, values: Mapping[str, Any], shapes: Shapes) -> Any:
    """Compute one entry of a parameter's state: apply the expression to moments; a step must be
    equal everywhere.
    """
    elementwise = key.rpartition(".")[2] in ELEMENTWISE
    if all(  # of a scalar parameter only the name tells a moment from a step
        isinstance(value, TensorEntry)
        and value.shape == shapes.get(ref)
        and (value.shape or elementwise)
        for ref, value in values.items()
    ):
        return entry_of(key, source, values)
    first, *others = values.values()
    if isinstance(first, ExtraEntry) or (isinstance(first, TensorEntry) and first.numel != 1):
        raise Refused("it does not have the shape of its parameter", hint="")
    if not all(same_option(first, other) for other in others):
        raise Refused(f"not the same in {', '.join(values)}", hint="")
    # each parameter's step is counted up in place
    if isinstance(first, TensorEntry) and first.storage is not None:
        return replace(first, storage=Storage(first.storage.data), payload=None)
    return first


# Groups


def grouped(params: Sequence[Param], options: Mapping[str, Any]) -> ParamGroup:
    """Return a group of `params` with these options. Its ``param_names``, if any, are updated."""
    if PARAM_NAMES in options:
        options = {**options, PARAM_NAMES: [str(param) for param in params]}
    return ParamGroup(tuple(params), options)


def placed(state: OptimizerState, sources: Sources) -> tuple[ParamGroup, ...]:
    """Return the old groups with the new parameters in the old ones' positions. A group that loses
    all is left out.
    """
    home = {str(param): index for index, group in enumerate(state.groups) for param in group.params}
    position = {str(param): at for at, param in enumerate(state.params)}
    members: list[list[Param]] = [[] for _ in state.groups]
    for name in sorted(
        sources, key=lambda name: min(position[ref] for ref in ex.refs(sources[name]))
    ):
        first, *others = sorted({home[ref] for ref in ex.refs(sources[name])})
        options = state.groups[first].hyperparameters
        if not all(same_options(options, state.groups[other].hyperparameters) for other in others):
            raise Refused(
                f"{name} is made of parameters of different param groups",
                hint="pass --to-optimizer O, the function that makes the new optimizer",
                problems=[
                    Problem(f"param group {home[ref]}", ref)
                    for ref in dict.fromkeys(ex.refs(sources[name]))
                ],
            )
        members[first].append(name)
    return tuple(
        grouped(params, group.options)
        for params, group in zip(members, state.groups)
        if params or not group.params
    )


def arranged(
    state: OptimizerState,
    sources: Sources,
    layout: Sequence[Sequence[str]],
    defaults: Sequence[Mapping[str, Any]],
    *,
    by_parameter: bool = False,
) -> tuple[ParamGroup, ...]:
    """Return the groups of `layout`, which the new optimizer's code makes with the hyperparameters
    `defaults`.

    A group with the parameters of a saved group keeps that one's hyperparameters, as in
    ``load_state_dict``. Any other group is new: it takes the fields that the code sets.
    `by_parameter`: the file has hyperparameters of parameters and not of groups (a flattened
    optimizer), so no group is new that has one of these. Raises `Refused` if a group gets
    parameters from groups with different hyperparameters, and nothing says which of them it has.
    """
    home = {str(param): index for index, group in enumerate(state.groups) for param in group.params}
    problems: list[Problem] = []
    groups = []
    for index, params in enumerate(layout):
        refs = {ref for name in params if name in sources for ref in ex.refs(sources[name])}
        homes = sorted({home[ref] for ref in refs})
        default = defaults[index] if index < len(defaults) else {}
        is_saved = (
            len(homes) == 1
            and refs == set(map(str, state.groups[homes[0]].params))
            and sources.keys() >= {*params}
        )
        if default and not is_saved and not (by_parameter and homes):
            saved_groups = [state.groups[number] for number in homes] or list(state.groups)
            groups.append(grouped(params, _new_options(default, saved_groups, index, problems)))
            continue
        options = state.groups[homes[0] if homes else 0].options if state.groups else default
        for other in homes[1:]:
            differing = different(
                state.groups[homes[0]].hyperparameters, state.groups[other].hyperparameters
            )
            problems += [
                Problem(
                    f"{name} is {a} in param group {homes[0]} and {b} in {other}",
                    f"param_groups.{index}",
                )
                for name, (a, b) in differing.items()
            ]
        groups.append(grouped(params, options))
    if problems:
        raise Refused(
            "parameters of groups with different hyperparameters come together in one group",
            hint="keep them in separate groups of the new optimizer",
            problems=problems,
        )
    return tuple(groups)


LR, INITIAL_LR = "lr", "initial_lr"


def _new_options(
    default: Mapping[str, Any], saved: Sequence[ParamGroup], index: int, problems: list[Problem]
) -> dict[str, Any]:
    """Return the options of a new group: what the code sets, then what else the saved groups have.

    If a scheduler changed the saved learning rate, the new one changes by the same factor.
    """
    options = dict(saved[0].options) if saved else {}
    for group in saved[1:]:
        for name, (first, other) in different(options, group.options).items():
            if name not in (*default, LR, INITIAL_LR, PARAM_NAMES):
                problems.append(
                    Problem(f"{name} is {first} and {other} in its groups", f"param_groups.{index}")
                )
    options.update(default)
    factors = set[float]()
    for group in saved:
        lr, initial_lr = (_number(group.options.get(name)) for name in (LR, INITIAL_LR))
        if lr is not None and initial_lr:
            factors.add(lr / initial_lr)
    base = _number(default.get(LR))
    if base is None or not factors:
        return options
    if len(factors) > 1:
        texts = ", ".join(f"{factor:g}" for factor in sorted(factors))
        problems.append(
            Problem(
                f"its learning rates are {texts} of their initial ones", f"param_groups.{index}"
            )
        )
        return options
    (factor,) = factors
    options[INITIAL_LR] = base
    options[LR] = base * factor
    return options


def _number(value: Any) -> float | None:
    """Return an option that is a number, or a tensor of one; None for anything else."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, TensorEntry) and value.numel == 1 and value.storage is not None:
        from ckpttool.evaluate.numpy_eval import reader

        read = reader(value.dtype)
        return None if read is None else float(read(b"".join(elements(value)))[0])
    return None


def changed_options(
    state: OptimizerState, sources: Sources, groups: Sequence[ParamGroup]
) -> list[str]:
    """Return each hyperparameter that a group has and the saved group of its parameters has not, as
    text.
    """
    home = {str(param): index for index, group in enumerate(state.groups) for param in group.params}
    texts = []
    for index, group in enumerate(groups):
        names = [str(param) for param in group.params if str(param) in sources]
        homes = sorted({home[ref] for name in names for ref in ex.refs(sources[name])})
        if homes:
            differing = different(state.groups[homes[0]].hyperparameters, group.hyperparameters)
            texts += [
                f"param group {index}: {name} {new} ({old} in the file)"
                for name, (old, new) in differing.items()
            ]
    return texts


def different(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, tuple[str, str]]:

    def text(options: Mapping[str, Any], name: str) -> str:
        value = options.get(name)
        if isinstance(value, TensorEntry):
            return "a tensor"
        return (
            "an object"
            if isinstance(value, ExtraEntry)
            else str(value)
            if name in options
            else "absent"
        )

    return {
        name: (text(left, name), text(right, name))
        for name in dict.fromkeys((*left, *right))
        if name not in left or name not in right or not same_option(left[name], right[name])
    }


def in_groups(
    state: OptimizerState, groups: tuple[ParamGroup, ...], own: Mapping[Param, Any]
) -> OptimizerState:
    """Return `state` with these groups and this state, in the order of the groups."""
    params = [param for group in groups for param in group.params]
    return replace(
        state, groups=groups, state={param: own[param] for param in params if param in own}
    )


# As a plan


def move_of(
    section: Section,
    state: OptimizerState,
    to: str,
    groups: Sequence[ParamGroup],
    sources: Sources,
    shapes: Shapes,
) -> OptimizerMove:
    """Return the change of the optimizer in `section` as data. `sources` are over the parameter
    names of `state`.

    `shapes` are the shapes of these parameters.
    """
    held = {
        str(param): sources[str(param)]
        for group in groups
        for param in group.params
        if str(param) in sources
    }
    parts = dict.fromkeys(
        ref for source in held.values() if isinstance(source, Op) for ref in ex.refs(source)
    )
    known = {ref: shape for ref in parts if (shape := shapes.get(ref)) is not None}
    moves = []
    for group in groups:
        alike = (
            index
            for index, own in enumerate(state.groups)
            if (PARAM_NAMES in own.options) == (PARAM_NAMES in group.options)
            and same_options(own.hyperparameters, group.hyperparameters)
        )
        like = next(alike, None)
        moves.append(
            GroupMove(
                tuple(map(str, group.params)),
                like,
                {} if like is not None else group.hyperparameters,
            )
        )
    return OptimizerMove(section.path, to, tuple(moves), held, known)


def in_form(state: OptimizerState, form: str) -> OptimizerState:
    """Return the state, whose parameters have names, in one of the three forms."""
    return numbered(state) if form == ID else replace(state, form=form)
