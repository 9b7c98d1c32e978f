"""Read a DeepSpeed checkpoint (ZeRO or universal) from the files of all ranks as an ordinary
one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from math import prod
from shlex import quote
from typing import Any

from ckpttool.containers.nodes import pairs_of
from ckpttool.containers.pickle_read import Call
from ckpttool.containers.tensors import MOST, Storages, entry_of, is_tensor, malformed, sizes_of
from ckpttool.containers.tree import extra_of
from ckpttool.containers.zip_read import read_archive
from ckpttool.core.checkpoint import (
    Checkpoint,
    ExtraEntry,
    Part,
    Section,
    TensorEntry,
    contiguous_stride,
    in_row_major,
)
from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.text import shell, some
from ckpttool.core.values import dataclass, many_objects
from ckpttool.evaluate.chunks import across, concatenated, in_own_storage
from ckpttool.evaluate.compare import same_values
from ckpttool.formats import torch_zip
from ckpttool.formats.registry import recognise
from ckpttool.io.files import is_dir, is_file, names_in
from ckpttool.io.paths import join, parent, safe_path

COPY = (
    "copy the folder again, or take an older step: the file `latest` next to it names the step"
    " that DeepSpeed loads"
)
_OPTIMIZER = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<part>\d+)_optim_states\.pt"
)
_MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<part>\d+)_model_states\.pt")
_EXPERTS = re.compile(r"(?:layer_\d+[-_]|expp?_).*_states\.pt")
UNIVERSAL = "zero"  # the folder of a universal checkpoint with one folder for each parameter
# the file next to these, of state that belongs to no parameter
UNIVERSAL_REST = "optimizer_state.pt"
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
        entries: dict[str, TensorEntry | ExtraEntry] = {}
        for name, node in mapping(self.items, key).items():
            own = str(name)
            entries[own] = (
                entry_of(own, node, self.storages)
                if is_tensor(node)
                else extra_of(own, node, self.storages)
            )
        return entries

    def tensors(self, key: str) -> dict[str, TensorEntry]:
        return {
            name: entry
            for name, entry in self.entries(key).items()
            if isinstance(entry, TensorEntry)
        }

    def flat(self, key: str, node: Any) -> TensorEntry:
        """Return the entry of a contiguous tensor. Raises `CkptError` for any other node."""
        entry = entry_of(key, node, self.storages) if is_tensor(node) else None
        if entry is None or entry.storage is None or not entry.is_contiguous:
            raise malformed(f"{self.path}: {key} is not a flat tensor")
        return entry


@dataclass(frozen=True, slots=True, eq=False)
class Files:
    """The files of all ranks in order: of the model one, or with ZeRO-3 one for each rank.

    `universal` is the folder of the parameters of a universal checkpoint, which has one optimizer
    file for all ranks.
    """

    stage: int
    models: tuple[File, ...]
    optimizers: tuple[File, ...]
    universal: str | None = None


def read_files(folder: str) -> Files:
    """Read the files in `folder`. Raises `CkptError`, all problems at once, if one is missing or of
    another run.
    """
    names = [name for name in names_in(folder) if is_file(join(folder, name))]
    optimizers, models = _numbered(names, _OPTIMIZER), _numbered(names, _MODEL)
    others = [name for name in names if _EXPERTS.fullmatch(name)]
    others += [name for name, (_, part) in [*models.items(), *optimizers.items()] if part]
    universal = join(folder, UNIVERSAL)
    if others:
        raise CkptError(
            f"{folder} is a DeepSpeed checkpoint of a model that is split by layers, by experts or"
            " within tensors",
            hint=f'{_TAKE_OUT}: python -c "{_WEIGHTS}" {quote(universal)} OUT.pt'
            if is_dir(universal)
            else _to_universal(folder),
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
    problems += _differences(
        files.optimizers, ("zero_stage", "partition_count", "ds_version"), "optimizer_state_dict"
    )
    problems += _differences(files.models, ("global_steps", "dp_world_size", "ds_version"))
    if problems:
        raise CkptError(
            f"{folder} does not hold the files of all ranks of one step",
            hint=COPY,
            problems=problems,
        )
    return files


def _numbered(names: Sequence[str], kind: re.Pattern[str]) -> dict[str, tuple[int, int]]:
    """Return name -> (rank, model part) of the files of a kind, in order."""
    matches = {name: kind.fullmatch(name) for name in names}
    numbers = {
        name: (int(m["rank"] or 0), int(m["part"])) for name, m in matches.items() if m is not None
    }
    return dict(sorted(numbers.items(), key=lambda pair: pair[1]))


def _rank_problems(what: str, numbers: Mapping[str, tuple[int, int]], count: int) -> list[Problem]:
    ranks = Counter(rank for rank, _ in numbers.values())
    missing = islice((rank for rank in range(count) if rank not in ranks), _MOST_MISSING)
    return [
        *(Problem(f"no file of this rank's {what} states", f"rank {rank}") for rank in missing),
        *(
            Problem("two files are of this rank", f"rank {rank}")
            for rank in ranks
            if ranks[rank] > 1
        ),
        *(Problem(f"the run had {count} ranks", f"rank {rank}") for rank in ranks if rank >= count),
    ]


def _differences(
    files: Sequence[File], keys: Sequence[str], inside: str | None = None
) -> list[Problem]:
    """Return the values that should be equal in all files, and are not."""
    values = [file.items if inside is None else mapping(file.items, inside) for file in files]
    return [
        Problem(
            f"{key} is {plain(own.get(key))!r}, in {files[0].path} {plain(values[0].get(key))!r}",
            file.path,
        )
        for key in keys
        for file, own in zip(files, values)
        if plain(own.get(key)) != plain(values[0].get(key))
    ]


def read_file(path: str) -> File:
    """Read a file that holds a dict, or one tensor, which becomes the item ``param``. Raises
    `CkptError` for others.
    """
    if recognise(path).format.name != "torch_zip":
        raise CkptError(f"{path} was not written by torch.save", hint=COPY)
    archive = read_archive(path)
    _, pickle, storages = torch_zip.open_tree(archive)
    items = {"param": pickle.root} if is_tensor(pickle.root) else pairs_of(pickle.root)
    if items is None:
        raise malformed(f"{path} does not hold a dict")
    return File(path, archive.length, items, storages)


_TAKE_OUT = (
    "this takes out the weights without their optimizer, trained ones in fp32, second names of"
    " shared ones in the "
    "model's precision"
)
_WEIGHTS = (
    "import sys, torch; from pathlib import Path; "
    "found = {p.parent.name: torch.load(p) for p in Path(sys.argv[1]).glob('*/fp32.pt')}; "
    "torch.save({k: v['param'] if isinstance(v, dict) else v for k, v in found.items()},"
    " sys.argv[2])"
)


def _to_universal(folder: str) -> str:
    args = (
        f"--input_folder {quote(folder)} --output_folder {quote(folder.rstrip('/') + '_universal')}"
    )
    return (
        "let DeepSpeed convert it, then name the output: python -m"
        f" deepspeed.checkpoint.ds_to_universal {args}"
    )


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
            f"{file.path}: {said}, and only the optimizer states of stages 1, 2 and 3 can be"
            " assembled; "
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
    """Return a number, a text or a list of these; the value of an enum; None for other nodes and
    for deeper lists.
    """
    if type(node) is int and abs(node) >= MOST:
        return None
    if type(node) in (bool, int, float, str, type(None)):
        return node
    if levels and type(node) in (list, tuple):
        return type(node)(plain(item, levels - 1) for item in node)
    return (
        plain(node.args[0], levels - 1)
        if levels and type(node) is Call and len(node.args) == 1
        else None
    )


def is_plain(node: Any, levels: int = _LEVELS) -> bool:
    """Return True if `plain` returns the value unchanged."""
    if levels and type(node) in (list, tuple):
        return all(is_plain(item, levels - 1) for item in node)
    return node is None or (type(node) is not Call and plain(node, levels) is not None)


Shapes = Mapping[str, tuple[int, ...]]

# Keys of the model's file that describe the run and its partitions. Without them, the tensors lose
# nothing.
_OWN = {
    "module",
    "buffer_names",
    "optimizer",
    "param_shapes",
    "frozen_param_shapes",
    "frozen_param_fragments",
}
_OWN |= {
    "shared_params",
    "ds_config",
    "ds_version",
    "dp_world_size",
    "mp_world_size",
    "data_sampler",
    "random_ltd",
}
_OWN |= {"checkpoint_parallel_dimensions"}


@many_objects()
def read(folder: str) -> Checkpoint:
    """Read the index of one step's folder. Raises `CkptError` if files are missing or do not
    fit.
    """
    files = read_files(folder)
    groups = tuple(
        {str(name): sizes_of(size) for name, size in mapping({"": group}, "").items()}
        for group in sequence(files.models[0].items, "param_shapes")
    )
    notes: list[str] = []
    read: list[File] = [*files.models, *files.optimizers]
    if files.universal is None:
        layout, weights = _partitions(files, groups)
        title = f"ZeRO-{files.stage} of {len(files.optimizers)} ranks, gathered"
    else:
        states, parameter_files = _read_parameters(files, files.universal, groups, notes)
        weights = {name: replace(state.pop("fp32"), key=name) for name, state in states.items()}
        read += parameter_files
        title = f"a universal checkpoint of ZeRO-{files.stage}"
    model = Section("model", "state_dict", *_model(files, weights, notes))
    if files.universal is None:
        optimizer = _optimizer(files, layout, notes)
    else:
        optimizer = _universal_optimizer(files.optimizers[0], groups, states, notes)
    lost = [
        str(key)
        for key, value in files.models[0].items.items()
        if key not in _OWN and value is not None
    ]
    if lost:
        notes.append(f"not copied: {', '.join(lost)} of {files.models[0].path}")
    return Checkpoint(
        folder,
        "deepspeed",
        sum(file.nbytes for file in read),
        (model,) if optimizer is None else (model, optimizer),
        notes=(title, *notes),
    )


# Partitions


@dataclass(frozen=True, slots=True)
class _Layout:
    """The positions of parameters in the flat tensors of the ranks.

    `groups` are the shapes of the parameters of each param group in order. `gaps` is the padding
    after each parameter, in elements (ZeRO-1 and -2). `sizes` are the numbers of elements of each
    rank's flat tensors: one for each param group, or with ZeRO-3 for each part of one.
    """

    stage: int
    groups: tuple[Shapes, ...]
    gaps: tuple[tuple[int, ...], ...]
    sizes: tuple[tuple[int, ...], ...]

    def places(self) -> Iterator[tuple[int, str, tuple[int, ...], int]]:
        """Yield the param group, name, shape and first element of each parameter, of ZeRO-1 and
        -2.
        """
        for index, (shapes, gaps) in enumerate(zip(self.groups, self.gaps)):
            at = 0
            for (name, shape), gap in zip(shapes.items(), gaps):
                yield index, name, shape, at
                at += prod(shape) + gap

    def gather(self, flats: Sequence[Sequence[TensorEntry]]) -> dict[str, TensorEntry]:
        """Return parameter -> its tensor, from the flat tensors of each rank.

        Raises `CkptError` if the ranks hold too few elements, or several dtypes.
        """
        parts: dict[str, tuple[tuple[int, ...], list[Part]]] = {}
        if self.stage < 3:
            for index, name, shape, at in self.places():
                parts[name] = shape, across([tensors[index] for tensors in flats], at, prod(shape))
        else:  # each parameter is cut into equal parts, the last one padded
            at = 0
            for shapes in self.groups:
                for name, shape in shapes.items():
                    part, left = -(-prod(shape) // len(flats)), prod(shape)
                    parts[name] = shape, []
                    for tensors in flats:
                        parts[name][1].extend(across(tensors, at, min(part, left)))
                        left -= min(part, left)
                    at += part
        dtypes = sorted({tensor.dtype for tensors in flats for tensor in tensors})
        if len(dtypes) > 1:
            raise CkptError(
                f"the ranks' partitions have several dtypes: {', '.join(dtypes)}", hint=COPY
            )
        gathered = {}
        for name, (shape, own) in parts.items():
            storage = concatenated(own)
            gathered[name] = in_row_major(name, dtypes[0] if dtypes else "float32", shape, storage)
            if storage.nbytes != gathered[name].nbytes:
                problem = Problem("the ranks hold too few elements", name)
                raise CkptError(
                    "the ranks' partitions do not hold a parameter completely",
                    hint=COPY,
                    problems=[problem],
                )
        return gathered


def _partitions(files: Files, groups: tuple[Shapes, ...]) -> tuple[_Layout, dict[str, TensorEntry]]:
    """Return the layout and the fp32 weights. Raises `CkptError` if shapes and partitions do not
    fit.

    Every element of the partitions must be a parameter's or padding.
    """
    states = [mapping(file.items, "optimizer_state_dict") for file in files.optimizers]
    key = "fp32_flat_groups" if files.stage == 3 else "single_partition_of_fp32_groups"
    flats = [
        [file.flat(key, node) for node in sequence(own, key)]
        for file, own in zip(files.optimizers, states)
    ]
    key = "param_alignment_paddings"
    gaps = [sequence({key: own}, key) for own in sequence(states[0], key)] or [
        [0] * len(own) for own in groups
    ]
    sizes = tuple(tuple(flat.numel for flat in own) for own in flats)
    layout = _Layout(files.stage, groups, tuple(tuple(plain(own)) for own in gaps), sizes)
    problems = _layout_problems(layout)
    if not problems and files.stage < 3:
        problems = _slice_problems(layout, files, states)
    if problems:
        raise CkptError(
            f"{files.optimizers[0].path}: the partitions do not fit the parameters of"
            f" {files.models[0].path}",
            hint=COPY,
            problems=problems,
        )
    return layout, layout.gather(flats)


def _layout_problems(layout: _Layout) -> list[Problem]:
    groups, gaps, sizes = layout.groups, layout.gaps, layout.sizes
    if not groups:
        return [Problem("no shapes of parameters", "param_shapes")]
    is_number = all(type(gap) is int and gap >= 0 for own in gaps for gap in own)
    if not is_number or list(map(len, gaps)) != list(map(len, groups)):
        return [Problem("not one for each parameter", "param_alignment_paddings")]
    if len(set(map(len, sizes))) > 1 or (layout.stage < 3 and len(sizes[0]) != len(groups)):
        return [
            Problem(
                f"{len(groups)} param groups, the ranks have {list(map(len, sizes))}",
                "param_shapes",
            )
        ]
    problems = []
    if layout.stage == 3:
        expected = sum(
            -(-prod(shape) // len(sizes)) for shapes in groups for shape in shapes.values()
        )
        for rank, own in enumerate(sizes):
            if sum(own) != expected:
                text = f"holds {sum(own):,} elements, its parts of the parameters are {expected:,}"
                problems.append(Problem(text, f"rank {rank}"))
        return problems
    for index, shapes in enumerate(groups):
        # The end of a group is padded to a multiple of twice the number of ranks, and not always
        # saved.
        expected = sum(map(prod, shapes.values())) + sum(gaps[index])
        actual = sum(own[index] for own in sizes)
        if (
            not expected - (gaps[index][-1] if gaps[index] else 0)
            <= actual
            < expected + 2 * len(sizes)
        ):
            text = f"the ranks hold {actual:,} elements, its parameters are {expected:,}"
            problems.append(Problem(text, f"param group {index}"))
    return problems


def _slice_problems(
    layout: _Layout, files: Files, states: Sequence[Mapping[Any, Any]]
) -> list[Problem]:
    """Compare the layout with ``param_slice_mappings``, which gives each rank's slice of each
    parameter.
    """
    problems = []
    ends = {(index, name): (at, at + prod(shape)) for index, name, shape, at in layout.places()}
    for index in range(len(layout.groups)):
        before = 0
        for file, state, own in zip(files.optimizers, states, layout.sizes):
            slices = sequence(state, "param_slice_mappings")
            for name, node in (
                mapping({"": slices[index]}, "").items() if index < len(slices) else ()
            ):
                # A dataclass: fragment_address(numel, start)
                fragment = node.state if type(getattr(node, "state", None)) is dict else {}
                numel, start = fragment.get("numel"), fragment.get("start")
                low, high = ends.get((index, str(name)), (-1, -1))
                here = max(low, before), min(high, before + own[index])
                if (
                    type(numel) is not int
                    or type(start) is not int
                    or here != (before + start, before + start + numel)
                ):
                    problems.append(
                        Problem(f"{file.path} gives another place for its part", str(name))
                    )
            before += own[index]
    return problems


# Universal checkpoints


def _read_parameters(
    files: Files, root: str, groups: Sequence[Shapes], notes: list[str]
) -> tuple[dict[str, dict[str, TensorEntry]], list[File]]:
    """Return parameter -> name of a file -> its tensor, and the files. `notes` get what is left
    out.

    Raises `CkptError`, all problems at once, if a parameter is missing or does not fit.
    """
    read: list[File] = []
    problems: list[Problem] = []
    states: dict[str, dict[str, TensorEntry]] = {}
    for param, shape in ((name, shape) for group in groups for name, shape in group.items()):
        state = states[param] = {}
        folder = safe_path(root, param)
        for name in names_in(folder) if folder is not None and is_dir(folder) else ():
            kind = name.removesuffix(".pt")
            file = read_file(join(folder or "", name))
            read.append(file)
            entry = file.flat(f"state.{param}.{kind}", file.items.get("param"))
            if entry.shape in (shape, (prod(shape),)):
                entry = replace(entry, shape=shape, stride=contiguous_stride(shape), payload=None)
            elif entry.shape != () or kind == "fp32":  # one value, such as a step, stays as it is
                text = f"{name} has the shape {list(entry.shape)}, the parameter {list(shape)}"
                problems.append(Problem(text, param))
            state[kind] = entry
    problems += [
        Problem("no file fp32.pt of it", name)
        for name, state in states.items()
        if "fp32" not in state
    ]
    if problems or not states:
        raise CkptError(
            f"{root} does not hold every parameter completely", hint=COPY, problems=problems
        )
    known = {*states, UNIVERSAL_REST, *files.models[0].tensors("module")}
    notes += [
        f"not copied: {join(root, name)} belongs to no parameter"
        for name in names_in(root)
        if name not in known
    ]
    return states, read


def _universal_optimizer(
    rest: File,
    groups: Sequence[Shapes],
    states: Mapping[str, Mapping[str, TensorEntry]],
    notes: list[str],
) -> Section | None:
    """Return the optimizer's section; None, and a note, if it does not have the model's param
    groups.
    """
    base = mapping(rest.items, "optimizer_state_dict")
    options = [pairs_of(group) for group in sequence(base, "param_groups")]
    known = [group for group in options if group is not None]
    if len(known) != len(groups) or len(options) != len(known):
        notes.append(
            f"the optimizer is not read: {len(options)} param groups in {rest.path},"
            f" {len(groups)} of shapes"
        )
        return None
    state: dict[str, dict[str, Any]] = {name: dict(own) for name, own in states.items()}
    # of ZeRO-3: rank 0's own, with its step
    kept = mapping(mapping(base, "optimizer_state_dict"), "state")
    for at, shapes in enumerate(groups):
        for name, node in mapping(kept, at).items():
            value = rest.flat(str(name), node) if is_tensor(node) else plain(node)
            if not isinstance(value, TensorEntry) or value.numel == 1:
                for param in shapes:
                    state[param].setdefault(str(name), _copy(value, param, str(name)))
            elif any(name not in state[param] for param in shapes):
                notes.append(f"not copied: {name} of {rest.path}, which belongs to one rank alone")
    return _optimizer_section(groups, known, state, notes)


# Sections


def _model(
    files: Files, weights: Mapping[str, TensorEntry], notes: list[str]
) -> tuple[tuple[TensorEntry, ...], tuple[ExtraEntry, ...]]:
    """Return the tensors in the module's order (weights, frozen parameters, buffers, shared names),
    and the objects.
    """
    first = files.models[0]
    entries = first.entries("module")
    module = {name: entry for name, entry in entries.items() if isinstance(entry, TensorEntry)}
    gathered = {**weights, **_frozen(files)}
    buffers = [
        name
        for name in sequence(first.items, "buffer_names")
        if type(name) is str and name in module
    ]
    # ZeRO-3 leaves a placeholder
    whole = [name for name, entry in module.items() if files.stage < 3 or entry.numel]
    own = {name: module[name] for name in (*whole, *buffers) if name not in gathered}
    tensors = {**own, **gathered}
    for name, other in mapping(first.items, "shared_params").items():
        shared = tensors.get(other) if type(other) is str else None
        tensors.pop(str(name), None)
        if shared is not None:
            tensors[str(name)] = replace(shared, key=str(name))
    unknown = [name for name in module if name not in tensors]
    if unknown:
        raise CkptError(
            f"{first.path}: no partition holds the values of some entries of the module",
            hint=COPY,
            problems=[
                Problem("neither a parameter, a buffer nor shared", name) for name in unknown
            ],
        )
    objects = {name: entry for name, entry in entries.items() if isinstance(entry, ExtraEntry)}
    expected: dict[str, TensorEntry | ExtraEntry] = {**own, **objects}
    for file in files.models[1:]:
        others = file.entries("module")
        differing = [
            name
            for name in expected
            if name not in others or not same_values(others[name], expected[name])
        ]
        notes += [f"{name} differs between the ranks: rank 0's is used" for name in differing]
    return tuple(tensors[name] for name in dict.fromkeys((*module, *tensors))), tuple(
        objects.values()
    )


def _frozen(files: Files) -> dict[str, TensorEntry]:
    """Return the frozen parameters: complete in the model's file, or with ZeRO-3 in equal parts."""
    first = files.models[0]
    if files.stage < 3:
        return first.tensors("frozen_param_fragments")
    fragments = [
        {str(name): node for name, node in mapping(file.items, "frozen_param_fragments").items()}
        for file in files.models
    ]
    gathered: dict[str, TensorEntry] = {}
    for key, size in mapping(first.items, "frozen_param_shapes").items():
        name = str(key)
        missing = [
            Problem("a rank has no part of it", name) for own in fragments if name not in own
        ]
        if missing:
            raise CkptError(
                f"{first.path}: parts of frozen parameters are missing", hint=COPY, problems=missing
            )
        layout = _Layout(3, ({name: sizes_of(size)},), (), ())
        gathered |= layout.gather(
            [[file.flat(name, own[name])] for file, own in zip(files.models, fragments)]
        )
    return gathered


