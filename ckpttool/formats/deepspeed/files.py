"""The files of a DeepSpeed checkpoint: their ranks, and where each parameter is in the flat partitions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from math import prod
from shlex import quote
from typing import Any

from ckpttool.core.checkpoint import ExtraEntry, Part, TensorEntry, in_row_major
from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.text import shell, some
from ckpttool.core.values import dataclass
from ckpttool.evaluate.chunks import across, concatenated
from ckpttool.formats.detect import sniff
from ckpttool.formats.pickle_read import Call
from ckpttool.formats.torch import zip_file as torch_zip
from ckpttool.formats.torch.nodes import pairs_of
from ckpttool.formats.torch.tensors import MOST, Storages, entry_of, is_tensor, malformed, sizes_of
from ckpttool.formats.torch.tree import extra_of
from ckpttool.formats.zip_read import read_archive
from ckpttool.io.files import is_dir, is_file, names_in
from ckpttool.io.paths import join, parent

COPY = "copy the folder again, or take an older step: the file `latest` beside it names the one that DeepSpeed loads"
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<part>\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<part>\d+)_model_states\.pt")
_EXPERTS = re.compile(r"(?:layer_\d+[-_]|expp?_).*_states\.pt")
UNIVERSAL = "zero"  # the folder of a universal checkpoint in which each parameter has one of its own
UNIVERSAL_REST = "optimizer_state.pt"  # and the file beside these, of what belongs to no parameter
_LEVELS = 4  # of lists in lists; paddings and options have two
_MOST_MISSING = 20  # ranks that are listed


@dataclass(frozen=True, slots=True, eq=False)
class File:
    """One file: the items of its pickled dict, and the storages of its tensors."""

    path: str
    nbytes: int
    items: Mapping[Any, Any]
    storages: Storages

    def tensors(self, key: str) -> dict[str, TensorEntry]:
        """The tensors of the dict under `key`, by their names."""
        nodes = {str(name): node for name, node in mapping(self.items, key).items() if is_tensor(node)}
        return {name: entry_of(name, node, self.storages) for name, node in nodes.items()}

    def objects(self, key: str) -> dict[str, ExtraEntry]:
        """What else the dict under `key` holds, by its names."""
        nodes = {str(name): node for name, node in mapping(self.items, key).items() if not is_tensor(node)}
        return {name: extra_of(name, node, self.storages) for name, node in nodes.items()}

    def entry(self, key: str, node: Any) -> TensorEntry:
        """The entry of a tensor's node. Raises `CkptError` where it is none, or no contiguous one of one dimension."""
        if not is_tensor(node):
            raise malformed(f"{self.path}: {key} is no flat tensor")
        return flat(self, entry_of(key, node, self.storages))


def flat(file: File, entry: TensorEntry) -> TensorEntry:
    """The entry, whose elements lie side by side. Raises `CkptError` where they do not."""
    if entry.storage is None or not entry.is_contiguous:
        raise malformed(f"{file.path}: {entry.key} is no flat tensor")
    return entry


@dataclass(frozen=True, slots=True, eq=False)
class Files:
    """The files of all ranks in order, first those of the model: one, or with ZeRO-3 one a rank.

    `universal` is the folder of the parameters of a universal checkpoint, whose one optimizer file belongs to no rank.
    """

    models: tuple[File, ...]
    optimizers: tuple[File, ...]
    universal: str | None = None


