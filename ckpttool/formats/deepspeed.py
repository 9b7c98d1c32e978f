"""Read a DeepSpeed checkpoint (ZeRO or universal) from the files of all ranks as an ordinary
one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from math import prod
from operator import itemgetter
from reprlib import repr as brief
from shlex import quote
from typing import Any

from ckpttool.containers.nodes import pairs_of
from ckpttool.containers.pickle_read import Call
from ckpttool.containers.tensors import MOST, Storages, entry_of, is_tensor, malformed, sizes_of
from ckpttool.containers.tree import extra_of
from ckpttool.containers.zip_read import read_archive
from ckpttool.core.checkpoint import (
    AnyEntry,
    Checkpoint,
    Entries,
    ExtraEntry,
    Part,
    Section,
    TensorEntry,
    in_row_major,
)
from ckpttool.core.errors import CkptError, Problem, same_problem
from ckpttool.core.strides import Shape, contiguous_stride
from ckpttool.core.tables import present
from ckpttool.core.text import shell, some
from ckpttool.core.values import dataclass, many_objects, same_plain
from ckpttool.evaluate.chunks import across, concatenated, in_own_storage
from ckpttool.evaluate.compare import same_values
from ckpttool.formats import torch_zip
from ckpttool.formats.registry import recognize
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
class RankFile:
    """One file: the items of its pickled dict, and the storages of its tensors."""

    path: str
    nbytes: int
    items: Mapping[Any, Any]
    storages: Storages

    def malformed(self, text: str) -> CkptError:
        return malformed(f"{self.path}: {text}")

    def mapping(self, node: Any, title: str) -> dict[Any, Any]:
        """Return the dict of a node, empty for None. Raises `CkptError`, with the node's `title`,
        for anything else.
        """
        pairs = {} if node is None else pairs_of(node)
        if pairs is None:
            raise self.malformed(f"{title} is not a dict")
        return pairs

    def sequence(self, node: Any, title: str) -> list[Any]:
        """Return the list of a node, empty for None. Raises `CkptError`, with the node's `title`,
        for anything else.
        """
        if node is not None and type(node) not in (list, tuple):
            raise self.malformed(f"{title} is not a list")
        return list(node or ())

    def shape(self, node: Any, title: str) -> Shape:
        """Return the sizes of a node. Raises `CkptError`, with the node's `title`, if it has
        none.
        """
        try:
            return sizes_of(node)
        except CkptError as error:
            reason = error.message.removeprefix(malformed("").message)
            raise self.malformed(f"{title}: {reason}") from None

    def plain(self, node: Any, levels: int = _LEVELS) -> Any:
        """Return a number, a text or a list of these; the value of an enum; None for other nodes
        and for deeper lists.

        Raises `CkptError` if the file says far more such values than it has bytes.
        """
        self._count(1)
        if type(node) is int and abs(node) >= MOST:
            return None
        if type(node) in (bool, int, float, str, type(None)):
            return node
        if not levels:
            return None
        if type(node) in (list, tuple):
            return type(node)(self.plain(item, levels - 1) for item in node)
        if type(node) is Call and len(node.args) == 1:  # as enums are pickled
            return self.plain(node.args[0], levels - 1)
        return None

    def is_plain(self, node: Any, levels: int = _LEVELS) -> bool:
        """Return True if `plain` returns the value unchanged."""
        if levels and type(node) in (list, tuple):
            self._count(1)
            return all(self.is_plain(item, levels - 1) for item in node)
        return node is None or (type(node) is not Call and self.plain(node, levels) is not None)

    def _count(self, nodes: int) -> None:
        """Count nodes that are looked at: a small pickle can put one list at any number of
        places.
        """
        try:
            self.storages.look(nodes)
        except CkptError:
            raise self.malformed("its lists share too many parts") from None

    def state(self) -> dict[Any, Any]:
        return self.mapping(self.items.get("optimizer_state_dict"), "optimizer_state_dict")

    def entries(self, key: str) -> dict[str, AnyEntry]:
        entries: dict[str, AnyEntry] = {}
        for name, node in self.mapping(self.items.get(key), key).items():
            entry_from = entry_of if is_tensor(node) else extra_of
            entries[str(name)] = entry_from(str(name), node, self.storages)
        return entries

    def tensors(self, key: str) -> dict[str, TensorEntry]:
        return _tensors_of(self.entries(key))

    def flat(self, key: str, node: Any) -> TensorEntry:
        """Return the entry of a contiguous tensor. Raises `CkptError` for any other node."""
        entry = entry_of(key, node, self.storages) if is_tensor(node) else None
        if entry is None or entry.storage is None or not entry.is_contiguous:
            raise self.malformed(f"{key} is not a flat tensor")
        return entry


@dataclass(frozen=True, slots=True, eq=False)
class RankFiles:
    """The files of all ranks in order: of the model one, or with ZeRO-3 one for each rank.

    `universal` is the folder of the parameters of a universal checkpoint, which has one optimizer
    file for all ranks.
    """

    stage: int
    models: tuple[RankFile, ...]
    optimizers: tuple[RankFile, ...]
    universal: str | None = None


def _tensors_of(entries: Entries) -> dict[str, TensorEntry]:
    return {key: entry for key, entry in entries.items() if isinstance(entry, TensorEntry)}


def read_files(folder: str) -> RankFiles:
    """Read the files in `folder`. Raises `CkptError`, all problems at once, if one is missing or of
    another run.
    """
    names = [name for name in names_in(folder) if is_file(join(folder, name))]
    optimizers, models = _numbered(names, _OPTIMIZER), _numbered(names, _MODEL)
    universal = join(folder, UNIVERSAL)
    split = [name for name in names if _EXPERTS.fullmatch(name)]
    split += [name for name, (_, part) in [*models.items(), *optimizers.items()] if part]
    if split:
        hint = _to_universal(folder)
        if is_dir(universal):
            hint = f'{_TAKE_OUT}: python -c "{_WEIGHTS}" {quote(universal)} OUT.pt'
        raise CkptError(
            f"{folder} is a DeepSpeed checkpoint of a model that is split by layers, by experts or"
            " within tensors",
            hint=hint,
            problems=same_problem("belongs to another model part", split),
        )
    model_files = tuple(read_file(join(folder, name)) for name in models)
    if models and not optimizers and is_dir(universal):
        rest = read_file(join(universal, UNIVERSAL_REST))
        rest = replace(rest, items={"optimizer_state_dict": dict(rest.items)})
        files = RankFiles(_zero_stage(rest), model_files, (rest,), universal)
    elif not optimizers or not models:
        missing = "model's own file (*_model_states.pt)"
        if not optimizers:
            missing = "partitions of the weights (*_optim_states.pt)"
        raise CkptError(f"{folder} is a DeepSpeed checkpoint without the {missing}", hint=COPY)
    else:
        optimizer_files = tuple(read_file(join(folder, name)) for name in optimizers)
        files = RankFiles(_zero_stage(optimizer_files[0]), model_files, optimizer_files)
    count = _partition_count(files.optimizers[0])
    problems: list[Problem] = []
    if files.universal is None:
        problems += _rank_problems("optimizer", optimizers, count)
    if files.stage == 3 or len(models) > 1:
        problems += _rank_problems("model", models, count)
    of_run = ("zero_stage", "partition_count", "ds_version")
    states = [file.state() for file in files.optimizers]
    problems += _differences(files.optimizers, states, of_run)
    of_step = ("global_steps", "dp_world_size", "ds_version")
    problems += _differences(files.models, [file.items for file in files.models], of_step)
    if problems:
        raise CkptError(
            f"{folder} does not hold the files of all ranks of one step",
            hint=COPY,
            problems=problems,
        )
    return files


def _numbered(names: Sequence[str], kind: re.Pattern[str]) -> dict[str, tuple[int, int]]:
    """Return name -> (rank, model part) of the files of a kind, in order."""
    numbers: dict[str, tuple[int, int]] = {}
    for name in names:
        match = kind.fullmatch(name)
        if match is not None:
            rank, part = match["rank"] or 0, match["part"]
            numbers[name] = int(rank), int(part)
    return dict(sorted(numbers.items(), key=itemgetter(1)))


def _rank_problems(what: str, numbers: Mapping[str, tuple[int, int]], count: int) -> list[Problem]:
    """Return the ranks of the run that have no file or several, and files of other ranks."""
    files_of = Counter(rank for rank, _ in numbers.values())
    missing = (rank for rank in range(count) if rank not in files_of)
    text = f"no file of this rank's {what} states"
    problems = [Problem(text, f"rank {rank}") for rank in islice(missing, _MOST_MISSING)]
    for rank, files in files_of.items():
        if files > 1:
            problems.append(Problem("two files are of this rank", f"rank {rank}"))
        if rank >= count:
            problems.append(Problem(f"the run had {count} ranks", f"rank {rank}"))
    return problems


def _differences(
    files: Sequence[RankFile], dicts: Sequence[Mapping[Any, Any]], keys: Sequence[str]
) -> list[Problem]:
    """Return the values that should be equal in the `dicts` of all files, and are not."""
    problems = []
    for key in keys:
        values = [file.plain(items.get(key)) for file, items in zip(files, dicts)]
        for file, value in zip(files, values):
            if not same_plain(value, values[0]):
                text = f"{key} is {brief(value)}, in {files[0].path} {brief(values[0])}"
                problems.append(Problem(text, file.path))
    return problems


def read_file(path: str) -> RankFile:
    """Read a file that holds a dict, or one tensor, which becomes the item ``param``. Raises
    `CkptError` for others.
    """
    if recognize(path).format.name != "torch_zip":
        raise CkptError(f"{path} was not written by torch.save", hint=COPY)
    archive = read_archive(path)
    _, pickle, storages = torch_zip.open_tree(archive)
    items = {"param": pickle.root} if is_tensor(pickle.root) else pairs_of(pickle.root)
    if items is None:
        raise malformed(f"{path} does not hold a dict")
    return RankFile(path, archive.length, items, storages)


_TAKE_OUT = (
    "this command writes the weights alone: fp32 for trained weights, the dtype of the model for"
    " second names of shared weights"
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


def _zero_stage(file: RankFile) -> int:
    """Return 1, 2 or 3, as the optimizer's file says. Raises `CkptError` for anything else."""
    state = file.state()
    stage = file.plain(state.get("zero_stage"))
    if stage not in (1, 2, 3):
        said = f"its ZeRO stage is {stage!r}" if "zero_stage" in state else "it has no ZeRO stage"
        keys = some([key for key in state if type(key) is str], 8) or "nothing"
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


