"""The bar on a real terminal."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

pty = pytest.importorskip("pty", reason="terminals of this kind are Unix's")
SCRIPT = """
import sys, time
from ckpttool.cli.progress import bar
with bar("copying", int(sys.argv[1])) as step:
    for _ in range(4):
        time.sleep(0.15)
        step(64 << 20)
"""


def on_a_terminal(total: int) -> str:
    """What the bar writes on stderr, where that is a terminal."""
    ours, theirs = pty.openpty()
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(total)], stderr=theirs, check=True, stdout=subprocess.PIPE)
    os.close(theirs)
    said = b""
    try:
        while chunk := os.read(ours, 1 << 16):
            said += chunk
    except OSError:  # Linux's way to say that all is read
        pass
    os.close(ours)
    assert done.stdout == b""
    return said.decode()


def test_rate_and_time_left_are_shown_of_what_takes_long():
    said = on_a_terminal(1 << 30)
    assert "copying" in said
    assert re.search(r"\d MB/s", said)
    assert re.search(r"0:00:0\d", said)


def test_what_is_quickly_done_has_no_bar():
    assert on_a_terminal(1 << 20) == ""
