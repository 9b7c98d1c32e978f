"""Find out which parameter an optimizer's id belongs to."""

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
from ckpttool.optimizers.forms import ELEMENTWISE, fits

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Parameters:
    """A model's parameters by canonical name, in ``model.parameters()`` order. Tied parameters are
    one.
    """

    names: Names

    @cached_property
    def _first(self) -> list[RuntimeTensor]:
        return [t for t in self.names.runtime if t.kind == "parameter" and t.alias_of is None]

    @cached_property
    def shapes(self) -> dict[str, Shape | None]:
        return {t.canonical: t.shape for t in self._first}

    @cached_property
    def trainable(self) -> tuple[str, ...]:
        return tuple(t.canonical for t in self._first if t.trainable)

    @cached_property
    def canonical(self) -> dict[str, str]:
        """Return name -> canonical name of its first FQN, for all names of all parameters."""
        first = {t.fqn: t for t in self.names.runtime if t.kind == "parameter"}
        names = {t.canonical: first[t.alias_of or t.fqn].canonical for t in first.values()}
        names.update((t.fqn, first[t.alias_of or t.fqn].canonical) for t in first.values())
        return names

    @cached_property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Return the canonical names in the groups of the model's optimizer, in its order; empty
        without one.
        """
        count = max(
            len(self.names.optimizer_groups), *(p.group + 1 for p in self.names.optimizer), 0
        )
        ordered = sorted(self.names.optimizer, key=lambda p: p.id)
        return tuple(
            tuple(self.canonical[p.fqn] for p in ordered if p.group == group)
            for group in range(count)
        )

    @property
    def fresh_optimizer(self) -> OptimizerState:
        """Return the state of the model's optimizer before its first step."""
        options = [
            *self.names.optimizer_groups,
            *[{}] * (len(self.groups) - len(self.names.optimizer_groups)),
        ]
        return OptimizerState(
            FQN, tuple(ParamGroup(tuple(own), o) for own, o in zip(self.groups, options)), {}
        )

    @cached_property
    def first_step(self) -> dict[Param, tuple[str, ...]]:
        """Return canonical name -> the names of the state that the optimizer's first step creates,
        if known.
        """
        return {self.canonical[p.fqn]: p.state for p in self.names.optimizer if p.state}


# The order of keys in a file


def saved_order(
    sections: Iterable[Section], names: Names, params: Collection[str]
) -> tuple[Problem, ...] | None:
    """Compare the order of the canonical names `params` in a file's state dicts with the model's.

    Returns a problem for each parameter that is in another position, and None if the state dicts
    show no order. `sections` are state dicts whose keys are in the order of ``state_dict()``. One
    in another order than the model outweighs all others. One that lacks parameters does not confirm
    the order.
    """
    tables, canonical = NameTables(names), Parameters(names).canonical
    confirmed = False
    for section in sections:
        reading = read(tables, section)
        fqns_of: dict[str, tuple[str, ...]] = {fqn: (fqn,) for fqn in tables.tensors}
        if reading.form == SERIALIZED:
            fqns_of = {
                key: () if source is None else tuple(ex.refs(source))
                for key, source in tables.saved.items()
            }
        in_file = [reading.match.names.get(entry.key, "") for entry in section.tensors]
        file_order, model_order = (
            dict.fromkeys(
                canonical[fqn]
                for name in order
                for fqn in fqns_of.get(name, ())
                if fqn in canonical
            )
            for order in (in_file, fqns_of)
        )
        file = [name for name in file_order if name in params]
        model = [name for name in model_order if name in params and name in file_order]
        if file != model:
            pairs = [(name, other) for name, other in zip(model, file) if name != other]
            return tuple(
                Problem(f"the file's model has {other} instead", name) for name, other in pairs
            )
        confirmed = confirmed or (bool(params) and len(file) == len(params))
    return () if confirmed else None


