"""The hook of each renamed or computed key: its function, file, line and module."""

from __future__ import annotations

import operator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpttool
import hook_zoo
from ckpttool import CkptError
from zoo import traced


def hooks(name: str) -> dict[str, Any]:
    return {s.key: s.hook for s in traced(name).serialized if s.hook is not None}


@pytest.mark.parametrize(
    ("pattern", "key", "module", "code"),
    [
        ("strip_layer", "weight", "", hook_zoo.StripLayer._save),
        ("strip_layer_nested", "1.deep.bias", "1.deep", hook_zoo.StripLayer._save),
        ("partial_hook", "0.inner.weight", "0", hook_zoo._add_prefix),
        ("callable_object_hook", "LayerNorm.bias", "", hook_zoo.Renamer.__call__),
        ("two_hooks_in_a_row", "b.weight", "", hook_zoo.Renamer.__call__),
        ("fused_qkv", "0.q.weight", "0", hook_zoo.FusedQKV._split),
        ("hooks_in_parent_and_child", "0.kid.weight", "0", hook_zoo.Renamer.__call__),
        ("overrides_state_dict", "net.layer.weight", "", hook_zoo.OverridesStateDict.state_dict),
        (
            "overrides_save_to_state_dict",
            "0.packed",
            "0",
            hook_zoo.OverridesSave._save_to_state_dict,
        ),
        ("pre_hook_swaps_parameter", "0.a", "0", hook_zoo.PreHookFuses._fuse),
        ("scales_in_place", "weight", "", "scales_in_place.<locals>.<lambda>"),
        ("absolute_keys", "shared.weight", "1", "save"),
        ("pre_hook_registers_a_hook", "0.kernel", "0", "save"),
        ("hook_removes_itself", "0.ln.weight", "0", "save"),
        ("public_post_hook", "ln.weight", "", "save"),
        (
            "new_dict_from_root_hook",
            "model.0.layer.weight",
            "",
            "new_dict_from_root_hook.<locals>.<lambda>",
        ),
        ("scales_a_clone_in_place", "weight", "", "save"),
        (
            "patched_instance_renames",
            "n.layer.weight",
            "",
            "patched_instance_renames.<locals>.<lambda>",
        ),
    ],
)
def test_the_hook_of_a_key_has_its_function_file_and_line(
    pattern: str, key: str, module: str, code: Any
) -> None:
    hook = hooks(pattern)[key]
    assert (hook.function, hook.module) == (getattr(code, "__qualname__", code), module)
    assert Path(hook.file).name == "hook_zoo.py"
    assert isinstance(code, str) or hook.line == code.__code__.co_firstlineno


def test_untouched_keys_have_no_hook() -> None:
    assert hooks("plain") == {}
    assert hooks("tied") == {}
    assert set(hooks("strip_layer")) == {"weight", "bias"}
    assert set(hooks("strip_layer_nested")) == {"1.deep.weight", "1.deep.bias"}
    assert hooks("new_dict_from_child_hook") == {}
    assert set(hooks("overrides_save_to_state_dict")) == {"0.packed"}


