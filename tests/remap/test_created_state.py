"""`--partial` gives parameters that never had a gradient the state that the optimizer creates for
them. Oracle: training goes on as if it had not been interrupted, bit for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import ckpttool
from command import Run
from optimizer_support import equal_weights

CODE = """
import torch
from torch import nn
from torch.optim import *
class Model(nn.Module):
    def __init__(self, classes=2):
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.expert = nn.Linear(4, 4)  # gets no gradient until it is used
        self.head = nn.Linear(4, classes)
        self.uses_expert = False
    def forward(self, x):
        x = self.body(x)
        return self.head(self.expert(x) if self.uses_expert else x)
class Renamed(Model):
    def __init__(self):
        super().__init__()
        self.classifier = self.head
        del self.head
    def forward(self, x):
        x = self.body(x)
        return self.classifier(self.expert(x) if self.uses_expert else x)
class WithNewHead(Model):
    def __init__(self):
        super().__init__()
        self.head2 = nn.Linear(4, 300, bias=False)
class Large(Model):
    def __init__(self):
        super().__init__()
        self.expert2 = nn.Embedding(300, 300)
def matrices(model):
    return Muon([p for p in model.parameters() if p.ndim == 2], lr=0.1)
def two_groups(model):
    bias = [p for n, p in model.named_parameters() if "bias" in n]
    weight = [p for n, p in model.named_parameters() if "bias" not in n]
    return RMSprop([{"params": bias, "momentum": 0.0}, {"params": weight, "momentum": 0.9}])
def make_half(model):
    # keeps no state for biases
    bias = [p for n, p in model.named_parameters() if "bias" in n]
    weight = [p for n, p in model.named_parameters() if "bias" not in n]
    return SGD([{"params": bias}, {"params": weight, "momentum": 0.9}], lr=0.1)
class Counts(torch.optim.Optimizer):  # creates state and changes it in one step
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["count"] = state.get("count", 0) + 1
                    p.data.add_(p.grad, alpha=-0.1 / state["count"])
