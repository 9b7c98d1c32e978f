"""What torch keeps under one flat key of a folder, as values: a tensor in chunks, or any other object as bytes.

The classes that they stand for are in torch/distributed/checkpoint/metadata.py and filesystem.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Union

from ckpttool import dtypes
from ckpttool.values import dataclass

Path = tuple[Union[str, int], ...]
BoxOf = tuple[tuple[int, ...], tuple[int, ...]]  # corner and sizes, in elements


@dataclass(frozen=True, slots=True)
class Place:
    """Where the bytes of an item or chunk lie: `length` bytes of the file `name` in the folder, from `offset` on.

    `transforms` are the stream extensions (compression, encryption) that the bytes went through. `raw` bytes are the
    elements themselves, not a torch file with them in it; torch's own ``.metadata`` cannot say that.
    """

    name: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()
    raw: bool = False


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, its corner and sizes in elements, and where it lies."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class TensorItem:
    """A tensor in one or more chunks that cover it without overlapping.

    `more` are the properties that torch has added in later versions, kept as they are: since 2.15 its strides, or None.
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    more: tuple[tuple[int, ...] | None, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor, of all its chunks."""
        return prod(self.shape) * dtypes.itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class BytesItem:
    """Any other object, as torch.save wrote it."""

    place: Place


Item = Union[TensorItem, BytesItem]


@dataclass(frozen=True, slots=True)
class Metadata:
    """All items by flat key, and for each the way to it through the nested state dict that was saved."""

    items: Mapping[str, Item]
    paths: Mapping[str, Path]


def cover_problem(shape: tuple[int, ...], boxes: list[BoxOf]) -> str | None:
    """Why the boxes do not cover the tensor, each element once; None where they do."""
    for offsets, sizes in boxes:
        inside = len(offsets) == len(sizes) == len(shape)
        if not inside or any(at + size > whole for at, size, whole in zip(offsets, sizes, shape)):
            return f"a chunk at {list(offsets)} of {list(sizes)} elements is not inside {list(shape)}"
    boxes = [box for box in boxes if 0 not in box[1]]
    covered = sum(prod(sizes) for _, sizes in boxes)
    if covered != prod(shape):
        return f"its chunks hold {covered:,} elements, it has {prod(shape):,}"
    return "two of its chunks overlap" if _overlap(boxes, len(shape)) else None


def _overlap(boxes: list[BoxOf], dims: int) -> bool:
    """Whether two boxes share an element: swept along the dimension in which most of them differ."""
    if len(boxes) < 2:
        return False
    along = max(range(dims), key=lambda dim: len({offsets[dim] for offsets, _ in boxes}))
    active: list[BoxOf] = []
    for offsets, sizes in sorted(boxes, key=lambda box: box[0][along]):
        active = [other for other in active if other[0][along] + other[1][along] > offsets[along]]
        for start, extent in active:
            if all(a < s + e and s < a + b for a, b, s, e in zip(offsets, sizes, start, extent)):
                return True
        active.append((offsets, sizes))
    return False
