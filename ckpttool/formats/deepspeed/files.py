"""The files of a DeepSpeed checkpoint, in the order of their ranks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from shlex import quote
from typing import Any

from ckpttool.core.checkpoint import ExtraEntry, TensorEntry
from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.text import shell, some
from ckpttool.core.values import dataclass
from ckpttool.formats.detect import sniff
from ckpttool.formats.pickle_read import Call
from ckpttool.formats.torch import zip_file as torch_zip
from ckpttool.formats.torch.nodes import pairs_of
from ckpttool.formats.torch.tensors import MOST, Storages, entry_of, is_tensor, malformed
from ckpttool.formats.torch.tree import extra_of
from ckpttool.formats.zip_read import read_archive
from ckpttool.io.files import is_dir, is_file, names_in
from ckpttool.io.paths import join, parent

COPY = "copy the folder again, or take an older step: the file `latest` next to it names the step that DeepSpeed loads"
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<part>\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<part>\d+)_model_states\.pt")
_EXPERTS = re.compile(r"(?:layer_\d+[-_]|expp?_).*_states\.pt")
UNIVERSAL = "zero"  # the folder of a universal checkpoint with one folder for each parameter
UNIVERSAL_REST = "optimizer_state.pt"  # the file next to these, of state that belongs to no parameter
_LEVELS = 4  # of nested lists; paddings and options have two
_MOST_MISSING = 20  # ranks that are listed


@dataclass(frozen=True, slots=True, eq=False)
class File:
    """One file: the items of its pickled dict, and the storages of its tensors."""

    path: str
    nbytes: int
    items: Mapping[Any, Any]
    storages: Storages

    def entries(self, key: str) -> dict[str, TensorEntry | ExtraEntry]:
        """Return the tensors and other objects of the dict under `key`, by name."""
        entries: dict[str, TensorEntry | ExtraEntry] = {}
        for name, node in mapping(self.items, key).items():
            own = str(name)
            entries[own] = entry_of(own, node, self.storages) if is_tensor(node) else extra_of(own, node, self.storages)
        return entries

    def tensors(self, key: str) -> dict[str, TensorEntry]:
        """Return the tensors of the dict under `key`, by name."""
        return {name: entry for name, entry in self.entries(key).items() if isinstance(entry, TensorEntry)}

    def flat(self, key: str, node: Any) -> TensorEntry:
        """Return the entry of a contiguous tensor. Raises `CkptError` for any other node."""
        entry = entry_of(key, node, self.storages) if is_tensor(node) else None
        if entry is None or entry.storage is None or not entry.is_contiguous:
            raise malformed(f"{self.path}: {key} is not a flat tensor")
        return entry


@dataclass(frozen=True, slots=True, eq=False)
class Files:
    """The files of all ranks in order: of the model one, or with ZeRO-3 one for each rank.

    `universal` is the folder of the parameters of a universal checkpoint, which has one optimizer file for all ranks.
    """

    stage: int
    models: tuple[File, ...]
    optimizers: tuple[File, ...]
    universal: str | None = None


def read_files(folder: str) -> Files:
    """Read the files in `folder`. Raises `CkptError`, all problems at once, if one is missing or of another run."""
    names = [name for name in names_in(folder) if is_file(join(folder, name))]
    optimizers, models = _numbered(names, _OPTIMIZER), _numbered(names, _MODEL)
    others = [name for name in names if _EXPERTS.fullmatch(name)]
    others += [name for name, (_, part) in [*models.items(), *optimizers.items()] if part]
    universal = join(folder, UNIVERSAL)
    if others:
        raise CkptError(
            f"{folder} is a DeepSpeed checkpoint of a model that is split by layers, by experts or within tensors",
            hint=_extract_weights(universal) if is_dir(universal) else _to_universal(folder),
            problems=[Problem("belongs to another model part", name) for name in others],
        )
    model_files = tuple(read_file(join(folder, name)) for name in models)
    if models and not optimizers and is_dir(universal):
        rest = read_file(join(universal, UNIVERSAL_REST))
        rest = replace(rest, items={"optimizer_state_dict": dict(rest.items)})
        files = Files(_zero_stage(rest), model_files, (rest,), universal)
    elif not optimizers or not models:
        missing = "model's own file (*_model_states.pt)"
        if not optimizers:
            missing = "partitions of the weights (*_optim_states.pt)"
        raise CkptError(f"{folder} is a DeepSpeed checkpoint without the {missing}", hint=COPY)
    else:
        optimizer_files = tuple(read_file(join(folder, name)) for name in optimizers)
        files = Files(_zero_stage(optimizer_files[0]), model_files, optimizer_files)
    count = _partition_count(files.optimizers[0])
    problems = [] if files.universal is not None else _rank_problems("optimizer", optimizers, count)
    if files.stage == 3 or len(models) > 1:
        problems += _rank_problems("model", models, count)
    problems += _differences(files.optimizers, ("zero_stage", "partition_count", "ds_version"), "optimizer_state_dict")
    problems += _differences(files.models, ("global_steps", "dp_world_size", "ds_version"))
    if problems:
        raise CkptError(f"{folder} does not hold the files of all ranks of one step", hint=COPY, problems=problems)
    return files


def _numbered(names: Sequence[str], kind: re.Pattern[str]) -> dict[str, tuple[int, int]]:
    """Return name -> (rank, model part) of the files of a kind, in order."""
    matches = {name: kind.fullmatch(name) for name in names}
    numbers = {name: (int(m["rank"] or 0), int(m["part"])) for name, m in matches.items() if m is not None}
    return dict(sorted(numbers.items(), key=lambda pair: pair[1]))


def _rank_problems(what: str, numbers: Mapping[str, tuple[int, int]], count: int) -> list[Problem]:
    ranks = Counter(rank for rank, _ in numbers.values())
    missing = islice((rank for rank in range(count) if rank not in ranks), _MOST_MISSING)
    return [
        *(Problem(f"no file of this rank's {what} states", f"rank {rank}") for rank in missing),
        *(Problem("two files are of this rank", f"rank {rank}") for rank in ranks if ranks[rank] > 1),
        *(Problem(f"the run had {count} ranks", f"rank {rank}") for rank in ranks if rank >= count),
    ]


def _differences(files: Sequence[File], keys: Sequence[str], inside: str | None = None) -> list[Problem]:
    """Return the values that should be equal in all files, and are not."""
    values = [file.items if inside is None else mapping(file.items, inside) for file in files]
    return [
        Problem(f"{key} is {plain(own.get(key))!r}, in {files[0].path} {plain(values[0].get(key))!r}", file.path)
        for key in keys
        for file, own in zip(files, values)
        if plain(own.get(key)) != plain(values[0].get(key))
    ]


def read_file(path: str) -> File:
    """Read a file that holds a dict, or one tensor, which becomes the item ``param``. Raises `CkptError` for others."""
    if sniff(path) != "torch_zip":
        raise CkptError(f"{path} was not written by torch.save", hint=COPY)
    archive = read_archive(path)
    _, pickle, storages = torch_zip.open_tree(archive)
    items = {"param": pickle.root} if is_tensor(pickle.root) else pairs_of(pickle.root)
    if items is None:
        raise malformed(f"{path} does not hold a dict")
    return File(path, archive.length, items, storages)


_WEIGHTS = (
    "import sys, torch; from pathlib import Path; "
    "found = {p.parent.name: torch.load(p) for p in Path(sys.argv[1]).glob('*/fp32.pt')}; "
    "torch.save({k: v['param'] if isinstance(v, dict) else v for k, v in found.items()}, sys.argv[2])"
)


def _extract_weights(universal: str) -> str:
    """Return the hint to take the weights out of a universal checkpoint with torch."""
    return (
        "this takes out the weights without their optimizer, trained ones in fp32, second names of shared ones in the "
        f'model\'s precision: python -c "{_WEIGHTS}" {quote(universal)} OUT.pt'
    )


def _to_universal(folder: str) -> str:
    """Return the hint to convert the folder to a universal checkpoint with DeepSpeed."""
    args = f"--input_folder {quote(folder)} --output_folder {quote(folder.rstrip('/') + '_universal')}"
    return f"let DeepSpeed convert it, then name the output: python -m deepspeed.checkpoint.ds_to_universal {args}"


def _zero_stage(file: File) -> int:
    """Return 1, 2 or 3, as the optimizer's file says. Raises `CkptError` for anything else."""
    state = mapping(file.items, "optimizer_state_dict")
    stage = plain(state.get("zero_stage"))
    if stage not in (1, 2, 3):
        said = f"its ZeRO stage is {stage!r}" if "zero_stage" in state else "it has no ZeRO stage"
        keys = some([str(key) for key in state if type(key) is str], 8) or "nothing"
        folder = parent(file.path)
        run = parent(folder) if is_file(join(parent(folder), "latest")) else folder
        command = shell("python", "-m", "deepspeed.utils.zero_to_fp32", run, "OUT")
        raise CkptError(
            f"{file.path}: {said}, and only the optimizer states of stages 1, 2 and 3 can be assembled; "
            f"its optimizer_state_dict holds {keys}",
            hint=f"let DeepSpeed gather the weights: {command}; or {_to_universal(folder)}",
        )
    return int(stage)


