"""Results in a notebook: the report of the command line as HTML."""

from __future__ import annotations

from importlib import import_module
from typing import Any

# Class -> module and function of its document.
_DOCUMENTS = {
    "Checks": ("names", "check_document"),
    "Diff": ("diff", "document"),
    "Diff3": ("diff", "three_way_document"),
    "Explanation": ("names", "explained"),
    "History": ("diff", "history_document"),
    "Inspection": ("inspection", "document"),
    "Names": ("names", "document"),
    "Plan": ("remap", "planned"),
    "Remap": ("remap", "document"),
    "Swap": ("remap", "swapped"),
}


def html(result: Any) -> str | None:
    """Return the report of a result as HTML without scripts or styles, or None for a class without a report."""
    from ckpttool.report.renderers.html import fragment

    if type(result).__name__ == "Checkpoint":
        from ckpttool.inspection.inspect import inspect

        result = inspect(result)
    module, function = _DOCUMENTS.get(type(result).__name__, (None, ""))
    if module is None:
        return None
    made = getattr(import_module(f"ckpttool.report.documents.{module}"), function)
    return fragment(made(result))
