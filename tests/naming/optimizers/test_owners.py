"""Whose state ids are, where nothing in the file says it: the order of the model, where one way of it alone fits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product

import pytest

from ckpttool.checkpoint import Span, Storage, TensorEntry
from ckpttool.errors import Refused
from ckpttool.names import Names, RuntimeTensor
from ckpttool.naming.optimizers.ids import owners
from ckpttool.optimizer_state import ID, OptimizerState, Param, ParamGroup

Shape = tuple[int, ...]
SHAPES: tuple[Shape, ...] = ((2,), (3,), (2, 2))
STORAGE = Storage(Span("o.pt", 0, 64))


def model(shapes: Sequence[Shape], trainable: Sequence[bool]) -> Names:
    runtime = (
        RuntimeTensor(f"p{at}", f"p{at}", "parameter", True, own, "float32", shape, None)
        for at, (shape, own) in enumerate(zip(shapes, trainable))
    )
    return Names("net.py:Net", "2.6", tuple(runtime), (), ())


def optimizer(groups: Sequence[Sequence[int]], shapes: Sequence[Shape | None]) -> OptimizerState:
    """Groups of ids, and a moment of its shape for each that has one."""
    moments: dict[Param, dict[str, TensorEntry]] = {
        number: {"exp_avg": TensorEntry("", "float32", shape, (1,) * len(shape), 0, STORAGE)}
        for number, shape in enumerate(shapes)
        if shape is not None
    }
    return OptimizerState(ID, tuple(ParamGroup(tuple(group), {}) for group in groups), moments)


def deals(sizes: Sequence[int], order: Sequence[Shape], moments: Sequence[Shape | None]) -> list[dict[int, int]]:
    """Every way to give the parameters in their order to groups of these sizes that the moments allow: id -> place."""
    starts = [sum(sizes[:group]) for group in range(len(sizes))]
    found = []
    for homes in product(range(len(sizes)), repeat=len(order)):
        if [homes.count(group) for group in range(len(sizes))] == list(sizes):
            deal = {starts[home] + homes[:at].count(home): at for at, home in enumerate(homes)}
            if all(moments[number] in (None, order[at]) for number, at in deal.items()):
                found.append(deal)
    return found


def test_ids_are_told_apart_exactly_where_one_order_alone_fits() -> None:
    ways = []
    for seed in range(400):
        chance = random.Random(seed)
        shapes = [chance.choice(SHAPES) for _ in range(chance.randint(2, 6))]
        trainable = [chance.random() < 0.7 for _ in shapes]
        every = chance.random() < 0.5
        order = [at for at, own in enumerate(trainable) if own or every]
        if not order:
            continue
        homes = [chance.randrange(3) for _ in order]
        dealt = [at for group in range(3) for at, home in zip(order, homes) if home == group]
        if chance.random() < 0.4:
            chance.shuffle(dealt)
        moments = [shapes[at] if chance.random() < 0.8 else None for at in dealt]
        sizes = [homes.count(group) for group in range(3)]
        numbers = iter(range(len(order)))
        state = optimizer([[next(numbers) for _ in range(size)] for size in sizes], moments)
        possible = deals(sizes, [shapes[at] for at in order], moments)
        names = model(shapes, trainable)
        if len([size for size in sizes if size]) == 1:
            found = owners(state, names, "optimizer")
            assert found.names == {number: f"p{at}" for number, at in enumerate(order)}
            assert (found.doubt is None) == bool(possible), seed
            assert found.assumed
            assert "this answer rests on that" in found.rests_on("optimizer")
            continue
        ways.append(min(len(possible), 2))
        if len(possible) == 1:
            found = owners(state, names, "optimizer").settled("optimizer")
            assert found.names == {number: f"p{order[at]}" for number, at in possible[0].items()}, seed
            continue
        with pytest.raises(Refused, match="cannot be told apart" if possible else "fit no order"):
            owners(state, names, "optimizer")
    assert min(map(ways.count, range(3))) > 20


def test_parameters_of_another_number_are_none_of_the_model() -> None:
    names = model([(2,)] * 4, [True, True, False, True])
    for count in (2, 5):
        with pytest.raises(Refused, match=f"has {count} parameters, and the model 4, 3 of them trainable"):
            owners(optimizer([range(count)], [None] * count), names, "optimizer")
