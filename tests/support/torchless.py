"""Run command lines in a process that has not imported torch, and report whether they import it.

The process forks for each line, so that lines start quickly and do not share imports.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from command import Done
from places import ROOT

_SERVER = """
import io, json, os, sys
from ckpttool.cli.app import main
assert "torch" not in sys.modules
for line in sys.stdin:
    words, folder = json.loads(line)
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        os.chdir(folder)
        sys.stdin, sys.stdout, sys.stderr = io.StringIO(), io.StringIO(), io.StringIO()
        status = main(words)
        answer = json.dumps([status, sys.stdout.getvalue(), sys.stderr.getvalue(), "torch" in sys.modules])
        with os.fdopen(theirs, "w") as pipe:
            pipe.write(answer)
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as pipe:
        print(pipe.read(), flush=True)
    os.waitpid(child, 0)
"""
# Reasons to need torch, by the words of the line: every other line runs without torch.
MAY = {
    "a model's own code": lambda words: any(
        ".py:" in word or word.startswith("hf:") for word in words
    ),
    "every name of a model": lambda words: words[0] == "trace" and len(words) > 1,
}


class Answer(NamedTuple):
    """Output of a line, and whether it imported torch."""

    done: Done
    torch: bool


def may_need_torch(line: str) -> bool:
    """Return whether the line (without ``ckpttool``) has a reason to need torch."""
    words = shlex.split(line)
    return bool(words) and any(reason(words) for reason in MAY.values())


class Torchless:
    """The process."""

    def __init__(self) -> None:
        env = {
            name: value for name, value in os.environ.items() if not name.startswith("CKPTTOOL_")
        }
        command = [sys.executable, "-c", _SERVER]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(
            command, **pipes, text=True, env={**env, "PYTHONPATH": str(ROOT)}
        )  # type: ignore[call-overload]

    def run(self, line: str, folder: Path) -> Answer:
        """Run one line (without ``ckpttool``) in the folder."""
        self._process.stdin.write(json.dumps([shlex.split(line), str(folder)]) + "\n")
        self._process.stdin.flush()
        status, out, err, torch = json.loads(self._process.stdout.readline())
        return Answer(Done(status, out, err), torch)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


@contextmanager
def torchless() -> Iterator[Torchless]:
    """Run the process during the block."""
    if not hasattr(os, "fork"):
        pytest.skip("it forks")
    process = Torchless()
    try:
        yield process
    finally:
        process.close()
