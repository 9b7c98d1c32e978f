"""Which parameter an optimizer's id belongs to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import zip_longest

from ckpttool.core import expression as ex
from ckpttool.core.checkpoint import Section
from ckpttool.core.errors import Problem, Refused
from ckpttool.core.names import SERIALIZED, Names, RuntimeTensor
from ckpttool.core.optimizer_state import FQN, ID, OptimizerState, Param, ParamGroup, renamed
from ckpttool.core.values import dataclass
from ckpttool.naming.convert import read
from ckpttool.naming.match import NameTables, match
from ckpttool.naming.wrappers import canonical_keys
from ckpttool.optimizers.classes import ELEMENTWISE, fits

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Parameters:
    """A model's parameters by canonical name, in ``model.parameters()`` order: tied ones once."""

    names: Names

    @cached_property
    def shapes(self) -> dict[str, Shape | None]:
        """Canonical name -> shape, for every parameter."""
        return {t.canonical: t.shape for t in self._first}

    @cached_property
    def trainable(self) -> tuple[str, ...]:
        """The canonical names of the parameters that require a gradient."""
        return tuple(t.canonical for t in self._first if t.trainable)

    @cached_property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The canonical names in the groups of the model's optimizer, in its order; empty without an optimizer."""
        count = max(len(self.names.optimizer_groups), *(p.group + 1 for p in self.names.optimizer), 0)
        ordered = sorted(self.names.optimizer, key=lambda p: p.id)
        return tuple(tuple(self.canonical[p.fqn] for p in ordered if p.group == group) for group in range(count))

    @property
    def fresh_optimizer(self) -> OptimizerState:
        """The model's optimizer before its first step."""
        options = [*self.names.optimizer_groups, *[{}] * (len(self.groups) - len(self.names.optimizer_groups))]
        return OptimizerState(FQN, tuple(ParamGroup(tuple(own), o) for own, o in zip(self.groups, options)), {})

    @cached_property
    def first_step(self) -> dict[Param, tuple[str, ...]]:
        """Canonical name -> the names of the state that the optimizer's first step gives it; without unknown ones."""
        return {self.canonical[p.fqn]: p.state for p in self.names.optimizer if p.state}

    @cached_property
    def canonical(self) -> dict[str, str]:
        """Every name of every parameter, canonical or not, -> the canonical name of its first FQN."""
        first = {t.fqn: t for t in self.names.runtime if t.kind == "parameter"}
        found = {t.canonical: first[t.alias_of or t.fqn].canonical for t in first.values()}
        found.update((t.fqn, first[t.alias_of or t.fqn].canonical) for t in first.values())
        return found

    @cached_property
    def _first(self) -> list[RuntimeTensor]:
        return [t for t in self.names.runtime if t.kind == "parameter" and t.alias_of is None]


@dataclass(frozen=True, slots=True)
class SavedOrder:
    """The parameters that a state dict and the model both have: as the file lists them, and as the model does."""

    file: tuple[str, ...]
    model: tuple[str, ...]

    @property
    def differing(self) -> tuple[Problem, ...]:
        """Each parameter of the model in whose place the file has another."""
        pairs = zip(self.model, self.file)
        return tuple(Problem(f"the file's model has {other} in its place", own) for own, other in pairs if own != other)


def saved_order(sections: Iterable[Section], names: Names, params: Collection[str]) -> SavedOrder | None:
    """The order of the canonical names `params` in the state dicts of a file; None where these show none.

    `sections` are state dicts whose keys stand as ``state_dict()`` gave them. One that lists the parameters otherwise
    than the model speaks against it, whatever others say; one that lacks some of them cannot speak for it.
    """
    orders = [_order(section, names, params) for section in sections]
    against = [order for order in orders if order.file != order.model]
    complete = [order for order in orders if len(order.file) == len(params) and params]
    return next(iter((*against, *complete)), None)


def _order(section: Section, names: Names, params: Collection[str]) -> SavedOrder:
    tables, canonical = NameTables(names), Parameters(names).canonical
    reading = read(tables, section)
    of_name: dict[str, tuple[str, ...]] = {fqn: (fqn,) for fqn in tables.tensors}
    if reading.form == SERIALIZED:
        of_name = {key: () if source is None else tuple(ex.refs(source)) for key, source in tables.saved.items()}
    name_of = reading.match.names
    file = [fqn for entry in section.tensors for fqn in of_name.get(name_of.get(entry.key, ""), ())]
    own = [fqn for fqns in of_name.values() for fqn in fqns]

    def parameters(fqns: Sequence[str]) -> list[str]:
        reached = dict.fromkeys(canonical[fqn] for fqn in fqns if fqn in canonical)
        return [name for name in reached if name in params]

    here = parameters(file)
    return SavedOrder(tuple(here), tuple(name for name in parameters(own) if name in set(here)))


