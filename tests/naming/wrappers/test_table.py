"""Canonical names: segments of nested wrappers are removed, modules of the user with such names are
kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.optim.swa_utils import AveragedModel

import ckpttool
from torch_version import needs_torch

WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "compile": torch.compile,
    "dp": nn.DataParallel,
    "ac": checkpoint_wrapper,
    "averaged": AveragedModel,
}


class NamedLikeWrappers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self._orig_mod = nn.Sequential(nn.Linear(2, 2))
        self.layer = nn.ModuleDict({"module": nn.BatchNorm1d(2)})


@pytest.mark.parametrize(
    "chain", [c for n in range(4) for c in itertools.permutations(WRAPPERS, n)]
)
def test_any_chain_has_the_same_canonical_names(chain: tuple[str, ...]) -> None:
    model: nn.Module = NamedLikeWrappers()
    expected = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    for name in chain:
        model = WRAPPERS[name](model)
    canonical = {tensor.canonical for tensor in ckpttool.trace(model).runtime}
    assert canonical - {"n_averaged"} == expected


def test_wrappers_inside_a_model_are_removed() -> None:
    def build() -> nn.Module:
        compiled: Any = torch.compile(nn.Linear(2, 2))
        return nn.Sequential(checkpoint_wrapper(nn.Sequential(compiled)), NamedLikeWrappers())

    canonical = {r.fqn: r.canonical for r in ckpttool.trace(build).runtime}
    assert canonical["0._checkpoint_wrapped_module.0._orig_mod.weight"] == "0.0.weight"
    assert canonical["1.module.weight"] == "1.module.weight"
    assert canonical["1._orig_mod.0.weight"] == "1._orig_mod.0.weight"


class HidesSegment(nn.Module):
    """Its hooks hide the segment `layer`; only torch's get_model_state_dict needs `modifiers` for
    that.
    """

    def __init__(self, modifiers: bool) -> None:
        super().__init__()
        self.layer, self.fusion = nn.Linear(2, 2), nn.Linear(2, 2)
        self.register_state_dict_post_hook(_hide)
        self.register_load_state_dict_pre_hook(_show)
        if modifiers:
            self._fqn_modifiers = lambda: {"weight": "layer", "bias": "layer"}


def _hide(module: nn.Module, state: dict, prefix: str, metadata: dict) -> None:
    for name in ("weight", "bias"):
        state[f"{prefix}{name}"] = state.pop(f"{prefix}layer.{name}")


def _show(module: nn.Module, state: dict, prefix: str, *rest: object) -> None:
    for name in ("weight", "bias"):
        if f"{prefix}{name}" in state:
            state[f"{prefix}layer.{name}"] = state.pop(f"{prefix}{name}")


@pytest.mark.parametrize("modifiers", [False, True])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_renaming_hooks_work_without_fqn_modifiers(wrapper: str, modifiers: bool) -> None:
    """torch's helper looks up segments as attributes, and fails for a hidden segment without
    `_fqn_modifiers`.
    """
    needs_torch("2.7", "names from `_fqn_modifiers` alone")

    def build() -> nn.Module:
        module: nn.Module = WRAPPERS[wrapper](nn.Sequential(HidesSegment(modifiers)))
        return module

    names = ckpttool.trace(build)
    canonical = {tensor.fqn: tensor.canonical for tensor in names.runtime}
    (saved,) = [s for s in names.serialized if s.key.endswith("0.weight")]
    assert names.roundtrips
    assert canonical[saved.source.key] == "0.layer.weight"
    if modifiers:
        assert any(key.endswith("0.weight") for key in get_model_state_dict(build()))
    else:
        with pytest.raises(AttributeError, match="'HidesSegment' object has no attribute 'weight'"):
            get_model_state_dict(build())
