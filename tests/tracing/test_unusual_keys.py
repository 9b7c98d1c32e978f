"""Models whose keys depend on values or on the parent, and tensors in other entries; torch is the
oracle.
"""

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
from ckpttool import Names
from command import Run
from small_models import Absolute

NOTE = "state_dict() writes some keys for some values of the tensors only: mask"


class OmitsMask(nn.Module):
    """Does not save the mask if `omits(mask)` is true; fills it in at load if `restores` is
    true.
    """

    mask: torch.Tensor

    def __init__(
        self, initial: bool, omits: Callable[[torch.Tensor], bool], restores: bool
    ) -> None:
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


def is_restored(build: Callable[[], OmitsMask]) -> bool:
    """Return True if a save and a strict load restore several masks."""
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


def never(mask: torch.Tensor) -> bool:
    return len(mask) == 3


@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize("omits", [all_true, none_true, never])
@pytest.mark.parametrize("restores", [True, False])
def test_keys_that_depend_on_values_are_not_a_failed_round_trip(
    initial: bool, omits: Callable[[torch.Tensor], bool], restores: bool
) -> None:
    def build() -> OmitsMask:
        return OmitsMask(initial, omits, restores)

    names = ckpttool.trace(build)
    assert names.notes == (() if omits is never else (NOTE,))
    assert names.roundtrips == is_restored(build)
    assert names.not_serialized == ()
    assert "mask" in {key.key for key in names.serialized}


class TensorNamedExtraState(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        if kind == "buffer":
            self.fc.register_buffer("_extra_state", torch.ones(3))
        else:
            self.fc.register_parameter("_extra_state", nn.Parameter(torch.ones(3)))


@pytest.mark.parametrize("kind", ["buffer", "parameter"])
def test_a_tensor_named_extra_state_is_reported_because_a_strict_load_refuses_it(
    kind: str, tmp_path: Path
) -> None:
    model = TensorNamedExtraState(kind)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*fc\._extra_state"):
        model.load_state_dict(model.state_dict())
    names = ckpttool.trace(lambda: TensorNamedExtraState(kind))
    assert names.extra_state == ()
    assert "fc._extra_state" in {key.key for key in names.serialized}
    (problem,) = names.roundtrip_problems
    assert problem.key == "fc._extra_state"
    assert "a strict load_state_dict() refuses it" in problem.problem
    path = tmp_path / "ckpt.pt"
    torch.save(model.state_dict(), path)
    result = ckpttool.diff(str(path), model=lambda: TensorNamedExtraState(kind))
    assert [(e.left, "refuses it" in e.reason) for e in result.entries if e.status != "same"] == [
        (("fc._extra_state",), True)
    ]


class Relative(Absolute):
    @staticmethod
    def _save(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state[prefix + "weight"] = state.pop(prefix + "inner.weight")

    @staticmethod
    def _load(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        state[prefix + "inner.weight"] = state.pop(prefix + "weight")


def test_a_hook_with_absolute_keys_is_noted() -> None:
    names = ckpttool.trace(Absolute)
    assert names.roundtrips
    (note,) = names.notes
    assert note.startswith("as a part of another model: is not saved under this key")
    assert note.endswith("inner.weight is there instead @ weight")
    assert [*nn.Sequential(Absolute()).state_dict()] == ["0.inner.weight"]  # the behavior of torch
    assert Names.from_json(names.to_json(), "names.json") == names
    assert any(
        "as a part of another model: " in note for note in ckpttool.diff(model=Absolute).notes
    )


@pytest.mark.parametrize("model", [Relative, fusion_decoder.build, lambda: nn.Linear(2, 2)])
def test_models_that_can_be_nested_have_no_note(model: Any) -> None:
    names = ckpttool.trace(model)
    assert not any("as a part of another model" in note for note in names.notes)
    parts = nn.ModuleDict({"part": model()}).state_dict()
    assert {key.removeprefix("part.") for key in parts} == {key.key for key in names.serialized}


def test_a_missing_fqn_modifiers_method_is_noted() -> None:
    with pytest.raises(AttributeError):
        get_model_state_dict(fusion_decoder.build())
    assert any(
        "`_fqn_modifiers`" in note for note in ckpttool.diff(model=fusion_decoder.build).notes
    )
    plain = nn.Linear(2, 2)
    assert get_model_state_dict(plain).keys() == plain.state_dict().keys()
    assert not any(
        "`_fqn_modifiers`" in note for note in ckpttool.diff(model=lambda: nn.Linear(2, 2)).notes
    )


MODELS = small_models.__file__


@pytest.mark.parametrize("build", [small_models.Pickled, small_models.Unread])
def test_a_buffer_in_extra_state_is_saved_if_loading_restores_it(
    build: type[small_models.Pickled],
) -> None:
    source, target = build(), build()
    source.amax.fill_(7)
    target.load_state_dict(source.state_dict(), strict=True)
    assert ("amax" in ckpttool.trace(build).not_serialized) == (
        not torch.equal(target.amax, source.amax)
    )


def test_diff_explains_a_buffer_in_extra_state(run: Run) -> None:
    done = run("diff", "--model", f"{MODELS}:Pickled", "--format", "json")
    (entry,) = [entry for entry in done.data["entries"] if entry["right"] == ["amax"]]
    assert (entry["status"], entry["reason"]) == (
        "extra_state",
        "saved inside an entry that is not a tensor",
    )


def test_tensors_in_a_nested_dict_are_loaded_and_remapped(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrapper changes keep the dict; a remap to runtime names runs the model's code."""
    monkeypatch.chdir(tmp_path)
    model, options = small_models.in_a_dict(), ("--model", f"{MODELS}:in_a_dict")
    torch.save(model.state_dict(), "own.pt")
    assert run("diff", *options, "own.pt").status == 0
    assert run("remap", "own.pt", *options, "--to", "ddp", "-o", "ddp.pt").status == 0
    assert run("diff", *options, "ddp.pt").status == 1
    runtime = run("remap", "own.pt", *options, "--to", "runtime", "-o", "runtime.pt")
    assert (runtime.status, "by running" in runtime.out) == (0, True)
    result = torch.load("runtime.pt")
    # the entry is not a tensor and is kept
    assert result.keys() == {"0.params", *dict(model.named_parameters())}
    assert all(torch.equal(result[name], value) for name, value in model.named_parameters())
    for path in ("ddp.pt", "runtime.pt"):
        assert (
            run("remap", path, *options, "--to", "serialized", "-o", f"{path}.serialized.pt").status
            == 0
        )
    for path, prefix in (
        ("ddp.pt", "module"),
        ("ddp.pt.serialized.pt", ""),
        ("runtime.pt.serialized.pt", ""),
    ):
        fresh = small_models.in_a_dict()
        (nn.ModuleDict({prefix: fresh}) if prefix else fresh).load_state_dict(
            torch.load(path), strict=True
        )
        assert all(map(torch.equal, fresh.parameters(), model.parameters())), path
    entries = {
        e["right"][0]: e
        for e in run("diff", *options, "--format", "json").data["entries"]
        if e["right"]
    }
    assert entries["0.weight"]["reason"] == "saved inside an entry that is not a tensor"
    assert entries["0.weight"]["status"] == "missing"
