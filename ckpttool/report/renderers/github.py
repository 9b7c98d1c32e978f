"""The GitHub Actions report: workflow commands that annotate the run, and the complete text in a
group of the log.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import islice

from ckpttool.core.text import visible
from ckpttool.report.collapse import collapse
from ckpttool.report.document import (
    Commands,
    Document,
    Facts,
    Finding,
    Paragraph,
    Problems,
    Severity,
    cell,
)
from ckpttool.report.renderers import text

_LEVELS: tuple[Severity, ...] = ("error", "warning", "notice")
_KEYS = 10  # keys in one annotation
_WITH_DETAIL = ("shape", "dtype")  # statuses of which an annotation says what differs
_SHOWN = 10  # annotations of each level that GitHub shows for a step
_DATA = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A"})
_PROPERTY = _DATA | str.maketrans({":": "%3A", ",": "%2C"})


def render(document: Document) -> str:
    """Return one annotation with the commands, one for each problem, then everything in a group.
    The title of each annotation is the verdict.
    """
    failing = list(document.failing)
    lines: list[str] = []
    for level in _LEVELS:
        messages = _messages(document, level)
        if level == ("notice" if document.ok else "error"):
            keys = _keys([finding for finding in failing if finding.place is None])
            answer = [*keys, *_reasons_and_commands(document)] or [document.verdict]
            messages.insert(0, "\n".join(map(visible, answer)))
        more = len(messages) - _SHOWN
        if more > 0:
            messages[_SHOWN - 1 :] = [f"... {more + 1} more, listed in the log of this step"]
        for message in messages:
            lines.append(_annotation(level, document.verdict, message))
        if level == "error":
            at_hooks = _messages_at_hooks(failing)
            for place, message in at_hooks[: max(0, -more)]:
                lines.append(_annotation(level, document.verdict, message, place))
    lines.append(f"::group::{visible(document.title).translate(_DATA)}")
    lines += [inert(text.render(document).rstrip("\n")), "::endgroup::"]
    return _no_old_commands("\n".join(lines)) + "\n"


def _messages(document: Document, level: Severity) -> list[str]:
    """Return the problems of a level, and the paragraphs that are more than a notice."""
    messages = []
    for block in document.blocks:
        if isinstance(block, Problems) and block.severity == level:
            messages += [visible(str(problem)) for problem in block.problems]
        elif isinstance(block, Paragraph) and block.severity == level != "notice":
            messages.append(visible(block.text))
    return messages


def _messages_at_hooks(failing: Iterable[Finding]) -> list[tuple[tuple[str, int], str]]:
    """Return the line of each hook that is the reason of findings, and a message for it."""
    hooks: dict[tuple[str, int], list[Finding]] = {}
    for finding in failing:
        if finding.location is not None:
            hooks.setdefault(finding.location, []).append(finding)
    messages = []
    for place, findings in hooks.items():
        texts = [findings[0].why, *_keys(findings)]
        messages.append((place, "\n".join(map(visible, texts))))
    return messages


def _reasons_and_commands(document: Document) -> list[str]:
    reasons: list[str] = []
    commands: list[str] = []
    for block in document.all_blocks:
        if isinstance(block, Commands):
            commands += block.commands
        elif isinstance(block, Facts):
            for label, value in block.pairs:
                if label == "reason":
                    reasons.append(f"reason: {cell(value).text}")
    return reasons + commands


def failure(message: str, more: Sequence[str]) -> str:
    """Return one annotation for an error that ended a command; `more` lines are below its title."""
    below = "\n".join(map(visible, more or [message]))
    return _no_old_commands(_annotation("error", message, below)) + "\n"


def inert(text: str) -> str:
    """Return the text so that the runner takes no line in the log for a workflow command."""
    return _no_old_commands(re.sub(r"(?m)^([^\S\n]*)::", r"\1\\x3a:", text))


def _no_old_commands(lines: str) -> str:
    """The runner still obeys the old form of a command, ``##[``, anywhere in a line."""
    return lines.replace("##[", r"##\x5b")


def _keys(findings: Sequence[Finding]) -> list[str]:
    """Return a line for each key, in which repeated layers are one, and how many more there are."""
    named = []
    for finding in findings:
        detail = f": {finding.detail}" if finding.detail and finding.status in _WITH_DETAIL else ""
        named.append((finding.keys, (finding.status, detail)))
    lines: list[str] = []
    more = len(findings)
    for group in islice(collapse(named), _KEYS):
        status, detail = group.likeness
        lines.append(f"{status}: {group.pattern}{detail}")
        more -= len(group.keys)
    if more > 0:
        lines.append(f"... {more} more")
    return lines


def _annotation(
    level: Severity, title: str, message: str, place: tuple[str, int] | None = None
) -> str:
    properties = f"title={visible(title).translate(_PROPERTY)}"
    if place is not None:
        file, line = place
        properties = f"file={file.translate(_PROPERTY)},line={line},{properties}"
    return f"::{level} {properties}::{message.translate(_DATA)}"
