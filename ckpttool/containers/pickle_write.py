"""Write a tree of nodes as a pickle, opcode for opcode as CPython's pickler would."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain, islice
from typing import Any

from ckpttool.containers.pickle_read import (
    ABSENT,
    ByteString,
    Call,
    Global,
    Persistent,
    Pickle,
    PickledSet,
)
from ckpttool.core.pickle_imports import DANGEROUS, verdict

_BATCH = 1000  # items an APPENDS or SETITEMS takes, as in CPython

_dangerous: ContextVar[set[str] | None] = ContextVar("dangerous", default=None)


@contextmanager
def dangerous_written() -> Iterator[set[str]]:
    """Inside, the names of the dangerous imports that are written are added to the set."""
    names: set[str] = set()
    token = _dangerous.set(names)
    try:
        yield names
    finally:
        _dangerous.reset(token)


class _Opcode(bytes):
    """A step of the writer: these bytes are written."""


_MARK, _APPEND, _APPENDS, _SETITEM, _SETITEMS, _PERSID = map(
    _Opcode, (b"(", b"a", b"e", b"s", b"u", b"Q")
)
_POP, _POP_MARK = b"0", b"1"
_TUPLES = (b")", b"\x85", b"\x86", b"\x87")  # by the number of elements
_CALLS = {"REDUCE": b"R", "NEWOBJ": b"\x81", "NEWOBJ_EX": b"\x92", "OBJ": b"o"}


# a step of the writer, before a node: all its parts are written, and the opcode that makes it
# follows
_END = object()


def dumps(pickle: Pickle, references: list[Persistent] | None = None) -> bytes:
    """Return the pickle's bytes. The tree may be nested to any depth and hold cycles.

    `references` receives every `Persistent` of the tree, in the order in which a reader meets them.
    """
    writer = _NodeWriter(max(pickle.protocol, 2), [] if references is None else references)
    writer.out.append(b"\x80" + bytes([writer.protocol]))
    todo, memo = writer.todo, writer.memo
    todo.append(pickle.root)
    while todo:
        step = todo.pop()
        if type(step) is _Opcode:
            writer.out.append(step)
        elif id(step) in memo:
            writer.get(step)
        elif step is _END:
            writer.end(todo.pop())
        else:
            writer.save(step)
    writer.out.append(b".")
    return b"".join(writer.out)


class _NodeWriter:
    """The output so far, the memo (id of a node -> its index), and the nodes and steps still to do,
    the next one last.

    A stack instead of recursion, since the file's author chooses how deep the tree is nested.
    """

    def __init__(self, protocol: int, references: list[Persistent]) -> None:
        self.protocol = protocol
        self.references = references
        self.out: list[bytes] = []
        self.memo: dict[int, int] = {}
        self.todo: list[Any] = []

    def then(self, *steps: Any) -> None:
        self.todo.extend(reversed(steps))

    def memoize(self, node: Any) -> None:
        index = self.memo[id(node)] = len(self.memo)
        if self.protocol >= 4:
            self.out.append(b"\x94")
        elif index < 256:
            self.out.append(b"q" + bytes((index,)))
        else:
            self.out.append(b"r" + index.to_bytes(4, "little"))

    def get(self, node: Any) -> None:
        index = self.memo[id(node)]
        if index < 256:
            self.out.append(b"h" + bytes((index,)))
        else:
            self.out.append(b"j" + index.to_bytes(4, "little"))

    def sized(self, node: Any, data: bytes, *opcodes: bytes) -> None:
        """Write `data` after its length, by the first opcode whose length field (1, 4, 8 bytes) is
        wide enough.
        """
        for opcode, width in zip(opcodes, (1, 4, 8)):
            if opcode and len(data) < 1 << 8 * width:
                length = len(data).to_bytes(width, "little")
                self.out.append(opcode + length + data)
                self.memoize(node)
                return

    def save(self, node: Any) -> None:
        _SAVERS[type(node)](self, node)

    def save_text(self, node: str) -> None:
        short = b"\x8c" if self.protocol >= 4 else b""
        self.sized(node, node.encode("utf-8", "surrogatepass"), short, b"X", b"\x8d")

    def save_bytes(self, node: bytes) -> None:
        self.sized(node, node, b"C", b"B", b"\x8e")

    def save_bytearray(self, node: bytearray) -> None:
        self.sized(node, bytes(node), b"", b"", b"\x96")

    def save_byte_string(self, node: ByteString) -> None:
        self.sized(node, node.value, b"U", b"T", b"")

    def save_none(self, node: None) -> None:
        self.out.append(b"N")

    def save_bool(self, node: bool) -> None:
        self.out.append(b"\x88" if node else b"\x89")

    def save_int(self, node: int) -> None:
        data = _integer(node)
        self.out.append(data)
        if data[:1] == b"\x8b":
            # CPython does not; but a hostile pickle could repeat the number without end
            self.memoize(node)

    def save_float(self, node: float) -> None:
        self.out.append(struct.pack(">cd", b"G", node))

    def save_tuple(self, node: tuple[Any, ...]) -> None:
        if len(node) > 3:
            self.out.append(_MARK)
        if node:
            self.then(*node, _END, node)
        else:
            self.out.append(_TUPLES[0])

    def save_call(self, node: Call) -> None:
        if node.how == "OBJ":
            self.then(_MARK, node.func, *node.args, _END, node)
        elif node.how == "NEWOBJ_EX":
            self.then(node.func, node.args, node.kwargs, _END, node)
        else:
            self.then(node.func, node.args, _END, node)

    def save_persistent(self, node: Persistent) -> None:
        self.references.append(node)
        self.then(node.id, _PERSID)

    def save_name(self, node: Global) -> None:
        noted = _dangerous.get()
        if noted is not None and verdict(node.module, node.name) == DANGEROUS:
            noted.add(str(node))
        lines = f"{node.module}\n{node.name}\n"
        if self.protocol < 4 and lines.isascii() and lines.count("\n") == 2:
            self.out.append(b"c" + lines.encode())
            self.memoize(node)
        else:
            self.then(node.module, node.name, _END, node)

    def save_list(self, node: list[Any]) -> None:
        self.out.append(b"]")
        self.memoize(node)
        self.then(*_in_batches(zip(node), _APPEND, _APPENDS, whole=True))

    def save_dict(self, node: dict[Any, Any]) -> None:
        self.out.append(b"}")
        self.memoize(node)
        steps = _in_batches(node.items(), _SETITEM, _SETITEMS, whole=True)
        # only here CPython writes an empty last batch
        empty = (_MARK, _SETITEMS) if node and len(node) % _BATCH == 0 else ()
        self.then(*steps, *empty)

    def save_set(self, node: PickledSet) -> None:
        if node.frozen:
            self.then(_MARK, *node.items, _END, node)
            return
        self.out.append(b"\x8f")
        self.memoize(node)
        self.then(_MARK, *node.items, _Opcode(b"\x90"))

    def end(self, node: Any) -> None:
        """Write the opcode that makes a node of its parts; if they hold it, it is made already, and
        is taken.
        """
        is_short = type(node) is tuple and len(node) <= 3
        if id(node) in self.memo and type(node) is not Global:
            if type(node) is Call:
                self.out.append(_CALLS[node.how] + _POP)
            else:
                self.out.append(_POP * len(node) if is_short else _POP_MARK)
            self.get(node)
            return
        if type(node) is Global:
            opcode = b"\x93"
        elif type(node) is Call:
            opcode = _CALLS[node.how]
        elif is_short:
            opcode = _TUPLES[len(node)]
        else:
            opcode = b"t" if type(node) is tuple else b"\x91"
        self.out.append(opcode)
        self.memoize(node)
        if type(node) is Call:
            self.then(*self.changes(node))

    def changes(self, node: Call) -> list[Any]:
        """Return the steps that change the object after the call."""
        if node.items is None and node.pairs is None and node.state is ABSENT:
            return []
        steps = list(_in_batches(zip(node.items or ()), _APPEND, _APPENDS, whole=False))
        steps += _in_batches((node.pairs or {}).items(), _SETITEM, _SETITEMS, whole=False)
        if node.setter is not None:
            steps += [node.setter, node, node.state, _Opcode(b"\x86R0")]
        elif node.state is not ABSENT:
            steps += [node.state, _Opcode(b"b")]
        return steps


_SAVERS: dict[type, Callable[[_NodeWriter, Any], None]] = {
    str: _NodeWriter.save_text,
    bytes: _NodeWriter.save_bytes,
    bytearray: _NodeWriter.save_bytearray,
    ByteString: _NodeWriter.save_byte_string,
    type(None): _NodeWriter.save_none,
    bool: _NodeWriter.save_bool,
    int: _NodeWriter.save_int,
    float: _NodeWriter.save_float,
    tuple: _NodeWriter.save_tuple,
    Call: _NodeWriter.save_call,
    Persistent: _NodeWriter.save_persistent,
    Global: _NodeWriter.save_name,
    list: _NodeWriter.save_list,
    dict: _NodeWriter.save_dict,
    PickledSet: _NodeWriter.save_set,
}


def _in_batches(
    parts: Iterable[tuple[Any, ...]], single: _Opcode, many: _Opcode, *, whole: bool
) -> Iterator[Any]:
    """Yield the steps that append items (tuples of one) or set pairs: a `single` one by an opcode,
    `many` after a mark.

    CPython writes a batch of one without a mark; of a `whole` list or dict only if it is the only
    batch.
    """
    rest, is_first = iter(parts), True
    while batch := list(islice(rest, _BATCH)):
        steps = chain.from_iterable(batch)
        if len(batch) == 1 and (is_first or not whole):
            yield from (*steps, single)
        else:
            yield from (_MARK, *steps, many)
        is_first = False


def _integer(node: int) -> bytes:
    if 0 <= node < 0x100:
        return b"K" + bytes((node,))
    if 0 <= node < 0x10000:
        return b"M" + node.to_bytes(2, "little")
    if -0x80000000 <= node < 0x80000000:
        return b"J" + node.to_bytes(4, "little", signed=True)
    data = node.to_bytes((node.bit_length() >> 3) + 1, "little", signed=True)
    if node < 0 and data[-1] == 0xFF and data[-2] >= 0x80:  # the shortest two's complement
        data = data[:-1]
    if len(data) < 0x100:
        return b"\x8a" + bytes((len(data),)) + data
    return b"\x8b" + struct.pack("<i", len(data)) + data
