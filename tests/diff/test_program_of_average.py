"""A program with the weights of an AveragedModel: its counter is not a weight. Oracle: the outputs
of the program.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from command import Run, fixes_in

MODEL = """
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.bn = nn.BatchNorm1d(4)
    def forward(self, x):
        return self.bn(self.fc(x))
"""


@pytest.fixture
def average(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write a program, and an average of other weights; return the averaged module."""
    monkeypatch.chdir(tmp_path)
    Path("m.py").write_text(MODEL)
    names: dict[str, Any] = {"__name__": "m"}
    exec(MODEL, names)
    torch.manual_seed(0)
    program = torch.export.export(names["Net"]().eval(), (torch.ones(2, 4),))
    torch.export.save(program, "program.pt2")
    model: nn.Module = names["Net"]()
    averaged = AveragedModel(model, use_buffers=True)
    model(torch.randn(8, 4))
    averaged.update_parameters(model)
    torch.save(averaged.state_dict(), "ema.pt")
    return averaged.module.eval()


DIFF = ("--model", "m.py:Net", "--values")


def test_the_swap_is_complete(average: Any, run: Run) -> None:
    before = run("diff", "program.pt2", "ema.pt", *DIFF, "--format", "json")
    assert before.status == 1
    (command,) = fixes_in(before.data)
    assert before.data["fix"][0]["complete"]
    words = shlex.split(command)
    assert run(*words[1:]).status == 0
    out = words[-1]
    x = torch.randn(2, 4)
    program = torch.export.load(out).module()
    assert torch.equal(program(x), average(x))
    for pair in ((out, "ema.pt"), ("ema.pt", out)):
        after = run("diff", *pair, *DIFF)
        assert after.status == 0
        first = f"{pair[0]} and {pair[1]} have the same weights; 7 keys under another name"
        assert after.out.startswith(first)
        assert "_metadata" not in after.out


def test_a_key_that_is_no_counter_counts(average: Any, run: Run) -> None:
    saved = torch.load("ema.pt")
    saved["module.n_averaged"] = saved["n_averaged"]
    torch.save(saved, "more.pt")
    run("swap-weights", "program.pt2", "ema.pt", "--model", "m.py:Net", "-o", "swapped.pt2")
    done = run("diff", "more.pt", "swapped.pt2", *DIFF)
    assert done.status == 1
    assert "module.n_averaged" in done.out
