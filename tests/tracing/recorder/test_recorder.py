"""What the recorder says of tensors that are written in place, through views of each other: random programs."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from ckpttool.evaluate.interpret import evaluate
from ckpttool.evaluate.with_torch import same_bits
from ckpttool.expression import Op, Ref, is_opaque, refs
from ckpttool.tracing.recorder.identity import token
from ckpttool.tracing.recorder.recorder import NeedsValues, Recorder

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
        lambda: x.detach().t_(),
        lambda: x.view({torch.float32: torch.int32, torch.float64: torch.int64}[x.dtype]),
    ]
    try:
        return chance.choice(ways)()
    except (RuntimeError, IndexError, KeyError):  # there is no such view
        return x


def computed(chance: random.Random, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    ways: list[Callable[[], torch.Tensor]] = [
        lambda: x + 1,
        lambda: x.neg(),
        lambda: x.clone(),
        lambda: x.to(torch.float64),
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


@pytest.mark.parametrize("first", range(0, SEEDS, 100))
def test_every_tensor_is_what_it_is_said_to_be(first: int) -> None:
    told = wanted = 0
    for seed in range(first, first + 100):
        chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        whole = torch.randint(-9, 9, (4, 6), generator=generator).float()
        names = {"whole": whole, "other": torch.randint(-9, 9, (6,), generator=generator).float()}
        if chance.random() < 0.5:
            names["part"] = whole[1:3] if chance.random() < 0.5 else whole.t()[2:4]  # another name in one storage
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
            if not is_opaque(value):
                told += 1
                found = evaluate(value, before.__getitem__)
                assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), (seed, value)
                assert same_bits(found, tensor), (seed, value)
    assert told > 0.8 * wanted, (told, wanted)


def cuts(chance: random.Random, size: int) -> list[tuple[int, int]]:
    """Ranges that make up `size` places."""
    edges = sorted({0, size, *chance.choices(range(1, size), k=chance.randint(1, 2))})
    return list(pairwise(edges))


def test_what_is_filled_piece_by_piece_is_made_of_the_pieces() -> None:
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


def test_memory_that_took_a_value_that_does_not_exist_cannot_be_read() -> None:
    """What is written is known all the same; until something else is written there, its bytes mean nothing."""
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
def test_one_place_in_memory_takes_no_two_values(device: str) -> None:
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
def test_what_has_no_values_does_not_leave_meta(copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A hook that saves on the CPU is followed where there is nothing to copy."""
    weight, recorder = torch.empty(2, 3, device="meta"), Recorder()
    recorder.name(weight, Ref("weight"))
    with recorder:
        copied = copy(weight)
    values = {"weight": torch.randn(2, 3)}
    assert torch.equal(evaluate(recorder.value(copied), values.__getitem__), values["weight"])
    assert not recorder.blind


@pytest.mark.parametrize("kind", [torch.Tensor.clone, torch.Tensor.to_sparse])
def test_who_made_a_tensor_or_wrote_to_it_last(kind: Callable[[torch.Tensor], torch.Tensor]) -> None:
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


def test_what_came_about_outside_of_torch_has_its_values() -> None:
    weight, outside, recorder = torch.randn(2), torch.from_numpy(np.array([3.0, 4.0], np.float32)), Recorder()
    recorder.name(weight, Ref("weight"))
    with recorder:
        outside[:1].add_(weight[1])
    assert recorder.outside
    assert torch.equal(evaluate(recorder.value(outside), {"weight": weight}.__getitem__), outside)


def test_the_inside_of_a_tensor_is_known_to_be_its_own() -> None:
    whole, recorder = TwoTensor(torch.randn(2), torch.randn(2)), Recorder()
    recorder.name(whole, Ref("whole"))
    with recorder:
        part = whole.a * 2
    assert set(refs(recorder.value(part))) == {"whole"}
    assert is_opaque(recorder.value(part))
    assert not recorder.outside
