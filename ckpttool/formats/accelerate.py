"""Read the folder of a model that accelerate or the Trainer of transformers saved under FSDP.

The weights are in a folder of torch.distributed.checkpoint or in a torch file, and so is the
optimizer's state (``accelerate/utils/fsdp_utils.py``, accelerate 0.21 to 1.15). Several models have
the sections ``model``, ``model_1`` …
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CkptError, Problem
from ckpttool.formats.folders import fsdp_parts, other_weights, state_files
from ckpttool.formats.registry import recognise
from ckpttool.io.paths import join

FORMAT = "accelerate"


def read(folder: str) -> Checkpoint:
    """Read the index of the models and optimizers in the folder.

    Raises `CkptError` if a part cannot be read, or holds more than the one state dict that
    accelerate saves in it.
    """
    parts: dict[str, Checkpoint] = {}
    for section, name in fsdp_parts(folder).items():
        parts[section] = recognise(join(folder, name)).read()
    problems = [problem for section, part in parts.items() for problem in _problems(section, part)]
    if problems:
        raise CkptError(
            f"{folder} is not as accelerate saves it",
            hint="name one of its parts, and not the folder",
            problems=problems,
        )
    return Checkpoint(
        folder,
        FORMAT,
        sum(part.nbytes for part in parts.values()),
        tuple(replace(part.sections[0], path=section) for section, part in parts.items()),
        notes=(
            *(note for part in parts.values() for note in part.notes),
            *(f"{name} is in the same folder, and is not read" for name in other_weights(folder)),
        ),
        unreached=tuple(
            storage.of(section) for section, part in parts.items() for storage in part.unreached
        ),
        other_files=state_files(folder),
    )


def _problems(section: str, part: Checkpoint) -> Iterable[Problem]:
    expected = "optimizer" if section.startswith("optimizer") else "state_dict"
    if [own.kind for own in part.sections] != [expected]:
        listed = ", ".join(f"{own.title} ({own.kind})" for own in part.sections) or "no state dict"
        yield Problem(f"holds {listed} instead of the one of {section}", part.source)
    yield from (
        Problem("is not expected there", f"{part.source}::{other}") for other in part.others
    )
