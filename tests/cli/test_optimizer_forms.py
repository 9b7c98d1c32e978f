"""Diffs of optimizers saved in different forms, orders and groups: the suggested fix works."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from command import Run, fixes_in, main, notes_in

CODE = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(2, 3), torch.nn.Linear(3, 2)
def one(model):
    return torch.optim.AdamW(model.parameters())
def by_rank(model):
    named = list(model.named_parameters())
    return torch.optim.AdamW([{"params": [p for _, p in named if p.ndim == n]} for n in (2, 1)])
"""
SIDES = ("ids", "named", "names", "flat", "groups")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save the optimizer of one training run in every form and with other groups."""
    folder = tmp_path_factory.mktemp("saved")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        _save()
    return folder


def _save() -> None:
    Path("net.py").write_text(CODE)
    scope: dict[str, Any] = {}
    exec(CODE, scope)
    torch.manual_seed(0)
    model: nn.Module = scope["Net"]()
    named = torch.optim.AdamW(model.named_parameters())
    for optimizer, name in (
        (scope["one"](model), "ids"),
        (named, "named"),
        (scope["by_rank"](model), "groups"),
    ):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        torch.save(optimizer.state_dict(), f"{name}.pt")
    for form, name in (("fqn", "names"), ("flat", "flat")):
        main(
            [
                "remap",
                "ids.pt",
                "--model",
                "net.py:Net",
                "--optimizer-keys",
                form,
                "-o",
                f"{name}.pt",
            ]
        )


@pytest.fixture
def files(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("with_model", [False, True])
@pytest.mark.parametrize("left", SIDES)
@pytest.mark.parametrize("right", SIDES)
def test_suggested_command_works(run: Run, left: str, right: str, with_model: bool) -> None:
    """The command, with its placeholders replaced, removes all differences; without a command, a
    note is printed.
    """
    model = ["--model", "net.py:Net"] if with_model else []
    line = ("diff", f"{left}.pt", f"{right}.pt", *model, "--format", "json")
    done = run(*line)
    assert done.status in (0, 1)
    assert fixes_in(done.data) or done.status == 0 or notes_in(done.data)
    if with_model:
        assert fixes_in(done.data) or done.status == 0
    for command in fixes_in(done.data):
        filled = command.replace("MODEL", "net.py:Net")
        filled = filled.replace(
            "OPTIMIZER", "net.py:by_rank" if right == "groups" else "net.py:one"
        )
        words = shlex.split(filled)[1:]
        result = run(*words)
        assert result.status == 0, (command, result)
        out = words[words.index("-o") + 1]
        assert run("diff", out, f"{right}.pt", "--model", "net.py:Net").status == 0, command
