"""The shell scripts in docs/tasks.md do what the page says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from places import DOCS

SCRIPTS = re.findall(
    r"^```bash\n(.*?)^```",
    (DOCS / "tasks.md").read_text(encoding="utf-8"),
    re.MULTILINE | re.DOTALL,
)
STEPS, DIGESTS = SCRIPTS


def bash(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )


def test_each_step_of_a_run_is_compared_with_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for step, value in enumerate((1.0, 1.0, 2.0)):
        torch.save({"w": torch.full((2,), value)}, tmp_path / f"run/step-{step}.pt")
    done = bash(STEPS, tmp_path)
    assert [line for line in done.stdout.splitlines() if line.startswith("changed")] == [
        "changed in run/step-2.pt"
    ]


@pytest.mark.skipif(shutil.which("jq") is None, reason="the script needs jq")
@pytest.mark.parametrize("value", [1.0, 2.0])
def test_digests_of_a_copy_in_another_format_are_compared(tmp_path: Path, value: float) -> None:
    tensors = {"b": torch.ones(3), "a": torch.arange(4.0)}
    torch.save(tensors, tmp_path / "train.pt")
    save_file({**tensors, "b": torch.full((3,), value)}, tmp_path / "copy.safetensors")
    done = bash(DIGESTS, tmp_path)
    assert done.returncode == (0 if value == 1.0 else 1), done.stdout + done.stderr
    assert bool(done.stdout) is (value != 1.0)