"""
MAKERS = {
    "Adam": "Adam(model.parameters(), 0.1)",
    "AdamW": "AdamW(model.parameters(), 0.1, amsgrad=True)",
    "SGD": "SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)",
    "Adagrad": "Adagrad(model.parameters(), 0.1, initial_accumulator_value=0.5)",
    "Adadelta": "Adadelta(model.parameters(), 0.1)",
    "Adamax": "Adamax(model.parameters(), 0.1)",
    "NAdam": "NAdam(model.parameters(), 0.1)",
    "RAdam": "RAdam(model.parameters(), 0.1)",
    "ASGD": "ASGD(model.parameters(), 0.1)",
    "Rprop": "Rprop(model.parameters(), 0.1)",
    "Adafactor": "Adafactor(model.parameters(), 0.1)",
    "matrices": "matrices(model)",
    "two_groups": "two_groups(model)",
}
if not hasattr(torch.optim, "Muon"):  # before torch 2.9
    del MAKERS["matrices"]
if not hasattr(torch.optim, "Adafactor"):  # before torch 2.5
    del MAKERS["Adafactor"]


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    makers = [f"def make_{name}(model):\n    return {call}\n" for name, call in MAKERS.items()]
    makers.append("def make_counts(model):\n    return Counts(model.parameters())\n")
    text = CODE + "".join(makers)
    Path("m.py").write_text(text)
    names: dict[str, Any] = {"__name__": "m"}
    exec(text, names)
    torch.manual_seed(0)
    return names


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def steps_with_expert(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.uses_expert = True
    for seed in (7, 8):
        step(model, optimizer, seed)


def train_and_save(code: dict[str, Any], maker: str, model: str = "Model") -> Any:
    """Train without the expert, save, and train on with it."""
    trained = code[model]()
    optimizer = code[f"make_{maker}"](trained)
    for seed in (1, 2):
        step(trained, optimizer, seed)
    torch.save({"model": trained.state_dict(), "optimizer": optimizer.state_dict()}, "old.pt")
    steps_with_expert(trained, optimizer)
    return trained


def fresh(code: dict[str, Any], maker: str, model: str = "Model") -> Any:
    instance = code[model]()
    return instance, code[f"make_{maker}"](instance)


@pytest.mark.parametrize("keys", ["id", "flat"])
@pytest.mark.parametrize("maker", MAKERS)
def test_training_goes_on(code: dict[str, Any], run: Run, maker: str, keys: str) -> None:
    trained = train_and_save(code, maker)
    optimizer = f"m.py:make_{maker}"
    out = "new.pt" if keys == "id" else "new.dcp"
    args = ["--to", "serialized", "--optimizer-keys", keys, "--partial"]
    args += ["--model", "m.py:Model", "--optimizer", optimizer]
    text = " ".join(run("remap", "old.pt", "-o", out, *args).out.split())
    model, optim = fresh(code, maker)
    if keys == "id":
        saved = torch.load("new.pt")
        model.load_state_dict(saved["model"])
        optim.load_state_dict(saved["optimizer"])
    else:
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        state = get_optimizer_state_dict(model, optim, options=options)
        saved = {"model": model.state_dict(), "optimizer": state}
        dcp.load(saved, checkpoint_id="new.dcp")
        set_optimizer_state_dict(model, optim, saved["optimizer"], options=options)
        model.load_state_dict(saved["model"])
    steps_with_expert(model, optim)
    assert equal_weights(model, trained)
    # Adagrad creates all state when it is made; with ids, the next step creates it
    assert ("new state of" in text) == (keys == "flat" and maker != "Adagrad")


def test_only_on_request(code: dict[str, Any], run: Run) -> None:
    train_and_save(code, "Adam")
    args = ["--optimizer", "m.py:make_Adam", "--optimizer-keys", "fqn"]
    run("remap", "old.pt", "--model", "m.py:Model", "-o", "new.pt", *args)
    assert "expert.weight" not in torch.load("new.pt")["optimizer"]["state"]


def test_parameters_without_any_state_are_not_said_to_lack_it(
    code: dict[str, Any], run: Run
) -> None:
    train_and_save(code, "half")
    args = ["--model", "m.py:Model", "--optimizer", "m.py:make_half", "--optimizer-keys", "fqn"]
    text = run("remap", "old.pt", "-o", "new.pt", *args).err
    assert "1 trainable parameter without state" in " ".join(text.split())
    assert "expert.bias" not in text
    created = run("remap", "old.pt", "-o", "all.pt", *args, "--partial").out
    assert "new state of 1 parameter, as SGD creates it: expert.weight" in " ".join(created.split())


def test_a_flattened_optimizer_that_took_no_step_needs_its_state(
    code: dict[str, Any], run: Run
) -> None:
    """torch loads one without any state by names, but not in the flattened form."""
    model, optimizer = fresh(code, "Adam")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "old.pt")
    args = ["remap", "old.pt", "--model", "m.py:Model", "--optimizer", "m.py:make_Adam"]
    warned = run(*args, "-o", "none.pt", "--optimizer-keys", "flat").err
    assert "6 trainable parameters without state" in " ".join(warned.split())
    assert not run(*args, "-o", "named.pt", "--optimizer-keys", "fqn").err
    run(*args, "-o", "all.pt", "--optimizer-keys", "flat", "--partial")
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    with pytest.raises(TypeError):
        set_optimizer_state_dict(model, optimizer, torch.load("none.pt")["optimizer"], options=flat)
    for path, options in (("named.pt", None), ("all.pt", flat)):
        model, optimizer = fresh(code, "Adam")
        saved = torch.load(path)["optimizer"]
        set_optimizer_state_dict(model, optimizer, saved, options=options)


def test_a_new_head_gets_state_too(code: dict[str, Any], run: Run) -> None:
    train_and_save(code, "Adam")
    args = ["--model", "m.py:Model", "--to-model", "m.py:WithNewHead", "--partial"]
    args += ["--optimizer", "m.py:make_Adam", "--to-optimizer", "m.py:make_Adam"]
    run("remap", "old.pt", "-o", "new.pt", *args, "--optimizer-keys", "fqn")
    state = torch.load("new.pt")["optimizer"]["state"]
    _, optimizer = fresh(code, "Adam", "WithNewHead")
    optimizer.load_state_dict(optimizer.state_dict())
    assert state["head2.weight"]["exp_avg"].shape == (300, 4)
    assert state["head2.weight"].keys() == state["head.weight"].keys()
    assert state["head2.weight"]["step"] == 0
    assert state["head.weight"]["step"] == 2


def test_names_of_the_new_model(code: dict[str, Any], run: Run) -> None:
    trained = train_and_save(code, "AdamW")
    args = ["--model", "m.py:Model", "--to-model", "m.py:Renamed", "--partial"]
    args += ["--optimizer", "m.py:make_AdamW", "--to-optimizer", "m.py:make_AdamW"]
    args += ["--optimizer-keys", "fqn", "--rule", "head.{x*} => classifier.{x*}"]
    run("remap", "old.pt", "-o", "new.pt", *args)
    model, optimizer = fresh(code, "AdamW", "Renamed")
    saved = torch.load("new.pt")
    model.load_state_dict(saved["model"])
    set_optimizer_state_dict(model, optimizer, saved["optimizer"])
    steps_with_expert(model, optimizer)
    for (_, left), (_, right) in zip(
        sorted(model.named_parameters()),
        sorted((n.replace("head", "classifier"), p) for n, p in trained.named_parameters()),
    ):
        assert torch.equal(left, right)


def test_state_of_a_large_parameter_is_tried_on_a_small_part(
    code: dict[str, Any], run: Run
) -> None:
    train_and_save(code, "Adam", "Large")
    args = ["--model", "m.py:Large", "--optimizer", "m.py:make_Adam", "--optimizer-keys", "fqn"]
    run("remap", "old.pt", "-o", "new.pt", *args, "--partial")
    state = torch.load("new.pt")["optimizer"]["state"]["expert2.weight"]
    assert torch.equal(state["exp_avg_sq"], torch.zeros(300, 300))


def test_the_plan_lists_what_is_created(code: dict[str, Any]) -> None:
    train_and_save(code, "Adam")
    planned = ckpttool.remap(
        "old.pt",
        model=code["Model"],
        optimizer=code["make_Adam"],
        optimizer_keys="fqn",
        partial=True,
        dry_run=True,
    )
    created = planned.plan.optimizers[0].created
    assert created == dict.fromkeys(created, ("step", "exp_avg", "exp_avg_sq"))
    assert sorted(created) == ["expert.bias", "expert.weight"]
    assert "expert.bias" in planned.plan.to_json()["optimizers"][0]["created"]


def test_state_that_is_changed_at_once_is_not_invented(code: dict[str, Any], run: Run) -> None:
    train_and_save(code, "counts")
    args = ["--model", "m.py:Model", "--optimizer", "m.py:make_counts", "--optimizer-keys", "fqn"]
    text = run("remap", "old.pt", "-o", "new.pt", *args, "--partial").err
    assert "no state is created for expert.weight, expert.bias" in text
    assert "Counts creates it and changes it in one step" in text
    assert "expert.weight" not in torch.load("new.pt")["optimizer"]["state"]
