"""The codes of everything that a report says: what each means, an example, and what to do about it.

They are the rows of ``codes.md``, which is also a page of the documentation. `ckpttool explain
CODE` prints one. Codes are stable; sentences may change.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckpttool.core.schema import TEXT, one_of, record
from ckpttool.core.values import dataclass, public

# Kind of a code -> the heading of its table.
KINDS = {
    "status": "The status of an entry of `diff`",
    "cause": "Why an entry of `diff` differs",
    "note": "A note or a warning about the operands as a whole",
    "fix": "A note on a suggested fix",
    "problem": "Why a command refuses, or what `check` finds",
}


@public
@dataclass(frozen=True, slots=True)
class Row:
    """A code of reports and how to fix its cause.

    Attributes:
        code: The code, as ``ckpttool explain`` takes it.
        kind: One of `KINDS`.
        meaning: Its explanation.
        example: A line of a report that has it.
        fix: How to fix it.
    """

    code: str
    kind: str
    meaning: str
    example: str
    fix: str

    def to_json(self) -> dict[str, Any]:
        """Return the `code` object of the contract."""
        return dict(CODE.write(self))


CODE = record(
    Row,
    {"code": TEXT, "kind": one_of(*KINDS), "meaning": TEXT, "example": TEXT, "fix": TEXT},
    title="ckpttool.code/1",
)


def markdown() -> str:
    return Path(__file__).with_name("codes.md").read_text(encoding="utf-8")


def _rows() -> dict[str, Row]:
    kinds, kind, rows = {title: kind for kind, title in KINDS.items()}, "", {}
    for line in markdown().splitlines():
        if line.startswith("## "):
            kind = kinds[line[3:]]
        elif line.startswith("| `"):
            code, meaning, example, fix = line[2:-2].split(" | ")
            rows[code.strip("`")] = Row(
                code.strip("`"), kind, meaning, example.removeprefix("`").removesuffix("`"), fix
            )
    return rows


CODES = _rows()
