"""Compare two tensors or objects, under one key or two."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain

from ckpttool.containers.rank_shards import (
    are_copies,
    is_of_ranks,
    parts_of,
    rank_pairs,
)
from ckpttool.containers.tensors import is_dense, kind
from ckpttool.core.checkpoint import AnyEntry, ExtraEntry, TensorEntry
from ckpttool.core.dtypes import PLAIN
from ckpttool.core.names import Hook
from ckpttool.core.strides import Shape
from ckpttool.core.tables import by_key
from ckpttool.diffing.causes import Cause, Code
from ckpttool.diffing.result import Entry
from ckpttool.evaluate.compare import Difference, same_objects
from ckpttool.formats.remarks import is_placeholder
from ckpttool.kinds.parts import joined_alike, joined_dimension

# Say how the values of two tensors differ, after the conversion to the right's dtype.
Values = Callable[[TensorEntry, TensorEntry], Difference | None]


def compare_pair(left: AnyEntry, right: AnyEntry, values: Values | None = None) -> Entry:
    """Compare one tensor or object, under one key or two."""
    key = (left.key,)
    keys = key, key if left.key == right.key else (right.key,)
    if values is None and _have_same_outline(left, right):
        return Entry("same", *keys)
    if isinstance(left, TensorEntry) and isinstance(right, TensorEntry):
        return _compare_tensors(left, right, keys, values)
    if isinstance(left, ExtraEntry) and isinstance(right, ExtraEntry):
        return _compare_objects(left, right, values)
    return Entry("shape", *keys, Cause(Code.OBJECT_ONE_SIDE))


def _compare_tensors(
    left: TensorEntry,
    right: TensorEntry,
    keys: tuple[tuple[str, ...], tuple[str, ...]],
    values: Values | None,
) -> Entry:
    if not _are_of_one_kind(left, right):
        detail = f"{kind(left)} instead of {kind(right)}"
        return Entry("shape", *keys, Cause(Code.KIND), None, detail)
    split = _split_on_both(left, right, *keys) or _split(right, left.shape, Code.SPLIT_RIGHT, *keys)
    if split is not None:
        return split
    difference = shape_or_dtype(left, right.dtype, right.shape, *keys)
    if difference is not None and difference.status == "shape":
        return difference
    of_ranks = rank_pairs(left, right)
    if values is not None or of_ranks:
        difference = _compare_values(left, right, of_ranks, values) or difference
    return difference or Entry("same", *keys)


def _have_same_outline(left: AnyEntry, right: AnyEntry) -> bool:
    """Return whether both are whole dense tensors of one dtype and shape, as almost all are."""
    return (
        isinstance(left, TensorEntry)
        and isinstance(right, TensorEntry)
        and left.dtype == right.dtype
        and left.shape == right.shape
        and left.layout == right.layout == "strided"
        and not (is_of_ranks(left) or is_of_ranks(right))
    )


def _are_of_one_kind(left: TensorEntry, right: TensorEntry) -> bool:
    if is_dense(left) and is_dense(right):
        return True
    return kind(left) == kind(right) or right.layout == "meta"


def _compare_values(
    left: TensorEntry,
    right: TensorEntry,
    of_ranks: Iterable[tuple[TensorEntry | None, TensorEntry | None]],
    values: Values | None,
) -> Entry | None:
    """Return how the values differ, of the tensors or of what the ranks hold of them; None if they
    do not. Without `values` the shapes and dtypes of all ranks are compared.
    """
    keys = (left.key,), (right.key,)
    dtypes = left.dtype, right.dtype
    code = Code.VALUE
    for part, other in chain([(left, right)], of_ranks):
        if part is None or other is None or part.shape != other.shape:
            return Entry("shape", *keys, Cause(Code.RANK_SHAPE))
        cause = Cause(code)
        if part.dtype != other.dtype:
            if (part.dtype, other.dtype) != dtypes:
                return Entry("shape", *keys, Cause(Code.RANK_SHAPE))
            cause = Cause(Code.DTYPE, dtypes).and_also(Cause(Code.CONVERTED))
        if values is None:
            continue
        if part.dtype != other.dtype and not (_is_plain(part) and _is_plain(other)):
            return Entry("value", *keys, Cause(Code.DTYPE, dtypes).and_also(Cause(Code.UNREAD)))
        differs = values(part, other)
        if differs is not None:
            entry = Entry("value", *keys, cause, None, differs.text, differs.spread or None)
            return replace(entry, change=differs.change)
        code = Code.RANK_VALUE
    return None


def _is_plain(entry: TensorEntry) -> bool:
    return bool(entry.storage) and entry.dtype in PLAIN


def shape_or_dtype(
    left: TensorEntry, dtype: str, shape: Shape | None, *keys: tuple[str, ...]
) -> Entry | None:
    """Return the entry of a tensor that differs in shape or dtype from what is expected; a shape of
    None is any.
    """
    if shape is not None and left.shape != shape:
        split = _split(left, shape, Code.SPLIT_LEFT, *keys)
        if split is not None:
            return split
        code = Code.PLACEHOLDER if is_placeholder(left) else Code.SHAPE
        detail = f"{list(left.shape)} instead of {list(shape)}"
        return Entry("shape", keys[0], keys[1], Cause(code), None, detail)
    if left.dtype != dtype:
        return Entry("dtype", keys[0], keys[1], Cause(Code.DTYPE, (left.dtype, dtype)))
    return None


def _split(entry: TensorEntry, whole: Shape, code: Code, *keys: tuple[str, ...]) -> Entry | None:
    """Return the entry of a tensor whose parts on the ranks are a tensor of the `whole` shape
    together; None if they are not.
    """
    if entry.shape == whole or not is_of_ranks(entry):
        return None
    shapes = _shapes_of_parts(entry)
    if joined_dimension(shapes, whole) is None or are_copies(entry):
        return None
    detail = f"{_counted(shapes)}, together {list(whole)}"
    return Entry("shape", keys[0], keys[1], Cause(code, (len(shapes),)), None, detail)


def _split_on_both(left: TensorEntry, right: TensorEntry, *keys: tuple[str, ...]) -> Entry | None:
    """Return the entry of a tensor that other numbers of ranks have in parts; None if it is not
    one.
    """
    if left.shape == right.shape or not is_of_ranks(left) or not is_of_ranks(right):
        return None
    shapes, others = _shapes_of_parts(left), _shapes_of_parts(right)
    whole = joined_alike(shapes, others)
    if whole is None or are_copies(left) or are_copies(right):
        return None
    cause = Cause(Code.SPLIT_BOTH, (len(shapes), len(others)))
    detail = f"{_counted(shapes)} and {_counted(others)}, together {list(whole)}"
    return Entry("shape", keys[0], keys[1], cause, None, detail)


def _shapes_of_parts(entry: TensorEntry) -> list[Shape]:
    return [part.shape for part in parts_of(entry) if part is not None]


def _counted(shapes: list[Shape]) -> str:
    """Return ``2 parts [8, 8]``."""
    others = "" if len(set(shapes)) == 1 else " and others"
    return f"{len(shapes)} parts {list(shapes[0])}{others}"


def _compare_objects(left: ExtraEntry, right: ExtraEntry, values: Values | None) -> Entry:
    """Compare two objects that are not tensors: the tensors inside them, and with `values`
    everything else.
    """
    keys = (left.key,), (right.key,)
    unlike = _compare_inside(left, right, values)
    if unlike is not None:
        return unlike
    if values is None:
        return Entry("extra_state", *keys, Cause(Code.OBJECT_UNREAD))
    if same_objects(left, right):
        return Entry("same", *keys)
    return Entry("value", *keys, Cause(Code.OBJECT_VALUE))


def _compare_inside(left: ExtraEntry, right: ExtraEntry, values: Values | None) -> Entry | None:
    """Return how the tensors inside two objects differ: the first that differs in more than its
    dtype, else the first with another dtype. Loading converts no tensors inside objects.
    """
    keys = (left.key,), (right.key,)
    left_parts = by_key(left.tensors)
    right_parts = by_key(right.tensors)
    other_dtype = None
    for key in {**left_parts, **right_parts}:
        path = f"{left.key}.{key}"
        if key not in left_parts or key not in right_parts:
            side = "left" if key in left_parts else "right"
            detail = f"{path}: only in {side}"
            return Entry("shape", *keys, Cause(Code.OBJECT_TENSORS), None, detail)
        part, other = left_parts[key], right_parts[key]
        entry = compare_pair(part, other, values if part.dtype == other.dtype else None)
        if entry.cause is None:
            continue
        status, cause = entry.status, Cause(Code.OBJECT_TENSOR).and_also(entry.cause)
        detail = f"{path}: {entry.detail}" if entry.detail else path
        if status != "dtype":
            return Entry(status, *keys, cause, None, detail)
        if values is not None:
            status, cause = "value", cause.and_also(Cause(Code.UNREAD))
        if other_dtype is None:
            other_dtype = Entry(status, *keys, cause, None, detail)
    return other_dtype


def renamed(
    left: AnyEntry,
    right: AnyEntry,
    cause: Cause | None,
    values: Values | None = None,
    hook: Hook | None = None,
) -> Entry:
    """Compare one tensor under two names."""
    return under_another_name(compare_pair(left, right, values), cause, hook)


def under_another_name(entry: Entry, cause: Cause | None, hook: Hook | None) -> Entry:
    """Return the entry of a tensor under two names; a difference in shape, dtype or values comes
    before the rename.
    """
    if entry.status in ("same", "extra_state") or entry.cause is None:
        return Entry("renamed", entry.left, entry.right, cause, hook)
    return replace(entry, cause=entry.cause.and_also(cause), hook=hook)
