"""Which parameter an optimizer's id is: by the names in its param groups, the optimizer's code, or the model's order.

Whatever says so is checked against the shapes in the state. What cannot be told apart is refused, never guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

from ckpttool.checkpoint import Section
from ckpttool.errors import Problem, Refused
from ckpttool.names import Names
from ckpttool.naming.match import match
from ckpttool.naming.name_tables import NameTables
from ckpttool.naming.optimizers.classes import ELEMENTWISE, fits
from ckpttool.naming.optimizers.parameters import Parameters
from ckpttool.naming.optimizers.saved_order import SavedOrder, saved_order
from ckpttool.optimizer_state import ID, OptimizerState, Param, renamed
from ckpttool.values import dataclass

_MOST_STATES = 20_000  # partial orders that are followed at a time; more groups than that need the optimizer's code
_SETTLE = "pass --optimizer file.py:make, the function that makes the optimizer of the model"

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Doubt:
    """What in a file speaks against the owners that somebody names: a sentence, every place, and what settles it.

    `by_another`: another definition saved the file, and to name it settles the matter.
    """

    message: str
    hint: str
    problems: tuple[Problem, ...]
    by_another: bool = False


@dataclass(frozen=True, slots=True)
class Owners:
    """Whose state each parameter of an optimizer holds: its state as it was `saved`, and a canonical name for each.

    `evidence` is what says so: the file's own ``param_names`` or ``names`` in its keys, the model's ``optimizer``, or
    its ``model.parameters()`` order. Who is not named in the file is known by position only: then `assumed`, unless the
    order of the model's keys in the file bears it out. With a `doubt` they are no answer.
    """

    saved: OptimizerState
    names: Mapping[Param, str]
    evidence: str
    assumed: bool = False
    doubt: Doubt | None = None

    @property
    def state(self) -> OptimizerState:
        """The state with its parameters under their names."""
        return renamed(self.saved, self.names)

    def rests_on(self, where: str) -> str:
        """On what an answer rests where the file does not name the parameters."""
        if not self.assumed:
            return f"{where}: its ids are those of the {self.evidence}: the model's keys in the file stand in its order"
        return (
            f"{where}: nothing in the file says whose state its ids are, or shows in which order its model was "
            f"registered: they are taken for those of the {self.evidence}, and this answer rests on that"
        )

    def settled(self, where: str) -> Owners:
        """Itself. Raises `Refused`, all problems at once, where something speaks against it."""
        if self.doubt is not None:
            raise Refused(f"{where}: {self.doubt.message}", hint=self.doubt.hint, problems=self.doubt.problems)
        return self


def owners(state: OptimizerState, names: Names | None, where: str, beside: Sequence[Section] = ()) -> Owners:
    """Whose state it is. `beside` are the file's state dicts, as far as their keys stand in the saved order.

    Raises `Refused` where nothing says it, and where the names in the keys cannot be the model's.
    """
    listed, evidence = in_file(state)
    if listed is not None:
        if names is None:
            return Owners(state, _distinct(listed, where), evidence)
        found = check(Owners(state, _of_model(listed, names, where), evidence), names)
        return found if state.form == ID else found.settled(where)
    if names is None:
        raise Refused(
            f"{where}: nothing says which parameters the ids are",
            hint="pass --model MODEL (and --optimizer O where it does not take model.parameters() in their order)",
        )
    return _by_saved_order(check(_by_position(state, names, where, beside), names), names, beside)


def in_file(state: OptimizerState) -> tuple[dict[Param, str] | None, str]:
    """What the file calls every parameter, in its keys or in the ``param_names`` of its groups, and which of these."""
    if state.form != ID:
        return {param: str(param) for param in state.params}, "names"
    listed = {p: name for group in state.groups for p, name in zip(group.params, group.param_names or ())}
    return (listed if 0 < len(listed) == len(state.params) else None), "param_names"


def check(found: Owners, names: Names) -> Owners:
    """`found`, with a doubt where the shapes in the state speak against it."""
    shapes = Parameters(names).shapes
    wrong = _Shapes(found.saved, list(shapes.values()))
    problems = []
    for param, name in found.names.items():
        reason = wrong.misfit(param, shapes[name])
        if reason is not None:
            problems.append(Problem(f"cannot be {name}: {reason}" if param != name else reason, str(param)))
    if not problems:
        return found
    message = f"by its {found.evidence} the parameters are others than by the shapes in its state"
    hint = _SETTLE if found.evidence.startswith("model") else "is it another model, or another version of it?"
    return replace(found, doubt=Doubt(message, hint, tuple(problems), by_another=found.evidence == "optimizer"))


def _by_position(state: OptimizerState, names: Names, where: str, beside: Sequence[Section]) -> Owners:
    try:
        return (_by_optimizer if names.optimizer else _by_order)(state, Parameters(names), where)
    except Refused as error:
        order = saved_order(beside, names, set(Parameters(names).shapes))
        if order is None or not order.differing:
            raise
        doubt = _of_another_order(names, order)
        problems = (*error.problems, *doubt.problems)
        raise Refused(f"{error.message}; {doubt.message}", hint=doubt.hint, problems=problems) from error


def _by_saved_order(found: Owners, names: Names, beside: Sequence[Section]) -> Owners:
    """`found` by position: borne out by the order of the model's keys in the file, doubted, or assumed."""
    order = saved_order(beside, names, set(found.names.values()))
    if order is None or not order.differing:
        return replace(found, assumed=order is None)
    # Several groups are a doubt also where each keeps its order: one cut by position (parameters[:3]) has others then.
    if found.saved.is_stateless and len(found.saved.nonempty_groups) == 1:
        return found
    return replace(found, doubt=_of_another_order(names, order))


