"""Write a tree of nodes as a pickle, opcode for opcode as CPython's pickler would."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from types import FunctionType
from typing import Any

from ckpttool.core.pickle_imports import DANGEROUS, verdict
from ckpttool.formats.pickle_read import ABSENT, ByteString, Call, Global, Persistent, Pickle, PickledSet

_BATCH = 1000  # items an APPENDS or SETITEMS takes, as in CPython


_dangerous: ContextVar[set[str] | None] = ContextVar("dangerous", default=None)


@contextmanager
def dangerous_written() -> Iterator[set[str]]:
    """Inside, the names of the dangerous imports that are written are added to the set."""
    found: set[str] = set()
    token = _dangerous.set(found)
    try:
        yield found
    finally:
        _dangerous.reset(token)


def dumps(pickle: Pickle, references: list[Persistent] | None = None) -> bytes:
    """The pickle's bytes. The tree may be nested to any depth and hold cycles.

    `references` receives every `Persistent` of the tree, in the order in which a reader meets them.
    """
    writer = _Writer(max(pickle.protocol, 2), references)
    writer.out.append(b"\x80" + bytes([writer.protocol]))
    writer.write(pickle.root)
    writer.out.append(b".")
    return b"".join(writer.out)


class _Writer:
    """The output so far, the memo (id of a node -> its index) and what is still to do, the next one last.

    `todo` holds nodes and, after the node it is about, a function that finishes it: a stack instead of recursion, since
    the file's author chooses how deep the tree is nested.
    """

    def __init__(self, protocol: int, references: list[Persistent] | None) -> None:
        self.protocol = protocol
        self.references = [] if references is None else references
        self.out: list[bytes] = []
        self.memo: dict[int, int] = {}
        self.todo: list[Any] = []

    def write(self, root: Any) -> None:
        todo, memo, out = self.todo, self.memo, self.out
        todo.append(root)
        while todo:
            node = todo.pop()
            kind = type(node)
            if kind is FunctionType:
                node(self, todo.pop())
                continue
            index = memo.get(id(node))
            if index is not None:
                out.append(_get(index))
                continue
            _SAVERS[kind](self, node)

    def then(self, *steps: Any) -> None:
        """Does the steps next, in this order: nodes are written, a function is called with the step behind it."""
        self.todo.extend(reversed(steps))

    def memoize(self, node: Any) -> None:
        index = len(self.memo)
        self.memo[id(node)] = index
        if self.protocol >= 4:
            self.out.append(b"\x94")
        else:
            self.out.append(b"q" + bytes((index,)) if index < 256 else b"r" + index.to_bytes(4, "little"))


def _get(index: int) -> bytes:
    return b"h" + bytes((index,)) if index < 256 else b"j" + index.to_bytes(4, "little")


def _emit(opcode: bytes) -> list[Any]:
    """What to put on the way (a function and its operand) to write `opcode` there."""
    return [_write_opcode, opcode]


def _write_opcode(writer: _Writer, opcode: bytes) -> None:
    writer.out.append(opcode)


_MARK, _POP, _POP_MARK = b"(", b"0", b"1"


def _save_none(writer: _Writer, node: None) -> None:
    writer.out.append(b"N")


def _save_bool(writer: _Writer, node: bool) -> None:
    writer.out.append(b"\x88" if node else b"\x89")


def _save_int(writer: _Writer, node: int) -> None:
    if 0 <= node < 0x100:
        writer.out.append(b"K" + node.to_bytes(1, "little"))
    elif 0 <= node < 0x10000:
        writer.out.append(b"M" + node.to_bytes(2, "little"))
    elif -0x80000000 <= node < 0x80000000:
        writer.out.append(b"J" + node.to_bytes(4, "little", signed=True))
    else:
        data = node.to_bytes((node.bit_length() >> 3) + 1, "little", signed=True)
        if node < 0 and data[-1] == 0xFF and data[-2] >= 0x80:  # the shortest two's complement
            data = data[:-1]
        if len(data) < 0x100:
            writer.out.append(b"\x8a" + bytes((len(data),)) + data)
        else:
            writer.out.append(b"\x8b" + struct.pack("<i", len(data)) + data)
            writer.memoize(node)  # CPython does not; but a hostile pickle could repeat the number without end


def _save_float(writer: _Writer, node: float) -> None:
    writer.out.append(struct.pack(">cd", b"G", node))


def _save_sized(writer: _Writer, node: Any, data: bytes, opcodes: tuple[bytes, bytes, bytes]) -> None:
    """Writes `data` behind its length, by the first opcode whose length field (1, 4, 8 bytes) is wide enough."""
    for opcode, width in zip(opcodes, (1, 4, 8)):
        if opcode and len(data) < 1 << 8 * width:
            writer.out.append(opcode + len(data).to_bytes(width, "little") + data)
            writer.memoize(node)
            return


def _save_str(writer: _Writer, node: str) -> None:
    short = b"\x8c" if writer.protocol >= 4 else b""
    _save_sized(writer, node, node.encode("utf-8", "surrogatepass"), (short, b"X", b"\x8d"))


def _save_bytes(writer: _Writer, node: bytes) -> None:
    _save_sized(writer, node, node, (b"C", b"B", b"\x8e"))


def _save_bytearray(writer: _Writer, node: bytearray) -> None:
    _save_sized(writer, node, bytes(node), (b"", b"", b"\x96"))


def _save_byte_string(writer: _Writer, node: ByteString) -> None:
    _save_sized(writer, node, node.value, (b"U", b"T", b""))


def _save_tuple(writer: _Writer, node: tuple[Any, ...]) -> None:
    if not node:
        writer.out.append(b")")
        return
    if len(node) > 3:
        writer.out.append(_MARK)
    writer.then(*node, _end_tuple, node)


def _end_tuple(writer: _Writer, node: tuple[Any, ...]) -> None:
    if id(node) in writer.memo:  # its own elements hold it: the one they made is the right one
        writer.out.append(_POP * len(node) if len(node) <= 3 else _POP_MARK)
        writer.out.append(_get(writer.memo[id(node)]))
    else:
        writer.out.append((b"\x85", b"\x86", b"\x87")[len(node) - 1] if len(node) <= 3 else b"t")
        writer.memoize(node)


def _save_list(writer: _Writer, node: list[Any]) -> None:
    writer.out.append(b"]")
    writer.memoize(node)
    writer.then(*_appends(node, whole=True))


def _save_dict(writer: _Writer, node: dict[Any, Any]) -> None:
    writer.out.append(b"}")
    writer.memoize(node)
    steps = _setitems(node, whole=True)
    if node and len(node) % _BATCH == 0:  # CPython writes an empty last batch here, and here only
        steps += _emit(_MARK) + _emit(b"u")
    writer.then(*steps)


def _appends(items: list[Any], whole: bool) -> list[Any]:
    """The steps that append `items`.

    CPython writes a batch of one item without a mark; for a `whole` list only if it is the list's only one.
    """
    steps: list[Any] = []
    for at in range(0, len(items), _BATCH):
        batch = items[at : at + _BATCH]
        if len(batch) == 1 and not (whole and at):
            steps += [*batch, *_emit(b"a")]
        else:
            steps += [*_emit(_MARK), *batch, *_emit(b"e")]
    return steps


def _setitems(pairs: dict[Any, Any], whole: bool) -> list[Any]:
    steps: list[Any] = []
    rest = iter(pairs.items())
    while batch := list(islice(rest, _BATCH)):
        flat = [part for pair in batch for part in pair]
        if len(batch) == 1 and not (whole and steps):
            steps += [*flat, *_emit(b"s")]
        else:
            steps += [*_emit(_MARK), *flat, *_emit(b"u")]
    return steps


def _save_set(writer: _Writer, node: PickledSet) -> None:
    if node.frozen:
        writer.then(*_emit(_MARK), *node.items, _end_frozenset, node)
        return
    writer.out.append(b"\x8f")
    writer.memoize(node)
    writer.then(*_emit(_MARK), *node.items, *_emit(b"\x90"))


def _end_frozenset(writer: _Writer, node: PickledSet) -> None:
    if id(node) in writer.memo:
        writer.out.append(_POP_MARK + _get(writer.memo[id(node)]))
    else:
        writer.out.append(b"\x91")
        writer.memoize(node)


def _save_global(writer: _Writer, node: Global) -> None:
    noted = _dangerous.get()
    if noted is not None and verdict(node.module, node.name) == DANGEROUS:
        noted.add(str(node))
    words = f"{node.module}\n{node.name}\n"
    if writer.protocol < 4 and words.isascii() and words.count("\n") == 2:
        writer.out.append(b"c" + words.encode())
        writer.memoize(node)
    else:
        writer.then(node.module, node.name, *_emit(b"\x93"), _Writer.memoize, node)


def _save_persistent(writer: _Writer, node: Persistent) -> None:
    writer.references.append(node)
    writer.then(node.id, *_emit(b"Q"))


_CALLS = {"REDUCE": b"R", "NEWOBJ": b"\x81", "NEWOBJ_EX": b"\x92", "OBJ": b"o"}


def _save_call(writer: _Writer, node: Call) -> None:
    if node.how == "OBJ":
        writer.then(*_emit(_MARK), node.func, *node.args, _end_call, node)
    elif node.how == "NEWOBJ_EX":
        writer.then(node.func, node.args, node.kwargs, _end_call, node)
    else:
        writer.then(node.func, node.args, _end_call, node)


def _end_call(writer: _Writer, node: Call) -> None:
    writer.out.append(_CALLS[node.how])
    if id(node) in writer.memo:  # its own arguments hold it
        writer.out.append(_POP + _get(writer.memo[id(node)]))
        return
    writer.memoize(node)
    steps: list[Any] = []
    if node.items:
        steps += _appends(node.items, whole=False)
    if node.pairs:
        steps += _setitems(node.pairs, whole=False)
    if node.setter is not None:
        steps += [node.setter, node, node.state, *_emit(b"\x86R0")]
    elif node.state is not ABSENT:
        steps += [node.state, *_emit(b"b")]
    writer.then(*steps)


_SAVERS: dict[type, Callable[[_Writer, Any], None]] = {
    type(None): _save_none,
    bool: _save_bool,
    int: _save_int,
    float: _save_float,
    str: _save_str,
    bytes: _save_bytes,
    bytearray: _save_bytearray,
    ByteString: _save_byte_string,
    tuple: _save_tuple,
    list: _save_list,
    dict: _save_dict,
    PickledSet: _save_set,
    Global: _save_global,
    Persistent: _save_persistent,
    Call: _save_call,
}
