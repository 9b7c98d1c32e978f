"""Read a pickle into a tree of inert nodes, without executing any of it, in bounded time and memory."""

from __future__ import annotations

import codecs
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import field
from typing import Any, NamedTuple

from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.limits import Memory, limits
from ckpttool.core.pickle_imports import DANGEROUS, OWN, UNKNOWN, Import, verdict
from ckpttool.core.text import a
from ckpttool.core.values import dataclass


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function, by the module and name that the pickle gives it."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, slots=True, eq=False)
class Persistent:
    """An object kept outside the pickle, by its persistent id (for torch a storage)."""

    id: Any


@dataclass(frozen=True, slots=True)
class ByteString:
    """A ``str`` of Python 2 that is not ASCII."""

    value: bytes


@dataclass(frozen=True, slots=True, eq=False)
class PickledSet:
    """A set or frozenset of protocol 4 and later, its items in the pickle's order."""

    items: list[Any]
    frozen: bool = False


ABSENT = object()  # a `Call` without state; None would be a state


class Call:
    """An object that the pickle makes by a call, with what it does to the object afterwards.

    `how` is the opcode: ``REDUCE`` (func(*args)), ``NEWOBJ`` (func.__new__(func, *args)), ``NEWOBJ_EX`` (with `kwargs`)
    or ``OBJ``. Then come `items` (appended), `pairs` (set), and `state` (handed to ``__setstate__``, or to `setter`).
    """

    __slots__ = ("args", "func", "how", "items", "kwargs", "pairs", "setter", "state")

    def __init__(self, func: Any, args: Any, how: str = "REDUCE", kwargs: Any = None) -> None:
        self.func = func
        self.args = args
        self.how = how
        self.kwargs = kwargs
        self.items: list[Any] | None = None
        self.pairs: dict[Any, Any] | None = None
        self.state: Any = ABSENT
        self.setter: Any = None

    def __repr__(self) -> str:
        return f"Call({self.func!s}, ...)"


@dataclass(frozen=True, slots=True, eq=False)
class Pickle:
    """One pickle: its object, the protocol it was written in, and the offset behind its last byte.

    `globals` are all that it imports, in order and with repeats, also where nothing in the tree refers to it any more;
    `imports` are those that are not torch's own, once each, with their calls. `memory` is what is left for whatever is
    made of the tree; None for a tree that was not read.
    """

    root: Any
    protocol: int
    end: int = 0
    globals: tuple[Global, ...] = ()
    imports: tuple[Import, ...] = ()
    memory: Memory | None = None


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


_PUSHED = 10  # bytes of memory for each of the pickle's, at most, of what the opcodes do not count
_STEPS = 4096  # opcodes from one look at the memory to the next


class Origin(NamedTuple):
    """Where a pickle lies: the file and its size, the record of an archive, and the bytes of the file that hold it."""

    file: str = ""
    nbytes: int = 0
    member: str = ""
    start: int = 0
    end: int = 0


_collected: ContextVar[list[Import] | None] = ContextVar("imports", default=None)


@contextmanager
def collected() -> Iterator[list[Import]]:
    """Inside, the imports of every pickle that is read are added to the list."""
    found: list[Import] = []
    outer = _collected.get()
    token = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(token)
        if outer is not None:
            outer += found


def unreadable(file: str, member: str, error: CkptError) -> None:
    """Note a pickle that cannot be read: only its dangerous imports up to the error are known."""
    found = _collected.get()
    if found is not None:
        found += (Import(one.key, DANGEROUS, file, member, 0) for one in error.problems)
        found.append(Import("(unreadable pickle)", UNKNOWN, file, member, 0))


