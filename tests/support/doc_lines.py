"""The command lines that the documentation shows."""

from __future__ import annotations

import re

from places import DOCS, ROOT

README = ROOT / "README.md"
_IN_BLOCK = re.compile(r"^(?:\$ )?(ckpttool .*)$", re.MULTILINE)  # a line of a fenced block
_SHOWN = 3  # lines of an output
_ECHO = re.compile(
    r"(source|output|left|right|checkpoint|model|program|weights|run|key form|form|compared"
    r"|not compared) {2,}"
)
_IN_TEXT = re.compile(r"`(ckpttool [^`\n]*)`")


def command_lines(*without: str) -> list[str]:
    """Return every distinct ``ckpttool …`` line of the README and of docs/, in text or in code
    blocks.

    Pages named in `without` are skipped. Commands after a pipe are cut off.
    """
    found: list[str] = []
    for page in [README, *sorted(DOCS.glob("**/*.md"))]:
        if page.name in without:
            continue
        text = page.read_text()
        found += _IN_TEXT.findall(text)
        for block in re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            found += _IN_BLOCK.findall(block)
    return list(dict.fromkeys(re.split(r"  #| \| ", line)[0].strip() for line in found))


def is_echo(line: str) -> bool:
    """Return whether an output line only repeats an operand."""
    return _ECHO.match(line) is not None


def first_lines(output: str) -> str:
    """Return the lines that a page shows: the first ones, without operands."""
    lines = [line for line in output.splitlines() if line.strip() and not is_echo(line)]
    return "".join(
        f"{line}\n" for line in [*lines[:_SHOWN], *(["..."] if len(lines) > _SHOWN else [])]
    )
