"""`swap_weights` on real modules, programs and packages; loading and export by torch are the
oracle.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

import ckpttool
import fusion_decoder
from ckpttool import CkptError, Refused, swap_weights
from expressions import same_bits
from places import ROOT
from torch_version import needs_torch
from unflattened import Nested, Shared, example, made, program, unflattened

SEEDS = int(os.environ.get("CKPTTOOL_SEEDS", "100"))


class Tied(nn.Module):
    """Tied weights, an overlapping view, buffers of both kinds, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.arange(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(x)))

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


def seeded(kind: Any, seed: int, *args: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return kind(*args).eval()


def snapshot(module: nn.Module) -> dict[str, Any]:
    """Return everything that a failed swap must not change: objects, memory, values, gradients,
    flags.
    """
    tensors = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers()),
    }
    return {
        name: (
            id(t),
            type(t),
            t.data_ptr(),
            t.detach().clone(),
            t.requires_grad,
            t.grad,
            t._version,
        )
        for name, t in tensors.items()
    }


def unchanged(before: dict[str, Any], module: nn.Module) -> bool:
    after = snapshot(module)
    same = [
        all(
            torch.equal(a, b) if i == 3 else (a is b or a == b)
            for i, (a, b) in enumerate(zip(before[name], after[name]))
        )
        for name in before
    ]
    return before.keys() == after.keys() and all(same)


def problems(refused: pytest.ExceptionInfo[Refused]) -> set[str]:
    return {str(problem) for problem in refused.value.problems}


# Modules


@pytest.mark.parametrize("in_place", [True, False])
def test_the_new_weights_match_a_load_by_torch(in_place: bool) -> None:
    live, other, oracle = seeded(Tied, 0), seeded(Tied, 1), seeded(Tied, 0)
    oracle.load_state_dict(other.state_dict())
    done = swap_weights(live, other.state_dict(), in_place=in_place)
    tokens = torch.tensor([0, 5, 3])
    assert torch.equal(live(tokens), oracle(tokens))
    assert live.head.weight is live.embed.weight
    assert isinstance(live.embed.weight, nn.Parameter)
    assert live.state_dict().keys() == oracle.state_dict().keys()
    assert done.ignored == ("_extra_state",)
    assert done.constants == ("steps",)
    assert live.embed.weight.data_ptr() != other.embed.weight.data_ptr()


def test_in_place_references_and_optimizers_stay_valid() -> None:
    live, other, oracle = (seeded(nn.Linear, seed, 4, 2) for seed in (0, 1, 1))
    keeper, view = nn.ModuleList([live]), live.weight.detach()[0]
    optimizer = torch.optim.SGD(live.parameters(), lr=0.5)
    weight, address = live.weight, live.weight.data_ptr()
    swap_weights(live, other.state_dict())
    assert live.weight is weight
    assert live.weight.data_ptr() == address
    assert torch.equal(view, other.weight[0])
    for module, opt in ((live, optimizer), (oracle, torch.optim.SGD(oracle.parameters(), lr=0.5))):
        module(torch.ones(1, 4)).sum().backward()
        opt.step()
    assert torch.equal(keeper.get_parameter("0.weight"), oracle.weight)
    assert torch.equal(keeper.get_parameter("0.bias"), oracle.bias)


def test_parameters_and_buffers_keep_their_class_attributes_and_flags() -> None:
    class Scaled(nn.Parameter):
        pass

    for in_place in (True, False):
        live, other = seeded(nn.Linear, 0, 4, 2), seeded(nn.Linear, 1, 4, 2)
        live.weight = Scaled(live.weight.detach(), requires_grad=False)
        vars(live.weight)["rank"] = 3
        swap_weights(live, other.state_dict(), in_place=in_place)
        assert type(live.weight) is Scaled
        assert vars(live.weight)["rank"] == 3
        assert [p.requires_grad for p in live.parameters()] == [False, True]
        assert torch.equal(live.weight, other.weight)
    norm = nn.BatchNorm1d(2)
    vars(norm.running_mean)["group"] = "statistics"
    swap_weights(norm, nn.BatchNorm1d(2).state_dict(), in_place=False)
    assert vars(norm.running_mean) == {"group": "statistics"}


@pytest.mark.parametrize("in_place", [True, False])
def test_a_state_dict_of_the_module_itself_may_be_permuted(in_place: bool) -> None:
    live = nn.ModuleList([seeded(nn.Linear, seed, 3, 3) for seed in (0, 1)])
    state = live.state_dict()
    first, second = state["0.weight"].clone(), state["1.weight"].clone()
    swap_weights(
        live,
        {**state, "0.weight": state["1.weight"], "1.weight": state["0.weight"]},
        in_place=in_place,
    )
    assert torch.equal(live.get_parameter("0.weight"), second)
    assert torch.equal(live.get_parameter("1.weight"), first)


