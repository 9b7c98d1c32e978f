"""Fuzz every reader for a short time: every input gives a value or a `CkptError`."""

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

MAX_TIME = 5.0  # seconds


@pytest.mark.parametrize("name", TARGETS)
def test_a_seed_is_accepted(name: str) -> None:
    accepted = [TARGETS[name].run(data) for data in TARGETS[name].seeds()]
    assert any(accepted)


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(chance=st.integers(0, 2**32))
def test_mutated_seeds_give_a_value_or_an_error(name: str, chance: int) -> None:
    target = TARGETS[name]
    start = time.process_time()
    target.run(mutated(_seeds(name), target.words, random.Random(chance)))
    assert time.process_time() - start < MAX_TIME


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=10, suppress_health_check=list(HealthCheck))
@given(data=st.binary(max_size=64))
def test_random_bytes_give_a_value_or_an_error(name: str, data: bytes) -> None:
    TARGETS[name].run(data)


_cached_seeds: dict[str, list[bytes]] = {}


def _seeds(name: str) -> list[bytes]:
    if name not in _cached_seeds:
        _cached_seeds[name] = TARGETS[name].seeds()
    return _cached_seeds[name]


def test_operators_do_not_crash_the_process() -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("operators.py")), "0", "0"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "values" in done.stdout
