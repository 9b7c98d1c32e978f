"""Which elements of a tensor no output reads. Oracle: the operators on numbered elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ckpttool.core.expression import Op, Ref
from ckpttool.tracing.coverage import unread_elements
from ckpttool.tracing.recorder import Recorder, recording


def recorded(code: str, shape: tuple[int, ...]) -> tuple[Any, torch.Tensor]:
    """Return the expression of `code` over a tensor `x`, and its result on numbered elements."""
    recorder, meta = Recorder(), torch.empty(shape, dtype=torch.int64, device="meta")
    recorder.name(meta, Ref("x"))
    with recording(recorder):
        source = recorder.value(eval(code, {"x": meta, "torch": torch}))
    numbers = torch.arange(meta.numel()).reshape(shape)
    return source, eval(code, {"x": numbers, "torch": torch})


def unread(*codes: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return how many elements no expression reads, and how many are in no result."""
    sources, results = [], []
    for code in codes:
        source, result = recorded(code, shape)
        sources.append(source)
        results.append(result.flatten())
    meta = torch.empty(shape, dtype=torch.int64, device="meta")
    number = unread_elements(sources, {"x": meta}).get("x", 0)
    return number, meta.numel() - len(torch.cat(results).unique())


STEPS = [
    "[1:]", "[:, :2]", "[::2]", "[..., 1]", "[-1]", ".t()", ".transpose(0, -1)", ".chunk(2)[0]",
    ".split(2)[-1]", ".unbind()[0]", ".flatten()", ".reshape(2, -1)", ".unsqueeze(0)",
    ".expand(2, *([-1] * 2))", ".flip(0)", ".clone()", ".contiguous()", ".diagonal()",
    ".unfold(0, 2, 1)", "[torch.tensor([0, 1])]", "[:, torch.tensor([1, 1])]", ".movedim(0, 1)",
    ".index_select(0, torch.tensor([1]))", ".index_select(-1, torch.tensor([0]))",
    ".as_strided((2, 2), (1, 1), 1)", ".narrow(0, 1, 0)",
    ".as_strided((1, 3), (1, 2))", "[torch.tensor([0, 1]), torch.tensor([1, 0])]",
]  # fmt: skip
COPIES = ("tensor", ".clone", ".flip", ".reshape", ".flatten", ".unfold", ".as_strided")


@settings(max_examples=300)
@example(shape=(4,), steps=[[".unfold(0, 2, 1)", ".unfold(0, 2, 1)"]])
@given(
    shape=st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3).map(tuple),
    steps=st.lists(
        st.lists(st.sampled_from(STEPS), min_size=1, max_size=4), min_size=1, max_size=3
    ),
)
def test_elements_in_no_result_are_unread(shape: tuple[int, ...], steps: list[list[str]]) -> None:
    codes = []
    for chain in steps:
        try:
            eval("x" + "".join(chain), {"x": torch.ones(shape), "torch": torch})
        except (RuntimeError, IndexError, TypeError):
            continue
        codes.append("x" + "".join(chain))
    if codes:
        number, expected = unread(*codes, shape=shape)
        assert number <= expected  # what an operator computes of a part, or copies, counts as read
        if not any(step in code for code in codes for step in COPIES):
            assert number == expected


@pytest.mark.parametrize(
    "codes",
    [
        ["x[:4]", "x[4:8]"],
        ["x.view(3, 4, 6)[0] + 1"],
        ["x.view(3, 2, 2, 6).transpose(1, 2)[:2].reshape(8, 6)"],
        ["x[torch.tensor([0, 5, 7])]"],
        ["x.index_select(1, torch.tensor([0, 5]))"],
        ["x[:, ::2]", "x[::2, 1::2]"],
        ["x * 2"],
        ["x.flatten()[:68].unfold(0, 2, 1).unfold(0, 2, 1)"],
        ["x.double()[:3]"],
        ["x.to(torch.int32).clone().as_strided((2, 3), (4, 1), 5)"],
    ],
)
def test_reads_of_a_part_are_counted(codes: list[str]) -> None:
    number, expected = unread(*codes, shape=(12, 6))
    assert number == expected


def test_a_large_tensor_needs_few_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are marked as one: a tensor of 256 TiB takes no memory."""
    tensor = torch.empty(2**23, 2**23, device="meta")
    half = Op("aten.slice.Tensor", (Ref("x"), 0, 0, 2**22))
    assert unread_elements([half], {"x": tensor}) == {"x": 2**45}


def test_a_tensor_that_one_output_is_is_read() -> None:
    tensor = torch.empty(4, device="meta")
    half = Op("aten.slice.Tensor", (Ref("x"), 0, 0, 2))
    assert unread_elements([half, Ref("x")], {"x": tensor}) == {}
    assert unread_elements([half], {"x": tensor, "y": tensor}) == {"x": 2}
