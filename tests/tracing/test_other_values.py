"""Expressions for code that computes outside of torch, checked with other values."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

import ckpttool
from expressions import evaluate, is_opaque, key_of, reads
from opaque_zoo import ZOO, blended, noisy
from zoo import randomized, runtime_values

torch.set_num_threads(1)


def names_with_wrong_values(
    sources: Mapping[str, Any], values: Mapping[str, torch.Tensor], expected: Mapping
) -> list[str]:
    """Return the names with an expression that is not opaque and does not evaluate to
    `expected`.
    """
    known = {
        name: source
        for name, source in sources.items()
        if source is not None and not is_opaque(source)
    }
    return [
        name
        for name, source in known.items()
        if not torch.equal(evaluate(source, values), expected[name])
    ]


@pytest.mark.parametrize("name", ZOO)
def test_expressions_hold_for_other_values(name: str) -> None:
    names = ckpttool.trace(ZOO[name])
    source, target = randomized(ZOO[name](), 99), ZOO[name]()
    values = {fqn: tensor.detach().clone() for fqn, tensor in runtime_values(source).items()}
    state = source.state_dict()
    assert not names_with_wrong_values({s.key: s.source for s in names.serialized}, values, state)
    target.load_state_dict(state, strict=True)
    assert not names_with_wrong_values(
        {r.fqn: r.source for r in names.load}, state, runtime_values(target)
    )


@pytest.mark.parametrize(("name", "fqn", "keys"), [
    ("quantized", "layers.0.weight", {"layers.0.weight_q", "layers.0.scale"}),
    ("half_outside", "layers.0.weight", {"layers.0.weight_q", "layers.0.scale"}),
    ("packed_bits", "layers.0.mask", {"layers.0.packed"}),
    ("by_number", "layers.0.weight", {"layers.0.weight", "layers.0.scale"}),
    ("transposed", "fc.weight", {"fc.weight"}),
    ("cached", "cache", {"q", "scale"}),
])  # fmt: skip
def test_source_keys_of_an_opaque_tensor_are_known(name: str, fqn: str, keys: set[str]) -> None:
    names = ckpttool.trace(ZOO[name])
    source = next(loaded.source for loaded in names.load if loaded.fqn == fqn)
    assert is_opaque(source)
    assert set(reads(source)) == keys


@pytest.mark.parametrize("build", [noisy, blended])
def test_a_random_load_is_opaque(build: Callable[[], nn.Module]) -> None:
    names = ckpttool.trace(build)
    source = next(loaded.source for loaded in names.load if loaded.fqn == "layers.0.weight")
    assert is_opaque(source)


@pytest.mark.parametrize("flag", [False, True])
def test_both_values_of_a_boolean_are_tried(flag: bool) -> None:
    class DoublesIfFlagged(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.register_buffer("flag", torch.tensor(flag))

        def _save_to_state_dict(
            self, state: dict[str, torch.Tensor], prefix: str, keep_vars: bool
        ) -> None:
            super()._save_to_state_dict(state, prefix, keep_vars)
            if self.flag.item():
                state[f"{prefix}weight"] = state[f"{prefix}weight"].detach() * 2

    sources = {key.key: key.source for key in ckpttool.trace(DoublesIfFlagged).serialized}
    assert sources["weight"] is not None
    assert is_opaque(sources["weight"])
    assert "weight" in reads(sources["weight"])
    assert key_of(sources["bias"]) == "bias"


def test_loading_gets_the_saved_versions() -> None:
    class Versioned(nn.Linear):
        _version = 2

        def __init__(self) -> None:
            super().__init__(2, 2)

        def _load_from_state_dict(
            self, state: dict, prefix: str, metadata: dict, *more: Any
        ) -> None:
            if metadata.get("version", 1) < 2:
                state[f"{prefix}weight"] = state[f"{prefix}weight"].t()
            super()._load_from_state_dict(state, prefix, metadata, *more)

    names = ckpttool.trace(Versioned)
    assert names.roundtrips
    assert {one.fqn: key_of(one.source) for one in names.load} == {
        "weight": "weight",
        "bias": "bias",
    }


class ChecksItsValues(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        nn.init.ones_(self.weight)

    def is_fine(self) -> bool:
        return bool(self.weight.isfinite().all())

    def _save_to_state_dict(
        self, state: dict[str, torch.Tensor], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(state, prefix, keep_vars)
        if not self.is_fine():
            raise ValueError("no weight to save")
        state[f"{prefix}weight"] = state[f"{prefix}weight"].detach() * 2


class Doubles(ChecksItsValues):
    def is_fine(self) -> bool:
        return True


class AcceptsOnlyOnes(ChecksItsValues):
    def is_fine(self) -> bool:
        return bool((self.weight == 1).all())


@pytest.mark.parametrize(("build", "is_known"), [(ChecksItsValues, True), (AcceptsOnlyOnes, False)])
def test_a_check_of_values_does_not_make_a_tensor_opaque(
    build: type[nn.Module], is_known: bool
) -> None:
    """If no other values pass the check, the tensor is opaque."""
    names = ckpttool.trace(lambda: nn.ModuleList([build(), Doubles()]))
    source, plain = (key.source for key in names.serialized if key.key.endswith("weight"))
    assert source is not None
    assert plain is not None
    assert (is_opaque(source), is_opaque(plain)) == (not is_known, False)
    weight = torch.randn(2, 2)
    assert not is_known or torch.equal(evaluate(source, {"0.weight": weight}), weight * 2)


class ChecksItsSeal(nn.Module):
    """Saves and loads only with its seal, and computes the loaded weight in numpy."""

    saves_others = loads_others = False

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))
        self.register_buffer("seal", torch.tensor([4, 2]))
        self.register_buffer("table", torch.arange(3.0), persistent=False)
        self.register_buffer("count", torch.zeros(1), persistent=False)
        self._register_state_dict_hook(self._saved)
        self.register_load_state_dict_pre_hook(self._load)

    @staticmethod
    def _saved(module: ChecksItsSeal, state: dict[str, Any], *_: Any) -> None:
        if not module.saves_others and module.seal.tolist() != [4, 2]:
            raise ValueError("another seal")

    def _load(self, _: nn.Module, state: dict[str, Any], *__: Any) -> None:
        if not self.loads_others and state["seal"].tolist() != [4, 2]:
            raise ValueError("another seal")
        state["weight"] = torch.from_numpy(state["weight"].numpy() * 2)
        self.count.fill_(float(state["weight"].numpy().sum()))


class SavesAnyValues(ChecksItsSeal):
    saves_others = True


class LoadsAnyValues(SavesAnyValues):
    loads_others = True


@pytest.mark.parametrize(("build", "keys"), [
    # no other values can be tried, so any key may be a source
    (ChecksItsSeal, {"weight", "bias", "seal"}),
    (SavesAnyValues, {"weight", "bias", "seal"}),
    (LoadsAnyValues, {"weight"}),
])  # fmt: skip
@pytest.mark.parametrize("cheap", [True, False])
def test_expressions_without_other_values_are_opaque(
    build: type[nn.Module], keys: set[str], cheap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not cheap:
        monkeypatch.setattr("ckpttool.tracing.loading.is_cheap", lambda model: False)
        keys = {"weight", "bias", "seal"}
    names = ckpttool.trace(build)
    sources = {one.fqn: one.source for one in names.load}
    computed = {fqn: set(reads(sources.pop(fqn))) for fqn in ("weight", "count")}
    assert computed == dict.fromkeys(("weight", "count"), keys)
    assert sources.pop("table") is None
    assert {fqn: key_of(source) for fqn, source in sources.items()} == {
        "bias": "bias",
        "seal": "seal",
    }


@pytest.mark.parametrize("limit", [256, 0])
def test_source_tensors_of_values_computed_outside_torch(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tensor is changed separately; if there are too many tensors, all of them count as
    sources.
    """

    class Hashed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
            self.c = self.a
            self.register_buffer("limit", torch.ones(2))
            self._register_state_dict_hook(self._save)

        @staticmethod
        def _save(module: Hashed, state: dict[str, Any], prefix: str, _: Any) -> None:
            a, limit = (
                ctypes.string_at(tensor.data_ptr(), 8) for tensor in (module.a, module.limit)
            )
            ones = ctypes.string_at(torch.ones(2).data_ptr(), 8)
            if limit != ones and a == ones:
                raise ValueError("another limit alone")
            state[prefix + "bytes"] = torch.tensor(list(a))

    monkeypatch.setattr("ckpttool.tracing.instances.MOST_TRIED", limit)
    result = {key.key: key.source for key in ckpttool.trace(Hashed, materialize=True).serialized}
    assert is_opaque(result["bytes"])
    assert set(reads(result["bytes"])) == ({"a", "limit"} if limit else {"a", "b", "limit"})


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64", "complex64", "qint8"])
def test_tensors_of_unusual_dtypes_are_traced(dtype: str) -> None:
    """Other values are tried, because the model also computes outside of torch."""

    def build() -> nn.Module:
        model = nn.ModuleDict({"coded": ZOO["by_number"]()})
        value = torch.ones(3)
        tensor = (
            torch.quantize_per_tensor(value, 0.5, 0, torch.qint8)
            if dtype == "qint8"
            else value.to(getattr(torch, dtype))
        )
        model.register_buffer("unusual", tensor)
        return model

    names = ckpttool.trace(build, materialize=True)
    assert {one.fqn: key_of(one.source) for one in names.load}["unusual"] == "unusual"
    assert names.roundtrips
