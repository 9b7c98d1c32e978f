"""What a shell offers after Tab, asked in the way that the shells' own scripts ask."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def offered(shell: str, line: str) -> list[str]:
    """What is offered for the last word of a command line."""
    words = line.split(" ")
    asked = {"_CKPTTOOL_COMPLETE": f"complete_{shell}", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    asked |= {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    code = "import sys; from ckpttool.cli.app import process; sys.argv = ['ckpttool']; sys.exit(process())"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **asked}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ckpttool rem", {"remap"}),
        ("ckpttool inspect --form", {"--format"}),
        ("ckpttool diff --fail", {"--fail-on", "--fail-on-unused"}),
        ("ckpttool remap t.pt --optimizer", {"--optimizer", "--optimizer-keys"}),
        ("ckpttool nonsense --fo", set()),
    ],
)
def test_commands_and_options_are_offered(line: str, words: set[str]) -> None:
    assert set(offered("bash", line)) == words


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_are_answered_in_their_own_way(shell: str) -> None:
    assert any("--format" in word for word in offered(shell, "ckpttool inspect --form"))
