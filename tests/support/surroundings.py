"""What a test cannot arrange for real: too little memory, inputs too large to try, another process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ckpttool.core import limits
from ckpttool.io import remote, sources, write_remote
from ckpttool.tracing import instances


@contextmanager
def limited(**smaller: int) -> Iterator[None]:
    """Refuse inputs above smaller limits than those that the errors name: ``pickle_bytes=100``."""
    with limits.limited(limits.Limits(**smaller)):
        yield


def only_large_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every model for one that is too large to be built with values."""
    monkeypatch.setattr(instances, "_CHEAP", -1)


def free_memory(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(instances, "memory_available", lambda: nbytes)


def forget(url: str) -> None:
    """Forget what was read from a store, as another process would."""
    remote.forget(url)


def trust_file_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read files that were written just now without waiting for the clock."""
    monkeypatch.setattr(sources, "_TICK", 0)


def upload_in_parts(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(write_remote, "PART", nbytes)
