"""Detect what checkpoint a folder holds, and open a path whatever it is."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from shlex import quote
from typing import NamedTuple

from ckpttool.core.checkpoint import Checkpoint, Span
from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.limits import one_reading
from ckpttool.core.pickle_imports import Import, dangerous, in_order
from ckpttool.formats.detect import sniff
from ckpttool.formats.huggingface import read_index
from ckpttool.formats.pickle_read import collected, unreadable
from ckpttool.formats.registry import FORMATS
from ckpttool.formats.remarks import remarks
from ckpttool.io import files, paths, sources
from ckpttool.io.files import is_dir, is_file, names_in, opened
from ckpttool.io.paths import join, safe_path

INDEX = re.compile(r"(?P<stem>.+)\.(?P<kind>safetensors|bin)\.index(\.[\w-]+)?\.json")
DCP_METADATA = ".metadata"

HF_SHARD = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")  # of one rank, by torch's own writer
_SHARD = re.compile(r".+-\d{5}-of-\d{5}\.(safetensors|bin)")
_ENDINGS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".pt2")
_OTHER_WEIGHTS = (".h5", ".msgpack", ".onnx", ".gguf", ".npz", ".distcp", ".metadata", ".ot", ".tflite")
# What a trainer saves beside the weights; never meant where there is anything else.
_BESIDE = re.compile(
    r"(training_args|optimizer(_\d+)?|scheduler(_\d+)?|sampler(_\d+)?|scaler|rng_state.*|random_states.*)\.(bin|pt|pth)"
)
# What accelerate saves under FSDP: a folder or a file for each model and each optimizer, or files of the ranks.
_FSDP = re.compile(r"(?P<kind>pytorch_model_fsdp|optimizer)(_(?P<number>\d+))?(\.bin)?")
_FSDP_RANK = re.compile(r"((pytorch_model_fsdp|optimizer)(_\d+)?_rank)\d+\.bin")
_OPTIMIZER = re.compile(r"optimizer\.(bin|pt|pth)")
_DEEPSPEED = re.compile(r"(.*_)?(mp_rank_\d+|zero_pp_rank_\d+_.*)_?(model|optim)_states\.pt")

_STEP = re.compile(r"global_step\d+(_universal)?")  # DeepSpeed's folder of a step, whose tag one of these files names
_LATEST = ("latest", "latest_universal")

_MAX_TAG = 1024  # bytes of the name of a step's folder


class Found(NamedTuple):
    """A checkpoint in a folder: the name of its format and the path to read it by."""

    format: str
    path: str


def locate(folder: str) -> Found:
    """The one checkpoint in `folder`.

    Raises `CkptError` where there is none, or more than one: `problems` lists them.
    """
    names = names_in(folder)
    found = _candidates(folder, names)
    if len(found) > 1:
        raise CkptError(
            f"{folder} holds several checkpoints",
            hint=f"name one of them: {quote(found[0].path)}",
            problems=[Problem(_title(candidate), os.path.basename(candidate.path)) for candidate in found],
        )
    if found:
        return found[0] if found[0].format else Found(sniff(found[0].path), found[0].path)
    raise _nothing(folder, names)


def _candidates(folder: str, names: list[str]) -> list[Found]:
    """Every checkpoint in the folder; a single file's format is left to its content."""
    files = [name for name in names if is_file(join(folder, name))]
    if DCP_METADATA in files or any(HF_SHARD.fullmatch(name) for name in files):
        return [Found("dcp", folder)]
    if _is_deepspeed(folder, names):
        return [Found("deepspeed", _step_of(folder, names))]
    ranks = dict.fromkeys(found[1] for found in map(_FSDP_RANK.fullmatch, files) if found)
    if ranks:
        raise _files_of_ranks(folder, list(ranks))
    if is_fsdp(folder):
        return [Found("accelerate", folder)]
    found = [Found("sharded", join(folder, name)) for name in files if INDEX.fullmatch(name)]
    shards = {shard for index in found for shard in _shards_of(index.path)}
    single = [name for name in files if name.endswith(_ENDINGS) and not (_SHARD.fullmatch(name) or name in shards)]
    weights = [name for name in single if not _BESIDE.fullmatch(name)]
    single = weights if weights or found or parts_in(folder, names) else single
    return found + [Found("", join(folder, name)) for name in single]


def fsdp_parts(folder: str) -> dict[str, str]:
    """What accelerate saved in the folder under FSDP: ``model``, ``optimizer``, ``model_1`` … -> its name there.

    Raises `CkptError` where two are of one model: of two runs with other settings.
    """
    found: dict[str, str] = {}
    for name in names_in(folder):
        match = _FSDP.fullmatch(name)
        if match is None or is_dir(join(folder, name)) == name.endswith(".bin"):
            continue
        section = "model" if match["kind"] != "optimizer" else "optimizer"
        section += f"_{match['number']}" if int(match["number"] or 0) else ""
        if section in found:
            raise CkptError(
                f"{folder} holds the same twice, as accelerate saves it with other settings",
                hint=f"name one of them: {quote(join(folder, name))}",
                problems=[Problem(f"a part of the checkpoint: {section}", own) for own in (found[section], name)],
            )
        found[section] = name
    return dict(sorted(found.items()))


