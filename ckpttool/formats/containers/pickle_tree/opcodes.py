"""What each opcode of a pickle does to the stack of the reader: one function an opcode, in one table.

They build nodes and never call anything that the pickle names. What they raise, `loads` turns into a `CkptError`.
"""

from __future__ import annotations

import codecs
import struct
from collections.abc import Callable
from dataclasses import field
from typing import Any

from ckpttool.formats.containers.pickle_tree.nodes import ABSENT, ByteString, Call, Global, Persistent, PickledSet
from ckpttool.imports import OWN, verdict
from ckpttool.limits import limits
from ckpttool.values import dataclass
from ckpttool.words import a

STOP = ord(".")
PROTO = 0x80


@dataclass(slots=True)
class Imported:
    """An import that is not torch's own: the byte of its opcode, and every call of it or of what it returned."""

    name: Global
    verdict: str
    offset: int
    calls: list[Call] = field(default_factory=list)
    called: int = 0


@dataclass(slots=True)
class State:
    """What the opcodes need beside stack and memo: the stack's height at each open mark, and the globals so far.

    `persistent` makes the node of a persistent id; so many marks may be open at a time. `left` are the bytes of memory
    that the tree may still take. `imported` are the imports that are not torch's own, `watched` the same by the id of
    the nodes that they made.
    """

    persistent: Callable[[Any], Any]
    most_marks: int
    left: int = 1 << 40
    marks: list[int] = field(default_factory=list)
    globals: list[Global] = field(default_factory=list)
    imported: dict[Global, Imported] = field(default_factory=dict)
    watched: dict[int, Imported] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)  # the nodes in `watched`, so that their ids stay theirs


# Bytes of memory that a node takes in Python, from above: `State.left` counts them. What is only pushed takes less than
# ten bytes for each of the pickle's, and is not counted.
_LIST, _DICT, _SET, _TUPLE, _CALL, _GLOBAL, _IMPORT, _REFERENCE = 72, 72, 128, 64, 112, 200, 600, 120
_ITEM, _PAIR, _FIRST_PAIR, _MEMO, _TEXT = 10, 72, 168, 80, 64
_MOST_CALLS = 5  # of an import that are kept with their arguments


# A handler gets the pickle, the offset behind its opcode, the stack, the memo and the rest of the state; it returns the
# offset of the next opcode.
Handler = Callable[[bytes, int, "list[Any]", "dict[int, Any]", State], int]


def _line(data: bytes, at: int) -> tuple[bytes, int]:
    end = data.find(b"\n", at)
    if end < 0:
        raise ValueError("a line without an end")
    return data[at:end], end + 1


def _above_mark(stack: list[Any], state: State) -> list[Any]:
    height = state.marks.pop()
    if height > len(stack):
        raise ValueError("the objects below a mark were taken away")
    found = stack[height:]
    del stack[height:]
    return found


def _push(value: Any) -> Handler:
    def push(data: bytes, at: int, stack: list[Any], memo: dict[int, Any], state: State) -> int:
        stack.append(value)
        return at

    return push


def _unpacked(code: str) -> Handler:
    codec = struct.Struct(code)
    size, unpack = codec.size, codec.unpack_from

    def push(data: bytes, at: int, stack: list[Any], memo: dict[int, Any], state: State) -> int:
        stack.append(unpack(data, at)[0])
        return at + size

    return push


def _sized(width: int, make: Callable[[bytes], Any], wide: int = 1) -> Handler:
    """An object made of the bytes that follow their length, `width` bytes wide; `wide` bytes for each if not ASCII."""

    def push(data: bytes, at: int, stack: list[Any], memo: dict[int, Any], state: State) -> int:
        body = at + width
        length = int.from_bytes(data[at:body], "little")
        end = body + length
        if end > len(data):
            raise ValueError(f"{length} bytes are announced, {len(data) - body} are left")
        part = data[body:end]
        state.left -= _TEXT + (length if wide == 1 or part.isascii() else wide * length)
        stack.append(make(part))
        return end

    return push


