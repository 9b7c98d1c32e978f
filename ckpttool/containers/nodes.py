"""The contents of a pickle's nodes: their parts, the pairs of mappings, and a digest of an object's
content.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from ckpttool.containers.pickle_read import (
    ABSENT,
    MAPPINGS,
    ByteString,
    Call,
    Global,
    Persistent,
    PickledSet,
    check_key,
)
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CkptError
from ckpttool.core.pickle_imports import DANGEROUS, verdict
from ckpttool.core.text import dotted

# The parts of a node

# A step is ("item", key or index), ("arg", index), ("kwarg", name), ("element", index) or
# ("state", None).
Step = tuple[str, Any]
Steps = tuple[Step, ...]

# Type -> the nodes directly inside. A node of any other type holds none.
_PARTS: dict[type, Callable[[Any], Any]] = {
    tuple: lambda node: node,
    list: lambda node: node,
    dict: lambda node: [*node.keys(), *node.values()],
    Persistent: lambda node: (node.id,),
    PickledSet: lambda node: node.items,
    Call: lambda node: (
        node.func,
        node.args,
        node.kwargs,
        node.items,
        node.pairs,
        node.state,
        node.setter,
    ),
}


def children(node: Any) -> Any:
    parts = _PARTS.get(type(node))
    return () if parts is None else parts(node)


def walk(
    root: Any, spend: Callable[[int], None] | None = None, seen: set[int] | None = None
) -> Iterator[Any]:
    """Yield every node below and with `root` that can hold others, each once, in any order; none
    that is in `seen`.

    `spend` is called with the number of nodes that are looked at; it may raise.
    """
    todo, seen = [root], set() if seen is None else seen
    while todo:
        node = todo.pop()
        if type(node) not in _PARTS or id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        parts = children(node)
        if spend is not None:
            spend(1 + len(parts))
        todo.extend(parts)


def entries_with_code(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Yield the dotted path of each entry that a dangerous import makes, and the name of the
    import.
    """
    others = set(checkpoint.others)
    payloads = []
    for extra in checkpoint.objects:
        if extra.key in others:
            payloads.append((extra.key, extra.payload))
    for section in checkpoint.sections:
        for entry in section.entries:
            payloads.append((dotted(section.path, entry.key), entry.payload))
    seen: set[int] = set()
    for path, payload in payloads:
        for name in _imports_in(getattr(payload, "node", None), seen):
            if verdict(name.module, name.name) == DANGEROUS:
                yield path, str(name)


def _imports_in(root: Any, seen: set[int]) -> Iterator[Global]:
    """Yield the imports in the tree, without those in containers that are in `seen`."""
    if type(root) is Global:
        yield root
    for container in walk(root, seen=seen):
        for part in children(container):
            if type(part) is Global:
                yield part


def made_of(kind: Any, state: Any) -> Call:
    """Return the node of an object of a class with this state."""
    node = Call(kind, (), "NEWOBJ")
    node.state = state
    return node


# Mappings

_DEFAULT, _COUNTER = Global("collections", "defaultdict"), Global("collections", "Counter")


def is_mapping(node: Any) -> bool:
    return type(node) is Call and type(node.func) is Global and node.func in MAPPINGS


def pairs_of(node: Any) -> dict[Any, Any] | None:
    """Return the keys and values of a mapping; None for any other node, and if its arguments are
    not understood.

    The items that a mapping is made of are put among its pairs.
    """
    if type(node) is dict:
        return node
    if type(node) is not Call:
        return None
    if not is_mapping(node):
        return node.pairs
    first = 1 if node.func == _DEFAULT else 0  # the function that makes missing values
    if len(node.args) > first:  # an object that is not called ignores them
        is_called = node.how in ("REDUCE", "OBJ") and len(node.args) == first + 1
        # and not set
        is_counted = node.func == _COUNTER and type(node.args[first]) in (list, tuple)
        pairs = _items(node.args[first]) if is_called and not is_counted else None
        if pairs is None:
            return None
        node.args = node.args[:first]
        node.pairs = {**pairs, **(node.pairs or {})}
    if node.pairs is None:
        node.pairs = {}
    return node.pairs


def _items(argument: Any) -> dict[Any, Any] | None:
    """Return the dict that is made of `argument`; None if that is not a dict or a list of pairs."""
    if type(argument) is dict:
        return argument
    if is_mapping(argument):
        return pairs_of(argument)
    if type(argument) not in (list, tuple):
        return None
    pairs: dict[Any, Any] = {}
    for item in argument:
        if type(item) not in (list, tuple) or len(item) != 2:
            return None
        try:
            check_key(item[0])
        except (TypeError, ValueError):
            return None
        pairs[item[0]] = item[1]
    return pairs