def test_the_hook_of_a_key_is_the_last_that_changed_it() -> None:
    class Casts(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self._register_state_dict_hook(Casts.to_half)
            self._register_state_dict_hook(Casts.nothing)

        def to_half(self, sd: dict, prefix: str, meta: dict) -> None:
            sd[prefix + "weight"] = sd[prefix + "weight"].half()

        def nothing(self, sd: dict, prefix: str, meta: dict) -> None:
            for key in list(sd):
                sd[key] = sd[key].detach()

    names = ckpttool.trace(lambda: nn.Sequential(Casts(), Casts()))
    functions = {
        s.key: (s.hook.function.rpartition(".")[2], s.hook.module) if s.hook else None
        for s in names.serialized
    }
    assert functions == {
        "0.weight": ("to_half", "0"),
        "0.bias": None,
        "1.weight": ("to_half", "1"),
        "1.bias": None,
    }


def test_a_sparse_tensor_changed_in_place_has_a_hook() -> None:
    def build() -> nn.Module:
        model = nn.Module()
        model.register_buffer("table", torch.eye(2, device="cpu").to_sparse())
        model.register_buffer("other", torch.eye(2, device="cpu").to_sparse())
        model._register_state_dict_hook(
            lambda m, sd, prefix, meta: [sd[prefix + "table"].mul_(2), None][1]
        )
        return model

    assert [s.key for s in ckpttool.trace(build).serialized if s.hook is not None] == ["table"]


def test_a_second_change_by_an_outer_function_is_reported() -> None:
    class Outer(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self._register_state_dict_hook(Outer.inner)

        def inner(self, sd: dict, prefix: str, meta: dict) -> None:
            for name in ("weight", "bias"):
                sd[prefix + name] = sd[prefix + name] * 2

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            state = super().state_dict(*args, **kwargs)
            state["weight"] = state["weight"] + 1
            return state

    by_key = {
        s.key: s.hook.function.rpartition(".")[2]
        for s in ckpttool.trace(Outer).serialized
        if s.hook
    }
    assert by_key == {"weight": "state_dict", "bias": "inner"}


def test_a_shared_module_has_the_path_of_the_key() -> None:
    inner = hook_zoo.StripLayer()
    names = ckpttool.trace(lambda: nn.ModuleDict({"a": inner, "b": inner}))
    by_key = {s.key: s.hook.module for s in names.serialized if s.hook}
    assert by_key == {"a.weight": "a", "a.bias": "a", "b.weight": "b", "b.bias": "b"}


KINDS = ("post", "pre", "nested")


def model_with_failing_hook(kind: str) -> nn.Module:
    model = hook_zoo.Block()

    def hook(*args: Any) -> None:
        raise KeyError("no such part")

    if kind == "built-in":
        model.norm._register_state_dict_hook(operator.add)
    elif kind == "nested":
        model.norm._register_state_dict_hook(hook)
        vars(model)["state_dict"] = partial(nn.Module.state_dict, model)
    elif kind == "post":
        model.norm._register_state_dict_hook(hook)
    elif kind == "pre":
        model.norm.register_state_dict_pre_hook(hook)
    elif kind == "returns":
        model.register_state_dict_post_hook(lambda m, sd, prefix, meta: dict(sd))
    return model


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        *(
            (
                kind,
                r"fails in hook \(.*test_trace_hooks\.py:.* on module norm: KeyError: 'no such"
                r" part'",
            )
            for kind in KINDS
        ),
        ("built-in", r"fails in add \(<built-in>:0\) on module norm: TypeError"),
        ("returns", "fails: RuntimeError: state_dict post-hook must return None"),
    ],
)
def test_a_failing_hook_is_reported_with_its_module_and_file(kind: str, message: str) -> None:
    with pytest.raises(CkptError, match=f"^state_dict\\(\\) {message}"):
        ckpttool.trace(lambda: model_with_failing_hook(kind))


def test_the_error_for_a_model_too_large_for_real_values_names_the_hook() -> None:
    def build() -> nn.Module:
        model = nn.Linear(1 << 20, 1 << 20)
        model._register_state_dict_hook(lambda m, sd, p, meta: print(sd[p + "weight"].sum().item()))
        return model

    with pytest.raises(CkptError) as caught:
        ckpttool.trace(build)
    assert "<lambda>" in caught.value.message
    assert "MiB" in caught.value.message
    assert "more memory" in caught.value.hint


@pytest.mark.parametrize("value", ["None", "[1]", "{1: 2}"])
def test_a_state_dict_that_is_not_a_mapping_is_an_error(value: str) -> None:
    model = nn.Linear(1, 1)
    vars(model)["state_dict"] = lambda *a, **k: eval(value)
    with pytest.raises(CkptError, match="not a mapping from names"):
        ckpttool.trace(lambda: model)