def _lined(make: Callable[[bytes], Any]) -> Handler:
    def push(data: bytes, at: int, stack: list[Any], memo: dict[int, Any], state: State) -> int:
        text, at = _line(data, at)
        state.left -= _TEXT + 4 * len(text)
        stack.append(make(text))
        return at

    return push


def _put(width: int) -> Handler:
    def put(data: bytes, at: int, stack: list[Any], memo: dict[int, Any], state: State) -> int:
        state.left -= _MEMO
        memo[int.from_bytes(data[at : at + width], "little")] = stack[-1]
        return at + width

    return put


def _get(width: int) -> Handler:
    def get(data: bytes, at: int, stack: list[Any], memo: dict[int, Any], state: State) -> int:
        stack.append(memo[int.from_bytes(data[at : at + width], "little")])
        return at + width

    return get


def _short_put(data: bytes, at: int, stack: list[Any], memo: dict[int, Any], state: State) -> int:
    memo[data[at]] = stack[-1]
    return at + 1


def _short_get(data: bytes, at: int, stack: list[Any], memo: dict[int, Any], state: State) -> int:
    stack.append(memo[data[at]])
    return at + 1


def _line_put(data: bytes, at: int, stack: list[Any], memo: dict[int, Any], state: State) -> int:
    text, at = _line(data, at)
    state.left -= _MEMO + len(text)
    memo[_integer(text)] = stack[-1]
    return at


def _line_get(data: bytes, at: int, stack: list[Any], memo: dict[int, Any], state: State) -> int:
    text, at = _line(data, at)
    stack.append(memo[_integer(text)])
    return at


def _memoize(data: bytes, at: int, stack: list[Any], memo: dict[int, Any], state: State) -> int:
    state.left -= _MEMO
    memo[len(memo)] = stack[-1]
    return at


def _mark(data: bytes, at: int, stack: list[Any], memo: dict[int, Any], state: State) -> int:
    if len(state.marks) >= state.most_marks:
        raise ValueError(f"too many open marks: {limits().named('pickle_marks')}")
    state.marks.append(len(stack))
    return at


def _pop(data: bytes, at: int, stack: list[Any], memo: dict[int, Any], state: State) -> int:
    if state.marks and state.marks[-1] == len(stack):  # as in Python, an open mark is what lies on top
        state.marks.pop()
        return at
    dropped = stack.pop()
    owner = stack[-1] if stack else None
    if type(owner) is type(dropped) is Call and len(dropped.args) == 2 and dropped.args[0] is owner:
        owner.state = dropped.args[1]  # how Python pickles a state setter: setter(object, state), result dropped
        owner.setter = dropped.func
    return at


def _pop_mark(data: bytes, at: int, stack: list[Any], memo: dict[int, Any], state: State) -> int:
    _above_mark(stack, state)
    return at


def _dup(data: bytes, at: int, stack: list[Any], memo: dict[int, Any], state: State) -> int:
    stack.append(stack[-1])
    return at


def _skip(width: int) -> Handler:
    def skip(data: bytes, at: int, stack: list[Any], memo: dict[int, Any], state: State) -> int:
        return at + width

    return skip


def _empty(make: Callable[[], Any], cost: int) -> Handler:
    def push(data: bytes, at: int, stack: list[Any], memo: dict[int, Any], state: State) -> int:
        state.left -= cost
        stack.append(make())
        return at

    return push


def _marked(make: Callable[[list[Any]], Any], cost: int, item: int = _ITEM) -> Handler:
    def push(data: bytes, at: int, stack: list[Any], memo: dict[int, Any], state: State) -> int:
        found = _above_mark(stack, state)
        state.left -= cost + item * len(found)
        stack.append(make(found))
        return at

    return push


