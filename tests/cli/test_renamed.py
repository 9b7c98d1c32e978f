"""Options that went away: each fails, and the command in the hint does the same work."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
from torch import nn

from ckpttool.cli.renamed import RENAMED
from command import Run

LINES = {
    ("diff", "--base"): "diff a.pt b.pt --base a.pt",
    ("*", "--model-kwargs"): 'diff a.pt --model net.py:build --model-kwargs \'{"width": 2, "bias": true}\'',
    ("remap", "--to-model-kwargs"): "remap a.pt -o o.pt --rule '{x*} => {x*}' --model net.py:build --to-model "
    "net.py:build --to-model-kwargs '{\"width\": 2}' --to ddp",
    ("remap", "--size"): "remap w.pt -o o.pt --rules rows.toml --size rows=2",
    ("remap", "--units"): "remap a.pt -o rank_{rank}.pt --model net.py:build --to fsdp-flat --units 0 --world-size 2",
    ("remap", "--world-size"): "remap a.pt -o rank_{rank}.pt --model net.py:build --to fsdp-sharded --world-size 2",
    ("remap", "--keep-prefix"): "remap a.pt -o o.pt --select 0 --keep-prefix",
    ("remap", "--plan"): "remap a.pt -o o.pt --plan p.json",
    ("remap", "--undo"): "remap edited.pt --undo",
    ("remap", "--copy"): "remap a.pt --in-place --copy",
    ("remap", "--compact"): "remap a.pt --in-place --compact --no-undo",
    ("remap", "--max-shard-size"): "remap a.pt -o out/ --max-shard-size 10B",
    ("remap", "--link"): "remap a.pt -o o.safetensors --link hard",
}


def test_every_spelling_is_tried() -> None:
    assert LINES.keys() == RENAMED.keys()


@pytest.mark.parametrize("old", LINES, ids="".join)
def test_the_command_in_the_hint_works(
    old: tuple[str, str], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(
        "from torch import nn\n"
        "def build(width=2, bias=True):\n    return nn.Sequential(nn.Linear(2, width, bias=bias))\n"
    )
    Path("rows.toml").write_text('[[rule]]\nreshape = "w"\nshape = ["{rows}", -1]\nfrom_shape = [4]\n')
    state = nn.Sequential(nn.Linear(2, 2)).state_dict()
    for name in ("a.pt", "b.pt", "edited.pt"):
        torch.save(state, name)
    torch.save({"w": torch.arange(4.0)}, "w.pt")
    assert run("remap", "edited.pt", "--in-place", "--rule", "0.{x} => first.{x}").status == 0
    assert run("remap", "a.pt", "--rule", "0.{x} => first.{x}", "--dry-run", "--save-plan", "p.json").status == 0
    done = run(*shlex.split(LINES[old]))
    assert (done.status, done.out) == (2, "")
    error, hint = done.err.splitlines()
    assert error == f"error: no such option: {old[1]}"
    words = shlex.split(hint.removeprefix("hint: run it as ckpttool "))
    done = run(*words)
    assert done.status == 0, done.said