def read_files(folder: str) -> Files:
    """The files in `folder`. Raises `CkptError`, all problems at once, where one is missing or of another run."""
    names = [name for name in names_in(folder) if is_file(join(folder, name))]
    found = {kind: _numbered(names, kind) for kind in (_MODEL, _OPTIMIZER)}
    others = [name for name in names if _EXPERTS.fullmatch(name)]
    others += [name for kind in found for name, (_, part) in found[kind].items() if part]
    if others:
        raise CkptError(
            f"{folder} is a DeepSpeed checkpoint of a model that is cut by layers, by experts or within tensors",
            hint=_weights_of(folder) if is_dir(join(folder, UNIVERSAL)) else _put_together(folder),
            problems=[Problem("not of the one model part that is read", name) for name in others],
        )
    optimizers, models = _ordered(found[_OPTIMIZER]), _ordered(found[_MODEL])
    if models and not optimizers and is_dir(join(folder, UNIVERSAL)):
        files = _universal(folder, models)
        _check_ranks(folder, files, {_MODEL: found[_MODEL]})
        return files
    if not optimizers or not models:
        what = (
            "partitions of the weights (*_optim_states.pt)"
            if not optimizers
            else "model's own file (*_model_states.pt)"
        )
        raise CkptError(f"{folder} is a DeepSpeed checkpoint without the {what}", hint=COPY)
    files = Files(
        tuple(read_file(join(folder, name)) for name in models),
        tuple(read_file(join(folder, name)) for name in optimizers),
    )
    _check_ranks(folder, files, found)
    return files


_WEIGHTS = (
    "import sys, torch; from pathlib import Path; "
    "found = {p.parent.name: torch.load(p) for p in Path(sys.argv[1]).glob('*/fp32.pt')}; "
    "torch.save({k: v['param'] if isinstance(v, dict) else v for k, v in found.items()}, sys.argv[2])"
)


def _put_together(folder: str) -> str:
    """The hint by which DeepSpeed makes a universal checkpoint of a folder; of some, that is the first of two ways."""
    words = f"--input_folder {quote(folder)} --output_folder {quote(folder.rstrip('/') + '_universal')}"
    return (
        f"let DeepSpeed put it together, then name its output: python -m deepspeed.checkpoint.ds_to_universal {words}"
    )


def _weights_of(folder: str) -> str:
    """The hint by which torch takes the weights out of a universal checkpoint, whatever the model was cut by."""
    root = quote(join(folder, UNIVERSAL))
    held = "the weights without their optimizer, in fp32 those that were trained, second names in the model's precision"
    return f'{held}: python -c "{_WEIGHTS}" {root} OUT.pt'


def _universal(folder: str, models: Sequence[str]) -> Files:
    root = join(folder, UNIVERSAL)
    rest = read_file(join(root, UNIVERSAL_REST))
    rest = replace(rest, items={"optimizer_state_dict": dict(rest.items)})
    return Files(tuple(read_file(join(folder, name)) for name in models), (rest,), root)


def _numbered(names: Sequence[str], kind: re.Pattern[str]) -> dict[str, tuple[int, int]]:
    """Name -> rank and model part, of the files of a kind."""
    matches = {name: kind.fullmatch(name) for name in names}
    return {name: (int(m["rank"] or 0), int(m["part"])) for name, m in matches.items() if m is not None}


def _ordered(found: Mapping[str, tuple[int, int]]) -> list[str]:
    return sorted(found, key=lambda name: found[name])


def read_file(path: str) -> File:
    """The file, of a dict, or of one tensor: that is taken for a dict's ``param``. Raises `CkptError` for any other."""
    if sniff(path) != "torch_zip":
        raise CkptError(f"{path} is no file of torch.save", hint=COPY)
    archive = read_archive(path)
    _, pickle, storages = torch_zip.open_tree(archive)
    items = {"param": pickle.root} if is_tensor(pickle.root) else pairs_of(pickle.root)
    if items is None:
        raise malformed(f"{path} holds no dict")
    return File(path, archive.length, items, storages)


