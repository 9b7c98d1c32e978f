"""The pages are correct: command lines exist, the quickstart runs, and the image shows the output
of the demo.

``UPDATE_DOCS=1 make test ARGS=tests/docs/test_pages.py`` rewrites the outputs and the image.
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

from command import commands
from doc_lines import command_lines, first_lines
from places import DOCS, ROOT
from recording import recording, texts
from torch_version import needs_torch

QUICKSTART, RECORDING = DOCS / "quickstart.md", DOCS / "demo.svg"
CKPTTOOL = str(Path(sys.executable).with_name("ckpttool"))
PLAIN = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1", "PYTHONWARNINGS": "ignore"}


@cache
def help_of(command: str) -> str:
    done = subprocess.run(
        [CKPTTOOL, *([command] if command else []), "--help"],
        capture_output=True,
        text=True,
        env=PLAIN,
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize("line", command_lines())
def test_command_line_exists(line: str) -> None:
    words = shlex.split(line)[1:]
    command = words[0] if words[0][0].islower() else ""
    options = [word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)]
    listed = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", help_of(command)))
    assert [option for option in options if option not in listed] == []


def test_readme_names_every_command() -> None:
    page = (ROOT / "README.md").read_text()
    assert [name for name in commands() if not re.search(rf"`(ckpttool )?{name}\b", page)] == []


def test_image_shows_the_output_of_the_demo(tmp_path: Path) -> None:
    needs_torch("2.7", "a tied weight under both names in a program")
    ran = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo.py"), str(tmp_path / "demo")],
        stdout=subprocess.PIPE,
        text=True,
        env=PLAIN,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout
    if os.environ.get("UPDATE_DOCS"):
        RECORDING.write_text(recording(ran.stdout))
    assert texts(RECORDING.read_text()) == texts(recording(ran.stdout))
    assert not re.search(r"(href|src)=|url\((?!#)|@import", RECORDING.read_text())


def test_quickstart_runs(tmp_path: Path) -> None:
    needs_torch("2.7", "the layout that is written")
    text = QUICKSTART.read_text(encoding="utf-8")
    ((name, source),) = re.findall(
        r'^```python title="([^"]*)"\n(.*?)^```$', text, re.MULTILINE | re.DOTALL
    )
    (tmp_path / name).write_text(source)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    (block,) = re.findall(r"^```console\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    new = ""
    for line in re.findall(r"^\$ (.*)$", block, re.MULTILINE):
        done = subprocess.run(
            ["bash", "-c", line],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**PLAIN, "PATH": path},
        )
        assert done.returncode == (1 if "diff train" in line else 0), done.stderr
        new += f"$ {line}\n{first_lines(done.stdout)}"
    assert "<All keys matched successfully>" in new
    if os.environ.get("UPDATE_DOCS"):
        QUICKSTART.write_text(text.replace(block, new), encoding="utf-8")
    else:
        assert block == new


def test_contributing_names_existing_files() -> None:
    named = re.findall(
        r"`((?:ckpttool|tests|docs)/[\w/.-]+)`", (ROOT / "CONTRIBUTING.md").read_text()
    )
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []
