"""Traced names against torch itself: every model of the zoo is really built, saved and loaded."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpttool
from ckpttool import Names
from expressions import evaluate, is_opaque, key_of, operators, reads
from files import run_measured
from hook_zoo import ZOO
from zoo import assert_same, randomized, runtime_values, traced, zoo_model

torch.set_num_threads(1)


@pytest.mark.parametrize("name", sorted(ZOO))
def test_expressions_give_the_saved_values(name: str) -> None:
    model = randomized(zoo_model(name), 1)
    runtime, state = runtime_values(model), model.state_dict()
    tensors = {
        k: v
        for k, v in state.items()
        if isinstance(v, torch.Tensor) and not k.endswith("_extra_state")
    }
    meta, real = traced(name), traced(name, True)
    for names in (meta, real):
        assert [s.key for s in names.serialized] == list(tensors)
        assert set(names.extra_state) == set(state) - set(tensors)
        assert Names.from_json(json.loads(json.dumps(names.to_json())), "names.json") == names
        for s in names.serialized:
            value = tensors[s.key]
            if nn.parameter.is_lazy(value):
                assert key_of(s.source) == s.key
                continue
            assert s.dtype == str(value.dtype).removeprefix("torch.")
            assert s.shape == tuple(value.shape)
            if s.source is not None and not is_opaque(s.source):
                assert_same(evaluate(s.source, runtime), value, s.key)
    assert meta.runtime == real.runtime
    assert [s.hook for s in meta.serialized] == [s.hook for s in real.serialized]
    assert meta.roundtrip_problems == real.roundtrip_problems


@pytest.mark.parametrize("name", sorted(ZOO))
def test_a_strict_load_gives_the_traced_values(name: str) -> None:
    """The model round-trips if and only if the load restores all saved tensors."""
    names, source = traced(name), randomized(zoo_model(name), 4)
    expected = runtime_values(source)
    with torch.no_grad():  # copies need tensors without gradients
        state = source.state_dict()
    is_lazy = any(isinstance(v, torch.Tensor) and nn.parameter.is_lazy(v) for v in state.values())
    model = randomized(zoo_model(name), 5)
    before = runtime_values(model)
    try:
        # a hook may change it
        model.load_state_dict(state if is_lazy else copy.deepcopy(state), strict=True)
        loads = True
    except (RuntimeError, KeyError):
        loads = False
    after = runtime_values(model)
    same = loads and all(
        nn.parameter.is_lazy(after[k]) or torch.equal(after[k], v)
        for k, v in expected.items()
        if k not in names.not_serialized
    )
    assert names.roundtrips == same == (not names.roundtrip_problems), names.roundtrip_problems
    if is_lazy:
        return  # nothing to load
    assert [r.fqn for r in names.load] == list(after)
    for r in names.load:
        if r.source is None:
            assert_same(after[r.fqn], before[r.fqn], r.fqn)
        elif not is_opaque(r.source):
            assert_same(evaluate(r.source, state), after[r.fqn], r.fqn)


OPAQUE = ["opaque"], ["weight"]


def source_of(name: str, key: str) -> Any:
    return next(s.source for s in traced(name).serialized if s.key == key)


def test_a_rename_is_a_ref() -> None:
    assert key_of(source_of("strip_layer", "weight")) == "layer.weight"
    assert key_of(source_of("clones_and_moves", "layer.weight")) == "layer.weight"
    assert key_of(source_of("wraps_in_parameter", "norm.bias")) == "norm.bias"
    assert key_of(source_of("shares_memory_with_numpy", "weight")) == "weight"
    assert key_of(source_of("swaps_two_names", "a.weight")) == "b.weight"
    assert key_of(source_of("two_tensors_in_one", "kernel")) == "weight"
    assert key_of(source_of("zero_elements", "empty")) == "empty"


def test_aliases_refer_to_the_first_name() -> None:
    names = traced("tied")
    assert [(r.fqn, r.alias_of) for r in names.runtime] == [
        ("embed.weight", None),
        ("head.weight", "embed.weight"),
    ]
    assert key_of(source_of("tied", "head.weight")) == "embed.weight"
    assert [(r.fqn, key_of(r.source)) for r in names.load] == [
        ("embed.weight", "embed.weight"),
        ("head.weight", "head.weight"),
    ]


def test_constants_have_no_source() -> None:
    assert source_of("adds_a_constant", "version") is None
    assert source_of("adds_random_numbers", "seed") is None
    assert is_opaque(source_of("adds_random_numbers", "noisy"))
    assert (reads(source_of("drops_out", "weight"))) == ["weight"]


def test_code_that_cannot_be_traced_is_opaque() -> None:
    for name in ("divides_by_item", "goes_through_numpy", "goes_through_bytes"):
        assert (operators(source_of(name, "weight")), reads(source_of(name, "weight"))) == OPAQUE
        assert key_of(source_of(name, "bias")) == "bias"
    inner = source_of("unpacks_a_subclass", "inner")
    assert (operators(inner), reads(inner)) == OPAQUE
    assert key_of(source_of("asserts_on_values", "kernel")) == "weight"


def test_tensors_that_are_not_saved_are_listed() -> None:
    names = traced("buffers")
    assert {r.fqn for r in names.runtime if not r.persistent} == {"0.mask", "1.mask"}
    assert names.not_serialized == ("0.mask", "1.mask")
    assert {r.fqn for r in names.runtime if not r.trainable} >= {"0.frozen", "1.mask"}
    assert traced("drops_a_key").not_serialized == ("norm.weight", "norm.bias")
    assert traced("nested_dict").not_serialized == ()


def test_extra_state_and_modules_are_listed() -> None:
    assert traced("extra_state").extra_state == ("0._extra_state",)
    assert traced("extra_state_tensor").extra_state == ("0._extra_state",)
    assert traced("adds_a_number").extra_state == ("version",)
    assert traced("extra_state").modules == ("", "0", "1")
    assert traced("overrides_state_dict").modules is None


def test_lazy_parameters_have_no_shape() -> None:
    assert {r.shape for r in traced("lazy").runtime if r.fqn.startswith("0.")} == {None}


def test_loads_from_slices_are_joined() -> None:
    loaded = {r.fqn: r.source for r in traced("loads_by_slices").load}
    weight, columns = loaded["1.deep.weight"], loaded["1.deep.columns"]
    assert operators(weight) == operators(columns) == ["aten.cat.default"]
    parts = {key: torch.full((2, 2), float(at)) for at, key in enumerate(reads(weight))}
    assert list(parts) == ["1.deep.a", "1.deep.b"]
    assert torch.equal(evaluate(weight, parts), torch.cat([*parts.values()]))
    parts = {key: torch.full((2, 2), float(at)) for at, key in enumerate(reads(columns))}
    assert list(parts) == ["1.deep.left", "1.deep.right"]
    assert torch.equal(evaluate(columns, parts), torch.cat([*parts.values()], 1))


def test_a_non_persistent_buffer_of_a_shared_module_has_all_its_names() -> None:
    inner = nn.BatchNorm1d(2)
    inner.register_buffer("mask", torch.ones(2), persistent=False)
    model = nn.Sequential(inner, nn.Sequential(inner))
    result = ckpttool.trace(model).runtime
    assert {one.fqn for one in result if one.persistent} == set(model.state_dict())
    assert {one.fqn for one in result if not one.persistent} == {"0.mask", "1.0.mask"}


def test_two_tensors_saved_to_one_key_are_reported() -> None:
    problems = [str(problem) for problem in traced("two_to_one_key").roundtrip_problems]
    assert problems[0].startswith(
        "lost in saving: it and b.weight are sent to one key, x.weight, by two_to_one_key ("
    )
    assert problems[0].endswith(" on module (root) @ a.weight")


def test_tracing_70_billion_parameters_takes_little_memory(tmp_path: Path) -> None:
    (tmp_path / "large.py").write_text(
        """
