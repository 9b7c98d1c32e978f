"""A fix of a file whose keys and whose param groups are both others than the model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from command import Run

HERE = __file__


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [param for param in model.parameters() if param.ndim > 1]
    others = [param for param in model.parameters() if param.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups)


def test_wrapped_names_and_other_groups_are_fixed_together(tmp_path: Path, run: Run) -> None:
    torch.manual_seed(0)
    wrapped = nn.DataParallel(Net())
    optimizer = torch.optim.AdamW(list(wrapped.named_parameters()))
    wrapped.module(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    names = state["param_groups"][0]["param_names"]
    state["param_groups"][0]["params"] = names
    state["state"] = {names[number]: slots for number, slots in state["state"].items()}
    torch.save({"model": wrapped.state_dict(), "optimizer": state}, tmp_path / "in.pt")

    operands = ("--model", f"{HERE}:Net", "--optimizer", f"{HERE}:two_groups")
    fixed = run("fix", tmp_path / "in.pt", *operands, "-o", tmp_path / "out.pt")
    assert fixed.status == 0, fixed.err
    assert run("diff", *operands, tmp_path / "out.pt").status == 0

    written = torch.load(tmp_path / "out.pt")
    model = Net()
    model.load_state_dict(written["model"])
    for name, slots in state["state"].items():
        moved = written["optimizer"]["state"][name.removeprefix("module.")]
        torch.testing.assert_close(moved["exp_avg"], slots["exp_avg"], rtol=0, atol=0)
