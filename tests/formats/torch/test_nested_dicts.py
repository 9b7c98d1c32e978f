"""Pickles of nested dicts, each of which could be a section: what they take is bounded, however
they share.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from command import Run

TENSOR = torch.zeros(1)
LIMIT = 600 << 20  # bytes of address space, of which Python takes some; `pickle_memory` is 128 MiB
SECONDS = 30  # on a busy machine
SHOWN = 2 << 20  # bytes of output


def shared(depth: int, length: int, leaf: dict[str, Any]) -> dict[str, Any]:
    """Nest dicts; each level is in the next one twice, under keys of this length."""
    for _ in range(depth):
        leaf = {"a" * length: leaf, "b" * length: leaf}
    return leaf


def tree(depth: int, length: int) -> dict[str, Any]:
    """Return a binary tree of dicts with a tensor in each leaf; nothing is shared."""
    if not depth:
        return {"w": TENSOR}
    return {letter * length: tree(depth - 1, length) for letter in "ab"}


def chain(depth: int, length: int, width: int, leaf: Any) -> dict[str, Any]:
    """Nest dicts; each level holds the same leaf many times."""
    inner: dict[str, Any] = {"w": TENSOR}
    for _ in range(depth):
        inner = {**{f"k{number}": leaf for number in range(width)}, "n" * length: inner}
    return inner


FILES: dict[str, Callable[[], Any]] = {
    "shared": lambda: shared(150, 1, {"w": TENSOR}),
    "shared, long keys": lambda: shared(150, 1000, {"w": TENSOR}),
    "shared, longer keys": lambda: shared(60, 20_000, {"w": TENSOR}),
    "shared without tensors": lambda: shared(150, 1000, {"w": 1}),
    "shared, next to a tensor": lambda: {"x": shared(25, 10, {"y": 1}), "w": TENSOR},
    "a tree": lambda: tree(13, 1),
    "a large tree": lambda: tree(16, 1),
    "a tree with long keys": lambda: tree(10, 1000),
    "a chain of sections": lambda: chain(150, 500, 70, {"w": TENSOR}),
    "a chain of other entries": lambda: chain(150, 500, 70, {"x": 1}),
    "a chain of numbers": lambda: chain(150, 500, 700, 1),
    "many times one section": lambda: [{f"w{number}": TENSOR for number in range(5000)}] * 10_000,
    "many sections": lambda: {f"k{number}": {"w": TENSOR} for number in range(10_000)},
}
LINES = {
    "inspect": "inspect in.pt",
    "rename": "remap in.pt -o out.pt --rule 'w => v'",
    "to safetensors": "convert in.pt -o out.safetensors",
    "to DCP": "convert in.pt -o out.dcp",
}
CASES = [(name, line) for name in FILES for line in ("inspect", "rename")]
CASES += [
    (name, line)
    for name in ("shared", "shared, long keys", "many sections")
    for line in LINES
    if line[:2] == "to"
]


@pytest.mark.parametrize(("name", "line"), CASES)
def test_memory_time_and_output_are_bounded(name: str, line: str, tmp_path: Path) -> None:
    torch.save(FILES[name](), tmp_path / "in.pt")
    script = f"ulimit -v {LIMIT >> 10} && exec {sys.executable} -m ckpttool {LINES[line]}"
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, capture_output=True, timeout=SECONDS, check=False
    )
    assert done.returncode in (0, 1, 2), done.stderr[-1000:]
    assert b"internal error" not in done.stderr
    assert b"out of memory" not in done.stderr
    assert len(done.stderr) < SHOWN
    assert len(done.stdout) < SHOWN or line != "inspect"


def test_many_sections_of_a_real_file_are_read(tmp_path: Path, run: Run) -> None:
    torch.save(
        {f"sample{number}": {"x": torch.full((50,), number)} for number in range(3000)},
        tmp_path / "in.pt",
    )
    done = run("inspect", tmp_path / "in.pt", "--format", "json")
    assert done.status == 0
    assert len(done.data["sections"]) == 3000
