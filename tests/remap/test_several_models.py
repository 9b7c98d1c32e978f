"""Several models in one file, each with its own optimizer: a generator and a discriminator, whose
names are partly the same. Oracle: torch loads each state, and the next step gives what it gives
without the remap.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import ckpttool
from command import Run
from torch_version import needs_torch

FILE = Path(__file__)
NOISE = torch.linspace(-1, 1, 15).reshape(5, 3)


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.last = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


class Discriminator(nn.Module):
    """The names of the generator, in another order and with other shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 1)
        self.first = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


class Renamed(Generator):
    """The generator with another name for its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self._modules = {"stem": self._modules["first"], "last": self._modules["last"]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.stem(x)))


class Cut(Discriminator):
    """The discriminator without its last layer."""

    def __init__(self) -> None:
        super().__init__()
        del self.last


class RenamedAndCut(Cut):
    """The same with another name for its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self._modules = {"stem": self._modules["first"]}


def named(model: nn.Module) -> torch.optim.Optimizer:
    needs_torch("2.6", "optimizers of named parameters")
    return torch.optim.Adam(list(model.named_parameters()), lr=0.1)


def unnamed(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1)


def step(models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Step the optimizers with gradients that depend on the values of the parameters."""
    for model in models:
        for parameter in model.parameters():
            parameter.grad = torch.sin(parameter.detach() * 3)
    for optimizer in optimizers:
        optimizer.step()


def saved(model: nn.Module, optimizer: torch.optim.Optimizer, form: str) -> dict[Any, Any]:
    if form == "id":
        return optimizer.state_dict()
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
    return dict(get_optimizer_state_dict(model, optimizer, options=options))


def load(model: nn.Module, optimizer: torch.optim.Optimizer, state: Any, form: str) -> None:
    if form == "id":
        optimizer.load_state_dict(state)
        return
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
    set_optimizer_state_dict(model, optimizer, state, options=options)


def trained(path: Path, form: str, make: Any) -> tuple[nn.Module, nn.Module]:
    """Save two models and their optimizers after two steps, and return the models after a third."""
    torch.manual_seed(0)
    models = (Generator(), Discriminator())
    optimizers = [make(model) for model in models]
    for _ in range(2):
        step(models, optimizers)
    file = {"G": models[0].state_dict(), "D": models[1].state_dict()}
    file["opt_g"] = saved(models[0], optimizers[0], form)
    file["opt_d"] = saved(models[1], optimizers[1], form)
    torch.save(copy.deepcopy(file), path)
    step(models, optimizers)
    return models


def resumed(file: Any, section: str, model: nn.Module, make: Any, form: str) -> dict[str, Any]:
    """Return the values of the model after it has loaded the file and taken one step."""
    model.load_state_dict(file[section])
    optimizer = make(model)
    load(model, optimizer, file[f"opt_{section.lower()}"], form)
    step([model], [optimizer])
    return model.state_dict()


def check_same(expected: dict[str, Any], actual: dict[str, Any]) -> None:
    assert expected.keys() == actual.keys()
    for key, value in expected.items():
        assert torch.equal(actual[key], value), key


@pytest.mark.parametrize("form", ["id", "fqn", "flat"])
@pytest.mark.parametrize("make", [named, unnamed])
def test_only_the_optimizer_of_the_renamed_model_follows(
    form: str, make: Any, tmp_path: Path, run: Run
) -> None:
    generator, discriminator = trained(tmp_path / "in.pt", form, make)
    rule = ("--sections", "G", "--rule", "first.{x*} => stem.{x*}")
    done = run("remap", tmp_path / "in.pt", *rule, "-o", tmp_path / "out.pt", "--format", "json")
    assert done.status == 0, done.err
    file = torch.load(tmp_path / "out.pt")
    assert str(file["opt_d"]) == str(torch.load(tmp_path / "in.pt")["opt_d"])
    of_generator = {}
    for key, value in generator.state_dict().items():
        of_generator[key.replace("first.", "stem.")] = value
    check_same(of_generator, resumed(file, "G", Renamed(), make, form))
    check_same(discriminator.state_dict(), resumed(file, "D", Discriminator(), make, form))
    notes = [note["text"] for note in done.data["notes"]]
    assert "opt_d is of D, and stays as it is" in notes


@pytest.mark.parametrize("form", ["id", "fqn", "flat"])
@pytest.mark.parametrize("make", [named, unnamed])
@pytest.mark.parametrize("only", [True, False])
def test_parameters_that_drop_leaves_out_lose_their_state(
    form: str, make: Any, only: bool, tmp_path: Path, run: Run
) -> None:
    """In the optimizer of the model that they are dropped from."""
    generator, discriminator = trained(tmp_path / "in.pt", form, make)
    pattern = "D.last.*" if only else "last.*"
    done = run("remap", tmp_path / "in.pt", "--drop", pattern, "-o", tmp_path / "out.pt")
    assert done.status == 0, done.err
    file = torch.load(tmp_path / "out.pt")
    kept = {}
    for key, value in discriminator.state_dict().items():
        if not key.startswith("last."):
            kept[key] = value
    check_same(kept, resumed(file, "D", Cut(), make, form))
    if only:
        check_same(generator.state_dict(), resumed(file, "G", Generator(), make, form))


@pytest.mark.parametrize("form", ["id", "fqn", "flat"])
@pytest.mark.parametrize("make", [named, unnamed])
@pytest.mark.parametrize("sections", ["G,D", "D,G"])
def test_models_that_change_together_may_lose_different_parameters(
    form: str, make: Any, sections: str, tmp_path: Path, run: Run
) -> None:
    generator, discriminator = trained(tmp_path / "in.pt", form, make)
    words = ("--sections", sections, "--rule", "first.{x*} => stem.{x*}", "--drop", "D.last.*")
    done = run("remap", tmp_path / "in.pt", *words, "-o", tmp_path / "out.pt")
    assert done.status == 0, done.err
    file = torch.load(tmp_path / "out.pt")
    of_generator = {}
    for key, value in generator.state_dict().items():
        of_generator[key.replace("first.", "stem.")] = value
    check_same(of_generator, resumed(file, "G", Renamed(), make, form))
    kept = {}
    for key, value in discriminator.state_dict().items():
        if not key.startswith("last."):
            kept[key.replace("first.", "stem.")] = value
    check_same(kept, resumed(file, "D", RenamedAndCut(), make, form))


@pytest.mark.parametrize("form", ["id", "fqn"])
def test_optimizer_of_one_of_two_equal_models_is_not_guessed(
    form: str, tmp_path: Path, run: Run
) -> None:
    torch.manual_seed(0)
    models = (Generator(), Generator())
    optimizers = [named(model) for model in models]
    step(models, optimizers)
    file: dict[str, Any] = {}
    for number in (0, 1):
        file[f"model_{number}"] = models[number].state_dict()
        file[f"opt_{number}"] = saved(models[number], optimizers[number], form)
    torch.save(file, tmp_path / "in.pt")
    rule = ("--rule", "first.{x*} => stem.{x*}")
    for words in ("--sections model_0", "--drop model_0.first.*"):
        options = (*words.split(), *(rule if "--sections" in words else ()))
        done = run("remap", tmp_path / "in.pt", *options, "-o", tmp_path / "out.pt")
        assert done.status == 1
        assert "opt_0 may be the optimizer of model_0 or model_1" in done.err
        assert not (tmp_path / "out.pt").exists()
    together = ("--sections", "model_0,model_1", *rule)
    assert run("remap", tmp_path / "in.pt", *together, "-o", tmp_path / "out.pt").status == 0
    out = ("-o", tmp_path / "out.pt", "--force")
    assert run("remap", tmp_path / "in.pt", "--drop", "first.*", *out).status == 0
    without = ("--sections", "model_0", *rule, "--drop", "opt_?")
    assert run("remap", tmp_path / "in.pt", *without, *out).status == 0


def test_optimizer_of_both_models_needs_their_model(tmp_path: Path, run: Run) -> None:
    models = (Generator(), Discriminator())
    optimizer = torch.optim.Adam(nn.ModuleList(models).parameters())
    step(models, [optimizer])
    file = {"G": models[0].state_dict(), "D": models[1].state_dict()}
    torch.save({**file, "optimizer": optimizer.state_dict()}, tmp_path / "in.pt")
    done = run("remap", tmp_path / "in.pt", "--drop", "first.*", "-o", tmp_path / "out.pt")
    assert done.status == 1
    assert "nothing says which of its ids are theirs" in done.err
    assert not (tmp_path / "out.pt").exists()


def test_average_keeps_the_optimizer_of_its_model(tmp_path: Path, run: Run) -> None:
    """An average of the generator has its names and shapes, but no optimizer."""
    trained(tmp_path / "in.pt", "id", unnamed)
    file = torch.load(tmp_path / "in.pt")
    torch.save({**file, "G_ema": copy.deepcopy(file["G"])}, tmp_path / "ema.pt")
    for options in (("--drop", "G_ema"), ("--drop", "G_ema.*")):
        out = ("-o", tmp_path / "out.pt", "--force")
        assert run("remap", tmp_path / "ema.pt", *options, *out).status == 0
        kept = torch.load(tmp_path / "out.pt")
        for name in ("opt_g", "opt_d"):
            assert str(kept[name]) == str(file[name])


@pytest.mark.parametrize("make", ["named", "unnamed"])
def test_order_of_another_model_is_no_doubt(make: str, tmp_path: Path, run: Run) -> None:
    trained(tmp_path / "in.pt", "id", globals()[make])
    for section, kind in (("opt_g", "Generator"), ("opt_d", "Discriminator")):
        words = ("--model", f"{FILE}:{kind}", "--optimizer", f"{FILE}:{make}")
        assert run("diff", f"{tmp_path / 'in.pt'}::{section}", *words).status == 0
        keys = ("--optimizer-keys", "fqn", "-o", tmp_path / "out.pt", "--force")
        assert run("remap", f"{tmp_path / 'in.pt'}::{section}", *words, *keys).status == 0
    words = ("--model", f"{FILE}:Generator", "--optimizer", f"{FILE}:{make}")
    assert run("diff", f"{tmp_path / 'in.pt'}::opt_d", *words).status == 1


class Tower(nn.Module):
    """A model that shares two layers of the same shapes with another one, in either order."""

    def __init__(self, names: str = "up down head") -> None:
        super().__init__()
        for name in names.split():
            self.add_module(name, nn.Linear(4, 4))


def test_order_of_common_layers_of_another_model_is_no_doubt(tmp_path: Path, run: Run) -> None:
    model, other = Tower(), Tower("down up score")
    optimizer = unnamed(model)
    step([model], [optimizer])
    file = {"model": model.state_dict(), "other": other.state_dict()}
    torch.save({**file, "optimizer": optimizer.state_dict()}, tmp_path / "in.pt")
    words = ("--model", f"{FILE}:Tower", "--optimizer", f"{FILE}:unnamed")
    assert run("diff", f"{tmp_path / 'in.pt'}::optimizer", *words).status == 0
    turned = dict(reversed(file["model"].items()))
    torch.save({**file, "model": turned, "optimizer": optimizer.state_dict()}, tmp_path / "in.pt")
    assert run("diff", f"{tmp_path / 'in.pt'}::optimizer", *words).status == 1


def test_order_of_another_model_in_the_other_file_is_no_difference(
    tmp_path: Path, run: Run
) -> None:
    trained(tmp_path / "a.pt", "id", unnamed)
    file = torch.load(tmp_path / "a.pt")
    others = {
        "same.pt": file,
        "turned.pt": dict(reversed(file.items())),
        "alone.pt": {name: file[name] for name in ("G", "opt_g")},
    }
    for name, other in others.items():
        torch.save(other, tmp_path / name)
        both = (f"{tmp_path / 'a.pt'}::opt_g", f"{tmp_path / name}::opt_g")
        assert run("diff", *both, "--values").status == 0, name
    swapped = {**file, "G": dict(reversed(file["G"].items()))}
    torch.save(swapped, tmp_path / "swapped.pt")
    both = (f"{tmp_path / 'a.pt'}::opt_g", f"{tmp_path / 'swapped.pt'}::opt_g")
    assert run("diff", *both).status == 1


def test_ids_of_another_model_get_no_names(tmp_path: Path, run: Run) -> None:
    trained(tmp_path / "in.pt", "id", unnamed)
    words = ("--sections", "G", "--model", f"{FILE}:Generator", "--optimizer-keys", "fqn")
    done = run("remap", tmp_path / "in.pt", *words, "-o", tmp_path / "out.pt")
    assert done.status == 1
    assert "opt_d is of D, whose model is not given" in done.err
    assert not (tmp_path / "out.pt").exists()


def test_model_and_optimizer_are_loaded_by_their_sections(tmp_path: Path) -> None:
    generator, discriminator = trained(tmp_path / "in.pt", "id", unnamed)
    for section, expected in (("G", generator), ("D", discriminator)):
        model = type(expected)()
        optimizer = unnamed(model)
        part = f"{tmp_path / 'in.pt'}::opt_{section.lower()}"
        loaded = ckpttool.load(part, model, optimizer, section=section)
        assert (loaded.section, loaded.tensors) == (section, 4)
        step([model], [optimizer])
        check_same(expected.state_dict(), model.state_dict())


# An optimizer of a part of the model, under the names of this part


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.d = Discriminator()
        self.g = Generator()
        self.extra = nn.Linear(2, 2)


class Swapped(Both):
    """The same model with its parts in another order."""

    def __init__(self) -> None:
        super().__init__()
        self._modules = {name: self._modules[name] for name in ("extra", "g", "d")}


def of_part(model: Both, part: str, groups: bool = False) -> torch.optim.Optimizer:
    module = getattr(model, part)
    if not groups:
        return named(module)
    optimizer = torch.optim.Adam([{"params": [*module.first.named_parameters()]}], lr=0.1)
    optimizer.add_param_group({"params": [*module.last.named_parameters()], "lr": 0.01})
    return optimizer  # both groups have the same names


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("keys", ["id", "fqn", "flat"])
def test_names_of_a_part_are_found_by_its_optimizer(
    groups: bool, keys: str, tmp_path: Path, run: Run
) -> None:
    needs_torch("2.6", "optimizers of named parameters")
    torch.manual_seed(0)
    model = Both()
    parts = [of_part(model, part, groups) for part in "gd"]
    for _ in range(2):
        step([model], parts)
    file = {"model": model.state_dict(), "g": parts[0].state_dict(), "d": parts[1].state_dict()}
    torch.save(copy.deepcopy(file), tmp_path / "in.pt")
    step([model], parts)
    both = ["--model", f"{FILE}:Both"]
    words = ["--to-model", f"{FILE}:Swapped"]
    for part in "gd":
        make = f"{FILE}:of_part(part='{part}', groups={groups})"
        section = f"{tmp_path / 'in.pt'}::{part}"
        assert run("diff", section, *both, "--optimizer", make).status == 0
        words += ["--optimizer", f"{part}={make}", "--to-optimizer", f"{part}={make}"]
    more = ("--optimizer-keys", keys, "-o", tmp_path / "out.pt")
    done = run("remap", tmp_path / "in.pt", *both, *words, *more)
    assert done.status == 0, done.err
    result = torch.load(tmp_path / "out.pt")
    new = Swapped()
    new.load_state_dict(result["model"])
    optimizers = [of_part(new, part, groups) for part in "gd"]
    for part, optimizer in zip("gd", optimizers):
        load(new, optimizer, result[part], keys)
    step([new], optimizers)
    check_same(dict(model.state_dict()), dict(new.state_dict()))


def test_names_of_a_part_do_not_hide_another_order(tmp_path: Path, run: Run) -> None:
    needs_torch("2.6", "optimizers of named parameters")
    model = Both()
    optimizer = torch.optim.Adam(list(model.g.named_parameters())[::-1])
    step([model], [optimizer])
    torch.save({"model": model.state_dict(), "g": optimizer.state_dict()}, tmp_path / "in.pt")
    words = ("--model", f"{FILE}:Both", "--optimizer", f"{FILE}:of_part(part='g')")
    done = run("diff", f"{tmp_path / 'in.pt'}::g", *words, "--format", "json")
    assert done.status == 1
    details = {entry["detail"] for entry in done.data["entries"] if entry["status"] == "order"}
    assert details == {f"gets the state of g.{name}" for name, _ in model.g.named_parameters()}