def _of_another_order(names: Names, order: SavedOrder) -> Doubt:
    return Doubt(
        f"its ids need not be this model's: in the file the model's keys stand in another order than in {names.model}",
        f"name the model that saved it: --model OLD --to-model {names.model} (with --optimizer and --to-optimizer)",
        order.differing,
        by_another=True,
    )


def own_names(state: OptimizerState, beside: Sequence[Section]) -> Owners | None:
    """What the file itself calls the parameters, without asking a model; None where it does not say.

    Of ids in one group it does by a state dict of as many tensors, each of the shape that the state in its place has.
    """
    if in_file(state)[0] is not None:
        return owners(state, None, "the optimizer")
    if len(state.nonempty_groups) != 1:
        return None
    for section in beside:
        aliases = section.aliases()
        entries = [entry for entry in section.tensors if entry.key not in aliases]
        wrong = _Shapes(state, [entry.shape for entry in entries])
        pairs = list(zip(state.params, entries))
        if len(entries) == len(state.params) and not any(wrong.misfit(param, entry.shape) for param, entry in pairs):
            names = {param: entry.key for param, entry in pairs}
            evidence = f"the keys of {section.path or 'the model'} in the same file, in their order"
            return Owners(state, names, evidence, assumed=True)
    return None


def in_model(listed: Iterable[str], names: Names) -> tuple[dict[str, str], list[Problem]]:
    """The canonical name of each parameter under its runtime, serialized or wrapped name, and those that have none."""
    known = Parameters(names).canonical
    keys = {key: known[fqn] for key, fqn in NameTables(names).fqn_of.items() if fqn in known and key not in known}
    found = match(list(dict.fromkeys(listed)), {name: name for name in (*known, *keys)})
    problems = [Problem(f"no parameter of {names.model}", name) for name in found.unmatched] + list(found.problems)
    return {name: known.get(own) or keys[own] for name, own in found.names.items()}, problems


def _of_model(listed: Mapping[Param, str], names: Names, where: str) -> dict[Param, str]:
    canonical, problems = in_model(listed.values(), names)
    if problems:
        raise Refused(
            f"{where} holds {len(problems)} parameters that the model has not",
            hint="is it another model? ckpttool trace MODEL lists its names; --to-model leads to another model's names",
            problems=problems,
        )
    return _distinct({param: canonical[name] for param, name in listed.items()}, where)


def _distinct(listed: dict[Param, str], where: str) -> dict[Param, str]:
    twice = [name for name, count in Counter(listed.values()).items() if count > 1]
    if twice:
        raise Refused(
            f"{where}: several parameters have one name",
            hint=_SETTLE,
            problems=[Problem("the name of more than one parameter", name) for name in twice],
        )
    return listed