def is_fsdp(folder: str) -> bool:
    """Whether accelerate saved a model in the folder under FSDP."""
    return any(section.startswith("model") for section in fsdp_parts(folder))


def weights_beside(folder: str) -> tuple[str, ...]:
    """Files with weights in a folder of accelerate's that are no part of it: the Trainer's own copy."""
    parts = set(fsdp_parts(folder).values())
    names = (name for name in names_in(folder) if name.endswith(_ENDINGS) and name not in parts)
    return tuple(name for name in names if not _BESIDE.fullmatch(name) and is_file(join(folder, name)))


def states_beside(folder: str) -> tuple[str, ...]:
    """What is saved beside the weights to go on with training: of the scheduler, random numbers, the user's own."""
    parts = set(fsdp_parts(folder).values())
    names = (name for name in names_in(folder) if _BESIDE.fullmatch(name) or name.endswith(".pkl"))
    return tuple(name for name in names if name not in parts and is_file(join(folder, name)))


def _files_of_ranks(folder: str, stems: list[str]) -> CkptError:
    globs = [join(folder, f"{stem}*.bin") for stem in stems]
    model = next((found for found in globs if "pytorch_model_fsdp" in found), globs[0])
    return CkptError(
        f"{folder} holds files of ranks, as accelerate saves them without torch.distributed.checkpoint",
        hint=f"name those of all ranks together: {quote(model)}",
        problems=[Problem("the files of all ranks", found) for found in globs],
    )


def parts_in(folder: str, names: list[str]) -> list[str]:
    """The folders inside that are checkpoints of their own, by torch.distributed.checkpoint."""
    return [name for name in names if is_file(join(join(folder, name), DCP_METADATA))]


def is_part(folder: str, names: list[str]) -> bool:
    """Whether files of these names in the folder are parts of one checkpoint, and no checkpoints of their own."""
    shards = any(INDEX.fullmatch(name) or _SHARD.fullmatch(name) or HF_SHARD.fullmatch(name) for name in names)
    return shards or DCP_METADATA in names or _is_deepspeed(folder, names)


def is_weights(name: str) -> bool:
    """Whether a file of this name is a checkpoint, and none of those that a trainer saves beside one."""
    return name.endswith(_ENDINGS) and not _BESIDE.fullmatch(name)


def optimizers_in(names: list[str]) -> list[str]:
    """The files that a trainer saves an optimizer in, beside the weights."""
    return [name for name in names if _OPTIMIZER.fullmatch(name)]


def _shards_of(index: str) -> set[str]:
    try:
        return set(read_index(index)[1]["weight_map"].values())
    except CkptError:
        return set()  # its reader says what is wrong with it


def _title(found: Found) -> str:
    return "a sharded checkpoint" if found.format == "sharded" else "a file"


def _is_deepspeed(folder: str, names: list[str]) -> bool:
    return any(_DEEPSPEED.fullmatch(name) for name in names) or (
        any(name in names for name in _LATEST) and any(_STEP.fullmatch(name) for name in names)
    )


def _step_of(folder: str, names: list[str]) -> str:
    """The folder of one step: the one that ``latest`` names, which DeepSpeed itself loads, or `folder`.

    Where there are universal checkpoints only, ``latest_universal`` names it.
    """
    if any(_DEEPSPEED.fullmatch(name) for name in names):
        return folder
    latest = next(name for name in _LATEST if name in names)
    with opened(join(folder, latest)) as file:
        tag = file.read(_MAX_TAG).decode("utf-8", "replace").strip()
    path = safe_path(folder, tag) if tag in names else None
    if path is None or not is_dir(path):
        steps = [name for name in names if is_dir(join(folder, name)) and not name.startswith(".")]
        raise CkptError(
            f"{folder} is a DeepSpeed checkpoint, and the step {tag!r} that its file `{latest}` names is not there",
            hint=f"name one: {quote(join(folder, steps[-1]))}" if steps else "copy the folder again",
        )
    return path


