"""The form of a section's names, and keys that are saved but not loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpttool
from ckpttool import Refused, Remap
from names_files import names_file, ref, runtime, serialized

RUNTIME, SERIALIZED = "runtime", "serialized"


class SavesSum(nn.Module):
    """Has ``a``, ``b`` and ``c``, and also saves ``a + b``, which loading ignores."""

    def __init__(self) -> None:
        super().__init__()
        for name in "abc":
            setattr(self, name, nn.Parameter(torch.ones(2)))

    def _save_to_state_dict(self, state: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(state, prefix, keep_vars)
        state[prefix + "sum"] = self.a.detach() + self.b.detach()

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *more: Any) -> None:
        state.pop(prefix + "sum", None)
        super()._load_from_state_dict(state, prefix, *more)


class SavesDoubled(nn.Linear):
    def _save_to_state_dict(self, state: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(state, prefix, keep_vars)
        state[prefix + "weight"] = state[prefix + "weight"].detach() * 2

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *more: Any) -> None:
        state[prefix + "weight"] = state[prefix + "weight"] / 2
        super()._load_from_state_dict(state, prefix, *more)


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def changed(state: dict[str, torch.Tensor], model: Any, to: str, **options: Any) -> Remap:
    torch.save(state, "in.pt")
    return ckpttool.remap("in.pt", "out.pt", model=model, to=to, force=True, **options)


def is_a_guess(done: Remap) -> bool:
    return any("--from runtime says otherwise" in note for note in done.notes)


def doubled() -> nn.Module:
    return SavesDoubled(2, 2)


@pytest.mark.parametrize("form", [RUNTIME, SERIALIZED])
def test_a_form_that_the_names_do_not_tell_is_given_or_recorded(form: str) -> None:
    other = RUNTIME if form == SERIALIZED else SERIALIZED
    state = {"weight": torch.ones(2, 2), "bias": torch.ones(2)}
    assert is_a_guess(changed(state, doubled, other))
    assert not is_a_guess(changed(state, doubled, other, from_=form))
    factor = 2 if form == RUNTIME else 0.5
    assert torch.equal(torch.load("out.pt")["weight"], state["weight"] * factor)
    # a file with runtime names says so
    done = ckpttool.remap("out.pt", "back.pt", model=doubled, to=form)
    assert is_a_guess(done) == (other == SERIALIZED)
    assert torch.equal(torch.load("back.pt")["weight"], state["weight"])
    ckpttool.remap("out.pt", "again.pt", model=doubled, to=form, from_=other)
    assert torch.equal(torch.load("again.pt")["weight"], state["weight"])
    ckpttool.remap("out.pt", "wrong.pt", model=doubled, to=other, from_=form)
    assert torch.equal(torch.load("wrong.pt")["weight"], state["weight"] * factor * factor)


@pytest.mark.parametrize("saved", ["abc", "ab"])
def test_a_key_that_is_only_saved_is_dropped_if_it_can_be_restored(saved: str) -> None:
    state = {name: torch.ones(2) for name in (*saved, "sum")}
    done = changed(state, SavesSum, RUNTIME, partial=True)
    assert list(torch.load("out.pt")) == list(saved)
    assert [dropped.key for dropped in done.plan.dropped] == ["sum"]


def test_a_key_that_is_only_saved_is_not_lost() -> None:
    state = {name: torch.ones(2) for name in ("a", "c", "sum")}
    with pytest.raises(Refused) as refused:
        changed(state, SavesSum, RUNTIME, partial=True)
    assert [str(problem) for problem in refused.value.problems] == [
        "the model writes this key and does not read it back @ sum"
    ]


@pytest.fixture
def tied() -> str:
    """Return the names of a model whose `v` has a second name, and whose `unsaved` is not saved."""
    tensors = [runtime("w"), runtime("v"), runtime("v2", alias_of="v"), runtime("unsaved")]
    keys = [serialized(key, ref(key)) for key in ("w", "v")]
    loaded = {"w": ref("w"), "v": ref("v")}
    return names_file(Path("n.json"), tensors, keys, loaded, not_serialized=["unsaved"])


def test_a_second_name_with_the_same_value_is_dropped(tied: str) -> None:
    state = {name: torch.full((2,), float(at)) for at, name in enumerate(("w", "v", "unsaved"))}
    done = changed({**state, "v2": state["v"].clone()}, tied, SERIALIZED, from_=RUNTIME)
    assert {drop.key for drop in done.plan.dropped} == {"v2", "unsaved"}
    assert {key: value.tolist() for key, value in torch.load("out.pt").items()} == {
        "w": [0, 0], "v": [1, 1]
    }  # fmt: skip


def test_a_second_name_with_another_value_is_not_lost(tied: str) -> None:
    state = {name: torch.full((2,), float(at)) for at, name in enumerate(("w", "v", "v2"))}
    with pytest.raises(Refused) as refused:
        changed(state, tied, SERIALIZED, from_=RUNTIME)
    assert [problem.key for problem in refused.value.problems] == ["v2"]


def test_a_second_name_alone_gives_the_value(tied: str) -> None:
    state = {"w": torch.zeros(2), "v2": torch.ones(2)}
    done = changed(state, tied, SERIALIZED, from_=RUNTIME)
    assert done.plan.dropped == ()
    assert {key: value.tolist() for key, value in torch.load("out.pt").items()} == {
        "w": [0, 0], "v": [1, 1]
    }  # fmt: skip


class SavesShifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))

    def _save_to_state_dict(self, state: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(state, prefix, keep_vars)
        state[prefix + "shift"] = torch.ones(2)
        state[prefix + "w"] = state[prefix + "w"].detach() + state[prefix + "shift"]

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *more: Any) -> None:
        state[prefix + "w"] = state[prefix + "w"] - state.pop(prefix + "shift")
        super()._load_from_state_dict(state, prefix, *more)


class AddsBufferAtLoad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        self._register_state_dict_hook(
            lambda m, sd, p, meta: sd.update({p + "more": torch.ones(3)})
        )

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *more: Any) -> None:
        self.register_buffer("grown", torch.zeros(3, device=self.w.device))
        state[prefix + "grown"] = state.pop(prefix + "more")
        super()._load_from_state_dict(state, prefix, *more)


@pytest.mark.parametrize("build", [SavesShifted, AddsBufferAtLoad])
def test_a_round_trip_through_runtime_names_keeps_all_entries(
    build: type[nn.Module], tmp_path: Path
) -> None:
    torch.manual_seed(5)
    saved = build()
    for parameter in saved.parameters():
        nn.init.uniform_(parameter)
    state = saved.state_dict()
    torch.save(dict(state), tmp_path / "a.pt")
    ckpttool.remap(
        str(tmp_path / "a.pt"), str(tmp_path / "b.pt"), model=build, from_=SERIALIZED, to=RUNTIME
    )
    loaded = build()
    loaded.load_state_dict(state, strict=True)
    assert torch.equal(torch.load(tmp_path / "b.pt")["w"], loaded.get_parameter("w"))
    ckpttool.remap(
        str(tmp_path / "b.pt"), str(tmp_path / "c.pt"), model=build, from_=RUNTIME, to=SERIALIZED
    )
    restored = torch.load(tmp_path / "c.pt")
    build().load_state_dict(restored, strict=True)
    assert {key: value.tolist() for key, value in restored.items()} == {
        key: v.tolist() for key, v in state.items()
    }
