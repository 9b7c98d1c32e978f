"""The GitHub Actions report: workflow commands that annotate the run, and the whole text in a group of the log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from os.path import isabs, relpath

from ckpttool.core.text import visible
from ckpttool.report.document import Commands, Document, Finding, Note, Problems, Severity
from ckpttool.report.renderers import text

_LEVELS: tuple[Severity, ...] = ("error", "warning", "notice")
_KEYS = 10  # that one annotation names
_SHOWN = 10  # GitHub shows so many annotations of each level for a step
_DATA = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A"})
_PROPERTY = _DATA | str.maketrans({":": "%3A", ",": "%2C"})


def render(document: Document) -> str:
    """One annotation for the verdict (with the commands that mend it), one a problem, then everything in a group."""
    lines: list[str] = []
    for level in _LEVELS:
        messages = [*_verdict(document, level), *_messages(document, level)]
        lines += [_annotation(level, document.title, message) for message in _capped(messages)]
        lines += list(_at_hooks(document, level))[: max(0, _SHOWN - len(messages))]
    lines.append(f"::group::{visible(document.title).translate(_DATA)}")
    whole = text.render(document).rstrip("\n")
    return _no_old_commands("\n".join([*lines, unobeyed(whole), "::endgroup::"])) + "\n"


def unobeyed(text: str) -> str:
    """The text as it can stand in the log of a job: the runner takes no line of it for a command."""
    return _no_old_commands("\n".join(map(_log_line, text.split("\n"))))


def _verdict(document: Document, level: Severity) -> Iterator[str]:
    if level == ("notice" if document.ok else "error"):
        commands = [c for block in document.blocks if isinstance(block, Commands) for c in block.commands]
        keys = _keys([] if document.ok else [found for found in _failing(document) if found.place is None])
        yield "\n".join(map(visible, [document.verdict, *keys, *commands]))


def failure(title: str, messages: Sequence[str]) -> str:
    """One annotation for an error that ended a command."""
    return _no_old_commands(_annotation("error", title, "\n".join(map(visible, messages)))) + "\n"


def _failing(document: Document) -> Iterator[Finding]:
    if document.listing is not None:
        yield from (found for found in document.listing.findings() if found.fails)


def _keys(found: Sequence[Finding]) -> list[str]:
    """A line for each key, and how many more there are."""
    named = [f"{one.status}: {', '.join(key.key for key in one.left or one.right)}" for one in found[:_KEYS]]
    return [*named, f"... {len(found) - _KEYS} more"] if len(found) > _KEYS else named


def _at_hooks(document: Document, level: Severity) -> Iterator[str]:
    """An annotation for each hook that is a reason, at its line, with the keys that it renames."""
    if document.ok or level != "error":
        return
    places: dict[tuple[str, int], list[Finding]] = {}
    for found in _failing(document):
        if found.place is not None:
            places.setdefault(found.place, []).append(found)
    for place, own in places.items():
        yield _annotation(level, document.title, "\n".join(map(visible, [own[0].why, *_keys(own)])), place)


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


def _annotation(level: Severity, title: str, message: str, place: tuple[str, int] | None = None) -> str:
    at = ""
    if place is not None:
        file = relpath(place[0]) if isabs(place[0]) else place[0]
        at = f"file={visible(file).translate(_PROPERTY)},line={place[1]},"
    return f"::{level} {at}title={visible(title).translate(_PROPERTY)}::{message.translate(_DATA)}"


def _log_line(line: str) -> str:
    """A line that the runner does not take for a workflow command, as it would if ``::`` came first."""
    return line.replace("::", r"\x3a:", 1) if line.lstrip().startswith("::") else line


def _no_old_commands(lines: str) -> str:
    """The runner still obeys the old form of a command, ``##[``, anywhere in a line."""
    return lines.replace("##[", r"##\x5b")
