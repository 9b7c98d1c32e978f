"""Optimizers with ids, of a model of which some tensors are left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from command import Run

INPUT = torch.ones(3, 4)


class Fused(nn.Module):
    """Save two weights as one."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(4, 4, bias=False)
        self.k = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 2)
        self.register_state_dict_post_hook(_fuse)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.q(x) + self.k(x))


def _fuse(_module: nn.Module, state: dict[str, Any], prefix: str, *_more: object) -> None:
    state[f"{prefix}qk"] = torch.cat(
        [state.pop(f"{prefix}q.weight"), state.pop(f"{prefix}k.weight")]
    )


def trained(path: Path, optimizer_of: Callable[[nn.Module], torch.optim.Optimizer]) -> dict:
    """Save a model and its optimizer after a step, and return the optimizer's state."""
    torch.manual_seed(0)
    model = Fused()
    optimizer = optimizer_of(model)

    def loss() -> float:
        optimizer.zero_grad()
        value = model(INPUT).pow(2).sum()
        value.backward()
        return value.item()

    optimizer.step(loss)
    state = optimizer.state_dict()
    torch.save({"model": model.state_dict(), "optimizer": state}, path)
    return state


def named_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(list(model.named_parameters()))


def test_history_of_all_parameters_is_not_cut(tmp_path: Path, run: Run) -> None:
    trained(tmp_path / "in.pt", lambda model: torch.optim.LBFGS(model.parameters()))
    model = ("--model", f"{__file__}:Fused")
    done = run("remap", tmp_path / "in.pt", "--drop", "head.bias", *model, "-o", tmp_path / "o.pt")
    assert done.status == 1
    assert "belongs to all parameters together" in done.err
    assert not (tmp_path / "o.pt").exists()


def test_names_without_keys_keep_their_state(tmp_path: Path, run: Run) -> None:
    saved = trained(tmp_path / "in.pt", named_adam)
    options = ("--drop", "head.bias", "--rule", "head.{x*} => lm.{x*}")
    done = run("remap", tmp_path / "in.pt", *options, "-o", tmp_path / "o.pt")
    assert done.status == 0
    moved = torch.load(tmp_path / "o.pt")["optimizer"]
    assert moved["param_groups"][0]["param_names"] == ["q.weight", "k.weight", "lm.weight"]
    assert moved["param_groups"][0]["params"] == [0, 1, 2]
    for number in range(3):
        torch.testing.assert_close(moved["state"][number], saved["state"][number], rtol=0, atol=0)
    assert len(moved["state"]) == 3


def test_key_that_may_be_computed_from_parameters_needs_the_model(tmp_path: Path, run: Run) -> None:
    saved = trained(tmp_path / "in.pt", named_adam)
    drop = ("--drop", "qk", "-o", tmp_path / "o.pt")
    done = run("remap", tmp_path / "in.pt", *drop)
    assert done.status == 1
    assert "which has no key for 2 parameters of the optimizer: q.weight, k.weight" in done.err

    done = run("remap", tmp_path / "in.pt", *drop, "--model", f"{__file__}:Fused")
    assert done.status == 0
    moved = torch.load(tmp_path / "o.pt")["optimizer"]
    assert moved["param_groups"][0]["param_names"] == ["head.weight", "head.bias"]
    torch.testing.assert_close(moved["state"][0], saved["state"][2], rtol=0, atol=0)
