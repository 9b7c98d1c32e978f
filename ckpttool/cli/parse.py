"""A command line in its usual spelling becomes a command's values; typer, which knows all spellings, loads slowly."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ckpttool.cli.fields import Taken
from ckpttool.core.errors import CkptError
from ckpttool.core.options import Argument, Option


class Unusual(Exception):
    """Typer has to say what it means, or what is wrong with it."""


def parse(taken: Sequence[Taken], args: Sequence[str]) -> dict[str, Any] | None:
    """The values by name, those that typer would give; None where it has to be asked.

    That is so for ``--help``, for everything that is wrong, and for what is seldom written: ``-oOUT``, ``--``, values
    that begin with a dash, numbers in other forms than 12, 0.5 and 1e-05.
    """
    try:
        given, places = _split(taken, args)
        given |= _placed([one for one in taken if isinstance(one.mark, Argument)], places)
        return {one.name: value_of(one, given.get(one.name)) for one in taken}
    except (Unusual, CkptError):
        return None


def _split(taken: Sequence[Taken], args: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """The texts of the options, by name, and those that stand alone. A flag's text is empty."""
    flags = {flag: one for one in taken if isinstance(one.mark, Option) for flag in one.mark.flags}
    given: dict[str, list[str]] = {}
    places = []
    words = iter(args)
    for word in words:
        if not word.startswith("-"):
            places.append(word)
            continue
        flag, equals, text = word.partition("=") if word.startswith("--") else (word, "", "")
        option = flags.get(flag)
        if option is None or (equals and option.kind is bool):
            raise Unusual
        if option.kind is not bool and not equals:
            text = next(words, "-")
        if text.startswith("-"):
            raise Unusual
        given.setdefault(option.name, []).append(text)
    return given, places


def _placed(arguments: Sequence[Taken], places: list[str]) -> dict[str, list[str]]:
    """The texts of the arguments: one for each, and for the last, where it takes many, all that are left."""
    given = {}
    for argument in arguments:
        given[argument.name], places = (places, []) if argument.many else (places[:1], places[1:])
    if places:
        raise Unusual
    return {name: texts for name, texts in given.items() if texts}


def value_of(one: Taken, texts: list[str] | None) -> Any:
    """The value that these texts give; without texts what is there in its place. Raises `Unusual`, and as checks do."""
    if texts is None:
        if one.required:
            raise Unusual
        return one.default
    if one.kind is bool:
        return True
    values = [_one(one, text) for text in texts]
    value = values if one.many else values[-1]
    if isinstance(one.mark, Option) and one.mark.check is not None:
        one.mark.check(value)
    return value


_NUMBERS = {
    int: re.compile(r"0|[1-9][0-9]{0,17}"),
    float: re.compile(r"(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?(e-?[0-9]{1,2})?"),
}


def _one(one: Taken, text: str) -> Any:
    if one.kind is str:
        if not text.isprintable():  # bytes that are no text stand as lone surrogates
            raise Unusual
        return text
    if not _NUMBERS[one.kind].fullmatch(text):
        raise Unusual
    return one.kind(text)