def _tuple1(data: bytes, at: int, stack: list[Any], memo: dict[int, Any], state: State) -> int:
    state.left -= _TUPLE
    stack[-1] = (stack[-1],)
    return at


def _tuple2(data: bytes, at: int, stack: list[Any], memo: dict[int, Any], state: State) -> int:
    last = stack.pop()
    state.left -= _TUPLE
    stack[-1] = (stack[-1], last)
    return at


def _tuple3(data: bytes, at: int, stack: list[Any], memo: dict[int, Any], state: State) -> int:
    state.left -= _TUPLE
    stack[-3:] = [(stack[-3], stack[-2], stack[-1])]
    return at


def _append(data: bytes, at: int, stack: list[Any], memo: dict[int, Any], state: State) -> int:
    state.left -= _LIST
    _extend(stack[-2], [stack.pop()])
    return at


def _appends(data: bytes, at: int, stack: list[Any], memo: dict[int, Any], state: State) -> int:
    found = _above_mark(stack, state)
    state.left -= _LIST + _ITEM * len(found)
    _extend(stack[-1], found)
    return at


def _additems(data: bytes, at: int, stack: list[Any], memo: dict[int, Any], state: State) -> int:
    found = _above_mark(stack, state)
    if type(stack[-1]) is not PickledSet or stack[-1].frozen:
        raise TypeError("items are added to what is no set")
    state.left -= _ITEM * len(found)
    stack[-1].items.extend(found)
    return at


def _extend(owner: Any, items: list[Any]) -> None:
    if type(owner) is list:
        owner.extend(items)
    elif type(owner) is Call and owner.state is ABSENT:
        if owner.items is None:
            owner.items = items
        else:
            owner.items.extend(items)
    else:
        raise TypeError("items are appended to what takes none")


def _setitem(data: bytes, at: int, stack: list[Any], memo: dict[int, Any], state: State) -> int:
    value = stack.pop()
    key = stack.pop()
    state.left -= _FIRST_PAIR
    _update(stack[-1], [key], [value])
    return at


