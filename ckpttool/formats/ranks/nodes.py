"""What the pickled objects of a sharded tensor have in common, whichever class it is of: attributes, sizes, damage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ckpttool.formats.torch.tensors import MOST, malformed


def attributes_of(node: Any) -> Any:
    """The attributes of an object; one with slots has them as the second of two states."""
    return node.state[1] if type(node.state) is tuple else node.state


def counts_of(node: Any) -> tuple[int, ...]:
    """The numbers of a list or a tuple, however many. Raises `ValueError` or `TypeError` for anything else."""
    if not all(type(count) is int and 0 <= count < MOST for count in node):
        raise ValueError("no counts")
    return tuple(node)


@contextmanager
def checked(what: str) -> Iterator[None]:
    """Whatever reading `what` raises for nodes of other kinds than expected is the error of a damaged file."""
    try:
        yield
    except (IndexError, TypeError, ValueError, AttributeError, KeyError) as error:
        raise malformed(f"{what}: {error!r}") from None