def _optimizer(files: Files, layout: _Layout, notes: list[str]) -> Section | None:
    """Return the optimizer's state by the names of its parameters; None, and a note, if its layout
    is not known.
    """
    key = "optimizer_state_dict" if files.stage == 3 else "base_optimizer_state"
    bases: list[Any] = []
    for file in files.optimizers:
        base = mapping(file.items, "optimizer_state_dict").get(key)
        if not _is_known(base, len(layout.groups)):
            notes.append(
                f"the optimizer is not read: {key} of {file.path} does not have"
                " DeepSpeed's current layout"
            )
            return None
        bases.append(base)
    problems: list[Problem] = []
    for index in range(len(layout.groups)):
        options = [base["param_groups"][index] for base in bases]
        for name in dict.fromkeys(name for own in options for name in own):
            values = [plain(own.get(name)) for own in options]
            problems += [
                Problem(f"{name} is {value!r}, and {values[0]!r} on rank 0", file.path)
                for file, value in zip(files.optimizers, values)
                if value != values[0]
            ]
    state: dict[str, dict[str, Any]] = {name: {} for shapes in layout.groups for name in shapes}
    ids = [param for group in bases[0]["param_groups"] for param in sequence(group, "params")]
    by_rank = [[mapping(base["state"], param) for param in ids] for base in bases]
    for name in dict.fromkeys(str(name) for own in by_rank for values in own for name in values):
        nodes = [[values.get(name) for values in own] for own in by_rank]
        for param, value in _gathered(name, nodes, files.optimizers, layout, problems).items():
            state[param][name] = value
    if problems:
        raise CkptError(
            f"{files.optimizers[0].path}: the ranks' optimizers do not fit",
            hint=COPY,
            problems=problems,
        )
    return _optimizer_section(layout.groups, bases[0]["param_groups"], state, notes)


