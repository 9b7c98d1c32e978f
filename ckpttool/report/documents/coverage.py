"""What a verdict covers: the aspects that were compared, and those that were not, with what compares values."""

from __future__ import annotations

from ckpttool.queries.diff.result import ASPECTS, NO_VALUES, Compared
from ckpttool.report.document import Inline

_CALLED = {"other_sections": "other sections", "objects": "non-tensor entries", "code": "the code of the program"}


def coverage(compared: Compared, scope: str) -> tuple[tuple[str, Inline], ...]:
    """Two facts: what was compared, and what was not."""
    called = {aspect: _CALLED.get(aspect, aspect) for aspect in ASPECTS if aspect in compared}
    if "values" in called and scope and scope != NO_VALUES:
        called["values"] = f"values ({scope})"
    said = (
        ", ".join(text for aspect, text in called.items() if compared[aspect] is covered) for covered in (True, False)
    )
    return tuple((label, text) for label, text in zip(("compared", "not compared"), said) if text)


def with_values(verdict: str, compared: Compared, scope: str, equal: bool = False) -> str:
    """The verdict, and what it says of values; `equal` if nothing differs."""
    if "values" not in compared:
        return verdict
    if not compared["values"]:
        return f"{verdict}; values not compared ({scope})"
    within = f" {scope}" if scope else ""
    return f"{verdict}; values are equal{within}" if equal else verdict