def _partition_count(file: File) -> int:
    value = plain(mapping(file.items, "optimizer_state_dict").get("partition_count"))
    counts = value if type(value) is list else [value]
    if not counts or any(type(count) is not int or count < 1 for count in counts):
        raise malformed(f"{file.path}: {value!r} partitions")
    if len(set(counts)) > 1:
        raise CkptError(
            f"{file.path}: its param groups are partitioned over {counts} ranks, as for experts",
            hint=_to_universal(parent(file.path)),
        )
    return int(counts[0])


# Plain values


def mapping(items: Mapping[Any, Any], key: Any) -> dict[Any, Any]:
    """Return the dict under `key`, empty for None. Raises `CkptError` for anything else."""
    pairs = {} if items.get(key) is None else pairs_of(items[key])
    if pairs is None:
        raise malformed(f"{key} is not a dict")
    return pairs


def sequence(items: Mapping[Any, Any], key: str) -> list[Any]:
    """Return the list under `key`, empty for None. Raises `CkptError` for anything else."""
    value = items.get(key)
    if value is not None and type(value) not in (list, tuple):
        raise malformed(f"{key} is not a list")
    return list(value or ())


def plain(node: Any, levels: int = _LEVELS) -> Any:
    """Return a number, a text or a list of these; the value of an enum; None for other nodes and for deeper lists."""
    if type(node) is int and abs(node) >= MOST:
        return None
    if type(node) in (bool, int, float, str, type(None)):
        return node
    if levels and type(node) in (list, tuple):
        return type(node)(plain(item, levels - 1) for item in node)
    return plain(node.args[0], levels - 1) if levels and type(node) is Call and len(node.args) == 1 else None


def is_plain(node: Any, levels: int = _LEVELS) -> bool:
    """Return True if `plain` returns the value unchanged."""
    if levels and type(node) in (list, tuple):
        return all(is_plain(item, levels - 1) for item in node)
    return node is None or (type(node) is not Call and plain(node, levels) is not None)
