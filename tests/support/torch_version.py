"""Skip tests that need a newer torch."""

from __future__ import annotations

import pytest
import torch


def needs_torch(version: str, what: str) -> None:
    """Skip the test if torch is older than `version`, the first release that supports `what`."""
    if torch.__version__ < version:
        pytest.skip(f"{what}: since torch {version}")
