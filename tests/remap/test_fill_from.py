"""`remap --fill-from`: missing keys come from other checkpoints or a new model, in order, and the
report says from where.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import ckpttool
from ckpttool import Refused
from command import Run, notes_in

MODEL = """
import torch
from torch import nn
class Network(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.encoder, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.head, self.mtp = nn.Linear(4, classes), nn.Linear(4, 4)
def build(classes=3):
    return Network(classes)
def old():
    model = Network()
    del model.head, model.mtp
    return model
def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1)
"""
State = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL)
    state = complete()
    torch.save(part(state, "encoder", "norm"), "part.pt")
    save_file(part(state, "encoder", "head"), "head.safetensors")
    wrapped = {f"module.{key}": value for key, value in part(state, "mtp", "head").items()}
    torch.save({"model": wrapped, "epoch": 3}, "mtp.pt")


def network() -> nn.Module:
    namespace: dict[str, Any] = {}
    exec(MODEL, namespace)
    torch.manual_seed(1)
    model: nn.Module = namespace["build"]()
    return model


def complete() -> State:
    return dict(network().state_dict())


def part(state: State, *modules: str) -> State:
    return {key: value for key, value in state.items() if key.startswith(modules)}


def same(left: State, right: State) -> bool:
    return left.keys() == right.keys() and all(
        value.dtype == right[key].dtype and torch.equal(value, right[key])
        for key, value in left.items()
    )


@pytest.mark.parametrize("out", ["out.pt", "out.safetensors"])
@pytest.mark.parametrize("names", [("--model", "model.py:build"), ("--like", "all.pt")])
def test_keys_come_from_the_first_that_has_them(run: Run, names: tuple[str, str], out: str) -> None:
    torch.save(complete(), "all.pt")
    sources = ("--fill-from", "head.safetensors", "--fill-from", "mtp.pt")
    done = run("remap", "part.pt", *names, *sources, "-o", out, "--format", "json")
    assert done.status == 0, done.err
    assert done.data["filled"] == [
        {"source": "head.safetensors", "keys": ["head.weight", "head.bias"], "unused": 2},
        {"source": "mtp.pt", "keys": ["mtp.weight", "mtp.bias"], "unused": 2},
    ]
    assert not any("not in the output" in note for note in notes_in(done.data))
    result = torch.load(out) if out == "out.pt" else load_file(out)
    assert same(result, complete())
    network().load_state_dict(result)


def test_overlap_is_not_used() -> None:
    changed = {key: value + 1 for key, value in complete().items()}
    done = ckpttool.remap("part.pt", "out.pt", model="model.py:build", fill_from=[changed])
    result = torch.load("out.pt")
    assert same(part(result, "encoder", "norm"), part(complete(), "encoder", "norm"))
    assert same(part(result, "head", "mtp"), part(changed, "head", "mtp"))
    assert [(filled.keys, filled.unused) for filled in done.filled] == [
        (("head.weight", "head.bias", "mtp.weight", "mtp.bias"), 7)
    ]


@pytest.mark.parametrize("source", ["model.py:build", "object"])
def test_a_new_model_gives_the_values_of_its_code(source: str) -> None:
    fill_from: Any = source
    if source == "object":
        namespace: dict[str, Any] = {}
        exec(MODEL, namespace)
        fill_from = namespace["build"]
    ckpttool.remap("part.pt", "out.pt", model="model.py:build", fill_from=fill_from)
    result = torch.load("out.pt")
    torch.manual_seed(0)
    namespace = {}
    exec(MODEL, namespace)
    assert same(part(result, "head"), part(dict(namespace["build"]().state_dict()), "head"))
    assert same(part(result, "encoder"), part(complete(), "encoder"))


def test_a_head_of_another_shape_is_replaced(run: Run) -> None:
    torch.save(complete(), "all.pt")
    model = "model.py:build(classes=7)"
    line = ("remap", "all.pt", "--drop", "head.*", "--model", model, "--fill-from", model)
    assert run(*line, "-o", "out.pt").status == 0
    assert torch.load("out.pt")["head.weight"].shape == (7, 4)
    assert run("diff", "--model", model, "out.pt").status == 0


def test_wrappers_are_added_to_all_keys() -> None:
    sources = ["head.safetensors", "mtp.pt"]
    ckpttool.remap("part.pt", "out.pt", model="model.py:build", fill_from=sources, to="ddp")
    expected = {f"module.{key}": value for key, value in complete().items()}
    assert same(torch.load("out.pt"), expected)


def test_all_sections_of_the_model_are_filled() -> None:
    backbone = part(complete(), "encoder", "norm")
    torch.save({"model": backbone, "ema": backbone}, "train.pt")
    sources = ["head.safetensors", "mtp.pt"]
    done = ckpttool.remap("train.pt", "out.pt", model="model.py:build", fill_from=sources)
    result = torch.load("out.pt")
    assert same(result["model"], complete())
    assert same(result["ema"], complete())
    assert "ema.mtp.bias" in done.filled[1].keys


def test_keys_that_nobody_has_are_still_missing(run: Run) -> None:
    line = ("remap", "part.pt", "--model", "model.py:build", "--fill-from", "head.safetensors")
    done = run(*line, "-o", "out.pt")
    assert done.status == 1
    assert "missing @ mtp.weight" in done.err
    assert "head" not in done.err
    assert run(*line, "-o", "out.pt", "--partial").status == 0
    assert same(torch.load("out.pt"), part(complete(), "encoder", "norm", "head"))


def test_the_backbone_keeps_its_optimizer_state(run: Run) -> None:
    model = network()
    del model.head, model.mtp
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.norm(model.encoder(torch.ones(5, 4))).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "train.pt")
    models = ("--model", "model.py:old", "--to-model", "model.py:build")
    optimizers = ("--to-optimizer", "model.py:adamw", "--fill-from", "model.py:build")
    assert run("remap", "train.pt", *models, *optimizers, "-o", "out.pt").status == 0
    result = torch.load("out.pt")
    new = network()
    new.load_state_dict(result["model"])
    new_optimizer = torch.optim.AdamW(new.parameters(), lr=0.1)
    new_optimizer.load_state_dict(result["optimizer"])
    for name, parameter in model.named_parameters():
        moment = new_optimizer.state[new.get_parameter(name)]["exp_avg"]
        assert torch.equal(moment, optimizer.state[parameter]["exp_avg"])
    assert new.head.weight not in new_optimizer.state


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        ("--fill-from head.safetensors", 2, "--fill-from must know which keys are missing"),
        ("--model model.py:build --fill-from absent.pt", 2, "no such file: absent.pt"),
        ("--model model.py:build --fill-from model.py:absent", 2, "has no attribute 'absent'"),
        ("--model model.py:build --fill-from head.safetensors --select encoder", 2, "--select"),
        ("--model model.py:build --fill-from sparse.pt", 1, "not a dense tensor (sparse_coo)"),
    ],
)
def test_what_cannot_be_filled(run: Run, options: str, status: int, words: str) -> None:
    torch.save({"head.weight": torch.eye(4).to_sparse()}, "sparse.pt")
    done = run("remap", "part.pt", "-o", "out.pt", *options.split())
    assert done.status == status, done.err
    assert words in done.err
    assert not Path("out.pt").exists()


def test_a_source_that_gives_nothing_is_said(run: Run) -> None:
    sources = ("--fill-from", "part.pt", "--fill-from", "head.safetensors", "--fill-from", "mtp.pt")
    done = run("remap", "part.pt", "--model", "model.py:build", *sources, "-o", "out.pt")
    assert done.status == 0
    assert "part.pt has no key that is missing: nothing is taken from it" in done.out + done.err


def test_a_head_that_does_not_fit_is_refused() -> None:
    save_file({"head.weight": torch.ones(9, 4), "head.bias": torch.ones(9)}, "head9.safetensors")
    with pytest.raises(Refused) as caught:
        ckpttool.remap(
            "part.pt", "out.pt", model="model.py:build", fill_from=["head9.safetensors", "mtp.pt"]
        )
    assert {problem.key for problem in caught.value.problems} == {"head.weight", "head.bias"}


def test_nothing_is_filled_in_place(run: Run) -> None:
    before = Path("part.pt").read_bytes()
    sources = ("--fill-from", "head.safetensors", "--fill-from", "mtp.pt")
    assert run("remap", "part.pt", "--model", "model.py:build", *sources, "--in-place").status == 1
    assert Path("part.pt").read_bytes() == before
