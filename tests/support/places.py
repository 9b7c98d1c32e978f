"""Folders of the repository."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
DOCS = ROOT / "docs"
DATA = TESTS / "data"
SUPPORT = TESTS / "support"
