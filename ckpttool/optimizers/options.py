"""The hyperparameters of a param group: numbers, plain values, tensors and objects."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

from ckpttool.core.checkpoint import ExtraEntry, TensorEntry
from ckpttool.core.values import same_plain
from ckpttool.evaluate.compare import elements, same_objects, same_values

Ids = set[tuple[int, int]]


def same_options(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """Return True if two groups have the same options; tensors are compared by their bytes."""
    return _same_mappings(left, right, set())


def same_option(left: Any, right: Any) -> bool:
    """Return True if two values of an option are the same. Tensors are, if their bytes are
    equal.
    """
    return _same(left, right, set())


def _same(left: Any, right: Any, equal: Ids) -> bool:
    """Return True if the two values are the same. `equal` are the ids of containers that are known
    to be the same: a file may share them many times.
    """
    if left is right:
        return True
    if isinstance(left, TensorEntry) and isinstance(right, TensorEntry):
        return same_values(left, right)
    if isinstance(left, ExtraEntry) and isinstance(right, ExtraEntry):
        return same_objects(left, right)
    if isinstance(left, TensorEntry):
        return type(right) in (int, float) and _is_number(left, right)
    if isinstance(right, TensorEntry):
        return type(left) in (int, float) and _is_number(right, left)
    if isinstance(left, ExtraEntry) or isinstance(right, ExtraEntry):
        return False
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return _same_lists(left, right, equal)
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return _same_mappings(left, right, equal)
    return same_plain(left, right)


def _same_lists(left: Sequence[Any], right: Sequence[Any], equal: Ids) -> bool:
    ids = id(left), id(right)
    if ids in equal:
        return True
    if len(left) != len(right):
        return False
    for value, other in zip(left, right):
        if not _same(value, other, equal):
            return False
    equal.add(ids)
    return True


def _same_mappings(left: Mapping[Any, Any], right: Mapping[Any, Any], equal: Ids) -> bool:
    ids = id(left), id(right)
    if ids in equal:
        return True
    if left.keys() != right.keys():
        return False
    for name, value in left.items():
        if not _same(value, right[name], equal):
            return False
    equal.add(ids)
    return True


def _is_number(entry: TensorEntry, number: float) -> bool:
    """Return True if the tensor has one element, and that is the number in the tensor's dtype."""
    value = _element_of(entry)
    if value is None:
        return False
    if isinstance(value, float):
        return value == _rounded(number, entry.dtype)
    return type(number) is int and value == number


def _element_of(entry: TensorEntry) -> float | None:
    """Return the only element of a tensor of numbers; None for any other."""
    if entry.numel != 1 or entry.storage is None:
        return None
    from ckpttool.evaluate.numpy_eval import reader

    read = reader(entry.dtype)
    if read is None:
        return None
    value = read(b"".join(elements(entry)))[0].item()
    return value if type(value) in (int, float) else None


def _rounded(number: float, dtype: str) -> float | None:
    """Return the number as a tensor of this dtype holds it; None if that is not known."""
    from ckpttool.evaluate.numpy_eval import cast, reader

    convert, read = cast("float64", dtype), reader(dtype)
    try:
        data = struct.pack("<d", number)
    except OverflowError:
        return None
    if convert is None or read is None:
        return None
    return float(read(bytes(convert(data)))[0])


def number_of(option: Any) -> float | None:
    """Return an option that is a number, or a tensor of one number; None for anything else."""
    if isinstance(option, TensorEntry):
        value = _element_of(option)
        return None if value is None else float(value)
    if isinstance(option, (int, float)) and not isinstance(option, bool):
        return float(option)
    return None


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are numbers or other plain values, a tensor of one number as that
    number. Other tensors and objects are left out.
    """
    plain = {}
    for name, value in options.items():
        number = number_of(value)
        if number is not None:
            plain[name] = number if isinstance(value, TensorEntry) else value
        elif not isinstance(value, (TensorEntry, ExtraEntry)):
            plain[name] = value
    return plain


def different(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return each option that differs, with its value on both sides as text."""
    texts = {}
    for name in dict.fromkeys((*left, *right)):
        if name not in left or name not in right or not same_option(left[name], right[name]):
            texts[name] = _option_text(left, name), _option_text(right, name)
    return texts


def _option_text(options: Mapping[str, Any], name: str) -> str:
    value = options.get(name)
    if isinstance(value, TensorEntry):
        return "a tensor"
    if isinstance(value, ExtraEntry):
        return "an object"
    return str(value) if name in options else "absent"
