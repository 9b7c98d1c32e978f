"""The recorder's expressions for tensors that are written in place, through views of each other: random programs."""

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
from ckpttool.tracing.recorder import NeedsValues, Recorder

SEEDS = int(os.environ.get("CKPTTOOL_SEEDS", "100"))
Tensors = list[torch.Tensor]


def viewed(chance: random.Random, x: torch.Tensor) -> torch.Tensor:
    """A view of the tensor, or of a part of it."""
    if not x.dim():
        return x.unsqueeze(0)
    dim = chance.randrange(x.dim())
    start, end = sorted(chance.choices(range(x.shape[dim] + 1), k=2))
    ways: list[Callable[[], torch.Tensor]] = [
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
        return chance.choice(ways)()
    except (RuntimeError, TypeError, IndexError, KeyError, ZeroDivisionError):  # there is no such view
        return x


def computed(chance: random.Random, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    ways: list[Callable[[], torch.Tensor]] = [
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
        return chance.choice(ways)()
    except (RuntimeError, IndexError):
        return x.clone()


def write(chance: random.Random, x: torch.Tensor, y: torch.Tensor) -> None:
    """Changes the tensor where it is; by the other one where torch lets it."""
    number = float(chance.randint(-3, 3))
    ways: list[Callable[[], object]] = [
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
        chance.choice(ways)()
    except (RuntimeError, IndexError):  # of another shape, or of elements that overlap
        x.fill_(number)


@pytest.mark.filterwarnings(
    "ignore:Casting complex values to real", "ignore:An output with one or more elements was resized"
)
@pytest.mark.parametrize("small", [1 << 22, 0])
@pytest.mark.parametrize("first", range(0, SEEDS, 100))
def test_every_tensor_has_the_value_of_its_expression(first: int, small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where memory is too large for every element of it to be looked at."""
    monkeypatch.setattr(memory, "_SMALL", small)
    told = wanted = 0
    for seed in range(first, first + 100):
        chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        whole = torch.randint(-9, 9, (4, 6), generator=generator).float()
        if chance.random() < 0.2:
            whole = (whole * (1 + 2j)).conj()
        names = {"whole": whole, "other": torch.randint(-9, 9, (6,), generator=generator).float()}
        for number in range(chance.randrange(3)):  # other names in one storage
            names[f"part{number}"] = chance.choice([whole[1:3], whole.t()[2:4], whole[2:], whole[0]])
        before = {name: tensor.clone() for name, tensor in names.items()}
        recorder = Recorder()
        for name, tensor in names.items():
            recorder.name(tensor, Ref(name))
        pool: Tensors = list(names.values())
        with recorder:
            for _ in range(chance.randint(3, 10)):
                x, y = chance.choice([*pool, *pool[-2:]]), chance.choice(pool)
                kind = chance.randrange(3)
                if kind == 0:
                    pool.append(viewed(chance, x))
                elif kind == 1:
                    pool.append(computed(chance, x, y))
                elif all(size == 1 or step for size, step in zip(x.shape, x.stride())):
                    write(chance, viewed(chance, x) if chance.random() < 0.5 else x, y)
        for tensor in pool:
            value = recorder.value(tensor)
            wanted += 1
            if not is_opaque(value) and "aten._neg_view.default" not in operators(value):  # which no plan may hold
                told += 1
                found = evaluate(value, before.__getitem__)
                assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), (seed, value)
                signs = tensor.is_complex()  # a zero that is lazily conjugated or negated has either sign
                assert torch.equal(found, tensor) if signs else same_bits(found, tensor), (seed, value)
    assert told > (0.7 if small else 0.4) * wanted, (told, wanted)


SEVERAL_WAYS: dict[str, Callable[[torch.Tensor], object]] = {
    "by elements of another size": lambda whole: whole.view(torch.float16)[2:, 3:].neg_(),
    "as elements of another size": lambda whole: whole[3:].view(torch.int16).zero_(),
    "a part of a part that was written": lambda whole: (whole[1:3].view(12).copy_(torch.ones(12)), whole[1, 0].zero_()),
    "between the columns that were written": lambda whole: (whole[1].fill_(1), whole[1, 0].zero_()),
    "strides in place": lambda whole: whole[1:3].detach().as_strided_((2, 2), (1, 3), 7),
    "strides of a part in place": lambda whole: whole.t()[1:].detach().as_strided_((2, 2), (1, 3)),
    "one place as several elements": lambda whole: whole.as_strided((2, 2), (1, 1)).neg_(),
    "read while it is written": lambda whole: torch.mul(
        whole.as_strided((2, 2), (1, 3)), whole.as_strided((2,), (2,)), out=whole.as_strided((2, 2), (1, 3))
    ),
}


@pytest.mark.parametrize("change", SEVERAL_WAYS.values(), ids=SEVERAL_WAYS)
def test_memory_with_several_views(change: Callable[[torch.Tensor], object]) -> None:
    whole = torch.arange(2.0, 26).reshape(4, 6)
    names = {"whole": whole, "columns": whole.t()[2:4], "middle": whole[1:3], "end": whole[2:]}
    before, recorder = {name: tensor.clone() for name, tensor in names.items()}, Recorder()
    for name, tensor in names.items():
        recorder.name(tensor, Ref(name))
    with recorder:
        out = change(whole)
        seen = [*names.values(), whole[1:3].view(12), whole[1], *([out] if isinstance(out, torch.Tensor) else [])]
    for tensor in seen:
        value = recorder.value(tensor)
        assert is_opaque(value) or same_bits(evaluate(value, before.__getitem__), tensor), value


def cuts(chance: random.Random, size: int) -> list[tuple[int, int]]:
    """Ranges that make up `size` places."""
    edges = sorted({0, size, *chance.choices(range(1, size), k=chance.randint(1, 2))})
    return list(pairwise(edges))


def test_a_tensor_filled_in_pieces_is_made_of_the_pieces() -> None:
    """Rows, columns or blocks of memory that held nothing, in any order; some of them are written again."""
    for seed in range(100):
        chance = random.Random(seed)
        whole = torch.empty(4, 6).t() if chance.random() < 0.3 else torch.empty(4, 6)
        rows, columns = (
            [(0, whole.shape[dim])] if chance.random() < 0.4 else cuts(chance, whole.shape[dim]) for dim in (0, 1)
        )
        places = [(slice(*row), slice(*column)) for row in rows for column in columns]
        chance.shuffle(places)
        again = chance.sample(places, chance.choice([0, 0, 1]))
        missing = places.pop() if chance.random() < 0.2 and not again else None
        values = {f"v{at}": torch.randn(whole[place].shape) for at, place in enumerate([*places, *again])}
        recorder = Recorder()
        for name, value in values.items():
            recorder.name(value, Ref(name))
        with recorder:
            made = whole.new_empty(whole.shape) if whole.is_contiguous() else torch.empty(4, 6).t()
            for place, value in zip([*places, *again], values.values()):
                if chance.random() < 0.5:
                    made[place] = value
                else:
                    made[place].copy_(value)
        told = recorder.value(made)
        assert is_opaque(told) == (missing is not None), seed
        if missing is None:
            assert same_bits(evaluate(told, values.__getitem__), made), seed
            in_a_row = whole.is_contiguous() and len(places) > 1 and 1 in (len(rows), len(columns))
            assert not in_a_row or (isinstance(told, Op) and told.op == "aten.cat.default"), (seed, told)


def test_memory_with_a_meta_value_cannot_be_read() -> None:
    """The written value is known; until another value is written, the bytes mean nothing."""
    weight = torch.empty(2, 3, device="meta")
    recorder = Recorder()
    recorder.name(weight, Ref("weight"))
    with recorder:
        made, whole = torch.zeros(2, 3), torch.zeros(4, 3)
        assert made.sum().item() == 0
        made.copy_(weight)
        whole[1:3].add_(weight)
        for tensor in (made, whole, whole[0]):
            with pytest.raises((NeedsValues, RuntimeError)):
                tensor.sum().item()
        assert recorder.value(made) == Ref("weight")
        assert torch.zeros(2).sum().item() == 0
    assert recorder.blind
    values = {"weight": torch.randn(2, 3)}
    assert torch.equal(evaluate(recorder.value(whole), values.__getitem__)[1:3], values["weight"])


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_overlapping_elements_cannot_be_written(device: str) -> None:
    """As torch has it for tensors with values."""
    row = torch.zeros(3, device=device)
    with Recorder(), pytest.raises(RuntimeError, match="single memory location"):
        row.expand(2, 3).add_(1)


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
    """A hook that saves on the CPU is followed where there is nothing to copy."""
    weight, recorder = torch.empty(2, 3, device="meta"), Recorder()
    recorder.name(weight, Ref("weight"))
    with recorder:
        copied = copy(weight)
    values = {"weight": torch.randn(2, 3)}
    assert torch.equal(evaluate(recorder.value(copied), values.__getitem__), values["weight"])
    assert not recorder.blind


@pytest.mark.parametrize("kind", [torch.Tensor.clone, torch.Tensor.to_sparse])
def test_the_author_of_a_tensor(kind: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A dense tensor is known by its memory, any other by what it is made of."""
    weight, recorder = torch.eye(3), Recorder()
    recorder.name(weight, Ref("weight"))
    assert (recorder.author_of(token(weight)), recorder.author_of(token(torch.ones(2)))) == (None, None)
    assert recorder.author_of(token(torch.eye(2).to_sparse())) is None
    with recorder:
        recorder.author = "maker"
        made = kind(weight)
        assert recorder.author_of(token(made)) == "maker"
        recorder.author, before = "writer", recorder.clock
        assert recorder.written_since(before) == set()
        made.mul_(2)
    mark = token(made)
    assert recorder.written_since(before) == {mark[0] if isinstance(mark[0], int) else mark}
    assert recorder.written_since(recorder.clock) == set()
    assert recorder.author_of(mark) == "writer"
    assert recorder.author_of(token(weight)) is None
    assert set(refs(recorder.value(made))) == {"weight"}


def test_a_tensor_made_outside_torch_is_a_literal() -> None:
    weight, outside, recorder = torch.randn(2), torch.from_numpy(np.array([3.0, 4.0], np.float32)), Recorder()
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
    """Made outside of torch."""
    return torch.from_numpy(np.array(values))


OPERATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "full": lambda w: torch.full((2, 3), 3),
    "full, in complex numbers": lambda w: torch.full((2,), 1j),
    "full by the operator's own words": lambda w: torch.ops.aten.full.default([2], fill_value=3),
    "fill with a tensor": lambda w: torch.zeros(3).fill_(w[0, 0]),
    "fill with one of another dtype": lambda w: torch.zeros(3, dtype=torch.int32).fill_(w[0, 0]),
    "times a complex number": lambda w: w * (1 + 2j),
    "an argument that is None": lambda w: w.sum(0, dtype=None),
    "a dtype as argument": lambda w: w.sum(0, dtype=torch.float64),
    "a stride": lambda w: w[:, 1::2],
    "a list of tensors": lambda w: torch.cat([w, w]),
    "one of several": lambda w: w.max(0).values,
    "constants": lambda w: w + numbers(1.0, 2.0, 3.0),
    "complex constants": lambda w: w * numbers(1j, 2, 3),
    "a constant throughout": lambda w: w + numbers(2.0, 2.0, 2.0),
    "nothing": lambda w: numbers(),
    "as many as are written out": lambda w: w[0, 0] + numbers(*range(4096)),
    "out of two": lambda w: torch.sort(w, out=(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.long)))[0],
}


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
def test_an_operator_becomes_an_expression(operator: Callable[[torch.Tensor], torch.Tensor]) -> None:
    weight, recorder = torch.arange(6.0).reshape(2, 3), Recorder()
    before = weight.clone()
    recorder.name(weight, Ref("weight"))
    with recorder:
        made = operator(weight)
    told = recorder.value(made)
    assert not is_opaque(told), told
    found = evaluate(told, {"weight": before}.__getitem__)
    assert (found.dtype, found.shape) == (made.dtype, made.shape)
    assert same_bits(found, made)


def test_outputs_that_are_none() -> None:
    weight, recorder = torch.ones(1, 2, 3), Recorder()
    recorder.name(weight, Ref("weight"))
    wanted, rest = [True, False, False], (None, [1], [0], [1], False, [0], 1)
    with recorder:
        found = torch.ops.aten.convolution_backward(torch.ones(1, 1, 1), weight, weight, *rest, wanted)
    assert found[1:] == (None, None)
    assert set(refs(recorder.value(found[0]))) == {"weight"}


class Own(torch.Tensor):
    """A class whose values may mean anything."""


OWN = numbers(1.0, 2.0).as_subclass(Own)
QUANTIZED = torch.quantize_per_tensor(torch.arange(3.0), 0.5, 0, torch.qint8)
SPARSE = torch.tensor(np.diag(np.arange(5000))).to_sparse()
NOT_SAID: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "no values yet": (torch.empty_like, False),
    "random, of a shape": (torch.rand_like, False),
    "random, by values": (lambda w: torch.bernoulli(w / 9), True),
    "more constants than are written out": (lambda w: numbers(*range(4097)), False),
    "constants of a class": (lambda w: OWN, False),
    "quantized constants": (lambda w: QUANTIZED, False),
    "sparse constants": (lambda w: SPARSE, False),
}


@pytest.mark.parametrize(("operator", "by_weight"), NOT_SAID.values(), ids=NOT_SAID)
def test_opaque_expressions_list_their_inputs(
    operator: Callable[[torch.Tensor], torch.Tensor], by_weight: bool
) -> None:
    weight, recorder = torch.arange(6.0).reshape(2, 3), Recorder()
    recorder.name(weight, Ref("weight"))
    with recorder:
        made = operator(weight)
    told = recorder.value(made)
    assert is_opaque(told)
    assert set(refs(told)) == ({"weight"} if by_weight else set())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_questions_about_shapes_do_not_read_values(device: str) -> None:
    weight, recorder = torch.zeros(2, 3, device=device), Recorder()
    recorder.name(weight, Ref("weight"))
    with recorder:
        assert torch.ops.aten.is_same_size(weight, weight)
        assert not weight.is_pinned()
    assert (recorder.reads, recorder.blind) == ([], False)
    with recorder, contextlib.suppress(NeedsValues, RuntimeError):
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
    """Of a dtype that few operators know, what only moves is done anywhere."""
    recorder = Recorder()
    with recorder:
        operator(torch.empty(2, 3, dtype=torch.float8_e4m3fn, device="meta"))
    assert recorder.doubtful == doubtful


def _bumped(x: torch.Tensor) -> None:
    x.add_(1)


@pytest.fixture(scope="module")
def library() -> Iterator[Any]:
    """Operators of somebody's own that write in place, most of them without a functional one that says the same."""
    found = torch.library.Library("ckpttool_test", "DEF")
    for schema in (
        "bump_(Tensor(a!) x) -> Tensor(a!)",
        "quiet_(Tensor(a!) x) -> ()",
        "both_(Tensor(a!) x, Tensor(b!) y) -> (Tensor(a!), Tensor(b!))",
        "half_(Tensor(a!) x, Tensor(b!) y) -> (Tensor(a!), Tensor(b!))",
        "half(Tensor x, Tensor y) -> Tensor",
    ):
        found.define(schema)
    for device in ("CPU", "Meta"):
        found.impl("bump_", lambda x: x.add_(1), device)
        found.impl("quiet_", _bumped, device)
        for name in ("both_", "half_"):
            found.impl(name, lambda x, y: (x.add_(1), y.add_(2)), device)
        found.impl("half", lambda x, y: x + 1, device)
    yield torch.ops.ckpttool_test
    found._destroy()


@pytest.mark.parametrize("name", ["bump_", "quiet_", "both_", "half_"])
@pytest.mark.parametrize("unreal", [False, True])
def test_custom_operators_that_write(library: Any, name: str, unreal: bool) -> None:
    """What each tensor holds then is made of all that was given; memory that follows meta can be read no more."""
    recorder = Recorder()
    tensors = [torch.ones(2), torch.ones(2)][: 1 if name in ("bump_", "quiet_") else 2]
    for at, tensor in enumerate(tensors):
        recorder.name(tensor, Ref(f"t{at}"))
    with recorder:
        if unreal:
            tensors[0].copy_(torch.ones(2, device="meta"))
        out = getattr(library, name)(*tensors)
        assert (out is None) == (name == "quiet_")
        assert not isinstance(out, tuple) or list(map(id, out)) == list(map(id, tensors)) or not unreal
        for tensor in tensors:
            with pytest.raises((NeedsValues, RuntimeError)) if unreal else contextlib.nullcontext():
                tensor.sum().item()
    for tensor in tensors:
        assert is_opaque(recorder.value(tensor))
    named = {f"t{at}" for at in range(unreal, len(tensors))}
    assert {key for tensor in tensors for key in refs(recorder.value(tensor))} == named


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc"])
def test_a_sparse_tensor_is_identified_by_its_parts(layout: str) -> None:
    def made() -> torch.Tensor:
        sizes = [(1, 1)] if layout.startswith("bs") else []
        dense = torch.eye(2)
        return dense.to_sparse() if layout == "coo" else getattr(dense, f"to_sparse_{layout}")(*sizes)

    one = made()
    assert token(one) == token(one.detach()) != token(made())
    assert len(inside(one)) == (2 if layout == "coo" else 3)
    assert all(token(mine) == token(same) for mine, same in zip(inside(one), inside(one.detach())))


@pytest.mark.parametrize("most", [3, 4, 5])
def test_too_many_pieces_are_not_joined(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_MOST_PIECES", most)
    value, recorder = torch.arange(8.0).reshape(4, 2), Recorder()
    recorder.name(value, Ref("value"))
    with recorder:
        made = torch.empty(4, 2)
        for at in range(4):
            made[at].copy_(value[at])
    told = recorder.value(made)
    assert is_opaque(told) == (most < 4)
    assert is_opaque(told) or same_bits(evaluate(told, {"value": value}.__getitem__), made)