def metadata_of(node: Any) -> dict[Any, Any] | None:
    """Return the ``_metadata`` attribute of a state dict (module path -> its payload), or None.

    Raises `CkptError` if it is something else: torch reads the file then, but loads it into no
    module.
    """
    if type(node) is not Call or type(node.state) is not dict:
        return None
    metadata = node.state.get("_metadata")
    pairs = pairs_of(metadata)
    if pairs is None and metadata is not None:
        raise CkptError(
            "a state dict's _metadata is not a dict of module versions",
            hint="the file is damaged or hostile",
        )
    return pairs


def text_of(key: Any) -> str | None:
    """Return a key as text: a ``str``, or one of Python 2 that is not ASCII; None for any other."""
    if type(key) is str:
        return key
    if type(key) not in (bytes, ByteString):
        return None
    raw = key if isinstance(key, bytes) else key.value
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin1")


# Content

_MAX_DEPTH = 200
_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}  # their names before protocol 3

Leaf = Callable[[Any], "bytes | None"]


def content_of(node: Any, leaf: Leaf) -> bytes | None:
    """Return a digest of the object that `node` makes; None if it holds itself, or is nested too
    deep.

    `leaf` returns the digest of a node whose content is outside of the pickle (a storage, a
    tensor), else None.
    """
    try:
        return _Hasher(leaf).of(node, 0)
    except (RecursionError, _Endless, CkptError):
        return None


class _Endless(Exception):
    """The object holds itself."""


class _Hasher:
    """Digests of nodes, made of the digests of their parts: each node is looked at once, however
    often it is shared.
    """

    def __init__(self, leaf: Leaf) -> None:
        self.leaf = leaf
        self.digests: dict[int, bytes | None] = {}  # by id; None while the node is looked at

    def of(self, node: Any, depth: int) -> bytes:
        if type(node) is Global and node.module in _MODULES:
            node = Global(_MODULES[node.module], node.name)
        if type(node) not in _PARTS:
            text = repr(node).encode("utf-8", "surrogatepass")
            return _hashed([type(node).__name__.encode(), text])
        if id(node) not in self.digests:
            if depth > _MAX_DEPTH:
                raise _Endless
            self.digests[id(node)] = None
            content = self.leaf(node)
            if content is None:
                self.digests[id(node)] = self._of_parts(node, depth)
            else:
                self.digests[id(node)] = _hashed([b"leaf", content])
        digest = self.digests[id(node)]
        if digest is None:
            raise _Endless
        return digest

    def _of_parts(self, node: Any, depth: int) -> bytes:
        if type(node) is Call:
            pairs_of(node)  # puts the items of a dict where all dicts have them
            node = as_later_protocols(node)
        if type(node) is bytes:
            return self.of(node, depth)
        name, parts = _name_and_parts(node)
        digests = [self.of(part, depth + 1) for part in parts]
        if type(node) is PickledSet:
            digests.sort()
        return _hashed([repr(name).encode(), *digests])


def _name_and_parts(node: Any) -> tuple[tuple[object, ...], Iterable[Any]]:
    """Return what tells two nodes of the same parts apart, and the parts."""
    if type(node) is dict:
        return ("dict", len(node)), chain(*node.items())
    if type(node) is PickledSet:
        return ("set", node.frozen), children(node)
    if type(node) is Persistent:
        return ("reference",), children(node)
    if type(node) is Call:
        return _of_call(node)
    return (type(node).__name__, len(node)), children(node)


def _of_call(call: Call) -> tuple[tuple[object, ...], Iterable[Any]]:
    items = call.items or ()
    pairs: list[Any] = []
    if call.pairs:
        pairs.extend(chain(*call.pairs.items()))
    state = () if call.state is ABSENT else (call.state, call.setter)
    name = ("call", call.how, len(items), len(pairs), len(state))
    return name, (call.func, call.args, call.kwargs, *items, *pairs, *state)


def as_later_protocols(node: Call) -> Any:
    """Return a set or bytes as later protocols write them, for the call that protocol 2 writes;
    other calls as is.
    """
    if node.how != "REDUCE" or node.items or node.pairs or node.state is not ABSENT:
        return node
    name = str(node.func).replace("__builtin__", "builtins")
    if name == "builtins.bytes" and not node.args:
        return b""
    types = [type(argument) for argument in node.args]
    if name in ("builtins.set", "builtins.frozenset") and types == [list]:
        return PickledSet(node.args[0], name == "builtins.frozenset")
    if name == "_codecs.encode" and types == [str, str] and node.args[1] == "latin1":
        text = node.args[0]
        is_latin = max(text, default="") <= "\xff"
        return text.encode("latin1") if is_latin else node
    return node


def _hashed(parts: Iterable[bytes]) -> bytes:
    import hashlib  # loads OpenSSL

    digest = hashlib.blake2b(digest_size=32)
    for part in parts:
        digest.update(part)
    return digest.digest()
