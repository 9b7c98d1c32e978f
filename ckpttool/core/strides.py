"""Shapes and strides of dense tensors, in elements."""

from __future__ import annotations

from collections.abc import Sequence

Shape = tuple[int, ...]


def contiguous_stride(shape: Shape) -> tuple[int, ...]:
    """Return row-major strides, in elements, as of a new tensor of this shape.

    Each call makes a new tuple: pickle would write a shared one as a reference.
    """
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def distance_to_last(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the elements from the first element of a tensor to its last one in the storage."""
    distance = 0
    for size, step in zip(shape, stride):
        distance += (size - 1) * step
    return distance
