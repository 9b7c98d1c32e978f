"""Expressions that only move or cast elements: the values are torch's, and torch is not imported."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttool import Refused
from computed import by_torch, cast, cat, clone, computed, item, narrow, reshape, save
from expressions import same_bits
from names_files import Json, operator, ref
from surroundings import limited
from torchless import torchless

torch.set_num_threads(1)
WHOLE = torch.arange(60.0).reshape(3, 4, 5)
TENSORS = {
    "a": WHOLE,
    "b": WHOLE + 60,
    "t": (WHOLE + 120).mT,
    "half": WHOLE.half(),
    "row": WHOLE[:1].clone(),
    "s": torch.tensor(1.0),
}
A, B, T, ROW = ref("a"), ref("b"), ref("t"), ref("row")
MAX = 9223372036854775807
MOVED: dict[str, Json] = {
    "rows": narrow(A, 0, 1, 2),
    "columns": narrow(A, 2, 1, 3),
    "rows of a strided tensor": narrow(T, 0, 1, 2),
    "no rows": narrow(A, 0, 3, 0),
    "rows in a new storage": clone(narrow(A, 0, 1, 2)),
    "a shape": reshape(narrow(A, 0, 1, 2), 2, 20),
    "a scalar": reshape(ref("s"), 1, 1),
    "end to end": cat(0, narrow(B, 0, 1, 1), A),
    "along the first dimension larger than one": cat(1, ROW, ROW),
    "end to end, without a dimension": operator("aten.cat.default", [A, B]),
    "a selected row": operator("aten.select.int", A, 0, 2),
    "a selected column": operator("aten.select.int", A, 1, 3),
    "stacked": operator("aten.stack.default", [A, B, A], 0),
    "stacked scalars": operator("aten.stack.default", [ref("s"), ref("s")], 0),
    "stacked after a dimension of size one": operator("aten.stack.default", [ROW, ROW], 1),
    "a range": operator("aten.slice.Tensor", A, 0, 1, MAX),
    "a range of columns": operator("aten.slice.Tensor", A, 1, 1, 3),
    "a range past the end": operator("aten.slice.Tensor", A, 0, 5, 9),
    "a part": item(operator("aten.split.Tensor", A, 2), 1),
    "a part of the columns": item(operator("aten.split.Tensor", A, 3, 2), 1),
    "a part of a given size": item(operator("aten.split_with_sizes.default", A, [1, 2]), 1),
    "a chunk": item(operator("aten.chunk.default", A, 2), 1),
    "a copy of a strided tensor": clone(T),
    "permuted": clone(operator("aten.permute.default", A, [2, 0, 1])),
    "a cast": cast(A, "bfloat16"),
    "a cast of a strided tensor": cast(T, "float64"),
    "a cast of a cast": cast(cast(T, "float16"), "bfloat16"),
}


def test_values_are_those_of_torch(tmp_path: Path) -> None:
    found = computed(TENSORS, MOVED, tmp_path)
    wrong = [name for name in MOVED if not same_bits(found[name], by_torch(MOVED[name], TENSORS))]
    assert wrong == []


def test_torch_is_not_imported(tmp_path: Path) -> None:
    line = save(TENSORS, MOVED, tmp_path)
    with torchless() as process:
        answer = process.run(" ".join(line), tmp_path)
    assert (answer.done.status, answer.torch) == (0, False), answer.done
    found = torch.load(tmp_path / "computed.pt")
    assert all(same_bits(found[name], by_torch(MOVED[name], TENSORS)) for name in MOVED)


DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.int64, torch.int8, torch.uint8, torch.uint16, torch.bool, torch.complex64),
]


def test_elements_of_strided_views_are_read_for_every_dtype(tmp_path: Path) -> None:
    views: dict[str, torch.Tensor] = {}
    for dtype in DTYPES:
        whole = (torch.arange(24).reshape(4, 6) % 2).to(dtype)
        strided = (whole, whole.t(), whole[1:3, ::2], whole[2, 3], whole[:0])
        views |= {f"{dtype} {at}": view for at, view in enumerate(strided)}
    found = computed(views, {name: clone(ref(name)) for name in views}, tmp_path)
    assert [name for name, view in views.items() if not same_bits(found[name], view)] == []


VIEWS: dict[str, tuple[Json, bool]] = {
    "a transpose": (operator("aten.permute.default", A, [0, 2, 1]), True),
    "a part": (item(operator("aten.split.Tensor", A, 2), 1), True),
    "a range with steps": (operator("aten.slice.Tensor", A, 0, 0, 3, 2), True),
    "a reshape that must copy": (
        reshape(operator("aten.permute.default", A, [0, 2, 1]), 60),
        False,
    ),
    "a copy": (clone(A), False),
    "another value": (operator("aten.neg.default", A), False),
}


def test_views_stay_in_the_storage_of_their_tensor(tmp_path: Path) -> None:
    sources = {"whole": A, **{name: source for name, (source, _) in VIEWS.items()}}
    found = computed(TENSORS, sources, tmp_path)
    memory = found["whole"].untyped_storage().data_ptr()
    for name, (source, is_view) in VIEWS.items():
        assert same_bits(found[name], by_torch(source, TENSORS)), name
        assert (found[name].untyped_storage().data_ptr() == memory) == is_view, name


def test_a_tensor_that_is_used_twice_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, read = torch.ones(1 << 20), os.preadv
    counts: list[int] = []

    def counted(descriptor: int, buffers: Any, offset: int) -> int:
        counts.append(read(descriptor, buffers, offset))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", counted)
    negative = operator("aten.neg.default", ref("x"))
    computed({"x": x}, {"k": operator("aten.add.Tensor", negative, ref("x"))}, tmp_path)
    assert x.nbytes <= sum(counts) < 1.5 * x.nbytes


def apply_valid(chance: random.Random, node: Json, value: torch.Tensor) -> Json:
    """Return a random valid operator on the node, whose value is given."""
    dim = chance.randrange(value.dim())
    length = value.shape[dim]
    start, end = sorted(chance.choices(range(length + 1), k=2))
    kinds = ["narrow", "slice", "permute", "clone", "sizes"]
    kind = chance.choice([*kinds, *["select", "split", "chunk"] * bool(length)])
    at = () if dim == 0 and chance.random() < 0.5 else (dim,)
    if kind == "narrow":
        return narrow(node, dim, start, end - start)
    if kind == "slice":
        return operator("aten.slice.Tensor", node, dim, start, end + chance.choice([0, 0, 9]))
    if kind == "permute":
        order = chance.sample(range(value.dim()), value.dim())
        return operator("aten.permute.default", node, order)
    if kind == "clone":
        return clone(node)
    if kind == "select":
        return operator("aten.select.int", node, dim, chance.randrange(length))
    if kind == "sizes":
        sizes = [start, end - start, length - end]
        cut = operator("aten.split_with_sizes.default", node, sizes, *at)
        return item(cut, chance.randrange(3))
    size = chance.randint(1, length + 1)
    name = "aten.split.Tensor" if kind == "split" else "aten.chunk.default"
    cut = operator(name, node, size, *at)
    return item(cut, chance.randrange(len(by_torch(cut, TENSORS))))


def test_random_chains_are_moved_as_torch_does_without_torch(tmp_path: Path) -> None:
    chains: dict[str, Json] = {}
    for seed in range(200):
        chance = random.Random(seed)
        node: Json = chance.choice([A, T])
        for _ in range(3):
            value = by_torch(node, TENSORS)
            if value.dim():
                node = apply_valid(chance, node, value)
        chains[f"k{seed}"] = node
    line = save(TENSORS, chains, tmp_path)
    with torchless() as process:
        answer = process.run(" ".join(line), tmp_path)
    assert (answer.done.status, answer.torch) == (0, False), answer.done
    found = torch.load(tmp_path / "computed.pt")
    expected = {name: by_torch(node, TENSORS) for name, node in chains.items()}
    assert [name for name in chains if not same_bits(found[name], expected[name])] == []


def random_expression(chance: random.Random, depth: int = 2) -> Json:
    """Return a random expression, whose arguments may be invalid."""
    if not depth or chance.random() < 0.2:
        return ref(chance.choice(["a", "b", "t", "row", "row", "s"]))
    of, other = random_expression(chance, depth - 1), random_expression(chance, depth - 1)
    n, dim, *more = (chance.randint(-1, 5) for _ in range(6))
    order = chance.sample(range(-1, 4), chance.randint(1, 4))
    shape = chance.choice([(60,), (4, 15), (-1, 5), (1, 20), (20, 1), (3, 0), (n, dim)])
    way = chance.choice(["split.Tensor", "chunk.default", "split_with_sizes.default"])
    size: Any = more[: chance.randint(1, 3)] if "sizes" in way else n
    cut = (size, *[dim] * chance.randint(0, 1))
    return chance.choice(
        [
            narrow(of, dim, n, more[0]),
            operator("aten.slice.Tensor", of, dim, n, more[0]),
            operator("aten.select.int", of, dim, n),
            item(operator(f"aten.{way}", of, *cut), chance.randint(-1, 3)),
            operator("aten.permute.default", of, order),
            reshape(of, *shape),
            clone(of),
            operator("aten.clone.default", of),
            cat(dim, of, *chance.choice([(), (of,), (other,)])),
            operator("aten.stack.default", [of, chance.choice([of, other])], dim),
        ]
    )


INVALID: dict[str, Json] = {
    "past the end": narrow(A, 0, 2, 2),
    "a negative length": narrow(A, 0, 1, -1),
    "a missing dimension": narrow(A, 3, 0, 1),
    "another number of elements": reshape(A, 7),
    "of two shapes": cat(0, A, narrow(B, 2, 0, 1)),
    "of no tensors": cat(0),
    "of scalars": cat(0, ref("s"), ref("s")),
    "a missing row": operator("aten.select.int", A, 0, 3),
    "too many dimensions": operator("aten.permute.default", A, [0, 1, 2, None]),
    "a part of negative size": item(operator("aten.split_with_sizes.default", A, [2, -1, 2]), 2),
    "a part along a missing dimension": item(operator("aten.split.Tensor", A, 2, 3), 0),
    "a missing part": item(operator("aten.split.Tensor", A, 2), 2),
    "a part from the end": item(operator("aten.split.Tensor", A, 2), -1),
    "parts of size zero": item(operator("aten.split.Tensor", A, 0), 0),
    "parts that do not add up": item(operator("aten.split_with_sizes.default", A, [1, 1]), 0),
    "zero chunks": item(operator("aten.chunk.default", A, 0), 0),
    "a part of an invalid size": item(operator("aten.split.Tensor", A, "2"), 0),
    "a chunk of an invalid number": item(operator("aten.chunk.default", A, "2"), 0),
    "sizes that are a number": item(operator("aten.split_with_sizes.default", A, 3), 0),
    "sizes that are text": item(operator("aten.split_with_sizes.default", A, ["1", 2]), 0),
    "parts of an invalid dimension": item(operator("aten.split.Tensor", A, 2, "0"), 0),
    "parts without a size": item(operator("aten.split.Tensor", A), 0),
    "parts with too many arguments": item(operator("aten.split.Tensor", A, 2, 0, 0), 0),
    "a shape of text": operator("aten.reshape.default", A, ["60"]),
    "no arguments": operator("aten.narrow.default"),
}
BY_TORCH: dict[str, Json] = {
    "before the beginning": narrow(A, 0, -1, 1),
    "a negative dimension": narrow(A, -1, 0, 1),
    "an inferred size": reshape(A, -1),
    "a reshape of a strided tensor": reshape(T, 60),
    "not end to end": cat(1, A, B),
    "of two dtypes": cat(0, A, ref("half")),
    "stacked along another dimension": operator("aten.stack.default", [A, B], 1),
    "a row from the end": operator("aten.select.int", A, 0, -1),
    "a range with steps": operator("aten.slice.Tensor", A, 0, 0, 3, 2),
    "a range from the end": operator("aten.slice.Tensor", A, 0, -2, 3),
    "an inferred size of one element": reshape(ref("s"), -1),
    "another operator": operator("aten.neg.default", A),
    "a cast to integers": cast(A, "int64"),
    "a cast to eight bits": cast(A, "float8_e5m2"),
}


def test_other_expressions_have_the_values_of_torch(tmp_path: Path) -> None:
    found = computed(TENSORS, BY_TORCH, tmp_path)
    expected = {name: by_torch(source, TENSORS) for name, source in BY_TORCH.items()}
    assert [name for name in BY_TORCH if not same_bits(found[name], expected[name])] == []


def refused_keys(sources: dict[str, Json], folder: Path) -> list[str]:
    with pytest.raises(Refused, match="some values cannot be computed") as refused:
        computed(TENSORS, sources, folder)
    assert all("does not fit" in problem.problem for problem in refused.value.problems)
    return [problem.key for problem in refused.value.problems]


def test_invalid_arguments_are_refused_together(tmp_path: Path) -> None:
    assert refused_keys({**INVALID, **BY_TORCH, **MOVED}, tmp_path) == list(INVALID)


def test_random_expressions_are_refused_if_torch_refuses_them(tmp_path: Path) -> None:
    sources = {f"k{seed}": random_expression(random.Random(seed)) for seed in range(800)}
    expected: dict[str, torch.Tensor] = {}
    for name, source in sources.items():
        try:
            expected[name] = by_torch(source, TENSORS)
        except (RuntimeError, IndexError, TypeError):
            continue
    assert refused_keys(sources, tmp_path) == [name for name in sources if name not in expected]
    found = computed(TENSORS, {name: sources[name] for name in expected}, tmp_path)
    assert [name for name, value in expected.items() if not same_bits(found[name], value)] == []


@pytest.mark.parametrize(
    ("entry", "problem"), [(torch.eye(2).to_sparse(), "sparse_coo"), (3, "not a tensor")]
)
def test_an_operator_on_another_entry_than_a_dense_tensor_is_refused(
    entry: Any, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(Refused) as refused:
        computed({"a": torch.ones(2, 2), "x": entry}, {"k": clone(ref("x"))}, tmp_path)
    assert problem in str(refused.value.problems[0])


def test_results_beyond_the_limits_are_refused(tmp_path: Path) -> None:
    """Twice the bytes that are read may be made, of four parts."""
    many = reshape(A, 60)
    within = {
        "twice": cat(0, A, A),
        "two tensors twice": cat(0, A, B, A, B),
        "of four": item(operator("aten.split.Tensor", many, 15), 3),
    }
    beyond = {
        "three times": cat(0, A, A, A),
        "of five": item(operator("aten.split.Tensor", many, 14), 4),
    }
    with limited(made_bytes=1, made_times=2, made_parts=4):
        computed(TENSORS, within, tmp_path)
        with pytest.raises(Refused) as refused:
            computed(TENSORS, {**within, **beyond}, tmp_path)
    assert [problem.key for problem in refused.value.problems] == list(beyond)
