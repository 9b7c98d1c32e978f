"""The verdict on damaged checkpoints against a real strict load by torch."""

from __future__ import annotations

import re
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

import ckpttool
import loading_zoo
from ckpttool import CkptError
from ckpttool.core import expression as ex
from ckpttool.core.checkpoint import ExtraEntry, Section
from ckpttool.evaluate.torch_eval import evaluate
from ckpttool.tracing import instances
from ckpttool.tracing.build_model import of_object
from ckpttool.tracing.loading import Verdict, verdict_on_section
from hook_zoo import ZOO
from zoo import randomized, runtime_values, zoo_model

torch.set_num_threads(1)
NO_CHECKPOINT = {"lazy", "nested_dict"}  # uninitialised tensors; tensors in a dict below a key


_FOLDER = tempfile.TemporaryDirectory()
Copies = OrderedDict[str, Any]


def clone_state(state: Mapping[str, Any]) -> Copies:
    copies: Copies = OrderedDict(
        (k, v.clone() if isinstance(v, torch.Tensor) else v) for k, v in state.items()
    )
    if hasattr(state, "_metadata"):
        copies._metadata = state._metadata  # type: ignore[attr-defined]
    return copies


def section_of(state: Mapping[str, Any]) -> Section:
    """Save the state dict, and return its section in the file; valid until the next call."""
    path = f"{_FOLDER.name}/state.pt"
    # torch refuses to save views of one tensor in several dtypes
    torch.save(clone_state(state), path)
    sections = ckpttool.open_checkpoint(path).sections
    return sections[0] if sections else Section("", "state_dict", ())


# Changes of one entry of a state dict
DAMAGES: dict[str, Callable[[Copies, str], object]] = {
    "drop": lambda state, key: state.pop(key),
    "extra": lambda state, key: state.update({f"extra.{key}": torch.ones(2)}),
    "shape": lambda state, key: state.update({key: state[key].new_zeros((*state[key].shape, 2))}),
    "one element": lambda state, key: state.update({key: state[key].new_zeros(1)}),
    "dtype": lambda state, key: state.update({key: state[key].to(another_dtype(state[key]))}),
    "rename": lambda state, key: state.update({f"module.{key}": state.pop(key)}),
    "rename leaf": lambda state, key: state.update({f"{key}_old": state.pop(key)}),
    "no metadata": lambda state, key: vars(state).pop("_metadata", None),
    "not a tensor": lambda state, key: state.update({key: 5}),
    "transpose": lambda state, key: state.update(
        {key: state[key].t() if state[key].dim() == 2 else state[key]}
    ),
}


def another_dtype(value: torch.Tensor) -> torch.dtype:
    return torch.float16 if value.dtype == torch.float64 else torch.float64


def apply_damages(state: Mapping[str, Any], damages: list[tuple[str, int]]) -> Copies:
    result = clone_state(state)
    for kind, number in damages:
        if keys := [key for key, value in result.items() if isinstance(value, torch.Tensor)]:
            DAMAGES[kind](result, keys[number % len(keys)])
    return result


def load_with_torch(model: nn.Module, state: dict[str, Any]) -> tuple[bool, set[str], set[str]]:
    try:
        model.load_state_dict(state, strict=True)
    except Exception as error:
        text = str(error)
        return False, quoted(text, "Missing"), quoted(text, "Unexpected")
    return True, set(), set()


def quoted(text: str, start: str) -> set[str]:
    result = re.search(rf'{start} key\(s\) in state_dict: ((?:"[^"]*"(?:, )?)*)', text)
    return set(re.findall(r'"([^"]*)"', result.group(1))) if result else set()


_states: dict[str, dict[str, Any]] = {}


