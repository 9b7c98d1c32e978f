"""Where each parameter's elements lie in the flat partitions of the ranks.

ZeRO-1 and -2 lay the parameters of a param group end to end and cut that into one part a rank; ZeRO-3 cuts each
parameter into equal parts, the last one filled up, and lays a rank's parts end to end
(``deepspeed/utils/zero_to_fp32.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from ckpttool.checkpoint import Part, TensorEntry, in_row_major
from ckpttool.errors import CkptError, Problem
from ckpttool.evaluate.parts import across, concatenated
from ckpttool.formats.deepspeed.files import COPY, File, Files, mapping, plain, sequence, zero_stage
from ckpttool.formats.torch.tensors import sizes_of
from ckpttool.values import dataclass

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
