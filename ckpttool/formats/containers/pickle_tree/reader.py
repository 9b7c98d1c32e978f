"""Reads a pickle into a tree of nodes, in bounded time and memory, without executing any of it."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from ckpttool.errors import CkptError
from ckpttool.formats.containers.pickle_tree.nodes import Persistent, Pickle
from ckpttool.formats.containers.pickle_tree.opcodes import HANDLERS, PROTO, STOP, State
from ckpttool.limits import limits


def loads(data: bytes, start: int = 0, persistent: Callable[[Any], Any] = Persistent) -> Pickle:
    """Reads the pickle that begins at byte `start`. Raises `CkptError` where it is damaged or passes the limits.

    `persistent` makes the node of a persistent id; what it raises as ValueError or TypeError is a damaged pickle.

    Time and memory are bounded by the number of opcodes, whatever the lengths and memo indexes in the pickle say.
    """
    most = limits()
    if len(data) - start > most.pickle_bytes:
        raise _damaged(start, f"it has {len(data) - start:,} bytes: {most.named('pickle_bytes')}")
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    state = State(persistent, most.pickle_marks)
    handlers = HANDLERS
    at = start
    try:
        for _ in range(most.pickle_opcodes):
            opcode = data[at]
            if opcode == STOP:
                break
            at = handlers[opcode](data, at + 1, stack, memo, state)
        else:
            raise _damaged(at, f"too many opcodes: {most.named('pickle_opcodes')}")
    except KeyError as error:
        raise _damaged(at, f"no object was memoized as {error}") from error
    except IndexError as error:
        where = "the pickle is cut off" if at >= len(data) else "an opcode finds nothing to work on"
        raise _damaged(at, where) from error
    except (struct.error, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise _damaged(at, str(error)) from error
    if len(stack) != 1 or state.marks:
        raise _damaged(at, "it ends without having made exactly one object")
    protocol = data[start + 1] if data[start] == PROTO else 0
    return Pickle(stack[0], protocol, at + 1, tuple(state.globals))


def _damaged(at: int, message: str) -> CkptError:
    return CkptError(
        f"damaged pickle at byte {at}: {message}",
        hint="the file is incomplete, damaged or hostile: download or save it again",
    )
