"""Render an excerpt of the demo's output as a self-contained SVG."""

from __future__ import annotations

import io
import re
from html import unescape

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

STEPS = ("The program should", "Why?", "Put the new", "Is the program")  # their first words
WIDTH = 92
ENDS = ("Not counted", "program  ")  # the rest of a step is left out
NAMES = 4  # renamed keys that are shown
STYLES = (
    (r"^# .*", "bold"),
    (r"^(\$|>>>) .*", "bold cyan"),
    (r"^(Error\(s\)|    (Missing|Unexpected)).*", "red"),
    (r"^\S+ saves \d+ of its \d+ keys under other names.*|^FAILED.*", "red"),
    (r"^PASSED.*|^wrote .*|(?<=-> ).*", "green"),
    (r"^(renamed|reason|fix \(not tried\))(?=:)", "yellow"),
)


def excerpt(step: str) -> list[str]:
    """Return the lines of a step that the picture shows: few keys for each cause."""
    lines: list[str] = []
    for line in step.splitlines():
        if line.startswith(ENDS):
            break
        if (
            line.startswith("  ")
            and "->" in line
            and sum("->" in one for one in lines[-NAMES:]) == NAMES
        ):
            continue
        lines.append(line)
    return lines


def recording(printed: str) -> str:
    """Return the SVG of the demo's output."""
    steps = [step for step in printed.strip().split("\n\n# ") if step.startswith(STEPS)]
    assert len(steps) == len(STEPS)
    console = Console(
        record=True, width=WIDTH, force_terminal=True, file=io.StringIO(), legacy_windows=False
    )
    for line in "\n\n".join("\n".join(excerpt(f"# {step}")).strip() for step in steps).splitlines():
        text = Text(line)
        for pattern, style in STYLES:
            text.highlight_regex(pattern, style)
        console.print(text)
    format = re.sub(r"@font-face \{\{.*?\n    \}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return console.export_svg(title="make demo", code_format=format, unique_id="demo")


def texts(svg: str) -> list[str]:
    """Return the texts of the picture without losses, the only numbers that may be rounded
    differently elsewhere.
    """
    found = (
        unescape(text).replace("\xa0", " ") for text in re.findall(r"<text [^>]*>(.*?)</text>", svg)
    )
    return [re.sub(r"loss \d+\.\d+", "loss", text) for text in found]
