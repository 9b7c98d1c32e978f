"""`diff --values` also compares entries other than dense tensors."""

from __future__ import annotations

from argparse import Namespace
from collections import defaultdict, deque
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttool.core.checkpoint import Checkpoint, ExtraEntry, Section, TensorEntry
from ckpttool.evaluate.compare import fingerprints, verify
from command import Run

KINDS: dict[str, Callable[[float], Any]] = {
    "sparse": lambda x: torch.tensor([[0.0, x], [0.0, 0.0]]).to_sparse(),
    "sparse rows": lambda x: torch.tensor([[0.0, x], [0.0, 0.0]]).to_sparse_csr(),
    "quantized": lambda x: torch.quantize_per_tensor(torch.tensor([x, 0.0]), 0.5, 0, torch.qint8),
    "scale": lambda x: torch.quantize_per_tensor(torch.tensor([0.0]), x, 0, torch.qint8),
    "conjugated": lambda x: torch.tensor([1 + x * 1j]).conj(),
    "number": lambda x: x,
    "set": lambda x: {x},
    "not a number": lambda x: {"x": x, "nan": float("nan")},
    "nested": lambda x: {"a": [torch.tensor([x])]},
    # Objects that differ in one part of their pickle: state, arguments, items, pairs, or function
    "state": lambda x: Namespace(x=x),
    "arguments": lambda x: Decimal(x),
    "items": lambda x: deque([x]),
    "pairs": lambda x: defaultdict(list, a=x),
    "state of an object with arguments": lambda x: partial(max, key=x),
    "function": lambda x: partial(max if x == 1 else min, 1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_diff_values_reports_different_content(kind: str, tmp_path: Path, run: Run) -> None:
    for name, value in (("one", 1.0), ("same", 1.0), ("other", 2.0)):
        torch.save({"weight": torch.ones(2), "odd": KINDS[kind](value)}, tmp_path / f"{name}.pt")
    same, other = (run("diff", tmp_path / "one.pt", tmp_path / f"{n}.pt", "--values") for n in ("same", "other"))
    assert (same.status, other.status) == (0, 1)
    assert "odd" in other.out
    assert run("diff", tmp_path / "one.pt", tmp_path / "other.pt").status == 0  # without --values


@pytest.mark.parametrize("entry", [TensorEntry("w", "float32", (2,), (1,), 0, None, "unknown", 8), ExtraEntry("w")])
def test_unknown_content_is_never_verified(entry: TensorEntry | ExtraEntry) -> None:
    """Not for a replaced file either: nothing proves that unknown content was written."""
    section = Section("", "state_dict", *(((entry,), ()) if isinstance(entry, TensorEntry) else ((), (entry,))))
    one = Checkpoint("a.pt", "torch_zip", 8, (section,))
    assert [problem.key for problem in verify(one, fingerprints(one))] == ["w"]