def _is_positive(count: Any) -> bool:
    return type(count) is int and count >= 1


def _partition_count(file: RankFile) -> int:
    value = file.plain(file.state().get("partition_count"))
    counts = value if type(value) is list else [value]
    if not counts or not all(map(_is_positive, counts)):
        raise file.malformed(f"{brief(value)} partitions")
    if len(set(counts)) > 1:
        raise CkptError(
            f"{file.path}: its param groups are partitioned over {counts} ranks, as for experts",
            hint=_to_universal(parent(file.path)),
        )
    return int(counts[0])


Shapes = Mapping[str, Shape]

# Keys of the model's file that describe the run and its partitions. Without them, the tensors lose
# nothing.
_RUN_KEYS = {
    *("module", "buffer_names", "optimizer", "shared_params"),
    *("param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
    *("ds_config", "ds_version", "dp_world_size", "mp_world_size"),
    *("checkpoint_parallel_dimensions", "data_sampler", "random_ltd"),
}


@many_objects()
def read(folder: str) -> Checkpoint:
    """Read the index of one step's folder. Raises `CkptError` if files are missing or do not
    fit.
    """
    files = read_files(folder)
    first = files.models[0]
    nodes = first.sequence(first.items.get("param_shapes"), "param_shapes")
    groups = tuple(_shapes(first, node, "param_shapes") for node in nodes)
    notes: list[str] = []
    rank_files: list[RankFile] = [*files.models, *files.optimizers]
    if files.universal is None:
        layout, weights = _partitions(files, groups)
        title = f"ZeRO-{files.stage} of {len(files.optimizers)} ranks, gathered"
    else:
        states, parameter_files = _read_parameters(files, files.universal, groups, notes)
        weights = {name: replace(state.pop("fp32"), key=name) for name, state in states.items()}
        rank_files += parameter_files
        title = f"a universal checkpoint of ZeRO-{files.stage}"
    model = Section("model", "state_dict", *_model(files, weights, notes))
    if files.universal is None:
        optimizer = _optimizer(files, layout, notes)
    else:
        optimizer = _universal_optimizer(files.optimizers[0], groups, states, notes)
    lost = []
    for key, value in first.items.items():
        if key not in _RUN_KEYS and value is not None:
            lost.append(str(key))
    if lost:
        notes.append(f"not copied: {', '.join(lost)} of {first.path}")
    return Checkpoint(
        folder,
        "deepspeed",
        sum(file.nbytes for file in rank_files),
        (model,) if optimizer is None else (model, optimizer),
        notes=(title, *notes),
    )


def _shapes(file: RankFile, group: Any, title: str) -> Shapes:
    """Return the shapes of a param group's parameters."""
    shapes = {}
    for key, node in file.mapping(group, f"an item of {title}").items():
        name = str(key)
        shapes[name] = file.shape(node, f"{title}: {name}")
    return shapes


# Partitions


@dataclass(frozen=True, slots=True)
class _FlatLayout:
    """The positions of parameters in the flat tensors of the ranks.

    `groups` are the shapes of the parameters of each param group in order. `gaps` is the padding
    after each parameter, in elements (ZeRO-1 and -2). `sizes` are the numbers of elements of each
    rank's flat tensors: one for each param group, or with ZeRO-3 for each part of one. `path` is
    the file of rank 0.
    """

    path: str
    stage: int
    groups: tuple[Shapes, ...]
    gaps: tuple[tuple[int, ...], ...]
    sizes: tuple[Shape, ...]

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
        dtypes: set[str] = set()
        for tensors in flats:
            dtypes.update(tensor.dtype for tensor in tensors)
        if len(dtypes) > 1:
            raise CkptError(
                f"{self.path}: the ranks' partitions have several dtypes:"
                f" {', '.join(sorted(dtypes))}",
                hint=COPY,
            )
        dtype = dtypes.pop() if dtypes else "float32"
        gathered = {}
        for name, shape, parts in self._parts(flats):
            storage = concatenated(parts)
            gathered[name] = in_row_major(name, dtype, shape, storage)
            if storage.nbytes != gathered[name].nbytes:
                problem = Problem("the ranks hold too few elements", name)
                raise CkptError(
                    f"{self.path}: the ranks' partitions do not hold a parameter completely",
                    hint=COPY,
                    problems=[problem],
                )
        return gathered

    def _parts(
        self, flats: Sequence[Sequence[TensorEntry]]
    ) -> Iterator[tuple[str, tuple[int, ...], list[Part]]]:
        """Yield the name, shape and parts of each parameter.

        ZeRO-1 and -2 cut a whole param group, ZeRO-3 each parameter into equal parts, the last one
        padded::

            ZeRO-2, 2 ranks    a a a b | b b b c      a flat tensor of each rank
            ZeRO-3, 2 ranks    a a b b c | a - b b -
        """
        if self.stage < 3:
            for index, name, shape, at in self.places():
                yield name, shape, across([tensors[index] for tensors in flats], at, prod(shape))
            return
        at = 0
        for shapes in self.groups:
            for name, shape in shapes.items():
                part, left = -(-prod(shape) // len(flats)), prod(shape)
                parts: list[Part] = []
                for tensors in flats:
                    parts += across(tensors, at, min(part, left))
                    left -= min(part, left)
                at += part
                yield name, shape, parts


def _partitions(
    files: RankFiles, groups: tuple[Shapes, ...]
) -> tuple[_FlatLayout, dict[str, TensorEntry]]:
    """Return the layout and the fp32 weights. Raises `CkptError` if shapes and partitions do not
    fit.

    Every element of the partitions must be a parameter's or padding.
    """
    states = [file.state() for file in files.optimizers]
    key = "fp32_flat_groups" if files.stage == 3 else "single_partition_of_fp32_groups"
    flats = []
    sizes = []
    for file, state in zip(files.optimizers, states):
        tensors = [file.flat(key, node) for node in file.sequence(state.get(key), key)]
        flats.append(tensors)
        sizes.append(tuple(tensor.numel for tensor in tensors))
    gaps = _gaps(files.optimizers[0], groups)
    layout = _FlatLayout(files.optimizers[0].path, files.stage, groups, gaps, tuple(sizes))
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


_PADDINGS, _SLICES = "param_alignment_paddings", "param_slice_mappings"


def _gaps(file: RankFile, groups: Sequence[Shapes]) -> tuple[Shape, ...]:
    """Return the padding after each parameter of each param group; none is saved without
    padding.
    """
    paddings = file.sequence(file.state().get(_PADDINGS), _PADDINGS)
    if not paddings:
        return tuple((0,) * len(shapes) for shapes in groups)
    gaps = []
    for padding in paddings:
        gaps.append(tuple(file.plain(file.sequence(padding, f"an item of {_PADDINGS}"))))
    return tuple(gaps)


def _layout_problems(layout: _FlatLayout) -> list[Problem]:
    groups, gaps, sizes = layout.groups, layout.gaps, layout.sizes
    if not groups:
        return [Problem("no shapes of parameters", "param_shapes")]
    if not _have_gaps(groups, gaps):
        return [Problem("not one for each parameter", _PADDINGS)]
    counts = [len(numels) for numels in sizes]
    counts_differ = len(set(counts)) > 1
    if counts_differ or (layout.stage < 3 and counts[0] != len(groups)):
        return [Problem(f"{len(groups)} param groups, the ranks have {counts}", "param_shapes")]
    if layout.stage == 3:
        return _stage_3_problems(groups, sizes)
    problems = []
    for index, shapes in enumerate(groups):
        # The end of a group is padded to a multiple of twice the number of ranks, and not always
        # saved.
        paddings = gaps[index]
        expected = sum(map(prod, shapes.values())) + sum(paddings)
        least = expected - sum(paddings[-1:])
        most = expected + 2 * len(sizes) - 1
        actual = sum(numels[index] for numels in sizes)
        if not least <= actual <= most:
            text = f"the ranks hold {actual:,} elements, its parameters are {expected:,}"
            problems.append(Problem(text, f"param group {index}"))
    return problems


def _have_gaps(groups: Sequence[Shapes], gaps: Sequence[Shape]) -> bool:
    """Return whether each parameter of each group has a padding."""
    if [len(paddings) for paddings in gaps] != [len(shapes) for shapes in groups]:
        return False
    for padding in chain(*gaps):
        if type(padding) is not int or padding < 0:
            return False
    return True


def _stage_3_problems(groups: Sequence[Shapes], sizes: Sequence[Shape]) -> list[Problem]:
    expected = 0
    for shapes in groups:
        for shape in shapes.values():
            expected += -(-prod(shape) // len(sizes))
    problems = []
    for rank, numels in enumerate(sizes):
        if sum(numels) != expected:
            text = f"holds {sum(numels):,} elements, its parts of the parameters are {expected:,}"
            problems.append(Problem(text, f"rank {rank}"))
    return problems


def _slice_problems(
    layout: _FlatLayout, files: RankFiles, states: Sequence[Mapping[Any, Any]]
) -> list[Problem]:
    """Compare the layout with ``param_slice_mappings``, which gives each rank's slice of each
    parameter.
    """
    problems: list[Problem] = []
    places: dict[tuple[int, str], tuple[int, int]] = {}
    for index, name, shape, at in layout.places():
        places[index, name] = at, at + prod(shape)
    for index in range(len(layout.groups)):
        begin = 0  # of the rank's part of the param group
        for file, state, numels in zip(files.optimizers, states, layout.sizes):
            end = begin + numels[index]
            slices = file.sequence(state.get(_SLICES), _SLICES)[index : index + 1]
            named = file.mapping(slices[0], f"an item of {_SLICES}") if slices else {}
            for name, node in named.items():
                first, last = places.get((index, str(name)), (-1, -1))
                expected = max(first, begin) - begin, min(last, end) - begin
                if _slice_of(node) != expected:
                    text = f"{file.path} gives another place for its part"
                    problems.append(Problem(text, str(name)))
            begin = end
    return problems


def _slice_of(node: Any) -> tuple[int, int] | None:
    """Return the begin and the end in DeepSpeed's ``fragment_address(numel, start)``; None for
    another node.
    """
    fragment = node.state if type(getattr(node, "state", None)) is dict else {}
    numel, start = fragment.get("numel"), fragment.get("start")
    if type(numel) is not int or type(start) is not int:
        return None
    return start, start + numel


# Universal checkpoints


def _read_parameters(
    files: RankFiles, root: str, groups: Sequence[Shapes], notes: list[str]
) -> tuple[dict[str, dict[str, TensorEntry]], list[RankFile]]:
    """Return parameter -> name of a file -> its tensor, and the files. `notes` get what is left
    out.

    Raises `CkptError`, all problems at once, if a parameter is missing or does not fit.
    """
    rank_files: list[RankFile] = []
    problems: list[Problem] = []
    states: dict[str, dict[str, TensorEntry]] = {}
    for param, shape in chain(*(group.items() for group in groups)):
        state = states[param] = {}
        folder = safe_path(root, param)
        if folder is None or not is_dir(folder):
            continue
        for name in names_in(folder):
            kind = name.removesuffix(".pt")
            file = read_file(join(folder, name))
            rank_files.append(file)
            entry = file.flat(f"state.{param}.{kind}", file.items.get("param"))
            if entry.shape in (shape, (prod(shape),)):
                entry = replace(entry, shape=shape, stride=contiguous_stride(shape), payload=None)
            elif entry.shape != () or kind == "fp32":  # one value, such as a step, stays as it is
                text = f"{name} has the shape {list(entry.shape)}, the parameter {list(shape)}"
                problems.append(Problem(text, param))
            state[kind] = entry
    for param, state in states.items():
        if "fp32" not in state:
            problems.append(Problem("no file fp32.pt of it", param))
    if problems or not states:
        raise CkptError(
            f"{root} does not hold every parameter completely", hint=COPY, problems=problems
        )
    expected = {*states, UNIVERSAL_REST, *files.models[0].tensors("module")}
    for name in names_in(root):
        if name not in expected:
            notes.append(f"not copied: {join(root, name)} belongs to no parameter")
    return states, rank_files


def _universal_optimizer(
    rest: RankFile,
    groups: Sequence[Shapes],
    states: Mapping[str, Mapping[str, TensorEntry]],
    notes: list[str],
) -> Section | None:
    """Return the optimizer's section; None, and a note, if it does not have the model's param
    groups.
    """
    base = rest.state()
    nodes = rest.sequence(base.get("param_groups"), "param_groups")
    options = present(map(pairs_of, nodes))
    if not len(groups) == len(nodes) == len(options):
        notes.append(
            f"the optimizer is not read: {len(nodes)} param groups in {rest.path},"
            f" {len(groups)} of shapes"
        )
        return None
    state: dict[str, dict[str, Any]] = {name: dict(values) for name, values in states.items()}
    # of ZeRO-3: the state of rank 0, with its step
    inner = rest.mapping(base.get("optimizer_state_dict"), "optimizer_state_dict")
    rank_0 = rest.mapping(inner.get("state"), "state")
    for index, shapes in enumerate(groups):
        for key, node in rest.mapping(rank_0.get(index), f"state {index}").items():
            name = str(key)
            value = rest.flat(name, node) if is_tensor(node) else rest.plain(node)
            if not isinstance(value, TensorEntry) or value.numel == 1:
                for param in shapes:
                    state[param].setdefault(name, _copy(value, param, name))
            elif not all(name in state[param] for param in shapes):
                notes.append(f"not copied: {name} of {rest.path}, which belongs to one rank alone")
    return _optimizer_section(rest, groups, options, state, notes)


# Sections


def _model(
    files: RankFiles, weights: Mapping[str, TensorEntry], notes: list[str]
) -> tuple[tuple[TensorEntry, ...], tuple[ExtraEntry, ...]]:
    """Return the tensors in the module's order (weights, frozen parameters, buffers, shared names),
    and the objects.
    """
    first = files.models[0]
    entries = first.entries("module")
    module = _tensors_of(entries)
    gathered = {**weights, **_frozen(files)}
    saved_whole = _saved_whole(files, module, gathered)
    tensors = {**saved_whole, **gathered}
    shared_params = first.mapping(first.items.get("shared_params"), "shared_params")
    for key, other in shared_params.items():
        name = str(key)
        shared = tensors.get(other) if type(other) is str else None
        tensors.pop(name, None)
        if shared is not None:
            tensors[name] = shared.under(name)
    unknown = [name for name in module if name not in tensors]
    if unknown:
        text = "neither a parameter, a buffer nor shared"
        raise CkptError(
            f"{first.path}: no partition holds the values of some entries of the module",
            hint=COPY,
            problems=same_problem(text, unknown),
        )
    objects = {name: entry for name, entry in entries.items() if isinstance(entry, ExtraEntry)}
    expected: dict[str, AnyEntry] = {**saved_whole, **objects}
    for file in files.models[1:]:
        others = file.entries("module")
        for name, entry in expected.items():
            if name not in others or not same_values(others[name], entry):
                notes.append(f"{name} differs between the ranks: rank 0's is used")
    in_order = dict.fromkeys((*module, *tensors))
    return tuple(tensors[name] for name in in_order), tuple(objects.values())


def _saved_whole(
    files: RankFiles, module: Mapping[str, TensorEntry], gathered: Mapping[str, TensorEntry]
) -> dict[str, TensorEntry]:
    """Return the tensors of the module that rank 0 has completely: buffers, and before ZeRO-3
    others.
    """
    names = list(module)
    if files.stage >= 3:  # ZeRO-3 leaves empty tensors in place of partitioned parameters
        names = [name for name, entry in module.items() if entry.numel]
    first = files.models[0]
    for name in first.sequence(first.items.get("buffer_names"), "buffer_names"):
        if type(name) is str and name in module:
            names.append(name)
    return {name: module[name] for name in names if name not in gathered}


def _frozen(files: RankFiles) -> dict[str, TensorEntry]:
    """Return the frozen parameters: complete in the model's file, or with ZeRO-3 in equal parts."""
    first = files.models[0]
    if files.stage < 3:
        return first.tensors("frozen_param_fragments")
    fragments = []
    for file in files.models:
        fragment_nodes = file.items.get("frozen_param_fragments")
        nodes = file.mapping(fragment_nodes, "frozen_param_fragments")
        fragments.append({str(name): node for name, node in nodes.items()})
    gathered: dict[str, TensorEntry] = {}
    shapes = _shapes(first, first.items.get("frozen_param_shapes"), "frozen_param_shapes")
    for name, shape in shapes.items():
        missing = sum(name not in nodes for nodes in fragments)
        if missing:
            raise CkptError(
                f"{first.path}: parts of frozen parameters are missing",
                hint=COPY,
                problems=[Problem("a rank has no part of it", name)] * missing,
            )
        layout = _FlatLayout(first.path, 3, ({name: shape},), (), ())
        flats = []
        for file, nodes in zip(files.models, fragments):
            flats.append([file.flat(name, nodes[name])])
        gathered |= layout.gather(flats)
    return gathered


def _optimizer(files: RankFiles, layout: _FlatLayout, notes: list[str]) -> Section | None:
    """Return the optimizer's state by the names of its parameters; None, and a note, if its layout
    is not known.
    """
    key = "optimizer_state_dict" if files.stage == 3 else "base_optimizer_state"
    bases: list[Any] = []
    for file in files.optimizers:
        base = file.state().get(key)
        if not _has_current_layout(base, len(layout.groups)):
            notes.append(
                f"the optimizer is not read: {key} of {file.path} does not have"
                " DeepSpeed's current layout"
            )
            return None
        bases.append(base)
    param_groups = [base["param_groups"] for base in bases]
    problems = _option_problems(param_groups, files.optimizers)
    ids = list(chain(*(group["params"] for group in param_groups[0])))
    by_rank = []  # the state of each flat parameter
    for file, base in zip(files.optimizers, bases):
        nodes_by_id = base["state"]
        by_rank.append([file.mapping(nodes_by_id.get(id_), f"state {id_}") for id_ in ids])
    keys = dict.fromkeys(chain(*chain(*by_rank)))
    state: dict[str, dict[str, Any]] = {param: {} for param in chain(*layout.groups)}
    for name, count in Counter(map(str, keys)).items():
        if count > 1:
            problems.append(Problem("two keys of the state are the same as text", name))
    for slot in keys:
        name = str(slot)
        slot_nodes = []
        for flat_states in by_rank:
            slot_nodes.append([values.get(slot) for values in flat_states])
        values, problem = _gathered(name, slot_nodes, files.optimizers, layout)
        problems += [] if problem is None else [problem]
        for param, value in values.items():
            state[param][name] = value
    if problems:
        raise CkptError(
            f"{files.optimizers[0].path}: the ranks' optimizers do not fit",
            hint=COPY,
            problems=problems,
        )
    first = files.optimizers[0]
    return _optimizer_section(first, layout.groups, param_groups[0], state, notes)


def _has_current_layout(base: Any, groups: int) -> bool:
    """Return True if this is the state of an optimizer with as many param groups, of flat
    parameters with numbers.
    """
    if type(base) is not dict or type(base.get("state")) is not dict:
        return False
    param_groups = base.get("param_groups")
    if type(param_groups) is not list or len(param_groups) != groups:
        return False
    for group in param_groups:
        ids = group.get("params") if type(group) is dict else None
        if type(ids) is not list or not all(type(param) is int for param in ids):
            return False
    return True


def _option_problems(
    param_groups: Sequence[Sequence[Mapping[str, Any]]], files: Sequence[RankFile]
) -> list[Problem]:
    """Compare the options of each param group between the ranks; `param_groups` has the options
    of each rank.
    """
    problems = []
    for by_rank in zip(*param_groups):
        for name in dict.fromkeys(chain(*by_rank)):
            values = []
            for file, options in zip(files, by_rank):
                values.append(file.plain(options.get(name)))
            for file, value in zip(files, values):
                if not same_plain(value, values[0]):
                    text = f"{name} is {brief(value)}, and {brief(values[0])} on rank 0"
                    problems.append(Problem(text, file.path))
    return problems


def _gathered(
    name: str,
    nodes: Sequence[Sequence[Any]],
    files: Sequence[RankFile],
    layout: _FlatLayout,
) -> tuple[dict[str, Any], Problem | None]:
    """Return parameter -> its value of the state `name`, from the flat tensors, or one value that
    all ranks have; and the problem if there is neither.
    """
    values: list[Any] = []  # of all ranks
    flats: list[list[TensorEntry]] = []
    for file, by_param in zip(files, nodes):
        flats_of_rank: list[TensorEntry] = []
        for node in by_param:
            if is_tensor(node):
                flat = file.flat(name, node)
                values.append(flat)
                flats_of_rank.append(flat)
            else:
                values.append(file.plain(node))
        flats.append(flats_of_rank)
    if _have_sizes(flats, layout):
        state = {}
        for param, entry in layout.gather(flats).items():
            state[param] = replace(entry, key=f"state.{param}.{name}")
        return state, None
    value = values[0]
    if not all(_is_same_number(value, other) for other in values):
        text = "has neither the shape of the partitions nor one value on all ranks"
        return {}, Problem(text, name)
    return {param: _copy(value, param, name) for param in chain(*layout.groups)}, None


def _have_sizes(flats: Sequence[Sequence[TensorEntry]], layout: _FlatLayout) -> bool:
    """Return True if the flat tensors of each rank have the sizes of the layout.

    The end of a param group of ZeRO-1 and -2 is padded. The weights are saved without this padding,
    the state of the last rank with it.
    """
    last = len(flats) - 1
    for rank, (tensors, sizes) in enumerate(zip(flats, layout.sizes)):
        if len(tensors) != len(sizes):
            return False
        most_padding = 2 * len(flats) - 1 if rank == last and layout.stage < 3 else 0
        for tensor, size in zip(tensors, sizes):
            if len(tensor.shape) != 1 or not size <= tensor.numel <= size + most_padding:
                return False
    return True


def _is_same_number(value: Any, other: Any) -> bool:
    """Return True for two equal numbers, or tensors of one equal element."""
    if isinstance(value, TensorEntry):
        return value.numel == 1 and isinstance(other, TensorEntry) and same_values(value, other)
    return type(other) in (int, float, bool) and same_plain(value, other)


def _optimizer_section(
    file: RankFile,
    groups: Sequence[Shapes],
    options: Sequence[Mapping[str, Any]],
    state: Mapping[str, Mapping[str, Any]],
    notes: list[str],
) -> Section:
    param_groups: list[dict[str, Any]] = []
    for index, shapes in enumerate(groups):
        group: dict[str, Any] = {"params": list(shapes)}
        for name, value in options[index].items():
            if name == "params":
                continue
            if file.is_plain(value):
                group[name] = file.plain(value)
            else:
                notes.append(
                    f"not copied: {name} of param group {index}, which is neither a number nor text"
                )
        param_groups.append(group)
    values = chain(*(slots.values() for slots in state.values()))
    tensors = tuple(value for value in values if isinstance(value, TensorEntry))
    return Section(
        "optimizer", "optimizer", tensors, mapping={"state": state, "param_groups": param_groups}
    )


def _copy(value: Any, param: str, name: str) -> Any:
    if not isinstance(value, TensorEntry):
        return value
    return replace(in_own_storage(value), key=f"state.{param}.{name}")
