"""What checkpoint a folder holds, and which other files are in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from shlex import quote
from typing import NamedTuple

from ckpttool.core.errors import CkptError, Problem, same_problem
from ckpttool.core.text import Note
from ckpttool.formats.hf_index import read_index
from ckpttool.formats.look import Look
from ckpttool.io.files import files_below, is_dir, is_file, names_in, opened
from ckpttool.io.paths import join, parent, safe_path
from ckpttool.io.paths import name as name_of

INDEX = re.compile(r"(?P<stem>.+)\.(?P<kind>safetensors|bin)\.index(\.[\w-]+)?\.json")
DCP_METADATA = ".metadata"

# of one rank, by torch's own writer
HF_SHARD = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
_SHARD = re.compile(
    r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.(?P<kind>safetensors|bin)"
)
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
_PICKLES = (".pt", ".pth", ".ckpt", ".pt2", ".pkl", ".pickle")
# Data of tensors; torch.distributed.checkpoint loads its files with `weights_only=True`.
_NO_PICKLES = (".distcp", ".safetensors")
_FIRST_RECORD = 512  # the first record of an archive is its pickle, after a header with its name
# Files that a trainer saves next to the weights; never a candidate if there are others.
_NO_WEIGHTS = re.compile(
    r"(training_args|(optimizer|scheduler|sampler|dl_state_dict)(_\d+)?|scaler|rng_state.*|random_states.*)\.(bin|pt|pth)"
)
# The names that accelerate uses under FSDP: a folder or a file for each model and optimizer, or
# files of the ranks.
_FSDP = re.compile(r"(?P<kind>pytorch_model_fsdp|optimizer)(_(?P<number>\d+))?(\.bin)?")
_FSDP_RANK = re.compile(r"((pytorch_model_fsdp|optimizer)(_\d+)?_rank)\d+\.bin")
_OPTIMIZER = re.compile(r"optimizer\.(bin|pt|pth)")
_DEEPSPEED = re.compile(r"(.*_)?(mp_rank_\d+|zero_pp_rank_\d+_.*)_?(model|optim)_states\.pt")

# as Meta writes Llama: consolidated.00.pth
_TENSOR_PARALLEL = re.compile(r"(?P<stem>.+)\.\d\d\.pth")

# of one rank: as verl saves an actor's model and optimizer, and as torch_checkpointing saves items
_RANK_FILES = (
    re.compile(
        r"(?P<item>model|optim|extra_state)_world_size_(?P<ranks>\d{1,6})_rank_(?P<rank>\d{1,6})\.pt"
    ),
    re.compile(r"(?P<item>[A-Za-z0-9_-]+)_(?P<rank>\d{1,6})\.pt"),
)
# of one rank, as many scripts save it: model_rank_0.pt, pytorch_model-tp0.pt
_OF_RANK = re.compile(
    r"(?P<before>(.*[-_.])?(rank|tp|mp|mp_rank|shard|part)[-_]?)(?P<rank>\d{1,6})"
    r"(?P<after>([-_.].*)?\.(pt|pth|bin|ckpt))"
)
# Megatron's folder of a tensor-parallel rank, and of a pipeline stage
_MEGATRON = re.compile(r"mp_rank_(?P<rank>\d\d)(?P<stage>(_\d{3})*)")
RANKS_METADATA = "metadata.pkl"  # of torch_checkpointing

# DeepSpeed's folder of a step, whose tag one of these files names
_STEP = re.compile(r"global_step\d+(_universal)?")
_LATEST = ("latest", "latest_universal")

_MAX_TAG = 1024  # bytes of the name of a step's folder


def dcp_home(look: Look) -> str | None:
    """Return the folder of torch.distributed.checkpoint that the path names."""
    is_dcp = DCP_METADATA in look.files or any(HF_SHARD.fullmatch(name) for name in look.files)
    return look.path if is_dcp else None


def deepspeed_step(look: Look) -> str | None:
    """Return the folder of one step: ``latest`` names it, as for DeepSpeed itself, or it is the
    path.

    If there are only universal checkpoints, ``latest_universal`` names it. Raises `CkptError` if
    the step is not there.
    """
    if any(_DEEPSPEED.fullmatch(name) for name in look.names):
        return look.path
    latest = next((name for name in _LATEST if name in look.names), None)
    if latest is None or not any(_STEP.fullmatch(name) for name in look.names):
        return None
    folder = look.path
    with opened(join(folder, latest)) as file:
        tag = file.read(_MAX_TAG).decode("utf-8", "replace").strip()
    path = safe_path(folder, tag) if tag in look.names else None
    if path is not None and is_dir(path):
        return path
    steps = _folders_in(look)
    hint = f"name one: {quote(join(folder, steps[-1]))}" if steps else "copy the folder again"
    raise CkptError(
        f"{folder} is a DeepSpeed checkpoint, and the step {tag!r} that its file `{latest}`"
        " names is not there",
        hint=hint,
    )


def fsdp_home(look: Look) -> str | None:
    """Return the folder if accelerate saved it under FSDP. Raises `CkptError` for files of ranks,
    whose pattern the user names.
    """
    folder = look.path
    patterns: dict[str, None] = {}
    for name in look.files:
        match = _FSDP_RANK.fullmatch(name)
        if match:
            patterns[join(folder, f"{match[1]}*.bin")] = None
    if patterns:
        globs = list(patterns)
        model = next((glob for glob in globs if "pytorch_model_fsdp" in glob), globs[0])
        raise CkptError(
            f"{folder} holds files of ranks, as accelerate saves them without"
            " torch.distributed.checkpoint",
            hint=f"name the files of all ranks together: {quote(model)}",
            problems=same_problem("the files of all ranks", globs),
        )
    return folder if look.is_folder and is_fsdp(folder) else None


class RankItem(NamedTuple):
    """An item that each rank saved to a separate file, such as ``model``. `pattern` is the name of
    these files, `files` the file of each rank. `ranks` is the number of ranks in their names, or
    None.
    """

    name: str
    pattern: str
    files: dict[int, str]
    ranks: int | None


def rank_items(look: Look) -> list[RankItem]:
    """Return the items of a folder in which each file has one item of one rank, by its name; none
    for another folder.
    """
    names = [name for name in look.files if name.endswith(_ENDINGS)]
    for pattern in _RANK_FILES:
        matches = [match for match in map(pattern.fullmatch, names) if match]
        if matches and len(matches) == len(names):
            return _items_of(matches)
    return []


def _items_of(matches: Iterable[re.Match[str]]) -> list[RankItem]:
    items: dict[str, RankItem] = {}
    for match in matches:
        start, end = match.span("rank")
        name = match.string
        pattern = f"{name[:start]}*{name[end:]}"
        if pattern not in items:
            ranks = match.groupdict().get("ranks")
            items[pattern] = RankItem(match["item"], pattern, {}, int(ranks) if ranks else None)
        items[pattern].files[int(match["rank"])] = name
    return list(items.values())


def rank_folder(look: Look) -> str | None:
    """Return the folder if it holds items of ranks.

    Numbers in names may also count steps: without other evidence there are several items, and each
    has the files 0, 1, ... of the same ranks.
    """
    items = rank_items(look)
    if not items:
        return None
    if RANKS_METADATA in look.files or items[0].ranks is not None:
        return look.path
    ranks = set(range(len(items[0].files)))
    is_alike = all(item.files.keys() == ranks for item in items)
    return look.path if len(items) > 1 and is_alike else None


def shards_home(look: Look) -> str | None:
    """Return where the index of a folder would be, if it holds all shards of one checkpoint and no
    index.
    """
    if not look.is_folder or dcp_home(look) is not None:
        return None
    groups: dict[tuple[str, str, int], set[int]] = {}
    for name in look.files:
        shard = _SHARD.fullmatch(name)
        if shard is not None:
            group = (shard["stem"], shard["kind"], int(shard["count"]))
            groups.setdefault(group, set()).add(int(shard["number"]))
        elif name.endswith(_ENDINGS) or INDEX.fullmatch(name):
            return None
    if len(groups) != 1:
        return None
    (((stem, kind, count), numbers),) = groups.items()
    if numbers != set(range(1, count + 1)):
        return None
    return join(look.path, f"{stem}.{kind}.index.json")


def shards_of(index: str) -> list[str]:
    """Return the shards whose index would be at this path: ``STEM-00001-of-00002.safetensors``."""
    match = INDEX.fullmatch(name_of(index))
    if match is None:
        return []
    shards = []
    for name in names_in(parent(index)):
        shard = _SHARD.fullmatch(name)
        if shard and shard["stem"] == match["stem"] and shard["kind"] == match["kind"]:
            shards.append(name)
    return shards


def stem_of_shards(names: Iterable[str]) -> str:
    """Return STEM if all names are ``STEM-00001-of-00002.safetensors``; else nothing."""
    stems = set()
    for name in names:
        shard = _SHARD.fullmatch(name)
        if shard is None:
            return ""
        stems.add(shard["stem"])
    return stems.pop() if len(stems) == 1 else ""


# what transformers looks for in a folder, in this order
_PRETRAINED = (
    *("model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)


def read_by_transformers(look: Look, names: Collection[str]) -> str | None:
    """Return the one of `names` that from_pretrained reads, if the folder has a model's
    ``config.json``.
    """
    if "config.json" not in look.files:
        return None
    return next((name for name in _PRETRAINED if name in names), None)


def left_unread(folder: str, read: str) -> tuple[str, ...]:
    """Return a note on the weights in a folder of transformers that are not read, because `read` is
    read.
    """
    name = name_of(read)
    if name not in _PRETRAINED or not is_file(join(folder, "config.json")):
        return ()
    shards = _shards_of(read) if INDEX.fullmatch(name) else set()
    others = []
    for other in names_in(folder):
        is_single = is_weights(other) and not _SHARD.fullmatch(other)
        if other not in (name, *shards) and (is_single or INDEX.fullmatch(other)):
            others.append(other)
    if not others:
        return ()
    text = f"{name} is read, as from_pretrained does; not {', '.join(others)}"
    return (Note(text, "shard-index"),)


def file_inside(look: Look, endings: tuple[str, ...] = _ENDINGS) -> str | None:
    """Return the path of the only checkpoint in the folder that is a file or an index with shards;
    None if there is none.

    Raises `CkptError` if there are several: `problems` lists them.
    """
    folder = look.path
    names = _candidates(look, endings)
    if not names:
        return None
    if len(names) == 1:
        return join(folder, names[0])
    preferred = read_by_transformers(look, names)
    if preferred is not None:
        return join(folder, preferred)
    raise _several(folder, names)


def _candidates(look: Look, endings: tuple[str, ...]) -> list[str]:
    """List the indexes of shards, then the files that are not shards; a trainer's other files only
    if there is nothing else.
    """
    indexes = [name for name in look.files if INDEX.fullmatch(name)]
    files = [name for name in look.files if name.endswith(endings)]
    single = [name for name in files if not _SHARD.fullmatch(name)]
    if single:  # some of them may be shards with other names
        shards = set[str]()
        for index in indexes:
            shards.update(_shards_of(join(look.path, index)))
        single = [name for name in single if name not in shards]
    weights = [name for name in single if not _NO_WEIGHTS.fullmatch(name)]
    if weights or indexes or parts_in(look):
        return indexes + weights
    return single


def _several(folder: str, names: list[str]) -> CkptError:
    """Return which of several candidates to name."""
    if all(map(_TENSOR_PARALLEL.fullmatch, names)):
        pattern = join(folder, re.sub(r"\d\d\.pth$", "*.pth", names[0]))
        return CkptError(
            f"{folder} holds tensor-parallel parts: each file has a part of the tensors",
            hint=f"name the files of all ranks together: {quote(pattern)}",
            problems=same_problem("a part", names),
        )
    problems = []
    for name in names:
        what = "a sharded checkpoint" if INDEX.fullmatch(name) else "a file"
        problems.append(Problem(what, name))
    hint = f"name one of them: {quote(join(folder, names[0]))}"
    pattern = _pattern_of_ranks(names)
    if pattern:
        hint += f"; or, if they are of the ranks of one run, all: {quote(join(folder, pattern))}"
    return CkptError(f"{folder} holds several checkpoints", hint=hint, problems=problems)


def _pattern_of_ranks(names: Iterable[str]) -> str:
    """Return the pattern of torch files whose names count ranks from 0: ``rank_*.pt``; empty for
    other names.
    """
    patterns: dict[str, set[int]] = {}
    for name in names:
        match = _OF_RANK.fullmatch(name)
        if match is None:
            return ""
        numbers = patterns.setdefault(f"{match['before']}*{match['after']}", set())
        numbers.add(int(match["rank"]))
    if len(patterns) != 1:
        return ""
    ((pattern, numbers),) = patterns.items()
    return pattern if numbers == set(range(len(numbers))) else ""


def fsdp_parts(folder: str) -> dict[str, str]:
    """Return the parts that accelerate saved under FSDP: ``model``, ``optimizer``, ``model_1`` … ->
    its file name.

    Raises `CkptError` if two are of one model: they are from runs with different settings.
    """
    parts: dict[str, str] = {}
    for name in names_in(folder):
        match = _FSDP.fullmatch(name)
        if match is None or is_dir(join(folder, name)) == name.endswith(".bin"):
            continue
        section = "optimizer" if match["kind"] == "optimizer" else "model"
        if int(match["number"] or 0):
            section += f"_{match['number']}"
        if section in parts:
            text = f"a part of the checkpoint: {section}"
            raise CkptError(
                f"{folder} holds the same twice, as accelerate saves it with other settings",
                hint=f"name one of them: {quote(join(folder, name))}",
                problems=[Problem(text, parts[section]), Problem(text, name)],
            )
        parts[section] = name
    return dict(sorted(parts.items()))


def is_fsdp(folder: str) -> bool:
    return any(section.startswith("model") for section in fsdp_parts(folder))


def _files(folder: str, is_listed: Callable[[str], object]) -> tuple[str, ...]:
    """List the files in the folder whose names are listed."""
    names = filter(is_listed, names_in(folder))
    return tuple(name for name in names if is_file(join(folder, name)))


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
    parts = fsdp_parts(folder).values() if is_fsdp(folder) else ()
    return _files(
        folder,
        lambda name: (_NO_WEIGHTS.fullmatch(name) or name.endswith(".pkl")) and name not in parts,
    )


def pickle_files(folder: str) -> tuple[str, ...]:
    """List the files that may hold pickles: of a trainer, and other weights. The ending ``.bin``
    alone does not say so.
    """
    states = state_files(folder)

    def may_hold_pickles(name: str) -> bool:
        if name in states or name.endswith(_PICKLES):
            return True
        return name.endswith(".bin") and begins_as_pickle(join(folder, name))

    return _files(folder, may_hold_pickles)


def pickles_below(folder: str) -> Iterator[str]:
    """Yield the files of the local folder and of its subfolders that may hold pickles: by their
    endings, or by how they begin.
    """
    for path in files_below(folder):
        name = name_of(path).lower()
        if _NO_WEIGHTS.fullmatch(name) or name.endswith(_PICKLES):
            yield path
        elif name.endswith(".bin"):
            if begins_as_pickle(path):
                yield path
        elif not name.endswith(_NO_PICKLES) and _begins_as_saved(path):
            yield path


def _begins_as_saved(path: str) -> bool:
    """Return whether a file of any name begins as a pickle since protocol 2, or as an archive of
    torch.save.
    """
    with opened(path) as file:
        head = bytes(file.read(_FIRST_RECORD))
    if head[:1] == b"\x80":
        return head[1:2] in (b"\2", b"\3", b"\4", b"\5")
    return head.startswith(b"PK") and b"/data.pkl" in head


def begins_as_pickle(path: str) -> bool:
    """Return whether the file begins as a file of torch.save: a zip archive or a pickle."""
    if not is_file(path):
        return False
    with opened(path) as file:
        return bytes(file.read(2)).startswith((b"PK", b"\x80"))


def parts_in(look: Look) -> list[str]:
    """List the folders inside that are checkpoints of torch.distributed.checkpoint."""
    return [name for name in look.names if is_file(join(join(look.path, name), DCP_METADATA))]


def _folders_in(look: Look) -> list[str]:
    """List the folders inside that are not hidden."""
    visible = (name for name in look.names if not name.startswith("."))
    return [name for name in visible if is_dir(join(look.path, name))]


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


def nothing_inside(look: Look) -> CkptError:
    """Return why the folder holds no checkpoint, and what to name instead."""
    folder, names = look.path, look.names
    parts = parts_in(look)
    if parts:
        first = next((name for name in parts if not name.startswith("optim")), parts[0])
        return CkptError(
            f"{folder} holds several checkpoints, each in its own folder",
            hint=f"name one of them: {quote(join(folder, first))}",
            problems=same_problem("a torch.distributed.checkpoint folder", parts),
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
    inside = _folders_in(look)
    megatron = _parts_of_megatron(folder, inside)
    if megatron is not None:
        return megatron
    hint = "check the path"
    if inside:
        hint = f"name one of its folders: {quote(join(folder, inside[-1]))}"
    content = "no checkpoint" if names else "nothing"
    if "config.json" in names:
        content = "a model's configuration but no weights"
    return CkptError(f"{folder} holds {content}", hint=hint)


def _parts_of_megatron(folder: str, inside: Sequence[str]) -> CkptError | None:
    """Return that the folders inside are tensor-parallel parts as Megatron-LM saves them; None if
    they are not.
    """
    stages: dict[str, set[int]] = {}  # of the pipeline -> tensor-parallel ranks
    files = set[tuple[str, ...]]()
    for name in inside:
        match = _MEGATRON.fullmatch(name)
        if match is None:
            return None
        stages.setdefault(match["stage"], set()).add(int(match["rank"]))
        files.add(_files(join(folder, name), is_weights))
    ranks = set(range(len(inside) // max(len(stages), 1)))
    if not stages or any(numbers != ranks for numbers in stages.values()) or len(files) != 1:
        return None
    (file_names,) = files
    if len(file_names) != 1:
        return None
    number = "*" if len(ranks) > 1 else "00"
    paths = []
    for stage in stages:
        paths.append(join(join(folder, f"mp_rank_{number}{stage}"), file_names[0]))
    hint = f"name the files of all ranks together: {quote(paths[0])}"
    if len(paths) > 1:
        hint = f"name the files of one stage of the pipeline: {quote(paths[0])}"
    elif len(ranks) == 1:
        hint = f"name the file: {quote(paths[0])}"
    return CkptError(
        f"{folder} holds tensor-parallel parts, as Megatron-LM saves them",
        hint=hint,
        problems=same_problem("the files of all ranks" if len(ranks) > 1 else "a file", paths),
    )


def companions(folder: str) -> dict[str, str]:
    """Return name -> path of a model's other files: configuration, tokenizer, model card, and a
    trainer's files.

    Hidden files, subfolders and files with weights are left out.
    """
    read = fsdp_parts(folder).values() if is_fsdp(folder) else ()
    paths = {}
    for name in names_in(folder):
        holds_weights = is_weights(name) or name.endswith(_OTHER_WEIGHTS) or INDEX.fullmatch(name)
        if name.startswith(".") or holds_weights or name in read:
            continue
        path = safe_path(folder, name)
        if path is not None and is_file(path):
            paths[name] = path
    return paths


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
    replaced = set()
    if like == DCP_METADATA:
        for name in names:
            if name == DCP_METADATA or name.endswith(".distcp"):
                replaced.add(name)
        return replaced
    kind = ".bin" if ".bin" in like else ".safetensors"
    for name in names:
        is_single = name in ("model.safetensors", "pytorch_model.bin")
        if kind in name and (is_single or INDEX.fullmatch(name) or _SHARD.fullmatch(name)):
            replaced.add(name)
    return replaced
