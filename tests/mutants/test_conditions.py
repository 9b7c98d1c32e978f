"""``make conditions`` on a small module: the outcomes of each condition, and the clauses that were
entered.
"""

import subprocess
import sys
from pathlib import Path

from conditions import instrument, undecided

MODULE = '''"""A module."""
from __future__ import annotations

def choose(a: int | None = 1 and 2, *more: int) -> object:
    try:
        kept = [one for one in more if one > 1 or not one]
    except (ValueError, TypeError):
        return None
    while a and kept:
        kept.pop()
    return a or ("some" if kept else "none")
'''


def test_missing_outcomes_are_listed(tmp_path: Path) -> None:
    package = tmp_path / "ckpttool"
    package.mkdir()
    (package / "__init__.py").write_text(MODULE)
    places = instrument(tmp_path)
    calls = (
        "from ckpttool import choose; assert choose(3, 2) == 3; assert choose(3, 0) == 3; assert"
        " choose(0, 2) == 'some'"
    )
    subprocess.run([sys.executable, "-c", calls], cwd=tmp_path, check=True)
    assert [
        (place.line, place.text, outcome) for place, outcome in undecided(tmp_path, places)
    ] == [
        (6, "one", "never true"),
        (7, "except (ValueError, TypeError)", "never true"),
        (11, "kept", "never false"),
    ]
