"""OPTIMIZER operands against the real optimizer of the real model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ckpttool
from ckpttool import CkptError, Names
from optimizer_models import Net, decayed

HUGE = 1 << 22  # squared, in float32: 64 TiB


class TiedAndFrozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.second.weight = self.first.weight
        self.embed.requires_grad_(False)


def reads_values(model: nn.Module) -> torch.optim.Optimizer:
    """Read values, which meta tensors do not have."""
    return torch.optim.SGD(
        [p for p in model.parameters() if not p.isnan().any()], 0.5, momentum=0.5
    )


def with_options(model: nn.Module) -> torch.optim.Optimizer:
    group = {
        "params": list(model.parameters()),
        "note": ("a", [1, None]),
        "kept": torch.ones(1),
        "of": [object()],
    }
    return torch.optim.Adam([group], torch.tensor(0.1), betas=(0.5, 0.25))


MAKERS: dict[str, Callable[..., Any]] = {
    "two groups": decayed,
    "the class": torch.optim.AdamW,
    "a Lightning dict": lambda model: {
        "optimizer": torch.optim.RMSprop(model.parameters()),
        "lr_scheduler": None,
    },
    "a list of one": lambda model: [torch.optim.Adagrad(model.parameters())],
    "no state": lambda model: torch.optim.SGD(model.parameters(), 0.1),
    "reads values": reads_values,
    "a closure": torch.optim.LBFGS,
    "options of all kinds": with_options,
}


def names_of(model: Callable[[], nn.Module], make: Any, **options: Any) -> Names:
    return ckpttool.trace(model, optimizer=make, **options)


def unpacked(result: Any) -> torch.optim.Optimizer:
    result = result["optimizer"] if isinstance(result, dict) else result
    return result[0] if isinstance(result, list) else result


@pytest.mark.parametrize("materialize", [False, True])
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("model", [Net, TiedAndFrozen])
def test_ids_groups_and_state_match_the_real_optimizer(
    model: Callable[[], nn.Module], kind: str, materialize: bool
) -> None:
    names, real = names_of(model, MAKERS[kind], materialize=materialize), model()
    make = MAKERS[kind]
    optimizer = unpacked(make(real.parameters() if isinstance(make, type) else real))
    name_of = {id(parameter): name for name, parameter in real.named_parameters()}
    pairs = [
        (name_of[id(p)], at)
        for at, group in enumerate(optimizer.param_groups)
        for p in group["params"]
    ]
    assert [(one.id, one.fqn, one.group) for one in names.optimizer] == [
        (at, *one) for at, one in enumerate(pairs)
    ]
    assert names.optimizer_class == type(optimizer).__name__
    for parameter in real.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    if kind != "a closure":
        optimizer.step()
    state = {
        name_of[id(parameter)]: tuple(values)
        for parameter, values in optimizer.state.items()
        if values
    }
    assert {one.fqn: one.state for one in names.optimizer if one.state} == state
    for options, group in zip(names.optimizer_groups, optimizer.param_groups, strict=True):
        numbers = {
            n: pytest.approx(v.item()) for n, v in group.items() if isinstance(v, torch.Tensor)
        }
        plain: dict[str, Any] = {
            name: value
            for name, value in group.items()
            if isinstance(value, (int, float, str, type(None)))
        }
        plain |= numbers
        assert {
            name: value for name, value in options.items() if not isinstance(value, list)
        } == plain
        lists = {name: value for name, value in options.items() if isinstance(value, list)}
        if kind == "options of all kinds":
            assert lists == {"betas": [0.5, 0.25], "note": ["a", [1, None]]}
        else:
            assert lists == {
                name: list(value) for name, value in group.items() if isinstance(value, tuple)
            }


def test_a_huge_model_costs_no_memory() -> None:
    """If code reads values and memory is too small, the error is the error of the code."""

    def build() -> nn.Module:
        return nn.Linear(HUGE, HUGE)

    assert [one.state for one in names_of(build, torch.optim.AdamW).optimizer] == [
        ("step", "exp_avg", "exp_avg_sq")
    ] * 2
    with pytest.raises(CkptError, match=r"reads_values cannot be called with the model: .*meta"):
        names_of(build, reads_values)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (3, "3 is not a function but an int"),
        (lambda model: None, "gives None, not an optimizer"),
        (
            lambda model: [
                torch.optim.SGD(model.parameters()),
                torch.optim.SGD(model.parameters()),
            ],
            "gives a list",
        ),
        (lambda model: {"lr_scheduler": None}, "gives None"),
        (lambda model: [], "gives a list"),
        (
            lambda model: torch.optim.SGD(Net().parameters()),
            "has 9 parameters that the model has not",
        ),
    ],
)
def test_an_invalid_optimizer_is_an_error(make: Any, message: str) -> None:
    with pytest.raises(CkptError) as raised:
        names_of(Net, make)
    assert message in raised.value.message
    if "9" in message:
        assert [(one.problem, one.key) for one in raised.value.problems][:2] == [
            ("a parameter of shape [4, 3]", "param_groups.0"),
            ("a parameter of shape [4]", "param_groups.0"),
        ]
