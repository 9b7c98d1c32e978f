"""The nodes of a pickle's tree: what a pickle would call or import stands here as an inert value."""

from __future__ import annotations

from typing import Any

from ckpttool.imports import Import
from ckpttool.limits import Memory
from ckpttool.values import dataclass


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