def in_order_of(
    section: Section, names: Names, called: Callable[[str], str] | None = None
) -> Section:
    """Return the state dict with its keys in the order of the model's ``state_dict()``, other keys
    last.

    `called` returns the new name for each of the model's names, if they were renamed.
    """
    tables = NameTables(names)
    if called is None:
        reading = read(tables, section)
        name_of = reading.match.names
        order: Iterable[str] = (
            tables.serialized_names if reading.form == SERIALIZED else tables.runtime_names
        )
    else:
        name_of = canonical_keys(section.keys)
        forms = [list(map(called, own)) for own in (tables.serialized_names, tables.runtime_names)]
        order = max(forms, key=lambda own: len({*own} & {*name_of.values()}))
    rank = {name: position for position, name in enumerate(order)}
    tensors = sorted(
        section.tensors, key=lambda entry: rank.get(name_of.get(entry.key, ""), len(rank))
    )
    return replace(section, tensors=tuple(tensors))


def same_key_order(left: Iterable[Section], right: Iterable[Section]) -> bool | None:
    """Return whether two files list the keys of their models in the same order; None without common
    keys.
    """
    right_keys = [[entry.key for entry in section.tensors] for section in right]
    same = None
    for section in left:
        keys = [entry.key for entry in section.tensors]
        for others in right_keys:
            common = set(keys) & set(others)
            if len(common) > 1:
                same = [key for key in keys if key in common] == [
                    key for key in others if key in common
                ]
                if not same:
                    return False
    return same


# Owners

# partial orders that are followed at a time; more groups than that need the optimizer's code
_MOST_STATES = 20_000
_SETTLE = "pass --optimizer file.py:make, the function that makes the optimizer of the model"


@dataclass(frozen=True, slots=True)
class Doubt:
    """What in a file contradicts the owners: a sentence, every place, and a hint.

    `by_another`: another definition of the model saved the file, so naming it is the way out.
    """

    message: str
    hint: str
    problems: tuple[Problem, ...]
    by_another: bool = False


@dataclass(frozen=True, slots=True)
class ParamMap:
    """The canonical name of each parameter of an optimizer, whose state is `saved`.

    `evidence` is the source of the names: the file's own ``param_names``, the ``names`` in its
    keys, the model's ``optimizer``, or its ``model.parameters()`` order. Parameters that the file
    does not name are known by position only: they are `assumed`, unless the order of the model's
    keys in the file confirms it. With a `doubt`, the names are not an answer.
    """

    saved: OptimizerState
    names: Mapping[Param, str]
    evidence: str
    assumed: bool = False
    doubt: Doubt | None = None

    @property
    def state(self) -> OptimizerState:
        return renamed(self.saved, self.names)

    def rests_on(self, where: str) -> str:
        """Return a sentence that says what an answer rests on if the file does not name the
        parameters.
        """
        if not self.assumed:
            return (
                f"{where}: its ids are those of the {self.evidence}: the file lists the model's"
                " keys in this order"
            )
        return (
            f"{where}: the file says neither whose state its ids are nor in which order its model"
            " was registered; "
            f"this answer assumes the {self.evidence}"
        )

    def settled(self, where: str) -> ParamMap:
        """Return itself. Raises `Refused`, all problems at once, if there is a doubt."""
        if self.doubt is not None:
            raise Refused(
                f"{where}: {self.doubt.message}", hint=self.doubt.hint, problems=self.doubt.problems
            )
        return self


def owners(
    state: OptimizerState, names: Names | None, where: str, state_dicts: Sequence[Section] = ()
) -> ParamMap:
    """Return which parameter each state belongs to. The keys of the `state_dicts` are in the order
    of the saved model.

    Raises `Refused` if nothing says it, and if the names in the keys cannot be the model's.
    """
    listed, evidence = in_file(state)
    if listed is not None:
        if names is not None:
            canonical, problems = in_model(listed.values(), names)
            if problems:
                raise Refused(
                    f"{where} holds {len(problems)} parameters that the model lacks",
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
                problems=[
                    Problem("the name of more than one parameter", name) for name in repeated
                ],
            )
        if names is None:
            return ParamMap(state, listed, evidence)
        named = check(ParamMap(state, listed, evidence), names)
        return named if state.form == ID else named.settled(where)
    if names is None:
        raise Refused(
            f"{where}: nothing says which parameters the ids are",
            hint="pass --model MODEL (and --optimizer O if it does not take model.parameters() in"
            " their order)",
        )
    parameters = Parameters(names)
    try:
        by_position = (_by_optimizer if names.optimizer else _by_order)(state, parameters, where)
    except Refused as error:
        moved = saved_order(state_dicts, names, parameters.shapes)
        if not moved:
            raise
        doubt = _other_order(names, moved)
        raise Refused(
            f"{error.message}; {doubt.message}", hint=doubt.hint, problems=(*error.problems, *moved)
        ) from error
    by_position = check(by_position, names)
    moved = saved_order(state_dicts, names, set(by_position.names.values()))
    if not moved:
        return replace(by_position, assumed=moved is None)
    # Several groups are a doubt also if each keeps its order: one cut by position (parameters[:3])
    # has others then.
    if state.is_stateless and len(state.nonempty_groups) == 1:
        return by_position
    return replace(by_position, doubt=_other_order(names, moved))


