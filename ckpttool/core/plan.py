"""A plan is data: a list of outputs, each an expression over the source's tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import field, replace
from typing import Any, Literal

from ckpttool.core import expression as ex
from ckpttool.core.checkpoint import Checkpoint, Section
from ckpttool.core.errors import Problem, same_problem
from ckpttool.core.expression import EXPRESSION, Expression, Ref
from ckpttool.core.schema import (
    COUNT,
    OBJECT,
    SHAPE,
    TEXT,
    TEXTS,
    Members,
    check_titled,
    list_of,
    map_of,
    nullable,
    object_of,
    one_of,
    record,
    unless_empty,
)
from ckpttool.core.strides import Shape
from ckpttool.core.text import dotted, title_of
from ckpttool.core.values import dataclass, public

SCHEMA = "ckpttool.plan/1"
_HINT = "`ckpttool remap … --dry-run --format json` shows one"


@dataclass(frozen=True, slots=True)
class Output:
    """One entry of the result: `key` in `section` is the value of `source` (a `Ref` for a
    rename).
    """

    section: str
    key: str
    source: Expression

    @property
    def place(self) -> tuple[str, str]:
        """The section and the key."""
        return self.section, self.key

    @property
    def is_unchanged(self) -> bool:
        """Whether it is the entry that the source has under its key."""
        return isinstance(self.source, Ref) and self.source.key == self.key


Why = Literal["made_again", "counter", "attribute", "other"]


@dataclass(frozen=True, slots=True)
class Dropped:
    """One source entry that the result does not hold, and why.

    `why` is the kind of the reason: code that saves or loads makes it again (`made_again`), it is
    the `counter` of an AveragedModel, or an `attribute` of a pickled module.
    """

    section: str
    key: str
    reason: str
    why: Why = "other"


@dataclass(frozen=True, slots=True)
class ModuleRename:
    """A module path of a state dict's ``_metadata`` that changes its name."""

    section: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class GroupMove:
    """A param group of the result: its parameters, and the group whose hyperparameters it has, or
    these `options`.
    """

    params: tuple[str, ...]
    like: int | None
    options: Mapping[str, ex.Argument] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OptimizerMove:
    """An optimizer's state under other parameters. `form` is ``id``, ``fqn`` or ``flat``.

    `sources` maps each parameter that has state to what it is of the source's parameters, as these
    are called there (an id as text); `shapes` are the shapes of the source's parameters of which
    others are made. `created` are parameters that get the state that the optimizer creates, and the
    names in it.
    """

    section: str
    form: str
    groups: tuple[GroupMove, ...]
    sources: Mapping[str, Expression]
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    created: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelRun:
    """A run of a model's own code, which computes values that no operators express: ``Op(way,
    (NAME, …))``.

    With `way` `LOADED` a real instance of `model`, built with the arguments `kwargs`, loads `given`
    strictly, and NAME is one of its tensors; with `SAVED` it gets `given` as its tensors, and NAME
    is a key of its ``state_dict()``. `given` is made of the source's keys.
    """

    section: str
    way: str
    model: str
    kwargs: Mapping[str, Any]
    given: Mapping[str, Expression]


