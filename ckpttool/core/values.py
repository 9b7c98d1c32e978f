"""Frozen value classes, and containers for indexes of a million tensors."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isnan
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

__all__ = ["dataclass", "public"]

Class = TypeVar("Class", bound=type)
_WIDTH = 200  # characters of the repr of a public value
_TEXT = 80  # characters of one of its fields

# Turns a public value into HTML for a notebook; set by the package itself, which may import the
# reports.
to_html: Callable[[Any], str | None] | None = None
# Turns it into the text that the command line prints, in the same way.
to_text: Callable[[Any], str | None] | None = None


def _repr(self: Any) -> str:
    shown = ", ".join(
        f"{field.name}={getattr(self, field.name)!r}"
        for field in dataclasses.fields(self)
        if field.repr
    )
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


def public(cls: Class) -> Class:
    """Make a frozen dataclass of results safe to hand out: really frozen, with a repr of one short
    line. `print` shows its report.

    A field can be set once, by ``__init__``: the class costs no compilation, and an instance some
    10 µs (a plain one 1 µs). Values that exist once per tensor are not decorated.
    """
    cls.__repr__ = _short_repr  # type: ignore[assignment,method-assign]
    cls.__setattr__, cls.__delattr__ = _set_once, _delete  # type: ignore[assignment,method-assign]
    cls._repr_html_ = _repr_html  # type: ignore[attr-defined]
    if "__str__" not in vars(cls):
        cls.__str__ = _text  # type: ignore[assignment,method-assign]
    return cls


def _set_once(self: Any, name: str, value: Any) -> None:
    if hasattr(self, name):
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
    object.__setattr__(self, name, value)


def _delete(self: Any, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


def _short_repr(self: Any) -> str:
    """Plain fields with their values, the number of elements of the others; never what is inside of
    them.
    """
    text = ""
    for field in dataclasses.fields(self):
        if field.repr:
            shown = f"{field.name}={_shown(getattr(self, field.name))}"
            if len(text) + len(shown) > _WIDTH - len(type(self).__name__) - 10:
                text += ", ..."
                break
            text += f", {shown}" if text else shown
    return f"{type(self).__name__}({text})"


def _shown(value: Any) -> str:
    """Return a plain value; of others the size, or the class and the file."""
    if isinstance(value, str) and len(value) > _TEXT:
        return f"<{len(value)} characters>"
    if isinstance(value, int) and value.bit_length() >= 128:
        return "<int>"
    if value is None or isinstance(value, (str, bool, int, float)):
        return repr(value)
    if isinstance(value, (tuple, list, dict, frozenset)):
        return f"<{len(value)}>"
    text = type(value).__name__
    source = getattr(value, "source", None)
    if isinstance(source, str) and len(source) <= _TEXT:
        text += f" {source}"
    return f"<{text}>"


def _text(self: Any) -> str:
    text = None if to_text is None else to_text(self)
    return repr(self) if text is None else text


def _repr_html(self: Any) -> str | None:
    return None if to_html is None else to_html(self)


if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(
        *, frozen: bool = False, slots: bool = False, eq: bool = True, kw_only: bool = False
    ) -> object:
        """`dataclasses.dataclass`, of which Python compiles `__init__` alone: it loads in a third
        of the time.

        That nobody sets a field of a frozen one is held by mypy. Python would guard the fields
        against the class's own `__init__` too: a `TensorEntry`, of which there is one for every
        tensor, would take five times as long to make.
        """

        def decorate(cls: type) -> type:
            defined = vars(cls)
            new = dataclasses.dataclass(slots=slots, kw_only=kw_only, repr=False, eq=False)(cls)
            if "__repr__" not in defined:
                new.__repr__ = _repr
            if eq and "__eq__" not in defined:
                new.__eq__, by_fields = _comparison(new)
                if "__hash__" not in defined:
                    new.__hash__ = by_fields if frozen else None
            return new

        return decorate


def same_plain(left: Any, right: Any) -> bool:
    """Return whether two plain values are the same: NaN is itself, and True is not 1."""
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(same_plain, left, right))
    if isinstance(left, float) and isinstance(right, float) and isnan(left):
        return isnan(right)
    return bool(left == right) and isinstance(left, bool) == isinstance(right, bool)


@contextmanager
def many_objects() -> Iterator[None]:
    """For making the index of a large file: hundreds of thousands of objects, none of them garbage.

    Python's cycle collector would look through them again and again, and double the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
