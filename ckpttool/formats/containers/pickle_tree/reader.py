"""Reads a pickle into a tree of nodes: a machine of its own, bounded in steps and in memory, that executes nothing."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from ckpttool.errors import CkptError, Problem
from ckpttool.formats.containers.pickle_tree.nodes import ByteString, Call, Global, Persistent, Pickle, PickledSet
from ckpttool.formats.containers.pickle_tree.opcodes import HANDLERS, PROTO, STOP, State
from ckpttool.imports import DANGEROUS, UNKNOWN, Import
from ckpttool.limits import Memory, limits

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