from torch import nn, bfloat16

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = {"q": (8192, 8192), "k": (8192, 1024), "v": (8192, 1024), "o": (8192, 8192),
                 "gate": (8192, 28672), "up": (8192, 28672), "down": (28672, 8192)}
        for name, (inputs, outputs) in sizes.items():
            setattr(self, name, nn.Linear(inputs, outputs, bias=False, dtype=bfloat16))
        self.norm = nn.RMSNorm(8192)
        self._register_state_dict_hook(Block.join)
        self.register_load_state_dict_pre_hook(Block.split)

    def join(self, sd, prefix, meta):
        import torch
        sd[prefix + "kv"] = torch.cat([sd.pop(prefix + "k.weight"), sd.pop(prefix + "v.weight")])

    def split(self, sd, prefix, *args):
        sd[prefix + "k.weight"], sd[prefix + "v.weight"] = sd.pop(prefix + "kv").chunk(2)

def build(layers=80):
    return nn.ModuleDict({"layers": nn.ModuleList(Block() for _ in range(layers)), "embed": nn.Embedding(128256, 8192)})

def small():
    return build(layers=1)
"""
    )

    code = (
        "import resource, ckpttool; ckpttool.trace('large.py:small');"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss);"
        "names = ckpttool.trace('large.py:build'); assert names.roundtrips,"
        " names.roundtrip_problems[:3];"
        "print(len(names.serialized))"
    )
    printed, peak = run_measured([sys.executable, "-c", code], tmp_path)
    small_peak, keys = map(int, printed.split())
    assert keys == 80 * 7 + 1
    assert peak < small_peak * (1 if sys.platform == "darwin" else 1024) + (200 << 20)


def test_a_meta_only_model_with_extra_state_is_traced() -> None:
    """Without real values, the trace cannot find out what the extra state contains."""

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if torch.empty(0).device.type != "meta":
                raise RuntimeError("no memory")
            self.weight, self.hidden = nn.Parameter(torch.empty(2)), nn.Parameter(torch.empty(2))
            self.register_state_dict_post_hook(hide)

        def get_extra_state(self) -> bytes:
            return b""

        def set_extra_state(self, state: bytes) -> None:
            """Do nothing."""

    def hide(module: nn.Module, state: dict[str, object], prefix: str, metadata: object) -> None:
        del state[f"{prefix}hidden"]

    names = ckpttool.trace(Large)
    assert ([key.key for key in names.serialized], names.not_serialized) == (
        ["weight"],
        ("hidden",),
    )


class ListsReversed(nn.Linear):
    """Lists its parameters in another order than its modules."""

    def __init__(self) -> None:
        super().__init__(2, 2)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return reversed(list(super().named_parameters(*args, **kwargs)))


class ListsOne(ListsReversed):
    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return list(super().named_parameters(*args, **kwargs))[:1]


@pytest.mark.parametrize("build", [ListsReversed, ListsOne])
def test_parameters_are_in_the_order_of_named_parameters(build: type[nn.Module]) -> None:
    result = [tensor.fqn for tensor in ckpttool.trace(build).runtime]
    assert result == [name for name, _ in build().named_parameters()]


def test_a_save_that_works_without_values_is_opaque() -> None:
    """The trace describes the save with values, not the fallback for missing values."""

    def save(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        try:
            scale = float(state[f"{prefix}weight"].sum())
        except RuntimeError:
            scale = 1.0
        state[f"{prefix}weight"] = state[f"{prefix}weight"].detach() * scale

    def build() -> nn.Module:
        model = nn.Linear(2, 2)
        model._register_state_dict_hook(save)
        return model

    source = {key.key: key.source for key in ckpttool.trace(build).serialized}["weight"]
    assert is_opaque(source)
    assert set(reads(source)) == {"weight"}


def test_operators_in_place_keep_the_dtype() -> None:
    def save(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        key, half = f"{prefix}weight", state[f"{prefix}weight"].to(torch.bfloat16)
        state[key] = half.mul_(state[key]).add_(state[f"{prefix}bias"])

    def build() -> nn.Module:
        model = nn.Linear(3, 3)
        model._register_state_dict_hook(save)
        return model

    model, (weight,) = (
        build(),
        (key for key in ckpttool.trace(build).serialized if key.key == "weight"),
    )
    assert weight.dtype == "bfloat16"
    assert weight.source is not None
    assert_same(
        evaluate(weight.source, runtime_values(model)),
        model.state_dict()["weight"],
        "weight",
    )


def test_keys_that_depend_on_values_are_noted() -> None:
    """One of several runs with different keys is enough."""

    def build() -> nn.Module:
        model = nn.Linear(2, 2)
        model._register_state_dict_hook(
            lambda m, sd, p, meta: (
                sd.update({p + "positive": torch.ones(1)})
                if float(sd[p + "weight"][0, 0]) > 0
                else None
            )
        )
        return model

    names = ckpttool.trace(build)
    assert (
        "state_dict() writes some keys for some values of the tensors only: positive" in names.notes
    )
    assert not names.roundtrips  # a strict load refuses the key


def test_a_dropped_tensor_next_to_a_renamed_one_is_not_a_collision() -> None:
    def build() -> nn.Module:
        model = nn.Module()
        for name in ("a", "b"):
            model.register_buffer(name, torch.ones(2))

        def save(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
            keys = list(state)
            state[f"{prefix}last_of_{len(keys)}"] = state[keys[-1]]
            for key in keys:
                del state[key]

        model._register_state_dict_hook(save)
        return model

    names = ckpttool.trace(build)
    assert names.not_serialized == ("a",)
    assert not any("lost in saving" in str(problem) for problem in names.roundtrip_problems)


def test_a_tensor_overwritten_by_another_module_is_reported() -> None:
    """No hook is named, because a module overwrites the key that a hook added."""

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        model[0]._register_state_dict_hook(
            lambda m, sd, p, meta: sd.update({"1.weight": sd.pop("0.weight")})
        )
        return model

    problems = ckpttool.trace(build).roundtrip_problems
    assert "lost in saving: it and 1.weight are sent to one key, 1.weight @ 0.weight" in map(
        str, problems
    )


def test_a_tensor_replaced_by_a_constant_is_not_saved() -> None:
    def build() -> nn.Module:
        model = nn.Linear(2, 2)
        model._register_state_dict_hook(
            lambda m, sd, p, meta: sd.update({p + "weight": torch.zeros(2, 2)})
        )
        return model

    assert ckpttool.trace(build).not_serialized == ("weight",)


def test_keys_that_change_in_a_nested_model_are_noted() -> None:
    class AddsKeyIfNested(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self._register_state_dict_hook(
                lambda m, sd, p, meta: sd.update(
                    {5: torch.ones(1)} if p else {p + "x": sd[p + "bias"]}
                )
            )

    (note,) = (note for note in ckpttool.trace(AddsKeyIfNested).notes if "as a part" in note)
    assert "5 is there instead" in note
