"""Completion, requested as the scripts of the shells request it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def completions(shell: str, line: str) -> list[str]:
    """Return the completions of the last word of the command line."""
    words = line.split(" ")
    env = {"_CKPTTOOL_COMPLETE": f"complete_{shell}", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    env |= {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    code = "import sys; from ckpttool.cli.app import process; sys.argv = ['ckpttool']; sys.exit(process())"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True)
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
def test_commands_and_options_are_completed(line: str, words: set[str]) -> None:
    assert set(completions("bash", line)) == words


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_zsh_and_fish_get_completions(shell: str) -> None:
    assert any("--format" in word for word in completions(shell, "ckpttool inspect --form"))
