"""Results of a long run for `make evidence`: a line of JSON for each part of the run."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence


def add(part: str, cases: int, failures: Sequence[str], **figures: float) -> None:
    """Add a line to the file that EVIDENCE_RESULTS names.

    Integers of several parts are summed; for other numbers, the largest is shown.
    """
    if path := os.environ.get("EVIDENCE_RESULTS"):
        with open(path, "a", encoding="utf-8") as lines:
            print(
                json.dumps({"part": part, "cases": cases, "failures": list(failures), **figures}),
                file=lines,
            )
