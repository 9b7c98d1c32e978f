"""What a checkpoint's content shows about how it was saved."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ckpttool.core.checkpoint import Checkpoint, Section, TensorEntry, Unreached
from ckpttool.core.keys import is_flat
from ckpttool.core.names import RUNTIME, SERIALIZED
from ckpttool.core.text import human_bytes, plural, some

_GATHER = "`ckpttool remap FOLDER -o whole.pt` gathers them from the folder of all ranks' files"
PLACEHOLDER = (
    "no elements, as in a ZeRO-3 placeholder or in what another rank of FSDP holds: the ranks' files hold its values; "
    f"of ZeRO-3 {_GATHER}"
)

# Names of weights that have two dimensions in every architecture.
_MATRIX = re.compile(r"embed\w*|\w*_?embeddings?|wte|wpe|lm_head|\w+_proj|query|key|value|dense|c_attn|c_fc|fc\d*")

_DEEPSPEED = {"ds_version", "ds_config"}  # keys in every file that DeepSpeed saves


def remarks(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Sentences for `Checkpoint.notes`; none for most checkpoints."""
    found = []
    if checkpoint.unreached and checkpoint.format != "torchscript":  # its reader says so in its own words
        found.append(_unreached(checkpoint.unreached))
    if _DEEPSPEED & set(checkpoint.others):
        found.append(_deepspeed(checkpoint.others))
    states = [section for section in checkpoint.state_dicts if not _is_of_fsdp(checkpoint, section)]
    floating = [entry for section in states for entry in section.tensors if "float" in entry.dtype]
    hollow = sum(map(is_placeholder, floating))
    is_deepspeed = bool(_DEEPSPEED & set(checkpoint.others))
    if hollow and (is_deepspeed or 1 < hollow == len(floating)):
        found.append(
            f"{hollow} tensors have shape [0]: ZeRO-3 placeholders, the values are in the ranks' files; {_GATHER}"
        )
    found += (said for said in map(_partitioned, states) if said)
    return tuple(found)


def _unreached(storages: Sequence[Unreached]) -> str:
    names = some([storage.path for storage in storages])
    size = human_bytes(sum(storage.storage.nbytes for storage in storages))
    return f"{plural(len(storages), 'storage')} ({size}) of no tensor that is understood: {names}"


def _partitioned(section: Section) -> str:
    """What tells of weights that ZeRO-3 has left one element of; empty where nothing does.

    A weight of one element is nothing odd (a norm of one channel, PReLU). It is no weight where its own bias has more
    elements: DeepSpeed leaves small parameters whole. And a linear layer's or an embedding's has two dimensions, which
    only the names tell.
    """
    floating = [entry for entry in section.tensors if "float" in entry.dtype]
    single = [entry.key for entry in floating if entry.shape == (1,)]
    weights = [key for key in single if key.endswith(".weight")]
    biases = {entry.key: entry.numel for entry in floating if entry.key.endswith("bias") and entry.numel > 1}
    beside = next((key for key in weights if _bias(key) in biases), None) if biases else None
    matrix = next((key for key in weights if _MATRIX.fullmatch(key.rsplit(".", 2)[-2])), None)
    if beside is None and (matrix is None or 2 * len(single) <= len(floating)):
        return ""
    by = f"likely, as {matrix}" if beside is None else f"{beside} beside a bias of {biases[_bias(beside)]}"
    count = plural(len(single), "tensor")
    return f"{count} of shape [1], as ZeRO-3 leaves parameters that it has partitioned ({by}); {_GATHER}"


def _bias(weight: str) -> str:
    return f"{weight.removesuffix('weight')}bias"


def _is_of_fsdp(checkpoint: Checkpoint, section: Section) -> bool:
    """Whether an empty tensor is what FSDP1 leaves on a rank that holds nothing of a parameter."""
    return checkpoint.format == "rank_files" or any(is_flat(entry.key) for entry in section.tensors)


def _deepspeed(others: Collection[str]) -> str:
    what = "the model's part" if "param_shapes" in others else "one rank's part"
    return f"{what} of a DeepSpeed checkpoint: with ZeRO every rank's file holds some of the fp32 weights; {_GATHER}"


def is_placeholder(entry: TensorEntry) -> bool:
    """Whether the tensor is what DeepSpeed's ZeRO-3 leaves of a parameter on every rank: one dimension, no elements."""
    return entry.shape == (0,) and "float" in entry.dtype


MARK = "ckpttool.form"


def read_form(checkpoint: Checkpoint) -> Checkpoint:
    """`checkpoint` with the marks of the file in `Section.form`, and nowhere else."""
    form = _known(checkpoint.metadata.get(MARK))
    metadata = {name: value for name, value in checkpoint.metadata.items() if name != MARK}
    sections = tuple(_taken_off(section, form) for section in checkpoint.sections)
    marked = sections != checkpoint.sections or metadata != checkpoint.metadata
    return replace(checkpoint, sections=sections, metadata=metadata) if marked else checkpoint


def _taken_off(section: Section, form: str | None) -> Section:
    if section.modules is not None and MARK in section.modules:
        mark = section.modules[MARK]
        form = _known(mark.get("form") if isinstance(mark, Mapping) else None)
        section = replace(section, modules={path: v for path, v in section.modules.items() if path != MARK})
    return section if form is None else replace(section, form=form)


def _known(form: object) -> str | None:
    return next((known for known in (SERIALIZED, RUNTIME) if known == form), None)


def write_form(checkpoint: Checkpoint, *, in_metadata: bool) -> Checkpoint:
    """`checkpoint` with each section's form where its file will keep it; `in_metadata`: in ``__metadata__``."""
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
