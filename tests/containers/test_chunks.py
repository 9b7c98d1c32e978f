"""Chunks of tensors: any partition assembles to the tensor, and anything else is refused."""

from __future__ import annotations

from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool import CkptError
from ckpttool.containers import chunks as module
from ckpttool.containers.chunks import Chunk, cover_problem
from ckpttool.formats.dcp import tensor_data
from ckpttool.formats.dcp_metadata import FileRange, TensorItem
from files import content

Box = tuple[tuple[int, ...], tuple[int, ...]]


@st.composite
def partitions(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """Draw a shape and boxes that partition it along every dimension, possibly differently in each
    half.
    """
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    boxes: list[Box] = [(tuple(0 for _ in shape), shape)]
    for _ in range(draw(st.integers(0, 6))):
        index = draw(st.integers(0, len(boxes) - 1))
        offsets, sizes = boxes[index]
        dim = draw(st.integers(0, len(shape) - 1))
        if sizes[dim] > 1:
            at = draw(st.integers(1, sizes[dim] - 1))
            first = (*sizes[:dim], at, *sizes[dim + 1 :])
            second = (*sizes[:dim], sizes[dim] - at, *sizes[dim + 1 :])
            behind = (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :])
            boxes[index : index + 1] = [(offsets, first), (behind, second)]
    return shape, draw(st.permutations(boxes))


def saved(
    folder: Path, tensor: torch.Tensor, boxes: list[Box], transposed: bool = False
) -> TensorItem:
    chunks = []
    with open(folder / "data", "wb") as file:
        for offsets, sizes in boxes:
            part = tensor[tuple(slice(at, at + size) for at, size in zip(offsets, sizes))].clone()
            if transposed and part.dim() > 1:
                part = part.transpose(0, 1).contiguous().transpose(0, 1)
            start = file.tell()
            torch.save(part, file)
            chunks.append((Chunk(offsets, sizes), FileRange("data", start, file.tell() - start)))
    return TensorItem(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tuple(chunks))


def data(folder: Path, item: TensorItem) -> bytes:
    return b"".join(content(tensor_data(str(folder), "w", item)))


def problem(shape: tuple[int, ...], boxes: list[Box]) -> str | None:
    return cover_problem(shape, [Chunk(*box) for box in boxes])


@settings(max_examples=60)
@given(partitions(), st.booleans(), st.sampled_from([1, 40, 1 << 24]))
def test_any_partition_assembles_to_the_tensor(
    tmp_path_factory: pytest.TempPathFactory,
    cut: tuple[tuple[int, ...], list[Box]],
    transposed: bool,
    slab: int,
) -> None:
    shape, boxes = cut
    assert problem(shape, boxes) is None
    tensor = torch.arange(prod(shape), dtype=torch.int32).reshape(shape)
    folder = tmp_path_factory.mktemp("chunks")
    item = saved(folder, tensor, boxes, transposed)
    before, module.SLAB = module.SLAB, slab
    try:
        assert data(folder, item) == tensor.numpy().tobytes()
    finally:
        module.SLAB = before


@given(st.lists(st.tuples(*[st.integers(0, 3)] * 4), max_size=6))
def test_a_cover_is_accepted_if_it_holds_every_element_once(drawn: list[Any]) -> None:
    shape = (3, 3)
    boxes: list[Box] = [((a, b), (h, w)) for a, b, h, w in drawn]
    counts = dict.fromkeys(product(range(3), range(3)), 0)
    inside = all(at + size <= 3 for offsets, sizes in boxes for at, size in zip(offsets, sizes))
    for (top, left), (height, width) in boxes:
        for row, column in product(range(top, top + height), range(left, left + width)):
            counts[row, column] = counts.get((row, column), 0) + 1
    exact = inside and set(counts.values()) == {1}
    assert (problem(shape, boxes) is None) == exact


@settings(max_examples=150)
@given(
    partitions(),
    st.integers(0, 9),
    st.integers(0, 2),
    st.sampled_from([0, 0, 1]),
    st.integers(-2, 2),
)
def test_a_cover_with_one_changed_box_is_refused(
    cut: tuple[tuple[int, ...], list[Box]], which: int, dim: int, of: int, by: int
) -> None:
    """A moved box overlaps another one or is outside; a resized box changes the number of
    elements.
    """
    shape, boxes = cut
    which, dim = which % len(boxes), dim % len(shape)
    changed = [list(part) for part in boxes[which]]
    changed[of][dim] += by
    if changed[of][dim] < 0:
        return
    boxes[which] = tuple(changed[0]), tuple(changed[1])
    counts = dict.fromkeys(product(*map(range, shape)), 0)
    for offsets, sizes in boxes:
        for index in product(*(range(at, at + size) for at, size in zip(offsets, sizes))):
            counts[index] = counts.get(index, 0) + 1
    inside = all(at + size <= extent for box in boxes for at, size, extent in zip(*box, shape))
    refused = problem(shape, boxes)
    if not inside:
        assert "is not inside" in str(refused)
    elif sum(counts.values()) != prod(shape):
        assert f"its chunks hold {sum(counts.values()):,} elements" in str(refused)
    else:
        assert refused == (None if set(counts.values()) == {1} else "two of its chunks overlap")


@pytest.mark.parametrize(
    "boxes", [[((0,), (4,))], [((0, 0, 0), (4, 1, 1))], [((0, 0), (4,))], [((), ())]]
)
def test_a_box_with_another_number_of_dimensions_is_refused(boxes: list[Box]) -> None:
    assert "is not inside [4, 1]" in str(problem((4, 1), boxes))


def test_a_chunk_of_another_dtype_or_shape_is_refused(tmp_path: Path) -> None:
    item = saved(tmp_path, torch.ones(4), [((0,), (4,))])
    ((_, place),) = item.chunks
    for wrong in (
        TensorItem("int32", (4,), item.chunks),
        TensorItem("float32", (4,), ((Chunk((0,), (5,)), place),)),
    ):
        with pytest.raises(CkptError, match=r"strided float32 \[4\] instead of a chunk of w"):
            data(tmp_path, wrong)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": torch.ones(2), "b": torch.ones(2)}, "not one tensor instead of a chunk of w"),
        (torch.ones(2).to_sparse(), r"sparse_coo float32 \[2\] instead of"),
        (None, "data"),
    ],
)
def test_a_chunk_that_is_not_a_dense_tensor_is_refused(
    tmp_path: Path, value: Any, message: str
) -> None:
    if value is None:
        (tmp_path / "data").write_bytes(b"junk" * 100)
    else:
        torch.save(value, tmp_path / "data")
    place = FileRange("data", 0, (tmp_path / "data").stat().st_size)
    with pytest.raises(CkptError, match=message):
        data(tmp_path, TensorItem("float32", (2,), ((Chunk((0,), (2,)), place),)))


def test_empty_chunks_are_not_read(tmp_path: Path) -> None:
    assert (
        data(
            tmp_path,
            TensorItem("float32", (0, 4), ((Chunk((0, 0), (0, 4)), FileRange("gone", 0, 9)),)),
        )
        == b""
    )
