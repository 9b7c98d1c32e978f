"""The recorder's expressions for tensors that random programs write in place, through views of each
other.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from ckpttool.core.expression import Op, Ref, is_opaque, operators, refs
from ckpttool.evaluate.torch_eval import evaluate, same_bits
from ckpttool.tracing import memory
from ckpttool.tracing.memory import inside, token
from ckpttool.tracing.recorder import Recorder, ValuesAsked

SEEDS = int(os.environ.get("CKPTTOOL_SEEDS", "100"))
Tensors = list[torch.Tensor]


def random_view(rng: random.Random, x: torch.Tensor) -> torch.Tensor:
    if not x.dim():
        return x.unsqueeze(0)
    dim = rng.randrange(x.dim())
    start, end = sorted(rng.choices(range(x.shape[dim] + 1), k=2))
    operations: list[Callable[[], torch.Tensor]] = [
        lambda: x.narrow(dim, start, end - start),
        lambda: x.narrow(dim, start, end - start),
        lambda: x[start:end],
        lambda: x.select(dim, start % x.shape[dim]),
        lambda: x.transpose(0, dim),
        lambda: x.unsqueeze(dim),
        lambda: x.squeeze(),
        lambda: x.flatten(),
        lambda: x.reshape(-1, 2),
        lambda: x[::2] if dim == 0 else x[:, 1::2],
        lambda: x.chunk(2, dim)[-1],
        lambda: x.diagonal(),
        lambda: x.as_strided((2, 2), (1, 3), x.storage_offset()),
        lambda: x.as_strided((2, 2), (1, 1)),
        lambda: x.detach().t_(),
        lambda: x.detach().squeeze_(),
        lambda: x.detach().as_strided_((2, 2), (1, 3)),
        lambda: x.detach().as_strided_((2, 2), (2, 1), 5),
        lambda: torch.ops.aten.set_(x.detach(), x[:1]),
        lambda: x.detach().resize_(1, 2),
        lambda: x.conj(),
        lambda: x.imag,
        lambda: torch._neg_view(x),
        lambda: x.split([1, x.shape[dim] - 1], dim)[1],
        lambda: x.view({torch.float32: torch.int32, torch.float64: torch.int64}[x.dtype]),
    ]
    try:
        return rng.choice(operations)()
    # torch cannot create this view
    except (RuntimeError, TypeError, IndexError, KeyError, ZeroDivisionError):
        return x


def random_result(rng: random.Random, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    operations: list[Callable[[], torch.Tensor]] = [
        lambda: x + 1,
        lambda: x.neg(),
        lambda: x.clone(),
        lambda: x.to(torch.complex128 if x.is_complex() else torch.float64),
        lambda: x.resolve_conj(),
        lambda: torch.stack([x, x]),
        lambda: x * y,
        lambda: torch.full_like(x, 3.0, device="cpu"),
        lambda: x.new_zeros(x.shape),
        lambda: x.expand(2, *x.shape),
        lambda: torch.cat([x, y]),
    ]
    try:
        return rng.choice(operations)()
    except (RuntimeError, IndexError):
        return x.clone()


def random_write(rng: random.Random, x: torch.Tensor, y: torch.Tensor) -> None:
    number = float(rng.randint(-3, 3))
    operations: list[Callable[[], object]] = [
        lambda: x.copy_(y),
        lambda: x.copy_(y),
        lambda: torch.ops.aten.copy_(x, number),
        lambda: x.add_(y),
        lambda: x.mul_(number),
        lambda: x.fill_(number),
        lambda: x.zero_(),
        lambda: x.neg_(),
        lambda: torch.add(x, number, out=x),
        lambda: torch.mul(x, y, out=x),
        lambda: torch.div(x, 2.0, rounding_mode="floor", out=x),
        lambda: x.__setitem__(slice(0, 1), y),
        lambda: x.clamp_(-number, 5),
        lambda: torch._foreach_mul_([x, y], number),
        lambda: torch._foreach_add_([x, y], [y, x]),
    ]
    try:
        rng.choice(operations)()
    except (RuntimeError, IndexError):  # another shape, or overlapping elements
        x.fill_(number)


@pytest.mark.filterwarnings(
    "ignore:Casting complex values to real",
    "ignore:An output with one or more elements was resized",
)
@pytest.mark.parametrize("small", [1 << 22, 0])
@pytest.mark.parametrize("first", range(0, SEEDS, 100))
def test_every_tensor_has_the_value_of_its_expression(
    first: int, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This also holds if memory is too large to look at every element."""
    monkeypatch.setattr(memory, "_SMALL", small)
    known = total = 0
    for seed in range(first, first + 100):
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        whole = torch.randint(-9, 9, (4, 6), generator=generator).float()
        if rng.random() < 0.2:
            whole = (whole * (1 + 2j)).conj()
        names = {"whole": whole, "other": torch.randint(-9, 9, (6,), generator=generator).float()}
        for number in range(rng.randrange(3)):  # more names in the same storage
            names[f"part{number}"] = rng.choice([whole[1:3], whole.t()[2:4], whole[2:], whole[0]])
        before = {name: tensor.clone() for name, tensor in names.items()}
        recorder = Recorder()
        for name, tensor in names.items():
            recorder.name(tensor, Ref(name))
        pool: Tensors = list(names.values())
        with recorder:
            for _ in range(rng.randint(3, 10)):
                x, y = rng.choice([*pool, *pool[-2:]]), rng.choice(pool)
                kind = rng.randrange(3)
                if kind == 0:
                    pool.append(random_view(rng, x))
                elif kind == 1:
                    pool.append(random_result(rng, x, y))
                elif all(size == 1 or step for size, step in zip(x.shape, x.stride())):
                    random_write(rng, random_view(rng, x) if rng.random() < 0.5 else x, y)
        for tensor in pool:
            value = recorder.value(tensor)
            total += 1
            # plans do not allow it
            if not is_opaque(value) and "aten._neg_view.default" not in operators(value):
                known += 1
                result = evaluate(value, before.__getitem__)
                assert (result.dtype, result.shape) == (tensor.dtype, tensor.shape), (seed, value)
                # a lazily conjugated or negated zero has either sign
                any_sign = tensor.is_complex()
                assert torch.equal(result, tensor) if any_sign else same_bits(result, tensor), (
                    seed,
                    value,
                )
    assert known > (0.7 if small else 0.4) * total, (known, total)


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "through elements of another size": lambda whole: whole.view(torch.float16)[2:, 3:].neg_(),
    "as elements of another size": lambda whole: whole[3:].view(torch.int16).zero_(),
    "part of a written part": lambda whole: (
        whole[1:3].view(12).copy_(torch.ones(12)),
        whole[1, 0].zero_(),
    ),
    "between written columns": lambda whole: (whole[1].fill_(1), whole[1, 0].zero_()),
    "strides in place": lambda whole: whole[1:3].detach().as_strided_((2, 2), (1, 3), 7),
    "strides of a part in place": lambda whole: whole.t()[1:].detach().as_strided_((2, 2), (1, 3)),
    "overlapping elements": lambda whole: whole.as_strided((2, 2), (1, 1)).neg_(),
    "input and output overlap": lambda whole: torch.mul(
        whole.as_strided((2, 2), (1, 3)),
        whole.as_strided((2,), (2,)),
        out=whole.as_strided((2, 2), (1, 3)),
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_memory_with_several_views_has_the_right_value(
    change: Callable[[torch.Tensor], object],
) -> None:
    whole = torch.arange(2.0, 26).reshape(4, 6)
    names = {"whole": whole, "columns": whole.t()[2:4], "middle": whole[1:3], "end": whole[2:]}
    before, recorder = {name: tensor.clone() for name, tensor in names.items()}, Recorder()
    for name, tensor in names.items():
        recorder.name(tensor, Ref(name))
    with recorder:
        out = change(whole)
        tensors = [
            *names.values(),
            whole[1:3].view(12),
            whole[1],
            *([out] if isinstance(out, torch.Tensor) else []),
        ]
    for tensor in tensors:
        value = recorder.value(tensor)
        assert is_opaque(value) or same_bits(evaluate(value, before.__getitem__), tensor), value


def split_range(rng: random.Random, size: int) -> list[tuple[int, int]]:
    edges = sorted({0, size, *rng.choices(range(1, size), k=rng.randint(1, 2))})
    return list(pairwise(edges))


def test_a_tensor_filled_in_pieces_is_expressed_by_the_pieces() -> None:
    """Fill empty memory with rows, columns or blocks in any order, and write some of them again."""
    for seed in range(100):
        rng = random.Random(seed)
        whole = torch.empty(4, 6).t() if rng.random() < 0.3 else torch.empty(4, 6)
        rows, columns = (
            [(0, whole.shape[dim])] if rng.random() < 0.4 else split_range(rng, whole.shape[dim])
            for dim in (0, 1)
        )
        places = [(slice(*row), slice(*column)) for row in rows for column in columns]
        rng.shuffle(places)
        again = rng.sample(places, rng.choice([0, 0, 1]))
        missing = places.pop() if rng.random() < 0.2 and not again else None
        values = {
            f"v{at}": torch.randn(whole[place].shape) for at, place in enumerate([*places, *again])
        }
        recorder = Recorder()
        for name, value in values.items():
            recorder.name(value, Ref(name))
        with recorder:
            result = (
                whole.new_empty(whole.shape) if whole.is_contiguous() else torch.empty(4, 6).t()
            )
            for place, value in zip([*places, *again], values.values()):
                if rng.random() < 0.5:
                    result[place] = value
                else:
                    result[place].copy_(value)
        expression = recorder.value(result)
        assert is_opaque(expression) == (missing is not None), seed
        if missing is None:
            assert same_bits(evaluate(expression, values.__getitem__), result), seed
            one_dimension = (
                whole.is_contiguous() and len(places) > 1 and 1 in (len(rows), len(columns))
            )
            assert not one_dimension or (
                isinstance(expression, Op) and expression.op == "aten.cat.default"
            ), (
                seed,
                expression,
            )


def test_new_memory_is_followed_through_views_made_after_a_write() -> None:
    """The memory is real, and the values that are written into it are not."""

    def filled(x: torch.Tensor) -> torch.Tensor:
        result = torch.zeros(6, 4)
        result[:2] = x[4:]
        result[2:4] = x[:2]
        result.t()[0].add_(1)
        return result

    values = torch.arange(24.0).view(6, 4)
    without_data = values.to("meta")
    recorder = Recorder()
    recorder.name(without_data, Ref("x"))
    with recorder:
        result = filled(without_data)
    evaluated = evaluate(recorder.value(result), {"x": values}.__getitem__)
    assert same_bits(evaluated, filled(values))


def test_memory_with_a_meta_value_cannot_be_read() -> None:
    """The written value is known, but its bytes are not until a real value is written."""
    weight = torch.empty(2, 3, device="meta")
    recorder = Recorder()
    recorder.name(weight, Ref("weight"))
    with recorder:
        result, whole = torch.zeros(2, 3), torch.zeros(4, 3)
        assert result.sum().item() == 0
        result.copy_(weight)
        whole[1:3].add_(weight)
        for tensor in (result, whole, whole[0]):
            with pytest.raises((ValuesAsked, RuntimeError)):
                tensor.sum().item()
        assert recorder.value(result) == Ref("weight")
        assert torch.zeros(2).sum().item() == 0
    assert recorder.blind
    values = {"weight": torch.randn(2, 3)}
    assert torch.equal(evaluate(recorder.value(whole), values.__getitem__)[1:3], values["weight"])


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_writing_overlapping_elements_raises(device: str) -> None:
    row = torch.zeros(3, device=device)
    with Recorder(), pytest.raises(RuntimeError, match="single memory location"):
        row.expand(2, 3).add_(1)
    with Recorder():
        torch.zeros(1, 0, device=device).expand(2, 0).add_(1)  # has no elements
        if device == "cpu":
            row.expand(2, 3).zero_()  # torch allows it


@pytest.mark.parametrize(
    "copy",
    [
        lambda w: w.to("cpu"),
        lambda w: torch.empty_like(w, device="cpu").copy_(w),
        lambda w: torch.empty_like(w, device="cpu", pin_memory=True).copy_(w),
        lambda w: w.new_zeros(2, 3, device="cpu").copy_(w),
        lambda w: torch.stack([w, w]).to("cpu")[1],
    ],
)
def test_meta_tensors_stay_on_meta(copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A hook that copies to the CPU is followed although a meta tensor has nothing to copy."""
    weight, recorder = torch.empty(2, 3, device="meta"), Recorder()
    recorder.name(weight, Ref("weight"))
    with recorder:
        copied = copy(weight)
    values = {"weight": torch.randn(2, 3)}
    assert torch.equal(evaluate(recorder.value(copied), values.__getitem__), values["weight"])
    assert not recorder.blind


@pytest.mark.parametrize("kind", [torch.Tensor.clone, torch.Tensor.to_sparse])
def test_the_author_of_a_tensor_is_known(kind: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Dense tensors are identified by their memory, others by their parts."""
    weight, recorder = torch.eye(3), Recorder()
    recorder.name(weight, Ref("weight"))
    assert (recorder.author_of(token(weight)), recorder.author_of(token(torch.ones(2)))) == (
        None,
        None,
    )
    assert recorder.author_of(token(torch.eye(2).to_sparse())) is None
    with recorder:
        recorder.author = "maker"
        result = kind(weight)
        assert recorder.author_of(token(result)) == "maker"
        recorder.author, before = "writer", recorder.clock
        assert recorder.written_since(before) == set()
        result.mul_(2)
    mark = token(result)
    assert recorder.written_since(before) == {mark[0] if isinstance(mark[0], int) else mark}
    assert recorder.written_since(recorder.clock) == set()
    assert recorder.author_of(mark) == "writer"
    assert recorder.author_of(token(weight)) is None
    assert set(refs(recorder.value(result))) == {"weight"}


def test_a_tensor_made_outside_torch_is_a_literal() -> None:
    weight, outside, recorder = (
        torch.randn(2),
        torch.from_numpy(np.array([3.0, 4.0], np.float32)),
        Recorder(),
    )
    recorder.name(weight, Ref("weight"))
    with recorder:
        outside[:1].add_(weight[1])
    assert recorder.outside
    assert torch.equal(evaluate(recorder.value(outside), {"weight": weight}.__getitem__), outside)


def test_the_parts_of_a_wrapper_subclass_are_known() -> None:
    whole, recorder = TwoTensor(torch.randn(2), torch.randn(2)), Recorder()
    recorder.name(whole, Ref("whole"))
    with recorder:
        part = whole.a * 2
    assert set(refs(recorder.value(part))) == {"whole"}
    assert is_opaque(recorder.value(part))
    assert not recorder.outside


# One operator at a time


def numbers(*values: complex) -> torch.Tensor:
    """Return a tensor that was not created by torch."""
    return torch.from_numpy(np.array(values))


OPERATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "full": lambda w: torch.full((2, 3), 3),
    "full with a complex number": lambda w: torch.full((2,), 1j),
    "full by the operator itself": lambda w: torch.ops.aten.full.default([2], fill_value=3),
    "zeros": lambda w: torch.zeros(w.shape),
    "zeros_like": torch.zeros_like,
    "new_zeros": lambda w: w.new_zeros(4, dtype=torch.int8),
    "zero_": lambda w: w.clone().zero_(),
    "ones": lambda w: torch.ones(3, dtype=torch.float64),
    "ones_like": lambda w: torch.ones_like(w, dtype=torch.int64),
    "new_ones": lambda w: w.new_ones(2, 2),
    "full with a negative integer": lambda w: torch.full((2,), -7),
    "full_like": lambda w: torch.full_like(w, 2.5),
    "new_full with a negative zero": lambda w: w.new_full((3,), fill_value=-0.0),
    "fill_": lambda w: w.clone().fill_(3),
    "fill_ with a constant tensor": lambda w: w.clone().fill_(torch.tensor(4)),
    "eye": lambda w: torch.eye(3),
    "arange": lambda w: torch.arange(2, 9, 2) + w.numel(),
    "fill with a tensor": lambda w: torch.zeros(3).fill_(w[0, 0]),
    "fill with a tensor of another dtype": lambda w: torch.zeros(3, dtype=torch.int32).fill_(
        w[0, 0]
    ),
    "times a complex number": lambda w: w * (1 + 2j),
    "an argument that is None": lambda w: w.sum(0, dtype=None),
    "a dtype as argument": lambda w: w.sum(0, dtype=torch.float64),
    "a stride": lambda w: w[:, 1::2],
    "a list of tensors": lambda w: torch.cat([w, w]),
    "one of several outputs": lambda w: w.max(0).values,
    "constants": lambda w: w + numbers(1.0, 2.0, 3.0),
    "complex constants": lambda w: w * numbers(1j, 2, 3),
    "equal constants": lambda w: w + numbers(2.0, 2.0, 2.0),
    "no elements": lambda w: numbers(),
    "as many constants as allowed": lambda w: w[0, 0] + numbers(*range(4096)),
    "two out arguments": lambda w: torch.sort(
        w, out=(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.long))
    )[0],
}


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
def test_an_operator_becomes_an_expression(
    operator: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    weight, recorder = torch.arange(6.0).reshape(2, 3), Recorder()
    before = weight.clone()
    recorder.name(weight, Ref("weight"))
    with recorder:
        result = operator(weight)
    expression = recorder.value(result)
    assert not is_opaque(expression), expression
    value = evaluate(expression, {"weight": before}.__getitem__)
    assert (value.dtype, value.shape) == (result.dtype, result.shape)
    assert same_bits(value, result)


def test_outputs_that_are_none_are_allowed() -> None:
    weight, recorder = torch.ones(1, 2, 3), Recorder()
    recorder.name(weight, Ref("weight"))
    output_mask, rest = [True, False, False], (None, [1], [0], [1], False, [0], 1)
    with recorder:
        outputs = torch.ops.aten.convolution_backward(
            torch.ones(1, 1, 1), weight, weight, *rest, output_mask
        )
    assert outputs[1:] == (None, None)
    assert set(refs(recorder.value(outputs[0]))) == {"weight"}


class CustomTensor(torch.Tensor):
    pass


CUSTOM = numbers(1.0, 2.0).as_subclass(CustomTensor)
QUANTIZED = torch.quantize_per_tensor(torch.arange(3.0), 0.5, 0, torch.qint8)
SPARSE = torch.tensor(np.diag(np.arange(5000))).to_sparse()
OPAQUE: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "uninitialised": (torch.empty_like, False),
    "random by shape": (torch.rand_like, False),
    "random by values": (lambda w: torch.bernoulli(w / 9), True),
    "more constants than allowed": (lambda w: numbers(*range(4097)), False),
    "constants of a class": (lambda w: CUSTOM, False),
    "quantized constants": (lambda w: QUANTIZED, False),
    "sparse constants": (lambda w: SPARSE, False),
}


