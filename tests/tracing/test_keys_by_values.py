"""Models that save some keys for some values only, and tensors that are called `_extra_state`: torch is the oracle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpttool

DEPENDS = "state_dict() writes some keys for some values of the tensors only: mask"


class Masked(nn.Module):
    """Leaves the mask out of its keys if `omits` says so; loading fills it in if it `restores` masks."""

    mask: torch.Tensor

    def __init__(self, initial: bool, omits: Callable[[torch.Tensor], bool], restores: bool) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.register_buffer("mask", torch.full((4,), initial))

        def save(_: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
            if omits(state[f"{prefix}mask"]):
                del state[f"{prefix}mask"]

        def load(_: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
            state.setdefault(f"{prefix}mask", torch.ones(4, dtype=torch.bool))

        self._register_state_dict_hook(save)
        if restores:
            self.register_load_state_dict_pre_hook(load)


def all_true(mask: torch.Tensor) -> bool:
    return bool(mask.all())


def none_true(mask: torch.Tensor) -> bool:
    return not bool(mask.any())


def comes_back(build: Callable[[], Masked]) -> bool:
    """Whether every mask of a few is the same after a save and a strict load."""
    for mask in ([True] * 4, [False] * 4, [True, False, True, False]):
        source, target = build(), build()
        source.mask.copy_(torch.tensor(mask))
        target.mask.copy_(~source.mask)
        try:
            target.load_state_dict(source.state_dict())
        except RuntimeError:
            return False
        if not torch.equal(source.mask, target.mask):
            return False
    return True


@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize("omits", [all_true, none_true])
@pytest.mark.parametrize("restores", [True, False])
def test_which_keys_depend_on_values_is_told_apart_from_what_comes_back(
    initial: bool, omits: Callable[[torch.Tensor], bool], restores: bool
) -> None:
    def build() -> Masked:
        return Masked(initial, omits, restores)

    names = ckpttool.trace(build)
    assert DEPENDS in names.notes
    assert names.roundtrips == comes_back(build)
    assert names.not_serialized == ()
    assert "mask" in {key.key for key in names.serialized}


def test_a_model_whose_keys_are_always_the_same_has_no_such_note() -> None:
    names = ckpttool.trace(lambda: Masked(True, lambda mask: len(mask) == 3, False))
    assert (names.roundtrips, names.notes) == (True, ())


class NamedSo(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        if kind == "buffer":
            self.fc.register_buffer("_extra_state", torch.ones(3))
        else:
            self.fc.register_parameter("_extra_state", nn.Parameter(torch.ones(3)))


@pytest.mark.parametrize("kind", ["buffer", "parameter"])
def test_a_tensor_called_extra_state_is_a_key_that_a_strict_load_refuses(kind: str, tmp_path: Path) -> None:
    model = NamedSo(kind)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*fc\._extra_state"):
        model.load_state_dict(model.state_dict())
    names = ckpttool.trace(lambda: NamedSo(kind))
    assert names.extra_state == ()
    assert "fc._extra_state" in {key.key for key in names.serialized}
    (problem,) = names.roundtrip_problems
    assert problem.key == "fc._extra_state"
    assert "a strict load_state_dict() refuses it" in problem.problem
    path = tmp_path / "ckpt.pt"
    torch.save(model.state_dict(), path)
    found = ckpttool.diff(str(path), model=lambda: NamedSo(kind))
    assert [(e.left, "refuses it" in e.reason) for e in found.entries if e.status != "same"] == [
        (("fc._extra_state",), True)
    ]


def test_real_extra_state_is_not_a_tensor_of_the_model() -> None:
    class Counted(nn.Linear):
        def get_extra_state(self) -> torch.Tensor:
            return torch.ones(3)

        def set_extra_state(self, state: object) -> None:
            pass

    names = ckpttool.trace(lambda: Counted(2, 2))
    assert names.extra_state == ("_extra_state",)
    assert names.roundtrips