@pytest.mark.parametrize("in_place", [True, False])
def test_weights_that_share_memory_still_share_it(in_place: bool) -> None:
    def flat() -> Any:
        module = nn.Module()
        memory = torch.rand(8)
        module.left, module.right = nn.Parameter(memory[:4]), nn.Parameter(memory[4:])
        return module

    live, other = flat(), flat()
    swap_weights(live, other.state_dict(), in_place=in_place)
    assert torch.equal(live.left, other.left)
    assert torch.equal(live.right, other.right)
    assert live.left.untyped_storage()._cdata == live.right.untyped_storage()._cdata


def test_overlapping_weights_with_different_values_are_refused() -> None:
    live = nn.Module()
    memory = torch.zeros(6)
    live.left, live.right = nn.Parameter(memory[:4]), nn.Parameter(memory[2:])
    before = snapshot(live)
    with pytest.raises(Refused) as refused:
        swap_weights(live, {"left": torch.zeros(4), "right": torch.ones(4)})
    assert problems(refused) == {"shares memory with another weight that gets another value @ left"}
    assert unchanged(before, live)
    swap_weights(
        live, {"left": torch.tensor([1.0, 2, 3, 4]), "right": torch.tensor([3.0, 4, 5, 6])}
    )
    assert memory.tolist() == [1, 2, 3, 4, 5, 6]


def random_view(rng: random.Random, flat: npt.NDArray[Any]) -> torch.Tensor:
    """Return a random 2x2 view of the buffer or a copy, with a separate or a shared storage."""
    start, stride = (
        rng.randrange(4),
        rng.choice([(2, 1), (1, 2), (1, 2), (2, 1), (1, 1), (0, 1), (3, 1)]),
    )
    flat = flat if rng.random() < 0.8 else flat + 100
    result = (
        torch.from_numpy(flat[start:]) if rng.random() < 0.5 else torch.from_numpy(flat)[start:]
    )
    result = result.as_strided((2, 2), stride)
    result = torch._neg_view(result) if rng.random() < 0.2 else result
    return result.conj() if rng.random() < 0.2 else result


@pytest.mark.parametrize("in_place", [True, False])
def test_the_state_dict_may_share_memory_with_the_module(in_place: bool) -> None:
    """Weights and new values share one numpy buffer; a refused swap changes nothing."""
    done = 0
    for seed in range(SEEDS):
        rng, live = random.Random(seed), nn.Module()
        # its address is not aligned
        flat = (np.arange(21) + 1j * rng.randrange(2)).astype(np.complex64)[9:]
        for name in "abc"[: rng.randint(1, 3)]:
            live.register_buffer(name, random_view(rng, flat))
        old, source_count = (
            {name: tensor.clone() for name, tensor in live.named_buffers()},
            rng.choice([2, 4]),
        )
        sources = [random_view(rng, flat) for _ in range(source_count)]
        state = {name: rng.choice([old[name], *sources]) for name in old}
        expected = {name: tensor.clone() for name, tensor in state.items()}
        try:
            swap_weights(live, state, in_place=in_place)
        except Refused:
            expected = old
        else:
            done += 1
        assert all(same_bits(tensor, expected[name]) for name, tensor in live.named_buffers()), seed
    assert 0.2 * SEEDS < done < 0.95 * SEEDS, done


def test_interleaved_views_of_a_buffer_are_written_correctly() -> None:
    flat, live = np.zeros(8, np.float32), nn.Module()
    live.register_buffer("left", torch.from_numpy(flat[:4]))
    live.register_buffer("right", torch.from_numpy(flat)[4:].view(2, 2).t())
    swap_weights(live, {"left": torch.ones(4), "right": torch.tensor([[1.0, 2], [3, 4]])})
    assert flat.tolist() == [1, 1, 1, 1, 1, 3, 2, 4]


@pytest.mark.parametrize("within", [range(1, 2), range(1, 3), range(1, 6)])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_value_in_the_memory_of_another_weight_is_read_before_it_is_overwritten(
    in_place: bool, within: range
) -> None:
    """Two large weights contain the smaller weights and the new values of other weights."""
    live, memories = nn.Module(), torch.arange(16.0).split(8)
    for number, memory in enumerate(memories):
        live.register_buffer(f"large{number}", memory)
        for at in within:
            live.register_buffer(f"small{number}_{at}", memory[at : at + 1])
    new = {name: tensor * 10 for name, tensor in live.state_dict().items()}
    for number, memory in enumerate(memories):
        live.register_buffer(f"other{number}", torch.zeros(2))
        new[f"other{number}"] = memory[6:]
    swap_weights(live, new, in_place=in_place)
    assert [live.get_buffer(f"large{n}").tolist() for n in (0, 1)] == [
        [10 * (8 * n + i) for i in range(8)] for n in (0, 1)
    ]
    assert [live.get_buffer(f"other{n}").tolist() for n in (0, 1)] == [[6, 7], [14, 15]]


