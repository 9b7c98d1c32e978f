"""Simplified random expressions have the same value as the originals, bit for bit, with torch as
the oracle.
"""

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
Transform = Callable[[random.Random, Expression, torch.Tensor, Pool], Expression]


def leaves(rng: random.Random) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    return {
        name: torch.randint(-9, 9, (4, 6), generator=generator).to(
            getattr(torch, rng.choice(DTYPES))
        )
        for name in "ab"
    }


def maybe_negative(rng: random.Random, dim: int, rank: int) -> int:
    return dim - rank if rng.random() < 0.3 else dim


def add_slice(rng: random.Random, node: Expression, value: torch.Tensor, _: Pool) -> Expression:
    dim = rng.randrange(value.dim())
    start, end = (
        rng.randint(-value.shape[dim], value.shape[dim]),
        rng.choice([rng.randint(-3, 7), ENDLESS]),
    )
    step = [(), (), (rng.randint(1, 3),)][rng.randrange(3)]
    return Op("aten.slice.Tensor", (node, maybe_negative(rng, dim, value.dim()), start, end, *step))


def split_and_join(
    rng: random.Random, node: Expression, value: torch.Tensor, _: Pool
) -> Expression:
    rank, dim = value.dim(), rng.randrange(value.dim())
    size = rng.randint(1, 3)
    count = -(-value.shape[dim] // size)
    kind = rng.randrange(3)
    if kind == 0:
        whole = Op("aten.split.Tensor", (node, size, maybe_negative(rng, dim, rank)))
    elif kind == 1:
        count = value.shape[dim]
        whole = Op("aten.unbind.int", (node, maybe_negative(rng, dim, rank)))
    else:
        first = rng.randint(0, value.shape[dim])
        count = 2
        sizes = (first, value.shape[dim] - first)
        whole = Op("aten.split_with_sizes.default", (node, sizes, maybe_negative(rng, dim, rank)))
    start = rng.randrange(count)
    pieces = tuple(
        Op("getitem", (whole, index)) for index in range(start, rng.randint(start, count - 1) + 1)
    )
    if kind == 1:
        return Op("aten.stack.default", (pieces, rng.randrange(rank)))
    parts = (*pieces, *rng.choices(pieces, k=rng.randint(0, 1)))
    return Op("aten.cat.default", (parts, maybe_negative(rng, dim, rank)))


def join_with_others(
    rng: random.Random, node: Expression, value: torch.Tensor, pool: Pool
) -> Expression:
    same_shape = tuple(other for other, tensor in pool if tensor.shape == value.shape)
    parts = (node, *rng.choices(same_shape, k=rng.randint(0, 2)))
    return Op(f"aten.{rng.choice(['cat', 'stack'])}.default", (parts, rng.randrange(value.dim())))


def add_permute(rng: random.Random, node: Expression, value: torch.Tensor, _: Pool) -> Expression:
    rank = value.dim()
    order = tuple(maybe_negative(rng, dim, rank) for dim in rng.sample(range(rank), rank))
    operations = [
        Op("aten.permute.default", (node, order)),
        Op("aten.transpose.int", (node, rng.choice(order), rng.choice(order))),
        Op("aten.numpy_T.default", (node,)),
    ]
    return rng.choice([*operations, Op("aten.t.default", (node,))] if rank <= 2 else operations)


def add_reshape(rng: random.Random, node: Expression, value: torch.Tensor, _: Pool) -> Expression:
    dim = rng.randrange(value.dim())
    operations: list[Op] = [
        Op("aten.reshape.default", (node, (*value.shape[:dim], 1, *value.shape[dim:]))),
        Op("aten.reshape.default", (node, tuple(reversed(value.shape)))),
        Op("aten.unsqueeze.default", (node, maybe_negative(rng, dim, value.dim() + 1))),
        Op("aten.squeeze.default", (node,)),
        Op("aten.squeeze.dim", (node, dim)),
        Op("aten.flatten.using_ints", (node, 0, dim)),
        Op("aten.expand.default", (node, tuple(value.shape))),
        Op("aten.expand.default", (node, (2, *value.shape))),
        Op("aten.select.int", (node, maybe_negative(rng, dim, value.dim()), rng.randint(-1, 0))),
    ]
    return rng.choice(operations)


def change_values(rng: random.Random, node: Expression, value: torch.Tensor, _: Pool) -> Expression:
    name = rng.choice(["neg", "flip", "bitwise_not", "clone", "contiguous", "cast", "cast"])
    if name == "cast":
        return Op(
            "aten._to_copy.default", (node,), (("dtype", Special("dtype", rng.choice(DTYPES))),)
        )
    arguments: tuple[Argument, ...] = ((rng.randrange(value.dim()),),) if name == "flip" else ()
    return Op(f"aten.{name}.default", (node, *arguments))


STEPS: tuple[Transform, ...] = (
    add_slice,
    split_and_join,
    split_and_join,
    join_with_others,
    add_permute,
    add_permute,
    add_reshape,
    change_values,
)


def random_pool(rng: random.Random, values: dict[str, torch.Tensor]) -> Pool:
    """Return random nested expressions with their values, without expressions that torch
    refuses.
    """
    pool: Pool = [(Ref(name), value) for name, value in values.items()]
    for _ in range(12):
        node, value = rng.choice([*pool, *pool[-3:]])
        if value.numel() and value.dim():
            new_node = rng.choice(STEPS)(rng, node, value, pool)
            try:
                result = evaluate(new_node, values.__getitem__)
            except Exception:  # an impossible view, or an unsupported dtype
                continue
            pool.append((new_node, result))
    return pool


@pytest.mark.parametrize("first", range(0, SEEDS, 100))
def test_simplifying_keeps_the_value(first: int) -> None:
    simpler = 0
    for seed in range(first, first + 100):
        rng = random.Random(seed)
        values = leaves(rng)
        simplifier = Simplifier({name: value.to("meta") for name, value in values.items()})
        for node, value in random_pool(rng, values):
            result = simplifier.simplify(node)
            assert isinstance(result, (Ref, Op))
            again = evaluate(result, values.__getitem__)
            assert (again.dtype, again.shape) == (value.dtype, value.shape), (seed, node, result)
            assert same_bits(again, value), (seed, node, result)
            simpler += result != node
    assert simpler > 300  # of about 1,000


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
    """Names files may contain arbitrary expressions."""
    simplifier = Simplifier({name: torch.empty(4, 6, device="meta") for name in "ab"})
    assert simplifier.simplify(node) == node


def test_a_slice_of_a_join_of_several_dtypes_is_unchanged() -> None:
    """The join casts its parts."""
    simplifier = Simplifier(
        {
            "a": torch.empty(4, 6, device="meta"),
            "b": torch.empty(4, 6, device="meta", dtype=torch.float64),
        }
    )
    whole = Op("aten.cat.default", ((A, B), 0))
    first = Op("aten.slice.Tensor", (whole, 0, 0, 4))
    assert simplifier.simplify(first) == first
    same = Op("aten.cat.default", ((A, A), 0))
    assert simplifier.simplify(Op("aten.slice.Tensor", (same, 0, 0, 4))) == A


# Reversible steps


Undo = Callable[[Expression], Expression]


def reversible_step(
    rng: random.Random, node: Expression, value: torch.Tensor
) -> tuple[Expression, Undo]:
    """Transform the tensor, or split and join it; return the expression and the inverse step."""
    rank, dim = value.dim(), rng.randrange(value.dim())
    at = maybe_negative(rng, dim, rank)
    size, length = rng.randint(1, 3), value.shape[dim]
    kind = rng.choice(
        [
            "split",
            "sizes",
            "unbind",
            "slice",
            "permute",
            "transpose",
            "reshape",
            "squeeze",
            "cast",
            "neg",
            "flip",
        ]
    )
    if kind in ("split", "sizes", "unbind"):
        first = rng.randint(0, length)
        whole, count = {
            "split": (Op("aten.split.Tensor", (node, size, at)), -(-length // size)),
            "sizes": (Op("aten.split_with_sizes.default", (node, (first, length - first), at)), 2),
            "unbind": (Op("aten.unbind.int", (node, at)), length),
        }[kind]
        pieces = tuple(Op("getitem", (whole, index)) for index in range(count))
        join = "stack" if kind == "unbind" else "cat"
        return Op(f"aten.{join}.default", (pieces, at)), lambda new_node: new_node
    if kind == "slice":
        edges = [0, *sorted(rng.choices(range(length + 1), k=2)), ENDLESS]
        slices = tuple(
            Op("aten.slice.Tensor", (node, at, start, end)) for start, end in pairwise(edges)
        )
        return Op("aten.cat.default", (slices, at)), lambda new_node: new_node
    if kind == "permute":
        order = tuple(rng.sample(range(rank), rank))
        inverse = tuple(order.index(d) for d in range(rank))
        return Op("aten.permute.default", (node, order)), lambda new_node: Op(
            "aten.permute.default", (new_node, inverse)
        )
    if kind == "transpose":
        pair = rng.randrange(rank), at
        return Op("aten.transpose.int", (node, *pair)), lambda new_node: Op(
            "aten.transpose.int", (new_node, *pair)
        )
    if kind == "reshape":
        shape, old_shape = rng.choice([(-1,), (1, -1), (value.numel() // 2, 2)]), tuple(value.shape)
        return Op("aten.reshape.default", (node, shape)), lambda new_node: Op(
            "aten.view.default", (new_node, old_shape)
        )
    if kind == "squeeze":
        return Op("aten.unsqueeze.default", (node, at)), lambda new_node: Op(
            "aten.squeeze.dim", (new_node, at)
        )
    if kind == "cast":
        wide, back_to = (
            Special("dtype", str(one).removeprefix("torch."))
            for one in (wider_dtype(rng, value), value.dtype)
        )
        return cast(node, wide), lambda new_node: cast(new_node, back_to)
    arguments: tuple[Argument, ...] = ((dim,),) if kind == "flip" else ()
    name = "bitwise_not" if kind == "neg" and not value.dtype.is_floating_point else kind
    return Op(f"aten.{name}.default", (node, *arguments)), lambda new_node: Op(
        f"aten.{name}.default", (new_node, *arguments)
    )


def cast(node: Expression, dtype: Special) -> Op:
    return Op("aten._to_copy.default", (node,), (("dtype", dtype),))


def wider_dtype(rng: random.Random, value: torch.Tensor) -> torch.dtype:
    """Return a dtype with all values of the tensor's dtype; for int32 the only float is float64,
    for int64 none.
    """
    dtypes = [getattr(torch, name) for name in (*DTYPES, "int64", "int16")]
    lossless = [other for other in dtypes if torch.promote_types(other, value.dtype) == other]
    floats = {torch.int32: (torch.float64,), torch.int64: ()}.get(value.dtype, lossless)
    return rng.choice(
        [other for other in lossless if not other.is_floating_point or other in floats]
    )


@pytest.mark.parametrize("first", range(0, SEEDS, 100))
def test_reversed_steps_are_simplified_to_the_tensor_itself(first: int) -> None:
    for seed in range(first, first + 100):
        rng = random.Random(seed)
        values = leaves(rng)
        simplifier = Simplifier({name: value.to("meta") for name, value in values.items()})
        node: Expression = Ref("a")
        undone: list[Undo] = []
        for _ in range(rng.randint(1, 4)):
            node, undo = reversible_step(rng, node, evaluate(node, values.__getitem__))
            undone.append(undo)
        for undo in reversed(undone):
            node = undo(node)
        assert simplifier.simplify(node) == Ref("a"), (seed, node)
