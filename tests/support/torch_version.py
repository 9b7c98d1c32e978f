"""What depends on the release of torch that the tests run with."""

from __future__ import annotations

import pytest
import torch


def needs_torch(version: str, what: str) -> None:
    """Skips the test where torch is older than the first `version` that can do `what`."""
    if torch.__version__ < version:
        pytest.skip(f"{what}: since torch {version}")