def check(name: str, damages: list[tuple[str, int]]) -> Verdict:
    if name not in _states:
        _states[name] = randomized(zoo_model(name), 3).state_dict()
    state: Any = apply_damages(_states[name], damages)
    if damages and not hasattr(state, "_metadata"):
        state = dict(state)
    section = section_of(state)
    if damages:
        assume(section.kind != "other")  # `diff` refuses a file with few tensors among other values
    verdict = verdict_on_section(of_object(ZOO[name]), section)
    model = randomized(zoo_model(name), 6)
    before = runtime_values(model)
    ok, missing, unexpected = load_with_torch(model, clone_state(state))
    assert verdict.ok == ok, verdict
    if not ok:
        assert (set(verdict.missing), set(verdict.unexpected)) == (missing, unexpected)
        return verdict
    for fqn, value in runtime_values(model).items():
        source = verdict.reads[fqn]
        if source is None:  # it comes from no tensor of the file (but may come from a number)
            assert torch.equal(value, before[fqn]) or any(
                kind == "not a tensor" for kind, _ in damages
            )
        elif not ex.is_opaque(source):
            assert torch.equal(evaluate(source, state.__getitem__), value), fqn
    return verdict


@pytest.mark.parametrize("name", sorted(set(ZOO) - NO_CHECKPOINT))
def test_the_models_own_state_dict_loads(name: str) -> None:
    check(name, [])


@settings(max_examples=60, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    name=st.sampled_from(sorted(set(ZOO) - NO_CHECKPOINT)),
    damages=st.lists(st.tuples(st.sampled_from(sorted(DAMAGES)), st.integers(0, 7)), max_size=3),
)
def test_damaged_checkpoints_have_the_verdict_of_torch(
    name: str, damages: list[tuple[str, int]]
) -> None:
    check(name, damages)


@pytest.mark.parametrize(
    "name", ["plain", "batch_norm", "tied", "buffers", "weight_norm", "extra_state"]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtype_changes_match_the_file(name: str, dtype: torch.dtype) -> None:
    state = zoo_model(name).state_dict()
    for key, value in list(state.items())[::2]:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            state[key] = value.to(dtype)
    verdict = verdict_on_section(of_object(ZOO[name]), section_of(state))
    runtime = runtime_values(zoo_model(name))
    expected = {
        (
            fqn,
            fqn,
            str(state[fqn].dtype).removeprefix("torch."),
            str(value.dtype).removeprefix("torch."),
        )
        for fqn, value in runtime.items()
        if fqn in state and state[fqn].dtype != value.dtype
    }
    assert verdict.ok
    assert set(verdict.dtype_changes) == expected


def test_an_unknown_extra_state_is_an_error() -> None:
    state = zoo_model("extra_state").state_dict()
    section = section_of(state)
    unknown = Section(
        "",
        "state_dict",
        section.tensors,
        (ExtraEntry("0._extra_state", "a record"),),
        section.modules,
    )
    with pytest.raises(CkptError, match=r"depends on 1 object that no safe loader makes"):
        verdict_on_section(of_object(ZOO["extra_state"]), unknown)
    wrong = Section(
        "",
        "state_dict",
        section.tensors,
        (ExtraEntry("0._extra_state", value={"format": 2}),),
        section.modules,
    )
    verdict = verdict_on_section(of_object(ZOO["extra_state"]), wrong)
    assert not verdict.ok
    assert verdict.errors[0].startswith("ValueError: unknown format 2 (")


def test_the_error_of_torch_is_the_verdict() -> None:
    state = zoo_model("loads_only_with_metadata").state_dict()
    verdict = verdict_on_section(
        of_object(ZOO["loads_only_with_metadata"]), section_of(dict(state))
    )
    assert (verdict.ok, verdict.errors[0].partition(" (")[0]) == (False, "KeyError: '0.gamma'")
    verdict = verdict_on_section(of_object(Exits), section_of(nn.Linear(2, 2).state_dict()))
    assert (verdict.ok, verdict.errors[0].partition(" (")[0]) == (
        False,
        "RuntimeError: exits: no loading",
    )
    state = {**zoo_model("plain").state_dict(), "0.weight": torch.ones(7, 7)}
    assert verdict_on_section(of_object(ZOO["plain"]), section_of(state)).errors == (
        "size mismatch for 0.weight: copying a param with shape torch.Size([7, 7]) from"
        " checkpoint, "
        "the shape in current model is torch.Size([4, 3]).",
    )


def test_a_lazy_model_gets_the_shapes_of_the_file() -> None:
    state = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)).state_dict()
    verdict = verdict_on_section(of_object(ZOO["lazy"]), section_of(state))
    assert verdict.ok
    assert verdict.reads == {key: ex.Ref(key) for key in state}
    assert not verdict_on_section(
        of_object(ZOO["lazy"]), section_of({**state, "0.more": torch.ones(1)})
    ).ok


