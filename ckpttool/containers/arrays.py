"""NumPy arrays as Python pickles them: nodes to entries, whose bytes are in the pickle.

``numpy/_core/multiarray.py: _reconstruct`` is what protocols 0 to 4 call, ``numpy/_core/numeric.py:
_frombuffer`` is what protocol 5 calls; before NumPy 2 the package was ``numpy.core``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import prod
from typing import Any

from ckpttool.containers.pickle_read import Call, Global, bytes_of
from ckpttool.core.checkpoint import Lazy, Part, Storage, TensorEntry
from ckpttool.core.dtypes import itemsize
from ckpttool.core.strides import contiguous_stride

_PACKAGES = ("numpy.core.", "numpy._core.")
_RECONSTRUCT, _FROM_BUFFER = "multiarray._reconstruct", "numeric._frombuffer"
_DTYPES = {
    "f2": "float16",
    "f4": "float32",
    "f8": "float64",
    "c8": "complex64",
    "c16": "complex128",
    "i1": "int8",
    "i2": "int16",
    "i4": "int32",
    "i8": "int64",
    "u1": "uint8",
    "u2": "uint16",
    "u4": "uint32",
    "u8": "uint64",
    "b1": "bool",
}
_MOST_DIMS = 64  # of an array of NumPy 2


def is_array(node: Any) -> bool:
    """Return whether the node makes an array; its dtype and shape may still be unknown."""
    return type(node) is Call and _function(node) in (_RECONSTRUCT, _FROM_BUFFER)


def array_entry(key: str, node: Call) -> TensorEntry | None:
    """Return the entry of an array's node; None for a dtype that torch does not have, big-endian
    numbers, and arguments that NumPy does not write.
    """
    if _function(node) == _FROM_BUFFER:
        data, dtype_node, shape, order = _arguments(node.args, 4)
        is_fortran = order == "F"
    else:  # the state is (version, shape, dtype, whether it is in Fortran's order, data)
        _, shape, dtype_node, is_fortran, data = _arguments(node.state, 5)
    dtype = _dtype(dtype_node)
    content = bytes_of(data)
    if dtype is None or content is None or not _is_shape(shape):
        return None
    if len(content) != prod(shape) * itemsize(dtype):
        return None
    stride = contiguous_stride(shape)
    if is_fortran:
        stride = contiguous_stride(shape[::-1])[::-1]
    storage = Storage(Lazy(len(content), partial(_parts, data), reads=0))
    return TensorEntry(key, dtype, shape, stride, 0, storage)


def _parts(data: Any) -> Iterator[Part]:
    yield bytes_of(data) or b""


def _function(node: Call) -> str:
    """Return the name of the called function in NumPy's core; empty for another function."""
    if type(node.func) is not Global:
        return ""
    name = f"{node.func.module}.{node.func.name}"
    for package in _PACKAGES:
        if name.startswith(package):
            return name[len(package) :]
    return ""


def _arguments(values: Any, count: int) -> tuple[Any, ...]:
    """Return the values, or as many times None if they are others than NumPy writes."""
    if isinstance(values, (tuple, list)) and len(values) == count:
        return tuple(values)
    return (None,) * count


def _dtype(node: Any) -> str | None:
    """Return torch's name of ``numpy.dtype("f4")`` with the byte order in its state."""
    if type(node) is not Call or node.func != Global("numpy", "dtype") or not node.args:
        return None
    code, state = node.args[0], node.state
    if type(code) is not str or not isinstance(state, tuple) or len(state) < 2:
        return None
    return _DTYPES.get(code) if state[1] in ("<", "|") else None


def _is_shape(shape: Any) -> bool:
    if type(shape) is not tuple or len(shape) > _MOST_DIMS:
        return False
    for size in shape:
        if type(size) is not int or size < 0:
            return False
    return True
