"""What is moved on the index is what torch computes, and what does not fit is left to torch."""

from __future__ import annotations

import pytest
import torch

from ckpttool.checkpoint import Span, TensorEntry
from ckpttool.evaluate import with_torch, without_torch
from ckpttool.evaluate.without_torch import ROW_MAJOR
from ckpttool.expression import Argument, Expression, Op, Ref
from ckpttool.operands.checkpoint import model_section, open_operand

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def have(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TensorEntry]:
    path = tmp_path_factory.mktemp("moved") / "in.pt"
    whole = torch.arange(60.0).reshape(3, 4, 5)
    state = {"a": whole, "b": whole + 60, "t": whole.mT, "half": whole.half(), "row": whole[:1], "s": torch.tensor(1.0)}
    torch.save({**state, "sparse": torch.eye(2).to_sparse()}, path)
    return {entry.key: entry for entry in model_section(open_operand(str(path))).tensors}


def narrow(source: Expression, *args: int) -> Op:
    return Op("aten.narrow.default", (source, *args))


def clone(source: Expression) -> Op:
    return Op("aten.clone.default", (source,), ROW_MAJOR)


def reshape(source: Expression, *shape: int) -> Op:
    return Op("aten.reshape.default", (source, shape))


def cat(dim: Argument, *sources: Expression) -> Op:
    return Op("aten.cat.default", (sources, dim))


A, B, T, ROW = Ref("a"), Ref("b"), Ref("t"), Ref("row")
MOVED = {
    "rows": narrow(A, 0, 1, 2),
    "columns": narrow(A, 2, 1, 3),
    "rows of a strided tensor": narrow(T, 0, 1, 2),
    "no rows": narrow(A, 0, 3, 0),
    "rows of their own": clone(narrow(A, 0, 1, 2)),
    "a shape": reshape(narrow(A, 0, 1, 2), 2, 20),
    "a scalar": reshape(Ref("s"), 1, 1),
    "end to end": cat(0, narrow(B, 0, 1, 1), A),
    "along the first that is more than one": cat(1, ROW, ROW),
}


@pytest.mark.parametrize("name", MOVED)
def test_what_is_moved_is_what_torch_computes(have: dict[str, TensorEntry], name: str) -> None:
    entry, expected = without_torch.entry_of("x", MOVED[name], have), with_torch.entry_of("x", MOVED[name], have)
    assert entry is not None
    assert (entry.key, entry.dtype, entry.shape) == ("x", expected.dtype, expected.shape)
    assert torch.equal(with_torch.load(entry), with_torch.load(expected))


def test_clones_are_bytes_of_the_file_and_share_nothing(have: dict[str, TensorEntry]) -> None:
    entry = without_torch.entry_of("x", clone(narrow(A, 0, 1, 2)), have)
    assert entry is not None
    assert isinstance(entry.storage.data, Span)
    assert (entry.offset, entry.storage.nbytes) == (0, 2 * 20 * 4)


LEFT_TO_TORCH = {
    "behind the end": narrow(A, 0, 2, 2),
    "before the beginning": narrow(A, 0, -1, 1),
    "a negative length": narrow(A, 0, 1, -1),
    "no such dimension": narrow(A, 3, 0, 1),
    "a negative dimension": narrow(A, -1, 0, 1),
    "another number of elements": reshape(A, 7),
    "a size to find": reshape(A, -1),
    "a shape of what is strided": reshape(T, 60),
    "a copy of what is strided": clone(T),
    "not end to end": cat(1, A, B),
    "of two dtypes": cat(0, A, Ref("half")),
    "of two shapes": cat(0, A, narrow(B, 2, 0, 1)),
    "of nothing": cat(0),
    "of scalars": cat(0, Ref("s"), Ref("s")),
    "of a sparse tensor": clone(Ref("sparse")),
    "another operator": Op("aten.neg.default", (A,)),
    "no arguments": Op("aten.narrow.default", ()),
}


@pytest.mark.parametrize("name", LEFT_TO_TORCH)
def test_what_is_left_to_torch(have: dict[str, TensorEntry], name: str) -> None:
    assert without_torch.entry_of("x", LEFT_TO_TORCH[name], have) is None
