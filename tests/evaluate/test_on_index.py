"""Operators on the index give the values that torch computes, and leave everything else to
torch.
"""

from __future__ import annotations

import random

import pytest
import torch

import ckpttool
from ckpttool.core.checkpoint import ExtraEntry, Span, TensorEntry
from ckpttool.core.expression import Argument, Expression, Op, Ref, Special
from ckpttool.evaluate import ops, torch_eval
from ckpttool.evaluate.ops import ROW_MAJOR
from ckpttool.operands.checkpoint import model_section
from surroundings import limited

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TensorEntry | ExtraEntry]:
    path = tmp_path_factory.mktemp("moved") / "in.pt"
    whole = torch.arange(60.0).reshape(3, 4, 5)
    state = {
        "a": whole,
        "b": whole + 60,
        "t": whole.mT,
        "half": whole.half(),
        "row": whole[:1],
        "s": torch.tensor(1.0),
    }
    torch.save({**state, "sparse": torch.eye(2).to_sparse(), "number": 3}, path)
    return dict(model_section(ckpttool.open_checkpoint(str(path))).by_key())


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
EXPRESSIONS = {
    "rows": narrow(A, 0, 1, 2),
    "columns": narrow(A, 2, 1, 3),
    "rows of a strided tensor": narrow(T, 0, 1, 2),
    "no rows": narrow(A, 0, 3, 0),
    "rows in a new storage": clone(narrow(A, 0, 1, 2)),
    "a shape": reshape(narrow(A, 0, 1, 2), 2, 20),
    "a scalar": reshape(Ref("s"), 1, 1),
    "end to end": cat(0, narrow(B, 0, 1, 1), A),
    "along the first dimension larger than one": cat(1, ROW, ROW),
    "end to end, without a dimension": Op("aten.cat.default", ((A, B),)),
    "a selected row": Op("aten.select.int", (A, 0, 2)),
    "a selected column": Op("aten.select.int", (A, 1, 3)),
    "stacked": Op("aten.stack.default", ((A, B, A), 0)),
    "stacked scalars": Op("aten.stack.default", ((Ref("s"), Ref("s")), 0)),
    "stacked after a dimension of size one": Op("aten.stack.default", ((ROW, ROW), 1)),
    "a range": Op("aten.slice.Tensor", (A, 0, 1, 9223372036854775807)),
    "a range of columns": Op("aten.slice.Tensor", (A, 1, 1, 3)),
    "a range past the end": Op("aten.slice.Tensor", (A, 0, 5, 9)),
    "a part": Op("getitem", (Op("aten.split.Tensor", (A, 2)), 1)),
    "a part of the columns": Op("getitem", (Op("aten.split.Tensor", (A, 3, 2)), 1)),
    "a part of a given size": Op("getitem", (Op("aten.split_with_sizes.default", (A, (1, 2))), 1)),
    "a chunk": Op("getitem", (Op("aten.chunk.default", (A, 2)), 1)),
    "a copy of a strided tensor": clone(T),
    "permuted": clone(Op("aten.permute.default", (A, (2, 0, 1)))),
    "a cast": cast(A, "bfloat16"),
    "a cast of a strided tensor": cast(T, "float64"),
    "a cast of a cast": cast(cast(T, "float16"), "bfloat16"),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_values_on_the_index_match_torch(
    entries: dict[str, TensorEntry | ExtraEntry], name: str
) -> None:
    entry, expected = (
        ops.on_index("x", EXPRESSIONS[name], entries),
        torch_eval.entry_of("x", EXPRESSIONS[name], entries),
    )
    assert entry is not None
    assert (entry.key, entry.dtype, entry.shape) == ("x", expected.dtype, expected.shape)
    assert torch.equal(torch_eval.load(entry), torch_eval.load(expected))


def test_a_clone_is_a_span_in_its_own_storage(entries: dict[str, TensorEntry | ExtraEntry]) -> None:
    entry = ops.on_index("x", clone(narrow(A, 0, 1, 2)), entries)
    assert entry is not None
    assert isinstance(entry.storage.data, Span)
    assert (entry.offset, entry.storage.nbytes) == (0, 2 * 20 * 4)


LEFT_TO_TORCH = {
    "past the end": narrow(A, 0, 2, 2),
    "before the beginning": narrow(A, 0, -1, 1),
    "a negative length": narrow(A, 0, 1, -1),
    "a missing dimension": narrow(A, 3, 0, 1),
    "a negative dimension": narrow(A, -1, 0, 1),
    "another number of elements": reshape(A, 7),
    "an inferred size": reshape(A, -1),
    "a reshape of a strided tensor": reshape(T, 60),
    "not end to end": cat(1, A, B),
    "of two dtypes": cat(0, A, Ref("half")),
    "of two shapes": cat(0, A, narrow(B, 2, 0, 1)),
    "of no tensors": cat(0),
    "of scalars": cat(0, Ref("s"), Ref("s")),
    "of a sparse tensor": clone(Ref("sparse")),
    "stacked along another dimension": Op("aten.stack.default", ((A, B), 1)),
    "a missing row": Op("aten.select.int", (A, 0, 3)),
    "a row from the end": Op("aten.select.int", (A, 0, -1)),
    "a range with steps": Op("aten.slice.Tensor", (A, 0, 0, 3, 2)),
    "a range from the end": Op("aten.slice.Tensor", (A, 0, -2, 3)),
    "too many dimensions": Op("aten.permute.default", (A, (0, 1, 2, None))),
    "an inferred size of one element": reshape(Ref("s"), -1),
    "a part of negative size": Op(
        "getitem", (Op("aten.split_with_sizes.default", (A, (2, -1, 2))), 2)
    ),
    "a part along a missing dimension": Op("getitem", (Op("aten.split.Tensor", (A, 2, 3)), 0)),
    "a missing part": Op("getitem", (Op("aten.split.Tensor", (A, 2)), 2)),
    "a part from the end": Op("getitem", (Op("aten.split.Tensor", (A, 2)), -1)),
    "parts of size zero": Op("getitem", (Op("aten.split.Tensor", (A, 0)), 0)),
    "parts that do not add up": Op(
        "getitem", (Op("aten.split_with_sizes.default", (A, (1, 1))), 0)
    ),
    "zero chunks": Op("getitem", (Op("aten.chunk.default", (A, 0)), 0)),
    "another operator": Op("aten.neg.default", (A,)),
    "a cast to integers": cast(A, "int64"),
    "a cast to eight bits": cast(A, "float8_e5m2"),
    "a part of an invalid size": Op("getitem", (Op("aten.split.Tensor", (A, "2")), 0)),
    "a chunk of an invalid number": Op("getitem", (Op("aten.chunk.default", (A, "2")), 0)),
    "sizes that are a number": Op("getitem", (Op("aten.split_with_sizes.default", (A, 3)), 0)),
    "sizes that are text": Op("getitem", (Op("aten.split_with_sizes.default", (A, ("1", 2))), 0)),
    "parts of an invalid dimension": Op("getitem", (Op("aten.split.Tensor", (A, 2, "0")), 0)),
    "parts without a size": Op("getitem", (Op("aten.split.Tensor", (A,)), 0)),
    "parts with too many arguments": Op("getitem", (Op("aten.split.Tensor", (A, 2, 0, 0)), 0)),
    "a shape of text": Op("aten.reshape.default", (A, ("60",))),
    "of a number": narrow(Ref("number"), 0, 0, 0),
    "no arguments": Op("aten.narrow.default", ()),
}


@pytest.mark.parametrize("name", LEFT_TO_TORCH)
def test_other_operators_are_left_to_torch(
    entries: dict[str, TensorEntry | ExtraEntry], name: str
) -> None:
    assert ops.on_index("x", LEFT_TO_TORCH[name], entries) is None


def apply_valid(
    chance: random.Random, node: Expression, value: torch.Tensor
) -> tuple[Expression, torch.Tensor]:
    """Apply a random valid operator to the node, and to its value with torch."""
    dim = chance.randrange(value.dim())
    length = value.shape[dim]
    start, end = sorted(chance.choices(range(length + 1), k=2))
    kind = chance.choice(
        [
            "narrow",
            "slice",
            "permute",
            "clone",
            "sizes",
            *["select", "split", "chunk"] * bool(length),
        ]
    )
    at = () if dim == 0 and chance.random() < 0.5 else (dim,)
    if kind == "narrow":
        return narrow(node, dim, start, end - start), value.narrow(dim, start, end - start)
    if kind == "slice":
        end += chance.choice([0, 0, 9])
        return Op("aten.slice.Tensor", (node, dim, start, end)), torch.ops.aten.slice(
            value, dim, start, end
        )
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


def test_random_valid_expressions_match_torch(entries: dict[str, TensorEntry | ExtraEntry]) -> None:
    for seed in range(200):
        chance = random.Random(seed)
        node: Expression = chance.choice([A, T])
        start = entries[node.key]
        assert isinstance(start, TensorEntry)
        value = torch_eval.load(start)
        for _ in range(3):
            if value.dim():
                node, value = apply_valid(chance, node, value)
        entry = ops.on_index("x", node, entries)
        assert entry is not None, node
        assert (entry.shape, torch.equal(torch_eval.load(entry), value)) == (
            tuple(value.shape),
            True,
        ), node


def random_expression(chance: random.Random, depth: int = 2) -> Expression:
    """Return a random expression, whose arguments may be invalid."""
    if not depth or chance.random() < 0.2:
        return Ref(chance.choice(["a", "b", "t", "row", "row", "s"]))
    of, other = random_expression(chance, depth - 1), random_expression(chance, depth - 1)
    n, dim, *more = (chance.randint(-1, 5) for _ in range(6))
    order = tuple(chance.sample(range(-1, 4), chance.randint(1, 4)))
    shape = chance.choice([(60,), (4, 15), (-1, 5), (1, 20), (20, 1), (3, 0), (n, dim)])
    way = chance.choice(["split.Tensor", "chunk.default", "split_with_sizes.default"])
    cut = (
        tuple(more[: chance.randint(1, 3)]) if "sizes" in way else n,
        *[dim] * chance.randint(0, 1),
    )
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


def test_random_expressions_match_torch_or_are_left_to_it(
    entries: dict[str, TensorEntry | ExtraEntry],
) -> None:
    moved = 0
    for seed in range(1500):
        node = random_expression(random.Random(seed))
        entry = None if isinstance(node, Ref) else ops.on_index("x", node, entries)
        if entry is not None:
            moved += 1
            expected = torch_eval.entry_of("x", node, entries)
            assert (entry.dtype, entry.shape) == (expected.dtype, expected.shape), node
            assert torch.equal(torch_eval.load(entry), torch_eval.load(expected)), node
    assert moved > 100


def test_results_beyond_the_limits_are_left_to_torch(
    entries: dict[str, TensorEntry | ExtraEntry],
) -> None:
    """The limit is twice the 240 bytes read, and each tensor counts once. Torch reports larger
    results.
    """
    with limited(made_bytes=1, made_times=2, made_parts=4):
        assert ops.on_index("w", cat(0, A, A), entries) is not None
        assert ops.on_index("w", cat(0, A, A, A), entries) is None
        assert ops.on_index("w", cat(0, A, B, A, B), entries) is not None
        fours = Op("aten.split.Tensor", (reshape(A, 60), 15))
        fives = Op("aten.split.Tensor", (reshape(A, 60), 14))
        assert ops.on_index("w", Op("getitem", (fours, 3)), entries) is not None
        assert ops.on_index("w", Op("getitem", (fives, 4)), entries) is None
