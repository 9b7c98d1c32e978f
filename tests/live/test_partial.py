"""`load(partial=True)` loads what fits, as `load_state_dict(strict=False)` on the fitting keys, and
returns the rest; `section` and `select` name a part of the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpttool
from ckpttool import CkptError, Refused

State = dict[str, torch.Tensor]


class Network(nn.Module):
    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.encoder, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.head = nn.Linear(4, classes)


def state_of(model: nn.Module) -> State:
    return {key: value.clone() for key, value in model.state_dict().items()}


def same(left: State, right: State) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "a.pt")


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod."])
def test_what_fits_is_loaded_and_the_rest_is_returned(path: str, prefix: str) -> None:
    saved = state_of(Network(7))
    del saved["norm.bias"]
    saved["more.weight"] = torch.ones(2)
    torch.save({f"{prefix}{key}": value for key, value in saved.items()}, path)
    model = Network()
    expected = state_of(model)
    expected.update(
        {k: v for k, v in saved.items() if k in expected and v.shape == expected[k].shape}
    )
    loaded = ckpttool.load(path, model, partial=True)
    assert same(state_of(model), expected)
    assert loaded.missing == ("norm.bias",)
    assert loaded.mismatched == ("head.weight", "head.bias")
    assert loaded.unexpected == (f"{prefix}more.weight",)
    assert loaded.tensors == 6


def test_a_complete_file_leaves_nothing(path: str) -> None:
    saved = state_of(Network())
    torch.save(saved, path)
    model = Network()
    loaded = ckpttool.load(path, model, partial=True)
    assert (loaded.missing, loaded.mismatched, loaded.unexpected) == ((), (), ())
    assert loaded.tensors == len(saved)
    assert same(state_of(model), saved)


def test_values_are_written_into_the_parameters(path: str) -> None:
    torch.save({"encoder.weight": torch.ones(4, 4)}, path)
    model = Network()
    before = dict(model.named_parameters())
    ckpttool.load(path, model, partial=True)
    assert all(before[name] is parameter for name, parameter in model.named_parameters())
    assert bool((model.encoder.weight == 1).all())


def test_nothing_that_fits_is_refused(path: str) -> None:
    torch.save({"encoder.weight": torch.ones(9, 9), "x": torch.ones(1)}, path)
    model = Network()
    before = state_of(model)
    with pytest.raises(Refused, match="no tensor fits"):
        ckpttool.load(path, model, partial=True)
    assert same(state_of(model), before)


def test_other_dtypes_need_cast(path: str) -> None:
    torch.save({"encoder.weight": torch.ones(4, 4).half()}, path)
    model = Network()
    with pytest.raises(Refused) as caught:
        ckpttool.load(path, model, partial=True)
    assert "cast=True" in caught.value.hint
    ckpttool.load(path, model, partial=True, cast=True)
    assert bool((model.encoder.weight == 1).all())


@pytest.mark.parametrize("key", ["0.weight", "1.weight"])
def test_one_name_of_a_tied_weight_is_enough(path: str, key: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    torch.save({key: torch.ones(3, 3)}, path)
    loaded = ckpttool.load(path, model, partial=True)
    assert bool((model[0].weight == 1).all())
    assert loaded.missing == ("1.bias",)


def test_a_fused_weight_is_loaded_through_the_hook(path: str) -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Parameter(torch.zeros(6, 2)), nn.Linear(2, 2)
            self.register_state_dict_post_hook(_split)
            self.register_load_state_dict_pre_hook(_join)

    model = Fused()
    torch.save({"q": torch.ones(2, 2), "k": torch.ones(2, 2) * 2, "v": torch.ones(2, 2) * 3}, path)
    loaded = ckpttool.load(path, model, partial=True)
    assert model.qkv[:, 0].tolist() == [1, 1, 2, 2, 3, 3]
    assert loaded.missing == ("out.weight", "out.bias")


def _split(module: Any, state: Any, prefix: str, *args: Any) -> None:
    state.update(zip("qkv", state.pop("qkv").split(2)))


def _join(module: Any, state: Any, *args: Any) -> None:
    state["qkv"] = torch.cat([state.pop(name) for name in "qkv"])


@pytest.mark.parametrize("kind", ["path", "dict"])
def test_a_section_is_loaded(path: str, kind: str) -> None:
    content = {"model": state_of(Network()), "ema": state_of(Network())}
    torch.save(content, path)
    model = Network()
    loaded = ckpttool.load(path if kind == "path" else content, model, section="ema")
    assert loaded.section == "ema"
    assert same(state_of(model), content["ema"])
    with pytest.raises(CkptError, match="has no section 'absent'"):
        ckpttool.load(path if kind == "path" else content, model, section="absent")


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_submodule_is_loaded(path: str, is_wrapped: bool) -> None:
    saved = state_of(Network())
    torch.save({"model": {f"module.{k}" if is_wrapped else k: v for k, v in saved.items()}}, path)
    encoder = nn.Linear(4, 4)
    ckpttool.load(path, encoder, select="encoder", section="model")
    assert torch.equal(encoder.weight, saved["encoder.weight"])
    with pytest.raises(Refused, match="no key is below 'absent'"):
        ckpttool.load(path, encoder, select="absent")


def test_the_optimizer_comes_from_the_whole_file(path: str) -> None:
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model.head(model.norm(model.encoder(torch.ones(5, 4)))).sum().backward()
    optimizer.step()
    content = {"model": state_of(model), "ema": state_of(Network())}
    torch.save({**content, "optimizer": optimizer.state_dict()}, path)
    new = Network()
    new_optimizer = torch.optim.SGD(new.parameters(), 0.1, momentum=0.9)
    ckpttool.load(path, new, new_optimizer, section="ema")
    assert same(state_of(new), content["ema"])
    buffers = new_optimizer.state[new.head.weight]["momentum_buffer"]
    assert torch.equal(buffers, optimizer.state[model.head.weight]["momentum_buffer"])