def test_a_recurrent_module_computes_with_the_new_weights() -> None:
    live, other = seeded(nn.LSTM, 0, 3, 3), seeded(nn.LSTM, 1, 3, 3)
    swap_weights(live, other.state_dict(), in_place=False)
    x = torch.ones(2, 1, 3)
    assert torch.equal(live(x)[0], other(x)[0])


@pytest.mark.parametrize("in_place", [True, False])
def test_tensors_without_elements_keep_their_shapes(in_place: bool) -> None:
    live, state = nn.Module(), {"a": torch.ones(0, 2), "b": torch.ones(3, 0), "w": torch.ones(2)}
    for name, tensor in state.items():
        live.register_buffer(name, torch.zeros_like(tensor))
    swap_weights(live, state, in_place=in_place)
    assert {name: tensor.tolist() for name, tensor in live.named_buffers()} == {
        name: tensor.tolist() for name, tensor in state.items()
    }


@pytest.mark.parametrize("in_place", [True, False])
def test_a_wrapper_with_a_tensor_of_the_same_name_keeps_both(in_place: bool) -> None:
    """Without the segment of the wrapper, both tensors have the same name."""
    live, other = (nn.DataParallel(seeded(nn.Linear, seed, 2, 2)) for seed in (0, 1))
    for seed, module in enumerate((live, other)):
        module.register_buffer("weight", torch.full((3,), float(seed)))
    swap_weights(live, other.state_dict(), in_place=in_place)
    assert torch.equal(live.module.weight, other.module.weight)
    assert live.weight.tolist() == [1, 1, 1]


# Refusals


def test_all_problems_are_reported_and_nothing_is_changed() -> None:
    live, state = seeded(Tied, 0), seeded(Tied, 1).state_dict()
    state["head.weight"] = state["head.weight"] + 1
    state["norm.weight"] = torch.ones(5)
    state["norm.bias"] = state["norm.bias"].double()
    state["spare"] = torch.ones(1)
    del state["norm.running_mean"]
    before = snapshot(live)
    with pytest.raises(Refused) as refused:
        swap_weights(live, state)
    assert problems(refused) == {
        "unexpected: not a weight of the program @ spare",
        "shape [5], the program has [4] (from norm.weight) @ norm.weight",
        "dtype float64, the program has float32 (from norm.bias) @ norm.bias",
        "missing weight @ norm.running_mean",
        "tied to embed.weight, but its new value differs @ head.weight",
    }
    assert unchanged(before, live)


def test_another_dtype_requires_cast() -> None:
    live, other = seeded(nn.Linear, 0, 4, 2), seeded(nn.Linear, 1, 4, 2).double()
    with pytest.raises(Refused) as refused:
        swap_weights(live, other.state_dict())
    assert refused.value.hint == "cast=True converts them to the dtypes that are there"
    swap_weights(live, other.state_dict(), cast=True)
    assert torch.equal(live.weight, other.weight.float())


def test_model_resolves_keys_that_hooks_rename() -> None:
    operand = f"{ROOT / 'examples' / 'fusion_decoder.py'}:build"
    live, other = fusion_decoder.build(), fusion_decoder.build()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    state = other.state_dict()
    assert state.keys() != dict(other.named_parameters()).keys()
    with pytest.raises(Refused) as refused:
        swap_weights(live, state)
    assert "model=module" in refused.value.hint
    for model in (operand, fusion_decoder.build, ckpttool.trace(operand), live):
        fresh = fusion_decoder.build()
        done = swap_weights(fresh, state, model=model)
        assert done.form == "serialized"
        assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), other.parameters()))


@pytest.mark.parametrize(
    ("target", "state", "expected"),
    [
        (object(), {}, "an object holds no weights that can be swapped"),
        (nn.Linear(1, 1), [1], "a list is not a state_dict"),
        (nn.Linear(1, 1), {1: torch.ones(1)}, "the state dict has a key that is not a string: 1"),
        (nn.LazyLinear(1), {}, "the module is not initialized yet: it has 2 lazy parameters"),
    ],
)
def test_invalid_targets_and_states_are_refused(target: Any, state: Any, expected: str) -> None:
    with pytest.raises(CkptError) as raised:
        swap_weights(target, state)
    assert raised.value.message == expected


# Failures


class Closed(dict[str, Any]):
    """A state_dict that can no longer be read."""

    def items(self) -> Any:
        raise RuntimeError("the file is closed")


def test_an_error_of_the_state_dict_is_not_blamed_on_the_module() -> None:
    with pytest.raises(RuntimeError, match="the file is closed"):
        swap_weights(nn.Linear(2, 2), Closed(nn.Linear(2, 2).state_dict()))


