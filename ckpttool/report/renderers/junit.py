"""The JUnit report: one test case for the verdict, one for each failing key or problem, which CI systems show."""

from __future__ import annotations

from xml.sax.saxutils import escape, quoteattr

from ckpttool.core.text import visible
from ckpttool.report.document import Document, Problems
from ckpttool.report.renderers import text

_MOST = 1000  # failures that are listed


def render(document: Document) -> str:
    """Return the document as JUnit XML; the text report is the output of the suite."""
    name = quoteattr(visible(document.title))
    failing = list(failures(document))
    verdict = "" if document.ok else f"<failure message={quoteattr(visible(document.verdict))}/>"
    cases = [f"    <testcase classname={name} name={quoteattr(visible(document.verdict))}>{verdict}</testcase>"]
    for key, message in failing[:_MOST]:
        failure = f"<failure message={quoteattr(visible(message))}/>"
        cases.append(f"    <testcase classname={name} name={quoteattr(visible(key))}>{failure}</testcase>")
    count = len(failing[:_MOST]) + (not document.ok)
    return "\n".join(
        [
            '<?xml version="1.0" encoding="utf-8"?>',
            f'<testsuites name="ckpttool" tests="{len(cases)}" failures="{count}">',
            f'  <testsuite name={name} tests="{len(cases)}" failures="{count}">',
            *cases,
            f"    <system-out>{escape(text.render(document))}</system-out>",
            "  </testsuite>",
            "</testsuites>\n",
        ]
    )


def failures(document: Document) -> list[tuple[str, str]]:
    """Return each failing key with the reason, and each problem."""
    found = []
    if not document.ok and document.listing is not None:
        for one in document.listing.findings():
            if one.fails:
                names = ", ".join(key.key for key in one.left or one.right)
                found.append((names, ": ".join(filter(None, (one.status, one.why, one.detail)))))
    problems = [p for block in document.blocks if isinstance(block, Problems) for p in block.problems]
    return [*found, *((problem.key, problem.problem) for problem in problems if not document.ok)]
