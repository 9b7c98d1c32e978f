"""Detect what checkpoint a folder holds, and open any path."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from shlex import quote
from typing import NamedTuple

from ckpttool.containers.pickle_read import Origin, collected, loads, unreadable
from ckpttool.core.checkpoint import Checkpoint, Span
from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.limits import limits, one_reading
from ckpttool.core.pickle_imports import DANGEROUS, UNREADABLE, Import, in_order
from ckpttool.core.text import Note
from ckpttool.formats.detect import sniff
from ckpttool.formats.huggingface import read_index
from ckpttool.formats.registry import FORMATS
from ckpttool.formats.remarks import remarks
from ckpttool.io import files, handles, paths, sources
from ckpttool.io.files import is_dir, is_file, names_in, opened
from ckpttool.io.paths import join, safe_path

INDEX = re.compile(r"(?P<stem>.+)\.(?P<kind>safetensors|bin)\.index(\.[\w-]+)?\.json")
DCP_METADATA = ".metadata"

# of one rank, by torch's own writer
HF_SHARD = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
_SHARD = re.compile(r".+-\d{5}-of-\d{5}\.(safetensors|bin)")
_ENDINGS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".pt2")
_OTHER_WEIGHTS = (
    ".h5",
    ".msgpack",
    ".onnx",
    ".gguf",
    ".npz",
    ".distcp",
    ".metadata",
    ".ot",
    ".tflite",
)
# Files that a trainer saves next to the weights; never a candidate if there are others.
_NO_WEIGHTS = re.compile(
    r"(training_args|optimizer(_\d+)?|scheduler(_\d+)?|sampler(_\d+)?|scaler|rng_state.*|random_states.*)\.(bin|pt|pth)"
)
# The names that accelerate uses under FSDP: a folder or a file for each model and optimizer, or
# files of the ranks.
_FSDP = re.compile(r"(?P<kind>pytorch_model_fsdp|optimizer)(_(?P<number>\d+))?(\.bin)?")
_FSDP_RANK = re.compile(r"((pytorch_model_fsdp|optimizer)(_\d+)?_rank)\d+\.bin")
_OPTIMIZER = re.compile(r"optimizer\.(bin|pt|pth)")
_DEEPSPEED = re.compile(r"(.*_)?(mp_rank_\d+|zero_pp_rank_\d+_.*)_?(model|optim)_states\.pt")

# DeepSpeed's folder of a step, whose tag one of these files names
_STEP = re.compile(r"global_step\d+(_universal)?")
_LATEST = ("latest", "latest_universal")

_MOST_PICKLES = 1000  # one after the other in a file that torch.save did not write
_MAX_TAG = 1024  # bytes of the name of a step's folder


class Found(NamedTuple):
    """A checkpoint in a folder: the name of its format and the path to read it by."""

    format: str
    path: str


def locate(folder: str) -> Found:
    """Return the only checkpoint in `folder`.

    Raises `CkptError` if there is none, or more than one: `problems` lists them.
    """
    names = names_in(folder)
    found = _candidates(folder, names)
    if len(found) > 1:
        raise CkptError(
            f"{folder} holds several checkpoints",
            hint=f"name one of them: {quote(found[0].path)}",
            problems=[
                Problem(
                    "a sharded checkpoint" if one.format == "sharded" else "a file",
                    os.path.basename(one.path),
                )
                for one in found
            ],
        )
    if found:
        return found[0] if found[0].format else Found(sniff(found[0].path), found[0].path)
    raise _nothing(folder, names)


def _candidates(folder: str, names: list[str]) -> list[Found]:
    """List every checkpoint in the folder; the format of a single file is empty: its content
    decides.
    """
    files = [name for name in names if is_file(join(folder, name))]
    if DCP_METADATA in files or any(HF_SHARD.fullmatch(name) for name in files):
        return [Found("dcp", folder)]
    if _is_deepspeed(names):
        return [Found("deepspeed", _step_of(folder, names))]
    ranks = dict.fromkeys(found[1] for found in map(_FSDP_RANK.fullmatch, files) if found)
    if ranks:
        globs = [join(folder, f"{stem}*.bin") for stem in ranks]
        model = next((glob for glob in globs if "pytorch_model_fsdp" in glob), globs[0])
        raise CkptError(
            f"{folder} holds files of ranks, as accelerate saves them without"
            " torch.distributed.checkpoint",
            hint=f"name the files of all ranks together: {quote(model)}",
            problems=[Problem("the files of all ranks", glob) for glob in globs],
        )
    if is_fsdp(folder):
        return [Found("accelerate", folder)]
    found = [Found("sharded", join(folder, name)) for name in files if INDEX.fullmatch(name)]
    single = [name for name in files if name.endswith(_ENDINGS) and not _SHARD.fullmatch(name)]
    if single:  # some of them may be shards with other names
        shards = {shard for index in found for shard in _shards_of(index.path)}
        single = [name for name in single if name not in shards]
    weights = [name for name in single if not _NO_WEIGHTS.fullmatch(name)]
    single = weights if weights or found or parts_in(folder, names) else single
    return found + [Found("", join(folder, name)) for name in single]


def fsdp_parts(folder: str) -> dict[str, str]:
    """Return the parts that accelerate saved under FSDP: ``model``, ``optimizer``, ``model_1`` … ->
    its file name.

    Raises `CkptError` if two are of one model: they are from runs with different settings.
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
                problems=[
                    Problem(f"a part of the checkpoint: {section}", own)
                    for own in (found[section], name)
                ],
            )
        found[section] = name
    return dict(sorted(found.items()))


