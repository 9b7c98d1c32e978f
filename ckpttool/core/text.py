"""How numbers, shapes, commands and untrusted text are written, the same in every report."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def visible(text: str) -> str:
    r"""The text with every character that could act instead of being read written as an escape (``\x1b``, ``\u202e``).

    Keys come from files that nobody vouches for: control characters drive terminals, bidi overrides reorder what is
    read, lone surrogates cannot be encoded. Printable text comes back as it is, backslashes included.
    """
    return text if text.isprintable() else "".join(char if char.isprintable() else _escape(char) for char in text)


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def shell(*args: str) -> str:
    r"""A command line that can be pasted into bash or zsh; unprintable characters are quoted as ``$'\x1b'``."""
    return " ".join(shlex.quote(arg) if arg.isprintable() else _ansi_c_quote(arg) for arg in args)


def _ansi_c_quote(arg: str) -> str:
    return "$'" + visible(arg.replace("\\", "\\\\").replace("'", "\\'")) + "'"


def number(n: int) -> str:
    """``1,234,567``."""
    return f"{n:,}"


def plural(n: int, word: str) -> str:
    """``1 tensor``, ``2,000 tensors``, ``3 aliases``, ``2 entries``."""
    if n == 1:
        return f"1 {word}"
    if word.endswith(("s", "x", "ch", "sh")):
        return f"{number(n)} {word}es"
    if word.endswith("y") and word[-2:-1] not in "aeiou":
        return f"{number(n)} {word[:-1]}ies"
    return f"{number(n)} {word}s"


class Info(str):
    """A note that informs and needs no action; any other note is a warning."""

    __slots__ = ()


def some(words: Sequence[str], most: int = 5) -> str:
    """The first of them, and how many more there are: ``a, b and 1,000 more``."""
    more = f" and {number(len(words) - most)} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more


def a(value: object) -> str:
    """What kind of thing the value is, with its article: ``an int``, ``a dict``."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def first_line(error: BaseException) -> str:
    """The first line of what an exception says; its class where it says nothing."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def human_bytes(n: int) -> str:
    """``1,000 bytes``, ``1.5 KiB``: binary units, rounded down to one decimal so that no size is overstated."""
    unit = min(max(n.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    if unit == 0:
        return plural(n, "byte")
    tenths = n * 10 // 1024**unit
    return f"{number(tenths // 10)}.{tenths % 10} {_UNITS[unit]}"


def shape_text(shape: Iterable[int] | None) -> str:
    """``[12, 6]`` as torch prints it, ``[]`` for a 0-dim tensor, ``?`` for one that has no shape yet."""
    return "?" if shape is None else f"[{', '.join(map(str, shape))}]"
