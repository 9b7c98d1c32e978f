"""What ``make conditions`` sees of a module: which way each condition went, and which clauses were entered."""

import subprocess
import sys
from pathlib import Path

from conditions import left, recorded

MODULE = '''"""A module."""
from __future__ import annotations

def asked(a: int | None = 1 and 2, *more: int) -> object:
    try:
        kept = [one for one in more if one > 1 or not one]
    except (ValueError, TypeError):
        return None
    while a and kept:
        kept.pop()
    return a or ("some" if kept else "none")
'''


def test_each_condition_by_what_it_was(tmp_path: Path) -> None:
    package = tmp_path / "ckpttool"
    package.mkdir()
    (package / "__init__.py").write_text(MODULE)
    places = recorded(tmp_path)
    calls = "from ckpttool import asked; assert asked(3, 2) == 3; assert asked(3, 0) == 3; assert asked(0, 2) == 'some'"
    subprocess.run([sys.executable, "-c", calls], cwd=tmp_path, check=True)
    assert [(place.line, place.text, said) for place, said in left(tmp_path, places)] == [
        (6, "one", "never true"),
        (7, "except (ValueError, TypeError)", "never true"),
        (11, "kept", "never false"),
    ]
