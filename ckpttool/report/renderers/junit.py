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
    failing = []
    for finding in document.failing:
        texts = (finding.status, finding.why, finding.detail)
        failing.append((finding.keys, ": ".join(filter(None, texts))))
    for block in document.blocks if not document.ok else ():
        if isinstance(block, Problems):
            failing += [(problem.key, problem.problem) for problem in block.problems]

    def case(key: str, failure: str) -> str:
        shown = f"<failure message={quoteattr(visible(failure))}/>" if failure else ""
        return f"    <testcase classname={name} name={quoteattr(visible(key))}>{shown}</testcase>"

    cases = [case(document.verdict, "" if document.ok else document.verdict)]
    cases += [case(key, message) for key, message in failing[:_MOST]]
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
