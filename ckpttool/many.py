"""For what there is a value of for every tensor, or several: a checkpoint may have a million."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

__all__ = ["many_objects", "value"]

if TYPE_CHECKING:
    from dataclasses import dataclass as value
else:

    def value(*, frozen: bool, slots: bool, eq: bool = True) -> object:
        """`dataclass` with these options, but that nobody sets a field of a frozen one is held by mypy alone.

        Python guards the fields also against the class's own `__init__`: a `TensorEntry` would take five times as long.
        """
        return dataclass(slots=slots, eq=eq, unsafe_hash=frozen and eq)


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
