"""The page for contributors names files and functions that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from places import DOCS, ROOT

PAGE = (DOCS / "maintainers" / "architecture.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "ckpttool"


def defined_in(path: Path) -> set[str]:
    """Return the functions and classes of the module, and its methods as ``Class.method``."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            inside = [part.name for part in node.body if isinstance(part, ast.FunctionDef)]
            names.update(f"{node.name}.{name}" for name in inside)
    return names


def test_files_exist() -> None:
    paths = re.findall(r"`((?!tests)(?:\w+/)+\w+\.py)[`:]", PAGE)
    assert len(paths) > 20
    assert [path for path in paths if not (PACKAGE / path).exists()] == []


def test_functions_exist() -> None:
    places = re.findall(r"`((?:\w+/)+\w+\.py): ([\w.]+)`", PAGE)
    assert len(places) > 10
    assert [place for place in places if place[1] not in defined_in(PACKAGE / place[0])] == []


def test_the_kernel_is_read_in_a_day() -> None:
    (table,) = re.findall(r"## Read this first\n(.*?)\n## ", PAGE, re.DOTALL)
    files = re.findall(r"`((?:\w+/)+\w+\.py)`", table)
    lines = sum(len((PACKAGE / file).read_text(encoding="utf-8").splitlines()) for file in files)
    assert lines < 4_000
