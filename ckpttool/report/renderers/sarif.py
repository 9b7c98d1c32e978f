"""The SARIF 2.1.0 report, for code scanning: a result for each failing key, at the line of the hook if there is one."""

from __future__ import annotations

from itertools import islice
from typing import Any

from ckpttool.core.codes import CODES
from ckpttool.core.text import visible
from ckpttool.report.document import Document, Note, Problems
from ckpttool.report.renderers import json

_MOST = 1000  # results; GitHub takes 5,000


def render(document: Document) -> str:
    from ckpttool import __version__

    results = [
        _result(one.status, "error", ": ".join(filter(None, (one.keys, one.why, one.detail))), one.location)
        for one in islice(document.failing, _MOST)
    ]
    for block in document.blocks:
        if isinstance(block, Problems):
            results += (_result(p.kind, block.severity, str(p)) for p in block.problems)
        elif isinstance(block, Note) and block.severity != "notice":
            results.append(_result("note", block.severity, block.text))
    if not document.ok and not results:
        results.append(_result("error", "error", document.verdict))
    rules = [
        {"id": code, **({"shortDescription": {"text": CODES[code].meaning}} if code in CODES else {})}
        for code in dict.fromkeys(one["ruleId"] for one in results)
    ]
    driver = {"name": "ckpttool", "version": __version__, "rules": rules}
    schema = "https://json.schemastore.org/sarif-2.1.0.json"
    return json.render(
        {"$schema": schema, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]}
    )


def _result(code: str, level: str, message: str, place: tuple[str, int] | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {"ruleId": code, "level": level, "message": {"text": visible(message)}}
    if place is not None:
        location = {"artifactLocation": {"uri": place[0]}, "region": {"startLine": place[1]}}
        found["locations"] = [{"physicalLocation": location}]
    return found
