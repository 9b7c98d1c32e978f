"""The manual page in troff, from what the commands take: ``python -m ckpttool.cli.man > ckpttool.1`` (``make man``)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from inspect import cleandoc

from ckpttool import __version__
from ckpttool.cli import app
from ckpttool.cli.by_typer import ABOUT
from ckpttool.cli.fields import Taken, taken_by, with_common
from ckpttool.options import Option


def page() -> Iterator[str]:
    """The lines of the page."""
    yield f'.TH CKPTTOOL 1 "" "ckpttool {__version__}" "User Commands"'
    yield from (".SH NAME", r"ckpttool \- inspect, diff and convert PyTorch checkpoints")
    yield from (".SH SYNOPSIS", r".B ckpttool", r".I COMMAND", r"[\fIOPTIONS\fR]")
    yield from (".SH DESCRIPTION", *_paragraphs(ABOUT))
    common = [one.name for one in taken_by(with_common(lambda: None))]
    yield ".SH COMMANDS"
    for name, (module, _) in app.COMMANDS.items():
        command = import_module(module).command
        yield from (f'.SS "ckpttool {name}"', *_paragraphs(command.__doc__))
        for one in taken_by(with_common(command)):
            if one.name not in common:
                yield from _entry(one)
    yield ".SH COMMON OPTIONS"
    for one in taken_by(with_common(lambda: None)):
        yield from _entry(one)


def _entry(one: Taken) -> Iterator[str]:
    words = one.mark.flags if isinstance(one.mark, Option) else ()
    value = rf" \fI{_plain(one.mark.metavar)}\fR" if one.mark.metavar else ""
    head = ", ".join(rf"\fB{_plain(word)}\fR" for word in words)
    yield from (".TP", head + value if head else value.strip(), _plain(one.mark.help))


def _paragraphs(text: str) -> Iterator[str]:
    for block in cleandoc(text).split("\n\n"):
        lines = [line for line in block.splitlines() if line != "\b"]
        if lines[0] == "Examples:":
            yield from (".PP", "Examples:", ".nf", *(_plain(line) for line in lines[1:]), ".fi")
        else:
            yield from (".PP", *map(_plain, lines))


def _plain(text: str) -> str:
    r"""The text as troff prints it: a backslash is ``\e``, a hyphen one that can be pasted, no line a request."""
    escaped = text.replace("\\", r"\e").replace("-", r"\-").replace("'", r"\(aq")
    return rf"\&{escaped}" if escaped.startswith(".") else escaped


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in page())