class CustomLoad(nn.Linear):
    """Converts the weight before it is loaded."""

    def __init__(self) -> None:
        super().__init__(2, 2)

    def convert(self, weight: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *more: Any) -> None:
        if f"{prefix}weight" in state_dict:
            state_dict[f"{prefix}weight"] = self.convert(state_dict[f"{prefix}weight"])
        super()._load_from_state_dict(state_dict, prefix, *more)


class ScalesIfPossible(CustomLoad):
    def convert(self, weight: torch.Tensor) -> torch.Tensor:
        try:
            scale = float(weight.sum())
        except RuntimeError:
            scale = 1.0
        return weight * scale


class ConvertsFirst(CustomLoad):
    def convert(self, weight: torch.Tensor) -> torch.Tensor:
        return torch.empty(2, 2, device=weight.device).copy_(weight)


class ByRows(CustomLoad):
    def convert(self, weight: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight[:1].copy_(weight[:1])
        return self.weight.detach().clone()


class Exits(CustomLoad):
    def convert(self, weight: torch.Tensor) -> torch.Tensor:
        sys.exit("no loading")


class ByKeywords(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        lists: dict[str, list[str]] = {"missing_keys": [], "unexpected_keys": [], "error_msgs": []}
        self._load_from_state_dict(
            state_dict=dict(state_dict), prefix="", local_metadata={}, strict=strict, **lists
        )
        if any(lists.values()):
            raise RuntimeError(f"Error(s) in loading state_dict for {lists}")


@pytest.mark.parametrize(("build", "changes"), [
    (ScalesIfPossible, [("weight", None), ("bias", "bias")]),
    (ConvertsFirst, [("bias", "bias")]),
    (ByRows, [("weight", None), ("bias", "bias")]),
    (ByKeywords, [("weight", "weight"), ("bias", "bias")]),
])  # fmt: skip
@pytest.mark.parametrize("cheap", [True, False])
def test_the_verdict_on_custom_loading_code_matches_torch(
    build: Callable[[], nn.Module],
    changes: list[tuple[str, str | None]],
    cheap: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not cheap:
        monkeypatch.setattr(instances, "_CHEAP", -1)
    state, model = build().half().state_dict(), build()
    model.load_state_dict(clone_state(state), strict=True)
    verdict = verdict_on_section(of_object(build), section_of(state))
    assert verdict.ok
    assert [(change.fqn, change.key) for change in verdict.dtype_changes] == changes
    for fqn, source in verdict.reads.items():
        assert source is not None
        if not ex.is_opaque(source):
            assert torch.equal(
                evaluate(source, state.__getitem__).float(), model.get_parameter(fqn)
            ), fqn


def test_a_load_state_dict_without_strict_is_supported() -> None:
    state = loading_zoo.bare_signatures().state_dict()
    assert verdict_on_section(of_object(loading_zoo.bare_signatures), section_of(state)).ok
    state["bias"] = torch.ones(7)
    assert not verdict_on_section(of_object(loading_zoo.bare_signatures), section_of(state)).ok
