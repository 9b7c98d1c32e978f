"""The form of a section's names, and keys that are saved but not loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpttool
from ckpttool import Names
from ckpttool.core.checkpoint import Section, Span, Storage, TensorEntry
from ckpttool.core.expression import Ref
from ckpttool.core.names import RUNTIME, SERIALIZED, RuntimeTensor, SerializedKey
from ckpttool.naming.convert import move, read
from ckpttool.naming.match import NameTables
from ckpttool.tracing.build_model import of_object
from ckpttool.tracing.instances import filled


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


def section(*keys: str, form: str | None = None) -> Section:
    storage = Storage(Span("model.pt", 0, 8))
    return Section(
        "",
        "state_dict",
        tuple(TensorEntry(key, "float32", (2,), (1,), 0, storage) for key in keys),
        form=form,
    )


def tables(build: Any) -> NameTables:
    return NameTables(ckpttool.trace(build))


@pytest.mark.parametrize("form", [RUNTIME, SERIALIZED])
def test_a_recorded_or_given_form_is_used(form: str) -> None:
    names = tables(lambda: SavesDoubled(2, 2))
    assert read(names, section("weight", "bias")).ambiguous
    assert read(names, section("weight", "bias", form=form)).form == form
    assert not read(names, section("weight", "bias"), form).ambiguous
    assert read(names, section("weight", "bias", form=RUNTIME), form).form == form
    assert read(names, section("weight", "bias"), form).form == form


def test_a_key_that_is_only_saved_is_dropped_if_it_can_be_restored() -> None:
    names = tables(SavesSum)
    incomplete = section("a", "c", "sum")
    for saved in ("abc", "ab"):
        restorable = section(*saved, "sum")
        done = move(names, restorable, read(names, restorable), RUNTIME)
        assert [(output.key, output.source) for output in done.plan.outputs] == [
            (name, Ref(name)) for name in saved
        ]
        assert [dropped.key for dropped in done.plan.dropped] == ["sum"]
        assert not done.problems
    lost = move(names, incomplete, read(names, incomplete), RUNTIME)
    assert [(problem.problem, problem.key) for problem in lost.problems] == [
        ("the model writes this key and does not read it back", "sum")
    ]


def test_a_dropped_alias_is_listed_as_a_copy() -> None:
    """The values are compared when the plan is applied, because a different value would be lost."""
    runtime = (
        RuntimeTensor(
            fqn, fqn, "parameter", True, True, "float32", (2,), "v" if fqn == "v2" else None
        )
        for fqn in ("w", "v", "v2", "unsaved")
    )
    keys = (SerializedKey(key, "float32", (2,), Ref(key), None) for key in ("w", "v"))
    names = NameTables(Names("n", "2", tuple(runtime), tuple(keys), (), ("unsaved",)))
    complete = section("w", "v", "v2", "unsaved", form=RUNTIME)
    done = move(names, complete, read(names, complete), SERIALIZED)
    assert [(one.key, one.source) for one in done.plan.outputs] == [
        ("w", Ref("w")),
        ("v", Ref("v")),
    ]
    assert ([drop.key for drop in done.plan.dropped], done.copies) == (
        ["v2", "unsaved"],
        (("v2", "v"),),
    )
    second = section("w", "v2", form=RUNTIME)
    done = move(names, second, read(names, second), SERIALIZED)
    assert [(one.key, one.source) for one in done.plan.outputs] == [
        ("w", Ref("w")),
        ("v", Ref("v2")),
    ]
    assert (done.plan.dropped, done.copies, done.problems) == ((), (), ())


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
    state = filled(of_object(build), 5).state_dict()
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
