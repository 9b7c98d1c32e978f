"""Lists of tensors that belong to the parameters by position: a remap that changes the parameters
names them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from command import Run, notes_in


class Old(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)


class New(nn.Module):
    """The same model, with its parameters in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.b, self.a = nn.Linear(4, 3), nn.Linear(4, 4)


class Renamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.b = nn.Linear(4, 4), nn.Linear(4, 3)


def frozen() -> nn.Module:
    model = Old()
    model.a.bias.requires_grad_(False)
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def saved(path: Path, build: Any = Old, only_trainable: bool = False) -> None:
    """Save the model, its optimizer, and an average as torch_ema's `state_dict()` has it."""
    model = build()
    optimizer = adamw(model)
    model.b(model.a(torch.ones(1, 4))).sum().backward()
    optimizer.step()
    parameters = [p for p in model.parameters() if p.requires_grad or not only_trainable]
    average = {
        "decay": 0.99,
        "num_updates": 1,
        "shadow_params": [parameter.detach().clone() for parameter in parameters],
        "collected_params": None,
    }
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "ema": average}, path
    )


def named(run: Run, *words: object) -> list[str]:
    done = run("remap", *words, "--format", "json")
    assert done.status == 0, done
    return [note for note in notes_in(done.data) if "list of" in note]


@pytest.mark.parametrize("only_trainable", [False, True])
def test_other_order_of_the_parameters(only_trainable: bool, tmp_path: Path, run: Run) -> None:
    saved(tmp_path / "in.pt", frozen if only_trainable else Old, only_trainable)
    old = f"{__file__}:{'frozen' if only_trainable else 'Old'}"
    asked = (
        tmp_path / "in.pt",
        "--drop",
        "optimizer",
        "--model",
        old,
        "--to-model",
        f"{__file__}:New",
    )
    (note,) = named(run, *asked, "-o", tmp_path / "out.pt")
    assert note.startswith("ema.shadow_params is a list of ")
    before, after = (
        torch.load(tmp_path / name)["ema"]["shadow_params"] for name in ("in.pt", "out.pt")
    )
    assert all(map(torch.equal, before, after))


def test_left_out_parameters(tmp_path: Path, run: Run) -> None:
    saved(tmp_path / "in.pt")
    drops = ("--drop", "model.b.*", "--drop", "optimizer")
    assert len(named(run, tmp_path / "in.pt", *drops, "-o", tmp_path / "out.pt")) == 1


@pytest.mark.parametrize(
    "words",
    [
        ("--rule", "a.{x} => first.{x}"),
        ("--to", "ddp"),
        ("--model", "Old", "--to-model", "Renamed", "--rule", "a.{x} => first.{x}"),
        ("--optimizer-keys", "fqn", "--model", "Old"),
    ],
)
def test_names_alone_change(words: tuple[str, ...], tmp_path: Path, run: Run) -> None:
    saved(tmp_path / "in.pt")
    words = tuple(f"{__file__}:{word}" if word in ("Old", "Renamed") else word for word in words)
    assert named(run, tmp_path / "in.pt", *words, "-o", tmp_path / "out.pt") == []


def test_another_list_is_not_named(tmp_path: Path, run: Run) -> None:
    saved(tmp_path / "in.pt")
    content = torch.load(tmp_path / "in.pt")
    content["ema"]["shadow_params"] = content["ema"]["shadow_params"][:-1]
    torch.save(content, tmp_path / "in.pt")
    asked = (tmp_path / "in.pt", "--model", f"{__file__}:Old", "--to-model", f"{__file__}:New")
    assert named(run, *asked, "-o", tmp_path / "out.pt") == []
