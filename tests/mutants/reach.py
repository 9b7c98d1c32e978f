"""A plugin of pytest, under ``coverage run``: which test reaches which line, and how long those took that passed.

What is set up for a test may be there for the others of its file: each file has one time for all of that.
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
    """What a fixture reaches may be there for every test of the file; nothing is kept in a cache for the next."""
    _reached_by(item.nodeid.partition("::")[0])
    for known in list(vars(sys.modules["zoo"]).values()) if "zoo" in sys.modules else []:
        if hasattr(known, "cache_clear"):
            known.cache_clear()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """What the test itself reaches."""
    _reached_by(item.nodeid)
    return (yield)


def _reached_by(test: str) -> None:
    measuring = coverage.Coverage.current()
    assert measuring is not None
    measuring.switch_context(test)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid.partition("::")[0] if report.when == "setup" else report.nodeid] += report.duration
    if not report.passed:
        _not_passed.add(report.nodeid)


def pytest_sessionfinish() -> None:
    passed = {test: seconds for test, seconds in _seconds.items() if test not in _not_passed}
    Path(os.environ["CKPTTOOL_PASSED"]).write_text(json.dumps(passed))