def check_size(nbytes: int, origin: Origin) -> Memory:
    """Return the memory for a pickle of `nbytes`. Raises `CkptError` if it was compressed to far fewer bytes."""
    memory, more = Memory(origin.nbytes), max(0, nbytes - origin.nbytes)
    if _PUSHED * more > memory.left:
        raise CkptError(
            f"{origin.file}: {origin.member or 'its pickle'} expands to {nbytes:,} bytes: "
            f"{limits().named('pickle_memory')}",
            hint="the file is damaged or hostile: download or save it again",
        )
    memory.take(_PUSHED * more)
    return memory


def loads(
    data: bytes, start: int = 0, persistent: Callable[[Any], Any] = Persistent, origin: Origin | None = None
) -> Pickle:
    """Reads the pickle that begins at byte `start`. Raises `CkptError` where it is damaged or passes the limits.

    `persistent` makes the node of a persistent id; what it raises as ValueError or TypeError is a damaged pickle.
    `origin` is where `data` comes from. An error names the dangerous imports before the place where reading failed:
    Python would run them.

    Time and memory are bounded by the number of opcodes, whatever the lengths and memo indexes in the pickle say.
    """
    most, origin = limits(), origin or Origin(nbytes=len(data))
    memory = check_size(len(data), origin)
    state = State(persistent, most.pickle_marks, memory.left)
    may_take = memory.left
    if len(data) - start > most.pickle_bytes:
        raise _damaged(start, f"it has {len(data) - start:,} bytes: {most.named('pickle_bytes')}", state)
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    handlers = HANDLERS
    at, steps, stopped = start, most.pickle_opcodes, False
    try:
        while not stopped:
            for _ in range(min(_STEPS, steps)):
                opcode = data[at]
                if opcode == STOP:
                    stopped = True
                    break
                at = handlers[opcode](data, at + 1, stack, memo, state)
            steps -= _STEPS
            if state.left < 0:
                raise _damaged(at, f"it takes too much memory: {most.named('pickle_memory')}", state)
            if steps <= 0 and not stopped:
                raise _damaged(at, f"too many opcodes: {most.named('pickle_opcodes')}", state)
    except KeyError as error:
        raise _damaged(at, f"no object was memoized as {error}", state) from error
    except IndexError as error:
        where = "the pickle is cut off" if at >= len(data) else "an opcode finds nothing to work on"
        raise _damaged(at, where, state) from error
    except (struct.error, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise _damaged(at, str(error), state) from error
    if len(stack) != 1 or state.marks:
        raise _damaged(at, "it ends without having made exactly one object", state)
    protocol = data[start + 1] if data[start] == PROTO else 0
    memory.take(may_take - state.left)
    imports = tuple(_imports(state, origin))
    found = _collected.get()
    if found is not None:
        found += imports
    return Pickle(stack[0], protocol, at + 1, tuple(state.globals), imports, memory)


def _damaged(at: int, message: str, state: State) -> CkptError:
    imports = [one for one in state.imported.values() if one.verdict == DANGEROUS]
    return CkptError(
        f"damaged pickle at byte {at}: {message}",
        hint="the file is incomplete, damaged or hostile: download or save it again",
        problems=[
            Problem(f"imported at byte {one.offset:,}, and runs code when it is loaded", str(one.name))
            for one in imports
        ],
    )


def _imports(state: State, origin: Origin) -> Iterator[Import]:
    for one in state.imported.values():
        calls = tuple(map(_shown_call, one.calls))
        place = (origin.file, origin.member, one.offset)
        yield Import(str(one.name), one.verdict, *place, calls, one.called, origin.start, origin.end)
        for call in one.calls if one.name in _LOADERS else ():
            yield from _inside(call, origin)


_LOADERS = frozenset(
    Global(module, name)
    for module, name in (
        ("torch.storage", "_load_from_bytes"),
        ("pickle", "loads"),
        ("_pickle", "loads"),
        ("cPickle", "loads"),
    )
)
_MOST_INSIDE = 64  # pickles one after the other in the bytes that a pickle loads
_depth: ContextVar[int] = ContextVar("depth", default=0)
_MOST_DEPTH = 4  # pickles inside each other


def _inside(call: Call, origin: Origin) -> Iterator[Import]:
    """The imports of the pickles in the bytes that are handed to a function that loads them."""
    data, depth = _bytes_of(call.args[0]) if call.args else None, _depth.get()
    if data is None or depth >= _MOST_DEPTH:
        return
    member = f"{origin.member or origin.file} (bytes for {call.func})"
    inside = origin._replace(member=member, nbytes=0)
    token, outer = _depth.set(depth + 1), _collected.set(None)
    found: list[Import] = []
    try:
        for pickled in _pickles_in(data):
            at = 0
            for _ in range(_MOST_INSIDE):
                if at < len(pickled):
                    part = loads(pickled, at, origin=inside)
                    found += part.imports
                    at = part.end
    except CkptError as error:  # storages follow the pickles in a file of torch.save
        found += (Import(one.key, DANGEROUS, inside.file, member, 0) for one in error.problems)
    finally:
        _collected.reset(outer)
        _depth.reset(token)
    yield from found


def _pickles_in(data: bytes) -> Iterator[bytes]:
    """The pickles in bytes that torch loads: in a zip archive its ``data.pkl``, else the bytes themselves."""
    if data[:4] != b"PK\3\4":
        yield data
        return
    from io import BytesIO
    from zipfile import BadZipFile, ZipFile

    try:
        with ZipFile(BytesIO(data)) as archive:
            for record in archive.infolist():
                if record.filename.endswith(".pkl") and record.file_size <= len(data):
                    yield archive.read(record)
    except (BadZipFile, OSError, ValueError, RuntimeError, NotImplementedError):
        return


def _bytes_of(node: Any) -> bytes | None:
    """The bytes that a node is: as such, or as protocol 2 spells them, ``_codecs.encode(text, "latin1")``."""
    if type(node) in (bytes, bytearray):
        return bytes(node)
    if type(node) is ByteString:
        return node.value
    if type(node) is Call and node.func == Global("_codecs", "encode") and node.args and type(node.args[0]) is str:
        try:
            return node.args[0].encode("latin1")
        except UnicodeEncodeError:
            return None
    return None


# How a call is shown

_MOST_TEXT, _MOST_PARTS, _MOST_LEVELS = 200, 8, 4


def _shown_call(call: Call) -> str:
    parts = _shown_parts(call.args, 0)
    parts += [f"{_shown(key, 1)}={_shown(value, 1)}" for key, value in list((call.kwargs or {}).items())[:_MOST_PARTS]]
    text = f"{_shown(call.func, 0)}({', '.join(parts)})"
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}..."


def _shown_parts(parts: Iterable[Any], level: int) -> list[str]:
    found: list[str] = []
    for part in parts:
        if len(found) == _MOST_PARTS:
            return [*found, "..."]
        found.append(_shown(part, level + 1))
    return found


def _shown(node: Any, level: int) -> str:
    if type(node) in (str, bytes, bytearray):
        return repr(node[:_MOST_TEXT])
    if type(node) is int and node.bit_length() > 64:
        return hex(node)[:20] + "..."
    if type(node) in (int, float, bool, type(None), Global):
        return str(node)
    if level >= _MOST_LEVELS:
        return "..."
    if type(node) is Call:
        return f"{_shown(node.func, level + 1)}({', '.join(_shown_parts(node.args, level))})"
    if type(node) is dict:
        pairs = [f"{_shown(key, level + 1)}: {_shown(node[key], level + 1)}" for key in list(node)[:_MOST_PARTS]]
        return f"{{{', '.join(pairs)}}}"
    if type(node) in (list, tuple):
        opening, closing = "[]" if type(node) is list else "()"
        return f"{opening}{', '.join(_shown_parts(node, level))}{closing}"
    return {Persistent: "<a storage>", PickledSet: "{...}", ByteString: "<bytes>"}.get(type(node), "...")
