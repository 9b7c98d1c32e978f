"""Operators on the index give the values that torch computes, and leave to torch what does not fit."""

from __future__ import annotations

import random

import pytest
import torch

from ckpttool.core.checkpoint import ExtraEntry, Span, TensorEntry
from ckpttool.core.expression import Argument, Expression, Op, Ref, Special
from ckpttool.core.limits import Limits, limited
from ckpttool.evaluate import ops, torch_eval
from ckpttool.evaluate.ops import ROW_MAJOR
from ckpttool.operands.checkpoint import model_section, open_operand

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def have(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TensorEntry | ExtraEntry]:
    path = tmp_path_factory.mktemp("moved") / "in.pt"
    whole = torch.arange(60.0).reshape(3, 4, 5)
    state = {"a": whole, "b": whole + 60, "t": whole.mT, "half": whole.half(), "row": whole[:1], "s": torch.tensor(1.0)}
    torch.save({**state, "sparse": torch.eye(2).to_sparse(), "number": 3}, path)
    return model_section(open_operand(str(path))).by_key()


def narrow(source: Expression, *args: int) -> Op:
    return Op("aten.narrow.default", (source, *args))


def clone(source: Expression) -> Op:
    return Op("aten.clone.default", (source,), ROW_MAJOR)


def cast(source: Expression, dtype: str) -> Op:
    return Op("aten._to_copy.default", (source,), (("dtype", Special("dtype", dtype)),))


def reshape(source: Expression, *shape: int) -> Op:
    return Op("aten.reshape.default", (source, shape))


def cat(dim: Argument, *sources: Expression) -> Op:
    return Op("aten.cat.default", (sources, dim))


A, B, T, ROW = Ref("a"), Ref("b"), Ref("t"), Ref("row")
MOVED = {
    "rows": narrow(A, 0, 1, 2),
    "columns": narrow(A, 2, 1, 3),
    "rows of a strided tensor": narrow(T, 0, 1, 2),
    "no rows": narrow(A, 0, 3, 0),
    "rows in a new storage": clone(narrow(A, 0, 1, 2)),
    "a shape": reshape(narrow(A, 0, 1, 2), 2, 20),
    "a scalar": reshape(Ref("s"), 1, 1),
    "end to end": cat(0, narrow(B, 0, 1, 1), A),
    "along the first that is more than one": cat(1, ROW, ROW),
    "end to end, as torch is called without a dimension": Op("aten.cat.default", ((A, B),)),
    "a slice of one": Op("aten.select.int", (A, 0, 2)),
    "a column of one": Op("aten.select.int", (A, 1, 3)),
    "stacked": Op("aten.stack.default", ((A, B, A), 0)),
    "stacked scalars": Op("aten.stack.default", ((Ref("s"), Ref("s")), 0)),
    "stacked behind what is one": Op("aten.stack.default", ((ROW, ROW), 1)),
    "a range": Op("aten.slice.Tensor", (A, 0, 1, 9223372036854775807)),
    "a range of columns": Op("aten.slice.Tensor", (A, 1, 1, 3)),
    "a range behind the end": Op("aten.slice.Tensor", (A, 0, 5, 9)),
    "a part": Op("getitem", (Op("aten.split.Tensor", (A, 2)), 1)),
    "a part of the columns": Op("getitem", (Op("aten.split.Tensor", (A, 3, 2)), 1)),
    "a part of some size": Op("getitem", (Op("aten.split_with_sizes.default", (A, (1, 2))), 1)),
    "a chunk": Op("getitem", (Op("aten.chunk.default", (A, 2)), 1)),
    "a copy of what is strided": clone(T),
    "turned": clone(Op("aten.permute.default", (A, (2, 0, 1)))),
    "a cast": cast(A, "bfloat16"),
    "a cast of what is strided": cast(T, "float64"),
    "a cast of what was cast": cast(cast(T, "float16"), "bfloat16"),
}


@pytest.mark.parametrize("name", MOVED)
def test_moved_values_match_torch(have: dict[str, TensorEntry | ExtraEntry], name: str) -> None:
    entry, expected = ops.on_index("x", MOVED[name], have), torch_eval.entry_of("x", MOVED[name], have)
    assert entry is not None
    assert (entry.key, entry.dtype, entry.shape) == ("x", expected.dtype, expected.shape)
    assert torch.equal(torch_eval.load(entry), torch_eval.load(expected))


