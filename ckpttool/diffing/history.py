"""The checkpoints of a run in the order of their steps: which step changed keys, dtypes, the optimizer's groups.

Each step is compared with the one before that can be read, section by section: nothing is decided here that `run` and
`compare_optimizers` do not say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

from ckpttool.core.checkpoint import Checkpoint, Section
from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.keys import dotted
from ckpttool.core.options import expand_options
from ckpttool.core.schema import COUNT, FLAG, TEXT, TEXTS, Members, list_of, nullable, one_of, record
from ckpttool.core.text import plural, some
from ckpttool.core.values import dataclass, public
from ckpttool.diffing.optimizer import SavedOptimizer, compare_optimizers
from ckpttool.diffing.options import DiffOptions
from ckpttool.diffing.result import COMPARED, HARMLESS, STATUSES, Compared, Entry, with_sides
from ckpttool.diffing.run import run
from ckpttool.diffing.sections import Values, compare
from ckpttool.distributed.job import only_first
from ckpttool.formats.registry import MEMORY
from ckpttool.io import progress
from ckpttool.io.files import exists, is_glob
from ckpttool.naming.pairing.values import Pair
from ckpttool.operands.checkpoint import Ckpt, called, in_order, open_checkpoint, opened, split, steps_in
from ckpttool.optimizers.classes import class_of
from ckpttool.optimizers.forms import read

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckpttool.keywords import DiffKeywords

# What an entry of a diff of this step (its left) and the one before (its right) is called, where not by its status.
CHANGES = {"unexpected": "added", "missing": "dropped"}
KINDS = ("format", "section", "class")  # changes of no single key
HYPERPARAMETERS = "hyperparameters such as `lr` were not compared, since they change from step to step: pass --values"
_NO_TENSOR = "an entry that is no tensor"


@dataclass(frozen=True, slots=True)
class Change:
    """What a step has otherwise than the one before: `status` of a diff, ``added``, ``dropped``, or one of `KINDS`."""

    section: str
    status: str
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    reason: str = ""
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """A checkpoint of the run. `error` says why it could not be read, None where it could.

    `since` is the step that it was compared with, None for the first. `likely` are pairs of what is dropped and what is
    added (left: now) that may be one tensor under two names.
    """

    name: str
    since: str | None = None
    error: str | None = None
    tensors: int = 0
    changes: tuple[Change, ...] = ()
    likely: tuple[Pair, ...] = ()

    @property
    def is_as_before(self) -> bool:
        """Whether there is nothing to say of it."""
        return not self.changes and not self.error and self.since is not None


@public
@dataclass(frozen=True, slots=True)
class Steps:
    """The answer. `run` is the folder, None where the steps were named one by one."""

    run: str | None
    steps: tuple[Step, ...]
    notes: tuple[str, ...]
    compared: Compared = field(default_factory=dict, compare=False)
    scope: str = ""

    @property
    def identical(self) -> bool:
        """Whether all were read, and from the first to the last nothing changed."""
        return not any(step.changes or step.error for step in self.steps)

    @property
    def passes(self) -> bool:
        """Whether the exit status is 0."""
        return self.identical

    def to_json(self) -> dict[str, Any]:
        """The `steps` object of the contract."""
        return dict(STEPS.write(self))


_SIDES: Members = {"before": TEXTS, "after": TEXTS}
_STATUS = one_of(*STATUSES, *CHANGES.values(), *KINDS)
_CHANGE = record(Change, {"section": TEXT, "status": _STATUS, **_SIDES, "reason": TEXT}, {"detail": TEXT})
_STEP = record(
    Step,
    {
        "source": TEXT,
        **dict.fromkeys(("since", "error"), nullable(TEXT)),
        "tensors": COUNT,
        "changes": list_of(_CHANGE),
        "suggested": list_of(record(Pair, {**_SIDES, "evidence": TEXT}, called={"before": "right", "after": "left"})),
    },
    called={"source": "name", "suggested": "likely"},
)
STEPS = record(
    Steps,
    {"run": nullable(TEXT), "identical": FLAG, "compared": COMPARED, "steps": list_of(_STEP), "notes": TEXTS},
    title="ckpttool.steps/1",
)


@expand_options(DiffOptions)
def steps(run: str | Sequence[Ckpt], **options: Unpack[DiffKeywords]) -> Steps:
    """Return what each checkpoint of a run changed since the one before: keys, dtypes, shapes, param groups.

    `run` is a folder, or the checkpoints. Paths that differ only in numbers are compared in the order of the numbers,
    everything else in the order given. `values` also compares bytes and hyperparameters. Raises `CkptError` if fewer
    than two checkpoints can be read.
    """
    only_first()
    others: list[str] = []
    checkpoints: list[str | Checkpoint]
    if isinstance(run, str):
        names, others = steps_in(run)
        checkpoints = [*names]
    else:
        names = [one for one in run if isinstance(one, str)]
        missing = [path for path in names if not exists(source := split(path)[0]) and not is_glob(source)]
        if missing:  # a mistake, and not a change of the run
            problems = [Problem("no such file", path) for path in missing]
            raise CkptError(f"{plural(len(missing), 'step')} not found", hint="check the paths", problems=problems)
        if len(names) == len(run):
            checkpoints = [*in_order(names)]
        else:
            checkpoints = [one if isinstance(one, str) else _numbered(one, number) for number, one in enumerate(run)]
    with progress.doing(f"comparing {len(checkpoints)} checkpoints", None):
        return compare_steps(checkpoints, run if isinstance(run, str) else None, DiffOptions(**options), others)


def _numbered(ckpt: Ckpt, number: int) -> Checkpoint:
    checkpoint = open_checkpoint(ckpt)
    return replace(checkpoint, source=f"step {number}") if checkpoint.format == MEMORY.name else checkpoint


def compare_steps(
    steps: Sequence[str | Checkpoint], folder: str | None, options: DiffOptions, others: Sequence[str] = ()
) -> Steps:
    """What each of `steps` changed since the one before; `folder` is the run's, None where each was named.

    `others` are checkpoints beside them that are no steps: a note says that they were not looked at. Raises `CkptError`
    where fewer than two steps can be read.
    """
    found: list[Step] = []
    notes: dict[str, None] = {} if options.comparison else {HYPERPARAMETERS: None}
    if others:
        notes[f"not compared, beside the steps: {some(others)}"] = None
    before: tuple[str, dict[str, Checkpoint]] | None = None
    for path in steps:
        name = called(path, folder)
        try:
            now = dict(opened(path))
            step = Step(name, tensors=sum(len(s.tensors) for one in now.values() for s in one.sections))
            if before is not None:
                step = _compared(replace(step, since=before[0]), now, before[1], options, notes)
        except CkptError as error:
            found.append(Step(name, error=f"{error.message} ({error.hint})"))
            continue
        found.append(step)
        before = name, now
    _check(found)
    compared = dict.fromkeys(("keys", "shapes"), True) | {"dtypes": not options.ignore_dtype}
    compared |= {"values": options.comparison is not None, "aliases": False, "metadata": False}
    compared |= {"optimizers": options.comparison is not None, "other_sections": True, "objects": False}
    return Steps(folder, tuple(found), tuple(notes), compared, options.scope)


def _check(found: Sequence[Step]) -> None:
    if sum(not step.error for step in found) < 2:
        (first, *_) = (step for step in found if step.error)
        raise CkptError(f"of {len(found)} checkpoints fewer than two can be read", hint=f"{first.name}: {first.error}")


@dataclass(frozen=True, slots=True)
class _Found:
    changes: tuple[Change, ...] = ()
    likely: tuple[Pair, ...] = ()
    notes: tuple[str, ...] = ()


def _compared(
    step: Step, now: dict[str, Checkpoint], before: dict[str, Checkpoint], options: DiffOptions, notes: dict[str, None]
) -> Step:
    found = [_Found(tuple(_parts(now, before)))]
    for name in (name for name in now if name in before):
        found += _sections(name, now[name], before[name], options)
    for one in found:
        notes.update(dict.fromkeys(_in_time(note.partition(": pass --model")[0]) for note in one.notes))
    changes = tuple(change for one in found for change in one.changes)
    return replace(step, changes=changes, likely=tuple(pair for one in found for pair in one.likely))


def _parts(now: dict[str, Checkpoint], before: dict[str, Checkpoint]) -> Iterator[Change]:
    """Whole files that only one of the two steps has, and files in another format."""
    yield from (
        Change("", "section", (), (name,), "a file that the step before had not") for name in _only(now, before)
    )
    yield from (Change("", "section", (name,), (), "a file that is no longer there") for name in _only(before, now))
    for name in (name for name in now if name in before and now[name].format != before[name].format):
        yield Change(name, "format", (before[name].format,), (now[name].format,), "another format")


def _only(mine: Iterable[str], others: Iterable[str]) -> list[str]:
    known = set(others)
    return [one for one in mine if one not in known]


def _sections(name: str, now: Checkpoint, before: Checkpoint, options: DiffOptions) -> Iterator[_Found]:
    mine, theirs = ({section.path: section for section in one.sections} for one in (now, before))
    new = (Change(name, "section", (), (_shown(path),), "a section that is new") for path in _only(mine, theirs))
    gone = (Change(name, "section", (_shown(path),), (), "a section that is gone") for path in _only(theirs, mine))
    other = (Change(name, "added", (), (path,), _NO_TENSOR) for path in _only(now.others, before.others))
    missing = (Change(name, "dropped", (path,), (), _NO_TENSOR) for path in _only(before.others, now.others))
    yield _Found((*new, *gone, *other, *missing))
    for path in (path for path in mine if path in theirs):
        where = dotted(name, path)
        pair = mine[path], theirs[path]
        if pair[0].kind != pair[1].kind:
            yield _Found((Change(where, "section", (pair[1].kind,), (pair[0].kind,), "a section of another kind"),))
        elif pair[0].kind == "optimizer" and pair[0].mapping and pair[1].mapping:  # a manifest has none
            yield _optimizers(where, (now, before), pair, options.comparison)
        elif pair[0].kind == "state_dict":
            diff = run(_alone(now, pair[0]), _alone(before, pair[1]), options)
            changes = tuple(_change(where, entry) for entry in diff.entries if diff.weighs(entry))
            yield _Found(changes, () if diff.inferred is None else diff.inferred.pairs, diff.notes)
        else:
            yield _Found(_changes(where, compare(*pair, options.comparison)))


def _shown(path: str) -> str:
    return path or "(root)"


def _alone(checkpoint: Checkpoint, section: Section) -> Checkpoint:
    """The checkpoint as if it had no other section; what no tensor is understood of is other bytes at every step."""
    return replace(checkpoint, sections=(section,), others=(), unreached=(), objects=())


def _optimizers(
    where: str, whole: tuple[Checkpoint, Checkpoint], pair: tuple[Section, Section], values: Values | None
) -> _Found:
    now, before = (SavedOptimizer.of(one, section) for one, section in zip(whole, pair))
    entries, notes, _ = compare_optimizers(now, before, None, values)
    entries = tuple(entry for entry in entries if values is not None or entry.status != "value")
    names = [class_of(read(section)) or "not one of torch's" for section in pair]
    if names[0] == names[1]:
        return _Found(_changes(where, entries), notes=notes)
    other = Change(where, "class", (names[1],), (names[0],), "another class of optimizer")
    return _Found((other, *_changes(where, entries)), notes=notes[:-1])  # the last says so too


def _changes(where: str, entries: Iterable[Entry]) -> tuple[Change, ...]:
    return tuple(_change(where, entry) for entry in entries if entry.status not in HARMLESS)


def _change(where: str, entry: Entry) -> Change:
    """An entry of the diff of a step and the one before it."""
    reason = "" if entry.reason.startswith("only ") and entry.reason.endswith(" has it") else _in_time(entry.why)
    return Change(where, CHANGES.get(entry.status, entry.status), entry.right, entry.left, reason, entry.detail)


def _in_time(text: str) -> str:
    return with_sides(text, "this step", "the step before")
