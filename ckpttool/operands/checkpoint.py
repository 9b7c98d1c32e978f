"""CKPT operands: ``PATH`` or ``PATH::SECTION``, and which section of a file is meant."""

from __future__ import annotations

import os
import re
from dataclasses import replace

from ckpttool.checkpoint import Checkpoint, Section
from ckpttool.errors import CkptError
from ckpttool.formats.form_mark import read_form
from ckpttool.formats.open import open_checkpoint
from ckpttool.formats.table import FORMATS, MEMORY
from ckpttool.io import work
from ckpttool.naming.wrappers.chain import is_lightning

_MODEL = re.compile(r"(.+\.py|[A-Za-z_][\w.]*):[A-Za-z_][\w.]*")  # as MODEL operands are written
MODEL_SECTIONS = ("model", "state_dict", "model_state_dict", "model_state", "module", "net", "network")


def open_operand(operand: str) -> Checkpoint:
    """The checkpoint that `operand` names; with ``::SECTION`` that section alone, as if it were the whole file.

    Raises `CkptError` where the file cannot be read or has no such section.
    """
    if _MODEL.fullmatch(operand) and not os.path.lexists(operand):
        raise CkptError(f"{operand} is a MODEL, and stands where a checkpoint is to stand", hint=f"--model {operand}")
    path, picked = split(operand)
    with work.doing(f"reading {path}", None):
        checkpoint = read_form(open_checkpoint(path))
    if picked is None:
        return checkpoint
    if all(section.path != picked for section in checkpoint.sections):
        checkpoint = checkpoint.read_as([picked])
    try:
        section = checkpoint.section(picked)
    except KeyError:
        have = ", ".join(s.title for s in checkpoint.sections) or "none"
        raise CkptError(f"{path} has no section {picked!r}", hint=f"its sections are: {have}") from None
    inside = f"{picked}." if picked else ""
    unreached = tuple(found for found in checkpoint.unreached if f"{found.path}.".startswith(inside))
    return replace(
        checkpoint,
        source=operand,
        sections=(replace(section, path="", in_lightning=is_lightning(checkpoint)),),
        others=(),
        container=None,
        unreached=unreached,
        beside=(),
        objects=(),
    )


def split(operand: str) -> tuple[str, str | None]:
    """``PATH::SECTION`` -> (PATH, SECTION); SECTION is None where the operand names none.

    fsspec chains URLs with the same mark (``simplecache::s3://…``): what has ``://`` in it is never a section.
    """
    path, mark, section = operand.rpartition("::")
    return (path, section) if mark and path and "://" not in section else (operand, None)


def model_section(checkpoint: Checkpoint) -> Section:
    """The section that holds the model: the only state dict, or the only one under a usual name.

    Raises `CkptError`, with the sections to choose from, where several could be meant or there is none.
    """
    found = list(checkpoint.state_dicts)
    if len(found) > 1:
        usual = [section for section in found if section.path.rpartition(".")[2] in MODEL_SECTIONS]
        found = usual if len(usual) == 1 else found
    if len(found) == 1:
        return found[0]
    if found:
        hint = f"pick one: {checkpoint.source}::{found[0].path}"
        if checkpoint.format == MEMORY.name:
            hint = f"pass one of them instead of the whole object: {found[0].title}"
        raise CkptError(
            f"{checkpoint.source} holds several state dicts: {', '.join(s.title for s in found)}", hint=hint
        )
    held = [f"{s.title} ({s.kind})" for s in checkpoint.sections]
    held += [f"{found.path} (a storage, not understood)" for found in checkpoint.unreached[:3]]
    what = ", ".join(held) or "; ".join(checkpoint.notes) or "no tensors at all"
    raise CkptError(f"{checkpoint.source} holds no state dict", hint=f"it holds: {what}")


def saved_state_dicts(checkpoint: Checkpoint) -> tuple[Section, ...]:
    """The state dicts of a file, as far as its format keeps their keys in the order that ``state_dict()`` gave.

    Those of the whole file, also where the operand picks one section of it.
    """
    path, picked = split(checkpoint.source)
    whole = checkpoint if picked is None else open_operand(path)
    kind = FORMATS.get(whole.format)
    if kind is None or not kind.pickled or kind.folder:
        return ()
    return whole.state_dicts
