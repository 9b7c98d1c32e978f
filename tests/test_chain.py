"""Wrapper chains: recognised from real wrappers' keys alone, and written so that real wrappers load them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

from ckpttool.errors import CkptError
from ckpttool.naming.chain import canonical_keys, parse, recognise, segments
from ckpttool.naming.pairing import pairs


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module)  # type: ignore[return-value]


def regional() -> nn.Module:
    model = plain()
    model[1] = compiled(model[1])
    return model


def one_block() -> nn.Module:
    model = plain()
    model[1][0] = checkpoint_wrapper(compiled(model[1][0]))
    return model


WRAPPED = {
    "compile": lambda: compiled(plain()),
    "ac": lambda: checkpoint_wrapper(plain()),
    "dp": lambda: nn.DataParallel(plain()),
    "dp(compile)": lambda: nn.DataParallel(compiled(plain())),
    "compile(dp)": lambda: compiled(nn.DataParallel(plain())),
    "ac(compile)": lambda: checkpoint_wrapper(compiled(plain())),
    "compile(ac)": lambda: compiled(checkpoint_wrapper(plain())),
    "averaged": lambda: AveragedModel(plain()),
}


def parameters(model: nn.Module) -> list[str]:
    """Names by module path: the activation checkpoint wrapper's own `named_parameters` hides its segment."""
    return [name for name, _ in nn.Module.named_parameters(model)]


@pytest.mark.parametrize("form", WRAPPED)
def test_a_wrapped_models_names_are_recognised_as_the_plain_models(form: str) -> None:
    names = parameters(WRAPPED[form]())
    assert names != parameters(plain())
    assert list(canonical_keys(names).values()) == parameters(plain())


def test_the_counter_of_an_averaged_model_does_not_hide_its_wrapper() -> None:
    names = canonical_keys(AveragedModel(plain()).state_dict())
    assert list(names.values()) == ["n_averaged", *plain().state_dict()]


@pytest.mark.parametrize("form", ["compile", "dp", "dp(compile)", "compile(dp)"])
def test_the_prefix_of_a_chain_is_what_the_real_wrappers_write(form: str) -> None:
    expected = [parse(form).prefix + key for key in plain().state_dict()]
    assert list(WRAPPED[form]().state_dict()) == expected


@pytest.mark.parametrize("build", [regional, one_block])
def test_wrappers_around_single_blocks_are_recognised(build: Callable[[], nn.Module]) -> None:
    names = parameters(build())
    assert names != parameters(plain())
    assert list(canonical_keys(names).values()) == parameters(plain())


@pytest.mark.parametrize(
    "keys",
    [
        ["module.weight", "head.weight"],  # a user's own `module`, beside another
        ["encoder.module.weight"],  # alone, but not at the root
        ["block._orig_mod.weight", "block.bias"],  # a wrapper has no tensors of its own
        ["layer.weight"],
    ],
)
def test_a_users_own_module_is_no_wrapper(keys: list[str]) -> None:
    assert recognise(keys) == frozenset()


def test_segments_are_named_from_the_outside_in() -> None:
    assert segments(recognise(["module._orig_mod.a.weight", "module._orig_mod.b.weight"])) == ["module", "_orig_mod"]


def test_pairs_give_a_block_the_wrappers_that_the_other_checkpoint_has_there() -> None:
    theirs, mine = parameters(one_block()), parameters(plain())
    assert list(pairs(mine, theirs).values()) == theirs
    assert list(pairs(theirs, mine).values()) == mine


@pytest.mark.parametrize("form", ["", "ddp(", "ddp(compile", "nonsense", "ddp(nonsense)", "compile)"])
def test_a_form_that_is_none_is_an_error(form: str) -> None:
    with pytest.raises(CkptError, match="no such form"):
        parse(form)
