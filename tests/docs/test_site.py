"""Links are valid in the repository and on the site that `make docs` builds, and the references are
complete.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import fields
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType

import pytest

import ckpttool
from ckpttool.cli.params import COMMANDS
from ckpttool.core.codes import CODES, markdown
from ckpttool.core.limits import Limits
from ckpttool.evaluate.ops import GETITEM, OPS
from ckpttool.schemas import OBJECTS
from places import DOCS, ROOT

PAGES = sorted({*DOCS.rglob("*.md"), *ROOT.glob("*.md"), ROOT / "benchmarks" / "README.md"})
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?![a-z]+:)([^)\s]*)\)")


def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_of_docs", DOCS / "site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub and mkdocs make for the headings."""
    headings = re.findall(
        r"^#+ (.*)$", FENCED.sub("", page.read_text(encoding="utf-8")), re.MULTILINE
    )
    return {
        re.sub(r"[^\w\s-]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_is_valid(page: Path) -> None:
    wrong = []
    text = hooks().BADGES.sub("", page.read_text(encoding="utf-8"))
    for link in LINK.findall(FENCED.sub("", text)):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    assert wrong == []


def test_links_of_root_pages_are_rewritten_for_the_site() -> None:
    relinked = hooks().relinked
    text = (
        "[a](docs/rules.md#x) [b](CHANGELOG.md) [c](https://x.org/) [d](#h)"
        " [e](examples/demo.py) ![f](docs/f.svg)"
    )
    expected = (
        "[a](rules.md#x) [b](changelog.md) [c](https://x.org/) [d](#h)"
        " [e](examples/demo.py) ![f](f.svg)"
    )
    assert relinked(text, "README.md") == expected
    assert (
        relinked("[a](../benchmarks/README.md) [b](rules.md)", "docs/safety.md")
        == "[a](benchmarks.md) [b](rules.md)"
    )


def test_references_list_every_command_code_schema_and_name() -> None:
    site = hooks()
    assert {f"## ckpttool {name}" for name in COMMANDS} <= set(site.commands().splitlines())
    assert all(f"| `{code}` |" in site.codes() for code in CODES)
    # no code has two rows
    assert sum(line.startswith("| `") for line in markdown().splitlines()) == len(CODES)
    assert all(code.fix.endswith((".", "?", "-")) for code in CODES.values())
    assert all(f"| `{name}` |" in site.schemas() for name in OBJECTS)
    assert len(site.schemas()) < 5_000
    assert all(f".{name}\n" in site.python() + "\n" for name in ckpttool.__all__)
    assert all(name == GETITEM or f"`{name.split('.')[1]}`" in site.operators() for name in OPS)
    assert all(f"\n| `{field.name}` |" in site.limits() for field in fields(Limits))


def test_data_files_are_packaged() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (listed,) = re.findall(
        r"^\[tool\.setuptools\.package-data\]\nckpttool = \[(.*?)\]", project, re.M | re.S
    )
    patterns = re.findall(r'"([^"]+)"', listed)
    package = ROOT / "ckpttool"
    tracked = subprocess.run(
        ["git", "ls-files", "ckpttool"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    others = [
        name.removeprefix("ckpttool/")
        for name in tracked.stdout.split()
        if not name.endswith(".py")
    ]
    assert [
        name for name in others if not any(fnmatch(name, pattern) for pattern in patterns)
    ] == []
    assert all(list(package.glob(pattern)) for pattern in patterns)


def test_site_loads_nothing_from_the_network(tmp_path: Path) -> None:
    """Build the site like `make docs`; skipped if mkdocs is not installed."""
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.rglob("*.html"))
    loaded = [
        url
        for page in pages
        for url in re.findall(
            r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=\"?(https?:[^\s\">]+)",
            page.read_text(encoding="utf-8"),
        )
    ]
    assert len(pages) > 20
    assert loaded == []
