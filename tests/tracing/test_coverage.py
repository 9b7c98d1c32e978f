"""`remap --using` says which elements of a tensor no output reads. Oracle: the function itself on
numbered elements.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import ckpttool


def evaluated(code: str, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = eval(code, {"x": x, "torch": torch})
    return result


def noted(checkpoint: Any, *codes: str) -> int:
    """Return how many elements of `x` are left out, by the note of a remap to these outputs."""

    def convert(state: dict[str, Any]) -> dict[str, torch.Tensor]:
        return {f"out.{index}": evaluated(code, state["x"]) for index, code in enumerate(codes)}

    notes = "; ".join(ckpttool.remap(checkpoint, using=convert).notes)
    count = re.search(r"leaves out a part of 1 tensor: x \(([\d,]+) of", notes)
    return 0 if count is None else int(count[1].replace(",", ""))


def unread(*codes: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return how many elements are said to be left out, and how many are in no result."""
    x = torch.arange(torch.Size(shape).numel()).reshape(shape)
    results = [evaluated(code, x).flatten() for code in codes]
    return noted({"x": x}, *codes), x.numel() - len(torch.cat(results).unique())


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


def test_a_large_tensor_needs_few_marks(tmp_path: Path) -> None:
    """Rows are marked as one: a tensor of 1 TiB takes no memory."""
    rows = 2**20
    entry = {"dtype": "U8", "shape": [rows, rows], "data_offsets": [0, rows**2]}
    header = json.dumps({"x": entry}).encode()
    with open(tmp_path / "a.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + rows**2)  # a sparse file
    assert noted(str(tmp_path / "a.safetensors"), "x[:1000]") == (rows - 1000) * rows


def test_a_tensor_that_one_output_is_is_read() -> None:
    x = torch.ones(4)
    assert noted({"x": x}, "x[:2]") == 2
    assert noted({"x": x}, "x[:2]", "x") == 0
