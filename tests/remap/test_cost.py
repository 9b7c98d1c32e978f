"""Compare the cost that a dry run predicts with the bytes that the real run reads, writes and holds
in memory.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from command import Run
from files import run_measured

MIB = 1 << 20
LARGE = 32 * MIB  # bytes of each of two tensors
SLACK = 24 * MIB  # variation of peak memory between runs, and copy buffers
WAYS = {
    "rename": ["--rule", "{x} => a.{x}"],
    "cast": ["--rules", "cast.toml"],
    "transpose": ["--rules", "turn.toml"],
}
RULES = {"cast.toml": 'cast = "{x}"\ndtype = "float64"', "turn.toml": 'transpose = "{x}"'}


def peak(folder: Path, name: str, words: list[str]) -> int:
    command = [
        sys.executable,
        "-m",
        "ckpttool",
        "remap",
        f"{name}.safetensors",
        *words,
        "-o",
        f"{name}.out.safetensors",
    ]
    return run_measured(command, folder)[1]


@pytest.mark.parametrize("way", WAYS)
def test_peak_memory_is_bounded_by_the_prediction(
    way: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in RULES.items():
        Path(name).write_text(f"[[rule]]\n{text}\n")
    for name, rows in ("large", LARGE // 4096), ("small", 2):
        save_file({key: torch.ones(rows, 1024) for key in "ab"}, f"{name}.safetensors")
    out = ["-o", "large.out.safetensors"]
    cost = run(
        "remap", "large.safetensors", *WAYS[way], *out, "--dry-run", "--format", "json"
    ).data["cost"]
    assert (
        run("remap", "large.safetensors", *WAYS[way], *out, "--dry-run").out.count("\ncost ") == 1
    )
    more = peak(tmp_path, "large", WAYS[way]) - peak(tmp_path, "small", WAYS[way])
    assert more <= cost["memory"] + SLACK
    assert cost["memory"] <= 2 * max(more, 0) + SLACK  # not a loose bound
    assert cost["written"] == Path("large.out.safetensors").stat().st_size
    # everything except the header
    assert 0 <= Path("large.safetensors").stat().st_size - cost["read"] < 4096


def test_unchanged_data_files_cost_their_size_if_they_are_copied(tmp_path: Path, run: Run) -> None:
    dcp.save({"a": torch.ones(100_000), "b": torch.ones(3)}, checkpoint_id=tmp_path / "in.dcp")
    data = sum(path.stat().st_size for path in (tmp_path / "in.dcp").glob("*.distcp"))
    out = tmp_path / "out.dcp"
    words = ("remap", tmp_path / "in.dcp", "--rule", "a => c", "-o", out, "--format", "json")
    cost = run(*words, "--dry-run").data["cost"]
    assert run(*words).status == 0
    assert cost["read"] == data
    assert cost["written"] == data + (out / ".metadata").stat().st_size
    in_place = (
        "remap",
        tmp_path / "in.dcp",
        "--rule",
        "a => c",
        "--in-place",
        "--dry-run",
        "--format",
        "json",
    )
    assert run(*in_place).data["cost"]["written"] < data
