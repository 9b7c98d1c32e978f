"""Every entry of docs/troubleshooting.md is correct: torch raises the message, and the commands
print the lines.

`UPDATE_DOCS=1 make test ARGS=tests/docs/test_troubleshooting.py` rewrites the lines.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import symptoms
from command import Run
from doc_lines import is_echo
from places import DOCS, ROOT
from torchless import Torchless, may_need_torch, torchless

PAGE = DOCS / "troubleshooting.md"
ENTRY = re.compile(
    r"^### (?P<heading>[^\n]*)\n<!-- (?P<setup>\w+) -->\n(?P<body>.*?)(?=^##|\Z)", re.M | re.S
)
CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.M | re.S)
ANSWERS = (
    re.compile(r"(reason|(partial )?fix( \(not tried\))?): "),
    re.compile("warning: "),
    re.compile(""),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "120")
    _forget(str(tmp_path.parent))  # another test may have left a module of the same name
    for name, source in symptoms.MODULES.items():
        Path(name).write_text(textwrap.dedent(source).lstrip())
    yield
    _forget(str(tmp_path))


def _forget(folder: str) -> None:
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(folder):
            del sys.modules[name]


def raised(setup: str) -> str:
    try:
        getattr(symptoms, setup)()
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())
    return ""


def printed(line: str, run: Run, process: Torchless) -> str:
    if may_need_torch(line):
        done = run(*shlex.split(line))
    else:
        done, has_torch = process.run(line, Path.cwd())
        assert not has_torch, f"ckpttool {line} imports torch"
    assert "internal error" not in done.err
    lines = [
        line
        for line in f"{done.out}\n{done.err}".splitlines()
        if line.strip() and not is_echo(line)
    ]
    if not done.err.startswith("error: "):
        *important, lines = ([line for line in lines if answer.match(line)] for answer in ANSWERS)
        lines = important[0] or important[1] or lines[:1]
    return "".join(f"{line}\n" for line in lines)


@pytest.mark.usefixtures("folder")
def test_page_shows_real_messages_and_output(run: Run) -> None:
    pinned = re.findall(
        r"^torch==([\d.]+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE
    )
    if torch.__version__.partition("+")[0] not in pinned:
        pytest.skip(f"the page shows the messages of torch {', '.join(pinned)}")
    text = PAGE.read_text(encoding="utf-8")
    entries = list(ENTRY.finditer(text))
    assert len(entries) == len(re.findall("^### ", text, re.M)) >= 20
    with torchless() as process:

        def shown(block: re.Match[str]) -> str:
            lines = re.findall(r"^\$ ckpttool (.*)$", block[1], re.M)
            return (
                "```console\n"
                + "".join(f"$ ckpttool {line}\n{printed(line, run, process)}" for line in lines)
                + "```"
            )

        new = {}
        for entry in entries:
            message = raised(entry["setup"])
            quoted = re.findall(r"`([^`]+)`", entry["heading"]) if message else []
            assert bool(message) == entry["heading"].startswith("`"), (entry["heading"], message)
            assert [
                part for whole in quoted for part in whole.split(" … ") if part not in message
            ] == [], message
            new[entry["body"]] = CONSOLE.sub(shown, entry["body"])
    if os.environ.get("UPDATE_DOCS"):
        for old, body in new.items():
            text = text.replace(old, body)
        PAGE.write_text(text, encoding="utf-8")
    else:
        assert [*new.values()] == [*new]
