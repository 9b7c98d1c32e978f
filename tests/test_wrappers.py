"""Canonical names: a wrapper's segment goes, in whatever order they nest; a user's own module of that name stays."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

from ckpttool.naming.load_model import LoadedModel
from ckpttool.naming.runtime import listed, runtime_tensors
from ckpttool.naming.trace import trace
from ckpttool.naming.wrappers import strip

WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compile": torch.compile,
    "dp": nn.DataParallel,
    "ac": checkpoint_wrapper,
    "averaged": AveragedModel,
}


class Own(nn.Module):
    """A user's module whose children are called like wrappers' segments."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self._orig_mod = nn.Sequential(nn.Linear(2, 2))
        self.layer = nn.ModuleDict({"module": nn.BatchNorm1d(2)})


@pytest.mark.parametrize("chain", [c for n in range(4) for c in itertools.permutations(WRAPS, n)])
def test_any_chain_has_the_same_canonical_names(chain: tuple[str, ...]) -> None:
    model: nn.Module = Own()
    wanted = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    for name in chain:
        model = WRAPS[name](model)
    assert {r.canonical for r in runtime_tensors(model, listed(model))} - {"n_averaged"} == wanted


def test_wrappers_inside() -> None:
    def make(real: bool) -> nn.Module:
        with torch.device("cpu" if real else "meta"):
            return nn.Sequential(checkpoint_wrapper(nn.Sequential(torch.compile(nn.Linear(2, 2)))), Own())

    names = trace(LoadedModel("model", make))
    found = {r.fqn: r.canonical for r in names.runtime}
    assert found["0._checkpoint_wrapped_module.0._orig_mod.weight"] == "0.0.weight"
    assert found["1.module.weight"] == "1.module.weight"
    assert found["1._orig_mod.0.weight"] == "1._orig_mod.0.weight"


def test_strip_by_paths() -> None:
    paths = {"module", "module.a._orig_mod"}
    assert strip("module.a._orig_mod.weight", paths) == "a.weight"
    assert strip("module.b._orig_mod.weight", paths) == "b._orig_mod.weight"
    assert strip("weight", paths) == "weight"
    assert strip("a.module", ()) == "a.module"