def _nothing(folder: str, names: list[str]) -> CkptError:
    parts = parts_in(folder, names)
    if parts:
        first = next((name for name in parts if not name.startswith("optim")), parts[0])
        return CkptError(
            f"{folder} holds its checkpoint in folders, each one of its own",
            hint=f"name one of them: {quote(join(folder, first))}",
            problems=[Problem("a torch.distributed.checkpoint folder", name) for name in parts],
        )
    shards = [name for name in names if _SHARD.fullmatch(name)]
    if shards:
        return CkptError(
            f"{folder} holds {len(shards)} shards without their index",
            hint="download or copy the *.index.json too, or name one shard: " + quote(join(folder, shards[0])),
        )
    if any(re.fullmatch(r"__\d+\.metadata", name) for name in names):
        return CkptError(
            f"{folder} is a torch.distributed.checkpoint folder without collectives: each rank has its own index",
            hint="load it with as many ranks and save it again with use_collectives=True",
        )
    if any(name.endswith(".distcp") for name in names):
        return CkptError(
            f"{folder} is a torch.distributed.checkpoint folder without its {DCP_METADATA}",
            hint="it was not saved to its end, or copied without hidden files: copy it again",
        )
    inside = [name for name in names if is_dir(join(folder, name)) and not name.startswith(".")]
    hint = f"name one of its folders: {quote(join(folder, inside[-1]))}" if inside else "check the path"
    what = "a model's configuration but no weights" if "config.json" in names else "no checkpoint"
    return CkptError(f"{folder} holds {what if names else 'nothing'}", hint=hint)


def companions(folder: str) -> dict[str, str]:
    """Name -> path of the files that belong to a model beside its weights: configuration, tokenizer, model card.

    Hidden files, subfolders and whatever holds weights are left out; what a trainer saves beside them is not.
    """
    found = {}
    read = set(fsdp_parts(folder).values()) if is_fsdp(folder) else set()
    for name in names_in(folder):
        weights = (name.endswith((*_ENDINGS, *_OTHER_WEIGHTS)) and not _BESIDE.fullmatch(name)) or name in read
        weights = weights or INDEX.fullmatch(name) is not None
        path = None if name.startswith(".") or weights else safe_path(folder, name)
        if path is not None and is_file(path):
            found[name] = path
    return found


def beside(folder: str) -> tuple[str, ...]:
    """The torch files in a folder of torch.distributed.checkpoint: Megatron-Core saves a part of its checkpoint so."""
    files = (name for name in names_in(folder) if name.endswith(_ENDINGS) and not HF_SHARD.fullmatch(name))
    return tuple(name for name in files if is_file(join(folder, name)))


def checkpoint_files(folder: str, like: str) -> set[str]:
    """The files in `folder` that make up a checkpoint like the one whose complete-making file is called `like`.

    A new checkpoint takes their place: an index or a single file that stays would be found instead of it.
    """
    names = set(names_in(folder)) if is_dir(folder) else set()
    if like == DCP_METADATA:
        return {name for name in names if name == DCP_METADATA or name.endswith(".distcp")}
    kind = ".bin" if ".bin" in like else ".safetensors"
    single = {"model.safetensors", "pytorch_model.bin"}
    return {
        name
        for name in names
        if ((INDEX.fullmatch(name) or _SHARD.fullmatch(name)) and kind in name) or (name in single and kind in name)
    }


def open_checkpoint(path: str) -> Checkpoint:
    """The index of the file or folder at `path`. Raises `CkptError` where it is no checkpoint that can be read."""
    files.look_anew(path)
    look = sources.begin_look()
    with one_reading(), collected() as imports:
        checkpoint = _open(path)
    opened = files.opened_at(_urls(checkpoint)) if paths.is_url(path) else sources.opened_since(look)
    notes = (*checkpoint.notes, *remarks(checkpoint))
    return replace(checkpoint, notes=notes, files=opened, imports=in_order(imports))


def _urls(checkpoint: Checkpoint) -> set[str]:
    """The URLs that tensors lie behind."""
    entries = (entry for section in checkpoint.sections for entry in section.tensors)
    found = (entry.storage.data for entry in entries if entry.storage is not None)
    return {data.path for data in found if isinstance(data, Span)}


def _open(path: str) -> Checkpoint:

    if files.is_glob(path):
        return FORMATS["rank_files"].read(path)
    if paths.name(path) == DCP_METADATA:
        path = paths.parent(path)
    if not files.is_dir(path):
        return FORMATS[sniff(path)].read(path)
    found = locate(path)
    checkpoint = FORMATS[found.format].read(found.path)
    beside = checkpoint.beside or states_beside(path)
    return replace(checkpoint, source=path, notes=(*checkpoint.notes, *note_on(beside)))


def note_on(beside: Sequence[str]) -> tuple[str, ...]:
    """Return a note on the other files of a folder, if there are any."""
    return (f"{', '.join(beside)}: other files in the folder, copied if the output is a folder too",) if beside else ()


def dangerous_beside(path: str) -> tuple[Import, ...]:
    """Return the dangerous imports in files that a trainer saves next to the weights in the folder `path`."""
    if files.is_glob(path) or not files.is_dir(path):
        return ()
    with one_reading(), collected() as imports:
        for file in (join(path, name) for name in states_beside(path)):
            try:
                FORMATS[sniff(file)].read(file)
            except CkptError as error:
                unreadable(file, "", error)
    return in_order(dangerous(imports))