def test_clones_are_spans_in_their_own_storage(have: dict[str, TensorEntry | ExtraEntry]) -> None:
    entry = ops.on_index("x", clone(narrow(A, 0, 1, 2)), have)
    assert entry is not None
    assert isinstance(entry.storage.data, Span)
    assert (entry.offset, entry.storage.nbytes) == (0, 2 * 20 * 4)


LEFT_TO_TORCH = {
    "behind the end": narrow(A, 0, 2, 2),
    "before the beginning": narrow(A, 0, -1, 1),
    "a negative length": narrow(A, 0, 1, -1),
    "no such dimension": narrow(A, 3, 0, 1),
    "a negative dimension": narrow(A, -1, 0, 1),
    "another number of elements": reshape(A, 7),
    "a size to find": reshape(A, -1),
    "a shape of what is strided": reshape(T, 60),
    "not end to end": cat(1, A, B),
    "of two dtypes": cat(0, A, Ref("half")),
    "of two shapes": cat(0, A, narrow(B, 2, 0, 1)),
    "of nothing": cat(0),
    "of scalars": cat(0, Ref("s"), Ref("s")),
    "of a sparse tensor": clone(Ref("sparse")),
    "stacked along what is not the first": Op("aten.stack.default", ((A, B), 1)),
    "no such slice": Op("aten.select.int", (A, 0, 3)),
    "a slice from the end": Op("aten.select.int", (A, 0, -1)),
    "a range with steps": Op("aten.slice.Tensor", (A, 0, 0, 3, 2)),
    "a range from the end": Op("aten.slice.Tensor", (A, 0, -2, 3)),
    "more dimensions than there are": Op("aten.permute.default", (A, (0, 1, 2, None))),
    "a size to find, of one element": reshape(Ref("s"), -1),
    "parts of less than nothing": Op("getitem", (Op("aten.split_with_sizes.default", (A, (2, -1, 2))), 2)),
    "a part of no dimension": Op("getitem", (Op("aten.split.Tensor", (A, 2, 3)), 0)),
    "no such part": Op("getitem", (Op("aten.split.Tensor", (A, 2)), 2)),
    "a part from the end": Op("getitem", (Op("aten.split.Tensor", (A, 2)), -1)),
    "parts of nothing": Op("getitem", (Op("aten.split.Tensor", (A, 0)), 0)),
    "parts of other sizes": Op("getitem", (Op("aten.split_with_sizes.default", (A, (1, 1))), 0)),
    "no chunks": Op("getitem", (Op("aten.chunk.default", (A, 0)), 0)),
    "another operator": Op("aten.neg.default", (A,)),
    "a cast to integers": cast(A, "int64"),
    "a cast to eight bits": cast(A, "float8_e5m2"),
    "a part of an invalid size": Op("getitem", (Op("aten.split.Tensor", (A, "2")), 0)),
    "a chunk of an invalid number": Op("getitem", (Op("aten.chunk.default", (A, "2")), 0)),
    "sizes that are one": Op("getitem", (Op("aten.split_with_sizes.default", (A, 3)), 0)),
    "sizes that are words": Op("getitem", (Op("aten.split_with_sizes.default", (A, ("1", 2))), 0)),
    "parts of an invalid dimension": Op("getitem", (Op("aten.split.Tensor", (A, 2, "0")), 0)),
    "parts without a size": Op("getitem", (Op("aten.split.Tensor", (A,)), 0)),
    "parts with too much": Op("getitem", (Op("aten.split.Tensor", (A, 2, 0, 0)), 0)),
    "a shape of words": Op("aten.reshape.default", (A, ("60",))),
    "of no tensor": narrow(Ref("number"), 0, 0, 0),
    "no arguments": Op("aten.narrow.default", ()),
}


@pytest.mark.parametrize("name", LEFT_TO_TORCH)
def test_other_operators_are_left_to_torch(have: dict[str, TensorEntry | ExtraEntry], name: str) -> None:
    assert ops.on_index("x", LEFT_TO_TORCH[name], have) is None