def _check_ranks(folder: str, files: Files, found: Mapping[re.Pattern[str], Mapping[str, tuple[int, int]]]) -> None:
    count = partition_count(files.optimizers[0])
    problems = []
    for kind in found:
        have = Counter(rank for rank, _ in found[kind].values())
        if kind is _MODEL and len(found[kind]) == 1 and zero_stage(files.optimizers[0]) < 3:
            continue
        what = "optimizer" if kind is _OPTIMIZER else "model"
        missing = islice((rank for rank in range(count) if rank not in have), _MOST_MISSING)
        problems += [Problem(f"no file of this rank's {what} states", f"rank {rank}") for rank in missing]
        problems += [Problem("two files are of this rank", f"rank {rank}") for rank in have if have[rank] > 1]
        problems += [Problem(f"the run had {count} ranks", f"rank {rank}") for rank in have if rank >= count]
    problems += _of_one_run(files.optimizers, ("zero_stage", "partition_count", "ds_version"), "optimizer_state_dict")
    problems += _of_one_run(files.models, ("global_steps", "dp_world_size", "ds_version"))
    if problems:
        raise CkptError(f"{folder} does not hold the files of all ranks of one step", hint=COPY, problems=problems)


def _of_one_run(files: Sequence[File], keys: Sequence[str], inside: str | None = None) -> list[Problem]:
    """What all files have to say alike, and do not."""
    said = [file.items if inside is None else mapping(file.items, inside) for file in files]
    return [
        Problem(f"{key} is {plain(own.get(key))!r}, in {files[0].path} {plain(said[0].get(key))!r}", file.path)
        for key in keys
        for file, own in zip(files, said)
        if plain(own.get(key)) != plain(said[0].get(key))
    ]


def zero_stage(file: File) -> int:
    """1, 2 or 3, as the optimizer's file says. Raises `CkptError` for a file that says something else."""
    state = mapping(file.items, "optimizer_state_dict")
    stage = plain(state.get("zero_stage"))
    if stage not in (1, 2, 3):
        said = f"its ZeRO stage is {stage!r}" if "zero_stage" in state else "it has no ZeRO stage"
        have = some([str(key) for key in state if type(key) is str], 8) or "nothing"
        folder = parent(file.path)
        run = parent(folder) if is_file(join(parent(folder), "latest")) else folder
        whole = shell("python", "-m", "deepspeed.utils.zero_to_fp32", run, "OUT")
        raise CkptError(
            f"{file.path}: {said}, and only the optimizer states of stages 1, 2 and 3 can be put together; "
            f"its optimizer_state_dict holds {have}",
            hint=f"let DeepSpeed gather the weights: {whole}; or {_put_together(folder)}",
        )
    return int(stage)


def partition_count(file: File) -> int:
    """Over how many ranks the file's partitions are cut; of several param groups the most."""
    said = plain(mapping(file.items, "optimizer_state_dict").get("partition_count"))
    counts = said if type(said) is list else [said]
    if not counts or any(type(count) is not int or count < 1 for count in counts):
        raise malformed(f"{file.path}: {said!r} partitions")
    if len(set(counts)) > 1:
        raise CkptError(
            f"{file.path}: its param groups are cut over {counts} ranks, as those of experts are",
            hint=_put_together(parent(file.path)),
        )
    return int(counts[0])


def mapping(items: Mapping[Any, Any], key: Any) -> dict[Any, Any]:
    """The dict under `key`; empty where there is None. Raises `CkptError` where it is something else."""
    found = {} if items.get(key) is None else pairs_of(items[key])
    if found is None:
        raise malformed(f"{key} is no dict")
    return found


def sequence(items: Mapping[Any, Any], key: str) -> list[Any]:
    """The list under `key`; empty where there is None. Raises `CkptError` where it is something else."""
    found = items.get(key)
    if found is not None and type(found) not in (list, tuple):
        raise malformed(f"{key} is no list")
    return list(found or ())


def plain(node: Any, levels: int = _LEVELS) -> Any:
    """A number, a word or a list of such; the value of an enum; None for any other node, and for what lies deeper."""
    if type(node) is int and abs(node) >= MOST:
        return None
    if type(node) in (bool, int, float, str, type(None)):
        return node
    if levels and type(node) in (list, tuple):
        return type(node)(plain(item, levels - 1) for item in node)
    return plain(node.args[0], levels - 1) if levels and type(node) is Call and len(node.args) == 1 else None


