"""Compare the checkpoints of a run in the order of their steps: which step changed what.

Each step is compared with the previous one that can be read, section by section, by `run` and `compare_optimizers`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.core.checkpoint import Checkpoint, Section
from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.options import expand_options
from ckpttool.core.text import Info, dotted, plural, some
from ckpttool.diffing.causes import Code
from ckpttool.diffing.optimizer import UNKNOWN_CLASS, SavedOptimizer, compare_optimizers
from ckpttool.diffing.options import CompareOptions, DiffOptions
from ckpttool.diffing.result import EITHER_WAY, HARMLESS, STEP_STATUSES, Diff, Entry, History, Step, StepChange
from ckpttool.diffing.run import run
from ckpttool.diffing.sections import compare
from ckpttool.distributed.job import only_first
from ckpttool.formats.detect_folder import is_fsdp, is_part, is_weights, optimizers_in, parts_in
from ckpttool.formats.registry import MEMORY
from ckpttool.io import progress
from ckpttool.io.files import exists, is_dir, is_file, is_glob, names_in
from ckpttool.io.paths import join
from ckpttool.io.paths import name as name_of
from ckpttool.naming.evidence import Pair
from ckpttool.operands.checkpoint import Ckpt, is_folder, open_checkpoint, open_operand, split

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckpttool.keywords import CompareKeywords

HYPERPARAMETERS = Info(
    "hyperparameters such as `lr` were not compared, because they change at every step: pass --values", "not-compared"
)
_SIDES = ("this step", "the step before")


# The steps in a folder

_DIGITS = re.compile(r"(\d+)")


def natural(paths: Iterable[str]) -> list[str]:
    """Sort the paths as people count: ``step-9`` before ``step-10``."""
    return sorted(paths, key=lambda path: [int(part) if part.isdecimal() else part for part in _DIGITS.split(path)])


def in_order(paths: Sequence[str]) -> list[str]:
    """Return the paths in `natural` order if they differ only in numbers, as a shell lists them; else unchanged."""
    alike = len({_DIGITS.sub("", path) for path in paths}) == 1
    return natural(paths) if alike else list(paths)


def steps_in(folder: str) -> tuple[list[str], list[str]]:
    """Return the checkpoints in the folder of a run: its folders that hold one, or else its files, in `natural` order.

    Also return the names of other checkpoints: files next to folders, or a folder next to files. Raise `CkptError` if
    there are fewer than two steps, or if they are the parts of one checkpoint.
    """
    names = [name for name in names_in(folder) if not name.startswith(".")]
    inside = [name for name in names if is_dir(join(folder, name)) and _holds_one(join(folder, name))]
    files = [name for name in names if is_weights(name) and is_file(join(folder, name))]
    found = inside if len(inside) > 1 else files
    if len(found) < 2 or (found is files and is_part(folder, names)) or is_fsdp(folder):
        raise CkptError(f"{folder} is not a folder of several checkpoints: nothing to compare", hint=_HINT)
    return natural(join(folder, name) for name in found), natural(files if found is inside else inside)


_HINT = "ckpttool diff LEFT RIGHT, ckpttool diff --model MODEL [CKPT], or ckpttool history RUN: its steps"


def _holds_one(folder: str) -> bool:
    names = names_in(folder)
    return is_part(folder, names) or bool(parts_in(folder, names)) or any(map(is_weights, names))


def opened(step: str | Checkpoint) -> Iterator[tuple[str, Checkpoint]]:
    """Yield the checkpoints of a step, each with its name in the step's folder, empty for the model's.

    Raise `CkptError` if one cannot be read.
    """
    if isinstance(step, Checkpoint):
        yield "", step
        return
    if not is_folder(step) or is_fsdp(step):
        yield "", open_operand(step)
        return
    names = names_in(step)
    parts = [] if is_part(step, names) else parts_in(step, names)
    if not parts:
        yield "", open_operand(step)
    for name in (*parts, *optimizers_in(names)):
        yield name, open_operand(join(step, name))


# Comparing


@expand_options(CompareOptions)
def history(run: str | Sequence[Ckpt], **options: Unpack[CompareKeywords]) -> History:
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
) -> History:
    """Return what each of `steps` changed since the previous one; `folder` is the run's, None if each was named.

    `others` are checkpoints in the folder that are not steps: a note says that they were not compared. Raises
    `CkptError` if fewer than two steps can be read.
    """
    compared_steps: list[Step] = []
    remarks: dict[str, None] = {} if options.comparison else {HYPERPARAMETERS: None}
    if others:
        remarks[Info(f"not compared (not steps): {some(others)}", "not-compared")] = None
    previous: tuple[str, dict[str, Checkpoint]] | None = None
    for path in steps:
        name = path.source if isinstance(path, Checkpoint) else name_of(path) if folder else path
        try:
            now = dict(opened(path))
            step = Step(name, tensors=sum(len(s.tensors) for one in now.values() for s in one.sections))
            if previous is not None:
                found = _Found([], [], remarks)
                _compare_step(now, previous[1], options, found)
                step = replace(step, since=previous[0], changes=tuple(found.changes), likely=tuple(found.likely))
        except CkptError as error:
            compared_steps.append(Step(name, error=f"{error.message} ({error.hint})"))
            continue
        compared_steps.append(step)
        previous = name, now
    errors = [step for step in compared_steps if step.error]
    if len(compared_steps) - len(errors) < 2:
        message = f"of {len(compared_steps)} checkpoints fewer than two can be read"
        raise CkptError(message, hint=f"{errors[0].name}: {errors[0].error}")
    values = options.comparison is not None
    compared = dict.fromkeys(("keys", "shapes"), True) | {"dtypes": not options.ignore_dtype}
    compared |= {"values": values, "aliases": False, "metadata": False}
    compared |= {"optimizers": values, "other_sections": True, "objects": False}
    return History(folder, tuple(compared_steps), tuple(remarks), compared, options.scope)


class _Found(NamedTuple):
    """Lists to collect the changes of one step, and the notes of the run."""

    changes: list[StepChange]
    likely: list[Pair]
    notes: dict[str, None]


def _compare_step(
    now: dict[str, Checkpoint], before: dict[str, Checkpoint], options: DiffOptions, found: _Found
) -> None:
    """Compare the files of two steps, by name."""
    found.changes.extend(StepChange("", "section", (), (name,), "new file") for name in _only(now, before))
    found.changes.extend(StepChange("", "section", (name,), (), "file removed") for name in _only(before, now))
    both = [name for name in now if name in before]
    for name in both:
        formats = before[name].format, now[name].format
        if formats[0] != formats[1]:
            found.changes.append(StepChange(name, "format", formats[:1], formats[1:], "different format"))
    for name in both:
        _compare_sections(name, now[name], before[name], options, found)


def _only(mine: Iterable[str], others: Iterable[str]) -> list[str]:
    known = set(others)
    return [name for name in mine if name not in known]


def _compare_sections(name: str, now: Checkpoint, before: Checkpoint, options: DiffOptions, found: _Found) -> None:
    mine, theirs = ({section.path: section for section in one.sections} for one in (now, before))
    changes = found.changes
    changes += [StepChange(name, "section", (), (path or "(root)",), "new section") for path in _only(mine, theirs)]
    changes += [StepChange(name, "section", (path or "(root)",), (), "section removed") for path in _only(theirs, mine)]
    changes += [StepChange(name, "added", (), (path,), "not a tensor") for path in _only(now.others, before.others)]
    changes += [StepChange(name, "dropped", (path,), (), "not a tensor") for path in _only(before.others, now.others)]
    values = options.comparison
    for path in [path for path in mine if path in theirs]:
        where = dotted(name, path)
        new, old = mine[path], theirs[path]
        entries: Iterable[Entry]
        if new.kind != old.kind:
            changes.append(StepChange(where, "section", (old.kind,), (new.kind,), "different kind of section"))
            continue
        if new.kind == "optimizer" and new.mapping and old.mapping:  # a manifest has none
            saved = SavedOptimizer.of(now, new), SavedOptimizer.of(before, old)
            both = compare_optimizers(*saved, None, values, _SIDES)
            now_class, old_class = (title or UNKNOWN_CLASS for title in both.classes)
            if now_class != old_class:
                changes.append(StepChange(where, "class", (old_class,), (now_class,), "different optimizer class"))
            skipped = HARMLESS if values is not None else HARMLESS | {"value"}
            entries = [entry for entry in both.entries if entry.status not in skipped]
            found.notes.update(dict.fromkeys(both.notes))
            if both.by_id:
                found.notes[Info("parameters of optimizers are compared by id", "compared-by")] = None
        elif new.kind == "state_dict":
            diff = _run(now, new, before, old, options)
            entries = [entry for entry in diff.entries if diff.is_difference(entry)]
            found.likely.extend(() if diff.inferred is None else diff.inferred.pairs)
            found.notes.update(dict.fromkeys(diff.notes))
        else:
            entries = [entry for entry in compare(new, old, values) if entry.status not in EITHER_WAY]
        for entry in entries:
            reason = "" if entry.cause is None or entry.cause.code in _PLAIN else entry.why(_SIDES)
            status = STEP_STATUSES.get(entry.status, entry.status)
            changes.append(StepChange(where, status, entry.right, entry.left, reason, entry.detail))


_PLAIN = (Code.MISSING, Code.UNEXPECTED)  # the statuses say all of it


def _run(now: Checkpoint, new: Section, before: Checkpoint, old: Section, options: DiffOptions) -> Diff:
    """Compare two sections as if the checkpoints had no other: unknown storages have other bytes at every step."""
    alone, old_alone = (
        replace(one, sections=(section,), others=(), unreached=(), objects=())
        for one, section in ((now, new), (before, old))
    )
    return run(alone, old_alone, options, sides=_SIDES)
