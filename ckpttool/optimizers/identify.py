"""Find out which parameter an optimizer's id belongs to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from itertools import chain, zip_longest

from ckpttool.core.checkpoint import Section
from ckpttool.core.errors import Problem, Refused, same_problem
from ckpttool.core.names import Names
from ckpttool.core.optimizer_state import (
    ID,
    PARAM_NAMES,
    OptimizerState,
    Param,
    renamed,
)
from ckpttool.core.strides import Shape
from ckpttool.core.text import plural
from ckpttool.core.values import dataclass
from ckpttool.naming.match import NameTables, match
from ckpttool.naming.wrappers import canonical_in
from ckpttool.optimizers.classes import ELEMENTWISE, fits
from ckpttool.optimizers.key_order import KeyOrder, compare_key_order
from ckpttool.optimizers.parameters import Parameters

# ways to deal the parameters out to the groups that are followed at a time; if there are more, only
# the optimizer's code can tell
_MOST_STATES = 20_000
_SETTLE = "pass --optimizer file.py:make, the function that makes the optimizer of the model"


@dataclass(frozen=True, slots=True)
class Doubt:
    """What in a file contradicts the names of its ids: a sentence, every place, and a hint.

    `by_another`: another definition of the model saved the file, so naming it is the way out.
    """

    message: str
    hint: str
    problems: tuple[Problem, ...]
    by_another: bool = False


class Basis(Enum):
    """What says which parameter an id is."""

    PARAM_NAMES = "param_names"  # of the groups in the file
    KEYS = "names"  # the state has names instead of ids
    OPTIMIZER = "optimizer"  # the model's optimizer, by position
    MODEL = "model.parameters() order"
    INTERLEAVED = "model.parameters() order within each group, for which the shapes allow one way"
    FILE = "order of the keys in the same file"


class OrderEvidence(Enum):
    """Whether the file lists the keys of its model in the order that names its ids."""

    CONFIRMED = "the file lists the model's keys in this order"
    OTHER = "the file lists the model's keys in another order, which matters for state only"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class ParamMap:
    """The canonical name of each parameter of an optimizer, whose state is `saved`.

    Parameters that the file does not name are known by their position only, and the `order` of the
    model's keys in the file may confirm it. With a `doubt`, the names are not an answer. For
    `Basis.FILE`, `section` is the path of the state dict with the keys.
    """

    saved: OptimizerState
    names: Mapping[Param, str]
    basis: Basis
    order: OrderEvidence = OrderEvidence.CONFIRMED
    doubt: Doubt | None = None
    section: str = ""

    @property
    def state(self) -> OptimizerState:
        return renamed(self.saved, self.names)

    @property
    def is_named_by_file(self) -> bool:
        """Whether the optimizer in the file has the names itself."""
        return self.basis in (Basis.PARAM_NAMES, Basis.KEYS)

    @property
    def is_assumed(self) -> bool:
        """Whether nothing confirms the names."""
        return self.order is OrderEvidence.UNKNOWN

    @property
    def evidence(self) -> str:
        """The evidence for the names, in words."""
        if self.basis is Basis.FILE:
            return f"the keys of {self.section or 'the model'} in the same file, in their order"
        return str(self.basis.value)

    @property
    def identified_by(self) -> str:
        """The same, and whether it is an assumption."""
        if self.basis in (Basis.MODEL, Basis.INTERLEAVED):
            return f"{self.evidence}, which is assumed without --optimizer"
        return self.evidence

    def rests_on(self, where: str) -> str:
        """Return a sentence that says what an answer rests on if the file does not name the
        parameters.
        """
        if not self.is_assumed:
            return (
                f"{where}: its ids are read as the ids of the {self.identified_by};"
                f" {self.order.value}"
            )
        return (
            f"{where}: the file says neither whose state its ids are nor in which order its model"
            f" was registered; this answer assumes the {self.evidence.removeprefix('the ')}"
        )

    def without_doubt(self, where: str) -> ParamMap:
        """Return itself. Raises `Refused`, all problems at once, if there is a doubt."""
        if self.doubt is not None:
            raise Refused(
                f"{where}: {self.doubt.message}", hint=self.doubt.hint, problems=self.doubt.problems
            )
        return self


def identify_params(
    state: OptimizerState, names: Names | None, where: str, state_dicts: Sequence[Section] = ()
) -> ParamMap:
    """Return which parameter each state belongs to. The keys of the `state_dicts` are in the order
    of the saved model.

    Raises `Refused` if nothing says it, if the names in the file cannot be the model's, and if the
    model or its optimizer has other numbers of parameters.
    """
    listed = listed_names(state)
    if listed is not None:
        return _by_names(state, listed, names, where)
    if names is None:
        raise Refused(
            f"{where}: nothing says which parameters the ids are",
            hint="pass --model MODEL (and --optimizer O if it does not take model.parameters() in"
            " their order)",
        )
    parameters = Parameters(names)
    try:
        if names.optimizer:
            by_position = _by_optimizer(state, parameters, where)
        else:
            by_position = _by_order(state, parameters, where)
    except Refused as error:
        key_order = compare_key_order(state_dicts, names, parameters.shapes)
        if not key_order.moved:
            raise
        doubt = _other_order(names, key_order)
        raise Refused(
            f"{error.message}; {doubt.message}",
            hint=doubt.hint,
            problems=(*error.problems, *doubt.problems),
        ) from error
    by_position = with_shape_doubt(by_position, names)
    key_order = compare_key_order(state_dicts, names, set(by_position.names.values()))
    if not key_order.moved:
        return (
            by_position
            if key_order.is_confirmed
            else replace(by_position, order=OrderEvidence.UNKNOWN)
        )
    # Several groups are in doubt also without state: if they were made by position (`params[:3]`
    # and `params[3:]`), they hold other parameters.
    if state.is_stateless and len(state.nonempty_groups) == 1:
        return replace(by_position, order=OrderEvidence.OTHER)
    doubt = _other_order(names, key_order)
    if by_position.doubt is not None:
        problems = (*by_position.doubt.problems, *doubt.problems)
        message = f"{by_position.doubt.message}; {doubt.message}"
        doubt = replace(doubt, message=message, problems=problems)
    return replace(by_position, order=OrderEvidence.OTHER, doubt=doubt)


def _by_names(
    state: OptimizerState,
    listed: Mapping[Param, str],
    names: Names | None,
    where: str,
) -> ParamMap:
    """Return the parameters by the file's own names, which must be the model's if it is given."""
    by_optimizer = None if names is None else by_optimizer_names(state, names)
    if by_optimizer is not None:
        listed = by_optimizer
    elif names is not None:
        canonical, problems = match_to_model(listed.values(), names)
        if problems:
            raise Refused(
                f"{where}: {plural(len(problems), 'name')} in the file that the model does not"
                " have",
                hint="is it another model? ckpttool trace MODEL lists its names; "
                "--to-model leads to another model's names",
                problems=problems,
            )
        listed = {param: canonical[name] for param, name in listed.items()}
    repeated = [name for name, count in Counter(listed.values()).items() if count > 1]
    if repeated:
        raise Refused(
            f"{where}: several parameters have one name",
            hint=_SETTLE,
            problems=same_problem("the name of more than one parameter", repeated),
        )
    param_map = ParamMap(state, listed, Basis.PARAM_NAMES if state.form == ID else Basis.KEYS)
    if names is None:
        return param_map
    param_map = with_shape_doubt(param_map, names)
    # `param_names` may be out of date, and ids have another reading: the caller decides
    return param_map if state.form == ID else param_map.without_doubt(where)


def _other_order(names: Names, key_order: KeyOrder) -> Doubt:
    return Doubt(
        "its ids may not be this model's: the file lists the model's keys in another order than"
        f" {names.model}",
        "name the model that saved it: --model OLD --to-model NEW (with --optimizer and"
        " --to-optimizer)",
        key_order.moved,
        by_another=True,
    )


def listed_names(state: OptimizerState) -> dict[Param, str] | None:
    """Return the file's own name for every parameter, from its keys or its ``param_names``; None if
    it does not name all of them.
    """
    if state.form != ID:
        return {param: str(param) for param in state.params}
    listed: dict[Param, str] = {}
    for group in state.groups:
        listed.update(zip(group.params, group.param_names or ()))
    is_complete = 0 < len(listed) == len(state.params)
    return listed if is_complete else None


def match_to_model(listed: Iterable[str], names: Names) -> tuple[dict[str, str], list[Problem]]:
    """Return name -> canonical name, for runtime, serialized and wrapped names, and the names that
    match nothing or several parameters.
    """
    canonical = dict(Parameters(names).canonical)
    for key, fqn in NameTables(names).fqn_of.items():
        if fqn in canonical:
            canonical.setdefault(key, canonical[fqn])
    matched = match(list(dict.fromkeys(listed)), dict(zip(canonical, canonical)))
    problems = same_problem(f"not a parameter of {names.model}", matched.unmatched)
    problems += matched.problems
    return {name: canonical[target] for name, target in matched.names.items()}, problems


def by_optimizer_names(state: OptimizerState, names: Names) -> dict[Param, str] | None:
    """Return the canonical name of each parameter if the file has the ``param_names`` of the
    model's own optimizer, else None.

    These need not be names of the model: ``Adam(model.encoder.named_parameters())`` has them
    without `encoder`.
    """
    saved = [group.param_names or () for group in state.groups]
    expected = [options.get(PARAM_NAMES, ()) for options in Parameters(names).options]
    if state.form != ID or not any(saved):
        return None
    order = list(chain.from_iterable(Parameters(names).groups))
    param_names = list(chain.from_iterable(expected))
    if saved == expected and len(param_names) == len(order):  # names may be there twice
        return dict(zip(state.params, order))
    listed = listed_names(state)
    by_name = dict(zip(param_names, order))
    is_unique = len(by_name) == len(param_names) == len(order)
    if listed is None or not is_unique or not by_name.keys() >= set(listed.values()):
        return None
    return {param: by_name[name] for param, name in listed.items()}


def names_without_model(state: OptimizerState, state_dicts: Sequence[Section]) -> ParamMap | None:
    """Return the file's own names for the parameters, without a model; None if it has none.

    Ids in one group get the keys of a state dict with as many tensors, if all their shapes fit.
    """
    if listed_names(state) is not None:
        return identify_params(state, None, "the optimizer")
    if len(state.nonempty_groups) != 1:
        return None
    for section in state_dicts:
        aliases = section.aliases()
        entries = [entry for entry in section.tensors if entry.key not in aliases]
        if len(entries) != len(state.params):
            continue
        shapes = _StateShapes(state, [entry.shape for entry in entries])
        pairs = dict(zip(state.params, entries))
        if any(shapes.misfit(param, entry.shape) for param, entry in pairs.items()):
            continue
        names = {param: entry.key for param, entry in pairs.items()}
        return ParamMap(state, names, Basis.FILE, OrderEvidence.UNKNOWN, section=section.path)
    return None


def could_be_of(state: OptimizerState, section: Section) -> bool:
    """Return whether the parameters can be tensors of the state dict, by their names in the file,
    or else by the shapes in their state.
    """
    aliases = section.aliases()
    entries = [entry for entry in section.tensors if entry.key not in aliases]
    state_shapes = _StateShapes(state, [entry.shape for entry in entries])
    listed = listed_names(state)
    if listed is not None:
        shapes: dict[str, Shape] = {}
        canonical = canonical_in(section)
        for entry in section.tensors:
            shapes[canonical[entry.key]] = shapes[entry.key] = entry.shape
        fits_all = all(
            name in shapes and state_shapes.misfit(param, shapes[name]) is None
            for param, name in listed.items()
        )
        return bool(listed) and fits_all
    if len(state.params) > len(entries):
        return False
    needed: Counter[Shape] = Counter()
    for param in state.params:
        for name, shape in state.shapes(param).items():
            if name in state_shapes.elementwise:
                needed[shape] += 1
                break
    return needed <= Counter(entry.shape for entry in entries)


def with_shape_doubt(param_map: ParamMap, names: Names) -> ParamMap:
    """Return the parameters, with a doubt if the shapes in the state contradict their names."""
    shapes = Parameters(names).shapes
    state_shapes = _StateShapes(param_map.saved, list(shapes.values()))
    problems = []
    for param, name in param_map.names.items():
        reason = state_shapes.misfit(param, shapes[name])
        if reason is not None:
            text = reason if param == name else f"cannot be {name}: {reason}"
            problems.append(Problem(text, str(param)))
    if not problems:
        return param_map
    message = f"the shapes in its state contradict its {param_map.evidence}"
    hint = "is it another model, or another version of it?"
    if param_map.basis in (Basis.MODEL, Basis.INTERLEAVED):
        hint = _SETTLE
    by_another = param_map.basis is Basis.OPTIMIZER
    return replace(param_map, doubt=Doubt(message, hint, tuple(problems), by_another))


def _by_optimizer(state: OptimizerState, parameters: Parameters, where: str) -> ParamMap:
    actual = [len(group.params) for group in state.groups]
    expected = [len(names) for names in parameters.groups]
    problems = []
    for index, (left, right) in enumerate(zip_longest(actual, expected, fillvalue=0)):
        if left != right:
            text = f"{left} parameters in the file, {right} in the optimizer"
            problems.append(Problem(text, f"param_groups.{index}"))
    if actual != expected:
        raise Refused(
            f"{where} was not saved by this optimizer: its groups have other sizes",
            hint="pass the --model and --optimizer that saved it; --to-model and --to-optimizer"
            " name the new ones",
            problems=problems,
        )
    order = chain.from_iterable(parameters.groups)
    return ParamMap(state, dict(zip(state.params, order)), Basis.OPTIMIZER)


def _by_order(state: OptimizerState, parameters: Parameters, where: str) -> ParamMap:
    """Assign the ids of each group to parameters in the model's order, if there is exactly one way
    to do that.
    """
    count, total = len(state.params), len(parameters.shapes)
    if count == total:
        order = tuple(parameters.shapes)
    elif count == len(parameters.trainable):
        order = parameters.trainable
    else:
        raise Refused(
            f"{where} has {count} parameters, and the model {total}, {len(parameters.trainable)}"
            " of them trainable",
            hint=_SETTLE,
        )
    if len(state.nonempty_groups) < 2:
        return ParamMap(state, dict(zip(state.params, order)), Basis.MODEL)
    ways, names = _interleave(state, order, parameters.shapes)
    if ways != 1:
        reason = "its ids cannot be told apart"
        if ways == 0:
            reason = "its shapes fit no order of the model's parameters"
        raise Refused(
            f"{where} has {len(state.groups)} param groups, and {reason}",
            hint=_SETTLE,
        )
    return ParamMap(state, names, Basis.INTERLEAVED)


def _interleave(
    state: OptimizerState, order: Sequence[str], shapes: Mapping[str, Shape | None]
) -> tuple[int, dict[Param, str]]:
    """Count the ways to deal `order` out to the groups (very many count as 2), and return the only
    one.

    Each group takes its parameters in the order of the model; a step gives the next parameter to
    one of the groups. Two groups of ids and the order a.weight, a.bias, b.weight, b.bias:

    group 0: ids 0, 1 with state of shape [4, 4]    positions  (0, 0) ─ a.weight ─▶ (1, 0)
    group 1: ids 2, 3 with state of shape [4]        ─ a.bias ─▶ (1, 1) ─ b.weight ─▶ (2, 1) ...
    """
    groups = [group.params for group in state.groups]
    state_shapes = _StateShapes(state, [shapes[name] for name in order])
    ways = {tuple(0 for _ in groups): 1}  # places in the groups -> how many ways lead there
    # places -> the group that took the last parameter
    steps: list[dict[tuple[int, ...], int]] = []
    for name in order:
        next_ways: Counter[tuple[int, ...]] = Counter()
        group_of_step: dict[tuple[int, ...], int] = {}
        for places, count in ways.items():
            for index, group in enumerate(groups):
                place = places[index]
                if place == len(group) or state_shapes.misfit(group[place], shapes[name]):
                    continue
                next_places = (*places[:index], place + 1, *places[index + 1 :])
                next_ways[next_places] += count
                group_of_step[next_places] = index
        if len(next_ways) > _MOST_STATES:
            return 2, {}
        ways = next_ways
        steps.append(group_of_step)
    if list(ways.values()) != [1]:
        return sum(ways.values()), {}
    # walk back along the only way
    (places,) = ways
    names: dict[Param, str] = {}
    for group_of_step, name in zip(reversed(steps), reversed(order)):
        index = group_of_step[places]
        places = (*places[:index], places[index] - 1, *places[index + 1 :])
        names[groups[index][places[index]]] = name
    return 1, names


class _StateShapes:
    """Compares the shapes in a state with the parameters' shapes.

    Names that no table knows count as elementwise if their tensors together have shapes that the
    parameters have.
    """

    def __init__(self, state: OptimizerState, shapes: Sequence[Shape | None]) -> None:
        self.state = state
        by_name: dict[str, Counter[Shape]] = {}
        for param in state.state:
            for name, shape in state.shapes(param).items():
                by_name.setdefault(name, Counter())[shape] += 1
        available = Counter(shape for shape in shapes if shape is not None)
        elementwise = set(ELEMENTWISE)
        for name, count in by_name.items():
            has_tensors = any(shape != () for shape in count)
            if has_tensors and count <= available:  # each shape as often as parameters have it
                elementwise.add(name)
        self.elementwise = elementwise

    def misfit(self, param: Param, shape: Shape | None) -> str | None:
        """Return why the state does not fit a parameter of this shape; None if it does."""
        if shape is None:
            return None
        for name, state_shape in self.state.shapes(param).items():
            has_other_shape = name in self.elementwise and state_shape != shape
            if has_other_shape or not fits(name, state_shape, shape):
                return f"{name} is {list(state_shape)}, the parameter {list(shape)}"
        return None
