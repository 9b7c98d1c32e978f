"""Describe an object of a pickle: its type, and its value if that is short."""

from __future__ import annotations

from typing import Any

from ckpttool.containers.arrays import array_entry, is_array
from ckpttool.containers.nodes import as_later_protocols, pairs_of
from ckpttool.containers.pickle_read import ByteString, Call, Global, Persistent, PickledSet
from ckpttool.core.checkpoint import Described
from ckpttool.core.text import plural, shape_text

_SHORT = 8  # items of a list that are shown
_MOST_BITS = 256
_PLAIN = (bool, int, float, str, type(None))
_NEW_OBJECT = ("copyreg._reconstructor", "copy_reg._reconstructor")  # of protocols 0 and 1


def described(node: Any) -> Described:
    """Return the type of the object that `node` makes, and its value. Nothing is executed."""
    if type(node) is Call:
        node = as_later_protocols(node)
    if node is None:
        return Described("None")
    if type(node) in (list, tuple):
        return Described(type(node).__name__, _items(node))
    if type(node) is PickledSet:
        return Described("frozenset" if node.frozen else "set", _count(node.items))
    if type(node) is Global:
        return Described("class or function", str(node))
    if type(node) is Persistent:
        return Described("storage")
    if type(node) is Call and is_array(node):
        array = array_entry("", node)
        text = "" if array is None else f"{array.dtype} {shape_text(array.shape)}"
        return Described("numpy.ndarray", text)
    if isinstance(node, (dict, Call)):
        return _mapping_or_object(node)
    if isinstance(node, (bytes, bytearray, ByteString)):
        size = len(node.value if isinstance(node, ByteString) else node)
        return Described("bytes", plural(size, "byte"))
    return Described(type(node).__name__, _text(node))


def _items(node: list[Any] | tuple[Any, ...]) -> str:
    """Return the items of a short list of plain values, else how many there are."""
    if len(node) > _SHORT or any(type(item) not in _PLAIN for item in node):
        return _count(node)
    text = ", ".join(map(_text, node))
    if isinstance(node, list):
        return f"[{text}]"
    return f"({text})"


def _text(value: object) -> str:
    """Return a plain value as Python writes it; of a huge number, which it does not write, the
    size.
    """
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return f"a number of {value.bit_length()} bits"
    return repr(value)


def _count(items: Any) -> str:
    return plural(len(items), "item")


def _mapping_or_object(node: dict[Any, Any] | Call) -> Described:
    """Return the class of an object, and how many keys it has if it is a mapping."""
    pairs = pairs_of(node)
    keys = "" if pairs is None else plural(len(pairs), "key")
    if not isinstance(node, Call):
        return Described("dict", keys)
    kind = node.func
    is_call = node.how == "REDUCE" and pairs is None  # of a class, or of any function
    if str(kind) in _NEW_OBJECT and node.args:
        kind = node.args[0]
        is_call = False
    name = str(kind).removeprefix("builtins.") if type(kind) is Global else "object"
    return Described(f"{name}(...)" if is_call else name, keys)
