"""Programs and pickled modules hold runtime tensors, also if their names are serialized keys with
other values. Oracle: the eager model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from command import Done, Run, notes_in

MODEL = f"{__file__}:Transposed"
X = torch.linspace(-1, 1, 6).reshape(2, 3)


class Transposed(nn.Linear):
    """Its weight is square, and saved transposed under its own name."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_state_dict_post_hook(self._transpose)
        self.register_load_state_dict_pre_hook(self._transpose)

    @staticmethod
    def _transpose(_: nn.Module, state: dict[str, Any], prefix: str, *_args: object) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"].t()


def model(seed: int) -> Transposed:
    torch.manual_seed(seed)
    return Transposed()


def exported(module: nn.Module, path: Path) -> None:
    torch.export.save(torch.export.export(module, (X,)), path)


def scripted(module: nn.Module, path: Path) -> None:
    torch.jit.trace(module, (X,)).save(str(path))


def pickled(module: nn.Module, path: Path) -> None:
    torch.save(module, path)


CONTAINERS = {"program.pt2": exported, "script.pt": scripted, "module.pt": pickled}


OUTPUTS = [
    *(("program.pt2", name) for name in ("out.pt", "out.safetensors")),
    *(("script.pt", name) for name in ("out.pt", "out.safetensors")),
    ("module.pt", "out.safetensors"),
]


def statuses(done: Done) -> set[str]:
    return {entry["status"] for entry in done.data["entries"]}


@pytest.fixture(params=list(CONTAINERS))
def container(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def saved(container: str, tmp_path: Path) -> Path:
    """Return a file of the model with seed 1, next to the model's state dict `state.pt`."""
    CONTAINERS[container](model(1), tmp_path / container)
    torch.save(model(1).state_dict(), tmp_path / "state.pt")
    return tmp_path / container


def test_values_are_compared_as_runtime_tensors(saved: Path, tmp_path: Path, run: Run) -> None:
    wrong = model(1)
    wrong.weight.data = wrong.weight.data.t().contiguous()
    other = tmp_path / f"wrong-{saved.name}"
    CONTAINERS[saved.name](wrong, other)
    words = "--model", MODEL, "--values", "--format", "json"
    right = run("diff", tmp_path / "state.pt", saved, *words)
    # a state dict has to be converted before it equals a module; a program keeps its names
    assert right.status == (1 if saved.name == "module.pt" else 0)
    assert "value" not in statuses(right)
    done = run("diff", tmp_path / "state.pt", other, *words)
    assert done.status == 1
    assert "value" in statuses(done)


def test_state_dict_made_of_it_loads_the_same_values(saved: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out.pt"
    done = run("remap", saved, "--model", MODEL, "--to", "serialized", "-o", out)
    assert done.status == 0, done.err
    loaded = model(2)
    loaded.load_state_dict(torch.load(out))
    assert torch.equal(loaded(X), model(1)(X))


def test_its_weights_can_be_put_into_a_program(saved: Path, tmp_path: Path, run: Run) -> None:
    exported(model(2), tmp_path / "old.pt2")
    out = tmp_path / "out.pt2"
    done = run("swap-weights", tmp_path / "old.pt2", saved, "--model", MODEL, "-o", out)
    assert done.status == 0, done.err
    assert torch.equal(torch.export.load(out).module()(X), model(1)(X))


def test_loading_it_as_it_is_is_warned_of(saved: Path, tmp_path: Path, run: Run) -> None:
    done = run("diff", "--model", MODEL, saved, "--format", "json")
    assert done.status == 0
    assert any("has the runtime tensors" in note for note in notes_in(done.data))
    plain = run("diff", "--model", MODEL, tmp_path / "state.pt", "--format", "json")
    assert not any("has the runtime tensors" in note for note in notes_in(plain.data))


@pytest.mark.parametrize(("container", "name"), OUTPUTS)
def test_the_state_dict_of_a_container_keeps_runtime_names(
    container: str, name: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    CONTAINERS[container](model(0), Path(container))
    torch.save(model(0).state_dict(), "saved.pt")
    torch.save(model(1).state_dict(), "others.pt")
    assert run("convert", container, "-o", name).status == 0
    assert run("remap", name, "--rule", "bias => bias", "-o", f"again.{name}").status == 0
    for path in (name, f"again.{name}"):
        done = run("diff", "saved.pt", path, "--model", MODEL, "--values", "--format", "json")
        assert statuses(done) == {"same", "transformed"}
        done = run("diff", "others.pt", path, "--model", MODEL, "--values", "--format", "json")
        assert "value" in statuses(done)
    assert run("remap", name, "--model", MODEL, "--to", "serialized", "-o", "back.pt").status == 0
    assert run("diff", "saved.pt", "back.pt", "--values").status == 0


@pytest.mark.parametrize(("container", "name"), OUTPUTS)
def test_a_computed_state_dict_has_no_runtime_names(
    container: str, name: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    CONTAINERS[container](model(0), Path(container))
    torch.save(model(0).state_dict(), "saved.pt")
    Path("rules.toml").write_text('[[rule]]\ntranspose = "weight"\n')
    assert run("remap", container, "--rules", "rules.toml", "-o", name).status == 0
    done = run("diff", "saved.pt", name, "--model", MODEL, "--values", "--format", "json")
    assert statuses(done) == {"same"}
