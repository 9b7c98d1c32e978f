"""A pytest plugin for ``coverage run``: record which test reaches which line, and how long each
passing test took.

The tests of a file may share fixtures, so the setup time is recorded for the file.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import coverage
import pytest

_seconds: defaultdict[str, float] = defaultdict(float)
_not_passed: set[str] = set()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    """Count lines that fixtures reach for the whole file, and clear the caches of the zoo."""
    _switch_context(item.nodeid.partition("::")[0])
    for model in list(vars(sys.modules["zoo"]).values()) if "zoo" in sys.modules else []:
        if hasattr(model, "cache_clear"):
            model.cache_clear()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Count lines that the test itself reaches."""
    _switch_context(item.nodeid)
    return (yield)


def _switch_context(test: str) -> None:
    current = coverage.Coverage.current()
    assert current is not None
    current.switch_context(test)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid.partition("::")[0] if report.when == "setup" else report.nodeid] += (
        report.duration
    )
    if not report.passed:
        _not_passed.add(report.nodeid)


def pytest_sessionfinish() -> None:
    passed = {test: seconds for test, seconds in _seconds.items() if test not in _not_passed}
    Path(os.environ["CKPTTOOL_PASSED"]).write_text(json.dumps(passed))
