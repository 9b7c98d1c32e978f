"""The checkpoints of one training run, in the order of their steps, and the files that each of them is made of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkptError
from ckpttool.formats.recognise_folder import is_fsdp, is_part, is_weights, optimizers_in, parts_in
from ckpttool.io.files import is_dir, is_file, names_in
from ckpttool.io.paths import join
from ckpttool.io.paths import name as name_of
from ckpttool.operands.checkpoint import open_operand

_DIGITS = re.compile(r"(\d+)")


def natural(paths: Iterable[str]) -> list[str]:
    """The paths in the order in which people count: ``step-9`` before ``step-10``."""
    return sorted(paths, key=lambda path: [int(part) if part.isdecimal() else part for part in _DIGITS.split(path)])


def in_order(paths: Sequence[str]) -> list[str]:
    """The paths in `natural` order where only the numbers in them differ, as a shell lists them; else as they are."""
    alike = len({_DIGITS.sub("", path) for path in paths}) == 1
    return natural(paths) if alike else list(paths)


def steps_in(folder: str) -> tuple[list[str], list[str]]:
    """The checkpoints in the folder of a run: its folders that hold some, or else its files, in `natural` order.

    Then the names of those that are no steps: files beside folders, or a folder beside files. Raises `CkptError` where
    the first are not two at least, or are the parts of one.
    """
    names = [name for name in names_in(folder) if not name.startswith(".")]
    inside = [name for name in names if is_dir(join(folder, name)) and _holds_one(join(folder, name))]
    files = [name for name in names if is_weights(name) and is_file(join(folder, name))]
    found = inside if len(inside) > 1 else files
    if len(found) < 2 or (found is files and is_part(folder, names)) or is_fsdp(folder):
        raise CkptError(f"{folder} is no folder of several checkpoints: nothing to compare", hint=_HINT)
    return natural(join(folder, name) for name in found), natural(files if found is inside else inside)


_HINT = "ckpttool diff LEFT RIGHT, ckpttool diff --model MODEL [CKPT], or ckpttool diff RUN_FOLDER: a run's steps"


def _holds_one(folder: str) -> bool:
    names = names_in(folder)
    return is_part(folder, names) or bool(parts_in(folder, names)) or any(map(is_weights, names))


def opened(step: str | Checkpoint) -> Iterator[tuple[str, Checkpoint]]:
    """The checkpoints that a step is made of, each with its name in the step's folder, empty for the one of the model.

    Raises `CkptError` where one cannot be read.
    """
    if isinstance(step, Checkpoint):
        yield "", step
        return
    if not is_dir(step) or is_fsdp(step):
        yield "", open_operand(step)
        return
    names = names_in(step)
    parts = [] if is_part(step, names) else parts_in(step, names)
    if not parts:
        yield "", open_operand(step)
    for name in (*parts, *optimizers_in(names)):
        yield name, open_operand(join(step, name))


def called(step: str | Checkpoint, run: str | None) -> str:
    """Return the step's name in the folder of the run, or the name that it was given."""
    if isinstance(step, Checkpoint):
        return step.source
    return name_of(step) if run else step
