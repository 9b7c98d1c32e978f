"""Model and optimizer are renamed and reordered together, and torch resumes from the result."""

from __future__ import annotations

import itertools
import random
import shlex
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, load, save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import ckpttool
from command import Run

OLD, NEW = ("a", "b", "c"), ("cc", "a", "bb")
RULES = ("--rule", "b.{x*} => bb.{x*}", "--rule", "c.{x*} => cc.{x*}")


class Net(nn.Module):
    """Layers of the same shape, which differ only in order and name. They are called in the old
    order.
    """

    def __init__(self, layers: Sequence[str], hooked: bool = False) -> None:
        super().__init__()
        for name in layers:
            self.add_module(name, nn.Linear(2, 2))
        if hooked:
            self.register_state_dict_post_hook(_shown)
            self.register_load_state_dict_pre_hook(_hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in sorted(self._modules):
            x = torch.tanh(self._modules[name](x))  # type: ignore[misc]
        return x


def _shown(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
    for key in [key for key in state if key.startswith(f"{prefix}a.")]:
        state[f"{prefix}shown.{key.removeprefix(f'{prefix}a.')}"] = state.pop(key)


def _hidden(module: nn.Module, state: dict[str, Any], prefix: str, *rest: object) -> None:
    for key in [key for key in state if key.startswith(f"{prefix}shown.")]:
        state[f"{prefix}a.{key.removeprefix(f'{prefix}shown.')}"] = state.pop(key)


class Wrapped(nn.Module):
    """A wrapper that prefixes names like DistributedDataParallel."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def make(model: nn.Module, kind: str, groups: int, named: bool = False) -> torch.optim.Optimizer:
    """Return an optimizer; with two groups, the biases are in the second one."""
    pairs = list(model.named_parameters())
    parts = [
        [p for p in pairs if (groups == 2 and p[1].dim() < 2) == which] for which in (False, True)
    ]
    chosen = [part if named else [parameter for _, parameter in part] for part in parts if part]
    options: list[dict[str, Any]] = [
        {"params": part, "weight_decay": 0.1 * at} for at, part in enumerate(chosen)
    ]
    return torch.optim.SGD(options, 0.1, 0.9) if kind == "SGD" else torch.optim.AdamW(options, 0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    model(
        torch.randn(4, 2, generator=torch.Generator().manual_seed(seed))
    ).square().sum().backward()
    optimizer.step()


def register_module(monkeypatch: pytest.MonkeyPatch, **attributes: Any) -> None:
    """Make the attributes available on the command line as renamed_net:NAME."""
    module = types.ModuleType("renamed_net")
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, "renamed_net", module)


# Names in wrappers

WRAPS = {
    "serialized": lambda model: model,
    "ddp": Wrapped,
    "compile": torch.compile,
    "ddp(compile)": lambda model: Wrapped(cast(nn.Module, torch.compile(model))),
}


def parameter_names(optimizer: Mapping[str, Any]) -> list[str]:
    if "param_groups" not in optimizer:
        return [
            key.removeprefix("param_groups.")[: -len(".lr")]
            for key in optimizer
            if key.endswith(".lr")
        ]
    groups = optimizer["param_groups"]
    return [
        name
        for group in groups
        for name in group.get("param_names", group["params"])
        if isinstance(name, str)
    ]


@pytest.mark.parametrize("form", ["id", "param_names", "fqn", "flat"])
@pytest.mark.parametrize("wrap", WRAPS)
def test_optimizer_names_are_keys_of_the_model(
    wrap: str, form: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each kind of file, try random combinations of options; refused remaps are skipped."""
    chance = random.Random(f"{wrap} {form}")
    register_module(
        monkeypatch,
        net=lambda: Net(OLD),
        hooked=lambda: Net(OLD, hooked=True),
        make=lambda m: make(m, "SGD", 1),
    )
    refused, known = 0, ("--model", "renamed_net:{}", "--optimizer", "renamed_net:make")
    options = list(
        itertools.product((0, 2, 4), (None, "id", "fqn", "flat"), (None, *WRAPS), (False, True))
    )
    for at, (count, keys, to, hooked) in enumerate(
        [(4, "fqn", None, False), *chance.sample(options, 5)]
    ):
        net = Net(OLD, hooked)
        model: Any = WRAPS[wrap](net)
        optimizer = make(model, "SGD", 1, form == "param_names")
        step(net, optimizer, 0)
        state: Any = optimizer.state_dict()
        if form in ("fqn", "flat"):
            state = get_optimizer_state_dict(net, optimizer, options=flat(form))
        source, out = tmp_path / "in.pt", tmp_path / f"{at}.pt"
        torch.save({"model": model.state_dict(), "optimizer": state}, source)
        args = [word.format("hooked" if hooked else "net") for word in known[:count]]
        args += [] if keys is None else ["--optimizer-keys", keys]
        args += [] if to is None else ["--to", to]
        done = run("remap", source, *args, "-o", out)
        assert done.status in (0, 1), done.err
        if done.status == 1:
            refused += 1
            continue
        result = torch.load(out)
        names, stored = parameter_names(result["optimizer"]), list(result["model"])
        prefix = next(
            stored[0][: stored[0].index(layer)]
            for layer in ("shown.", "a.", "b.")
            if layer in stored[0]
        )
        # torch saves these without wrapper prefixes
        without_prefix = form in ("fqn", "flat") and wrap != "serialized"
        allowed = {*stored, *(prefix + name for name, _ in net.named_parameters())}
        assert set(names) <= allowed or (
            without_prefix and set(names) <= {n for n, _ in net.named_parameters()}
        ), args
        if keys in ("fqn", "flat") and to is None:
            assert prefix == "" or not count
    assert refused < 6  # at least one is written; a remap without changes is refused too


def flat(form: str) -> StateDictOptions:
    return StateDictOptions(flatten_optimizer_state_dict=form == "flat")


def test_fqn_keys_remove_the_wrappers_of_the_model(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_module(monkeypatch, net=lambda: Net(OLD), make=lambda model: make(model, "AdamW", 1))
    net = Net(OLD)
    model = Wrapped(torch.compile(net))  # type: ignore[arg-type]
    optimizer = make(model, "AdamW", 1)
    step(net, optimizer, 0)
    path, out = tmp_path / "in.pt", tmp_path / "out.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    operands = ("--model", "renamed_net:net", "--optimizer", "renamed_net:make")
    assert run("remap", path, *operands, "--optimizer-keys", "fqn", "-o", out).status == 0
    result, fresh = torch.load(out), Net(OLD)
    assert set(result["model"]) == set(parameter_names(result["optimizer"]))
    fresh.load_state_dict(result["model"])
    set_optimizer_state_dict(fresh, make(fresh, "AdamW", 1), result["optimizer"])
    assert run("diff", *operands, out).status == 0
    done = run(
        "remap", path, *operands, "--optimizer-keys", "fqn", "--to", "ddp", "-o", tmp_path / "no.pt"
    )
    assert done.status == 1
    assert "have no wrappers" in done.err


# Another order


def save_run(path: Path, form: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    names = form in ("fqn", "dcp")
    state = get_optimizer_state_dict(model, optimizer) if names else optimizer.state_dict()
    checkpoint = {"model": model.state_dict(), "optimizer": state}
    if form == "dcp":
        save(checkpoint, storage_writer=FileSystemWriter(path))
    else:
        torch.save(checkpoint, path)


def resumed(path: Path, form: str, kind: str, groups: int) -> dict[str, torch.Tensor]:
    model = Net(NEW)
    optimizer = make(model, kind, groups)
    if form == "dcp":
        checkpoint = {
            "model": model.state_dict(),
            "optimizer": get_optimizer_state_dict(model, optimizer),
        }
        load(checkpoint, storage_reader=FileSystemReader(path))
    else:
        checkpoint = torch.load(path)
    model.load_state_dict(checkpoint["model"])
    if form in ("fqn", "dcp"):
        set_optimizer_state_dict(model, optimizer, checkpoint["optimizer"])
    else:
        optimizer.load_state_dict(checkpoint["optimizer"])
    for seed in (7, 8):
        step(model, optimizer, seed)
    return dict(model.named_parameters())


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.parametrize("form", ["id", "param_names", "fqn", "dcp"])
def test_renamed_and_reordered_run_resumes_exactly(
    form: str, kind: str, groups: int, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_module(
        monkeypatch,
        old=lambda: Net(OLD),
        new=lambda: Net(NEW),
        make=lambda model: make(model, kind, groups),
    )
    torch.manual_seed(0)
    model = Net(OLD)
    optimizer = make(model, kind, groups, form == "param_names")
    for seed in (1, 2):
        step(model, optimizer, seed)
    path = tmp_path / ("run.dcp" if form == "dcp" else "run.pt")
    save_run(path, form, model, optimizer)
    for seed in (7, 8):
        step(model, optimizer, seed)
    new_names = {"b": "bb", "c": "cc"}
    expected = {
        f"{new_names.get(n[0], n[0])}{n[1:]}": parameter
        for n, parameter in model.named_parameters()
    }
    old = ("--model", "renamed_net:old", "--optimizer", "renamed_net:make")
    new = ("--to-model", "renamed_net:new", "--to-optimizer", "renamed_net:make")
    option_sets: list[tuple[str, ...]] = [(*old, *new)]
    if form != "id":  # the file names its parameters: the old model is not needed
        keys = "id" if form == "param_names" else "fqn"
        option_sets += [
            new,
            (
                "--model",
                "renamed_net:new",
                "--optimizer",
                "renamed_net:make",
                "--optimizer-keys",
                keys,
            ),
        ]
    for at, options in enumerate(option_sets):
        out = tmp_path / f"{at}{path.suffix}"
        done = run("remap", path, *options, *RULES, "-o", out, "--no-fsync")
        assert done.status == 0, (options, done.err)
        assert "ids keep the order" not in done.out + done.err
        result = resumed(out, form, kind, groups)
        assert all(torch.equal(result[name], expected[name]) for name in expected), options


def test_note_says_that_rules_do_not_reorder_ids(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The note suggests a command that checks the order; it is omitted if nothing can be
    misassigned.
    """
    register_module(
        monkeypatch,
        old=lambda: Net(OLD),
        new=lambda: Net(NEW),
        make=lambda model: make(model, "AdamW", 1),
    )
    model = Net(OLD)
    optimizer = make(model, "AdamW", 1)
    step(model, optimizer, 0)
    path, out = tmp_path / "run.pt", tmp_path / "out.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    done = ckpttool.remap(str(path), str(out), rule=[*RULES[1::2]])
    (note,) = (
        note for note in done.notes if "ids keep the order of the model that saved them" in note
    )
    command = (
        note.partition("check with ")[2]
        .replace("NEW", "renamed_net:new")
        .replace(" O ", " renamed_net:make ")
    )
    assert run(*shlex.split(command)[1:]).status == 1
    assert run("diff", "--model", "renamed_net:new", out).status == 0
    assert not ckpttool.remap(str(path), to="ddp").notes
    torch.save(
        {"model": model.state_dict(), "optimizer": make(model, "AdamW", 1).state_dict()}, path
    )
    assert not ckpttool.remap(str(path), rule=[*RULES[1::2]]).notes