def valid(chance: random.Random, node: Expression, value: torch.Tensor) -> tuple[Expression, torch.Tensor]:
    """A part of the tensor, or its dimensions in another order, and what torch makes of it."""
    dim = chance.randrange(value.dim())
    length = value.shape[dim]
    start, end = sorted(chance.choices(range(length + 1), k=2))
    kind = chance.choice(["narrow", "slice", "permute", "clone", "sizes", *["select", "split", "chunk"] * bool(length)])
    at = () if dim == 0 and chance.random() < 0.5 else (dim,)
    if kind == "narrow":
        return narrow(node, dim, start, end - start), value.narrow(dim, start, end - start)
    if kind == "slice":
        end += chance.choice([0, 0, 9])
        return Op("aten.slice.Tensor", (node, dim, start, end)), torch.ops.aten.slice(value, dim, start, end)
    if kind == "permute":
        order = tuple(chance.sample(range(value.dim()), value.dim()))
        return Op("aten.permute.default", (node, order)), value.permute(order)
    if kind == "clone":
        return clone(node), value.contiguous()
    if kind == "select":
        index = chance.randrange(length)
        return Op("aten.select.int", (node, dim, index)), value.select(dim, index)
    if kind == "sizes":
        sizes = (start, end - start, length - end)
        number = chance.randrange(3)
        whole = Op("aten.split_with_sizes.default", (node, sizes, *at))
        return Op("getitem", (whole, number)), value.split(sizes, dim)[number]
    size = chance.randint(1, length + 1)
    parts = value.split(size, dim) if kind == "split" else value.chunk(size, dim)
    number = chance.randrange(len(parts))
    name = "aten.split.Tensor" if kind == "split" else "aten.chunk.default"
    return Op("getitem", (Op(name, (node, size, *at)), number)), parts[number]


def test_random_valid_expressions_match_torch(have: dict[str, TensorEntry | ExtraEntry]) -> None:
    for seed in range(400):
        chance = random.Random(seed)
        node: Expression = chance.choice([A, T])
        start = have[node.key]
        assert isinstance(start, TensorEntry)
        value = torch_eval.load(start)
        for _ in range(3):
            if value.dim():
                node, value = valid(chance, node, value)
        entry = ops.on_index("x", node, have)
        assert entry is not None, node
        assert (entry.shape, torch.equal(torch_eval.load(entry), value)) == (tuple(value.shape), True), node


def drawn(chance: random.Random, depth: int = 2) -> Expression:
    """An operator of the list on arguments that may fit, or not."""
    if not depth or chance.random() < 0.2:
        return Ref(chance.choice(["a", "b", "t", "row", "row", "s"]))
    of, other = drawn(chance, depth - 1), drawn(chance, depth - 1)
    n, dim, *more = (chance.randint(-1, 5) for _ in range(6))
    order = tuple(chance.sample(range(-1, 4), chance.randint(1, 4)))
    shape = chance.choice([(60,), (4, 15), (-1, 5), (1, 20), (20, 1), (3, 0), (n, dim)])
    way = chance.choice(["split.Tensor", "chunk.default", "split_with_sizes.default"])
    cut = (tuple(more[: chance.randint(1, 3)]) if "sizes" in way else n, *[dim] * chance.randint(0, 1))
    return chance.choice(
        [
            narrow(of, dim, n, more[0]),
            Op("aten.slice.Tensor", (of, dim, n, more[0])),
            Op("aten.select.int", (of, dim, n)),
            Op("getitem", (Op(f"aten.{way}", (of, *cut)), chance.randint(-1, 3))),
            Op("aten.permute.default", (of, order)),
            reshape(of, *shape),
            clone(of),
            Op("aten.clone.default", (of,)),
            cat(dim, of, *chance.choice([(), (of,), (other,)])),
            Op("aten.stack.default", ((of, chance.choice([of, other])), dim)),
        ]
    )


def test_random_expressions_match_torch_or_are_left_to_it(have: dict[str, TensorEntry | ExtraEntry]) -> None:
    moved = 0
    for seed in range(3000):
        node = drawn(random.Random(seed))
        entry = None if isinstance(node, Ref) else ops.on_index("x", node, have)
        if entry is not None:
            moved += 1
            expected = torch_eval.entry_of("x", node, have)
            assert (entry.dtype, entry.shape) == (expected.dtype, expected.shape), node
            assert torch.equal(torch_eval.load(entry), torch_eval.load(expected)), node
    assert moved > 200


def test_limits_on_the_index(have: dict[str, TensorEntry | ExtraEntry]) -> None:
    """Twice the 240 bytes that are read; each tensor counts once. Torch then reports what is too large."""
    with limited(Limits(made_bytes=1, made_times=2, made_parts=4)):
        assert ops.on_index("w", cat(0, A, A), have) is not None
        assert ops.on_index("w", cat(0, A, A, A), have) is None
        assert ops.on_index("w", cat(0, A, B, A, B), have) is not None
        fours = Op("aten.split.Tensor", (reshape(A, 60), 15))
        fives = Op("aten.split.Tensor", (reshape(A, 60), 14))
        assert ops.on_index("w", Op("getitem", (fours, 3)), have) is not None
        assert ops.on_index("w", Op("getitem", (fives, 4)), have) is None
