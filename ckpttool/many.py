"""For indexes of many tensors: a checkpoint may have a million."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
