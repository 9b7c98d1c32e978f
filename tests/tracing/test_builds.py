"""How often a command builds the model: a build of a large one takes seconds."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest
import torch

from command import Run

MODEL = """
import builtins
from torch import nn

class Hidden(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.register_state_dict_post_hook(self._save)
        self.register_load_state_dict_pre_hook(self._load)

    @staticmethod
    def _save(module, state, prefix, metadata):
        for key in [key for key in state if key.startswith(prefix + "layer.")]:
            state[prefix + key[len(prefix) + 6:]] = state.pop(key)

    @staticmethod
    def _load(module, state, prefix, *others):
        for key in [key for key in state if key.startswith(prefix)]:
            state[prefix + "layer." + key[len(prefix):]] = state.pop(key)

    def forward(self, x):
        return self.layer(x)

def build():
    builtins.ckpttool_builds += 1
    return nn.Sequential(nn.Linear(4, 4), Hidden(nn.Linear(4, 4)), nn.Linear(4, 2))

def plain():
    builtins.ckpttool_builds += 1
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
"""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Write the model and its checkpoints into the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(builtins, "ckpttool_builds", 0, raising=False)
    Path("model.py").write_text(MODEL)
    namespace: dict[str, Any] = {}
    exec(MODEL, namespace)
    model = namespace["build"]()
    state: dict[str, torch.Tensor] = model.state_dict()
    torch.save(state, "good.pt")
    plain = namespace["plain"]().state_dict()
    torch.save(plain, "plain.pt")
    torch.save({key.replace("1.", "norm."): value for key, value in plain.items()}, "bad.plain.pt")
    torch.save(
        {("net." + key if key.startswith("0") else key): value for key, value in state.items()},
        "bad.pt",
    )
    torch.save({"module._orig_mod." + key: value for key, value in state.items()}, "wrapped.pt")
    torch.export.save(torch.export.export(model, (torch.ones(1, 4),)), "program.pt2")
    return state


@pytest.mark.parametrize(
    ("line", "status", "builds"),
    [
        ("diff --model model.py:build good.pt", 0, 2),
        ("diff --model model.py:build bad.pt", 1, 3),
        ("fix wrapped.pt -o fixed.pt --model model.py:build", 0, 3),
        ("swap-weights program.pt2 good.pt -o swapped.pt2 --model model.py:build", 0, 2),
        ("trace model.py:build", 0, 2),
        ("trace model.py:plain", 0, 1),
        ("diff --model model.py:plain plain.pt", 0, 1),
        ("diff --model model.py:plain bad.plain.pt", 1, 1),
    ],
)
@pytest.mark.usefixtures("files")
def test_a_command_builds_the_model_a_few_times(
    run: Run, monkeypatch: pytest.MonkeyPatch, line: str, status: int, builds: int
) -> None:
    monkeypatch.setattr(builtins, "ckpttool_builds", 0)
    assert run(*line.split()).status == status
    assert builtins.ckpttool_builds == builds  # type: ignore[attr-defined]


def test_another_order_of_keys_is_loaded_again(run: Run, files: dict[str, torch.Tensor]) -> None:
    """A hook of the model may depend on it."""
    torch.save(dict(reversed(files.items())), "other.pt")
    before = builtins.ckpttool_builds  # type: ignore[attr-defined]
    assert run("diff", "--model", "model.py:build", "other.pt").status == 0
    assert builtins.ckpttool_builds - before == 3  # type: ignore[attr-defined]
