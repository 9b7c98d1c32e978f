"""The documentation is true: every command line in it exists, and the tutorial's transcript is what the demo prints.

Where the transcript changed for a good reason: ``UPDATE_DOCS=1 make test ARGS=tests/docs/test_pages.py``.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from doc_lines import command_lines
from places import DOCS, ROOT
from recording import recording, texts
from torch_version import needs_torch

TUTORIAL, RECORDING = DOCS / "tutorial.md", DOCS / "demo.svg"
CKPTTOOL = str(Path(sys.executable).with_name("ckpttool"))
PLAIN = {**os.environ, "COLUMNS": "120", "NO_COLOR": "1", "PYTHONWARNINGS": "ignore"}

TRANSCRIPT = re.compile(r"(```console\n\$ make demo\n)(.*?)(```\n)", re.DOTALL)
LOSS = re.compile(r"loss \d+\.\d+")  # the only number that another processor may round to another digit


@cache
def help_of(command: str) -> str:
    asked = subprocess.run(
        [CKPTTOOL, *([command] if command else []), "--help"], capture_output=True, text=True, env=PLAIN, check=True
    )
    return asked.stdout


@pytest.mark.parametrize("line", command_lines())
def test_command_line_exists(line: str) -> None:
    words = shlex.split(line)[1:]
    command = words[0] if words[0][0].isalpha() else ""
    options = [word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)]
    listed = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", help_of(command)))
    assert [option for option in options if option not in listed] == []


def test_the_readme_names_every_command() -> None:
    commands = re.findall(r"^  ([a-z][a-z-]+)  ", help_of("").split("Commands:")[1], re.MULTILINE)
    shown = {shlex.split(line)[1] for line in command_lines()}
    assert commands
    assert set(commands) <= shown


def test_the_pages_show_what_the_demo_prints(tmp_path: Path) -> None:
    needs_torch("2.7", "a tied weight under both names in a program")
    ran = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo.py"), str(tmp_path / "demo")],
        stdout=subprocess.PIPE,
        text=True,
        env=PLAIN,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout
    page = TUTORIAL.read_text()
    if os.environ.get("UPDATE_DOCS"):
        TUTORIAL.write_text(TRANSCRIPT.sub(lambda found: found[1] + ran.stdout + found[3], page))
        RECORDING.write_text(recording(ran.stdout))
    else:
        ((_, shown, _),) = TRANSCRIPT.findall(page)
        assert LOSS.sub("loss", shown) == LOSS.sub("loss", ran.stdout)
        assert texts(RECORDING.read_text()) == texts(recording(ran.stdout))
        assert not re.search(r"(href|src)=|url\((?!#)|@import", RECORDING.read_text())


def test_contributing_names_files_that_are_there() -> None:
    named = re.findall(r"`((?:ckpttool|tests|docs)/[\w/.-]+)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []
