"""CKPT operands: `PATH` or `PATH::SECTION`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Union

from ckpttool.containers import strict_json
from ckpttool.core.checkpoint import Checkpoint, Section
from ckpttool.core.errors import CkptError
from ckpttool.core.options import expand_options
from ckpttool.core.tables import by_key
from ckpttool.core.text import a, plural, prefix_of, shell
from ckpttool.formats import opening
from ckpttool.formats.registry import format_of
from ckpttool.formats.remarks import read_form
from ckpttool.io import progress
from ckpttool.io.files import check_reopened, is_dir, is_file
from ckpttool.io.paths import join, name, parent
from ckpttool.kinds import adapters
from ckpttool.kinds.table import with_kinds
from ckpttool.naming.wrappers import is_lightning

if TYPE_CHECKING:
    from ckpttool.naming.match import NameTables

# as MODEL operands are written: model.py:build(n=4)
_MODEL = re.compile(r"(.+\.py|[A-Za-z_][\w.]*):[A-Za-z_][\w.]*(\(.*\))?", re.DOTALL)
_ONE_COLON = re.compile(r"(.+[^:]):([^:]+)")
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

    Args:
        ckpt: A path, a URL, ``PATH::SECTION``, or an object in memory: a dict, list or tuple that
            `torch.save` could save. The index of an object is the one of the file that `torch.save`
            would write.

    Returns:
        The index. `Checkpoint.sections` are its state dicts and optimizers; each has `tensors` with
        their `shape` in elements and `nbytes`.

    Raises:
        CkptError: It cannot be read, has no such section, or a file of the index has changed since.

    Example::

        checkpoint = ckpttool.open_checkpoint("train.pt")
        for tensor in checkpoint.sections[0].tensors:
            print(tensor.key, tensor.dtype, tensor.shape, tensor.nbytes)
    """
    if isinstance(ckpt, Checkpoint):
        check_reopened(ckpt.files)
        return ckpt
    if isinstance(ckpt, str):
        return open_operand(ckpt)
    if not isinstance(ckpt, (Mapping, list, tuple)):
        raise CkptError(
            f"{a(ckpt)} is not a checkpoint",
            hint="pass a path, a URL or a state dict; a model is passed as model=",
        )
    from ckpttool.operands.in_memory import checkpoint_of

    return with_kinds(checkpoint_of(ckpt))


def open_operand(operand: str) -> Checkpoint:
    """Return the checkpoint that `operand` names; with ``::SECTION`` only that section, as if it
    were the whole file.

    Raise `CkptError` if the file cannot be read or has no such section.
    """
    if is_code(operand):
        raise CkptError(
            f"{operand} is a model, and a checkpoint is expected there",
            hint=shell("--model", operand),
        )
    section = _section_with_one_colon(operand)
    if section is not None:
        raise CkptError(
            f"{operand} does not exist", hint=f"two colons name a section of a file: {section}"
        )
    path, picked = split(operand)
    with progress.doing(f"reading {path}", None):
        checkpoint = read_form(opening.open_checkpoint(path))
    if picked is None:
        return _with_adapter_config(with_kinds(checkpoint), path)
    if all(section.path != picked for section in checkpoint.sections):
        inner = _only_inside(picked, checkpoint)
        if inner is None:
            checkpoint = checkpoint.read_as([picked])
        else:
            picked, operand = inner, f"{path}::{inner}"
    selected = replace(pick(checkpoint, picked), source=operand)
    return _with_adapter_config(with_kinds(selected), path)


def pick(checkpoint: Checkpoint, picked: str) -> Checkpoint:
    """Return only that section, as if it were the whole file.

    Raise `CkptError` if there is none.
    """
    try:
        section = checkpoint.section(picked)
    except KeyError:
        have = ", ".join(s.title for s in checkpoint.sections) or "none"
        raise CkptError(
            f"{checkpoint.source} has no section {picked!r}", hint=f"its sections are: {have}"
        ) from None
    inside = prefix_of(picked)
    unreached = [
        storage for storage in checkpoint.unreached if f"{storage.path}.".startswith(inside)
    ]
    return replace(
        checkpoint,
        sections=(replace(section, path="", in_lightning=is_lightning(checkpoint)),),
        others=(),
        container=None,
        unreached=tuple(unreached),
        other_files=(),
        objects=(),
    )


def _only_inside(path: str, checkpoint: Checkpoint) -> str | None:
    """Return the path of the only list of tensors directly in the dict at `path`, as in an
    average's state, or else of the only state dict, if no tensor is next to it; None if there is
    none, or a choice.
    """
    lists: list[str] = []
    state_dicts: list[str] = []
    for section in checkpoint.state_dicts:
        if section.path.rpartition(".")[0] == path:
            paths = lists if section.is_list else state_dicts
            paths.append(section.path)
    if len(lists) == 1:
        return lists[0]
    whole = checkpoint.read_as([path]).sections
    has_tensors = any(section.path == path and section.tensors for section in whole)
    return state_dicts[0] if len(state_dicts) == 1 and not has_tensors else None


def is_code(operand: str) -> bool:
    """Return True if the operand names a Python object, and no file."""
    if _MODEL.fullmatch(operand) is None or os.path.lexists(operand):
        return False
    return _section_with_one_colon(operand) is None


def _section_with_one_colon(operand: str) -> str | None:
    """Return ``train.pt::ema`` for ``train.pt:ema`` if that file exists; None for others."""
    parts = _ONE_COLON.fullmatch(operand)
    if parts is None or os.path.lexists(operand):
        return None
    path, section = parts.groups()
    is_code_too = path.endswith(".py") or os.path.lexists(f"{path}.py")
    if is_code_too or not os.path.isfile(path):
        return None
    return f"{path}::{section}"


