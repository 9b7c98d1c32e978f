"""Constants that a swap keeps are compared with the model's. Oracle: the eager model with the new
weights.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpttool
from ckpttool import Refused
from command import Run, call

X = torch.linspace(-1, 1, 6).reshape(2, 3)
BY_CONSTRUCTOR = {"buffer", "attribute", "nested"}
BY_LOADING = {"remade", "view", "cached"}  # they follow the weights
PARTS = ("literal", "random", "of_weights", *sorted(BY_CONSTRUCTOR), *sorted(BY_LOADING))


class Model(nn.Module):
    """A layer and tensors outside its state dict, selected by `parts`; some depend on `k`."""

    def __init__(self, parts: tuple[str, ...], k: float) -> None:
        super().__init__()
        self.parts = parts
        self.fc = nn.Linear(3, 3)
        if "buffer" in parts:
            self.register_buffer("scale", torch.full((3,), k), persistent=False)
        if "attribute" in parts:
            self.shift = torch.tensor([k])
        if "nested" in parts:
            self.inner = nn.Module()
            self.inner.register_buffer("table", torch.arange(3.0) * k, persistent=False)
        if "random" in parts:
            self.register_buffer("noise", torch.randn(3), persistent=False)
        if "of_weights" in parts:
            self.register_buffer("norm", self.fc.weight.detach().norm(), persistent=False)
        if "remade" in parts:
            self.register_buffer("mean", torch.zeros(3), persistent=False)
            self.register_load_state_dict_post_hook(_remake)
        if "view" in parts:
            self.row = self.fc.weight.detach()[0]
        if "cached" in parts:
            self.sum = torch.zeros(3)
            self.register_load_state_dict_post_hook(_cache)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fc(x)
        for part, name in (
            ("buffer", "scale"),
            ("random", "noise"),
            ("of_weights", "norm"),
            ("remade", "mean"),
            ("view", "row"),
            ("cached", "sum"),
        ):
            x = x * getattr(self, name) if part in self.parts else x
        x = x + self.shift if "attribute" in self.parts else x
        x = x + self.inner.table if "nested" in self.parts else x
        return x + torch.tensor([0.5]) if "literal" in self.parts else x


def _remake(module: Any, _: object) -> None:
    with torch.no_grad():
        module.mean.copy_(module.fc.weight.mean(0))


def _cache(module: Any, _: object) -> None:
    module.sum = module.fc.weight.detach().sum(0)


def build(parts: str, k: float) -> nn.Module:
    return Model(tuple(parts.split()), k).eval()


def saved(parts: str, old: float, new: float, folder: Path) -> tuple[str, str, torch.Tensor]:
    """Save a program of the old model and a checkpoint of the new one; return both and the expected
    outputs.
    """
    torch.manual_seed(0)
    torch.export.save(torch.export.export(build(parts, old), (X,)), folder / "old.pt2")
    state = {
        name: torch.randn_like(value) for name, value in build(parts, new).state_dict().items()
    }
    torch.save(state, folder / "new.pt")
    eager = build(parts, new)
    eager.load_state_dict(state)
    return str(folder / "old.pt2"), str(folder / "new.pt"), eager(X)


def outputs(path: str) -> torch.Tensor:
    found: torch.Tensor = torch.export.load(path).module()(X)
    return found


@pytest.mark.parametrize("seed", range(8))
def test_outputs_are_correct_if_constants_are_reported_as_equal(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    parts = " ".join(part for part in PARTS if rng.random() < 0.5) or "buffer"
    old, new = 2.0, rng.choice([2.0, 3.0])
    program, weights, expected = saved(parts, old, new, tmp_path)
    model: dict[str, Any] = {"model": call(f"{__file__}:build", parts=parts, k=new)}
    decided = BY_LOADING.intersection(parts.split())
    if old != new:
        decided |= BY_CONSTRUCTOR.intersection(parts.split())
    ways: list[dict[str, Any]] = [{}, {"constants": True}, {"keep_constants": True}]
    for options in ways:
        out = str(tmp_path / f"{'-'.join(options) or 'none'}.pt2")
        try:
            done: Any = ckpttool.swap_weights(program, weights, out, **model, **options)
        except Refused:
            assert not options
            assert decided
            continue
        verdicts = {one.verdict for one in done.compared}
        assert bool(verdicts & {"different"}) == (bool(decided) and "keep_constants" in options)
        unknown = {one.name for one in done.compared if one.verdict == "not_compared"}
        assert {name.partition("_")[0] for name in unknown} <= {"noise", "norm", "lifted"}
        if verdicts <= {"equal", "from_model"}:
            assert torch.equal(outputs(out), expected)
        if {"noise", "norm"} & unknown or verdicts & {"different"}:
            continue
        assert torch.equal(outputs(out), expected) or "keep_constants" in options


def test_different_constants_are_refused_by_name(tmp_path: Path, run: Run) -> None:
    program, weights, expected = saved("buffer attribute literal", 2.0, 3.0, tmp_path)
    out = tmp_path / "out.pt2"
    model = call(f"{__file__}:build", parts="buffer attribute literal", k=3.0)
    words = ("swap-weights", program, weights, "-o", out, "--model", model)
    done = run(*words)
    assert done.status == 1
    assert not out.exists()
    assert "scale" in done.err
    assert "shift" in done.err
    assert "--keep-constants" in done.err
    done = run(*words, "--keep-constants")
    assert done.status == 0
    assert "kept, the model has another" in done.out
    assert not torch.equal(outputs(str(out)), expected)
    done = run(*words, "--constants", "--force", "--verify")
    assert done.status == 0, done.err
    assert "taken from the model" in done.out
    assert torch.equal(outputs(str(out)), expected)
    assert run(*words, "--constants", "--keep-constants", "--force").status == 2


def test_constants_are_listed_but_not_compared_without_a_model(tmp_path: Path, run: Run) -> None:
    program, weights, _ = saved("buffer", 2.0, 3.0, tmp_path)
    done = run("swap-weights", program, weights, "--dry-run")
    assert done.status == 0
    assert "scale" in done.out
    assert "not compared" in done.out


def test_new_constants_without_a_source_are_refused(tmp_path: Path, run: Run) -> None:
    program, weights, expected = saved("buffer", 2.0, 3.0, tmp_path)
    out = tmp_path / "new.pt2"
    words = ("swap-weights", program, weights, "--constants", "-o", out)
    refused = run(*words)
    assert (refused.status, out.exists()) == (1, False)
    assert "the weights do not have it @ scale" in refused.err
    assert "add --model" in refused.err
    model = call(f"{__file__}:build", parts="buffer", k=3.0)
    assert run(*words, "--model", model).status == 0
    assert torch.equal(outputs(str(out)), expected)
    in_memory = torch.export.load(program)
    with pytest.raises(Refused, match="1 problem") as error:
        ckpttool.swap_weights(in_memory, torch.load(weights), constants=True)
    assert "add model=module" in (error.value.hint or "")


def test_constants_of_torchscript_are_reported_as_not_compared(tmp_path: Path, run: Run) -> None:
    program, new = tmp_path / "old.pt", tmp_path / "new.pt"
    torch.jit.trace(build("cached", 2.0), (X,), check_trace=False).save(str(program))
    torch.save(build("cached", 2.0).state_dict(), new)
    model = call(f"{__file__}:build", parts="cached", k=2.0)
    done = run("swap-weights", program, new, "--model", model, "--dry-run")
    assert done.status == 0
    assert "kept, not compared: plain attributes and constants of its code: 1 tensor" in done.out


@pytest.mark.parametrize("in_place", [False, True])
def test_constants_of_a_program_in_memory(in_place: bool, tmp_path: Path) -> None:
    saved("buffer attribute", 2.0, 3.0, tmp_path)
    program = torch.export.export(build("buffer attribute", 2.0), (X,))
    model = build("buffer attribute", 3.0)
    with pytest.raises(Refused) as refused:
        ckpttool.swap_weights(program, model.state_dict(), model=model)
    assert {problem.key for problem in refused.value.problems} == {"scale", "shift"}
    assert "keep_constants=True" in refused.value.hint
    done: Any = ckpttool.swap_weights(
        program, model.state_dict(), model=model, constants=True, in_place=in_place
    )
    assert {one.verdict for one in done.compared} == {"from_model"}
    assert torch.equal(program.module()(X), model(X))
    done = ckpttool.swap_weights(program, model.state_dict(), model=model)
    assert {one.verdict for one in done.compared} == {"equal"}


class Scaled(nn.Module):
    """It has only a constant, no state dict entry."""

    def __init__(self, k: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((3,), k), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def export(model: nn.Module, path: Path) -> Path:
    torch.export.save(torch.export.export(model.eval(), (X,)), path)
    return path


@pytest.mark.parametrize("options", [[], ["--dry-run"], ["--keep-constants"]])
def test_swap_without_a_matching_key_is_refused(
    options: list[str], run: Run, tmp_path: Path
) -> None:
    program, out = export(Scaled(), tmp_path / "p.pt2"), tmp_path / "out.pt2"
    torch.save({"model": {}, "epoch": 3, "state_dict": {"_extra_state": 3}}, tmp_path / "new.pt")
    torch.save({"scale": torch.full((3,), 2.0)}, tmp_path / "scale.pt")
    torch.save({"state_dict": {"_extra_state": 3}, "w": torch.ones(1)}, tmp_path / "other.pt")
    torch.save(nn.Linear(3, 3).state_dict(), tmp_path / "linear.pt")
    for name in ("new.pt", "scale.pt", "other.pt", "linear.pt"):
        done = run("swap-weights", program, tmp_path / name, "-o", out, *options)
        assert done.status in (1, 2), (name, done.said)
        assert not out.exists()
    done = run("swap-weights", program, tmp_path / "scale.pt", "-o", out, "--constants")
    assert done.status == 0, done.said
    assert torch.equal(torch.export.load(out).module()(X), X * 2)


class Marked(Scaled):
    """Its state dict has an additional version entry."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(
            lambda own, state, prefix, _: state.update({f"{prefix}v": torch.ones(1)})
        )
        self.register_load_state_dict_pre_hook(
            lambda own, state, prefix, *rest: state.pop(f"{prefix}v")
        )


