"""A plan is data: a list of outputs, each an expression over the source's tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import field, replace
from typing import Any

from ckpttool.core import expression as ex
from ckpttool.core.checkpoint import Checkpoint, Section
from ckpttool.core.errors import Problem
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
from ckpttool.core.text import dotted
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
    def is_unchanged(self) -> bool:
        """Whether it is the entry that the source has under its key."""
        return isinstance(self.source, Ref) and self.source.key == self.key


@dataclass(frozen=True, slots=True)
class Dropped:
    """One source entry that the result does not hold, and why."""

    section: str
    key: str
    reason: str


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
    others are made.
    """

    section: str
    form: str
    groups: tuple[GroupMove, ...]
    sources: Mapping[str, Expression]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


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
    """The result of a remap. Sections that it does not name are copied unchanged."""

    outputs: tuple[Output, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    modules: tuple[ModuleRename, ...] = ()
    runs: tuple[ModelRun, ...] = ()
    optimizers: tuple[OptimizerMove, ...] = ()

    @property
    def sections(self) -> tuple[str, ...]:
        return tuple(
            dict.fromkeys([o.section for o in self.outputs] + [d.section for d in self.dropped])
        )

    @property
    def computed(self) -> tuple[Output, ...]:
        """The outputs that are not renames. A plan without any only moves bytes and needs no
        torch.
        """
        return tuple(output for output in self.outputs if not isinstance(output.source, Ref))

    @property
    def reads(self) -> set[tuple[str, str]]:
        """Return the section and the key of everything that it moves, reads, or drops.

        Drops at the root are left out: they may be complete sections, or outside of all sections.
        """
        moved = {(output.section, key) for output in self.outputs for key in ex.refs(output.source)}
        return moved | {(gone.section, gone.key) for gone in self.dropped if gone.section}

    @property
    def by_code(self) -> list[tuple[ModelRun, list[str]]]:
        """The keys that each run of a model's code computes, completely or in part."""
        ways = {(o.section, o.key): {call.op for call in ex.calls(o.source)} for o in self.computed}
        return [
            (
                run,
                [
                    key
                    for (section, key), own in ways.items()
                    if section == run.section and run.way in own
                ],
            )
            for run in self.runs
        ]

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
        found = (
            _check_section(
                path, outputs[path], dropped[path], given.get(path, ()), sections.get(path)
            )
            for path in paths
        )
        return [problem for problems in found for problem in problems] + self._without_code()

    def _without_code(self) -> list[Problem]:
        """Return computed values whose run the plan does not name, or not before another run reads
        them.
        """
        known: set[tuple[str, str]] = set()
        unknown: list[str] = []
        for run in self.runs:
            unknown += [
                name
                for name, source in run.given.items()
                if not _is_said(run.section, source, known)
            ]
            known.add((run.section, run.way))
        unknown += [
            output.key
            for output in self.computed
            if not _is_said(output.section, output.source, known)
        ]
        return [
            Problem("the plan does not say which model's code computes it", key) for key in unknown
        ]

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
        made: Plan = PLAN.read(value)
        return made


_PLACE: Members = {"section": TEXT, "key": TEXT}
# Names with their expressions; here a mapping.
_SOURCES = replace(
    list_of(object_of({"name": TEXT, "from": EXPRESSION}), unique="name"),
    read=lambda value: {one["name"]: EXPRESSION.read(one["from"]) for one in value},
    write=lambda made: [
        {"name": name, "from": EXPRESSION.write(source)} for name, source in made.items()
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
    {"shapes": map_of(SHAPE)},
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


def _is_said(section: str, source: Expression, known: Collection[tuple[str, str]]) -> bool:
    """Return True if every value that code computes in it comes from a run that is `known`, under a
    name.
    """
    return all(
        (section, call.op) in known and [*map(type, call.args[:1])] == [str]
        for call in ex.calls(source)
    )


def _check_section(
    path: str,
    outputs: list[Output],
    dropped: list[str],
    given: Iterable[Expression],
    section: Section | None,
) -> list[Problem]:
    if section is None:
        return [
            Problem("the plan rewrites a section that the checkpoint has not", path or "(root)")
        ]
    have = section.by_key()
    read = dict.fromkeys(output.source.key for output in outputs if isinstance(output.source, Ref))
    computed = [output for output in outputs if not isinstance(output.source, Ref)]
    read |= dict.fromkeys(key for output in computed for key in ex.refs(output.source))
    gone = set(dropped)
    wanted = read | dict.fromkeys(key for one in given for key in ex.refs(one))
    problems = [
        Problem("the plan reads a key that the checkpoint has not", key)
        for key in wanted
        if key not in have
    ]
    problems += [
        Problem("the plan drops a key that the checkpoint has not", key)
        for key in dropped
        if key not in have
    ]
    many = {key for key, count in Counter(output.key for output in outputs).items() if count > 1}
    writers: dict[str, list[str]] = {}
    for output in (output for output in outputs if output.key in many):
        writers.setdefault(output.key, []).append(
            " + ".join(dict.fromkeys(ex.refs(output.source))) or "a constant"
        )
    problems += [
        Problem(f"{len(sources)} sources would be written to one key ({', '.join(sources)})", key)
        for key, sources in writers.items()
    ]
    problems += [
        Problem("computed by code that is not a tensor operator", o.key, "opaque")
        for o in computed
        if ex.is_opaque(o.source)
    ]
    problems += [
        Problem("neither used nor dropped", key)
        for key in have
        if key not in read and key not in gone
    ]
    return problems


def compose(first: Plan, second: Plan) -> Plan:
    """Return the plan that does `first` and then `second`, which reads the keys that the first
    writes.

    Keys that the second drops are dropped from the source too, unless something else is made from
    them.
    """
    made: dict[str, dict[str, Expression]] = {}
    for output in first.outputs:
        made.setdefault(output.section, {})[output.key] = output.source
    outputs = []
    for output in second.outputs:
        source = ex.substitute(output.source, made[output.section].__getitem__)
        # keys share outputs
        outputs.append(output if source == output.source else replace(output, source=source))
    runs = []
    for run in second.runs:
        given = {
            name: ex.substitute(one, made.get(run.section, {}).__getitem__)
            for name, one in run.given.items()
        }
        runs.append(replace(run, given=given))
    used = {(output.section, key) for output in outputs for key in ex.refs(output.source)}
    dropped = {
        (d.section, key): d.reason
        for d in second.dropped
        for key in ex.refs(made[d.section][d.key])
    }
    late = tuple(Dropped(*place, reason) for place, reason in dropped.items() if place not in used)
    modules = in_turn(first.modules, second.modules)
    return Plan(tuple(outputs), (*first.dropped, *late), modules, (*first.runs, *runs))


def in_turn(
    first: Iterable[ModuleRename], second: Iterable[ModuleRename]
) -> tuple[ModuleRename, ...]:
    """Return both renames of modules as one: the second applies to the results of the first."""
    after = {(m.section, m.old): m.new for m in second}
    before = {(m.section, m.old): m.new for m in first}
    whole = {place: after.get((place[0], new), new) for place, new in before.items()}
    whole.update((place, new) for place, new in after.items() if place not in whole)
    return tuple(
        ModuleRename(section, old, new) for (section, old), new in whole.items() if new != old
    )


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
        old_parts, new_parts = old.split("."), new.split(".")
        for depth in range(1, min(len(old_parts), len(new_parts)) + 1):
            if old_parts[-depth] != new_parts[-depth]:
                break
            path, target = ".".join(old_parts[:-depth]), ".".join(new_parts[:-depth])
            if path not in moved or depth < moved[path][0]:
                moved[path] = (depth, target)
    found = []
    for path in modules:
        if not isinstance(path, str):  # torch loads any path, but only looks up strings
            continue
        parts = path.split(".") if path else []
        for length in range(len(parts), -1, -1):
            known = moved.get(".".join(parts[:length]))
            if known is not None:
                follows = dotted(known[1], *parts[length:])
                if follows != path:
                    found.append(ModuleRename(section, path, follows))
                break
    return tuple(found)
