"""ckpttool reads NumPy's archives (.npz): each array is a tensor, whose key is its name.

The archive is a zip file, and each of its records begins with a header that says dtype, shape and
order. Nothing is unpickled. An array that `numpy.savez` wrote stays in the file until it is read,
one of `numpy.savez_compressed` is decompressed then.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from io import BytesIO
from math import prod
from typing import Any

import numpy as np
from numpy.lib import format as npy

from ckpttool.plugin import (
    Archive,
    Checkpoint,
    CkptError,
    Format,
    Lazy,
    Look,
    Problem,
    Record,
    Section,
    Span,
    Storage,
    TensorEntry,
    read_archive,
    read_span,
)

DTYPES = {
    "b1": "bool",
    "i1": "int8",
    "i2": "int16",
    "i4": "int32",
    "i8": "int64",
    "u1": "uint8",
    "u2": "uint16",
    "u4": "uint32",
    "u8": "uint64",
    "f2": "float16",
    "f4": "float32",
    "f8": "float64",
    "c8": "complex64",
    "c16": "complex128",
}
STORED, DEFLATED = 0, 8  # ways to compress a record of a zip archive
HEAD = 1 << 16  # bytes that hold every header that NumPy writes
PART = 1 << 20  # compressed bytes that are read at a time


def matches(look: Look) -> str | None:
    """Return the path if the file is a zip archive of arrays and nothing else."""
    records = look.records
    if records and all(name.endswith(".npy") for name in records):
        return look.path
    return None


def read(path: str) -> Checkpoint:
    """Return the arrays of the archive. Raises `CkptError`, all problems at once, for arrays that
    are not plain numbers.
    """
    archive = read_archive(path)
    tensors = []
    problems = []
    for record in archive.records:
        try:
            tensors.append(_tensor(archive, record))
        except ValueError as error:
            problems.append(Problem(str(error), record.name))
    if problems:
        raise CkptError(
            f"{path} holds records that are not arrays of numbers",
            hint="save it again with numpy.savez, and arrays of numbers only",
            problems=problems,
        )
    section = Section("", "state_dict", tuple(tensors))
    return Checkpoint(path, FORMAT.name, archive.length, (section,))


def _tensor(archive: Archive, record: Record) -> TensorEntry:
    """Return the tensor of a record. Raises ValueError for all but an array of numbers."""
    if record.method not in (STORED, DEFLATED):
        raise ValueError("it is compressed in a way that NumPy does not use")
    head = BytesIO(_first_bytes(archive, record, HEAD))
    shape, is_fortran, dtype = _header(head)
    name = DTYPES.get(dtype.str[1:])
    if name is None or dtype.str[0] == ">":
        raise ValueError(f"no tensor has the dtype {dtype.str}")
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"the shape {shape} has other sizes than whole numbers")
    nbytes = prod(shape) * dtype.itemsize
    if head.tell() + nbytes != record.size:
        raise ValueError(f"{record.size - head.tell()} bytes of data, and not {nbytes}")
    storage = Storage(_data(archive, record, head.tell(), nbytes))
    key = record.name.removesuffix(".npy")
    return TensorEntry(key, name, tuple(shape), _stride(shape, is_fortran), 0, storage)


def _header(head: BytesIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return shape, order and dtype of an array, and leave `head` where its data begins."""
    version = npy.read_magic(head)
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"a header of version {version}")
    try:
        shape, is_fortran, dtype = readers[version](head)
    except Exception as error:  # NumPy parses it as Python, whose errors are of many kinds
        raise ValueError(f"a damaged header: {error}") from error
    return shape, is_fortran, dtype


def _stride(shape: tuple[int, ...], is_fortran: bool) -> tuple[int, ...]:
    """Return the elements between neighbors: in Fortran's order a column is contiguous."""
    dims = range(len(shape))
    if is_fortran:
        return tuple(prod(shape[:dim]) for dim in dims)
    return tuple(prod(shape[dim + 1 :]) for dim in dims)


def _data(archive: Archive, record: Record, start: int, nbytes: int) -> Span | Lazy:
    """Return the bytes of the array, which begin at byte `start` of the decompressed record."""
    span = archive.span(record)
    if record.method == STORED:
        return Span(span.path, span.offset + start, nbytes)
    return Lazy(nbytes, lambda: _after(start, _decompressed(span)), memory=2 * PART)


def _first_bytes(archive: Archive, record: Record, count: int) -> bytes:
    span = archive.span(record)
    if record.method == STORED:
        return bytes(read_span(Span(span.path, span.offset, min(count, span.length))))
    first = Span(span.path, span.offset, min(count, span.length))
    try:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(read_span(first), count)
    except zlib.error as error:
        raise ValueError(f"damaged: {error}") from error


def _decompressed(span: Span) -> Iterator[bytes]:
    """Yield the decompressed bytes of the span, at most `PART` at a time."""
    unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
    end = span.offset + span.length
    for offset in range(span.offset, end, PART):
        packed = bytes(read_span(Span(span.path, offset, min(PART, end - offset))))
        while packed:
            try:
                yield unpacker.decompress(packed, PART)
            except zlib.error as error:
                raise CkptError(f"{span.path} is damaged: {error}", hint="copy it again") from error
            packed = unpacker.unconsumed_tail


def _after(start: int, parts: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the bytes behind the first `start` ones."""
    for part in parts:
        yield part[start:]
        start = max(0, start - len(part))


FORMAT = Format("npz", "NumPy archive (.npz)", __name__, matches, (".npz",))
