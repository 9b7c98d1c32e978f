"""The pages that are run: their Python raises, and their commands print, what they show; headings are torch's words.

Where what is shown changed for a good reason: ``UPDATE_DOCS=1 make test ARGS=tests/docs/test_recipes.py``.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from command import Run
from places import DOCS, ROOT
from torchless import Torchless, may_need_torch, torchless

PAGES = {"recipes.md": (), "comparisons.md": ("accelerate", "transformers")}  # and what is run beside torch
BLOCK = re.compile(r'^```(python|pytb|console)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^## (.*)$", re.MULTILINE)
UNSTEADY = re.compile(r"\x1b\[[0-9;]*m|: \[\{.*\}\]")  # colours, and sets in whatever order
SILENT = ("Nothing is said", "More", "Beside", "What")  # headings that are no message


class Page:
    """One page at work, block by block, in the folder where it is."""

    def __init__(self, name: str, run: Run, process: Torchless) -> None:
        self.name, self.run, self.process = name, run, process
        self.scope: dict[str, Any] = {"__name__": "page"}
        self.raised = ""

    def shown(self, found: re.Match[str]) -> str:
        """The block as it has to be."""
        kind, title, body = found.groups()
        if kind == "python":
            if title:
                Path(title).write_text(body)
            else:
                self._execute(body)
            return found[0]
        if kind == "pytb":
            assert self.raised, f"nothing is raised before\n{body}"
            body, self.raised = f"{self.raised}\n", ""
        else:
            asked = re.findall(r"^\$ ckpttool (.*)$", body, re.MULTILINE)
            body = "\n".join(self._printed(line) for line in asked)
        return f"```{kind}\n{body}```"

    def _execute(self, body: str) -> None:
        assert not self.raised, f"{self.raised} is not shown"
        try:
            exec(compile(body, self.name, "exec"), self.scope)
        except Exception as error:
            said = UNSTEADY.sub("", str(error)).strip()
            lines = [line.rstrip().expandtabs(4) for line in said.splitlines()]
            self.raised = "\n".join([f"{type(error).__name__}: {lines[0]}", *lines[1:8]]).rstrip()

    def _printed(self, line: str) -> str:
        if may_need_torch(line):
            done = self.run(*shlex.split(line))
        else:
            done, has_torch = self.process.run(line, Path.cwd())
            assert not has_torch, f"ckpttool {line} imports torch"
        text = f"{done.out.rstrip()}\n{done.err}".strip()
        return f"$ ckpttool {line}\n{text}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    _forget(str(tmp_path.parent))  # another test may have left a module of the same name
    yield
    _forget(str(tmp_path))


def _forget(folder: str) -> None:
    """Modules of files in the folder are found anew."""
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(folder):
            del sys.modules[name]


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.usefixtures("folder")
def test_the_page_shows_what_happens(name: str, run: Run) -> None:
    pinned = re.findall(r"^torch==([\d.]+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    if torch.__version__.partition("+")[0] not in pinned:
        pytest.skip(f"the messages are those of torch {', '.join(pinned)}")
    for package in PAGES[name]:
        pytest.importorskip(package)
    text = (DOCS / name).read_text(encoding="utf-8")
    with torchless() as process:
        new = BLOCK.sub(Page(name, run, process).shown, text)
    if os.environ.get("UPDATE_DOCS"):
        (DOCS / name).write_text(new, encoding="utf-8")
    else:
        assert new == text


def test_headings_are_what_torch_says() -> None:
    text = (DOCS / "recipes.md").read_text(encoding="utf-8")
    parts = HEADING.split(text)[1:]
    said = {
        heading: re.findall(r"^```pytb\n(.*?)^```", body, re.M | re.S) for heading, body in zip(parts[::2], parts[1::2])
    }
    wrong = [
        heading
        for heading, shown in said.items()
        if not heading.startswith(SILENT) and heading not in " ".join(" ".join(shown).split())
    ]
    assert wrong == []
    assert sum(map(len, said.values())) >= 8


def test_every_symptom_that_people_report_has_its_recipe() -> None:
    """By the numbers of the public issues in docs/pains.md."""
    pains, recipes = ((DOCS / page).read_text(encoding="utf-8") for page in ("pains.md", "recipes.md"))
    reported = set(re.findall(r"\b[\w-]+#\d+", pains))
    assert len(reported) >= 26
    assert [issue for issue in reported if not re.search(rf"\b{issue}\b", recipes)] == []