def test_tensors_that_cannot_be_written_are_refused_before_any_write() -> None:
    with torch.inference_mode():
        inference = nn.Linear(2, 2)
    expanded = nn.Linear(2, 2)
    expanded.weight = nn.Parameter(torch.zeros(1, 2).expand(2, 2))
    dense, meta = nn.Linear(2, 2), nn.Linear(2, 2, device="meta")
    no_data = "on the meta device and has no data"
    for live, values, expected in (
        (inference, dense, {"an inference tensor @ weight", "an inference tensor @ bias"}),
        (expanded, dense, {"several of its elements are one in memory @ weight"}),
        (meta, dense, {f"it is {no_data} @ {name}" for name in ("weight", "bias")}),
        (
            nn.Linear(2, 2),
            meta,
            {f"its new value is {no_data} @ {name}" for name in ("weight", "bias")},
        ),
    ):
        before = snapshot(live) if live is not inference and live is not meta else None
        with pytest.raises(Refused) as refused:
            swap_weights(live, values.state_dict())
        assert problems(refused) == expected
        assert before is None or unchanged(before, live)
    for live in (inference, expanded):
        other = nn.Linear(2, 2)
        swap_weights(live, other.state_dict(), in_place=False)
        assert torch.equal(live(torch.ones(2)), other(torch.ones(2)))
    with torch.inference_mode():
        again, other = nn.Linear(2, 2), nn.Linear(2, 2)
        swap_weights(again, other.state_dict())
        assert torch.equal(again.weight, other.weight)


@pytest.mark.parametrize("into_sparse", [True, False])
def test_swaps_between_dense_and_sparse_are_refused(into_sparse: bool) -> None:
    dense, sparse = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    sparse.weight = nn.Parameter(torch.eye(2).to_sparse())
    live, state = (sparse, dense.state_dict()) if into_sparse else (dense, sparse.state_dict())
    before = live.weight.detach().to_dense().clone()
    with pytest.raises(Refused) as refused:
        swap_weights(live, state)
    assert "between dense and sparse" in " ".join(problems(refused))
    assert torch.equal(live.weight.detach().to_dense(), before)


class Weight8(torch.Tensor):
    """An int8 weight with a scale, as in quantization libraries: a wrapper subclass with a custom
    module_load.
    """

    data8: torch.Tensor
    factor: torch.Tensor

    @staticmethod
    def __new__(cls, data8: torch.Tensor, factor: torch.Tensor) -> Weight8:
        return torch.Tensor._make_wrapper_subclass(cls, data8.shape, dtype=factor.dtype)

    def __init__(self, data8: torch.Tensor, factor: torch.Tensor) -> None:
        self.data8, self.factor = data8, factor

    @classmethod
    def of(cls, dense: torch.Tensor) -> Weight8:
        factor = dense.detach().abs().max() / 127
        return cls((dense.detach() / factor).round().to(torch.int8), factor)

    def dense(self) -> torch.Tensor:
        return self.data8.to(self.factor.dtype) * self.factor

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data8", "factor"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], *rest: Any) -> Weight8:
        return cls(inner["data8"], inner["factor"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.module_load:
            other = args[1]
            if bool(torch.isnan(other.dense() if isinstance(other, Weight8) else other).any()):
                raise ValueError("cannot quantize NaN")
            return other.clone() if isinstance(other, cls) else cls.of(other)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (
            torch.ops.aten.detach.default,
            torch.ops.aten.clone.default,
            torch.ops.aten.alias.default,
        ):
            source = args[0]
            factor = (
                source.factor if isinstance(source.factor, float) else func(source.factor, **kwargs)
            )
            result = type(source)(func(source.data8, **kwargs), factor)
            return return_and_correct_aliasing(func, args, kwargs, result)
        dense = [arg.dense() if isinstance(arg, Weight8) else arg for arg in args]
        return func(*dense, **kwargs)


class Scaled(Weight8):
    """Like Weight8, but the scale is a Python number."""

    @staticmethod
    def __new__(cls, data8: torch.Tensor, factor: Any) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(cls, data8.shape, dtype=torch.float32)

    def dense(self) -> torch.Tensor:
        return self.data8 * float(self.factor)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["data8"], self.factor

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], context: Any, *rest: Any
    ) -> Scaled:
        return cls(inner["data8"], context)


def quantized(seed: int) -> nn.Module:
    module = nn.ModuleDict(
        {name: seeded(nn.Linear, seed + at, 4, 4) for at, name in enumerate("abc")}
    )
    for layer in module.values():
        layer.weight = nn.Parameter(Weight8.of(layer.get_parameter("weight")), requires_grad=False)
    return module


