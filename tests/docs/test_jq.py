"""The jq commands in docs/ci.md print what their comments say."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from places import DOCS

LINES = re.findall(
    r"^# (.*)\n(ckpttool .* \| jq .*)$", (DOCS / "ci.md").read_text(encoding="utf-8"), re.MULTILINE
)
MODEL = """
from torch import nn

class Hidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2, bias=False)
        self._register_state_dict_hook(hide)

def hide(module, state, prefix, _):
    state[prefix + "weight"] = state.pop(prefix + "layer.weight")

def build():
    return nn.Sequential(Hidden())
"""
EXPECTED = {
    "the commands that fix it": [],
    "hooks that rename keys": ["0.weight is 0.layer.weight: model.py:10"],
}


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
@pytest.mark.parametrize(("about", "line"), LINES, ids=[about for about, _ in LINES])
def test_jq_command_prints_what_its_comment_says(about: str, line: str, tmp_path: Path) -> None:
    state = {"body.weight": torch.ones(3), "head.weight": torch.ones(2)}
    torch.save(state, tmp_path / "old.pt")
    torch.save(state | {"head.scale": torch.ones(4, dtype=torch.bfloat16)}, tmp_path / "train.pt")
    (tmp_path / "model.py").write_text(MODEL)
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-c", line],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PATH": places},
    )
    assert done.stdout.splitlines() == EXPECTED[about], done.stderr