def in_order_of(section: Section, names: Names, called: Callable[[str], str] | None = None) -> Section:
    """The state dict with its keys as the model's own ``state_dict()`` has them; what it has not stands behind.

    `called` says what each of the model's names has become, where they are others by now.
    """
    tables = NameTables(names)
    if called is None:
        reading = read(tables, section)
        name_of = reading.match.names
        order: Iterable[str] = tables.serialized_names if reading.form == SERIALIZED else tables.runtime_names
    else:
        name_of = canonical_keys(section.keys)
        forms = [list(map(called, own)) for own in (tables.serialized_names, tables.runtime_names)]
        order = max(forms, key=lambda own: len({*own} & {*name_of.values()}))
    rank = {name: place for place, name in enumerate(order)}
    places = [rank.get(name_of.get(entry.key, ""), len(rank)) for entry in section.tensors]
    ordered = sorted(zip(places, section.tensors), key=lambda pair: pair[0])
    return replace(section, tensors=tuple(entry for _, entry in ordered))


def same_key_order(left: Iterable[Section], right: Iterable[Section]) -> bool | None:
    """Whether two files list the keys of their models in one order; None where they have none in common."""
    theirs = [[entry.key for entry in section.tensors] for section in right]
    found = None
    for section in left:
        mine = [entry.key for entry in section.tensors]
        for keys in theirs:
            common = set(mine) & set(keys)
            if len(common) > 1:
                found = [key for key in mine if key in common] == [key for key in keys if key in common]
                if not found:
                    return False
    return found


_MOST_STATES = 20_000  # partial orders that are followed at a time; more groups than that need the optimizer's code
_SETTLE = "pass --optimizer file.py:make, the function that makes the optimizer of the model"


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
class ParamMap:
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

    def settled(self, where: str) -> ParamMap:
        """Itself. Raises `Refused`, all problems at once, where something speaks against it."""
        if self.doubt is not None:
            raise Refused(f"{where}: {self.doubt.message}", hint=self.doubt.hint, problems=self.doubt.problems)
        return self


def owners(state: OptimizerState, names: Names | None, where: str, beside: Sequence[Section] = ()) -> ParamMap:
    """Whose state it is. `beside` are the file's state dicts, as far as their keys stand in the saved order.

    Raises `Refused` where nothing says it, and where the names in the keys cannot be the model's.
    """
    listed, evidence = in_file(state)
    if listed is not None:
        if names is None:
            return ParamMap(state, _distinct(listed, where), evidence)
        found = check(ParamMap(state, _of_model(listed, names, where), evidence), names)
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


def check(found: ParamMap, names: Names) -> ParamMap:
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


def _by_position(state: OptimizerState, names: Names, where: str, beside: Sequence[Section]) -> ParamMap:
    try:
        return (_by_optimizer if names.optimizer else _by_order)(state, Parameters(names), where)
    except Refused as error:
        order = saved_order(beside, names, set(Parameters(names).shapes))
        if order is None or not order.differing:
            raise
        doubt = _of_another_order(names, order)
        problems = (*error.problems, *doubt.problems)
        raise Refused(f"{error.message}; {doubt.message}", hint=doubt.hint, problems=problems) from error


def _by_saved_order(found: ParamMap, names: Names, beside: Sequence[Section]) -> ParamMap:
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


def own_names(state: OptimizerState, beside: Sequence[Section]) -> ParamMap | None:
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
            return ParamMap(state, names, evidence, assumed=True)
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


def _by_optimizer(state: OptimizerState, parameters: Parameters, where: str) -> ParamMap:
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
    return ParamMap(state, names, "optimizer")


def _by_order(state: OptimizerState, parameters: Parameters, where: str) -> ParamMap:
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
        return ParamMap(state, names, "model.parameters() order")
    ways, found = _interleave([group.params for group in state.groups], order, parameters.shapes, wrong)
    if ways != 1:
        raise Refused(
            f"{where} has {len(state.groups)} param groups, and "
            + ("its shapes fit no order of the model's parameters" if ways == 0 else "its ids cannot be told apart"),
            hint=_SETTLE,
        )
    return ParamMap(state, found, "model.parameters() order within each group, the only one that the shapes allow")


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
