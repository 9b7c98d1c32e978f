"""State under names, in another order than the optimizer's: set_optimizer_state_dict loads it, and
``Optimizer.load_state_dict`` mixes it up. Oracle: torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from command import Run

MODELS = """
import torch
from torch import nn
def build(*names):
    return nn.ModuleDict({name: nn.Linear(3, 3) for name in names or ("body", "head")})
def turned():
    return build("head", "body")
def adam(model):
    return torch.optim.Adam(model.parameters())
"""
TURNED = ("--model", "model.py:turned", "--optimizer", "model.py:adam")


@pytest.fixture(autouse=True)
def _named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODELS)
    model, optimizer = made("build")
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    by_name = get_optimizer_state_dict(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": by_name}, "named.pt")


def made(build: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    code: dict[str, Any] = {}
    exec(MODELS, code)
    model = code[build]()
    return model, code["adam"](model)


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the first moment of each parameter by name."""
    return {name: optimizer.state[param]["exp_avg"] for name, param in model.named_parameters()}


def test_first_line_says_how_it_loads(run: Run) -> None:
    saved = torch.load("named.pt")["optimizer"]
    expected = {name: slots["exp_avg"] for name, slots in saved["state"].items()}
    by_name, by_position = made("turned"), made("turned")
    set_optimizer_state_dict(*by_name, saved)
    torch.testing.assert_close(moments(*by_name), expected, rtol=0, atol=0)
    by_position[1].load_state_dict(saved)
    assert not torch.equal(moments(*by_position)["head.weight"], expected["head.weight"])

    done = run("diff", "named.pt", *TURNED)
    assert done.status == 0
    assert done.out.splitlines()[0] == (
        "the optimizer state of named.pt loads into model.py:adam by name, and not by position"
    )
    same_order = run("diff", "named.pt", "--model", "model.py:build", *TURNED[2:])
    assert "by position" not in same_order.out


def test_copy_by_fix_says_it_too(run: Run) -> None:
    done = run("fix", "named.pt", *TURNED, "-o", "copy.pt")
    assert done.status == 0
    assert "Optimizer.load_state_dict loads by position" in done.err
    assert "--optimizer-keys id" in done.err


def test_ids_without_a_model_are_in_the_order_of_the_file(run: Run) -> None:
    done = run("remap", "named.pt", "--optimizer-keys", "id", "-o", "ids.pt")
    assert done.status == 0
    assert "its ids are in the order of the file" in done.out + done.err
    words = ("--model", "model.py:turned", "--optimizer-keys", "id", "-o", "turned.pt")
    named = run("remap", "named.pt", *words)
    assert "in the order of the file" not in named.out + named.err
    model, optimizer = made("turned")
    optimizer.load_state_dict(torch.load("turned.pt")["optimizer"])
    saved = torch.load("named.pt")["optimizer"]["state"]
    for name, moment in moments(model, optimizer).items():
        torch.testing.assert_close(moment, saved[name]["exp_avg"], rtol=0, atol=0)
