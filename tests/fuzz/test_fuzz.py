"""Every reader, for a short while: a value or a `CkptError` for every input; and the faults that fuzzing has found."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mutate import mutated
from targets import TARGETS

SOON = 5.0  # seconds


@pytest.mark.parametrize("name", TARGETS)
def test_the_inputs_to_begin_with_are_taken(name: str) -> None:
    taken = [TARGETS[name].run(data) for data in TARGETS[name].seeds()]
    assert any(taken)


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(chance=st.integers(0, 2**32))
def test_changed_inputs_are_answered(name: str, chance: int) -> None:
    target = TARGETS[name]
    start = time.process_time()
    target.run(mutated(_seeds(name), target.words, random.Random(chance)))
    assert time.process_time() - start < SOON


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.binary(max_size=64))
def test_any_bytes_are_answered(name: str, data: bytes) -> None:
    TARGETS[name].run(data)


_kept: dict[str, list[bytes]] = {}


def _seeds(name: str) -> list[bytes]:
    if name not in _kept:
        _kept[name] = TARGETS[name].seeds()
    return _kept[name]


def test_operators_do_not_end_the_process() -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("operators.py")), "2", "0"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "values" in done.stdout