@pytest.mark.parametrize("in_place", [True, False])
def test_subclasses_are_loaded_by_their_module_load(in_place: bool) -> None:
    live, other, oracle = quantized(0), quantized(5), quantized(0)
    live["c"].weight = live["a"].weight
    other["c"].weight = other["a"].weight
    weight = live["a"].weight
    weight.tag = "kept"
    state = other.state_dict()
    # a plain tensor, for the subclass to quantize
    state["b.weight"] = other["b"].weight.dense() * 3
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        oracle.load_state_dict(state)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    swap_weights(live, state, in_place=in_place)
    for name in "ab":
        actual, expected = live[name].weight, oracle[name].weight
        assert type(actual) is Weight8
        assert isinstance(actual, nn.Parameter)
        assert not actual.requires_grad
        assert torch.equal(actual.data8, expected.data8)
        assert torch.equal(actual.factor, expected.factor)
    assert live["c"].weight is live["a"].weight
    assert (live["a"].weight is weight) == in_place
    assert live["a"].weight.tag == "kept"


def test_a_subclass_keeps_its_gradient_in_place() -> None:
    live = nn.Linear(2, 2, bias=False)
    live.weight = nn.Parameter(TwoTensor(torch.zeros(2, 2), torch.zeros(2, 2)))
    live.weight.grad = grad = TwoTensor(torch.ones(2, 2), torch.ones(2, 2))
    weight = live.weight
    swap_weights(live, {"weight": TwoTensor(torch.ones(2, 2), torch.eye(2))})
    assert live.weight is weight
    assert live.weight.grad is grad
    assert live.weight.requires_grad
    assert torch.equal(vars(live.weight)["b"].detach(), torch.eye(2))


def test_a_subclass_is_loaded_into_a_dense_weight_by_its_module_load() -> None:
    live, other = nn.Linear(4, 4, False), seeded(nn.Linear, 1, 4, 4, False)
    value = Weight8.of(other.weight)
    swap_weights(live, {"weight": value})
    assert isinstance(live.weight.data, Weight8)
    assert torch.equal(live.weight.data.data8, value.data8)


def test_the_inner_tensors_and_the_context_of_a_subclass_are_its_value() -> None:
    data = torch.ones(2, 2, dtype=torch.int8)
    live = quantized(0)
    live["c"].weight = live["a"].weight
    with pytest.raises(Refused) as refused:
        swap_weights(live, quantized(5).state_dict())
    assert problems(refused) == {"tied to a.weight, but its new value differs @ c.weight"}
    state = {"a.weight": Scaled(data, 0.5), "b.weight": Scaled(data, 0.25)}
    tied = nn.ModuleDict({"a": nn.Linear(2, 2, False), "b": nn.Linear(2, 2, False)})
    tied["b"].weight = tied["a"].weight = nn.Parameter(Scaled(data, 1.0), requires_grad=False)
    with pytest.raises(Refused) as refused:
        swap_weights(tied, state)
    assert problems(refused) == {"tied to a.weight, but its new value differs @ b.weight"}
    assert ckpttool.diff(state, dict(state), values=True).identical
    assert not ckpttool.diff(state, {**state, "b.weight": state["a.weight"]}, values=True).identical
    swap_weights(tied, {**state, "b.weight": Scaled(data.clone(), 0.5)})
    assert vars(tied["b"].weight)["factor"] == 0.5


def test_a_failing_module_load_changes_nothing() -> None:
    live, state = quantized(0), quantized(5).state_dict()
    state["c.weight"] = torch.full((4, 4), float("nan"))
    before = {
        name: (id(t), t.data8) if isinstance(t, Weight8) else (id(t), t.clone())
        for name, t in live.state_dict(keep_vars=True).items()
    }
    with pytest.raises(Refused) as refused:
        swap_weights(live, state)
    assert problems(refused) == {"cannot quantize NaN @ c.weight"}
    for name, tensor in live.state_dict(keep_vars=True).items():
        identity, value = before[name]
        assert id(tensor) == identity
        assert tensor.data8 is value if isinstance(tensor, Weight8) else torch.equal(tensor, value)


class CustomLoad(Weight8):
    """A subclass whose `module_load` the test defines."""

    load_function: Any = None
    locked: frozenset[int] = frozenset()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.module_load:
            return cls.load_function(*args)
        if func is torch.Tensor.requires_grad_ and id(args[0]) in cls.locked:
            raise ValueError("not now")
        return super().__torch_function__(func, types, args, kwargs)


def with_custom_load(value: float) -> nn.Module:
    layer = nn.Linear(2, 2, bias=False)
    layer.weight = nn.Parameter(CustomLoad.of(torch.full((2, 2), value)), requires_grad=False)
    return layer


