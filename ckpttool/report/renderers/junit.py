"""The JUnit report: one test case for the verdict, one for each failing key or problem, which CI
systems show.
"""

from __future__ import annotations

from xml.sax.saxutils import escape, quoteattr

from ckpttool.core.text import visible
from ckpttool.report.document import Document, Problems
from ckpttool.report.renderers import text

_MOST = 1000  # failures that are listed


def render(document: Document) -> str:
    """Return the document as JUnit XML; the text report is the output of the suite."""
    name = quoteattr(visible(document.title))
    failing = [
        (one.keys, ": ".join(filter(None, (one.status, one.why, one.detail))))
        for one in document.failing
    ]
    if not document.ok:
        problems = [
            p for block in document.blocks if isinstance(block, Problems) for p in block.problems
        ]
        failing += [(problem.key, problem.problem) for problem in problems]
    verdict = "" if document.ok else f"<failure message={quoteattr(visible(document.verdict))}/>"
    cases = [
        f"    <testcase classname={name}"
        f" name={quoteattr(visible(document.verdict))}>{verdict}</testcase>"
    ]
    for key, message in failing[:_MOST]:
        failure = f"<failure message={quoteattr(visible(message))}/>"
        cases.append(
            f"    <testcase classname={name} name={quoteattr(visible(key))}>{failure}</testcase>"
        )
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