@pytest.mark.parametrize(("operator", "by_weight"), OPAQUE.values(), ids=OPAQUE)
def test_opaque_expressions_list_their_inputs(
    operator: Callable[[torch.Tensor], torch.Tensor], by_weight: bool
) -> None:
    weight, recorder = torch.arange(6.0).reshape(2, 3), Recorder()
    recorder.name(weight, Ref("weight"))
    with recorder:
        result = operator(weight)
    expression = recorder.value(result)
    assert is_opaque(expression)
    assert set(refs(expression)) == ({"weight"} if by_weight else set())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_shape_queries_do_not_read_values(device: str) -> None:
    weight, recorder = torch.zeros(2, 3, device=device), Recorder()
    recorder.name(weight, Ref("weight"))
    with recorder:
        assert torch.ops.aten.is_same_size(weight, weight)
        assert not weight.is_pinned()
    assert (recorder.reads, recorder.blind) == ([], False)
    with recorder, contextlib.suppress(ValuesAsked, RuntimeError):
        torch.equal(weight, weight)
    assert (bool(recorder.reads), recorder.blind) == (device == "cpu", device == "meta")


@pytest.mark.parametrize(
    ("operator", "doubtful"),
    [
        (lambda w: w.view(6), False),
        (lambda w: w.clone(), False),
        (lambda w: w.detach().copy_(w), False),
        (lambda w: torch.empty(2, 3, device="meta").copy_(w), True),
        (lambda w: torch.cat([w, w]), True),
    ],
)
def test_operators_that_only_meta_supports_are_doubtful(
    operator: Callable[[torch.Tensor], torch.Tensor], doubtful: bool
) -> None:
    """Operators that only move data are not doubtful, even if few operators support the dtype."""
    recorder = Recorder()
    with recorder:
        operator(torch.empty(2, 3, dtype=torch.float8_e4m3fn, device="meta"))
    assert recorder.doubtful == doubtful


