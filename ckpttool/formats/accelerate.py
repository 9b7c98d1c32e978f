"""The folder in which accelerate, and with it the Trainer of transformers, saves a model under FSDP, as one checkpoint.

The weights lie in a folder of torch.distributed.checkpoint or in a torch file, the optimizer's state in another of the
kind (``accelerate/utils/fsdp_utils.py``, accelerate 0.21 to 1.15). Each is read as what it is; of several models each
has its sections, ``model``, ``model_1`` …
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ckpttool.core.checkpoint import Checkpoint, Section
from ckpttool.core.errors import CkptError, Problem
from ckpttool.formats.detect import sniff
from ckpttool.formats.detect_folder import fsdp_parts, locate, states_beside, weights_beside
from ckpttool.formats.registry import FORMATS
from ckpttool.io.files import is_dir
from ckpttool.io.paths import join

FORMAT = "accelerate"


def read(folder: str) -> Checkpoint:
    """The index of all that the folder holds of the models and the optimizers.

    Raises `CkptError` where a part cannot be read, or holds more than the one state dict that accelerate saves in it.
    """
    parts = {section: join(folder, name) for section, name in fsdp_parts(folder).items()}
    read = {section: _part(path) for section, path in parts.items()}
    odd = [problem for section, part in read.items() for problem in _odd(section, part)]
    if odd:
        raise CkptError(
            f"{folder} is not as accelerate saves it", hint="name one of its parts, and not the folder", problems=odd
        )
    return Checkpoint(
        folder,
        FORMAT,
        sum(part.nbytes for part in read.values()),
        tuple(replace(part.sections[0], path=section) for section, part in read.items()),
        notes=(
            *(note for part in read.values() for note in part.notes),
            *(f"{name} lies beside it, and is not read" for name in weights_beside(folder)),
        ),
        unreached=tuple(replace(u, path=f"{s}: {u.path}") for s, part in read.items() for u in part.unreached),
        beside=states_beside(folder),
    )


def _part(path: str) -> Checkpoint:
    found = locate(path).format if is_dir(path) else sniff(path)
    return FORMATS[found].read(path)


def _odd(section: str, part: Checkpoint) -> Iterable[Problem]:
    kinds = [found.kind for found in part.sections]
    expected = "optimizer" if section.startswith("optimizer") else "state_dict"
    if kinds != [expected]:
        yield Problem(f"holds {_listed(part.sections)}, and not the one of {section}", part.source)
    yield from (Problem("holds more than that", f"{part.source}::{other}") for other in part.others)


def _listed(sections: Iterable[Section]) -> str:
    return ", ".join(f"{found.title} ({found.kind})" for found in sections) or "no state dict"
