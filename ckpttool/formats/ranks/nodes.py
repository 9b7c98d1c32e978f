"""What the pickled objects of a sharded tensor have in common, whichever class it is of: attributes, sizes, damage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ckpttool.formats.containers.pickle_tree import Call
from ckpttool.formats.torch.tensors import MOST, malformed


def attributes_of(node: Any) -> dict[str, Any]:
    """The attributes of an object; one with slots has them as the second of two states.

    Raises `ValueError` for what is none.
    """
    found = node.state[1] if type(node.state) is tuple else node.state
    if type(found) is not dict:
        raise ValueError("an object without attributes")
    return found


def counts_of(node: Any) -> tuple[int, ...]:
    """The numbers of a ``torch.Size``, a list or a tuple, however many. Raises `ValueError` for anything else."""
    counts = node.args[0] if type(node) is Call else node
    if type(counts) not in (list, tuple) or not all(type(count) is int and 0 <= count < MOST for count in counts):
        raise ValueError("no counts")
    return tuple(counts)


@contextmanager
def checked(what: str) -> Iterator[None]:
    """Whatever reading `what` raises for nodes of other kinds than expected is the error of a damaged file."""
    try:
        yield
    except (IndexError, TypeError, ValueError, AttributeError, KeyError) as error:
        raise malformed(f"{what}: {error!r}") from None