@public
@dataclass(frozen=True, slots=True)
class Plan:
    """The result of a remap as data. Sections that it does not name are copied unchanged.

    Attributes:
        outputs: The entries of the result, each with its expression over the source's tensors.
        dropped: Entries of the source that the result does not hold, with the reason.
        modules: Module paths of ``_metadata`` that change their names.
        runs: Runs of a model's own code that compute values.
        optimizers: Optimizer states that move to other parameters.
    """

    outputs: tuple[Output, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    modules: tuple[ModuleRename, ...] = ()
    runs: tuple[ModelRun, ...] = ()
    optimizers: tuple[OptimizerMove, ...] = ()

    @property
    def sections(self) -> tuple[str, ...]:
        sections = [output.section for output in self.outputs]
        sections += [drop.section for drop in self.dropped]
        return tuple(dict.fromkeys(sections))

    @property
    def computed(self) -> tuple[Output, ...]:
        """The outputs that are not renames. A plan without any only moves bytes and needs no
        torch.
        """
        return tuple(output for output in self.outputs if not isinstance(output.source, Ref))

    @property
    def second_names(self) -> tuple[Output, ...]:
        """The outputs whose tensor the result also has under its old key, or under the key of an
        earlier output. They are added, not renamed.
        """
        first: dict[tuple[str, str], str] = {}
        for output in self.outputs:
            if isinstance(output.source, Ref):
                tensor = output.section, output.source.key
                if output.is_unchanged:
                    first[tensor] = output.key
                else:
                    first.setdefault(tensor, output.key)
        added = []
        for output in self.outputs:
            if not isinstance(output.source, Ref):
                continue
            if output.key != first[output.section, output.source.key]:
                added.append(output)
        return tuple(added)

    @property
    def reads(self) -> set[tuple[str, str]]:
        """Return the section and the key of everything that it moves, reads, or drops.

        Drops at the root are left out: they may be complete sections, or outside of all sections.
        """
        places = {(drop.section, drop.key) for drop in self.dropped if drop.section}
        for output in self.outputs:
            for key in ex.refs(output.source):
                places.add((output.section, key))
        return places

    @property
    def by_code(self) -> list[tuple[ModelRun, list[str]]]:
        """The keys that each run of a model's code computes, completely or in part."""
        keys: dict[tuple[str, str], dict[str, None]] = {}  # of each section and way
        for output in self.computed:
            for call in ex.calls(output.source):
                keys.setdefault((output.section, call.op), {})[output.key] = None
        computed = []
        for run in self.runs:
            of_run = keys.get((run.section, run.way), {})
            computed.append((run, list(of_run)))
        return computed

    def check(self, source: Checkpoint) -> list[Problem]:
        """Return why the plan does not fit `source`: unknown refs, collisions, entries neither used
        nor dropped.
        """
        paths = self.sections
        outputs: dict[str, list[Output]] = {path: [] for path in paths}
        dropped: dict[str, list[str]] = {path: [] for path in paths}
        for output in self.outputs:
            outputs[output.section].append(output)
        for drop in self.dropped:
            dropped[drop.section].append(drop.key)
        given: dict[str, list[Expression]] = {}
        for run in self.runs:
            given.setdefault(run.section, []).extend(run.given.values())
        sections: dict[str, Section] = {}
        for section in source.sections:
            sections.setdefault(section.path, section)
        problems: list[Problem] = []
        for path in paths:
            problems += _check_section(
                path, outputs[path], dropped[path], given.get(path, ()), sections.get(path)
            )
        return problems + self._without_code()

    def _without_code(self) -> list[Problem]:
        """Return computed values whose run the plan does not name, or not before another run reads
        them.
        """
        earlier: set[tuple[str, str]] = set()
        unknown: list[str] = []
        for run in self.runs:
            for name, source in run.given.items():
                if not _is_said(run.section, source, earlier):
                    unknown.append(name)
            earlier.add((run.section, run.way))
        for output in self.computed:
            if not _is_said(output.section, output.source, earlier):
                unknown.append(output.key)
        text = "the plan does not say which model's code computes it"
        return same_problem(text, unknown)

    def to_json(self) -> dict[str, Any]:
        """Return the PLAN object of the contract.

        It has ``modules`` if ``_metadata`` follows the renames, ``runs`` if a model's own code
        computes something.
        """
        return dict(PLAN.write(self))

    @staticmethod
    def from_json(value: Any, source: str = "the plan") -> Plan:
        """Read the result of `to_json`; `source` names the file in the error.

        Raises `CkptError`, with every problem at its JSON path, on anything else.
        """
        check_titled(PLAN, value, source, "a plan", _HINT)
        plan: Plan = PLAN.read(value)
        return plan


_PLACE: Members = {"section": TEXT, "key": TEXT}
# Names with their expressions; here a mapping.
_SOURCES = replace(
    list_of(object_of({"name": TEXT, "from": EXPRESSION}), unique="name"),
    read=lambda value: {item["name"]: EXPRESSION.read(item["from"]) for item in value},
    write=lambda sources: [
        {"name": name, "from": EXPRESSION.write(source)} for name, source in sources.items()
    ],
)
_GROUP = record(
    GroupMove, {"params": TEXTS, "like": nullable(COUNT)}, {"options": map_of(ex.ARGUMENT)}
)
_MOVE = record(
    OptimizerMove,
    {
        "section": TEXT,
        "form": one_of("id", "fqn", "flat"),
        "groups": list_of(_GROUP),
        "params": _SOURCES,
    },
    {"shapes": map_of(SHAPE), "created": unless_empty(map_of(TEXTS))},
    called={"params": "sources"},
)
_RUN = record(
    ModelRun,
    {
        "section": TEXT,
        "way": one_of(*ex.BY_CODE),
        "model": TEXT,
        "kwargs": OBJECT,
        "given": _SOURCES,
    },
)
PLAN = record(
    Plan,
    {
        "outputs": list_of(
            record(Output, {**_PLACE, "from": EXPRESSION}, called={"from": "source"})
        ),
        "dropped": list_of(record(Dropped, {**_PLACE, "reason": TEXT})),
    },
    {
        "modules": unless_empty(
            list_of(record(ModuleRename, {"section": TEXT, "old": TEXT, "new": TEXT}))
        ),
        "runs": unless_empty(list_of(_RUN)),
        "optimizers": unless_empty(list_of(_MOVE, unique="section")),
    },
    title=SCHEMA,
    is_file=True,
)


def _is_said(section: str, source: Expression, runs: Collection[tuple[str, str]]) -> bool:
    """Return True if every value that code computes in it comes from one of these runs, under a
    name.
    """
    for call in ex.calls(source):
        has_name = bool(call.args) and isinstance(call.args[0], str)
        if not has_name or (section, call.op) not in runs:
            return False
    return True


def _check_section(
    path: str,
    outputs: list[Output],
    dropped: list[str],
    given: Iterable[Expression],
    section: Section | None,
) -> list[Problem]:
    if section is None:
        text = "the plan rewrites a section that the checkpoint does not have"
        return [Problem(text, title_of(path))]
    have = section.by_key()
    computed = [output for output in outputs if not isinstance(output.source, Ref)]
    used = dict.fromkeys(output.source.key for output in outputs if isinstance(output.source, Ref))
    for output in computed:
        used.update(dict.fromkeys(ex.refs(output.source)))
    read = dict(used)
    for source in given:
        read.update(dict.fromkeys(ex.refs(source)))
    unread = [key for key in read if key not in have]
    undropped = [key for key in dropped if key not in have]
    left = have.keys() - used.keys() - set(dropped)
    problems = same_problem("the plan reads a key that the checkpoint does not have", unread)
    text = "the plan drops a key that the checkpoint does not have"
    problems += same_problem(text, undropped)
    problems += _collisions(outputs)
    for output in computed:
        if ex.is_opaque(output.source):
            text = "computed by code that is not a tensor operator"
            problems.append(Problem(text, output.key, "opaque"))
    unused = [key for key in have if key in left] if left else []
    problems += same_problem("neither used nor dropped", unused)
    return problems


def _collisions(outputs: Collection[Output]) -> Iterator[Problem]:
    """Yield the keys that several outputs would write."""
    if len({output.key for output in outputs}) == len(outputs):
        return
    count = Counter(output.key for output in outputs)
    sources: dict[str, list[str]] = {}
    for output in outputs:
        if count[output.key] > 1:
            source = " + ".join(dict.fromkeys(ex.refs(output.source))) or "a constant"
            sources.setdefault(output.key, []).append(source)
    for key, texts in sources.items():
        text = f"{len(texts)} sources would be written to one key ({', '.join(texts)})"
        yield Problem(text, key)


def compose(first: Plan, second: Plan) -> Plan:
    """Return the plan that does `first` and then `second`, which reads the keys that the first
    writes. Neither may change an optimizer.

    Keys that the second drops are dropped from the source too, unless something else is made from
    them.
    """
    assert not first.optimizers
    assert not second.optimizers
    sources: dict[str, dict[str, Expression]] = {}  # of each key that the first plan writes
    for output in first.outputs:
        sources.setdefault(output.section, {})[output.key] = output.source
    outputs = []
    used: set[tuple[str, str]] = set()
    for output in second.outputs:
        source = ex.substitute(output.source, sources[output.section].__getitem__)
        # keys share outputs
        outputs.append(output if source == output.source else replace(output, source=source))
        for key in ex.refs(source):
            used.add((output.section, key))
    runs = []
    for run in second.runs:
        given = {}
        for name, value in run.given.items():
            given[name] = ex.substitute(value, sources.get(run.section, {}).__getitem__)
        runs.append(replace(run, given=given))
    dropped_by_second: dict[tuple[str, str], Dropped] = {}
    for drop in second.dropped:
        for key in ex.refs(sources[drop.section][drop.key]):
            dropped_by_second[drop.section, key] = replace(drop, key=key)
    dropped = list(first.dropped)
    for place, drop in dropped_by_second.items():
        if place not in used:
            dropped.append(drop)
    modules = in_turn(first.modules, second.modules)
    return Plan(tuple(outputs), tuple(dropped), modules, (*first.runs, *runs))


def in_turn(
    first: Iterable[ModuleRename], second: Iterable[ModuleRename]
) -> tuple[ModuleRename, ...]:
    """Return both renames of modules as one: the second applies to the results of the first."""
    after = {(rename.section, rename.old): rename.new for rename in second}
    names = {}
    for rename in first:
        place = (rename.section, rename.old)
        names[place] = after.get((rename.section, rename.new), rename.new)
    for place, new in after.items():
        names.setdefault(place, new)
    renames = (ModuleRename(*place, new) for place, new in names.items())
    return tuple(rename for rename in renames if rename.new != rename.old)


def module_renames(
    section: str, modules: Iterable[str], renames: Mapping[str, str]
) -> tuple[ModuleRename, ...]:
    """Return how the module paths of ``_metadata`` follow the renames of keys (old key -> new key).

    A key and its new name tell which module became which while their last segments are equal; the
    evidence nearest to the tensor wins. A module without tensors follows its nearest ancestor that
    moved.
    """
    moved: dict[str, tuple[int, str]] = {}
    for old, new in renames.items():
        old_path, new_path = old, new
        depth = 0
        while old_path and new_path:
            old_path, _, old_segment = old_path.rpartition(".")
            new_path, _, new_segment = new_path.rpartition(".")
            if old_segment != new_segment:
                break
            depth += 1
            if old_path not in moved or depth < moved[old_path][0]:
                moved[old_path] = (depth, new_path)
    followers = []
    for path in modules:
        if not isinstance(path, str):  # torch loads any path, but only looks up strings
            continue
        ancestor, below = path, list[str]()
        while ancestor and ancestor not in moved:
            ancestor, _, segment = ancestor.rpartition(".")
            below.insert(0, segment)
        if ancestor not in moved:
            continue
        new = dotted(moved[ancestor][1], *below)
        if new != path:
            followers.append(ModuleRename(section, path, new))
    return tuple(followers)
