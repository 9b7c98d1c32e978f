"""Notes about how a checkpoint was saved, by its contents."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

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
    if checkpoint.unreached and checkpoint.format != "torchscript":  # its reader adds another note
        names = some([unreached.path for unreached in checkpoint.unreached])
        size = human_bytes(sum(unreached.storage.nbytes for unreached in checkpoint.unreached))
        notes.append(
            f"{plural(len(checkpoint.unreached), 'storage')} ({size}) of no tensor that is"
            f" understood: {names}"
        )
    is_deepspeed = bool(_DEEPSPEED & set(checkpoint.others))
    if is_deepspeed:
        part = "the model's part" if "param_shapes" in checkpoint.others else "one rank's part"
        notes.append(
            f"{part} of a DeepSpeed checkpoint: with ZeRO every rank's file holds some of the fp32"
            f" weights; {_GATHER}"
        )
    # FSDP1 may leave empty tensors, on ranks that hold nothing of a parameter.
    states = [
        s
        for s in checkpoint.state_dicts
        if not any(map(is_flat, [entry.key for entry in s.tensors]))
    ]
    states = [] if checkpoint.format == "rank_files" else states
    floating = [entry for section in states for entry in section.tensors if "float" in entry.dtype]
    hollow = sum(map(is_placeholder, floating))
    if hollow and (is_deepspeed or 1 < hollow == len(floating)):
        notes.append(
            f"{hollow} tensors have shape [0]: ZeRO-3 placeholders, the values are in the ranks'"
            f" files; {_GATHER}"
        )
    notes += (note for note in map(_partitioned, states) if note)
    return tuple(notes)


def _partitioned(section: Section) -> str:
    """Return a note on weights of which ZeRO-3 has left one element; empty if there are none.

    A weight of one element can be right (a norm of one channel, PReLU), but not if its own bias has
    more elements: DeepSpeed does not partition small parameters. The weight of a linear layer or an
    embedding has two dimensions, which only the names show.
    """
    floating = [entry for entry in section.tensors if "float" in entry.dtype]
    single = [entry.key for entry in floating if entry.shape == (1,)]
    weights = [key for key in single if key.endswith(".weight")]
    biases = {
        entry.key: entry.numel
        for entry in floating
        if entry.key.endswith("bias") and entry.numel > 1
    }
    small = (
        next((key for key in weights if key.removesuffix("weight") + "bias" in biases), None)
        if biases
        else None
    )
    matrix = next((key for key in weights if _MATRIX.fullmatch(key.rsplit(".", 2)[-2])), None)
    if small is None and (matrix is None or 2 * len(single) <= len(floating)):
        return ""
    if small is None:
        evidence = f"likely, as {matrix}"
    else:
        evidence = f"{small} next to a bias of {biases[small.removesuffix('weight') + 'bias']}"
    count = plural(len(single), "tensor")
    return (
        f"{count} of shape [1], as ZeRO-3 leaves parameters that it has partitioned"
        f" ({evidence}); {_GATHER}"
    )


def is_placeholder(entry: TensorEntry) -> bool:
    return entry.shape == (0,) and "float" in entry.dtype


MARK = "ckpttool.form"


def read_form(checkpoint: Checkpoint) -> Checkpoint:
    """Return `checkpoint` with the marks of the file moved to `Section.form`."""
    form = _known(checkpoint.metadata.get(MARK))
    metadata = {name: value for name, value in checkpoint.metadata.items() if name != MARK}
    sections = []
    for section in checkpoint.sections:
        own = form
        if section.modules is not None and MARK in section.modules:
            mark = section.modules[MARK]
            own = _known(mark.get("form") if isinstance(mark, Mapping) else None)
            section = replace(
                section, modules={path: v for path, v in section.modules.items() if path != MARK}
            )
        sections.append(section if own is None else replace(section, form=own))
    marked = tuple(sections) != checkpoint.sections or metadata != checkpoint.metadata
    return (
        replace(checkpoint, sections=tuple(sections), metadata=metadata) if marked else checkpoint
    )


def _known(form: object) -> str | None:
    return next((known for known in (SERIALIZED, RUNTIME) if known == form), None)


def write_form(checkpoint: Checkpoint, *, in_metadata: bool) -> Checkpoint:
    """Return `checkpoint` with the mark for each section's form; `in_metadata`: in
    ``__metadata__``.
    """
    forms = [section.form for section in checkpoint.sections if section.form is not None]
    if not forms:
        return checkpoint
    if in_metadata:
        return replace(checkpoint, metadata={**checkpoint.metadata, MARK: forms[0]})
    sections = tuple(
        s if s.form is None else replace(s, modules={**(s.modules or {}), MARK: {"form": s.form}})
        for s in checkpoint.sections
    )
    return replace(checkpoint, sections=sections)


def one_rank(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return a warning if the file holds one rank's part of its tensors; else nothing."""
    if checkpoint.format == "rank_files":
        return ()
    entries = [entry for section in checkpoint.sections for entry in section.entries]
    with_payload = [entry for entry in entries if entry.payload is not None]
    certain = False
    if with_payload:
        from ckpttool.containers.rank_shards import shard_kind  # most files have no payloads

        certain = any(map(shard_kind, with_payload))
    if not certain and not any(map(is_flat, [entry.key for entry in entries])):
        return ()
    path = checkpoint.source.partition("::")[0]
    pattern = _RANK.sub(r"\1*", path) if _RANK.search(name(path)) else "rank_*.pt"
    unless = "" if certain else ", unless one rank alone saved it"
    text = (
        f"{checkpoint.source} is the part of one rank{unless}: name the files of all ranks at"
        f" once, as in '{pattern}'"
    )
    return (Note(text, "rank-part"),)
