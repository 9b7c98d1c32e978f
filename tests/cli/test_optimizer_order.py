"""Moments stay with their parameters, or the tool says that they do not: over random models, with torch as the oracle.

Each parameter's state is filled with a value of its own, so that torch itself shows where every one of them went.
CKPTTOOL_SEEDS sets how many seeds are tried.
"""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import optimizer_orders as orders
from ckpttool.cli.app import main
from command import fixes_in, notes_in
from optimizer_orders import Spec, spec

SEEDS = int(os.environ.get("CKPTTOOL_SEEDS", "40"))


def tags(wanted: Spec, model: nn.Module) -> dict[nn.Parameter, float]:
    """A value for each parameter, the same in every order: tied ones go by their first name in the alphabet."""
    names: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter] = min(names.get(parameter, name), name)
    known = [f"{layer}.{part}" for layer in sorted(wanted.old) for part in ("weight", "bias")]
    return {parameter: 1.0 + known.index(name) for parameter, name in names.items()}


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()


def fill(path: Path, wanted: Spec, which: str = "old") -> str:
    """A checkpoint of one definition, every state filled with its parameter's value."""
    model = orders.Net(wanted, getattr(wanted, which))
    optimizer = orders.optimizer(wanted, model)
    step(model, optimizer)
    own = tags(wanted, model)
    for parameter, state in optimizer.state.items():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.dim():
                value.fill_(own[parameter])
    saved = {"optimizer": state_of(model, optimizer, wanted.form)}
    if wanted.with_model:
        saved["model"] = model.state_dict()
    torch.save(saved, path)
    return str(path)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, form: str) -> dict[str, Any]:
    if form == "id":
        return optimizer.state_dict()
    return get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=form == "flat")
    )


def resumes(path: str, wanted: Spec, form: str, which: str = "new") -> bool:
    """Whether torch loads the file, leaves every state with its own parameter, and takes a step."""
    model = orders.Net(wanted, getattr(wanted, which))
    optimizer = orders.optimizer(wanted, model)
    saved = torch.load(path, weights_only=True)
    try:
        if "model" in saved:
            model.load_state_dict(saved["model"])
        if form == "id":
            optimizer.load_state_dict(saved["optimizer"])
        else:
            options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
            set_optimizer_state_dict(model, optimizer, saved["optimizer"], options=options)
        own = tags(wanted, model)
        moments = [
            (parameter, value)
            for parameter, state in optimizer.state.items()
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.dim()
        ]
        held = all(v.shape == p.shape and torch.equal(v, torch.full_like(v, own[p])) for p, v in moments)
        step(model, optimizer)
    except (RuntimeError, ValueError, KeyError):
        return False
    return held


def torch_reads_its_own(wanted: Spec, form: str) -> bool:
    """Return False for flat state with a tied parameter in torch 2.6, which does not load what it saved."""
    trained = not (wanted.trainable and wanted.frozen & {*(wanted.tied or ())})
    return not (form == "flat" and wanted.tied and trained and torch.__version__ < "2.7")


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    status = main([*args, "--format", "json"])
    return status, json.loads(capsys.readouterr().out)


def says_on_what_it_rests(notes: list[str]) -> bool:
    return any("this answer assumes" in note for note in notes)


def paste(command: str, seed: int) -> int:
    """Runs a printed command; OLD stands for the model that the user remembers."""
    return main([word.replace("OLD", f"optimizer_orders:old_{seed}") for word in shlex.split(command)[1:]])


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_state_stays_with_its_own_parameter(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = spec(seed)
    path = fill(tmp_path / "old.pt", wanted)
    new = ["--model", f"optimizer_orders:new_{seed}", "--optimizer", f"optimizer_orders:make_{seed}"]
    named = wanted.form != "id" or wanted.with_names
    right = resumes(path, wanted, wanted.form)

    status, told = run(capsys, "diff", *new, path)
    assert status in (0, 1)
    if status == 0 and not says_on_what_it_rests(notes_in(told)):
        assert right
    if named:
        assert (status == 0) == right
    if not torch_reads_its_own(wanted, wanted.form):
        return
    if named:
        assert status == 0 or "order" in told["summary"]
    if not named and not wanted.with_model:
        assert status == 1 or says_on_what_it_rests(notes_in(told))
    if status == 1:
        (command,) = fixes_in(told)
        assert paste(command, seed) == 0
        fixed = shlex.split(command)[-1]
        assert resumes(fixed, wanted, wanted.form)
        assert run(capsys, "diff", *new, fixed)[0] == 0

    for form in [form for form in ("id", "fqn", "flat") if torch_reads_its_own(wanted, form)]:
        out = str(tmp_path / f"{form}.pt")
        status, told = run(capsys, "remap", path, *new, "--optimizer-keys", form, "-o", out)
        if status == 0 and not says_on_what_it_rests(notes_in(told)):
            assert resumes(out, wanted, form)
            assert run(capsys, "diff", *new, out)[0] == 0
        elif status == 1:
            assert not named
            command = told["hint"]
            assert command.startswith("ckpttool remap")
            assert paste(command, seed) == 0
            assert resumes(out, wanted, form)
            assert run(capsys, "diff", *new, out)[0] == 0
        assert status in (0, 1)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_optimizer_alone_is_judged_by_the_whole_file(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also by the model's own order, where no optimizer is named."""
    wanted = spec(seed)
    path = fill(tmp_path / "old.pt", wanted)
    new = ["--model", f"optimizer_orders:new_{seed}"]
    made = ["--optimizer", f"optimizer_orders:make_{seed}"]
    named = wanted.form != "id" or wanted.with_names
    right = resumes(path, wanted, wanted.form)
    whole, alone = (run(capsys, "diff", *new, *made, operand)[0] for operand in (path, f"{path}::optimizer"))
    assert whole == alone
    if not torch_reads_its_own(wanted, wanted.form):
        return

    other = fill(tmp_path / "new.pt", wanted, "new")
    status, told = run(capsys, "diff", f"{path}::optimizer", f"{other}::optimizer")
    by_ids = any("by their ids" in note for note in notes_in(told))
    assert status == 1 or right or (by_ids and not wanted.with_model)
    if named and wanted.kind != "SGD" and wanted.tied is None:
        assert (status == 0) == right
    if wanted.with_model:  # then that is the answer, and a note points at the optimizers
        _, told = run(capsys, "diff", path, other)
        assert any("::optimizer" in note for note in notes_in(told)) == (status == 1)

    out = str(tmp_path / "out.pt")
    status, told = run(capsys, "remap", path, *new, "--optimizer-keys", wanted.form, "-o", out)
    if status == 0 and not says_on_what_it_rests(notes_in(told)):
        assert resumes(out, wanted, wanted.form)
