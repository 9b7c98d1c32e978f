"""Models with unusual keys: keys that depend on values or on the parent, and tensors in other entries; oracle torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import ckpttool
import fusion_decoder
import small_models
from ckpttool.core.names import Names
from command import Run
from small_models import Absolute

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
def test_keys_that_depend_on_values_are_not_a_failed_round_trip(
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


class Relative(Absolute):
    """The same with the prefix, as it should be."""

    @staticmethod
    def _save(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state[prefix + "weight"] = state.pop(prefix + "inner.weight")

    @staticmethod
    def _load(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        state[prefix + "inner.weight"] = state.pop(prefix + "weight")


def test_a_hook_with_absolute_keys() -> None:
    names = ckpttool.trace(Absolute)
    assert names.roundtrips
    (note,) = names.notes
    assert note.startswith("as a part of another model: is not saved under this key")
    assert note.endswith("inner.weight is there instead @ weight")
    assert [*nn.Sequential(Absolute()).state_dict()] == ["0.inner.weight"]  # what torch does
    assert Names.from_json(names.to_json(), "names.json") == names
    assert any("as a part of another model: " in note for note in ckpttool.diff(model=Absolute).notes)


@pytest.mark.parametrize("model", [Relative, fusion_decoder.build, lambda: nn.Linear(2, 2)])
def test_models_that_can_be_nested(model: Any) -> None:
    names = ckpttool.trace(model)
    assert not any("as a part of another model" in note for note in names.notes)
    parts = nn.ModuleDict({"part": model()}).state_dict()
    assert {key.removeprefix("part.") for key in parts} == {key.key for key in names.serialized}


def test_the_method_that_distributed_checkpoints_need_is_named() -> None:
    with pytest.raises(AttributeError):
        get_model_state_dict(fusion_decoder.build())
    assert any("`_fqn_modifiers`" in note for note in ckpttool.diff(model=fusion_decoder.build).notes)
    plain = nn.Linear(2, 2)
    assert get_model_state_dict(plain).keys() == plain.state_dict().keys()
    assert not any("`_fqn_modifiers`" in note for note in ckpttool.diff(model=lambda: nn.Linear(2, 2)).notes)


MODELS = small_models.__file__


@pytest.mark.parametrize("build", [small_models.Pickled, small_models.Unread])
def test_a_buffer_in_extra_state_is_saved_if_loading_restores_it(build: type[small_models.Pickled]) -> None:
    source, target = build(), build()
    source.amax.fill_(7)
    target.load_state_dict(source.state_dict(), strict=True)
    assert ("amax" in ckpttool.trace(build).not_serialized) == (not torch.equal(target.amax, source.amax))


def test_diff_says_where_it_is_saved(run: Run) -> None:
    done = run("diff", "--model", f"{MODELS}:Pickled", "--format", "json")
    (entry,) = [entry for entry in done.data["entries"] if entry["right"] == ["amax"]]
    assert (entry["status"], entry["reason"]) == ("extra_state", "saved inside an entry that is not a tensor")


def test_tensors_in_dicts_below_one_key(run: Run, tmp_path: Path) -> None:
    """Loading is torch's answer; a change of wrappers carries the entry whole; the model's own code takes it apart."""
    model, fresh = small_models.in_a_dict(), small_models.in_a_dict()
    path, ddp, back = (str(tmp_path / f"{name}.pt") for name in ("own", "ddp", "back"))
    words = ("--model", f"{MODELS}:in_a_dict")
    torch.save(model.state_dict(), path)
    assert run("diff", *words, path).status == 0
    assert run("remap", path, *words, "--to", "ddp", "-o", ddp).status == 0
    nn.ModuleDict({"module": fresh}).load_state_dict(torch.load(ddp), strict=True)
    assert all(map(torch.equal, fresh.parameters(), model.parameters()))
    assert run("diff", *words, ddp).status == 1
    assert run("remap", ddp, *words, "--to", "serialized", "-o", back).status == 0
    again = small_models.in_a_dict()
    again.load_state_dict(torch.load(back), strict=True)
    assert all(map(torch.equal, again.parameters(), model.parameters()))
    apart = run("remap", path, *words, "--to", "runtime", "-o", str(tmp_path / "apart.pt"))
    assert apart.status == 0
    assert "by running" in apart.out
    have = torch.load(tmp_path / "apart.pt")
    assert have.keys() == {"0.params", *dict(model.named_parameters())}  # the entry itself is no tensor, and is carried
    assert all(torch.equal(have[name], value) for name, value in model.named_parameters())
    assert run("remap", tmp_path / "apart.pt", *words, "--to", "serialized", "-o", tmp_path / "whole.pt").status == 0
    last = small_models.in_a_dict()
    last.load_state_dict(torch.load(tmp_path / "whole.pt"), strict=True)
    assert all(map(torch.equal, last.parameters(), model.parameters()))
    alone = {e["right"][0]: e for e in run("diff", *words, "--format", "json").data["entries"] if e["right"]}
    assert alone["0.weight"]["reason"] == "saved inside an entry that is not a tensor"
    assert alone["0.weight"]["status"] == "missing"