def _bump(x: torch.Tensor) -> None:
    x.add_(1)


@pytest.fixture(scope="module")
def library() -> Iterator[Any]:
    """Define custom operators that write in place; only `half_` has a functional variant, and it is
    incomplete.
    """
    library = torch.library.Library("ckpttool_test", "DEF")
    for schema in (
        "bump_(Tensor(a!) x) -> Tensor(a!)",
        "quiet_(Tensor(a!) x) -> ()",
        "both_(Tensor(a!) x, Tensor(b!) y) -> (Tensor(a!), Tensor(b!))",
        "half_(Tensor(a!) x, Tensor(b!) y) -> (Tensor(a!), Tensor(b!))",
        "half(Tensor x, Tensor y) -> Tensor",
    ):
        library.define(schema)
    for device in ("CPU", "Meta"):
        library.impl("bump_", lambda x: x.add_(1), device)
        library.impl("quiet_", _bump, device)
        for name in ("both_", "half_"):
            library.impl(name, lambda x, y: (x.add_(1), y.add_(2)), device)
        library.impl("half", lambda x, y: x + 1, device)
    yield torch.ops.ckpttool_test
    library._destroy()


@pytest.mark.parametrize("name", ["bump_", "quiet_", "both_", "half_"])
@pytest.mark.parametrize("follows_meta", [False, True])
def test_tensors_written_by_custom_operators_are_opaque(
    library: Any, name: str, follows_meta: bool
) -> None:
    """Their values depend on all inputs; memory that follows a meta tensor cannot be read."""
    recorder = Recorder()
    tensors = [torch.ones(2), torch.ones(2)][: 1 if name in ("bump_", "quiet_") else 2]
    for at, tensor in enumerate(tensors):
        recorder.name(tensor, Ref(f"t{at}"))
    with recorder:
        if follows_meta:
            tensors[0].copy_(torch.ones(2, device="meta"))
        out = getattr(library, name)(*tensors)
        assert (out is None) == (name == "quiet_")
        assert (
            not isinstance(out, tuple)
            or list(map(id, out)) == list(map(id, tensors))
            or not follows_meta
        )
        for tensor in tensors:
            with (
                pytest.raises((ValuesAsked, RuntimeError))
                if follows_meta
                else contextlib.nullcontext()
            ):
                tensor.sum().item()
    for tensor in tensors:
        assert is_opaque(recorder.value(tensor))
    named = {f"t{at}" for at in range(follows_meta, len(tensors))}
    assert {key for tensor in tensors for key in refs(recorder.value(tensor))} == named


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc"])
def test_a_sparse_tensor_is_identified_by_its_parts(layout: str) -> None:
    def build() -> torch.Tensor:
        sizes = [(1, 1)] if layout.startswith("bs") else []
        dense = torch.eye(2)
        return (
            dense.to_sparse() if layout == "coo" else getattr(dense, f"to_sparse_{layout}")(*sizes)
        )

    one = build()
    assert token(one) == token(one.detach()) != token(build())
    assert len(inside(one)) == (2 if layout == "coo" else 3)
    assert all(
        token(first) == token(second) for first, second in zip(inside(one), inside(one.detach()))
    )


@pytest.mark.parametrize("limit", [3, 4, 5])
def test_too_many_pieces_are_not_joined(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_MOST_PIECES", limit)
    value, recorder = torch.arange(8.0).reshape(4, 2), Recorder()
    recorder.name(value, Ref("value"))
    with recorder:
        result = torch.empty(4, 2)
        for at in range(4):
            result[at].copy_(value[at])
    expression = recorder.value(result)
    assert is_opaque(expression) == (limit < 4)
    assert is_opaque(expression) or same_bits(
        evaluate(expression, {"value": value}.__getitem__), result
    )
