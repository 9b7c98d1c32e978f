"""Which nodes of a pickle are mappings, and what they hold.

Python 3 makes a dict empty and sets its items. Python 2 made an ``OrderedDict`` of a list of its items, and ``Counter``
is made of a dict still. The first look at such a node puts its items where every other mapping has them; from then on
it is written like one.
"""

from __future__ import annotations

from typing import Any

from ckpttool.errors import CkptError
from ckpttool.formats.containers.pickle_tree import ByteString, Call, Global, check_key

_MAPPINGS = frozenset(
    Global(module, name)
    for module, name in (
        ("collections", "OrderedDict"),
        ("collections", "defaultdict"),
        ("collections", "Counter"),
        ("builtins", "dict"),
        ("__builtin__", "dict"),
    )
)
_DEFAULT, _COUNTER = Global("collections", "defaultdict"), Global("collections", "Counter")


def is_mapping(node: Any) -> bool:
    """True for a call of one of Python's own kinds of dict."""
    return type(node) is Call and type(node.func) is Global and node.func in _MAPPINGS


def pairs_of(node: Any) -> dict[Any, Any] | None:
    """The keys and values of a mapping; None for a node that is none, or whose arguments are not understood."""
    if type(node) is dict:
        return node
    if type(node) is not Call:
        return None
    if is_mapping(node) and not _settled(node):
        return None
    return node.pairs


def _settled(node: Call) -> bool:
    """Puts the items that the mapping is made of among its pairs; False where its arguments are none."""
    first = 1 if node.func == _DEFAULT else 0  # the function that makes missing values
    if len(node.args) > first:  # what is only made, and not called, ignores them
        is_called = node.how in ("REDUCE", "OBJ") and len(node.args) == first + 1
        is_counted = node.func == _COUNTER and type(node.args[first]) in (list, tuple)  # and not set
        pairs = _items(node.args[first]) if is_called and not is_counted else None
        if pairs is None:
            return False
        node.args = node.args[:first]
        node.pairs = {**pairs, **(node.pairs or {})}
    if node.pairs is None:
        node.pairs = {}
    return True


def _items(argument: Any) -> dict[Any, Any] | None:
    """What a dict is that is made of `argument`; None where that is no dict and no list of pairs."""
    if type(argument) is dict:
        return argument
    if is_mapping(argument):
        return pairs_of(argument)
    if type(argument) not in (list, tuple):
        return None
    found: dict[Any, Any] = {}
    for item in argument:
        if type(item) not in (list, tuple) or len(item) != 2:
            return None
        key, value = item
        try:
            check_key(key)
        except (TypeError, ValueError):
            return None
        found[key] = value
    return found


def metadata_of(node: Any) -> dict[Any, Any] | None:
    """The ``_metadata`` attribute of a state dict: module path -> its payload; None where it has none.

    Raises `CkptError` where it is something else: torch can read the file then, and load it nowhere.
    """
    found = node.state.get("_metadata") if type(node) is Call and type(node.state) is dict else None
    pairs = pairs_of(found)
    if pairs is None and found is not None:
        raise CkptError("a state dict's _metadata is no dict of module versions", hint="the file is damaged or hostile")
    return pairs


def text_of(key: Any) -> str | None:
    """A key as text: a ``str``, or one of Python 2 that is not ASCII; None for any other."""
    if type(key) is str:
        return key
    if type(key) not in (bytes, ByteString):
        return None
    raw = key if isinstance(key, bytes) else key.value
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin1")
