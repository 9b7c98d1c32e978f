"""Evaluation of expressions, with torch as the oracle; operators that are not functions of tensors
are refused.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttool import CkptError, Refused
from ckpttool.core.checkpoint import ExtraEntry, Lazy, Span, Storage, TensorEntry
from ckpttool.core.expression import Op, Ref, Special
from ckpttool.evaluate import torch_eval
from ckpttool.evaluate.torch_eval import evaluate
from files import content

torch.set_num_threads(1)
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.int8,
    torch.uint8, torch.uint16, torch.bool, torch.complex64,
]  # fmt: skip


def stored(tensor: torch.Tensor, folder: Path, key: str = "x") -> TensorEntry:
    """Write the complete storage of the tensor to a file, and return its entry."""
    path, skipped = folder / f"{key}.bin", 3
    storage = tensor.untyped_storage()
    path.write_bytes(b"-" * skipped + bytes(storage.tolist()))
    dtype = str(tensor.dtype).removeprefix("torch.")
    span = Span(str(path), skipped, storage.nbytes())
    return TensorEntry(
        key,
        dtype,
        tuple(tensor.shape),
        tensor.stride(),
        int(tensor.storage_offset()),
        Storage(span),
    )


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return (left.dtype, left.shape) == (right.dtype, right.shape) and torch_eval.same_bits(
        left, right
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_entries_keep_their_strides(tmp_path: Path, dtype: torch.dtype) -> None:
    whole = (torch.arange(24).reshape(4, 6) % 2).to(dtype)
    views = (whole, whole.t(), whole[1:3, ::2], whole[2, 3], whole[:0], whole[:1].expand(5, 6))
    for number, view in enumerate(views):
        entry = stored(view, tmp_path, f"x{number}")
        assert same(torch_eval.load(entry), view)
        assert bytes(torch_eval.to_bytes(torch_eval.load(entry))) == bytes(
            torch_eval.to_bytes(view)
        )


X = torch.arange(24, dtype=torch.float32).reshape(4, 6)
EXPRESSIONS: dict[str, tuple[Any, torch.Tensor]] = {
    "a transpose": (Op("aten.t.default", (Ref("x"),)), X.t()),
    "one of several results": (Op("getitem", (Op("aten.split.Tensor", (Ref("x"), 2)), 1)), X[2:]),
    "a join": (Op("aten.cat.default", ((Ref("x"), Ref("x")), 1)), torch.cat([X, X], 1)),
    "a cast": (Op("aten._to_copy.default", (Ref("x"),), (("dtype", Special("dtype", "bfloat16")),)), X.bfloat16()),
    "a cast to a device": (Op("aten._to_copy.default", (Ref("x"),), (("device", Special("device", "cuda")),)), X),
    "a constant": (Op("aten.cat.default", ((Ref("x"), Op("aten.full.default", ((1, 6), 2.0))),)),
                   torch.cat([X, torch.full((1, 6), 2.0)])),
    "a shape that depends on values": (Op("aten.nonzero.default", (Ref("x"),)), X.nonzero()),
    "a complex number": (Op("aten.mul.Scalar", (Ref("x"), Special("complex", "2j"))), X * 2j),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_expressions_match_torch(tmp_path: Path, name: str) -> None:
    source, expected = EXPRESSIONS[name]
    entry = torch_eval.entry_of("new", source, {"x": stored(X, tmp_path)})
    assert (entry.key, entry.shape, entry.dtype) == (
        "new",
        expected.shape,
        str(expected.dtype).removeprefix("torch."),
    )
    assert same(torch_eval.load(entry), expected.contiguous())


VIEWS: dict[str, tuple[Any, bool]] = {
    "a transpose": (Op("aten.t.default", (Ref("x"),)), True),
    "a part of a split": (Op("getitem", (Op("aten.split.Tensor", (Ref("x"), 2)), 1)), True),
    "other dtype, same bits": (Op("aten.view.dtype", (Ref("x"), Special("dtype", "int16"))), True),
    "a conjugate": (Op("aten._conj.default", (Op("aten.view_as_complex.default", (Op(
        "aten.reshape.default", (Ref("x"), (4, 3, 2))),)),)), False),
    "a negation": (Op("aten.imag.default", (Op("aten._conj.default", (Op("aten.view_as_complex.default", (Op(
        "aten.reshape.default", (Ref("x"), (4, 3, 2))),)),)),)), False),
    "a reshape that must copy": (Op("aten.reshape.default", (Op("aten.t.default", (Ref("x"),)), (24,))), False),
    "a copy": (Op("aten.clone.default", (Ref("x"),)), False),
}  # fmt: skip


@pytest.mark.parametrize("name", VIEWS)
def test_views_share_their_storage(tmp_path: Path, name: str) -> None:
    source, is_view = VIEWS[name]
    whole = stored(torch.cat([torch.zeros(1, 6), X])[1:], tmp_path)
    entry = torch_eval.entry_of("new", source, {"x": whole})
    assert (entry.storage is whole.storage) == is_view
    assert same(torch_eval.load(entry), evaluate(source, lambda key: X).resolve_conj().contiguous())


def test_a_computed_entry_is_lazy(tmp_path: Path) -> None:
    entry = stored(X, tmp_path)
    computed = torch_eval.entry_of("new", Op("aten.neg.default", (Ref("x"),)), {"x": entry})
    assert isinstance(computed.storage, Storage)
    assert isinstance(computed.storage.data, Lazy)
    (tmp_path / "x.bin").unlink()
    with pytest.raises(CkptError, match="No such file"):
        list(computed.storage.data.produce())


def test_each_leaf_is_read_once() -> None:
    reads: list[str] = []

    def load(key: str) -> torch.Tensor:
        reads.append(key)
        return X

    twice = Op("aten.t.default", (Ref("x"),))
    evaluate(Op("aten.add.Tensor", (twice, Op("aten.t.default", (Ref("x"),)))), load)
    assert reads == ["x"]


FORBIDDEN = [
    "os.system", "aten.save.default", "aten.from_file.default", "aten.add_.Tensor", "aten.copy_.default",
    "aten.fill.Tensor_out", "aten.__class__", "aten.rand_like.default", "aten.nowhere.default", "aten", "",
    "aten._print.default", "aten.item.default", "torch.ops.aten.t.default", "opaque", "builtins.eval", "aten.t.nowhere",
    # Functions of tensors that crash the process with some arguments:
    "aten._convert_indices_from_csr_to_coo.default", "aten.max_pool2d_with_indices_backward.default",
    "aten.segment_reduce.default", "aten._segment_reduce_backward.default", "aten.set_.source_Storage",
    "aten.resize.default", "aten.empty_strided.default", "aten._sparse_coo_tensor_unsafe.default",
    "prims.as_strided.default", "aten.linalg_svd.default", "aten.embedding_dense_backward.default",
]  # fmt: skip


@pytest.mark.parametrize("name", FORBIDDEN)
def test_other_operators_are_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(CkptError, match="not an operator that a plan may hold") as refused:
        torch_eval.entry_of(
            "new", Op(name, (Ref("x"), str(tmp_path / "written"))), {"x": stored(X, tmp_path)}
        )
    assert name in refused.value.message
    assert not (tmp_path / "written").exists()


SPLIT = Op("aten.split.Tensor", (Ref("x"), 2))
INVALID: dict[str, Op] = {
    "incompatible shapes": Op("aten.mm.default", (Ref("x"), Ref("x"))),
    "an index out of range": Op("getitem", (SPLIT, 7)),
    "too few arguments": Op("aten.mm.default", (Ref("x"),)),
    "getitem without an index": Op("getitem", (SPLIT,)),
    "getitem of a tensor": Op("getitem", (Ref("x"), 0)),
    "getitem with text": Op("getitem", (SPLIT, "0")),
    "getitem with a bool": Op("getitem", (SPLIT, True)),
    "getitem with a keyword": Op("getitem", (SPLIT, 0), (("dim", 0),)),
    "a number too large": Op("aten.add.Scalar", (Ref("x"), 2**80)),
    "an argument of another type": Op("aten.cat.default", ("x",)),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_arguments_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(Refused, match="does not fit"):
        torch_eval.entry_of("new", INVALID[name], {"x": stored(X, tmp_path)})


def test_unknown_dtypes_and_lists_of_tensors_are_errors(tmp_path: Path) -> None:
    x = stored(X, tmp_path)
    cast = [
        (Op("aten._to_copy.default", (Ref("x"),), (("dtype", argument),)), x, "torch has no")
        for argument in (
            Special("dtype", "save"),
            Special("dtype", "nowhere"),
            Special("complex", "two"),
        )
    ]
    unknown = (
        Op("aten.t.default", (Ref("x"),)),
        replace(x, dtype="float3"),
        "this torch has no dtype 'float3'",
    )
    for source, entry, message in (*cast, unknown, (SPLIT, x, "not a tensor")):
        with pytest.raises(CkptError, match=message):
            torch_eval.entry_of("new", source, {"x": entry})


def test_operators_on_entries_other_than_dense_tensors_are_refused() -> None:
    sparse = TensorEntry("x", "float32", (2,), (), 0, None, "sparse_coo")
    for entry, message in (sparse, "sparse_coo"), (ExtraEntry("x", value=3), "not a tensor"):
        with pytest.raises(Refused, match=message):
            torch_eval.entry_of("new", Op("aten.t.default", (Ref("x"),)), {"x": entry})


def test_an_unaligned_offset_of_a_wider_dtype_is_not_a_view(tmp_path: Path) -> None:
    entry = stored(torch.arange(9.0)[1:], tmp_path)
    wide = torch_eval.entry_of(
        "new", Op("aten.view.dtype", (Ref("x"), Special("dtype", "int64"))), {"x": entry}
    )
    assert wide.storage is not entry.storage
    assert same(torch_eval.load(wide), torch.arange(1.0, 9.0).view(torch.int64))


def test_arrange_keeps_bytes_between_values(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    place = stored(whole[:, 1:3], tmp_path, "place")
    value = stored(torch.tensor([[-1.0, -2, -3], [-4, -5, -6]]).t(), tmp_path, "value")
    assert place.storage is not None
    arranged = torch_eval.arrange(place.storage, [(place, value)])
    assert isinstance(arranged.data, Lazy)
    expected = whole.clone()
    expected[:, 1:3] = torch.tensor([[-1.0, -4], [-2, -5], [-3, -6]])
    assert b"".join(content(arranged.data)) == bytes(torch_eval.to_bytes(expected))


def test_overlapping_places_with_different_values_are_refused(tmp_path: Path) -> None:
    whole = stored(torch.zeros(4), tmp_path, "whole")
    assert whole.storage is not None
    places = [
        TensorEntry(k, "float32", (3,), (1,), at, whole.storage) for k, at in (("a", 0), ("b", 1))
    ]
    values = [stored(torch.full((3,), v), tmp_path, f"v{v}") for v in (1.0, 2.0)]
    data = torch_eval.arrange(whole.storage, list(zip(places, values))).data
    assert isinstance(data, Lazy)
    with pytest.raises(Refused, match="shares memory"):
        list(data.produce())