@pytest.mark.parametrize("options", [[], ["--dry-run"], ["--keep-constants"]])
def test_keys_without_a_weight_are_refused(options: list[str], run: Run, tmp_path: Path) -> None:
    """A constant that a hook writes into the state dict is ignored if weights are swapped."""
    program, out = export(Marked(), tmp_path / "p.pt2"), tmp_path / "out.pt2"
    torch.save(Marked().state_dict(), tmp_path / "new.pt")
    done = run(
        "swap-weights",
        program,
        tmp_path / "new.pt",
        "-o",
        out,
        "--model",
        f"{__file__}:Marked",
        *options,
    )
    assert done.status == 1, done.said
    assert done.err.splitlines()[-2].startswith("error: nothing to swap: no key of ")
    assert not out.exists()


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_unchanged_values_are_reported(dry: list[str], run: Run, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    program = export(model, tmp_path / "p.pt2")
    torch.save(model.state_dict(), tmp_path / "same.pt")
    torch.save({**model.state_dict(), "1.bias": torch.full((2,), 9.0)}, tmp_path / "last.pt")
    verdict = ", which it had already"
    for name, unchanged in (("same.pt", True), ("last.pt", False)):
        command = (
            "swap-weights",
            program,
            tmp_path / name,
            "-o",
            tmp_path / "out.pt2",
            "--force",
            *dry,
        )
        done = run(*command)
        assert done.status == 0, done.said
        assert (verdict in done.out) is unchanged
        assert run(*command, "--format", "json").data["unchanged"] is unchanged
