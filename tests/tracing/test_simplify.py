"""Simplified expressions have the value of what they simplify, bit for bit: random ones, with torch as the oracle."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from ckpttool.core.expression import Argument, Expression, Op, Ref, Special
from ckpttool.evaluate.torch_eval import evaluate, same_bits
from ckpttool.tracing.simplify import Simplifier

SEEDS = int(os.environ.get("CKPTTOOL_SEEDS", "100"))
ENDLESS = (1 << 63) - 1  # the end of x[2:], as torch writes it
DTYPES = ("float64", "float32", "float16", "bfloat16", "int32", "uint8", "bool")
Pool = list[tuple[Expression, torch.Tensor]]
Make = Callable[[random.Random, Expression, torch.Tensor, Pool], Expression]


def leaves(chance: random.Random) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
    return {
        name: torch.randint(-9, 9, (4, 6), generator=generator).to(getattr(torch, chance.choice(DTYPES)))
        for name in "ab"
    }


def either_sign(chance: random.Random, dim: int, rank: int) -> int:
    return dim - rank if chance.random() < 0.3 else dim


def sliced(chance: random.Random, node: Expression, value: torch.Tensor, _: Pool) -> Expression:
    dim = chance.randrange(value.dim())
    start, end = chance.randint(-value.shape[dim], value.shape[dim]), chance.choice([chance.randint(-3, 7), ENDLESS])
    step = [(), (), (chance.randint(1, 3),)][chance.randrange(3)]
    return Op("aten.slice.Tensor", (node, either_sign(chance, dim, value.dim()), start, end, *step))


def in_pieces(chance: random.Random, node: Expression, value: torch.Tensor, _: Pool) -> Expression:
    """Cut into pieces, of which some are joined again."""
    rank, dim = value.dim(), chance.randrange(value.dim())
    size = chance.randint(1, 3)
    count = -(-value.shape[dim] // size)
    kind = chance.randrange(3)
    if kind == 0:
        whole = Op("aten.split.Tensor", (node, size, either_sign(chance, dim, rank)))
    elif kind == 1:
        count = value.shape[dim]
        whole = Op("aten.unbind.int", (node, either_sign(chance, dim, rank)))
    else:
        first = chance.randint(0, value.shape[dim])
        count = 2
        sizes = (first, value.shape[dim] - first)
        whole = Op("aten.split_with_sizes.default", (node, sizes, either_sign(chance, dim, rank)))
    start = chance.randrange(count)
    pieces = tuple(Op("getitem", (whole, index)) for index in range(start, chance.randint(start, count - 1) + 1))
    if kind == 1:
        return Op("aten.stack.default", (pieces, chance.randrange(rank)))
    joined = (*pieces, *chance.choices(pieces, k=chance.randint(0, 1)))
    return Op("aten.cat.default", (joined, either_sign(chance, dim, rank)))


def joined(chance: random.Random, node: Expression, value: torch.Tensor, pool: Pool) -> Expression:
    fitting = tuple(other for other, own in pool if own.shape == value.shape)
    parts = (node, *chance.choices(fitting, k=chance.randint(0, 2)))
    return Op(f"aten.{chance.choice(['cat', 'stack'])}.default", (parts, chance.randrange(value.dim())))


def turned(chance: random.Random, node: Expression, value: torch.Tensor, _: Pool) -> Expression:
    rank = value.dim()
    order = tuple(either_sign(chance, dim, rank) for dim in chance.sample(range(rank), rank))
    ways = [
        Op("aten.permute.default", (node, order)),
        Op("aten.transpose.int", (node, chance.choice(order), chance.choice(order))),
        Op("aten.numpy_T.default", (node,)),
    ]
    return chance.choice([*ways, Op("aten.t.default", (node,))] if rank <= 2 else ways)


def shaped(chance: random.Random, node: Expression, value: torch.Tensor, _: Pool) -> Expression:
    dim = chance.randrange(value.dim())
    ways: list[Op] = [
        Op("aten.reshape.default", (node, (*value.shape[:dim], 1, *value.shape[dim:]))),
        Op("aten.reshape.default", (node, tuple(reversed(value.shape)))),
        Op("aten.unsqueeze.default", (node, either_sign(chance, dim, value.dim() + 1))),
        Op("aten.squeeze.default", (node,)),
        Op("aten.squeeze.dim", (node, dim)),
        Op("aten.flatten.using_ints", (node, 0, dim)),
        Op("aten.expand.default", (node, tuple(value.shape))),
        Op("aten.expand.default", (node, (2, *value.shape))),
        Op("aten.select.int", (node, either_sign(chance, dim, value.dim()), chance.randint(-1, 0))),
    ]
    return chance.choice(ways)


def changed(chance: random.Random, node: Expression, value: torch.Tensor, _: Pool) -> Expression:
    name = chance.choice(["neg", "flip", "bitwise_not", "clone", "contiguous", "cast", "cast"])
    if name == "cast":
        return Op("aten._to_copy.default", (node,), (("dtype", Special("dtype", chance.choice(DTYPES))),))
    more: tuple[Argument, ...] = ((chance.randrange(value.dim()),),) if name == "flip" else ()
    return Op(f"aten.{name}.default", (node, *more))


MAKES: tuple[Make, ...] = (sliced, in_pieces, in_pieces, joined, turned, turned, shaped, changed)


def grown(chance: random.Random, have: dict[str, torch.Tensor]) -> Pool:
    """Nested expressions with their values, without expressions that torch refuses."""
    pool: Pool = [(Ref(name), value) for name, value in have.items()]
    for _ in range(12):
        node, value = chance.choice([*pool, *pool[-3:]])
        if value.numel() and value.dim():
            made = chance.choice(MAKES)(chance, node, value, pool)
            try:
                found = evaluate(made, have.__getitem__)
            except Exception:  # no such view, or no such operator for the dtype
                continue
            pool.append((made, found))
    return pool


@pytest.mark.parametrize("first", range(0, SEEDS, 100))
def test_simplifying_keeps_the_value(first: int) -> None:
    simpler = 0
    for seed in range(first, first + 100):
        chance = random.Random(seed)
        have = leaves(chance)
        simplifier = Simplifier({name: value.to("meta") for name, value in have.items()})
        for node, value in grown(chance, have):
            found = simplifier.simplify(node)
            assert isinstance(found, (Ref, Op))
            again = evaluate(found, have.__getitem__)
            assert (again.dtype, again.shape) == (value.dtype, value.shape), (seed, node, found)
            assert same_bits(again, value), (seed, node, found)
            simpler += found != node
    assert simpler > 300  # of a thousand


A, B = Ref("a"), Ref("b")
HALF = Special("dtype", "float16")


@pytest.mark.parametrize(
    "node",
    [
        Op("aten.cat.default", ((), 0)),
        Op("aten.cat.default", ((1, 2), 0)),
        Op("aten.cat.default", (A, 0)),
        Op("aten.cat.default", ((A, B), "x")),
        Op("aten.stack.default", ((A, None), 0)),
        Op("aten.slice.Tensor", (A,)),
        Op("aten.slice.Tensor", (A, 0, 1)),
        Op("aten.slice.Tensor", (A, 0, None, 2)),
        Op("aten.slice.Tensor", (7, 0, 1, 2)),
        Op("aten.permute.default", (A, ())),
        Op("aten.permute.default", (A, (0, "x"))),
        Op("aten.permute.default", (Op("aten.permute.default", (A, 1)), (1, 0))),
        Op("aten.select.int", (A, 0, None)),
        Op("aten._to_copy.default", (A,)),
        Op("aten._to_copy.default", (A,), (("dtype", "float16"),)),
        Op("aten._to_copy.default", ("a",), (("dtype", HALF),)),
        Op("getitem", (A, 0)),
        Op("getitem", (Op("aten.split.Tensor", (A, 2)), "x")),
        Op("getitem", (Op("aten.max.dim", (A, 0)), 0)),
        Op("aten.neg.default", (A,)),
        Op("aten.neg.default", (Op("aten.flip.default", (A, (0,))),)),
        Op("aten.clone.default", ()),
        Op("no.such.operator", (A,)),
    ],
)
def test_expressions_without_a_rule_are_unchanged(node: Op) -> None:
    """Files of names hold what their authors like."""
    simplifier = Simplifier({name: torch.empty(4, 6, device="meta") for name in "ab"})
    assert simplifier.simplify(node) == node


def test_parts_of_several_dtypes_are_not_taken_out_of_a_join() -> None:
    """They are cast where they are joined."""
    simplifier = Simplifier(
        {"a": torch.empty(4, 6, device="meta"), "b": torch.empty(4, 6, device="meta", dtype=torch.float64)}
    )
    whole = Op("aten.cat.default", ((A, B), 0))
    first = Op("aten.slice.Tensor", (whole, 0, 0, 4))
    assert simplifier.simplify(first) == first
    same = Op("aten.cat.default", ((A, A), 0))
    assert simplifier.simplify(Op("aten.slice.Tensor", (same, 0, 0, 4))) == A


# What is put back


Undo = Callable[[Expression], Expression]


def there_and_back(chance: random.Random, node: Expression, value: torch.Tensor) -> tuple[Expression, Undo]:
    """The tensor done something to, or taken apart and joined again, and what undoes that."""
    rank, dim = value.dim(), chance.randrange(value.dim())
    at = either_sign(chance, dim, rank)
    size, length = chance.randint(1, 3), value.shape[dim]
    kind = chance.choice(
        ["split", "sizes", "unbind", "slice", "permute", "transpose", "reshape", "squeeze", "cast", "neg", "flip"]
    )
    if kind in ("split", "sizes", "unbind"):
        first = chance.randint(0, length)
        whole, count = {
            "split": (Op("aten.split.Tensor", (node, size, at)), -(-length // size)),
            "sizes": (Op("aten.split_with_sizes.default", (node, (first, length - first), at)), 2),
            "unbind": (Op("aten.unbind.int", (node, at)), length),
        }[kind]
        pieces = tuple(Op("getitem", (whole, index)) for index in range(count))
        join = "stack" if kind == "unbind" else "cat"
        return Op(f"aten.{join}.default", (pieces, at)), lambda made: made
    if kind == "slice":
        cuts = [0, *sorted(chance.choices(range(length + 1), k=2)), ENDLESS]
        slices = tuple(Op("aten.slice.Tensor", (node, at, start, end)) for start, end in pairwise(cuts))
        return Op("aten.cat.default", (slices, at)), lambda made: made
    if kind == "permute":
        order = tuple(chance.sample(range(rank), rank))
        back = tuple(order.index(d) for d in range(rank))
        return Op("aten.permute.default", (node, order)), lambda made: Op("aten.permute.default", (made, back))
    if kind == "transpose":
        pair = chance.randrange(rank), at
        return Op("aten.transpose.int", (node, *pair)), lambda made: Op("aten.transpose.int", (made, *pair))
    if kind == "reshape":
        shape, own = chance.choice([(-1,), (1, -1), (value.numel() // 2, 2)]), tuple(value.shape)
        return Op("aten.reshape.default", (node, shape)), lambda made: Op("aten.view.default", (made, own))
    if kind == "squeeze":
        return Op("aten.unsqueeze.default", (node, at)), lambda made: Op("aten.squeeze.dim", (made, at))
    if kind == "cast":
        wide, back_to = (
            Special("dtype", str(one).removeprefix("torch.")) for one in (wider(chance, value), value.dtype)
        )
        return cast(node, wide), lambda made: cast(made, back_to)
    more: tuple[Argument, ...] = ((dim,),) if kind == "flip" else ()
    name = "bitwise_not" if kind == "neg" and not value.dtype.is_floating_point else kind
    return Op(f"aten.{name}.default", (node, *more)), lambda made: Op(f"aten.{name}.default", (made, *more))


def cast(node: Expression, dtype: Special) -> Op:
    return Op("aten._to_copy.default", (node,), (("dtype", dtype),))


def wider(chance: random.Random, value: torch.Tensor) -> torch.dtype:
    """A dtype that has all values of the tensor's: among floats, float64 alone for 32 bits and none for 64."""
    dtypes = [getattr(torch, name) for name in (*DTYPES, "int64", "int16")]
    every = [other for other in dtypes if torch.promote_types(other, value.dtype) == other]
    floats = {torch.int32: (torch.float64,), torch.int64: ()}.get(value.dtype, every)
    return chance.choice([other for other in every if not other.is_floating_point or other in floats])


@pytest.mark.parametrize("first", range(0, SEEDS, 100))
def test_a_tensor_that_is_put_together_again_is_itself(first: int) -> None:
    for seed in range(first, first + 100):
        chance = random.Random(seed)
        have = leaves(chance)
        simplifier = Simplifier({name: value.to("meta") for name, value in have.items()})
        node: Expression = Ref("a")
        undone: list[Undo] = []
        for _ in range(chance.randint(1, 4)):
            node, undo = there_and_back(chance, node, evaluate(node, have.__getitem__))
            undone.append(undo)
        for undo in reversed(undone):
            node = undo(node)
        assert simplifier.simplify(node) == Ref("a"), (seed, node)
