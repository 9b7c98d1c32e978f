"""Options become the command line that asks for them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any, get_args, get_type_hints

from ckpttool.options import Option, OutputOptions
from ckpttool.words import Info, shell

PLACEHOLDERS = ("MODEL", "OLD", "OPTIMIZER", "OLD_OPTIMIZER", "PROGRAM.pt2", "CKPT")  # for what only the user knows
_OUTPUT = frozenset(field.name for field in fields(OutputOptions))


def command(verb: str, operands: tuple[str, ...], options: Any) -> str:
    """``ckpttool VERB OPERANDS OPTIONS`` for the options that are not as they are by default, those of the output last.

    An object of the caller's has no words: the name of its option stands for it (``MODEL``).
    """
    return shell("ckpttool", verb, *operands, *_words(options, output=False), *_words(options, output=True))


def _words(options: Any, *, output: bool) -> Iterator[str]:
    hints = get_type_hints(type(options), include_extras=True)
    for field in fields(options):
        value = getattr(options, field.name)
        if (field.name in _OUTPUT) is not output or value == field.default:
            continue
        mark = next(part for part in get_args(hints[field.name]) if isinstance(part, Option))
        if value is True:
            yield mark.flags[0]
            continue
        for one in value if isinstance(value, (list, tuple)) else (value,):
            yield from (mark.flags[0], _text(one, mark))


def _text(value: Any, mark: Option) -> str:
    if isinstance(value, Mapping):
        return json.dumps(dict(value))
    return str(value) if isinstance(value, (str, int)) else str(mark.metavar)


def untried(fix: Iterable[str]) -> list[Info]:
    """Return a note on the commands that name what only the user knows: they were not tried."""
    words = [word for line in fix for word in shlex.split(line)]
    names = [name for name in PLACEHOLDERS if name in words]
    stand = "stands" if len(names) == 1 else "stand"
    return [Info(f"not tried, since it depends on what {' and '.join(names)} {stand} for")] if names else []
