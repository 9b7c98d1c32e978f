"""The output of every command: the options that choose the format, and the printing."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from ckpttool.cli.streams import for_log, is_quiet
from ckpttool.core.errors import CkptError
from ckpttool.core.options import COMMON, Option
from ckpttool.core.tables import present
from ckpttool.core.values import dataclass
from ckpttool.distributed.job import only_first
from ckpttool.io import sources
from ckpttool.report import FORMATS, check_format, format_of, render

if TYPE_CHECKING:
    from ckpttool.report.document import Document
    from ckpttool.report.renderers.text import Terminal

All = Annotated[
    bool, Option("--all", "List every key instead of one line for each cause.", "Reports")
]
ExitZero = Annotated[
    bool, Option("--exit-zero", "Exit with 0 if they differ too; errors stay 2.", "What fails")
]


def _check_reports(paths: list[str]) -> None:
    for path in paths:
        format_of(path)


@dataclass(frozen=True, kw_only=True)
class Report:
    """The options of a report: the format on stdout, files to write it to, and whether to overwrite
    them.
    """

    format: Annotated[
        str,
        Option(
            "--format FORMAT",
            f"{', '.join(FORMATS)}.",
            COMMON,
            check=check_format,
            choices=FORMATS,
        ),
    ] = "text"
    report: Annotated[
        Sequence[str] | None,
        Option(
            "--report FILE",
            "Write the output to FILE too; its ending picks the format. Repeatable.",
            COMMON,
            check=_check_reports,
        ),
    ] = None
    force: Annotated[bool, Option("--force", "Overwrite files that exist.", COMMON)] = False

    def check(self, operands: Iterable[str], *others: str | None, out: str | None = None) -> None:
        """Raise `CkptError`, before any work, if a report file or one of the `others` must not be
        written.

        That is a file of an operand, a file that is written otherwise (`out`), or, without --force,
        a file that exists.
        """
        from ckpttool.io.files import files_of
        from ckpttool.operands.checkpoint import split

        read: list[str] = []
        for operand in operands:
            read += files_of(split(operand)[0])
        paths = present((*others, *(self.report or ())))
        named = Counter(os.path.realpath(path) for path in (*paths, out) if path is not None)
        for path in paths:
            if path == "-":
                raise CkptError(
                    "- is not the name of a file", hint="name one, or print with --format json"
                )
            if named[os.path.realpath(path)] > 1:
                raise CkptError(f"{path} is named for two outputs", hint="give each its own name")
            _check_no_source(path, read)
            if os.path.isfile(path) and not self.force:
                raise CkptError(
                    f"{path} exists", hint="pass --force to overwrite it, or name another file"
                )

    def emit(
        self,
        document: Callable[[], Document],
        data: Callable[[], Mapping[str, Any]],
        text: str | None = None,
    ) -> None:
        """Write the report files, then print the result to stdout: data and nothing else.

        `document` and `data` make the two shapes of the result; each is called only if a format
        needs it. `text` takes the document's place on stdout. The files come first, so that stdout
        stays empty if one of them cannot be written. The warnings of a text go to stderr, after it.
        Raise as `write_text`.
        """
        only_first()
        for path in self.report or ():
            write_text(path, _rendered(format_of(path), document, data), force=self.force)
        if is_quiet():
            return
        from ckpttool.report.document import warnings_apart
        from ckpttool.report.renderers.text import Terminal, lines

        warnings: Sequence[Any] = ()
        if self.format != "text":
            text = _rendered(self.format, document, data)
        elif text is None:
            shown, warnings = warnings_apart(document())
            text = render("text", shown, {}, _terminal(sys.stdout))
        sys.stdout.write(for_log(text, self.format))
        sys.stdout.flush()
        at = _terminal(sys.stderr) if warnings else None
        at = at and Terminal(at.width, color=False)
        for block in warnings:
            sys.stderr.writelines(f"{line}\n" for line in lines(block, at))


def _rendered(
    format: str, document: Callable[[], Document], data: Callable[[], Mapping[str, Any]]
) -> str:
    from ckpttool.report.renderers import json

    return json.render(data()) if format == "json" else render(format, document(), {})


def _check_no_source(path: str, read: Iterable[str]) -> None:
    from ckpttool.io.preflight import is_one_of

    if is_one_of(path, read):
        raise CkptError(f"{path} is read by this command", hint="name another file")


def write_text(path: str, text: str, *, force: bool, in_place: bool = False) -> None:
    """Write the file as UTF-8, under the rules of OUT: all or nothing, never over a source, over
    others with `force`.

    With `in_place` it may be a file that the command has read. Other than regular files
    (``/dev/stderr``, a pipe) are written to directly. Raise `CkptError`, and OSError for the
    latter.
    """
    only_first()
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        try:
            with open(path, "w", encoding="utf-8", newline="\n") as file:
                file.write(text)
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from error
        return
    from ckpttool.io.pieces import Piece
    from ckpttool.io.preflight import check_file
    from ckpttool.io.write import WriteOptions, write_file

    if not in_place:
        _check_no_source(path, sources.files_read())
    check_file(path, (), force=force, in_place=in_place)
    write_file(
        [Piece(text.encode("utf-8", "backslashreplace"))],
        path,
        WriteOptions(replace=force, in_place=in_place),
    )


def _terminal(stream: TextIO) -> Terminal | None:
    """Return the terminal behind the stream, or None. Respect ``NO_COLOR`` (no-color.org) and
    ``TERM=dumb``.
    """
    if not stream.isatty():
        return None
    import shutil

    from ckpttool.report.renderers.text import Terminal

    color = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return Terminal(shutil.get_terminal_size().columns, color)
