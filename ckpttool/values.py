"""Values: what the stages hand to each other. Dataclasses, made for a program that loads hundreds and has to start."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

__all__ = ["dataclass"]


def _repr(self: Any) -> str:
    shown = ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self) if field.repr)
    return f"{type(self).__qualname__}({shown})"


def _comparison(cls: type) -> tuple[Callable[[Any, object], bool], Callable[[Any], int]]:
    """`__eq__` and `__hash__` of the fields that are compared."""
    names = [field.name for field in dataclasses.fields(cls) if field.compare]
    key = attrgetter(*names) if names else type

    def __eq__(self: Any, other: object) -> bool:
        return key(self) == key(other) if type(other) is type(self) else NotImplemented

    def __hash__(self: Any) -> int:
        return hash(key(self))

    return __eq__, __hash__


if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(*, frozen: bool = False, slots: bool = False, eq: bool = True, kw_only: bool = False) -> object:
        """`dataclasses.dataclass`, of which Python compiles `__init__` alone: it loads in a third of the time.

        That nobody sets a field of a frozen one is held by mypy. Python would guard the fields against the class's own
        `__init__` too: a `TensorEntry`, of which there is one for every tensor, would take five times as long to make.
        """

        def made(cls: type) -> type:
            own = vars(cls)
            new = dataclasses.dataclass(slots=slots, kw_only=kw_only, repr=False, eq=False)(cls)
            if "__repr__" not in own:
                new.__repr__ = _repr
            if eq and "__eq__" not in own:
                new.__eq__, by_fields = _comparison(new)
                if "__hash__" not in own:
                    new.__hash__ = by_fields if frozen else None
            return new

        return made