def is_fsdp(folder: str) -> bool:
    return any(section.startswith("model") for section in fsdp_parts(folder))


def _files(folder: str, is_one: Callable[[str], object]) -> tuple[str, ...]:
    return tuple(name for name in names_in(folder) if is_one(name) and is_file(join(folder, name)))


def other_weights(folder: str) -> tuple[str, ...]:
    """List files with weights that are not parts of accelerate's checkpoint: the Trainer's own
    copy.
    """
    parts = fsdp_parts(folder).values()
    return _files(folder, lambda name: is_weights(name) and name not in parts)


def state_files(folder: str) -> tuple[str, ...]:
    """List the other files for resuming a training: of the scheduler, random numbers, the user's
    own.
    """
    parts = fsdp_parts(folder).values()
    return _files(
        folder,
        lambda name: (_NO_WEIGHTS.fullmatch(name) or name.endswith(".pkl")) and name not in parts,
    )


def parts_in(folder: str, names: list[str]) -> list[str]:
    """List the folders inside that are checkpoints of torch.distributed.checkpoint."""
    return [name for name in names if is_file(join(join(folder, name), DCP_METADATA))]


def is_weights(name: str) -> bool:
    """Return whether a file of this name holds weights, by its ending; a trainer's other files do
    not.
    """
    return name.endswith(_ENDINGS) and not _NO_WEIGHTS.fullmatch(name)


def optimizers_in(names: list[str]) -> list[str]:
    return [name for name in names if _OPTIMIZER.fullmatch(name)]


def _shards_of(index: str) -> set[str]:
    try:
        return set(read_index(index)[1]["weight_map"].values())
    except CkptError:
        return set()  # its reader says what is wrong with it


def _is_deepspeed(names: list[str]) -> bool:
    return any(_DEEPSPEED.fullmatch(name) for name in names) or (
        any(name in names for name in _LATEST) and any(_STEP.fullmatch(name) for name in names)
    )