def _other_order(names: Names, moved: tuple[Problem, ...]) -> Doubt:
    return Doubt(
        "its ids may not be this model's: the file lists the model's keys in another order than"
        f" {names.model}",
        f"name the model that saved it: --model OLD --to-model {names.model} (with --optimizer and"
        " --to-optimizer)",
        moved,
        by_another=True,
    )


def in_file(state: OptimizerState) -> tuple[dict[Param, str] | None, str]:
    """Return the file's own name for every parameter or None, and where the names are: in keys or
    ``param_names``.
    """
    if state.form != ID:
        return {param: str(param) for param in state.params}, "names"
    listed = {
        p: name for group in state.groups for p, name in zip(group.params, group.param_names or ())
    }
    return (listed if 0 < len(listed) == len(state.params) else None), "param_names"


def in_model(listed: Iterable[str], names: Names) -> tuple[dict[str, str], list[Problem]]:
    """Return name -> canonical name, for runtime, serialized and wrapped names, and the names that
    match nothing.
    """
    known = Parameters(names).canonical
    keys = {
        key: known[fqn]
        for key, fqn in NameTables(names).fqn_of.items()
        if fqn in known and key not in known
    }
    found = match(list(dict.fromkeys(listed)), {name: name for name in (*known, *keys)})
    problems = [
        Problem(f"not a parameter of {names.model}", name) for name in found.unmatched
    ] + list(found.problems)
    return {name: known.get(own) or keys[own] for name, own in found.names.items()}, problems


def own_names(state: OptimizerState, state_dicts: Sequence[Section]) -> ParamMap | None:
    """Return the file's own names for the parameters, without a model; None if it has none.

    Ids in one group get the keys of a state dict with as many tensors, if all their shapes fit.
    """
    if in_file(state)[0] is not None:
        return owners(state, None, "the optimizer")
    if len(state.nonempty_groups) != 1:
        return None
    for section in state_dicts:
        aliases = section.aliases()
        entries = [entry for entry in section.tensors if entry.key not in aliases]
        shapes = _Shapes(state, [entry.shape for entry in entries])
        pairs = list(zip(state.params, entries))
        if len(entries) == len(state.params) and not any(
            shapes.misfit(param, entry.shape) for param, entry in pairs
        ):
            evidence = f"the keys of {section.path or 'the model'} in the same file, in their order"
            return ParamMap(
                state, {param: entry.key for param, entry in pairs}, evidence, assumed=True
            )
    return None


def check(owners: ParamMap, names: Names) -> ParamMap:
    """Return `owners`, with a doubt if the shapes in the state contradict them."""
    shapes = Parameters(names).shapes
    state_shapes = _Shapes(owners.saved, list(shapes.values()))
    problems = []
    for param, name in owners.names.items():
        reason = state_shapes.misfit(param, shapes[name])
        if reason is not None:
            problems.append(
                Problem(f"cannot be {name}: {reason}" if param != name else reason, str(param))
            )
    if not problems:
        return owners
    message = f"the shapes in its state contradict its {owners.evidence}"
    hint = (
        _SETTLE
        if owners.evidence.startswith("model")
        else ("is it another model, or another version of it?")
    )
    return replace(
        owners,
        doubt=Doubt(message, hint, tuple(problems), by_another=owners.evidence == "optimizer"),
    )


