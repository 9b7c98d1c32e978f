"""A state_dict in memory is treated like its file; values and files of torch are the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import ckpttool
from ckpttool import CkptError

Z = torch.tensor([[1 + 1j, 2 - 3j], [4 + 0.5j, -1j]])
X = torch.arange(6.0).reshape(2, 3)
# Kinds of tensors, each with another tensor of the same size.
KINDS = {
    "plain": (X, X + 1),
    "transposed": (X.t(), X.reshape(3, 2)),
    "a view": (X[1:], X[:1]),
    "expanded": (X[:1].expand(2, 3), X),
    "one element with stride 0": (torch.tensor(3.0).expand(1), torch.tensor(4.0).expand(1)),
    "lazily conjugated": (Z.conj(), Z),
    "lazily negated": (Z.conj().imag, -Z.conj().imag),
    "without elements": (torch.ones(0, 2), torch.ones(2, 0)),
    "NaN": (X / 0, X / 0 * -1),
}
SPARSE = {
    "coo": (torch.eye(3).to_sparse(), torch.eye(3).flip(0).to_sparse()),
    "csr": (torch.eye(3).to_sparse_csr(), torch.eye(3).flip(0).to_sparse_csr()),
    "values": (torch.eye(3).to_sparse(), (2 * torch.eye(3)).to_sparse()),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(("tensor", "other"), (KINDS | SPARSE).values(), ids=[*KINDS, *SPARSE])
def test_values_in_memory_are_compared_as_torch_reads_them(
    tensor: torch.Tensor, other: torch.Tensor
) -> None:
    state = {"w": tensor, "again": tensor}
    assert ckpttool.diff(
        state, {"w": tensor.clone(), "again": tensor.detach()}, values=True
    ).identical
    assert not ckpttool.diff(state, {**state, "w": other}, values=True).identical
    assert ckpttool.inspect(state).aliases[""].keys() == {"again"}


@pytest.mark.parametrize("tensor", [tensor for tensor, _ in KINDS.values()], ids=KINDS)
def test_a_file_has_the_same_index_as_memory(tensor: torch.Tensor, tmp_path: Path) -> None:
    ckpttool.remap({"w": tensor}, str(tmp_path / "out.pt"))
    torch.save({"w": tensor.resolve_conj().resolve_neg()}, tmp_path / "saved.pt")
    assert ckpttool.diff({"w": tensor}, str(tmp_path / "saved.pt"), values=True).identical
    assert torch.equal(torch.load(tmp_path / "out.pt")["w"].nan_to_num(7), tensor.nan_to_num(7))


class OneBuffer(nn.Module):
    """A module with one buffer."""

    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("w", buffer)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    "buffer",
    [
        torch.eye(2).to_sparse(),
        torch.quantize_per_tensor(torch.eye(2), 0.5, 0, torch.qint8),
        TwoTensor(torch.eye(2), torch.eye(2)),
    ],
    ids=["sparse", "quantized", "subclass"],
)
@pytest.mark.parametrize("same_kind", [True, False])
def test_the_verdict_is_the_same_for_memory_and_file(
    buffer: torch.Tensor, same_kind: bool, tmp_path: Path
) -> None:
    saved, like = OneBuffer(buffer).state_dict(), buffer.clone() if same_kind else torch.eye(2)
    torch.save(saved, tmp_path / "saved.pt")
    try:
        loads = not any(OneBuffer(like.clone()).load_state_dict(saved))
    except RuntimeError:
        loads = False
    for state in (saved, str(tmp_path / "saved.pt")):
        assert (
            ckpttool.diff(state, model=lambda: OneBuffer(like.clone()), materialize=True).identical
            is loads
        ), state


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (3, 4),
        ("a", "b"),
        (True, 1),
        (1.5, None),
        (0.0, -0.0),
        ([1], [2]),
        ([[1, "a"], []], [[1], []]),
    ],
)
def test_non_tensor_values_are_compared_as_in_a_file(
    value: object, other: object, tmp_path: Path
) -> None:
    state, changed = {"w": X, "n": value}, {"w": X, "n": other}
    torch.save(state, tmp_path / "same.pt")
    torch.save(changed, tmp_path / "other.pt")
    assert ckpttool.diff(state, str(tmp_path / "same.pt"), values=True).identical
    assert not ckpttool.diff(state, changed, values=True).identical
    assert not ckpttool.diff(state, str(tmp_path / "other.pt"), values=True).identical


@pytest.mark.parametrize(
    "make", [torch.ones, lambda size: TwoTensor(torch.ones(size), torch.ones(size))]
)
def test_freed_memory_is_not_read(make: Any) -> None:
    """FSDP frees memory in this way, and reading it would crash the process, so it is refused on
    both sides.
    """
    freed, live = make(2), OneBuffer(torch.zeros(2))
    (freed.b if isinstance(freed, TwoTensor) else freed).untyped_storage().resize_(0)
    state = {"w": freed}
    for call in (
        lambda: ckpttool.diff(state, {"w": make(2)}, values=True),
        lambda: ckpttool.diff(state, model=lambda: OneBuffer(torch.zeros(2))),
        lambda: ckpttool.swap_weights(live, state),
        lambda: ckpttool.swap_weights(OneBuffer(freed), {"w": torch.ones(2)}),
    ):
        with pytest.raises(CkptError) as caught:
            call()
        assert [str(problem) for problem in caught.value.problems] == ["its memory was freed @ w"]
    assert live.get_buffer("w").tolist() == [0, 0]
