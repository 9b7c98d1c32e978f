"""docs/formats.md says what the code's own table of formats says. `UPDATE_DOCS=1` writes the table anew."""

from __future__ import annotations

import os

from ckpttool.formats.table import TABLE, Format
from places import DOCS

PAGE = DOCS / "formats.md"
START, END = "<!-- the table of ckpttool/formats -->\n", "<!-- end of the table -->\n"


def holds(row: Format) -> str:
    """What a file of the format can hold, in words."""
    if row.tensors_only:
        names = "also under several names" if row.aliases else "each under one name"
        return f"one state dict of dense tensors, {names}"
    return "whatever `torch.save` pickles" if row.pickled else "what its writer put there"


def table() -> str:
    lines = ["| format | recognised in JSON as | OUT ends in | holds |", "| --- | --- | --- | --- |"]
    for row in TABLE:
        endings = " ".join(f"`{ending}`" for ending in row.endings) or "read only"
        lines.append(f"| {row.title} | `{row.name}` | {endings} | {holds(row)} |")
    return "\n".join(lines) + "\n"


def test_the_page_has_the_table_of_the_code() -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    written, _, after = rest.partition(END)
    if os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(before + START + table() + END + after, encoding="utf-8")
        written = table()
    assert written == table()
