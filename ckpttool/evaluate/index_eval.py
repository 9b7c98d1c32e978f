"""Evaluate expressions that only move bytes on the index, without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

from ckpttool.core.checkpoint import ExtraEntry, Lazy, Storage, TensorEntry, contiguous_stride, in_row_major
from ckpttool.core.dtypes import itemsize
from ckpttool.core.expression import Argument, Expression, Op, Ref, Special, refs
from ckpttool.core.limits import limits
from ckpttool.evaluate import numpy_eval
from ckpttool.evaluate.chunks import concatenated, row_major, window
from ckpttool.evaluate.compare import elements

ROW_MAJOR = (("memory_format", Special("memory_format", "contiguous_format")),)

Entries = Mapping[str, TensorEntry | ExtraEntry]


def entry_of(key: str, source: Expression, have: Entries) -> TensorEntry | None:
    """The entry `key` whose value is `source`: as in torch a view where it is one, else bytes that are laid end to end.

    None where a value has to be computed, or an operator does not fit its arguments.
    """
    made = _entry(source, have)
    if made is None or made.nbytes > _most(source, have):
        return None
    shape, stride = (*made.shape,), (*made.stride,)  # of its own: a pickle refers back to a tuple that it has written
    return replace(made, key=key, shape=shape, stride=stride, payload=None)


def _most(source: Expression, have: Entries) -> int:
    """Bytes that may be made of what the expression reads."""
    read = [have[key] for key in set(refs(source))]
    nbytes = sum(entry.nbytes for entry in read if isinstance(entry, TensorEntry))
    return max(limits().made_bytes, limits().made_times * nbytes)


def _entry(node: Argument, have: Entries) -> TensorEntry | None:
    match node:
        case Ref(key):
            entry = have[key]
            return entry if isinstance(entry, TensorEntry) and entry.storage is not None else None
        case Op("aten.narrow.default", (of, int(dim), int(start), int(length)), ()):
            return _narrow(_entry(of, have), dim, start, length)
        case Op("aten.permute.default", (of, tuple(dims)), ()):
            return _permute(_entry(of, have), dims)
        case Op("aten.reshape.default", (of, tuple(shape)), ()):
            return _reshape(_entry(of, have), shape)
        case Op("aten.clone.default", (of,), ()):
            return _clone(_entry(of, have))
        case Op("aten.clone.default", (of,), (("memory_format", Special("memory_format", "contiguous_format")),)):
            return _ordered(_entry(of, have))
        case Op("aten._to_copy.default", (of,), (("dtype", Special("dtype", dtype)),)):
            return _cast(_entry(of, have), dtype)
        case Op("aten.select.int", (of, int(dim), int(index)), ()):
            return _select(_narrow(_entry(of, have), dim, index, 1), dim)
        case Op("aten.slice.Tensor", (of, int(dim), int(start), int(end)), ()):
            return _slice(_entry(of, have), dim, start, end)
        case Op("getitem", (Op(name, (of, *how), ()), int(index)), ()) if name in _PARTS:
            return _one_part(_entry(of, have), name, how, index)
        case Op("aten.cat.default", (tuple(parts),), ()):
            return _cat([_entry(part, have) for part in parts], 0)
        case Op("aten.cat.default", (tuple(parts), int(dim)), ()):
            return _cat([_entry(part, have) for part in parts], dim)
        case Op("aten.stack.default", (tuple(parts), int(dim)), ()):
            return _cat([_unsqueeze(_entry(part, have), dim) for part in parts], dim)
    return None


def _narrow(entry: TensorEntry | None, dim: int, start: int, length: int) -> TensorEntry | None:
    if entry is None or not 0 <= dim < len(entry.shape):
        return None
    if start < 0 or length < 0 or start + length > entry.shape[dim]:
        return None
    shape = (*entry.shape[:dim], length, *entry.shape[dim + 1 :])
    return replace(entry, shape=shape, offset=entry.offset + start * entry.stride[dim])


def _slice(entry: TensorEntry | None, dim: int, start: int, end: int) -> TensorEntry | None:
    if entry is None or not 0 <= dim < len(entry.shape):
        return None
    length = entry.shape[dim]
    return _narrow(entry, dim, min(start, length), min(end, length) - min(start, length))


# Operators that give several tensors -> how long these are in a dimension of that length.
_PARTS: Mapping[str, Callable[[int, Any], list[int]]] = {
    "aten.split.Tensor": lambda length, size: _equal(length, size),
    "aten.chunk.default": lambda length, count: _equal(
        length, -(-length // count) if type(count) is int and count > 0 else 0
    ),
    "aten.split_with_sizes.default": lambda length, sizes: list(sizes) if isinstance(sizes, tuple) else [],
}


def _equal(length: int, size: Argument) -> list[int]:
    """Parts of that size, of which the last may be shorter; none where that is no size, or makes very many."""
    if type(size) is not int or size < 1 or -(-length // size) > limits().made_parts:
        return []
    return [min(size, length - start) for start in range(0, length, size)]


def _one_part(entry: TensorEntry | None, name: str, how: Sequence[Argument], index: int) -> TensorEntry | None:
    """One of the parts into which an operator cuts the tensor, as `torch.split` does."""
    if entry is None or not 1 <= len(how) <= 2:
        return None
    cut, dim = how if len(how) == 2 else (how[0], 0)
    if type(dim) is not int or not 0 <= dim < len(entry.shape):
        return None
    sizes = _PARTS[name](entry.shape[dim], cut)
    fits = all(type(size) is int and size >= 0 for size in sizes) and sum(sizes) == entry.shape[dim]
    return _narrow(entry, dim, sum(sizes[:index]), sizes[index]) if fits and 0 <= index < len(sizes) else None


def _select(entry: TensorEntry | None, dim: int) -> TensorEntry | None:
    """A slice of one element in `dim`, without that dimension."""
    if entry is None:
        return None
    return replace(entry, shape=_without(entry.shape, dim), stride=_without(entry.stride, dim))


def _without(sizes: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*sizes[:dim], *sizes[dim + 1 :])


def _unsqueeze(entry: TensorEntry | None, dim: int) -> TensorEntry | None:
    if entry is None or not 0 <= dim <= len(entry.shape):
        return None
    sizes, steps = entry.shape, entry.stride
    return replace(entry, shape=(*sizes[:dim], 1, *sizes[dim:]), stride=(*steps[:dim], 1, *steps[dim:]))


def _permute(entry: TensorEntry | None, dims: tuple[Argument, ...]) -> TensorEntry | None:
    order = [dim for dim in dims if type(dim) is int]
    if entry is None or len(order) < len(dims) or sorted(order) != list(range(len(entry.shape))):
        return None
    return replace(
        entry, shape=tuple(entry.shape[dim] for dim in order), stride=tuple(entry.stride[dim] for dim in order)
    )


def _reshape(entry: TensorEntry | None, shape: tuple[Argument, ...]) -> TensorEntry | None:
    sizes = tuple(size for size in shape if isinstance(size, int) and size >= 0)
    if entry is None or not entry.is_contiguous or len(sizes) < len(shape) or prod(sizes) != entry.numel:
        return None
    return replace(entry, shape=sizes, stride=contiguous_stride(sizes))


def _clone(entry: TensorEntry | None) -> TensorEntry | None:
    if entry is None or not entry.is_contiguous:
        return None
    storage = concatenated([window(entry, 0, entry.numel)])
    return replace(entry, stride=contiguous_stride(entry.shape), offset=0, storage=storage)


def _ordered(entry: TensorEntry | None) -> TensorEntry | None:
    """A clone in row-major order."""
    return None if entry is None else _clone(row_major(entry))


def _cast(entry: TensorEntry | None, dtype: str) -> TensorEntry | None:
    made = None if entry is None else numpy_eval.cast(entry.dtype, dtype)
    if entry is None or made is None:
        return None
    assert entry.storage is not None
    chunks = partial(numpy_eval.whole_elements, size=itemsize(entry.dtype))
    length, held = entry.numel * itemsize(dtype), entry.storage.held
    lazy = Lazy(length, lambda: map(made, chunks(elements(entry))), None, entry.nbytes, held)
    return in_row_major(entry.key, dtype, entry.shape, Storage(lazy))


def _cat(entries: list[TensorEntry | None], dim: int) -> TensorEntry | None:
    """Contiguous tensors end to end: dimensions before `dim` have to be 1."""
    parts = [entry for entry in entries if entry is not None and entry.is_contiguous]
    if len(parts) < len(entries) or not parts or not 0 <= dim < len(parts[0].shape):
        return None
    first = parts[0]
    head, tail = first.shape[:dim], first.shape[dim + 1 :]
    alike = {(part.dtype, part.shape[:dim], part.shape[dim + 1 :], len(part.shape)) for part in parts}
    if len(alike) > 1 or prod(head) != 1:
        return None
    shape = (*head, sum(part.shape[dim] for part in parts), *tail)
    storage = concatenated([window(part, 0, part.numel) for part in parts])
    return replace(first, shape=shape, stride=contiguous_stride(shape), offset=0, storage=storage)
