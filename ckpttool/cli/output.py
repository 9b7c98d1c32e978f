"""What every command's output has in common: the options that choose the format, and the printing itself."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any

import typer

from ckpttool.cli.streams import for_log
from ckpttool.report import FORMATS, check_format, format_of, render
from ckpttool.report.document import Document, warnings_apart
from ckpttool.report.renderers import json
from ckpttool.report.renderers.text import Terminal, lines


def _check_reports(paths: list[str] | None) -> list[str]:
    for path in paths or ():
        format_of(path)
    return paths or []


All = Annotated[bool, typer.Option("--all", help="List every key instead of one line for each cause.")]
Format = Annotated[
    str, typer.Option("--format", metavar="|".join(FORMATS), callback=check_format, help="The format of the output.")
]
Reports = Annotated[
    list[str] | None,
    typer.Option(
        "--report",
        metavar="FILE",
        callback=_check_reports,
        help="Write the output to FILE too; its ending picks the format. Repeatable.",
    ),
]


def emit(
    document: Callable[[], Document],
    data: Callable[[], Mapping[str, Any]],
    format: str,
    reports: Sequence[str] | None = None,
) -> None:
    """Writes the report files, then prints the result to stdout: data and nothing else.

    `document` and `data` make the two shapes of the result; each is called only where a format shows it. The files come
    first, so that stdout stays empty where one of them cannot be written. Of a text
    the warnings go to stderr, after it. Raises OSError.
    """
    for path in reports or ():
        write_report(path, _rendered(format_of(path), document, data))
    if format == "text":
        shown, warnings = warnings_apart(document())
        sys.stdout.write(for_log(render(format, shown, {}, _terminal()), format))
        sys.stdout.flush()
        sys.stderr.writelines(f"{line}\n" for block in warnings for line in lines(block))
    else:
        sys.stdout.write(for_log(_rendered(format, document, data), format))
        sys.stdout.flush()


def _rendered(format: str, document: Callable[[], Document], data: Callable[[], Mapping[str, Any]]) -> str:
    return json.render(data()) if format == "json" else render(format, document(), {})


def write_report(path: str, text: str) -> None:
    """Writes the file as UTF-8, whole or not at all: to a temporary sibling that is then renamed.

    What is no regular file (``/dev/stderr``, a pipe) is written to directly. Raises OSError that names `path`.
    """
    target = os.path.realpath(path)
    direct = os.path.exists(target) and not os.path.isfile(target)
    folder, name = os.path.split(target)
    place = target if direct else os.path.join(folder, f".{name}.{os.getpid()}.tmp")
    try:
        with open(place, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        if not direct:
            os.replace(place, target)
    except OSError as error:
        if not direct:
            with suppress(OSError):
                os.unlink(place)
        raise OSError(error.errno, error.strerror, path) from error


def _terminal() -> Terminal | None:
    """The terminal behind stdout, or None. ``NO_COLOR`` (no-color.org) and ``TERM=dumb`` are respected."""
    if not sys.stdout.isatty():
        return None
    color = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return Terminal(shutil.get_terminal_size().columns, color)
