"""Sizes in a rules file: numbers, and named ones with the four operations, as in ``"{heads} * {head_dim}"``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Union

from ckpttool.errors import CkptError, Refused

Size = Union[int, str]  # a text is an expression whose names have no value yet
Named = Mapping[str, int]

_NAME = re.compile(r"\{([A-Za-z_]\w*)\}")
_OPERAND = r"\s*(?:\d{1,15}|\{[A-Za-z_]\w*\})\s*"
_EXPRESSION = re.compile(rf"{_OPERAND}(?:[-+*/]{_OPERAND})*")
_OPERATION = re.compile(r"\s*([-+*/]?)\s*(\d+|\{\w+\})")


def is_expression(text: str) -> bool:
    """Whether the text is one: numbers and ``{names}`` with ``+ - * /`` between them."""
    return len(text) < 1000 and _EXPRESSION.fullmatch(text) is not None


def names(size: Size) -> set[str]:
    """The names that the size is made of."""
    return set() if isinstance(size, int) else set(_NAME.findall(size))


def lone(size: Size) -> str | None:
    """The name that is all of the size; None where it is more than that, or a number."""
    found = None if isinstance(size, int) else _NAME.fullmatch(size.strip())
    return None if found is None else found[1]


def settled(size: Size, known: Named) -> Size:
    """The size with the names that have values replaced by these; a number where none is left. Raises `Refused`."""
    if isinstance(size, int):
        return size
    text = _NAME.sub(lambda name: str(known.get(name[1], name[0])), size)
    return text if _NAME.search(text) else value(text, known)


def value(size: Size, known: Named) -> int:
    """The number that the size is, whose names are `known`. Raises `Refused` where a division leaves a rest."""
    if isinstance(size, int):
        return size
    total, product = 0, 0
    for operation, operand in _OPERATION.findall(size):
        number = known[operand[1:-1]] if operand.startswith("{") else int(operand)
        if operation in "+-":  # the first has none
            total, product = total + product, -number if operation == "-" else number
        elif operation == "*":
            product *= number
        else:
            if not number or product % number:
                raise Refused(f"{size} does not divide without a rest", hint="sizes are whole numbers")
            product //= number
    return total + product


def bound(sizes: Sequence[Size], shape: Sequence[int]) -> Named | None:
    """What the names that stand alone are in this shape; None where the shape is another. -1 fits any size."""
    if len(sizes) != len(shape):
        return None
    found: dict[str, int] = {}
    for size, length in zip(sizes, shape):
        name = lone(size)
        if name is not None:
            found.setdefault(name, length)
    fits = all(size == -1 or value(size, found) == length for size, length in zip(sizes, shape))
    return found if fits else None


def given(texts: Sequence[str]) -> dict[str, int]:
    """The values of ``NAME=N`` on the command line. Raises `CkptError` for what is none."""
    return dict(_given(texts))


def _given(texts: Sequence[str]) -> Iterator[tuple[str, int]]:
    for text in texts:
        name, _, number = text.partition("=")
        if _NAME.fullmatch(f"{{{name}}}") is None or re.fullmatch(r"[1-9]\d{0,14}", number) is None:
            raise CkptError(f"not a size: {text!r:.100}", hint="as in --size heads=32")
        yield name, int(number)
