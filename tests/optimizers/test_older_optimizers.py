"""State that an older version of the optimizer saved: it lacks hyperparameters that the newer
version has.

The oracle is torch: `dcp.load` for folders, `load_state_dict` and `set_optimizer_state_dict` for
files, and a step.
"""

from __future__ import annotations

import copy
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import ckpttool
from command import Run, fixes_in, notes_in
from optimizer_support import same


class NewerSGD(torch.optim.SGD):
    """An optimizer of a library whose new version has a hyperparameter that each step reads."""

    def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.9) -> None:
        super().__init__(params, lr=lr, momentum=momentum)
        for group in self.param_groups:
            group.setdefault("warmup", 10)

    def step(self, closure: Any = None) -> Any:
        assert all(group["warmup"] == 10 for group in self.param_groups)
        return super().step(closure)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def named_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.named_parameters(), lr=0.1)


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    groups = [
        {"params": list(part.parameters()), "lr": lr}
        for part, lr in zip(model.children(), (0.1, 0.2))
    ]
    return torch.optim.AdamW(groups)


def newer_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return NewerSGD(model.parameters())


Make = Callable[[nn.Module], torch.optim.Optimizer]
MAKERS = {make.__name__: make for make in (adamw, named_adamw, two_groups, newer_sgd)}
LACKING = {
    "adamw": ("decoupled_weight_decay", "fused", "maximize"),
    "named_adamw": ("param_names", "decoupled_weight_decay"),
    "two_groups": ("decoupled_weight_decay",),
    "newer_sgd": ("warmup", "fused"),
}
CASES = [
    (name, option, form, is_folder)
    for name, options in LACKING.items()
    for option in options
    for form in ("nested", "flat", "ids")
    for is_folder in (True, False)
    if not (form == "ids" and is_folder)
]


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, form: str) -> dict[str, Any]:
    if form == "ids":
        return optimizer.state_dict()
    return get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=form == "flat")
    )


def save(path: Path, make: Make, form: str, option: str, is_folder: bool) -> dict[str, Any]:
    """Save the state after a step, without the option; return the state of each parameter by its
    name.
    """
    model = build()
    optimizer = make(model)
    step(model, optimizer)
    state = copy.deepcopy(state_of(model, optimizer, form))
    if form == "flat":
        state = {key: value for key, value in state.items() if not key.endswith(f".{option}")}
    else:
        for group in state["param_groups"]:
            del group[option]
    content = {"model": get_model_state_dict(model), "optim": state}
    if is_folder:
        dcp.save(content, checkpoint_id=str(path))
    else:
        torch.save(content, path)
    return by_name(model, optimizer)


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        name: copy.deepcopy(dict(optimizer.state[parameter]))
        for name, parameter in model.named_parameters()
    }


def resumed(path: Path, make: Make, form: str, is_folder: bool) -> dict[str, Any] | Exception:
    """Return the state of each parameter as torch loads it, or the error of loading or of the next
    step.
    """
    model = build()
    optimizer = make(model)
    try:
        if is_folder:
            content: dict[str, Any] = {"optim": state_of(model, optimizer, form)}
            dcp.load(content, checkpoint_id=str(path))
        else:
            content = torch.load(path, weights_only=True)
        if form == "ids":
            optimizer.load_state_dict(content["optim"])
        else:
            options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
            set_optimizer_state_dict(model, optimizer, content["optim"], options=options)
        state = by_name(model, optimizer)
        step(model, optimizer)
    except (Exception, dcp.api.CheckpointException) as error:
        return error if isinstance(error, Exception) else RuntimeError(str(error))
    return state


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("name", "option", "form", "is_folder"), CASES)
def test_option_of_a_newer_version(
    name: str, option: str, form: str, is_folder: bool, tmp_path: Path, run: Run
) -> None:
    path = tmp_path / ("saved" if is_folder else "saved.pt")
    saved = save(path, MAKERS[name], form, option, is_folder)
    before = resumed(path, MAKERS[name], form, is_folder)
    asked = (
        "--model",
        f"{__file__}:build",
        "--optimizer",
        f"{__file__}:{name}",
        "--format",
        "json",
    )

    done = run("diff", path, *asked)

    loads = not isinstance(before, Exception)
    assert (done.status == 0) == loads, (before, done)
    if not loads:  # nothing is thrown away: the one fix adds the option
        assert not any("from scratch" in note for note in notes_in(done.data))
        (fix,) = fixes_in(done.data)
        words = shlex.split(fix)[1:]
        assert run(*words).status == 0
        path = Path(words[-1])
        assert run("diff", path, *asked).status == 0
        after = resumed(path, MAKERS[name], form, is_folder)
        assert not isinstance(after, Exception), after
        assert same(after, saved)
    model = build()
    optimizer = MAKERS[name](model)
    ckpttool.load(path, model, optimizer)
    assert same(by_name(model, optimizer), saved)
    step(model, optimizer)


def test_state_of_another_class_gets_no_options(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "saved"
    save(path, adamw, "nested", "decoupled_weight_decay", True)
    asked = ("--model", f"{__file__}:build", "--to-optimizer", f"{__file__}:newer_sgd")
    done = run("remap", path, *asked, "-o", tmp_path / "out.dcp")
    assert (done.status, "this is the state of Adam or AdamW" in done.err) == (1, True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_folder_with_groups_as_one_value(tmp_path: Path, run: Run) -> None:
    """Until torch 2.3, DCP saved all param groups as one value, which loads whatever options it
    has.
    """
    from torch.distributed.checkpoint import _version

    path = tmp_path / "saved"
    _version._derived_version = "2_3"
    try:
        saved = save(path, adamw, "nested", "decoupled_weight_decay", True)
    finally:
        _version._derived_version = None
    assert same(resumed(path, adamw, "nested", True), saved)
    asked = ("--model", f"{__file__}:build", "--optimizer", f"{__file__}:adamw")
    assert run("diff", path, *asked).status == 0