RESULTS: list[tuple[Any, str | None]] = [
    (lambda target, other: other, None),
    (lambda target, other: other.clone(), None),
    (lambda target, other: nn.Parameter(other.clone(), requires_grad=True), None),
    (
        lambda target, other: CustomLoad(other.data8.clone(), other.factor.double()),
        "its module_load gives the dtype torch.float64",
    ),
    (
        lambda target, other: CustomLoad(other.data8[:1].clone(), other.factor),
        "its module_load gives the shape torch.Size([1, 2])",
    ),
]


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(("module_load", "refused"), RESULTS)
def test_the_result_of_module_load_belongs_to_the_module(
    monkeypatch: pytest.MonkeyPatch, module_load: Any, refused: str | None, in_place: bool
) -> None:
    """It is copied even if it is a tensor of the state_dict, so that later training does not change
    the state_dict.
    """
    monkeypatch.setattr(CustomLoad, "load_function", staticmethod(module_load))
    live, new = with_custom_load(1.0), CustomLoad.of(torch.full((2, 2), 3.0))
    if refused is not None:
        with pytest.raises(Refused) as caught:
            swap_weights(live, {"weight": new}, in_place=in_place)
        assert problems(caught) == {f"{refused} @ weight"}
        return
    swap_weights(live, {"weight": new}, in_place=in_place)
    weight: Any = live.weight
    assert torch.equal(weight.factor, new.factor)
    assert weight.factor.data_ptr() != new.factor.data_ptr()
    assert (isinstance(weight, nn.Parameter), weight.requires_grad) == (True, False)


def test_a_swap_is_undone_if_a_class_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    live = nn.ModuleList([with_custom_load(1.0), with_custom_load(2.0)])
    monkeypatch.setattr(
        CustomLoad, "load_function", staticmethod(lambda target, other: other.clone())
    )
    monkeypatch.setattr(CustomLoad, "locked", frozenset([id(live[1].weight)]))
    before = [(id(layer.weight), layer.weight.factor) for layer in live]
    with pytest.raises(ValueError, match="not now"):
        swap_weights(
            live, {f"{at}.weight": CustomLoad.of(torch.full((2, 2), 5.0)) for at in (0, 1)}
        )
    assert [(id(layer.weight), layer.weight.factor) for layer in live] == before


class Locked(list[torch.Tensor]):
    """A list of weights that cannot be replaced."""

    def __setitem__(self, at: Any, value: Any) -> None:
        raise TypeError("locked")


def test_a_swap_is_undone_if_a_tensor_cannot_be_replaced() -> None:
    live = seeded(nn.Linear, 0, 2, 2)
    live.weights = Locked([live.bias])
    before = snapshot(live)
    with pytest.raises(TypeError, match="locked"):
        swap_weights(live, seeded(nn.Linear, 1, 2, 2).state_dict(), in_place=False)
    assert unchanged(before, live)


