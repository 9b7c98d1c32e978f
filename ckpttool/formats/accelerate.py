"""Read the folder of a model that accelerate or the Trainer of transformers saved under FSDP.

The weights are in a folder of torch.distributed.checkpoint or in a torch file, and so is the
optimizer's state (``accelerate/utils/fsdp_utils.py``, accelerate 0.21 to 1.15). Several models have
the sections ``model``, ``model_1`` …
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ckpttool.core.checkpoint import Checkpoint, Section, Unreached
from ckpttool.core.errors import CkptError, Problem
from ckpttool.formats.folders import fsdp_parts, other_weights, state_files
from ckpttool.formats.registry import recognize
from ckpttool.io.paths import join

FORMAT = "accelerate"


def read(folder: str) -> Checkpoint:
    """Read the index of the models and optimizers in the folder.

    Raises `CkptError` if a part cannot be read, or holds more than the one state dict that
    accelerate saves in it.
    """
    sections: list[Section] = []
    notes: list[str] = []
    unreached: list[Unreached] = []
    problems: list[Problem] = []
    nbytes = 0
    for path, name in fsdp_parts(folder).items():
        part = recognize(join(folder, name)).read()
        problems += _problems(path, part)
        sections += [replace(section, path=path) for section in part.sections]
        notes += part.notes
        unreached += [storage.of(path) for storage in part.unreached]
        nbytes += part.nbytes
    if problems:
        raise CkptError(
            f"{folder} is not as accelerate saves it",
            hint="name one of its parts, and not the folder",
            problems=problems,
        )
    notes += [f"{name} is in the same folder, and is not read" for name in other_weights(folder)]
    return Checkpoint(
        folder,
        FORMAT,
        nbytes,
        tuple(sections),
        notes=tuple(notes),
        unreached=tuple(unreached),
        other_files=state_files(folder),
    )


def _problems(path: str, part: Checkpoint) -> Iterator[Problem]:
    """Yield what the part holds besides the one section that accelerate saves in it."""
    expected = "optimizer" if path.startswith("optimizer") else "state_dict"
    if [section.kind for section in part.sections] != [expected]:
        titles = [f"{section.title} ({section.kind})" for section in part.sections]
        content = ", ".join(titles) or "no state dict"
        yield Problem(f"holds {content} instead of the one of {path}", part.source)
    for other in part.others:
        yield Problem("is not expected there", f"{part.source}::{other}")