def _by_optimizer(state: OptimizerState, parameters: Parameters, where: str) -> Owners:
    have, want = [len(group.params) for group in state.groups], [len(group) for group in parameters.groups]
    if have != want:
        raise Refused(
            f"{where} was not saved by this optimizer: its groups have other sizes",
            hint="pass the --model and --optimizer that saved it; --to-model and --to-optimizer name the new ones",
            problems=[
                Problem(f"{mine} parameters in the file, {theirs} in the optimizer", f"param_groups.{index}")
                for index, (mine, theirs) in enumerate(zip_longest(have, want, fillvalue=0))
                if mine != theirs
            ],
        )
    names = {p: n for group, own in zip(state.groups, parameters.groups) for p, n in zip(group.params, own)}
    return Owners(state, names, "optimizer")


def _by_order(state: OptimizerState, parameters: Parameters, where: str) -> Owners:
    """The ids of each group as parameters in the model's order, where there is exactly one way to do that."""
    count, total = len(state.params), len(parameters.shapes)
    candidates = [names for names in (tuple(parameters.shapes), parameters.trainable) if len(names) == count]
    if not candidates:
        raise Refused(
            f"{where} has {count} parameters, and the model {total}, {len(parameters.trainable)} of them trainable",
            hint=_SETTLE,
        )
    order = candidates[0]
    wrong = _Shapes(state, [parameters.shapes[name] for name in order])
    if len(state.nonempty_groups) < 2:
        names = dict(zip(state.params, order))
        return Owners(state, names, "model.parameters() order")
    ways, found = _interleave([group.params for group in state.groups], order, parameters.shapes, wrong)
    if ways != 1:
        raise Refused(
            f"{where} has {len(state.groups)} param groups, and "
            + ("its shapes fit no order of the model's parameters" if ways == 0 else "its ids cannot be told apart"),
            hint=_SETTLE,
        )
    return Owners(state, found, "model.parameters() order within each group, the only one that the shapes allow")


class _Shapes:
    """Whether a parameter's state can be that of a parameter of some shape."""

    def __init__(self, state: OptimizerState, shapes: Sequence[Shape | None]) -> None:
        self.state = state
        self.elementwise = ELEMENTWISE | _like_parameters(state, shapes)

    def misfit(self, param: Param, shape: Shape | None) -> str | None:
        """What speaks against it, in words."""
        if shape is None:
            return None
        for name, found in self.state.shapes(param).items():
            if not fits(name, found, shape) or (name in self.elementwise and found != shape):
                return f"{name} is {list(found)}, the parameter {list(shape)}"
        return None


def _like_parameters(state: OptimizerState, shapes: Sequence[Shape | None]) -> set[str]:
    """Names that no table knows, whose tensors together have shapes that the parameters have together."""
    found: dict[str, Counter[Shape]] = {}
    for param in state.state:
        for name, shape in state.shapes(param).items():
            found.setdefault(name, Counter())[shape] += 1
    have = Counter(shape for shape in shapes if shape is not None)
    return {name for name, count in found.items() if any(count) and count <= have}


def _interleave(
    groups: Sequence[Sequence[Param]], order: Sequence[str], shapes: Mapping[str, Shape | None], wrong: _Shapes
) -> tuple[int, dict[Param, str]]:
    """How many ways (with very many, 2) there are to deal `order` out to the groups, and the way if there is one.

    Each group takes its parameters in the order of the model; a step gives the next parameter to one of the groups.
    """
    ways = {tuple(0 for _ in groups): 1}  # places in the groups -> how many ways lead there
    steps: list[dict[tuple[int, ...], int]] = []  # places -> the group that took the last parameter
    for name in order:
        after: Counter[tuple[int, ...]] = Counter()
        taken: dict[tuple[int, ...], int] = {}
        for places, count in ways.items():
            for index, group in enumerate(groups):
                at = places[index]
                if at < len(group) and wrong.misfit(group[at], shapes[name]) is None:
                    moved = (*places[:index], at + 1, *places[index + 1 :])
                    after[moved] += count
                    taken[moved] = index
        if len(after) > _MOST_STATES:
            return 2, {}
        ways = after
        steps.append(taken)
    if list(ways.values()) != [1]:
        return sum(ways.values()), {}
    (places,) = ways
    found: dict[Param, str] = {}
    for taken, name in zip(reversed(steps), reversed(order)):
        index = taken[places]
        places = (*places[:index], places[index] - 1, *places[index + 1 :])
        found[groups[index][places[index]]] = name
    return 1, found