def _by_optimizer(state: OptimizerState, parameters: Parameters, where: str) -> ParamMap:
    actual, expected = (
        [len(group.params) for group in state.groups],
        [len(group) for group in parameters.groups],
    )
    if actual != expected:
        raise Refused(
            f"{where} was not saved by this optimizer: its groups have other sizes",
            hint="pass the --model and --optimizer that saved it; --to-model and --to-optimizer"
            " name the new ones",
            problems=[
                Problem(
                    f"{left} parameters in the file, {right} in the optimizer",
                    f"param_groups.{index}",
                )
                for index, (left, right) in enumerate(zip_longest(actual, expected, fillvalue=0))
                if left != right
            ],
        )
    names = {
        p: n
        for group, own in zip(state.groups, parameters.groups)
        for p, n in zip(group.params, own)
    }
    return ParamMap(state, names, "optimizer")


def _by_order(state: OptimizerState, parameters: Parameters, where: str) -> ParamMap:
    """Assign the ids of each group to parameters in the model's order, if there is exactly one way
    to do that.
    """
    count, total = len(state.params), len(parameters.shapes)
    orders = [
        names for names in (tuple(parameters.shapes), parameters.trainable) if len(names) == count
    ]
    if not orders:
        raise Refused(
            f"{where} has {count} parameters, and the model {total}, {len(parameters.trainable)}"
            " of them trainable",
            hint=_SETTLE,
        )
    order = orders[0]
    if len(state.nonempty_groups) < 2:
        return ParamMap(state, dict(zip(state.params, order)), "model.parameters() order")
    ways, names = _interleave(state, order, parameters.shapes)
    if ways != 1:
        raise Refused(
            f"{where} has {len(state.groups)} param groups, and "
            + (
                "its shapes fit no order of the model's parameters"
                if ways == 0
                else "its ids cannot be told apart"
            ),
            hint=_SETTLE,
        )
    return ParamMap(
        state,
        names,
        "model.parameters() order within each group, the only one that the shapes allow",
    )


def _interleave(
    state: OptimizerState, order: Sequence[str], shapes: Mapping[str, Shape | None]
) -> tuple[int, dict[Param, str]]:
    """Count the ways to deal `order` out to the groups (very many count as 2), and return the only
    one.

    Each group takes its parameters in the order of the model; a step gives the next parameter to
    one of the groups.
    """
    groups = [group.params for group in state.groups]
    state_shapes = _Shapes(state, [shapes[name] for name in order])
    ways = {tuple(0 for _ in groups): 1}  # positions in the groups -> how many ways lead there
    # positions -> the group that took the last parameter
    steps: list[dict[tuple[int, ...], int]] = []
    for name in order:
        after: Counter[tuple[int, ...]] = Counter()
        taken: dict[tuple[int, ...], int] = {}
        for positions, count in ways.items():
            for index, group in enumerate(groups):
                at = positions[index]
                if at < len(group) and state_shapes.misfit(group[at], shapes[name]) is None:
                    moved = (*positions[:index], at + 1, *positions[index + 1 :])
                    after[moved] += count
                    taken[moved] = index
        if len(after) > _MOST_STATES:
            return 2, {}
        ways = after
        steps.append(taken)
    if list(ways.values()) != [1]:
        return sum(ways.values()), {}
    (positions,) = ways
    names: dict[Param, str] = {}
    for taken, name in zip(reversed(steps), reversed(order)):
        index = taken[positions]
        positions = (*positions[:index], positions[index] - 1, *positions[index + 1 :])
        names[groups[index][positions[index]]] = name
    return 1, names


class _Shapes:
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
        self.elementwise = ELEMENTWISE | {
            n for n, count in by_name.items() if any(count) and count <= available
        }

    def misfit(self, param: Param, shape: Shape | None) -> str | None:
        """Return why the state does not fit a parameter of this shape; None if it does."""
        if shape is None:
            return None
        for name, own in self.state.shapes(param).items():
            if not fits(name, own, shape) or (name in self.elementwise and own != shape):
                return f"{name} is {list(own)}, the parameter {list(shape)}"
        return None
