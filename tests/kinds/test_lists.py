"""Averages of parameters as lists. Oracle: ``copy_to(model.parameters())`` of torch_ema."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from command import Run

MODELS = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self, width=5, last_first=False):
        super().__init__()
        layers = {"left": nn.Linear(width, width), "right": nn.Linear(width, width)}
        for name in reversed(layers) if last_first else layers:
            self.add_module(name, layers[name])
        self.scale = nn.Parameter(torch.ones(width), requires_grad=False)
class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
class Renamed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 4)
        self._register_state_dict_hook(self._hide)
        self._register_load_state_dict_pre_hook(self._show)
    @staticmethod
    def _hide(module, state, prefix, _):
        for key in [key for key in state if ".inner." in f".{key}"]:
            state[key.replace("inner.", "")] = state.pop(key)
    @staticmethod
    def _show(state, prefix, *_):
        for name in ("weight", "bias"):
            state[f"{prefix}inner.{name}"] = state.pop(prefix + name)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "averaged.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def nets() -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(MODELS, names)
    return names


def averaged(model: nn.Module) -> dict[str, Any]:
    """Return what torch_ema saves, after two steps."""
    torch_ema = pytest.importorskip("torch_ema")
    average = torch_ema.ExponentialMovingAverage(model.parameters(), decay=0.5)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.data.normal_()
        average.update()
    state: dict[str, Any] = average.state_dict()
    return state


def of_diffusers(model: nn.Module) -> dict[str, Any]:
    """Return the layout of ``EMAModel.state_dict()`` of diffusers 0.35."""
    settings = {"decay": 0.9999, "min_decay": 0.0, "optimization_step": 2, "update_after_step": 0}
    more = {"use_ema_warmup": False, "inv_gamma": 1.0, "power": 2 / 3}
    values = [torch.randn_like(parameter) for parameter in model.parameters()]
    return {**settings, **more, "shadow_params": values}


def copied(state: dict[str, Any], model: nn.Module) -> bool:
    """Return whether the list fits the model's parameters; if it does, they have its values then."""
    values, parameters = state["shadow_params"], list(model.parameters())
    if [value.shape for value in values] != [parameter.shape for parameter in parameters]:
        return False
    for value, parameter in zip(values, parameters):
        parameter.data.copy_(value)
    return True


MAKERS = {"torch_ema": averaged, "diffusers": of_diffusers}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("name", ["Net", "Renamed"])
def test_fix_names_the_tensors_of_a_list(folder: Path, run: Run, name: str, maker: str) -> None:
    torch.manual_seed(0)
    state = MAKERS[maker](nets()[name]())
    torch.save(state, folder / "ema.pt")
    assert "is a list of" in "\n".join(run("inspect", "ema.pt").out.splitlines()[:4])
    done = run("diff", "ema.pt", "--model", f"averaged.py:{name}")
    assert done.status == 0, done.said
    assert "is a list of" in "\n".join(done.out.splitlines()[:4])
    done = run("fix", "ema.pt", "--model", f"averaged.py:{name}", "-o", "fixed.pt", "--verify")
    assert done.status == 0, done.said
    expected = nets()[name]()
    assert copied(state, expected)
    loaded = nets()[name]()
    written = torch.load(folder / "fixed.pt")
    loaded.load_state_dict(written["shadow_params"], strict=True)
    assert all(map(torch.equal, loaded.parameters(), expected.parameters()))
    assert {key: written[key] for key in state if key != "shadow_params"} == {
        key: state[key] for key in state if key != "shadow_params"
    }


@pytest.mark.parametrize("model", ["Net()", "Net(width=6)", "Normed()", "Renamed()"])
def test_a_list_fits_by_number_and_shapes(folder: Path, run: Run, model: str) -> None:
    state = of_diffusers(nets()["Net"]())
    torch.save(state, folder / "ema.pt")
    fits = copied(state, eval(model, nets()))
    done = run("diff", "ema.pt", "--model", f"averaged.py:{model.removesuffix('()')}")
    assert done.status == (0 if fits else 1)
    assert run("remap", "ema.pt", "--to", "serialized", "-o", "o.pt").status == 1


def test_buffers_are_not_in_a_list(folder: Path, run: Run) -> None:
    model = nets()["Normed"]()
    torch.save({"model": model.state_dict(), "ema": of_diffusers(model)}, folder / "train.pt")
    words = ("train.pt::ema.shadow_params", "--model", "averaged.py:Normed")
    assert run("diff", *words).status == 0
    refused = run("remap", *words, "--to", "serialized", "-o", "o.pt")
    assert refused.status == 1
    assert "norm.running_mean" in refused.err
    refused = run("fix", *words, "-o", "o.pt")
    assert refused.status == 1
    assert "norm.running_mean" in refused.err
    assert not (folder / "o.pt").exists()
    assert run("remap", *words, "--to", "serialized", "--partial", "-o", "o.pt").status == 0
    result = nets()["Normed"]().load_state_dict(torch.load(folder / "o.pt"), strict=False)
    buffers = [name for name, _ in model.named_buffers()]
    # torch makes a counter of batches for a state dict without module versions
    missing = {*result.missing_keys, "norm.num_batches_tracked"}
    assert (missing, result.unexpected_keys) == ({*buffers}, [])
    # the state of the average has one list
    average = ("train.pt::ema", *words[1:])
    done = run("diff", *average)
    assert done.status == 0
    assert done.out.startswith(
        "train.pt::ema.shadow_params and the parameters of averaged.py:Normed have the same shapes and"
    )
    assert "not in the list: 3 buffers of the model (norm.running_mean" in done.out
    (command,) = re.findall("^partial fix: ckpttool (.*)$", done.out, re.M)
    assert "norm.running_var" in re.findall("^not fixed: .*$", done.out, re.M)[0]
    assert run(*shlex.split(command)).status == 0
    assert (folder / "train.serialized.pt").read_bytes() == (folder / "o.pt").read_bytes()
    # with the buffers of the model next to it, the average loads
    filled = ("--fill-from", "train.pt::model", "-o", "filled.pt")
    assert run("remap", *words, "--to", "serialized", *filled).status == 0
    assert run("diff", "filled.pt", *words[1:]).status == 0
    nets()["Normed"]().load_state_dict(torch.load(folder / "filled.pt"))
    # the model of the file is compared, unless the list is named
    assert run("diff", "train.pt", *words[1:]).status == 0
    assert "(section model)" in run("diff", "train.pt", *words[1:]).out.splitlines()[0]


def test_the_order_is_that_of_the_model_in_the_file(folder: Path, run: Run) -> None:
    """The model registers its layers in another order now, as the optimizer's ids show too."""
    old = nets()["Net"](last_first=True)
    optimizer = torch.optim.Adam(old.parameters())
    for parameter in old.parameters():
        parameter.data.normal_()
    state = of_diffusers(old)
    file = {"model": old.state_dict(), "optimizer": optimizer.state_dict(), "ema": state}
    torch.save(file, folder / "train.pt")
    words = ("--model", "averaged.py:Net", "--to", "serialized", "-o", "o.pt")
    assert run("remap", "train.pt::ema.shadow_params", *words).status == 0
    assert copied(state, old)
    written = nets()["Net"]()
    written.load_state_dict(torch.load(folder / "o.pt"))
    assert all(
        torch.equal(old.state_dict()[key], value) for key, value in written.state_dict().items()
    )
