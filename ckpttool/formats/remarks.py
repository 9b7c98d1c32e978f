"""What a checkpoint's content tells of the way it was saved, where that explains why it is not what one expects."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ckpttool.checkpoint import Checkpoint, Section, TensorEntry, Unreached
from ckpttool.keys import is_flat
from ckpttool.words import human_bytes, plural

_NAMED = 5  # storages that are listed

_GATHER = "`ckpttool remap FOLDER -o whole.pt` gathers them from the folder of all ranks' files"
PLACEHOLDER = (
    "no elements, as in a ZeRO-3 placeholder or in what another rank of FSDP holds: the ranks' files hold its values; "
    f"of ZeRO-3 {_GATHER}"
)

_DEEPSPEED = {"ds_version", "ds_config"}  # keys in every file that DeepSpeed saves


def remarks(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Sentences for `Checkpoint.notes`; none for most checkpoints."""
    found = []
    if checkpoint.unreached and checkpoint.format != "torchscript":  # its reader says so in its own words
        found.append(_unreached(checkpoint.unreached))
    if _DEEPSPEED & set(checkpoint.others):
        found.append(_deepspeed(checkpoint.others))
    states = [s for s in checkpoint.sections if s.kind == "state_dict" and not _is_of_fsdp(checkpoint, s)]
    floating = [entry for section in states for entry in section.tensors if "float" in entry.dtype]
    hollow = sum(map(is_placeholder, floating))
    is_deepspeed = bool(_DEEPSPEED & set(checkpoint.others))
    if hollow and (is_deepspeed or 1 < hollow == len(floating)):
        found.append(
            f"{hollow} tensors have shape [0]: ZeRO-3 placeholders, the values are in the ranks' files; {_GATHER}"
        )
    partitioned = [section for section in states if _is_partitioned(section)]
    if partitioned:
        count = sum(entry.shape == (1,) for section in partitioned for entry in section.tensors)
        found.append(f"{count} tensors have shape [1], as ZeRO-3 leaves parameters that it has partitioned; {_GATHER}")
    return tuple(found)


def _unreached(storages: Sequence[Unreached]) -> str:
    names = ", ".join(storage.path for storage in storages[:_NAMED])
    more = f" and {len(storages) - _NAMED} more" if len(storages) > _NAMED else ""
    size = human_bytes(sum(storage.storage.nbytes for storage in storages))
    return f"{plural(len(storages), 'storage')} ({size}) of no tensor that is understood: {names}{more}"


def _is_partitioned(section: Section) -> bool:
    """Whether most parameters, weights among them, have one element: no model has so many scalars."""
    floats = [entry for entry in section.tensors if "float" in entry.dtype]
    single = [entry for entry in floats if entry.shape == (1,)]
    return 2 * len(single) > len(floats) > 2 and any(entry.key.endswith(".weight") for entry in single)


def _is_of_fsdp(checkpoint: Checkpoint, section: Section) -> bool:
    """Whether an empty tensor is what FSDP1 leaves on a rank that holds nothing of a parameter."""
    return checkpoint.format == "rank_files" or any(is_flat(entry.key) for entry in section.tensors)


def _deepspeed(others: Collection[str]) -> str:
    what = "the model's part" if "param_shapes" in others else "one rank's part"
    return f"{what} of a DeepSpeed checkpoint: with ZeRO every rank's file holds some of the fp32 weights; {_GATHER}"


def is_placeholder(entry: TensorEntry) -> bool:
    """Whether the tensor is what DeepSpeed's ZeRO-3 leaves of a parameter on every rank: one dimension, no elements."""
    return entry.shape == (0,) and "float" in entry.dtype
