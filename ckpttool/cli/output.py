"""What every command's output has in common: the options that choose the format, and the printing itself."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

import typer

from ckpttool.errors import CkptError
from ckpttool.io import sources, write_file
from ckpttool.io.pieces import Piece
from ckpttool.report import FORMATS, check_format, format_of, render
from ckpttool.report.document import Document
from ckpttool.report.renderers import json
from ckpttool.report.renderers.text import Terminal

Force = Annotated[bool, typer.Option("--force", is_eager=True, help="Overwrite files that exist.")]


def check_new(context: typer.Context, path: str | None) -> str | None:
    """An option's callback: raises `CkptError` where the file exists and --force is not given."""
    if path is not None and os.path.isfile(path) and not context.params.get("force"):
        raise CkptError(f"{path} exists", hint="pass --force to overwrite it, or name another file")
    return path


def _check_reports(context: typer.Context, paths: list[str] | None) -> list[str]:
    for path in paths or ():
        format_of(path)
        check_new(context, path)
    return paths or []


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
    *,
    force: bool = False,
) -> None:
    """Writes the report files, then prints the result to stdout: data and nothing else.

    `document` and `data` make the two shapes of the result; each is called only where a format shows it. The files come
    first, so that stdout stays empty where one of them cannot be written. Raises as `write_text`.
    """
    for path in reports or ():
        write_text(path, _rendered(format_of(path), document, data), force=force)
    sys.stdout.write(_rendered(format, document, data, _terminal()))
    sys.stdout.flush()


def _rendered(
    format: str,
    document: Callable[[], Document],
    data: Callable[[], Mapping[str, Any]],
    terminal: Terminal | None = None,
) -> str:
    return json.render(data()) if format == "json" else render(format, document(), {}, terminal)


def check_texts(paths: Iterable[str | None], out: str | None = None) -> None:
    """Raises `CkptError` where one of these files is a source of the command, or what it writes (`out`) itself."""
    named = [path for path in paths if path is not None]
    for path in named:
        if write_file.is_one_of(path, sources.files_read()):
            raise CkptError(f"{path} is a source of this command", hint="name another file")
        if sum(os.path.realpath(path) == os.path.realpath(other) for other in (*named, out) if other is not None) > 1:
            raise CkptError(f"{path} is named for two outputs", hint="give each a name of its own")


def write_text(path: str, text: str, *, force: bool) -> None:
    """Writes the file as UTF-8, under the rules of OUT: whole or not at all, over no source, over others by `force`.

    What is no regular file (``/dev/stderr``, a pipe) is written to directly. Raises `CkptError`, and for these OSError.
    """
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        try:
            with open(path, "w", encoding="utf-8", newline="\n") as file:
                file.write(text)
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from error
        return
    check_texts([path])
    write_file.preflight(path, (), force=force, in_place=False)
    write_file.write([Piece(text.encode("utf-8", "backslashreplace"))], path, replace=force, in_place=False)


def _terminal() -> Terminal | None:
    """The terminal behind stdout, or None. ``NO_COLOR`` (no-color.org) and ``TERM=dumb`` are respected."""
    if not sys.stdout.isatty():
        return None
    color = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return Terminal(shutil.get_terminal_size().columns, color)
