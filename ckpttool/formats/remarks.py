"""Notes about how a checkpoint was saved, by its contents."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from operator import is_

from ckpttool.core.checkpoint import Checkpoint, Section, TensorEntry
from ckpttool.core.names import RUNTIME, SERIALIZED
from ckpttool.core.text import Note, human_bytes, is_flat, plural, some
from ckpttool.io.paths import name

_RANK = re.compile(r"(rank[-_.]?)\d+", re.IGNORECASE)  # in a file's name

_GATHER = "`ckpttool remap FOLDER -o whole.pt` gathers them from the folder of all ranks' files"
PLACEHOLDER = (
    "no elements, as in a ZeRO-3 placeholder or in what another rank of FSDP holds: the ranks'"
    " files hold its values; "
    f"of ZeRO-3 {_GATHER}"
)

# Names of weights that have two dimensions in every architecture.
_MATRIX = re.compile(
    r"embed\w*|\w*_?embeddings?|wte|wpe|lm_head|\w+_proj|query|key|value|dense|c_attn|c_fc|fc\d*"
)

_DEEPSPEED = {"ds_version", "ds_config"}  # keys in every file that DeepSpeed saves


def remarks(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return sentences for `Checkpoint.notes`; none for most checkpoints."""
    notes = []
    unreached = checkpoint.unreached
    if unreached and checkpoint.format != "torchscript":  # its reader adds another note
        names = some([storage.path for storage in unreached])
        size = human_bytes(sum(storage.storage.nbytes for storage in unreached))
        count = plural(len(unreached), "storage")
        notes.append(f"{count} ({size}) of no tensor that is understood: {names}")
    is_deepspeed = bool(_DEEPSPEED & set(checkpoint.others))
    if is_deepspeed:
        part = "the model's part" if "param_shapes" in checkpoint.others else "one rank's part"
        notes.append(
            f"{part} of a DeepSpeed checkpoint: with ZeRO every rank's file holds some of the fp32"
            f" weights; {_GATHER}"
        )
    floating = _floating_tensors(checkpoint)
    hollow = sum(is_placeholder(entry) for entry in chain(*floating))
    if hollow and (is_deepspeed or 1 < hollow == sum(map(len, floating))):
        notes.append(
            f"{hollow} tensors have shape [0]: ZeRO-3 placeholders, the values are in the ranks'"
            f" files; {_GATHER}"
        )
    notes += filter(None, map(_partitioned, floating))
    return tuple(notes)


def _floating_tensors(checkpoint: Checkpoint) -> list[list[TensorEntry]]:
    """Return the floating tensors of each state dict in which ZeRO-3 may have left placeholders."""
    if checkpoint.format == "rank_files":
        return []
    by_section = []
    for section in checkpoint.state_dicts:
        # FSDP1 may leave empty tensors, on ranks that hold nothing of a parameter.
        if not any(is_flat(entry.key) for entry in section.tensors):
            by_section.append([entry for entry in section.tensors if "float" in entry.dtype])
    return by_section


def _partitioned(floating: Sequence[TensorEntry]) -> str:
    """Return a note on weights of which ZeRO-3 has left one element; empty if there are none.

    A weight of one element can be right (a norm of one channel, PReLU), but not if its own bias has
    more elements: DeepSpeed does not partition small parameters. The weight of a linear layer or an
    embedding has two dimensions, which only the names show.
    """
    single = [entry.key for entry in floating if entry.shape == (1,)]
    evidence = _evidence(single, floating)
    if not evidence:
        return ""
    count = plural(len(single), "tensor")
    return (
        f"{count} of shape [1], as ZeRO-3 leaves parameters that it has partitioned"
        f" ({evidence}); {_GATHER}"
    )


def _evidence(single: Sequence[str], floating: Sequence[TensorEntry]) -> str:
    """Return why a weight that is left with a `single` element had more; empty if none had."""
    weights = [key for key in single if key.endswith(".weight")]
    if not weights:
        return ""
    numels = {entry.key: entry.numel for entry in floating}
    for weight in weights:
        numel = numels.get(weight.removesuffix("weight") + "bias", 0)
        if numel > 1:
            return f"{weight} next to a bias of {numel}"
    matrix = next((key for key in weights if _MATRIX.fullmatch(key.rsplit(".", 2)[-2])), None)
    if matrix is None or 2 * len(single) <= len(floating):
        return ""
    return f"likely, as {matrix}"


def is_placeholder(entry: TensorEntry) -> bool:
    return entry.shape == (0,) and "float" in entry.dtype


MARK = "ckpttool.form"
_FROM_CODE = "from-code"  # the mark of `Section.has_runtime_names`


def read_form(checkpoint: Checkpoint) -> Checkpoint:
    """Return `checkpoint` with the marks of the file moved to its sections."""
    metadata = dict(checkpoint.metadata)
    form_of_file = metadata.pop(MARK, None)
    sections = []
    for section in checkpoint.sections:
        form: object = form_of_file
        if section.modules is not None and MARK in section.modules:
            modules = dict(section.modules)
            mark = modules.pop(MARK)
            form = mark.get("form") if isinstance(mark, Mapping) else None
            section = replace(section, modules=modules)
        if form in (SERIALIZED, RUNTIME):
            section = replace(section, form=str(form))
        elif form == _FROM_CODE:
            section = replace(section, has_runtime_names=True)
        sections.append(section)
    if form_of_file is None and all(map(is_, sections, checkpoint.sections)):
        return checkpoint
    return replace(checkpoint, sections=tuple(sections), metadata=metadata)


def write_form(checkpoint: Checkpoint, *, in_metadata: bool) -> Checkpoint:
    """Return `checkpoint` with a mark for the form of each section, or for its runtime names;
    `in_metadata`: in ``__metadata__``.
    """
    marks = [_mark(section) for section in checkpoint.sections]
    if not any(marks):
        return checkpoint
    if in_metadata:
        (mark,) = filter(None, marks)
        return replace(checkpoint, metadata={**checkpoint.metadata, MARK: mark})
    sections = []
    for section, mark in zip(checkpoint.sections, marks):
        if mark:
            modules = {**(section.modules or {}), MARK: {"form": mark}}
            section = replace(section, modules=modules)
        sections.append(section)
    return replace(checkpoint, sections=tuple(sections))


def _mark(section: Section) -> str:
    """Return the mark of a section; empty if it needs none."""
    if section.form is not None:
        return section.form
    is_written_as_state_dict = section.packed_as != "module"
    return _FROM_CODE if section.has_runtime_names and is_written_as_state_dict else ""


def one_rank(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return a warning if the file holds one rank's part of its tensors; else nothing."""
    if checkpoint.format == "rank_files":
        return ()
    entries = list(chain(*(section.entries for section in checkpoint.sections)))
    with_payload = [entry for entry in entries if entry.payload is not None]
    certain = False
    if with_payload:
        from ckpttool.containers.rank_shards import shard_kind  # most files have no payloads

        certain = any(map(shard_kind, with_payload))
    if not certain and not any(is_flat(entry.key) for entry in entries):
        return ()
    path = checkpoint.source.partition("::")[0]
    pattern = _RANK.sub(r"\1*", path) if _RANK.search(name(path)) else "rank_*.pt"
    unless = "" if certain else ", unless one rank alone saved it"
    text = (
        f"{checkpoint.source} is the part of one rank{unless}: name the files of all ranks at"
        f" once, as in '{pattern}'"
    )
    return (Note(text, "rank-part"),)