def is_plain(node: Any, levels: int = _LEVELS) -> bool:
    """Whether `plain` gives all of it, as it is."""
    if levels and type(node) in (list, tuple):
        return all(is_plain(item, levels - 1) for item in node)
    return node is None or (type(node) is not Call and plain(node, levels) is not None)


Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Partitions:
    """`groups` are the shapes of the parameters of each param group in order; `gaps` what follows each, in elements.

    `sizes` are the elements of the flat tensors that each rank has: of a param group, or with ZeRO-3 of a part of one.
    """

    stage: int
    world_size: int
    groups: tuple[Shapes, ...]
    gaps: tuple[tuple[int, ...], ...]
    sizes: tuple[tuple[int, ...], ...]

    def gather(self, flats: Sequence[Sequence[TensorEntry]]) -> dict[str, TensorEntry]:
        """Parameter -> the tensor of its shape, of the flat tensors of every rank (ranks first).

        Raises `CkptError` where the ranks hold too few elements of one, or of several dtypes.
        """
        dtypes = sorted({flat.dtype for own in flats for flat in own})
        if len(dtypes) > 1:
            raise CkptError(f"the ranks' partitions are of several dtypes: {', '.join(dtypes)}", hint=COPY)
        gathered = self._of_parameters if self.stage == 3 else self._of_groups
        *_, dtype = "float32", *dtypes
        return {name: _whole(name, shape, parts, dtype) for name, shape, parts in gathered(flats)}

    def _of_groups(self, flats: Sequence[Sequence[TensorEntry]]) -> Iterator[tuple[str, tuple[int, ...], list[Part]]]:
        for index, shapes in enumerate(self.groups):
            whole, at = [own[index] for own in flats], 0
            for (name, shape), gap in zip(shapes.items(), self.gaps[index]):
                yield name, shape, across(whole, at, prod(shape))
                at += prod(shape) + gap

    def _of_parameters(
        self, flats: Sequence[Sequence[TensorEntry]]
    ) -> Iterator[tuple[str, tuple[int, ...], list[Part]]]:
        at = 0
        for shapes in self.groups:
            for name, shape in shapes.items():
                size, left = -(-prod(shape) // self.world_size), prod(shape)
                parts: list[Part] = []
                for own in flats:
                    parts += across(own, at, min(size, left))
                    left -= min(size, left)
                yield name, shape, parts
                at += size


def partitions_of(files: Files) -> tuple[Partitions, dict[str, TensorEntry]]:
    """How the files are cut, and the fp32 weights. Raises `CkptError` where shapes and partitions do not fit."""
    first = files.optimizers[0]
    stage, world_size = zero_stage(first), len(files.optimizers)
    groups = groups_of(files)
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    flats = [[file.entry(key, node) for node in sequence(_state(file), key)] for file in files.optimizers]
    key = "param_alignment_paddings"
    gaps = [sequence({key: own}, key) for own in sequence(_state(first), key)] or [[0] * len(own) for own in groups]
    sizes = tuple(tuple(flat.numel for flat in own) for own in flats)
    done = Partitions(stage, world_size, groups, tuple(tuple(plain(own)) for own in gaps), sizes)
    _check(done, files)
    return done, done.gather(flats)


def groups_of(files: Files) -> tuple[Shapes, ...]:
    """The shapes of the parameters of each param group, in order."""
    return tuple(
        {str(name): sizes_of(size) for name, size in (mapping({"": own}, "")).items()}
        for own in sequence(files.models[0].items, "param_shapes")
    )


def _state(file: File) -> dict[Any, Any]:
    return mapping(file.items, "optimizer_state_dict")


def _check(cut: Partitions, files: Files) -> None:
    """Every element of the partitions has to be a parameter's, or what fills them up."""
    problems = _gaps_and_groups(cut) or (
        _of_stage_3(cut) if cut.stage == 3 else [*_of_stage_2(cut), *_mapped(cut, files)]
    )
    if problems:
        raise CkptError(
            f"{files.optimizers[0].path}: the partitions do not fit the parameters of {files.models[0].path}",
            hint=COPY,
            problems=problems,
        )


def _gaps_and_groups(cut: Partitions) -> list[Problem]:
    if not cut.groups:
        return [Problem("says no shapes of parameters", "param_shapes")]
    is_number = all(type(gap) is int and gap >= 0 for own in cut.gaps for gap in own)
    if not is_number or [len(own) for own in cut.gaps] != [len(own) for own in cut.groups]:
        return [Problem("not one for each parameter", "param_alignment_paddings")]
    if len({len(own) for own in cut.sizes}) > 1 or (cut.stage < 3 and len(cut.sizes[0]) != len(cut.groups)):
        return [Problem(f"{len(cut.groups)} param groups, the ranks have {list(map(len, cut.sizes))}", "param_shapes")]
    return []


def _of_stage_2(cut: Partitions) -> list[Problem]:
    """The end of a group is filled up to a multiple of twice the number of ranks, and not always saved."""
    problems = []
    for index, shapes in enumerate(cut.groups):
        want = sum(map(prod, shapes.values())) + sum(cut.gaps[index])
        have = sum(own[index] for own in cut.sizes)
        if not want - (cut.gaps[index][-1] if cut.gaps[index] else 0) <= have < want + 2 * cut.world_size:
            problems.append(
                Problem(f"the ranks hold {have:,} elements, its parameters are {want:,}", f"param group {index}")
            )
    return problems


def _mapped(cut: Partitions, files: Files) -> list[Problem]:
    """Where the files say which part of each parameter a rank has, that has to be the one that the shapes give."""
    problems = []
    for index, shapes in enumerate(cut.groups):
        starts, at = {}, 0
        for (name, shape), gap in zip(shapes.items(), cut.gaps[index]):
            starts[name] = (at, at + prod(shape))
            at += prod(shape) + gap
        before = 0
        for file, own in zip(files.optimizers, cut.sizes):
            said = sequence(_state(file), "param_slice_mappings")
            for name, node in mapping({"": said[index]}, "").items() if index < len(said) else ():
                numel, start = _fragment(node)
                low, high = starts.get(str(name), (-1, -1))
                if (max(low, before), min(high, before + own[index])) != (before + start, before + start + numel):
                    problems.append(Problem(f"{file.path} says that its part lies elsewhere", str(name)))
            before += own[index]
    return problems


def _fragment(node: Any) -> tuple[int, int]:
    """``fragment_address(numel, start)``, a dataclass."""
    state = node.state if type(getattr(node, "state", None)) is dict else {}
    numel, start = state.get("numel"), state.get("start")
    return (numel, start) if type(numel) is int and type(start) is int else (-1, -1)


def _of_stage_3(cut: Partitions) -> list[Problem]:
    want = sum(-(-prod(shape) // cut.world_size) for shapes in cut.groups for shape in shapes.values())
    return [
        Problem(f"holds {sum(own):,} elements, its parts of the parameters are {want:,}", f"rank {rank}")
        for rank, own in enumerate(cut.sizes)
        if sum(own) != want
    ]


def _whole(name: str, shape: tuple[int, ...], parts: Sequence[Part], dtype: str) -> TensorEntry:
    storage = concatenated(parts)
    entry = in_row_major(name, dtype, shape, storage)
    if storage.nbytes != entry.nbytes:
        raise CkptError(
            "the ranks' partitions do not hold a parameter whole", hint=COPY, problems=[Problem("is cut short", name)]
        )
    return entry
