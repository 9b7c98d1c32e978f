"""Spellings of other tools and of earlier versions: each fails, and its hint is the command to run instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ckpttool.core.errors import CkptError
from ckpttool.core.text import shell

Words = list[str]


def check(args: Sequence[str]) -> None:
    """Raise `CkptError` if the command line has an option that is written in another way."""
    for word in args:
        flag = word.partition("=")[0]
        for (command, option), rewritten in RENAMED.items():
            if flag == option and command in (args[0], "*"):
                hint = shell("ckpttool", *rewritten(list(args)))
                raise CkptError(f"no such option: {flag}", hint=hint)


def _taken(args: Words, flag: str) -> tuple[Words, Words]:
    """Return the values of an option, and the other words."""
    values, rest, words = [], [], iter(args)
    for word in words:
        name, equals, value = word.partition("=")
        if name != flag:
            rest.append(word)
        else:
            values.append(value if equals else next(words, "..."))
    return values, rest


def _diff3(args: Words) -> Words:
    (base, *_), rest = _taken(args, "--base")
    return ["diff3", base, *rest[1:]]


def _convert(args: Words) -> Words:
    """A remap that is about the shards, or about all bytes of a file."""
    rest = [word for word in args if word not in ("--copy", "--compact")]
    return ["convert", *rest[1:]]


def _undo(args: Words) -> Words:
    return ["undo", *(word for word in args[1:] if word != "--undo")]


def _without_link(args: Words) -> Words:
    return _taken(args, "--link")[1]


# (command, option) -> the words of the new command line, from all words of the old one. "*": of any command.
RENAMED: dict[tuple[str, str], Callable[[Words], Words]] = {
    ("diff", "--base"): _diff3,
    ("remap", "--undo"): _undo,
    ("remap", "--copy"): _convert,
    ("remap", "--compact"): _convert,
    ("remap", "--max-shard-size"): _convert,
    ("remap", "--link"): _without_link,
}
