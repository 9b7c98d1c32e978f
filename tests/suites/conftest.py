"""`CKPTTOOL_SUITES_RESULTS=FOLDER` writes a JSON file of results for each suite, after the last test."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from pathlib import Path

import pytest

RESULTS = "passed", "failed", "skipped"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write the counts of each suite: all cases, passed and failed ones, and the others by reason.

    A suite is a test module, or what a test recorded as ``suite``. A test can record its number of ``cases``. The
    reason of a skipped test is the text before the first colon; details come after it.
    """
    folder = os.environ.get("CKPTTOOL_SUITES_RESULTS")
    if not folder:
        return
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    for result in RESULTS:
        for report in terminalreporter.getreports(result):
            path = Path(report.nodeid.partition("::")[0])
            if path.parent.name != "suites" or report.when == "teardown":
                continue
            recorded = dict(report.user_properties)
            suite = str(recorded.get("suite", path.stem.removeprefix("test_")))
            number = int(str(recorded.get("cases", 1)))
            counts[suite][result] += number
            if result == "skipped" and isinstance(report.longrepr, tuple):
                reason = report.longrepr[2].removeprefix("Skipped: ").partition(":")[0]
                reasons[suite][reason] += number
    Path(folder).mkdir(parents=True, exist_ok=True)
    for suite, count in counts.items():
        results = {
            "suite": suite,
            "cases": count.total(),
            "passed": count["passed"],
            "failed": count["failed"],
            "not_possible": dict(reasons[suite].most_common()),
        }
        (Path(folder) / f"{suite}.json").write_text(json.dumps(results, indent=2) + "\n")