def _setitems(data: bytes, at: int, stack: list[Any], memo: dict[int, Any], state: State) -> int:
    found = _above_mark(stack, state)
    state.left -= _FIRST_PAIR + _PAIR * (len(found) // 2)
    _update(stack[-1], found[::2], found[1::2])
    return at


def _update(owner: Any, keys: list[Any], values: list[Any]) -> None:
    if len(keys) != len(values):
        raise ValueError("a key without a value")
    for key in keys:
        if type(key) is not str:
            check_key(key)
    if type(owner) is Call and owner.state is ABSENT:
        if owner.pairs is None:
            owner.pairs = {}
        owner = owner.pairs
    if type(owner) is not dict:
        raise TypeError("a key is set on what takes none")
    owner.update(zip(keys, values))


_ATOMS = frozenset((str, bytes, int, float, bool, type(None), Global, Persistent, ByteString, Call, PickledSet))
_LARGEST_KEY = 100


def check_key(key: Any) -> None:
    """Raises for a key that would be slow to hash: Python's ints and tuples let their writer choose how slow."""
    todo = [key]
    for _ in range(_LARGEST_KEY):
        part = todo.pop()
        if type(part) is tuple:
            todo.extend(part[: _LARGEST_KEY + 1])
        elif type(part) not in _ATOMS or (type(part) is int and part.bit_length() > 64):
            raise TypeError(f"{a(part)} stands as the key of a dict")
        if not todo:
            return
    raise ValueError("the key of a dict is too large")


def _dict(found: list[Any]) -> dict[Any, Any]:
    made: dict[Any, Any] = {}
    _update(made, found[::2], found[1::2])
    return made


def _global(data: bytes, at: int, stack: list[Any], memo: dict[int, Any], state: State) -> int:
    start = at - 1
    module, at = _line(data, at)
    name, at = _line(data, at)
    _import(Global(module.decode(), name.decode()), start, stack, state)
    return at


def _import(name: Global, start: int, stack: list[Any], state: State) -> None:
    state.left -= _GLOBAL + 4 * (len(name.module) + len(name.name))
    state.globals.append(name)
    stack.append(name)
    found = verdict(name.module, name.name)
    if found != OWN:
        if name not in state.imported:
            state.left -= _IMPORT
            state.imported[name] = Imported(name, found, start)
        _watch(name, state.imported[name], state)


def _watch(node: Any, imported: Imported, state: State) -> None:
    state.left -= _MEMO
    state.watched[id(node)] = imported
    state.kept.append(node)


def _call(call: Call, stack: list[Any], state: State) -> None:
    """Puts the call in the place of what is called, and notes it if that is an import, or what a call of one made."""
    state.left -= _CALL
    imported = state.watched.get(id(call.func)) if state.watched else None
    if imported is not None:
        imported.called += 1
        if len(imported.calls) < _MOST_CALLS:
            imported.calls.append(call)
        _watch(call, imported, state)
    stack[-1] = call


def _stack_global(data: bytes, at: int, stack: list[Any], memo: dict[int, Any], state: State) -> int:
    name = stack.pop()
    module = stack.pop()
    if type(name) is not str or type(module) is not str:
        raise TypeError("a global's name is no string")
    _import(Global(module, name), at - 1, stack, state)
    return at


def _called(how: str) -> Handler:
    def call(data: bytes, at: int, stack: list[Any], memo: dict[int, Any], state: State) -> int:
        args = stack.pop()
        if type(args) is not tuple:
            raise TypeError("the arguments of a call are no tuple")
        _call(Call(stack[-1], args, how), stack, state)
        return at

    return call


def _newobj_ex(data: bytes, at: int, stack: list[Any], memo: dict[int, Any], state: State) -> int:
    kwargs = stack.pop()
    args = stack.pop()
    if type(args) is not tuple or type(kwargs) is not dict:
        raise TypeError("the arguments of a call are no tuple and dict")
    _call(Call(stack[-1], args, "NEWOBJ_EX", kwargs), stack, state)
    return at


def _inst(data: bytes, at: int, stack: list[Any], memo: dict[int, Any], state: State) -> int:
    found = _above_mark(stack, state)
    at = _global(data, at, stack, memo, state)
    _call(Call(stack[-1], tuple(found), "OBJ"), stack, state)
    return at


def _obj(data: bytes, at: int, stack: list[Any], memo: dict[int, Any], state: State) -> int:
    func, *args = _above_mark(stack, state)
    stack.append(func)
    _call(Call(func, tuple(args), "OBJ"), stack, state)
    return at


def _build(data: bytes, at: int, stack: list[Any], memo: dict[int, Any], state: State) -> int:
    built = stack.pop()
    if type(stack[-1]) is not Call or stack[-1].state is not ABSENT:
        raise TypeError("a state is set on what takes none")
    stack[-1].state = built
    return at


def _persid(data: bytes, at: int, stack: list[Any], memo: dict[int, Any], state: State) -> int:
    text, at = _line(data, at)
    state.left -= _REFERENCE
    stack.append(state.persistent(text.decode("ascii")))
    return at


def _binpersid(data: bytes, at: int, stack: list[Any], memo: dict[int, Any], state: State) -> int:
    if type(stack[-1]) not in (tuple, str):
        raise TypeError("a persistent id is neither a tuple nor a string")
    state.left -= _REFERENCE
    stack[-1] = state.persistent(stack[-1])
    return at


def _unknown(data: bytes, at: int, stack: list[Any], memo: dict[int, Any], state: State) -> int:
    raise ValueError(f"unknown opcode 0x{data[at - 1]:02x}")


def _extension(data: bytes, at: int, stack: list[Any], memo: dict[int, Any], state: State) -> int:
    raise ValueError("it uses copyreg's extension registry, whose meaning is not in the file")


def _buffer(data: bytes, at: int, stack: list[Any], memo: dict[int, Any], state: State) -> int:
    raise ValueError("it refers to a buffer that is not in the file")


def _text(data: bytes) -> str:
    if len(data) == 1 and data.isdigit():
        return str(int(data))  # a new string: decoding gives one for all, and what the pickle does not share would be
    return str(data, "utf-8", "surrogatepass")


def _py2_text(data: bytes) -> str | ByteString:
    return data.decode("ascii") if data.isascii() else ByteString(data)


def _quoted(line: bytes) -> str | ByteString:
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in b"'\"":
        raise ValueError("a string without quotes")
    return _py2_text(codecs.escape_decode(line[1:-1])[0])


def _integer(line: bytes) -> int:
    if len(line) > 4300:  # the time to read decimal digits grows with their square; Python 3.11 has the same limit
        raise ValueError("an integer of too many digits")
    return int(line)


def _int_or_bool(line: bytes) -> int | bool:
    return {b"00": False, b"01": True}.get(line, _integer(line))


def _long(line: bytes) -> int:
    return _integer(line[:-1] if line.endswith(b"L") else line)


def _little_endian(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def _frozenset(found: list[Any]) -> PickledSet:
    return PickledSet(found, frozen=True)


_TABLE: dict[bytes, Handler] = {
    b"\x80": _skip(1),  # PROTO
    b"\x95": _skip(8),  # FRAME
    b"(": _mark,
    b"0": _pop,
    b"1": _pop_mark,
    b"2": _dup,
    b"N": _push(None),
    b"\x88": _push(True),
    b"\x89": _push(False),
    b"I": _lined(_int_or_bool),
    b"J": _unpacked("<i"),
    b"K": _unpacked("<B"),
    b"M": _unpacked("<H"),
    b"L": _lined(_long),
    b"\x8a": _sized(1, _little_endian),
    b"\x8b": _sized(4, _little_endian),
    b"F": _lined(float),
    b"G": _unpacked(">d"),
    b"S": _lined(_quoted),
    b"T": _sized(4, _py2_text),
    b"U": _sized(1, _py2_text),
    b"V": _lined(lambda line: line.decode("raw_unicode_escape")),
    b"X": _sized(4, _text, 4),
    b"\x8c": _sized(1, _text, 4),
    b"\x8d": _sized(8, _text, 4),
    b"B": _sized(4, bytes),
    b"C": _sized(1, bytes),
    b"\x8e": _sized(8, bytes),
    b"\x96": _sized(8, bytearray),
    b")": _push(()),
    b"t": _marked(tuple, _TUPLE),
    b"\x85": _tuple1,
    b"\x86": _tuple2,
    b"\x87": _tuple3,
    b"]": _empty(list, _LIST),
    b"l": _marked(list, _LIST),
    b"a": _append,
    b"e": _appends,
    b"}": _empty(dict, _DICT),
    b"d": _marked(_dict, _FIRST_PAIR, _PAIR),
    b"s": _setitem,
    b"u": _setitems,
    b"\x8f": _empty(lambda: PickledSet([]), _SET),
    b"\x90": _additems,
    b"\x91": _marked(_frozenset, _SET),
    b"p": _line_put,
    b"q": _short_put,
    b"r": _put(4),
    b"\x94": _memoize,
    b"g": _line_get,
    b"h": _short_get,
    b"j": _get(4),
    b"c": _global,
    b"\x93": _stack_global,
    b"R": _called("REDUCE"),
    b"\x81": _called("NEWOBJ"),
    b"\x92": _newobj_ex,
    b"i": _inst,
    b"o": _obj,
    b"b": _build,
    b"P": _persid,
    b"Q": _binpersid,
    b"\x82": _extension,
    b"\x83": _extension,
    b"\x84": _extension,
    b"\x97": _buffer,
    b"\x98": _buffer,
}
HANDLERS: list[Handler] = [_TABLE.get(bytes([opcode]), _unknown) for opcode in range(256)]