def _is_known(base: Any, groups: int) -> bool:
    """Return True if this is the state of an optimizer with as many param groups, of flat
    parameters with numbers.
    """
    if (
        type(base) is not dict
        or type(base.get("state")) is not dict
        or type(base.get("param_groups")) is not list
    ):
        return False
    params = [group.get("params") for group in base["param_groups"] if type(group) is dict]
    return len(base["param_groups"]) == len(params) == groups and all(
        type(ids) is list and all(type(param) is int for param in ids) for ids in params
    )


def _gathered(
    name: str,
    nodes: Sequence[Sequence[Any]],
    files: Sequence[File],
    layout: _Layout,
    problems: list[Problem],
) -> dict[str, Any]:
    """Return parameter -> its value of the state `name`: from the flat tensors, or one value that
    all ranks have.
    """
    entries = [
        [file.flat(name, node) if is_tensor(node) else None for node in own]
        for file, own in zip(files, nodes)
    ]
    flats = [[entry for entry in own if entry is not None] for own in entries]
    if all(
        len(own) == len(sizes)
        and all(e.numel >= size and len(e.shape) == 1 for e, size in zip(own, sizes))
        for own, sizes in zip(flats, layout.sizes)
    ):
        return {
            param: replace(entry, key=f"state.{param}.{name}")
            for param, entry in layout.gather(flats).items()
        }
    tensor, number = entries[0][0], plain(nodes[0][0])
    if tensor is None:
        values = [plain(node) for own in nodes for node in own]
        same = all(type(value) in (int, float, bool) and value == number for value in values)
    else:
        same = tensor.numel == 1 and all(
            e is not None and same_values(tensor, e) for own in entries for e in own
        )
    if not same:
        problems.append(
            Problem("has neither the shape of the partitions nor one value on all ranks", name)
        )
        return {}
    value = number if tensor is None else tensor
    return {param: _copy(value, param, name) for shapes in layout.groups for param in shapes}


def _optimizer_section(
    groups: Sequence[Shapes],
    options: Sequence[Mapping[str, Any]],
    state: Mapping[str, Mapping[str, Any]],
    notes: list[str],
) -> Section:
    param_groups: list[dict[str, Any]] = []
    for index, shapes in enumerate(groups):
        own = {name: value for name, value in options[index].items() if name != "params"}
        lost = [name for name, value in own.items() if not is_plain(value)]
        notes += [
            f"not copied: {name} of param group {index}, which is neither a number nor text"
            for name in lost
        ]
        param_groups.append(
            {"params": list(shapes), **{k: plain(v) for k, v in own.items() if k not in lost}}
        )
    tensors = tuple(v for own in state.values() for v in own.values() if isinstance(v, TensorEntry))
    return Section(
        "optimizer", "optimizer", tensors, mapping={"state": state, "param_groups": param_groups}
    )


def _copy(value: Any, param: str, name: str) -> Any:
    return (
        replace(in_own_storage(value), key=f"state.{param}.{name}")
        if isinstance(value, TensorEntry)
        else value
    )