def test_a_swap_is_undone_if_torch_refuses_to_swap_a_tensor() -> None:
    """Autograd uses the last of three tensors, which torch only notices when it swaps this
    tensor.
    """
    live, other = quantized(0), quantized(5)
    live["c"].weight = nn.Parameter(live["c"].weight.detach(), requires_grad=True)
    live["a"].bias.grad = torch.ones(4)
    view = live["c"].weight.expand_as(live["c"].weight)  # the graph refers to the parameter
    before = {
        name: (id(t), getattr(t, "data8", None), t.detach().clone())
        for name, t in live.named_parameters()
    }
    assert view.grad_fn is not None
    with pytest.raises(Refused) as refused:
        swap_weights(live, other.state_dict())
    assert "a tensor cannot be swapped" in refused.value.message
    for name, tensor in live.named_parameters():
        identity, data8, value = before[name]
        assert id(tensor) == identity
        assert getattr(tensor, "data8", None) is data8
        assert isinstance(tensor, Weight8) or torch.equal(tensor, value)
    assert live["a"].bias.grad is not None


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Install Python's SIGINT handler: a shell ignores SIGINT for processes that a script runs in
    the background.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_waits_until_all_weights_are_written() -> None:
    class Interrupted(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten._foreach_copy_.default:
                signal.raise_signal(signal.SIGINT)
            return result

    live, other = quantized(0), quantized(5)
    with pytest.raises(KeyboardInterrupt), Interrupted():
        swap_weights(live, other.state_dict())
    for name in "abc":
        assert torch.equal(live[name].bias, other[name].bias)
        assert torch.equal(live[name].weight.data8, other[name].weight.data8)


def test_a_weak_reference_to_a_subclass_weight_is_refused() -> None:
    live = quantized(0)
    ref = weakref.ref(live["b"].weight)
    with pytest.raises(Refused) as refused:
        swap_weights(live, quantized(5).state_dict())
    assert problems(refused) == {"a weak reference to it would see the swap @ b.weight"}
    assert ref() is live["b"].weight


@pytest.mark.parametrize("in_place", [True, False])
def test_quantized_tensors_get_the_new_data_and_scale(in_place: bool) -> None:
    def with_quantized_buffer(scale: float) -> nn.Module:
        module = nn.Module()
        module.register_buffer(
            "weight", torch.quantize_per_tensor(torch.linspace(-1, 1, 6), scale, 0, torch.qint8)
        )
        return module

    live, other = with_quantized_buffer(0.1), with_quantized_buffer(0.02)
    old = live.weight
    swap_weights(live, other.state_dict(), in_place=in_place)
    assert live.weight.q_scale() == 0.02
    assert torch.equal(live.weight.int_repr(), other.weight.int_repr())
    assert (live.weight is old) == in_place


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(
    "made",
    [
        torch.Tensor.to_sparse,
        torch.Tensor.to_sparse_csr,
        lambda dense: torch.quantize_per_tensor(dense, 0.5, 0, torch.qint8),
        lambda dense: torch.quantize_per_channel(
            dense, torch.tensor([0.5, 1]), torch.zeros(2).long(), 0, torch.qint8
        ),
    ],
)
def test_tied_tensors_that_are_not_dense_stay_tied(made: Any, in_place: bool) -> None:
    live, new = nn.Module(), made(torch.tensor([[1.0, 0], [0, 3]]))
    old = made(torch.eye(2))
    live.register_buffer("a", old)
    live.register_buffer("b", old)
    with pytest.raises(Refused) as refused:
        swap_weights(live, {"a": new, "b": made(torch.eye(2) * 2)}, in_place=in_place)
    assert problems(refused) == {"tied to a, but its new value differs @ b"}
    swap_weights(live, {"a": new, "b": new}, in_place=in_place)
    assert live.a is live.b
    assert torch.equal(
        live.a.to_dense() if not live.a.is_quantized else live.a.dequantize(),
        torch.tensor([[1.0, 0], [0, 3]]),
    )


# Compiled modules, programs, unflattened programs, wrappers


def test_a_compiled_module_uses_the_new_weights_without_recompilation() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    live, other = seeded(nn.Linear, 0, 4, 2), seeded(nn.Linear, 1, 4, 2)
    compiled: Any = torch.compile(live, backend=backend)
    x = torch.ones(1, 4)
    compiled(x)
    wrapped: Any = torch.compile(other)
    for state in (other.state_dict(), wrapped.state_dict()):
        with torch.no_grad():
            live.weight.zero_()
        done = swap_weights(compiled, state)
        assert sorted(done.sources) == ["bias", "weight"]
        assert torch.equal(compiled(x), other(x))
    assert len(graphs) == 1


def test_wrapper_segments_are_ignored() -> None:
    live, other = nn.DataParallel(seeded(nn.Linear, 0, 4, 2)), seeded(nn.Linear, 1, 4, 2)
    averaged = torch.optim.swa_utils.AveragedModel(seeded(nn.Linear, 2, 4, 2))
    swap_weights(live, other.state_dict())
    assert torch.equal(live.module.weight, other.weight)
    swap_weights(averaged, {**live.state_dict(), "n_averaged": torch.tensor(3)})
    assert torch.equal(averaged.get_parameter("module.weight"), other.weight)


@pytest.mark.parametrize("in_place", [None, True])
def test_a_program_gives_new_outputs_and_keeps_its_constants(in_place: bool | None) -> None:
    class Lifted(Tied):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + torch.tensor([2.0]) + self.steps[0]

    live, other, x = seeded(Lifted, 0), seeded(Lifted, 1), torch.tensor([0, 5, 3])
    program, old = torch.export.export(live, (x,)), live(x)
    constants = dict(program.constants)
    done = swap_weights(program, other.state_dict(), in_place=in_place)
    assert torch.equal(program.module()(x), other(x))
    assert torch.equal(torch.export.unflatten(program)(x), other(x))
    assert program.constants.keys() == constants.keys() == set(done.constants)
    assert all(program.constants[key] is value for key, value in constants.items())
    assert program.state_dict["head.weight"] is program.state_dict["embed.weight"]
    # in place, both share memory
    assert torch.equal(live(x), old if in_place is None else other(x))


def test_a_refused_program_is_unchanged() -> None:
    program = torch.export.export(seeded(nn.Linear, 0, 4, 2), (torch.ones(1, 4),))
    before = dict(program.state_dict)
    with pytest.raises(Refused):
        swap_weights(program, {"weight": torch.ones(2, 4), "bias": torch.ones(3)})
    assert all(program.state_dict[key] is value for key, value in before.items())


@pytest.mark.parametrize("kind", [Nested, Shared])
@pytest.mark.parametrize("in_place", [True, False])
def test_an_unflattened_program_accepts_weights_of_its_model_or_of_a_program(
    kind: Any, in_place: bool
) -> None:
    other = made(kind)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    for state in (other.state_dict(), unflattened(other).state_dict()):
        live = program(kind)
        swap_weights(live, state, in_place=in_place)
        assert torch.equal(live(example()), other(example()))
        plain = made(kind)
        swap_weights(plain, state, in_place=in_place)
        assert torch.equal(plain(example()), other(example()))


def test_variants_with_different_values_are_refused() -> None:
    state = program(Nested).state_dict()
    state["block@1.gate.shift"] = state["block@1.gate.shift"] + 1
    for live in (made(Nested), program(Nested)):
        with pytest.raises(Refused) as refused:
            swap_weights(live, state)
        assert {problem.key for problem in refused.value.problems} == {"block@1.gate.shift"}


# Concurrency


def test_concurrent_readers_see_either_old_or_new_tensors() -> None:
    live = nn.Module()
    live.weight = nn.Parameter(torch.zeros(1 << 16))
    stop, mixed, values = threading.Event(), [], set()

    def read() -> None:
        while not stop.is_set():
            low, high = (float(x) for x in torch.aminmax(live.weight.detach()))
            values.add(low)
            if low != high:
                mixed.append((low, high))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    readers = [threading.Thread(target=read) for _ in range(2)]
    try:
        for reader in readers:
            reader.start()
        for value in range(1, 201):
            swap_weights(live, {"weight": torch.full((1 << 16,), float(value))}, in_place=False)
    finally:
        stop.set()
        for reader in readers:
            reader.join()
        sys.setswitchinterval(interval)
    assert mixed == []
    assert float(live.weight.detach()[0]) == 200
    assert values <= set(map(float, range(201)))


# AOTInductor


class TwoLayers(nn.Module):
    """Weights large enough to be constants of a package (tensors of 8 or fewer elements are
    compiled into its code), some with strides of their own, on which the code relies.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 16)
        self.register_buffer("mask", torch.ones(16), persistent=False)
        self.outer = nn.Linear(16, 16, bias=False)
        self.turned = nn.Parameter(torch.randn(16, 12).t())
        self.register_buffer("table", torch.randn(24)[::2])
        self.conv = nn.Conv2d(3, 4, 2, bias=False).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.turned @ self.outer(self.inner(x) * self.mask).sum(0) + self.table
        return self.conv(x.reshape(1, 3, 2, 2))


@pytest.fixture(scope="module")
def package(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Any, nn.Module, torch.export.ExportedProgram]:
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("AOTInductor needs a C++ compiler, and this machine has none")
    needs_torch("2.7", "weights swapped in a package")
    model = seeded(TwoLayers, 0)
    program = torch.export.export(model, (torch.ones(2, 4),))
    path = tmp_path_factory.mktemp("package") / "small.pt2"
    torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    return torch._inductor.aoti_load_package(str(path)), model, program


def test_a_loaded_package_accepts_only_valid_weights(package: Any, tmp_path: Path) -> None:
    compiled, model, program = package
    x = torch.linspace(-1, 1, 8).reshape(2, 4)
    good, start = seeded(TwoLayers, 1), compiled(x)
    assert torch.allclose(start, model(x))
    for broken, expected in (
        (
            {"inner.bias": torch.ones(17)},
            "shape [17], the program has [16] (from inner.bias) @ inner.bias",
        ),
        (
            {"inner.bias": torch.ones(16).int()},
            "dtype int32, the program has float32 (from inner.bias) @ inner.bias",
        ),
        ({"spare": torch.ones(1)}, "unexpected: not a weight of the program @ spare"),
    ):
        with pytest.raises(Refused) as refused:
            swap_weights(compiled, {**good.state_dict(), **broken}, model=model)
        assert problems(refused) == {expected}
        assert ("compiled into a package's code" in refused.value.hint) is ("spare" in broken)
        assert torch.equal(compiled(x), start)
    with pytest.raises(Refused) as other:
        swap_weights(compiled, nn.Linear(2, 2).state_dict(), model=nn.Linear(2, 2))
    assert other.value.message == "no constant of the package is a weight of the model"
    assert "no such weight in the model @ inner.bias" in problems(other)
    with pytest.raises(Refused, match="no constant of the package"):
        swap_weights(compiled, good.state_dict(), model=lambda: nn.Linear(2, 2))
    with pytest.raises(CkptError, match="does not say what shapes, dtypes and strides"):
        swap_weights(compiled, good.state_dict(), model=ckpttool.trace(TwoLayers))
    with pytest.raises(CkptError) as unknown:
        swap_weights(compiled, good.state_dict())
    assert "does not say what shapes, dtypes and strides" in unknown.value.message
    for at, kind in enumerate((model, program, TwoLayers, f"{__file__}:TwoLayers")):
        new = seeded(TwoLayers, at + 2)
        state = new.state_dict()
        # torch would ignore its strides
        state["outer.weight"] = state["outer.weight"].t().contiguous().t()
        done = swap_weights(compiled, state, model=kind)
        assert torch.allclose(compiled(x), new(x))
        assert done.constants == ("mask",)
        for tensor in state.values():
            tensor.zero_()
        assert torch.allclose(compiled(x), seeded(TwoLayers, at + 2)(x))
