"""The whole content of a node, storages included, as one digest: equal where torch would load equal objects.

What one file shares and another repeats, how storages are numbered, and what else lies in a tensor's storage makes no
difference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from ckpttool.errors import CkptError
from ckpttool.evaluate.compare import content_of_storage, fingerprint
from ckpttool.formats.containers.pickle_tree import ABSENT, Call, Persistent, PickledSet
from ckpttool.formats.torch.mappings import pairs_of
from ckpttool.formats.torch.tensors import Storages, entry_of, is_tensor, typed_storage

_MAX_DEPTH = 200


def content_of(node: Any, storages: Storages) -> bytes | None:
    """The digest of the object that `node` makes; None where it holds itself, or is nested too deep."""
    try:
        return _Digests(storages).of(node, 0)
    except (RecursionError, _Endless, CkptError):
        return None


class _Endless(Exception):
    """The object holds itself."""


class _Digests:
    """A node's digest is made of those of its parts: each is looked at once, however often it is shared."""

    def __init__(self, storages: Storages) -> None:
        self.storages = storages
        self.known: dict[int, bytes | None] = {}
        self.kept: list[Any] = []  # nodes by whose ids digests are known

    def of(self, node: Any, depth: int) -> bytes:
        kind = type(node)
        if kind not in _INSIDE:
            return _hashed([kind.__name__.encode(), repr(node).encode("utf-8", "surrogatepass")])
        if id(node) not in self.known:
            if depth > _MAX_DEPTH:
                raise _Endless
            self.kept.append(node)
            self.known[id(node)] = None
            self.known[id(node)] = self._made(node, depth)
        found = self.known[id(node)]
        if found is None:
            raise _Endless
        return found

    def _made(self, node: Any, depth: int) -> bytes:
        if type(node) is Persistent:
            dtype, storage = typed_storage(node, self.storages)
            return _hashed([b"storage", dtype.encode(), content_of_storage(storage)])
        if is_tensor(node):
            entry = entry_of("", node, self.storages)
            if entry.storage is not None:
                return _hashed([b"tensor", _words(*fingerprint(entry))])
        if type(node) is Call:
            pairs_of(node)  # puts the items of a dict where all dicts have them
        name, parts = _INSIDE[type(node)](node)
        digests = [self.of(part, depth + 1) for part in parts]
        return _hashed([name, *(sorted(digests) if type(node) is PickledSet else digests)])


def _words(*parts: object) -> bytes:
    return repr(parts).encode()


def _hashed(parts: Iterable[bytes]) -> bytes:
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


_INSIDE: dict[type, Any] = {
    tuple: lambda node: (_words("tuple", len(node)), node),
    list: lambda node: (_words("list", len(node)), node),
    dict: lambda node: (_words("dict", len(node)), _flat(node)),
    PickledSet: lambda node: (_words("set", node.frozen), node.items),
    Persistent: None,
    Call: _of_call,
}
