"""Format numbers, shapes, commands, keys and untrusted text, the same in every report."""

from __future__ import annotations

import re
import shlex
from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from typing_extensions import Self

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def visible(text: str) -> str:
    r"""Return the text with unprintable characters as escapes (``\x1b``, ``\u202e``).

    Keys come from untrusted files: control characters drive terminals, bidi overrides reorder the
    text, lone surrogates cannot be encoded. Printable text is returned as it is, with its
    backslashes.
    """
    if text.isprintable():
        return text
    return "".join(map(_visible_char, text))


def _visible_char(char: str) -> str:
    return char if char.isprintable() else char.encode("unicode_escape").decode("ascii")


class Placeholder(str):
    """A word of a printed command for a fact that only the user knows."""

    __slots__ = ()


MODEL, OPTIMIZER = Placeholder("MODEL"), Placeholder("OPTIMIZER")
PROGRAM, CKPT = Placeholder("PROGRAM.pt2"), Placeholder("CKPT")
OLD, OLD_OPTIMIZER = Placeholder("OLD"), Placeholder("OLD_OPTIMIZER")
# what the names of some do not say
MEANINGS = {
    OLD: "the model that saved the file",
    OLD_OPTIMIZER: "the function that made the optimizer that saved the file",
}
PLACEHOLDERS = (MODEL, OPTIMIZER, PROGRAM, CKPT, *MEANINGS)


def spelled(word: str) -> str:
    """Return the word of a command, with ``./`` before a file that is called as a placeholder."""
    is_file = word in PLACEHOLDERS and not isinstance(word, Placeholder)
    return f"./{word}" if is_file else word


def shell(*args: str) -> str:
    r"""Return a command line for bash or zsh; unprintable characters are quoted as ``$'\x1b'``."""
    quoted = []
    for arg in args:
        escaped = arg.replace("\\", "\\\\").replace("'", "\\'")
        quoted.append(shlex.quote(arg) if arg.isprintable() else f"$'{visible(escaped)}'")
    return " ".join(quoted)


def number(n: int) -> str:
    return f"{n:,}"


def plural(n: int, word: str) -> str:
    """Return ``1 tensor``, ``2,000 tensors``, ``3 aliases``, ``2 entries``."""
    if n == 1:
        return f"1 {word}"
    if word.endswith(("s", "x", "ch", "sh")):
        return f"{number(n)} {word}es"
    if word.endswith("y") and word[-2:-1] not in "aeiou":
        return f"{number(n)} {word[:-1]}ies"
    return f"{number(n)} {word}s"


class Note(str):
    """A sentence of a report with its code (`ckpttool.core.codes`): a warning, unless it is
    `Info`.

    If it is `about` the two sides of a diff, `words` has the fields ``{left}`` and ``{right}``.
    """

    code: str
    words: str
    args: tuple[object, ...]

    def __new__(cls, text: str, code: str) -> Self:
        note = super().__new__(cls, text)
        note.code, note.words, note.args = code, "", ()
        return note

    @classmethod
    def about(cls, words: str, code: str, *args: object) -> Self:
        """Return a note on the two sides; ``{}`` in `words` are the other arguments."""
        note = cls(words.format(*args, left="left", right="right"), code)
        note.words, note.args = words, args
        return note

    def named(self, left: str, right: str) -> Self:
        """Return the note with these names for the two sides."""
        if not self.words:
            return self
        return type(self)(self.words.format(*self.args, left=left, right=right), self.code)


class Info(Note):
    """A note that informs and needs no action."""


def code_of(note: str) -> str:
    """Return the code of a note; empty for a plain sentence."""
    return note.code if isinstance(note, Note) else ""


def notes_with(notes: Iterable[str], *codes: str) -> list[str]:
    """Return the notes with one of these codes."""
    return [note for note in notes if code_of(note) in codes]


def some(words: Sequence[str], most: int = 5) -> str:
    """Return the first ones, and how many more there are: ``a, b and 1,000 more``."""
    more = f" and {number(len(words) - most)} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more


def listed(words: Sequence[str]) -> str:
    """Return ``a``, ``a and b``, or ``a, b and c``."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def a(value: object) -> str:
    """Return the class of the value with its article: ``a Linear``; ``None`` for None."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def first_line(error: BaseException) -> str:
    """Return the first line of the message of an exception, or its class if it has none."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def human_bytes(n: int) -> str:
    """Return ``1,000 bytes`` or ``1.5 KiB``: binary units, rounded down to one decimal."""
    unit = min(max(n.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    if unit == 0:
        return plural(n, "byte")
    tenths = n * 10 // 1024**unit
    return f"{number(tenths // 10)}.{tenths % 10} {_UNITS[unit]}"


def shape_text(shape: Iterable[int] | None) -> str:
    """Return ``[12, 6]`` as torch prints it, ``[]`` for a 0-dim tensor, ``?`` for a tensor without
    a shape.
    """
    return "?" if shape is None else f"[{', '.join(map(str, shape))}]"


# FSDP1's name; FlattenParamsWrapper's is flat_param, fairscale's flat_param_0
_FLAT = re.compile(r"_flat_param|flat_param(_\d+)?")

NUMBER = re.compile(r"(?<![^.])(\d+)(?![^.])")  # a segment that is a number, as of a layer


_ZEROS = str.maketrans("123456789", "0" * 9)


def may_mention(keys: Iterable[str], words: Iterable[str]) -> bool:
    """Return False if no key holds one of the words.

    Keys of repeated layers differ in digits only. Without the difference few are left to look at.
    """
    distinct = set("\n".join(keys).translate(_ZEROS).split("\n"))
    text = "\n".join(distinct)
    return any(word.translate(_ZEROS) in text for word in words)


_NUMBER_AFTER_DOT = re.compile(r"\.(\d+)(?![^.])")


def split_at_numbers(key: str) -> list[str]:
    """Return the parts of a key between the segments that are numbers, and these numbers, in turn.

    Each part has a dot before it: a search for a dot is faster than one for the beginning of a
    segment.
    """
    return _NUMBER_AFTER_DOT.split(f".{key}")


def dotted(*parts: str) -> str:
    """Return the parts joined by dots, without empty ones: the root of a file or a model has no
    name.
    """
    return ".".join(filter(None, parts))


def prefix_of(path: str) -> str:
    """Return what keys below the path begin with: the path with a dot; empty for the root."""
    return f"{path}." if path else ""


def is_list_of_text(value: object) -> TypeGuard[list[str]]:
    """Return True for a list of strings, as JSON and TOML have them."""
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def title_of(path: str) -> str:
    """Return the path of a section or module for a report; ``(root)`` for the empty one."""
    return path or "(root)"


def is_flat(key: str) -> bool:
    """Return True if the last segment of `key` is the name of a flat parameter."""
    return "flat_param" in key and _FLAT.fullmatch(key.rpartition(".")[2]) is not None


def free(path: str, taken: Container[str]) -> str:
    """Return `path`, or if it is taken (keys may contain dots) the first of `path@1`, `path@2`, ...
    that is not.
    """
    number, name = 0, path
    while name in taken:
        number += 1
        name = f"{path}@{number}"
    return name
