"""The README: badges that agree with pyproject.toml, and the commands that set everything up.

``UPDATE_DOCS=1`` rewrites the badges.
"""

from __future__ import annotations

import os
import re

import pytest

from badges import badge
from places import DOCS, ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def versions() -> list[str]:
    return re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)


def license_name() -> str:
    (name,) = re.findall(r'^license = "(.*)"$', PROJECT, re.MULTILINE)
    return str(name)


BADGES = {
    "python": badge("Python", f"{versions()[0]} to {versions()[-1]}"),
    "license": badge("license", license_name()),
}


@pytest.mark.parametrize("name", BADGES)
def test_badges_agree_with_the_project(name: str) -> None:
    path = DOCS / "badges" / f"{name}.svg"
    if os.environ.get("UPDATE_DOCS"):
        path.write_text(BADGES[name], encoding="utf-8")
    assert path.read_text(encoding="utf-8") == BADGES[name]
    assert f"docs/badges/{name}.svg" in README


def test_badge_of_ci_names_the_workflow() -> None:
    (workflow,) = set(re.findall(r"actions/workflows/([\w.]+)", README))
    assert (ROOT / ".github" / "workflows" / workflow).exists()


def test_commands_of_the_readme_are_targets_of_make() -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = re.findall(r"make ([a-z]+)", README)
    assert {"demo", "test"} <= set(named) <= set(targets)
    # near the top, before the reader has to scroll far
    assert README.index("$ make demo") < 2500


def test_python_in_five_lines() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert len([line for line in code.splitlines() if line]) == 5


def test_the_skill_is_the_page_for_agents() -> None:
    page = (DOCS / "agents.md").read_text(encoding="utf-8")
    if os.environ.get("UPDATE_DOCS"):
        (ROOT / "SKILL.md").write_text(page, encoding="utf-8")
    assert (ROOT / "SKILL.md").read_text(encoding="utf-8") == page
    assert len(page.split()) < 600
    assert page.startswith("---\nname: ckpttool\ndescription: ")
