"""The demo as a picture: what it printed, four of its steps, as an SVG that needs no network."""

from __future__ import annotations

import io
import re
from html import unescape

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

STEPS = ("The program should", "Why?", "Put the new", "Is the program")  # what each of them begins with
WIDTH = 118
STYLES = (
    (r"^# .*", "bold"),
    (r"^(\$|>>>) .*", "bold cyan"),
    (r"^(Error\(s\)|    (Missing|Unexpected)).*", "red"),
    (r"\b\d+ differences\b|^FAILED.*", "red"),
    (r"^PASSED.*|\b\d+ weights swapped\b", "green"),
    (r"^  (renamed|not_serialized)\b", "yellow"),
)


def recording(printed: str) -> str:
    """The steps of what the demo printed; lines that are too long end in ``…``."""
    steps = [step for step in printed.strip().split("\n\n# ") if step.startswith(STEPS)]
    assert len(steps) == len(STEPS)
    console = Console(record=True, width=WIDTH, force_terminal=True, file=io.StringIO(), legacy_windows=False)
    for line in "\n\n".join(f"# {step}" for step in steps).splitlines():
        text = Text(line if len(line) <= WIDTH else line[: WIDTH - 1] + "…")
        for pattern, style in STYLES:
            text.highlight_regex(pattern, style)
        console.print(text, soft_wrap=True)
    format = re.sub(r"@font-face \{\{.*?\n    \}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return console.export_svg(title="make demo", code_format=format, unique_id="demo")


def texts(svg: str) -> list[str]:
    """The texts of the picture, losses left out: the only numbers that another processor may round otherwise."""
    found = (unescape(text).replace("\xa0", " ") for text in re.findall(r"<text [^>]*>(.*?)</text>", svg))
    return [re.sub(r"loss \d+\.\d+", "loss", text) for text in found]