def _with_adapter_config(checkpoint: Checkpoint, path: str) -> Checkpoint:
    """Return the checkpoint with PEFT's configuration, if it is an adapter and has one."""
    is_recognized = any(kind.name == adapters.NAME for kind in checkpoint.kinds)
    has_its_name = any(name(file).startswith(adapters.STEM) for file in checkpoint.files)
    if not is_recognized and not has_its_name:
        return checkpoint
    folder = path if is_dir(path) else parent(path)
    config = join(folder, adapters.CONFIG)
    settings = strict_json.read_file(config, "copy it again") if is_file(config) else None
    if not isinstance(settings, dict):
        return checkpoint
    kinds, method = checkpoint.kinds, settings.get("peft_type")
    if not is_recognized and isinstance(method, str):
        added = [adapters.by_config(section, method) for section in checkpoint.state_dicts]
        kinds = (*kinds, *added)
    return replace(checkpoint, kinds=kinds, adapter_config=settings)


def split(operand: str) -> tuple[str, str | None]:
    """``PATH::SECTION`` -> (PATH, SECTION); SECTION is None if the operand names none.

    fsspec chains URLs with the same mark (``simplecache::s3://…``): a part with ``://`` is never a
    section, and neither is the end of the name of a file that exists.
    """
    path, _, section = operand.rpartition("::")
    if not path or "://" in section:
        return operand, None
    if os.path.lexists(operand) and not os.path.lexists(path):
        return operand, None
    return path, section


def is_folder(operand: str) -> bool:
    """Return True if the operand is a folder, local or behind a URL, and names no section of it."""
    return split(operand)[1] is None and is_dir(operand)


def model_section(checkpoint: Checkpoint, tables: NameTables | None = None) -> Section:
    """Return the section of the model: the only state dict, or the only one under a usual name.

    Raise `CkptError`, with the sections to choose from, if that is ambiguous or the file has no
    state dict. `tables` are the names of the model: they say which section to choose.
    """
    if not checkpoint.state_dicts:
        raise _no_state_dict(checkpoint)
    candidates = [section for section in checkpoint.state_dicts if not section.is_list]
    candidates = candidates or list(checkpoint.state_dicts)
    if len(candidates) == 1:
        return candidates[0]
    usual = [s for s in candidates if s.path.rpartition(".")[2] in MODEL_SECTIONS]
    if len(usual) == 1:
        return usual[0]
    titles = ", ".join(section.title for section in candidates)
    raise CkptError(
        f"{checkpoint.source} holds several state dicts: {titles}",
        hint=_which_section(checkpoint, candidates, tables),
    )


def _no_state_dict(checkpoint: Checkpoint) -> CkptError:
    contents = [f"{section.title} ({section.kind})" for section in checkpoint.sections]
    for storage in checkpoint.unreached[:3]:
        contents.append(f"{storage.path} (a storage, not understood)")
    text = ", ".join(contents) or "; ".join(checkpoint.notes) or "no tensors at all"
    return CkptError(f"{checkpoint.source} holds no state dict", hint=f"it holds: {text}")


def _which_section(
    checkpoint: Checkpoint, sections: Sequence[Section], tables: NameTables | None
) -> str:
    """Return the hint that names the section of the model, or what several of them differ in."""
    fitting = [] if tables is None else sections_with_names_of(tables, sections)
    if not fitting:
        return f"pick one: {checkpoint.part(sections[0].path)}"
    parts = [checkpoint.part(section.path) for section in fitting]
    if len(parts) == 1:
        return f"{fitting[0].title} has the names of the model, pick it: {parts[0]}"
    titles = " and ".join(section.title for section in fitting)
    first, second = parts[:2]
    differs = _difference(fitting[0], fitting[1])
    if not differs:
        differs = f"equal keys, shapes and dtypes (diff {first} {second} --values compares values)"
    return f"{titles} have the names of the model, with {differs}; pick one: {' or '.join(parts)}"


def sections_with_names_of(tables: NameTables, sections: Sequence[Section]) -> list[Section]:
    """Return the sections that are the complete model, or else those with most of its names."""
    from ckpttool.naming.convert import is_complete_model, read_keys

    complete = [section for section in sections if is_complete_model(tables, section)]
    if complete:
        return complete
    by_count: dict[int, list[Section]] = {}
    for section in sections:
        by_count.setdefault(len(read_keys(tables, section).match.names), []).append(section)
    most = max(by_count)
    return by_count[most] if most else []


def _difference(left: Section, right: Section) -> str:
    """Return in what the tensors of two state dicts differ; empty if only values may differ."""
    left_tensors = by_key(left.tensors)
    right_tensors = by_key(right.tensors)
    unpaired = left_tensors.keys() ^ right_tensors.keys()
    if unpaired:
        return f"{plural(len(unpaired), 'key')} that only one of them has"
    shapes = dtypes = 0
    for key, entry in left_tensors.items():
        shapes += entry.shape != right_tensors[key].shape
        dtypes += entry.dtype != right_tensors[key].dtype
    differences = []
    if shapes:
        differences.append(plural(shapes, "other shape"))
    if dtypes:
        differences.append(plural(dtypes, "other dtype"))
    return " and ".join(differences)


def saved_state_dicts(checkpoint: Checkpoint) -> tuple[Section, ...]:
    """Return the state dicts of the file, if its format keeps their keys in the order of
    ``state_dict()``.

    All state dicts of the file are returned, also if the operand picks one section.
    """
    path, picked = split(checkpoint.source)
    whole = checkpoint if picked is None else open_operand(path)
    kind = format_of(whole)
    if not kind.holds.objects or kind.folder:
        return ()
    return whole.state_dicts
