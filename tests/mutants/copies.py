"""Copies of the repository to change and to run the tests in."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def copy_repository(folder: Path) -> Path:
    """Copy the tracked files, and new ones that git does not ignore."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(
        listed, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def environment(*folders: Path) -> dict[str, str]:
    """Return the environment of a process that imports from the folders."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), "OMP_NUM_THREADS": "1"}