def _step_of(folder: str, names: list[str]) -> str:
    """Return the folder of one step: ``latest`` names it, as for DeepSpeed itself, or it is
    `folder`.

    If there are only universal checkpoints, ``latest_universal`` names it.
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
            f"{folder} is a DeepSpeed checkpoint, and the step {tag!r} that its file `{latest}`"
            " names is not there",
            hint=f"name one: {quote(join(folder, steps[-1]))}"
            if steps
            else "copy the folder again",
        )
    return path


def _nothing(folder: str, names: list[str]) -> CkptError:
    parts = parts_in(folder, names)
    if parts:
        first = next((name for name in parts if not name.startswith("optim")), parts[0])
        return CkptError(
            f"{folder} holds several checkpoints, each in its own folder",
            hint=f"name one of them: {quote(join(folder, first))}",
            problems=[Problem("a torch.distributed.checkpoint folder", name) for name in parts],
        )
    shards = [name for name in names if _SHARD.fullmatch(name)]
    if shards:
        return CkptError(
            f"{folder} holds {len(shards)} shards without their index",
            hint="download or copy the *.index.json too, or name one shard: "
            + quote(join(folder, shards[0])),
        )
    if any(re.fullmatch(r"__\d+\.metadata", name) for name in names):
        return CkptError(
            f"{folder} is a torch.distributed.checkpoint folder without collectives: each rank has"
            " its own index",
            hint="load it with as many ranks and save it again with use_collectives=True",
        )
    if any(name.endswith(".distcp") for name in names):
        return CkptError(
            f"{folder} is a torch.distributed.checkpoint folder without its {DCP_METADATA}",
            hint="saving it was interrupted, or it was copied without hidden files: copy it again",
        )
    if ".snapshot_metadata" in names:
        return CkptError(
            f"{folder} is a snapshot of torchsnapshot, a format that ckpttool does not read",
            hint="restore it, and save that:"
            f" torchsnapshot.Snapshot({folder!r}).restore({{'model': model}}); "
            "torch.save(model.state_dict(), 'model.pt')",
        )
    inside = [name for name in names if is_dir(join(folder, name)) and not name.startswith(".")]
    hint = (
        f"name one of its folders: {quote(join(folder, inside[-1]))}"
        if inside
        else ("check the path")
    )
    what = "a model's configuration but no weights" if "config.json" in names else "no checkpoint"
    return CkptError(f"{folder} holds {what if names else 'nothing'}", hint=hint)


def companions(folder: str) -> dict[str, str]:
    """Return name -> path of a model's other files: configuration, tokenizer, model card, and a
    trainer's files.

    Hidden files, subfolders and files with weights are left out.
    """
    read = fsdp_parts(folder).values() if is_fsdp(folder) else ()

    def is_read(name: str) -> bool:
        return (
            is_weights(name)
            or name.endswith(_OTHER_WEIGHTS)
            or name in read
            or INDEX.fullmatch(name) is not None
        )

    names = [name for name in names_in(folder) if not (name.startswith(".") or is_read(name))]
    paths = {name: path for name in names if (path := safe_path(folder, name)) is not None}
    return {name: path for name, path in paths.items() if is_file(path)}


def other_files(folder: str) -> tuple[str, ...]:
    """List the torch files in a folder of torch.distributed.checkpoint: Megatron-Core saves some of
    its state there.
    """
    return _files(folder, lambda name: name.endswith(_ENDINGS) and not HF_SHARD.fullmatch(name))


def checkpoint_files(folder: str, like: str) -> set[str]:
    """Return the files in `folder` of a checkpoint like the new one, whose index or only file is
    called `like`.

    The new checkpoint replaces them: an old index or single file would be read instead of it.
    """
    names = set(names_in(folder)) if is_dir(folder) else set()
    if like == DCP_METADATA:
        return {name for name in names if name == DCP_METADATA or name.endswith(".distcp")}
    kind, single = (
        ".bin" if ".bin" in like else ".safetensors",
        ("model.safetensors", "pytorch_model.bin"),
    )
    return {
        n for n in names if kind in n and (n in single or INDEX.fullmatch(n) or _SHARD.fullmatch(n))
    }


def open_checkpoint(path: str) -> Checkpoint:
    """Return the index of the file or folder at `path`. Raises `CkptError` if it cannot be read as
    a checkpoint.
    """
    files.look_anew(path)
    look = sources.begin_look()
    with handles.kept(), one_reading(), collected() as imports:
        checkpoint = _open(path)
    opened: Mapping[str, object] = {}
    if paths.is_url(path):
        entries = (entry for section in checkpoint.sections for entry in section.tensors)
        data = (entry.storage.data for entry in entries if entry.storage is not None)
        opened = files.opened_at({span.path for span in data if isinstance(span, Span)})
    else:
        opened = sources.opened_since(look)
    notes = (*checkpoint.notes, *remarks(checkpoint), *not_looked_into(imports))
    return replace(checkpoint, notes=notes, files=opened, imports=in_order(imports))


def not_looked_into(imports: Iterable[Import]) -> Iterator[Note]:
    """Yield a note on each pickle that could not be read."""
    for one in imports:
        if one.name == UNREADABLE:
            yield Note(f"not looked into: {one.member or one.file}: {one.reason}", "unknown-import")


def _open(path: str) -> Checkpoint:
    if files.is_glob(path):
        return FORMATS["rank_files"].read(path)
    if paths.name(path) == DCP_METADATA:
        path = paths.parent(path)
    if not files.is_dir(path):
        return FORMATS[sniff(path)].read(path)
    found = locate(path)
    checkpoint = FORMATS[found.format].read(found.path)
    others = checkpoint.other_files or state_files(path)
    return replace(checkpoint, source=path, notes=(*checkpoint.notes, *note_on(others)))


def note_on(names: Sequence[str]) -> tuple[str, ...]:
    return (
        (f"{', '.join(names)}: other files in the folder, copied if the output is a folder too",)
        if names
        else ()
    )


def unsafe_in_folder(path: str) -> tuple[Import, ...]:
    """Return what `unsafe_in` finds in files that a trainer saves next to the weights in the folder
    `path`.
    """
    if files.is_glob(path) or not files.is_dir(path):
        return ()
    return unsafe_in(join(path, name) for name in state_files(path))


def unsafe_in(paths: Iterable[str]) -> tuple[Import, ...]:
    """Return the dangerous imports in the pickles of these files, and pickles that cannot be
    read.
    """
    with one_reading(), collected() as imports:
        for path in paths:
            try:
                FORMATS[sniff(path)].read(path)
            except CkptError:  # a pickle that torch.save did not write, if it is one
                nbytes = files.size(path)
                with opened(path) as file:
                    data = bytes(file.read(min(nbytes, limits().pickle_bytes)))
                origin = Origin(path, nbytes, end=len(data))
                try:
                    part = loads(data, origin=origin)
                    # more may follow, for another call of `pickle.load`
                    for _ in range(_MOST_PICKLES):
                        if part.end == nbytes:
                            break
                        part = loads(data, part.end, origin=origin)
                    else:
                        raise CkptError(f"{path} holds more than {_MOST_PICKLES} pickles", hint="")
                except CkptError as error:
                    unreadable(origin, error)
    return in_order(one for one in imports if one.verdict == DANGEROUS or one.name == UNREADABLE)
