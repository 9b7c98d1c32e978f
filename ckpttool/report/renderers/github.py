"""The GitHub Actions report: workflow commands that annotate the run, and the whole text in a group of the log."""

from __future__ import annotations

from collections.abc import Iterator

from ckpttool.report.document import Commands, Document, Note, Problems, Severity
from ckpttool.report.renderers import text
from ckpttool.words import visible

_LEVELS: tuple[Severity, ...] = ("error", "warning", "notice")
_SHOWN = 10  # GitHub shows so many annotations of each level for a step
_DATA = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A"})
_PROPERTY = _DATA | str.maketrans({":": "%3A", ",": "%2C"})


def render(document: Document) -> str:
    """One annotation for the verdict (with the commands that mend it), one a problem, then everything in a group."""
    lines: list[str] = []
    for level in _LEVELS:
        messages = [*_verdict(document, level), *_messages(document, level)]
        lines += [_annotation(level, document.title, message) for message in _capped(messages)]
    lines.append(f"::group::{visible(document.title).translate(_DATA)}")
    whole = text.render(document).rstrip("\n")
    return _no_old_commands("\n".join([*lines, unobeyed(whole), "::endgroup::"])) + "\n"


def unobeyed(text: str) -> str:
    """The text as it can stand in the log of a job: the runner takes no line of it for a command."""
    return _no_old_commands("\n".join(map(_log_line, text.split("\n"))))


def _verdict(document: Document, level: Severity) -> Iterator[str]:
    if level == ("notice" if document.ok else "error"):
        commands = [c for block in document.blocks if isinstance(block, Commands) for c in block.commands]
        yield "\n".join(map(visible, [document.verdict, *commands]))


def _messages(document: Document, level: Severity) -> Iterator[str]:
    for block in document.blocks:
        if isinstance(block, Problems) and block.severity == level:
            yield from (visible(str(problem)) for problem in block.problems)
        elif isinstance(block, Note) and block.severity == level != "notice":
            yield visible(block.text)


def _capped(messages: list[str]) -> list[str]:
    if len(messages) <= _SHOWN:
        return messages
    return [*messages[: _SHOWN - 1], f"... {len(messages) - _SHOWN + 1} more, listed in the log of this step"]


def _annotation(level: Severity, title: str, message: str) -> str:
    return f"::{level} title={visible(title).translate(_PROPERTY)}::{message.translate(_DATA)}"


def _log_line(line: str) -> str:
    """A line that the runner does not take for a workflow command, as it would if ``::`` came first."""
    return line.replace("::", r"\x3a:", 1) if line.lstrip().startswith("::") else line


def _no_old_commands(lines: str) -> str:
    """The runner still obeys the old form of a command, ``##[``, anywhere in a line."""
    return lines.replace("##[", r"##\x5b")
