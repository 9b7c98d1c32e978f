"""CKPT operands: `PATH` or `PATH::SECTION`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Union

from ckpttool.core.checkpoint import Checkpoint, Section
from ckpttool.core.errors import CkptError
from ckpttool.core.options import expand_options
from ckpttool.core.text import a
from ckpttool.formats import detect_folder
from ckpttool.formats.registry import FORMATS
from ckpttool.formats.remarks import read_form
from ckpttool.io import progress
from ckpttool.io.files import is_dir, read_on
from ckpttool.naming.wrappers import is_lightning

_MODEL = re.compile(r"(.+\.py|[A-Za-z_][\w.]*):[A-Za-z_][\w.]*")  # as MODEL operands are written
MODEL_SECTIONS = (
    "model",
    "state_dict",
    "model_state_dict",
    "model_state",
    "module",
    "net",
    "network",
)


# What torch.save writes: a dict of any keys, a list or a tuple, with tensors anywhere inside.
Ckpt = Union[str, "os.PathLike[str]", Checkpoint, Mapping[Any, Any], "list[Any]", "tuple[Any, ...]"]


@expand_options()
def open_checkpoint(ckpt: Ckpt) -> Checkpoint:
    """Return the index of a checkpoint: keys, dtypes, shapes, and where the bytes are. No tensor is
    read.

    `ckpt` is a path, a URL, ``PATH::SECTION``, or an object in memory: a dict, list or tuple that
    `torch.save` could save. The index of an object is the one of the file that `torch.save` would
    write. Raise `CkptError` if it cannot be read, if it has no such section, or if files of the
    index have changed since.
    """
    if isinstance(ckpt, Checkpoint):
        read_on(ckpt.files)
        return ckpt
    if isinstance(ckpt, str):
        return open_operand(ckpt)
    if not isinstance(ckpt, (Mapping, list, tuple)):
        raise CkptError(f"{a(ckpt)} is not a checkpoint", hint="pass a path, a URL or a state dict")
    from ckpttool.operands.in_memory import checkpoint_of

    return checkpoint_of(ckpt)


def open_operand(operand: str) -> Checkpoint:
    """Return the checkpoint that `operand` names; with ``::SECTION`` only that section, as if it
    were the whole file.

    Raise `CkptError` if the file cannot be read or has no such section.
    """
    if _MODEL.fullmatch(operand) and not os.path.lexists(operand):
        raise CkptError(
            f"{operand} is a MODEL, and stands where a checkpoint is to stand",
            hint=f"--model {operand}",
        )
    path, picked = split(operand)
    with progress.doing(f"reading {path}", None):
        checkpoint = read_form(detect_folder.open_checkpoint(path))
    if picked is None:
        return checkpoint
    if all(section.path != picked for section in checkpoint.sections):
        checkpoint = checkpoint.read_as([picked])
    try:
        section = checkpoint.section(picked)
    except KeyError:
        have = ", ".join(s.title for s in checkpoint.sections) or "none"
        raise CkptError(
            f"{path} has no section {picked!r}", hint=f"its sections are: {have}"
        ) from None
    inside = f"{picked}." if picked else ""
    unreached = tuple(
        found for found in checkpoint.unreached if f"{found.path}.".startswith(inside)
    )
    return replace(
        checkpoint,
        source=operand,
        sections=(replace(section, path="", in_lightning=is_lightning(checkpoint)),),
        others=(),
        container=None,
        unreached=unreached,
        other_files=(),
        objects=(),
    )


def split(operand: str) -> tuple[str, str | None]:
    """``PATH::SECTION`` -> (PATH, SECTION); SECTION is None if the operand names none.

    fsspec chains URLs with the same mark (``simplecache::s3://…``): a part with ``://`` is never a
    section.
    """
    path, mark, section = operand.rpartition("::")
    return (path, section) if mark and path and "://" not in section else (operand, None)


def is_folder(operand: str) -> bool:
    """Return True if the operand is a folder, local or behind a URL, and names no section of it."""
    return split(operand)[1] is None and is_dir(operand)


def model_section(checkpoint: Checkpoint) -> Section:
    """Return the section of the model: the only state dict, or the only one under a usual name.

    Raise `CkptError`, with the sections to choose from, if that is ambiguous or the file has no
    state dict.
    """
    found = list(checkpoint.state_dicts)
    if len(found) > 1:
        usual = [section for section in found if section.path.rpartition(".")[2] in MODEL_SECTIONS]
        found = usual if len(usual) == 1 else found
    if len(found) == 1:
        return found[0]
    if found:
        hint = f"pick one: {checkpoint.part(found[0].path)}"
        raise CkptError(
            f"{checkpoint.source} holds several state dicts: {', '.join(s.title for s in found)}",
            hint=hint,
        )
    held = [f"{s.title} ({s.kind})" for s in checkpoint.sections]
    held += [f"{found.path} (a storage, not understood)" for found in checkpoint.unreached[:3]]
    what = ", ".join(held) or "; ".join(checkpoint.notes) or "no tensors at all"
    raise CkptError(f"{checkpoint.source} holds no state dict", hint=f"it holds: {what}")


def saved_state_dicts(checkpoint: Checkpoint) -> tuple[Section, ...]:
    """Return the state dicts of the file, if its format keeps their keys in the order of
    ``state_dict()``.

    All state dicts of the file are returned, also if the operand picks one section.
    """
    path, picked = split(checkpoint.source)
    whole = checkpoint if picked is None else open_operand(path)
    kind = FORMATS.get(whole.format)
    if kind is None or not kind.pickled or kind.folder:
        return ()
    return whole.state_dicts
