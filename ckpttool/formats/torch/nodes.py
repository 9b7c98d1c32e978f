"""Mappings among the nodes of a pickle, and a digest of an object's content."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ckpttool.core.errors import CkptError
from ckpttool.formats.pickle_read import ABSENT, ByteString, Call, Global, Persistent, PickledSet, check_key

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


_MAX_DEPTH = 200

Leaf = Callable[[Any], "bytes | None"]


def content_of(node: Any, leaf: Leaf) -> bytes | None:
    """The digest of the object that `node` makes; None where it holds itself, or is nested too deep.

    `leaf` gives that of a node whose content lies outside of the pickle (a storage, a tensor), and None for all others.
    """
    try:
        return _Digests(leaf).of(node, 0)
    except (RecursionError, _Endless, CkptError):
        return None


class _Endless(Exception):
    """The object holds itself."""


class _Digests:
    """A node's digest is made of those of its parts: each is looked at once, however often it is shared."""

    def __init__(self, leaf: Leaf) -> None:
        self.leaf = leaf
        self.known: dict[int, bytes | None] = {}

    def of(self, node: Any, depth: int) -> bytes:
        if type(node) is Global and node.module in _MODULES:
            node = Global(_MODULES[node.module], node.name)
        kind = type(node)
        if kind not in _INSIDE:
            return _hashed([kind.__name__.encode(), repr(node).encode("utf-8", "surrogatepass")])
        if id(node) not in self.known:
            if depth > _MAX_DEPTH:
                raise _Endless
            self.known[id(node)] = None
            known = self.leaf(node)
            self.known[id(node)] = self._made(node, depth) if known is None else _hashed([b"leaf", known])
        found = self.known[id(node)]
        if found is None:
            raise _Endless
        return found

    def _made(self, node: Any, depth: int) -> bytes:
        if type(node) is Call:
            pairs_of(node)  # puts the items of a dict where all dicts have them
            node = _later(node)
            if type(node) is bytes:
                return self.of(node, depth)
        name, parts = _INSIDE[type(node)](node)
        digests = [self.of(part, depth + 1) for part in parts]
        return _hashed([name, *(sorted(digests) if type(node) is PickledSet else digests)])


_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}  # their names before protocol 3


def _later(node: Call) -> Any:
    """A set or bytes as later protocols have them, of which protocol 2 makes a call; any other call itself."""
    kind, args = str(node.func).replace("__builtin__", "builtins"), node.args
    if node.how != "REDUCE" or node.items or node.pairs or node.state is not ABSENT:
        return node
    if kind in ("builtins.set", "builtins.frozenset") and len(args) == 1 and type(args[0]) is list:
        return PickledSet(args[0], kind == "builtins.frozenset")
    if kind == "_codecs.encode" and len(args) == 2 and args[1] == "latin1" and _is_latin(args[0]):
        return args[0].encode("latin1")
    return b"" if kind == "builtins.bytes" and not args else node


def _is_latin(text: Any) -> bool:
    return type(text) is str and max(text, default="") <= "\xff"


def _words(*parts: object) -> bytes:
    return repr(parts).encode()


def _hashed(parts: Iterable[bytes]) -> bytes:
    import hashlib  # loads OpenSSL

    digest = hashlib.blake2b(digest_size=32)
    for part in parts:
        digest.update(part)
    return digest.digest()


def _flat(pairs: dict[Any, Any] | None) -> list[Any]:
    return [part for pair in (pairs or {}).items() for part in pair]


def _of_call(node: Call) -> tuple[bytes, list[Any]]:
    rest = [] if node.state is ABSENT else [node.state, node.setter]
    items, pairs = node.items or [], _flat(node.pairs)
    counts = _words("call", node.how, len(items), len(pairs), len(rest))
    return counts, [node.func, node.args, node.kwargs, *items, *pairs, *rest]


_INSIDE: dict[type, Callable[[Any], tuple[bytes, Iterable[Any]]]] = {
    tuple: lambda node: (_words("tuple", len(node)), node),
    list: lambda node: (_words("list", len(node)), node),
    dict: lambda node: (_words("dict", len(node)), _flat(node)),
    PickledSet: lambda node: (_words("set", node.frozen), node.items),
    Persistent: lambda node: (_words("reference"), [node.id]),
    Call: _of_call,
}
