"""Read a pickle into a tree of inert nodes, without executing any of it, in bounded time and
memory.
"""

from __future__ import annotations

import codecs
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import field, replace
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.limits import Memory, limits
from ckpttool.core.pickle_imports import DANGEROUS, OWN, UNKNOWN, UNREADABLE, Import, verdict
from ckpttool.core.text import a
from ckpttool.core.values import dataclass

# The nodes. Numbers, strings, bytes, None, tuples, lists and dicts are their own nodes.


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


# Calls of these make a dict of their last argument, if that is a dict or a list of pairs.
MAPPINGS = frozenset(
    (
        Global("collections", "OrderedDict"),
        Global("collections", "defaultdict"),
        Global("collections", "Counter"),
        Global("builtins", "dict"),
        Global("__builtin__", "dict"),
    )
)

ABSENT = object()  # the state of a `Call` that has none; None would be a state


class Call:
    """An object that the pickle makes by a call, and the changes that it makes to the object
    afterwards.

    `how` is the opcode: ``REDUCE`` (func(*args)), ``NEWOBJ`` (func.__new__(func, *args)),
    ``NEWOBJ_EX`` (with `kwargs`) or ``OBJ``. Then come `items` (appended), `pairs` (set), and
    `state` (handed to ``__setstate__``, or to `setter`).
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
    """One pickle: its object, its protocol, and the offset after its last byte.

    `globals` are all its imports, in order and with repeats, even if nothing in the tree refers to
    them; `imports` are the imports that are not torch's own, once each, with their calls. `memory`
    may still be taken by values made from the tree; None for a tree that was not read.
    """

    root: Any
    protocol: int
    end: int = 0
    globals: tuple[Global, ...] = ()
    imports: tuple[Import, ...] = ()
    memory: Memory | None = None


class Origin(NamedTuple):
    """The place of a pickle: the file and its size, the record of an archive, and its bytes in the
    file.
    """

    file: str = ""
    nbytes: int = 0
    member: str = ""
    start: int = 0
    end: int = 0


# The machine

_NO_FRAME = 1 << 64


@dataclass(slots=True)
class _Imported:
    """An import that is not torch's own: the byte of its opcode, and every call of it or of what it
    returned.
    """

    name: Global
    verdict: str
    offset: int
    calls: list[Call] = field(default_factory=list)
    called: int = 0


@dataclass(slots=True)
class _Machine:
    """Python's unpickling machine, which makes nodes. `stack` holds the nodes so far, `marks` its
    height at each open mark, `memo` the nodes by the number that the pickle gives them.

    The opcode is at byte `at` of `data`; its function moves `end` behind the bytes that it reads.
    `frame` is the end of the current frame. `left` are the bytes of memory that the tree may still
    take. `imported` are the imports that are not torch's own, `watched` the same by the id of the
    nodes that they made; `copies` are the calls that may make a dict of another container,
    `mappings` the ids of their functions.
    """

    data: bytes
    persistent: Callable[[Any], Any]
    left: int
    at: int
    end: int = 0
    frame: int = _NO_FRAME
    stack: list[Any] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)
    globals: list[Global] = field(default_factory=list)
    imported: dict[Global, _Imported] = field(default_factory=dict)
    watched: dict[int, _Imported] = field(default_factory=dict)
    # the nodes in `watched`, so that their ids are not reused
    kept: list[Any] = field(default_factory=list)
    copies: list[Call] = field(default_factory=list)
    mappings: set[int] = field(default_factory=set)

    def read_line(self) -> bytes:
        """Read up to the end of the line."""
        begin = self.end
        newline = self.data.find(b"\n", begin)
        if newline < 0:
            raise ValueError("a line without an end")
        self.end = newline + 1
        return self.data[begin:newline]

    def pop_to_mark(self) -> list[Any]:
        """Take the nodes above the last mark off the stack."""
        height = self.marks.pop()
        if height > len(self.stack):
            raise ValueError("the objects below a mark were taken away")
        above = self.stack[height:]
        del self.stack[height:]
        return above

    def new_global(self, module: str, name: str) -> Global:
        node = Global(module, name)
        self.left -= _GLOBAL + 4 * (len(module) + len(name))
        self.globals.append(node)
        if node in MAPPINGS:
            self.mappings.add(id(node))
        kind = verdict(module, name)
        if kind != OWN:
            if node not in self.imported:
                self.left -= _IMPORT
                self.imported[node] = _Imported(node, kind, self.at)
            self.watch(node, self.imported[node])
        return node

    def watch(self, node: Any, imported: _Imported) -> None:
        self.left -= _MEMO
        self.watched[id(node)] = imported
        self.kept.append(node)

    def new_call(self, func: Any, args: Any, how: str, kwargs: Any = None) -> Call:
        """Return the call, and note it if it calls an import, or the result of a call of one."""
        if type(args) is not tuple:
            raise TypeError("the arguments of a call are not a tuple")
        call = Call(func, args, how, kwargs)
        self.left -= _CALL
        if args and id(func) in self.mappings:
            self.copies.append(call)
        imported = self.watched.get(id(func)) if self.watched else None
        if imported is not None:
            imported.called += 1
            if len(imported.calls) < _MOST_CALLS or str(imported.name) in _LOADERS:
                imported.calls.append(call)
            self.watch(call, imported)
        return call

    def charge_copies(self) -> None:
        """Count the pairs of the dicts that calls make of other containers: several may make theirs
        of the same one.
        """
        sizes: dict[int, int] = {}
        for call in self.copies:  # one that is an argument of another comes before it
            part = call.args[-1]
            size = len(call.pairs or ())
            if type(part) is Call:
                size += sizes.get(id(part), len(part.pairs or ()))
            elif type(part) in (dict, list, tuple):
                size += len(part)
            sizes[id(call)] = size
            self.left -= _FIRST_PAIR + _PAIR * size

    def error(self, message: str) -> CkptError:
        """Return the error for a damaged pickle. It lists the dangerous imports so far: Python
        would run them.
        """
        problems = []
        for imported in self.imported.values():
            if imported.verdict == DANGEROUS:
                text = f"imported at byte {imported.offset:,}, and runs code when it is loaded"
                problems.append(Problem(text, str(imported.name)))
        return CkptError(
            f"damaged pickle at byte {self.at}: {message}",
            hint="the file is incomplete, damaged or hostile: download or save it again",
            problems=problems,
        )


_collected: ContextVar[list[Import] | None] = ContextVar("imports", default=None)


@contextmanager
def collected() -> Iterator[list[Import]]:
    """Inside, the imports of every pickle that is read are added to the list."""
    imports: list[Import] = []
    outer = _collected.get()
    token = _collected.set(imports)
    try:
        yield imports
    finally:
        _collected.reset(token)
        if outer is not None:
            outer += imports


def note_unreadable(origin: Origin, error: CkptError) -> None:
    """Note a pickle that cannot be read: only its dangerous imports up to the error are known."""
    imports = _collected.get()
    if imports is None:
        return
    note = Import(
        UNREADABLE,
        UNKNOWN,
        origin.file,
        origin.member,
        0,
        start=origin.start,
        end=origin.end,
        reason=error.message,
    )
    for problem in error.problems:
        imports.append(replace(note, name=problem.key, verdict=DANGEROUS, reason=""))
    imports.append(note)


def look_into(data: bytes, origin: Origin, most: int) -> None:
    """Read up to `most` pickles, one after the other, for their imports. Raises `CkptError` as
    `loads`.
    """
    at = 0
    for _ in range(most):
        if at < len(data):
            at = loads(data, at, origin=origin).end


# Parts of the pickle that opcodes read

# Bytes of memory that a node takes in Python, from above: `_Machine.left` counts them. A value that
# is only pushed takes less than ten bytes for each of the pickle's (`_PUSHED`), and is not counted.
_LIST, _DICT, _SET, _TUPLE, _CALL = 72, 72, 128, 64, 112
_GLOBAL, _IMPORT, _REFERENCE = 200, 600, 120
_ITEM, _PAIR, _FIRST_PAIR, _MEMO, _TEXT = 10, 72, 168, 80, 64
_PUSHED = 10
_MOST_CALLS = 5  # of an import that are kept with their arguments
_STEPS = 4096  # opcodes between two looks at the memory
_LAST_PROTOCOL = 5


def _text(data: bytes) -> str:
    if len(data) == 1 and data.isdigit():
        # a new string: decoding gives one for all, and what the pickle does not share would be
        return str(int(data))
    return str(data, "utf-8", "surrogatepass")


def _py2_text(data: bytes) -> str | ByteString:
    return data.decode("ascii") if data.isascii() else ByteString(data)


def _quoted(line: bytes) -> str | ByteString:
    quote = line[:1]
    if len(line) < 2 or quote != line[-1:] or quote not in b"'\"":
        raise ValueError("a string without quotes")
    data, _ = codecs.escape_decode(line[1:-1])
    return _py2_text(data)


def _integer(line: bytes) -> int:
    # the time to read decimal digits grows with their square; Python 3.11 has the same limit
    if len(line) > 4300:
        raise ValueError("an integer of too many digits")
    value = int(line)
    if b"%d" % value != line:  # Python's two unpicklers read 010 and " 1" differently
        raise ValueError(f"an integer in an unusual form: {line[:20]!r}")
    return value


def _little_endian(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


# NONE, NEWTRUE, NEWFALSE, EMPTY_TUPLE
_CONSTANTS: dict[int, Any] = {0x4E: None, 0x88: True, 0x89: False, 0x29: ()}
_NUMBERS = {0x4D: "<H", 0x4A: "<i", 0x47: ">d"}  # BININT2, BININT, BINFLOAT


def _number(code: str) -> tuple[int, Callable[..., tuple[Any, ...]]]:
    """Return the width of a number, and what reads it."""
    layout = struct.Struct(code)
    return layout.size, layout.unpack_from


_UNPACK = {opcode: _number(code) for opcode, code in _NUMBERS.items()}

# Opcode -> the width of the length, what makes the object of the bytes after it, and the memory for
# each that is not ASCII.
_SIZED: dict[int, tuple[int, Callable[[bytes], Any], int]] = {
    0x58: (4, _text, 4),  # BINUNICODE
    0x8C: (1, _text, 4),  # SHORT_BINUNICODE
    0x8D: (8, _text, 4),  # BINUNICODE8
    0x54: (4, _py2_text, 1),  # BINSTRING
    0x55: (1, _py2_text, 1),  # SHORT_BINSTRING
    0x42: (4, bytes, 1),  # BINBYTES
    0x43: (1, bytes, 1),  # SHORT_BINBYTES
    0x8E: (8, bytes, 1),  # BINBYTES8
    0x96: (8, bytearray, 1),  # BYTEARRAY8
    0x8A: (1, _little_endian, 1),  # LONG1
    0x8B: (4, _little_endian, 1),  # LONG4
}
_REGISTRY = "it uses copyreg's extension registry, whose meaning is not in the file"
_BUFFER = "it refers to a buffer that is not in the file"
_REFUSED = {0x82: _REGISTRY, 0x83: _REGISTRY, 0x84: _REGISTRY, 0x97: _BUFFER, 0x98: _BUFFER}


def _extend(owner: Any, items: list[Any]) -> None:
    if type(owner) is list:
        owner.extend(items)
    elif type(owner) is Call and owner.state is ABSENT:
        if owner.items is None:
            owner.items = items
        else:
            owner.items.extend(items)
    else:
        raise TypeError("items are appended to an object that takes none")


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
        raise TypeError("a key is set on an object that takes none")
    owner.update(zip(keys, values))


_ATOMS = frozenset(
    (str, bytes, int, float, bool, type(None), Global, Persistent, ByteString, Call, PickledSet)
)
_LARGEST_KEY = 100


def check_key(key: Any) -> None:
    """Raise for a key that would be slow to hash: the author of the file chooses the size of ints
    and tuples.
    """
    todo = [key]
    for _ in range(_LARGEST_KEY):
        part = todo.pop()
        if type(part) is tuple:
            todo.extend(part[: _LARGEST_KEY + 1])
        elif type(part) not in _ATOMS or (type(part) is int and part.bit_length() > 64):
            raise TypeError(f"{a(part)} is the key of a dict")
        if not todo:
            return
    raise ValueError("the key of a dict is too large")


# Reading


def check_size(nbytes: int, origin: Origin) -> Memory:
    """Return the memory for a pickle of `nbytes`. Raises `CkptError` if it was compressed to far
    fewer bytes.
    """
    memory = Memory(origin.nbytes)
    more = max(0, nbytes - origin.nbytes)
    if _PUSHED * more > memory.left:
        raise CkptError(
            f"{origin.file}: {origin.member or 'its pickle'} expands to {nbytes:,} bytes: "
            f"{limits().named('pickle_memory')}",
            hint="the file is damaged or hostile: download or save it again",
        )
    memory.take(_PUSHED * more)
    return memory


def loads(
    data: bytes,
    start: int = 0,
    persistent: Callable[[Any], Any] = Persistent,
    origin: Origin | None = None,
) -> Pickle:
    """Read the pickle that begins at byte `start`. Raises `CkptError` if it is damaged or exceeds a
    limit.

    `persistent` makes the node of a persistent id; if it raises ValueError or TypeError the pickle
    is damaged. `origin` is where `data` comes from. An error names the dangerous imports before the
    place where reading failed: Python would run them.

    Time and memory are bounded by the number of opcodes, whatever the lengths and memo indexes in
    the pickle say.
    """
    origin = origin or Origin(nbytes=len(data))
    memory = check_size(len(data), origin)
    machine = _Machine(data, persistent, memory.left, start)
    nbytes = len(data) - start
    if nbytes > limits().pickle_bytes:
        raise machine.error(f"it has {nbytes:,} bytes: {limits().named('pickle_bytes')}")
    try:
        _run(machine)
    except KeyError as error:
        raise machine.error(f"no object was memoized as {error}") from error
    except IndexError as error:
        is_cut_off = machine.at >= len(data)
        message = "the pickle is cut off" if is_cut_off else "an opcode finds nothing to work on"
        raise machine.error(message) from error
    except (struct.error, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise machine.error(str(error)) from error
    if len(machine.stack) != 1 or machine.marks:
        raise machine.error("it ends without exactly one object")
    memory.take(memory.left - machine.left)
    imports = tuple(_imports(machine, origin))
    outer = _collected.get()
    if outer is not None:
        outer += imports
    protocol = data[start + 1] if data[start] == 0x80 else 0
    return Pickle(
        machine.stack[0], protocol, machine.at + 1, tuple(machine.globals), imports, memory
    )


def _run(machine: _Machine) -> None:  # noqa: C901, PLR0912 - frequent opcodes, without a call each
    """Run the opcodes up to STOP. Whatever is wrong raises, with `machine.at` at the opcode."""
    data, stack, marks, memo = machine.data, machine.stack, machine.marks, machine.memo
    most = limits()
    at, frame, steps = machine.at, machine.frame, most.pickle_opcodes
    try:
        while True:
            for _ in range(min(_STEPS, steps)):
                if at >= frame:
                    if at > frame:
                        raise ValueError("an opcode goes beyond the end of its frame")
                    frame = machine.frame = _NO_FRAME
                opcode, end = data[at], at + 1
                # The most frequent opcodes of a file of tensors come first.
                if opcode == 0x72:  # LONG_BINPUT
                    machine.left -= _MEMO
                    memo[int.from_bytes(data[end : end + 4], "little")] = stack[-1]
                    end += 4
                elif opcode == 0x4B:  # BININT1
                    stack.append(data[end])
                    end += 1
                elif opcode == 0x68:  # BINGET
                    stack.append(memo[data[end]])
                    end += 1
                elif opcode == 0x28:  # MARK
                    if len(marks) >= most.pickle_marks:
                        raise ValueError(f"too many open marks: {most.named('pickle_marks')}")
                    marks.append(len(stack))
                elif opcode == 0x86:  # TUPLE2
                    last = stack.pop()
                    machine.left -= _TUPLE
                    stack[-1] = (stack[-1], last)
                elif opcode == 0x74:  # TUPLE
                    above = machine.pop_to_mark()
                    machine.left -= _TUPLE + _ITEM * len(above)
                    stack.append(tuple(above))
                elif opcode in _SIZED:
                    width, make, wide = _SIZED[opcode]
                    begin = end + width
                    length = int.from_bytes(data[end:begin], "little")
                    end = begin + length
                    if end > len(data):
                        raise ValueError(
                            f"{length} bytes are announced, {len(data) - begin} are left"
                        )
                    part = data[begin:end]
                    machine.left -= _TEXT + length * (1 if part.isascii() else wide)
                    stack.append(make(part))
                elif opcode in _CONSTANTS:
                    stack.append(_CONSTANTS[opcode])
                elif opcode == 0x71:  # BINPUT
                    memo[data[end]] = stack[-1]
                    end += 1
                elif opcode == 0x6A:  # LONG_BINGET
                    stack.append(memo[int.from_bytes(data[end : end + 4], "little")])
                    end += 4
                elif opcode == 0x94:  # MEMOIZE
                    machine.left -= _MEMO
                    memo[len(memo)] = stack[-1]
                elif opcode in _UNPACK:
                    width, unpack = _UNPACK[opcode]
                    stack.append(unpack(data, end)[0])
                    end += width
                elif opcode == 0x2E:  # STOP
                    if frame not in (_NO_FRAME, end):
                        raise ValueError("it ends inside a frame")
                    machine.charge_copies()
                    machine.at = at
                    _check_memory(machine)
                    return
                else:
                    machine.at, machine.end = at, end
                    _OPCODES.get(opcode, _unknown)(machine)
                    end, frame = machine.end, machine.frame
                at = end
            machine.at = at
            _check_memory(machine)
            steps -= _STEPS
            if steps <= 0:
                raise machine.error(f"too many opcodes: {most.named('pickle_opcodes')}")
    finally:
        machine.at = at


def _check_memory(machine: _Machine) -> None:
    if machine.left < 0:
        raise machine.error(f"it takes too much memory: {limits().named('pickle_memory')}")


# The other opcodes, each with what it does: opcode -> function

_OPCODES: dict[int, Callable[[_Machine], None]] = {}
_Function = TypeVar("_Function", bound=Callable[[_Machine], None])


def _opcode(code: int) -> Callable[[_Function], _Function]:
    def register(function: _Function) -> _Function:
        _OPCODES[code] = function
        return function

    return register


def _unknown(machine: _Machine) -> None:
    opcode = machine.data[machine.at]
    raise ValueError(_REFUSED.get(opcode, f"unknown opcode 0x{opcode:02x}"))


@_opcode(0x80)
def _proto(machine: _Machine) -> None:
    protocol = machine.data[machine.end]
    if protocol > _LAST_PROTOCOL:
        raise ValueError(f"protocol {protocol} is not known")
    machine.end += 1


@_opcode(0x95)
def _frame(machine: _Machine) -> None:
    """Begin a frame: Python reads all of its bytes, and skips the rest if an opcode needs more."""
    if machine.frame != _NO_FRAME:
        raise ValueError("a frame begins inside another")
    begin = machine.end + 8
    machine.frame = begin + int.from_bytes(machine.data[machine.end : begin], "little")
    if machine.frame > len(machine.data):
        raise ValueError("a frame is cut off")
    machine.end = begin


@_opcode(0x52)
def _reduce(machine: _Machine) -> None:
    args = machine.stack.pop()
    machine.stack[-1] = machine.new_call(machine.stack[-1], args, "REDUCE")


@_opcode(0x81)
def _newobj(machine: _Machine) -> None:
    args = machine.stack.pop()
    machine.stack[-1] = machine.new_call(machine.stack[-1], args, "NEWOBJ")


@_opcode(0x92)
def _newobj_ex(machine: _Machine) -> None:
    kwargs, args = machine.stack.pop(), machine.stack.pop()
    if type(kwargs) is not dict:
        raise TypeError("the keyword arguments of a call are not a dict")
    machine.stack[-1] = machine.new_call(machine.stack[-1], args, "NEWOBJ_EX", kwargs)


@_opcode(0x69)
def _inst(machine: _Machine) -> None:
    args = machine.pop_to_mark()
    module, name = machine.read_line(), machine.read_line()
    func = machine.new_global(module.decode(), name.decode())
    # an object made by INST is written with OBJ, whose effect is the same
    machine.stack.append(machine.new_call(func, tuple(args), "OBJ"))


@_opcode(0x6F)
def _obj(machine: _Machine) -> None:
    func, *args = machine.pop_to_mark()
    machine.stack.append(machine.new_call(func, tuple(args), "OBJ"))


@_opcode(0x62)
def _build(machine: _Machine) -> None:
    state = machine.stack.pop()
    call = machine.stack[-1]
    if type(call) is not Call or call.state is not ABSENT:
        raise TypeError("a state is set on an object that takes none")
    call.state = state


@_opcode(0x63)
def _global(machine: _Machine) -> None:
    module, name = machine.read_line(), machine.read_line()
    machine.stack.append(machine.new_global(module.decode(), name.decode()))


@_opcode(0x93)
def _stack_global(machine: _Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    if type(name) is not str or type(module) is not str:
        raise TypeError("the name of a global is not a string")
    machine.stack.append(machine.new_global(module, name))


@_opcode(0x51)
def _binpersid(machine: _Machine) -> None:
    if type(machine.stack[-1]) not in (tuple, str):
        raise TypeError("a persistent id is neither a tuple nor a string")
    machine.left -= _REFERENCE
    machine.stack[-1] = machine.persistent(machine.stack[-1])


@_opcode(0x50)
def _persid(machine: _Machine) -> None:
    line = machine.read_line()
    machine.left -= _REFERENCE
    machine.stack.append(machine.persistent(line.decode("ascii")))


@_opcode(0x85)
def _tuple1(machine: _Machine) -> None:
    machine.left -= _TUPLE
    machine.stack[-1] = (machine.stack[-1],)


@_opcode(0x87)
def _tuple3(machine: _Machine) -> None:
    machine.left -= _TUPLE
    stack = machine.stack
    stack[-3:] = [(stack[-3], stack[-2], stack[-1])]


@_opcode(0x5D)
def _empty_list(machine: _Machine) -> None:
    machine.left -= _LIST
    machine.stack.append([])


@_opcode(0x6C)
def _list(machine: _Machine) -> None:
    above = machine.pop_to_mark()
    machine.left -= _LIST + _ITEM * len(above)
    machine.stack.append(above)


@_opcode(0x61)
def _append(machine: _Machine) -> None:
    machine.left -= _LIST
    owner = machine.stack[-2]
    _extend(owner, [machine.stack.pop()])


@_opcode(0x65)
def _appends(machine: _Machine) -> None:
    above = machine.pop_to_mark()
    machine.left -= _LIST + _ITEM * len(above)
    _extend(machine.stack[-1], above)


@_opcode(0x7D)
def _empty_dict(machine: _Machine) -> None:
    machine.left -= _DICT
    machine.stack.append({})


@_opcode(0x64)
def _dict(machine: _Machine) -> None:
    above = machine.pop_to_mark()
    machine.left -= _FIRST_PAIR + _PAIR * len(above)
    machine.stack.append({})
    _update(machine.stack[-1], above[::2], above[1::2])


@_opcode(0x73)
def _setitem(machine: _Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    machine.left -= _FIRST_PAIR
    _update(machine.stack[-1], [key], [value])


@_opcode(0x75)
def _setitems(machine: _Machine) -> None:
    above = machine.pop_to_mark()
    machine.left -= _FIRST_PAIR + _PAIR * (len(above) // 2)
    _update(machine.stack[-1], above[::2], above[1::2])


@_opcode(0x8F)
def _empty_set(machine: _Machine) -> None:
    machine.left -= _SET
    machine.stack.append(PickledSet([]))


@_opcode(0x90)
def _additems(machine: _Machine) -> None:
    above = machine.pop_to_mark()
    owner = machine.stack[-1]
    if type(owner) is not PickledSet or owner.frozen:
        raise TypeError("items are added to an object that is not a set")
    machine.left -= _ITEM * len(above)
    owner.items.extend(above)


@_opcode(0x91)
def _frozenset(machine: _Machine) -> None:
    above = machine.pop_to_mark()
    machine.left -= _SET + _ITEM * len(above)
    machine.stack.append(PickledSet(above, frozen=True))


@_opcode(0x70)
def _put(machine: _Machine) -> None:
    line = machine.read_line()
    machine.left -= _MEMO + len(line)
    machine.memo[_integer(line)] = machine.stack[-1]


@_opcode(0x67)
def _get(machine: _Machine) -> None:
    machine.stack.append(machine.memo[_integer(machine.read_line())])


@_opcode(0x32)
def _dup(machine: _Machine) -> None:
    machine.stack.append(machine.stack[-1])


@_opcode(0x31)
def _pop_mark(machine: _Machine) -> None:
    machine.pop_to_mark()


@_opcode(0x30)
def _pop(machine: _Machine) -> None:
    stack, marks = machine.stack, machine.marks
    if marks and marks[-1] == len(stack):  # as in Python, an open mark is on top
        marks.pop()
        return
    dropped = stack.pop()
    owner = stack[-1] if stack else None
    if type(owner) is not Call or type(dropped) is not Call:
        return
    # how Python pickles a state setter: setter(object, state), the result dropped
    if len(dropped.args) == 2 and dropped.args[0] is owner:
        owner.setter, owner.state = dropped.func, dropped.args[1]


def _lined(make: Callable[[bytes], Any]) -> Callable[[_Machine], None]:
    """Return the function of an opcode that makes a node of the rest of the line."""

    def push(machine: _Machine) -> None:
        line = machine.read_line()
        machine.left -= _TEXT + 4 * len(line)
        machine.stack.append(make(line))

    return push


_BOOLS = {b"00": False, b"01": True}
_OPCODES[0x49] = _lined(lambda line: _BOOLS[line] if line in _BOOLS else _integer(line))  # INT
_OPCODES[0x4C] = _lined(lambda line: _integer(line.removesuffix(b"L")))  # LONG
_OPCODES[0x46] = _lined(float)  # FLOAT
_OPCODES[0x53] = _lined(_quoted)  # STRING
_OPCODES[0x56] = _lined(lambda line: line.decode("raw_unicode_escape"))  # UNICODE


# Imports for the report


def _imports(machine: _Machine, origin: Origin) -> Iterator[Import]:
    for imported in machine.imported.values():
        name, calls = str(imported.name), imported.calls
        yield Import(
            name,
            imported.verdict,
            origin.file,
            origin.member,
            imported.offset,
            tuple(map(_shown_call, calls[:_MOST_CALLS])),
            imported.called,
            origin.start,
            origin.end,
        )
        if name in _LOADERS:
            for call in calls:
                yield from _inside(call, origin)


_LOADERS = ("torch.storage._load_from_bytes", "pickle.loads", "_pickle.loads", "cPickle.loads")
LEGACY_PICKLES = 5  # one after the other in a file that torch.save wrote before torch 1.6
_MOST_DEPTH = 4  # pickles inside each other
_depth: ContextVar[int] = ContextVar("depth", default=0)


def _inside(call: Call, origin: Origin) -> Iterator[Import]:
    """Yield the imports of the pickles in the bytes that a call loads."""
    depth = _depth.get()
    member = f"{origin.member or origin.file} (bytes for {call.func})"
    inside = origin._replace(member=member, nbytes=0)
    imports: list[Import] = []
    token, outer = _depth.set(depth + 1), _collected.set(imports)
    try:
        data = bytes_of(call.args[0]) if call.args else None
        if data is None:
            raise CkptError("the pickle does not hold these bytes as they are", hint="")
        if depth >= _MOST_DEPTH:
            raise CkptError(f"it is inside of {depth} other pickles", hint="")
        for pickled in _pickles_in(data):
            look_into(pickled, inside, LEGACY_PICKLES)
    except CkptError as error:
        note_unreadable(inside, error)
    finally:
        _collected.reset(outer)
        _depth.reset(token)
    yield from imports


def _pickles_in(data: bytes) -> Iterator[bytes]:
    """Yield the pickles in bytes that torch loads: in a zip archive its ``data.pkl``, else the
    bytes themselves.

    Raises `CkptError` for a damaged archive.
    """
    if data[:4] != b"PK\3\4":
        yield data
        return
    from io import BytesIO
    from zipfile import BadZipFile, ZipFile

    try:
        with ZipFile(BytesIO(data)) as archive:
            for record in archive.infolist():
                if record.filename.lower().endswith(".pkl"):  # torch finds a record in capitals too
                    if record.file_size > len(data):
                        raise ValueError(f"{record.filename} expands to {record.file_size:,} bytes")
                    yield archive.read(record)
    except (BadZipFile, OSError, ValueError, RuntimeError, NotImplementedError) as error:
        raise CkptError(f"damaged archive: {error}", hint="") from error


_BYTES = (Global("__builtin__", "bytes"), Global("builtins", "bytes"))


def bytes_of(node: Any) -> bytes | None:
    """Return the bytes that a node is, None if they are not known.

    Protocol 2 writes bytes as ``_codecs.encode(text, "latin1")``, and no bytes as ``bytes()``.
    """
    if type(node) in (bytes, bytearray):
        return bytes(node)
    if type(node) is ByteString:
        return node.value
    if type(node) is not Call:
        return None
    if node.func in _BYTES and not node.args:
        return b""
    if node.func != Global("_codecs", "encode") or node.args[1:] != ("latin1",):
        return None
    try:
        return node.args[0].encode("latin1") if type(node.args[0]) is str else None
    except UnicodeEncodeError:
        return None


_SHOWN = {Persistent: "<a storage>", PickledSet: "{...}", ByteString: "<bytes>"}
_MOST_TEXT, _MOST_PARTS, _MOST_LEVELS = 200, 8, 4  # of a call that is shown


def _shown_call(call: Call) -> str:
    arguments = ", ".join([*_shown_parts(call.args, 0), *_shown_pairs(call.kwargs or {}, "=", 0)])
    text = f"{_shown(call.func, 0)}({arguments})"
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}..."


def _shown_parts(parts: Iterable[Any], level: int) -> list[str]:
    shown: list[str] = []
    for part in parts:
        if len(shown) == _MOST_PARTS:
            return [*shown, "..."]
        shown.append(_shown(part, level + 1))
    return shown


def _shown_pairs(pairs: Mapping[Any, Any], sign: str, level: int) -> list[str]:
    shown = []
    for key, value in islice(pairs.items(), _MOST_PARTS):
        shown.append(f"{_shown(key, level + 1)}{sign}{_shown(value, level + 1)}")
    return shown


def _shown(node: Any, level: int) -> str:
    """Return a short text for a part of a call; objects inside of many others are ``...``."""
    kind = type(node)
    if kind in (str, bytes, bytearray):
        return repr(node[:_MOST_TEXT])
    if kind is int and node.bit_length() > 64:
        return hex(node)[:20] + "..."
    if kind in (int, float, bool, type(None), Global):
        return str(node)
    if level >= _MOST_LEVELS:
        return "..."
    if kind is dict:
        pairs = ", ".join(_shown_pairs(node, ": ", level))
        return f"{{{pairs}}}"
    if kind not in (list, tuple, Call):
        return _SHOWN.get(kind, "...")
    parts = ", ".join(_shown_parts(node.args if kind is Call else node, level))
    if kind is list:
        return f"[{parts}]"
    function = _shown(node.func, level + 1) if kind is Call else ""
    return f"{function}({parts})"
