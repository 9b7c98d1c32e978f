"""Chunks put in order: any cut of any tensor gives the tensor back, and what is no cut is refused."""

from __future__ import annotations

from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.core.errors import CkptError
from ckpttool.evaluate import chunks as in_boxes
from ckpttool.formats.dcp.chunks import tensor_data
from ckpttool.formats.dcp.metadata import Chunk, Place, TensorItem, cover_problem
from files import content

Box = tuple[tuple[int, ...], tuple[int, ...]]


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape, and boxes that cover it: cut along every dimension, one half perhaps along another line."""
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


def saved(folder: Path, whole: torch.Tensor, boxes: list[Box], transposed: bool = False) -> TensorItem:
    chunks = []
    with open(folder / "data", "wb") as file:
        for offsets, sizes in boxes:
            part = whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes))].clone()
            if transposed and part.dim() > 1:
                part = part.transpose(0, 1).contiguous().transpose(0, 1)
            start = file.tell()
            torch.save(part, file)
            chunks.append(Chunk(offsets, sizes, Place("data", start, file.tell() - start)))
    return TensorItem(str(whole.dtype).removeprefix("torch."), tuple(whole.shape), tuple(chunks))


def data(folder: Path, item: TensorItem) -> bytes:
    return b"".join(content(tensor_data(str(folder), "w", item)))


@settings(max_examples=60, deadline=None)
@given(cuts(), st.booleans(), st.sampled_from([1, 40, 1 << 24]))
def test_any_cut_gives_the_tensor_back(
    tmp_path_factory: pytest.TempPathFactory, cut: tuple[tuple[int, ...], list[Box]], transposed: bool, slab: int
) -> None:
    shape, boxes = cut
    assert cover_problem(shape, boxes) is None
    whole = torch.arange(prod(shape), dtype=torch.int32).reshape(shape)
    folder = tmp_path_factory.mktemp("chunks")
    item = saved(folder, whole, boxes, transposed)
    before, in_boxes.SLAB = in_boxes.SLAB, slab
    try:
        assert data(folder, item) == whole.numpy().tobytes()
    finally:
        in_boxes.SLAB = before


@given(st.lists(st.tuples(*[st.integers(0, 3)] * 4), max_size=6))
def test_a_cover_holds_every_element_once(drawn: list[Any]) -> None:
    shape = (3, 3)
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((a, b), (h, w)) for a, b, h, w in drawn]
    counts = dict.fromkeys(product(range(3), range(3)), 0)
    inside = all(at + size <= 3 for offsets, sizes in boxes for at, size in zip(offsets, sizes))
    for (top, left), (height, width) in boxes:
        for row, column in product(range(top, top + height), range(left, left + width)):
            counts[row, column] = counts.get((row, column), 0) + 1
    exact = inside and set(counts.values()) == {1}
    assert (cover_problem(shape, boxes) is None) == exact


@settings(max_examples=150, deadline=None)
@given(cut=cuts(), which=st.integers(0, 9), dim=st.integers(0, 2), of=st.sampled_from([0, 0, 1]), by=st.integers(-2, 2))
def test_a_cover_with_one_box_elsewhere_is_none(
    cut: tuple[tuple[int, ...], list[Box]], which: int, dim: int, of: int, by: int
) -> None:
    """Moved, it holds as many elements, some of them twice or outside; cut shorter or longer, fewer or more."""
    shape, boxes = cut
    which, dim = which % len(boxes), dim % len(shape)
    changed = [list(part) for part in boxes[which]]
    changed[of][dim] += by
    if changed[of][dim] < 0:
        return
    boxes[which] = tuple(changed[0]), tuple(changed[1])
    counts = dict.fromkeys(product(*map(range, shape)), 0)
    for offsets, sizes in boxes:
        for place in product(*(range(at, at + size) for at, size in zip(offsets, sizes))):
            counts[place] = counts.get(place, 0) + 1
    inside = all(at + size <= whole for box in boxes for at, size, whole in zip(*box, shape))
    found = cover_problem(shape, boxes)
    if not inside:
        assert "is not inside" in str(found)
    elif sum(counts.values()) != prod(shape):
        assert f"its chunks hold {sum(counts.values()):,} elements" in str(found)
    else:
        assert found == (None if set(counts.values()) == {1} else "two of its chunks overlap")


@pytest.mark.parametrize("boxes", [[((0,), (4,))], [((0, 0, 0), (4, 1, 1))], [((0, 0), (4,))], [((), ())]])
def test_a_box_of_another_rank_is_not_inside(boxes: list[Box]) -> None:
    assert "is not inside [4, 1]" in str(cover_problem((4, 1), boxes))


def test_a_chunk_that_is_another_tensor(tmp_path: Path) -> None:
    item = saved(tmp_path, torch.ones(4), [((0,), (4,))])
    for wrong in (
        TensorItem("int32", (4,), item.chunks),
        TensorItem("float32", (4,), (Chunk((0,), (5,), item.chunks[0].place),)),
    ):
        with pytest.raises(CkptError, match="lies"):
            data(tmp_path, wrong)


def test_a_chunk_that_is_no_tensor(tmp_path: Path) -> None:
    with open(tmp_path / "data", "wb") as file:
        torch.save({"a": torch.ones(2), "b": torch.ones(2)}, file)
        length = file.tell()
    place = Place("data", 0, length)
    with pytest.raises(CkptError, match="no tensor"):
        data(tmp_path, TensorItem("float32", (2,), (Chunk((0,), (2,), place),)))
    with open(tmp_path / "data", "wb") as file:
        torch.save(torch.ones(2).to_sparse(), file)
    place = Place("data", 0, (tmp_path / "data").stat().st_size)
    with pytest.raises(CkptError, match=r"float32 \[2\] where"):
        data(tmp_path, TensorItem("float32", (2,), (Chunk((0,), (2,), place),)))
    (tmp_path / "data").write_bytes(b"junk" * 100)
    with pytest.raises(CkptError):
        data(tmp_path, TensorItem("float32", (2,), (Chunk((0,), (2,), place),)))


def test_empty_chunks_are_not_looked_for(tmp_path: Path) -> None:
    assert data(tmp_path, TensorItem("float32", (0, 4), (Chunk((0, 0), (0, 4), Place("gone", 0, 9)),))) == b""
