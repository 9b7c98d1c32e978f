"""The progress bar of slow operations on a real terminal, and the summary of `-v`."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed import HashStore

from ckpttool.cli import progress
from ckpttool.distributed import job
from ckpttool.io import progress as io_progress
from command import Run
from places import ROOT

MIB = 1 << 20
SLOW = """
import os, sys, time
import fsspec
from ckpttool.cli import progress
from ckpttool.cli.app import main

progress.PATIENCE = float(sys.argv[1])
read, ranges = os.preadv, fsspec.filesystem("memory").cat_ranges
pause = float(sys.argv[2])
os.preadv = lambda *given: (time.sleep(pause), read(*given))[1]
fsspec.filesystem("memory").pipe("/a.safetensors", open("a.safetensors", "rb").read())
type(fsspec.filesystem("memory")).cat_ranges = lambda self, *given, **more: (time.sleep(0.4), ranges(*given, **more))[1]
for line in sys.argv[3:]:
    main(line.split())
    print("=====", file=sys.stderr, flush=True)
"""


def stderr_on_terminal(folder: Path, patience: float, pause: float, *lines: str) -> list[str]:
    pty = pytest.importorskip("pty", reason="pseudo-terminals exist only on Unix")
    controller, terminal = pty.openpty()
    command = [sys.executable, "-c", SLOW, str(patience), str(pause), *lines]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "160", "TERM": "xterm"}
    with (
        open(folder / "stdout", "wb") as out,
        subprocess.Popen(command, stderr=terminal, stdout=out, cwd=folder, env=env),
    ):
        os.close(terminal)
        output = b""
        try:
            while chunk := os.read(controller, 1 << 16):
                output += chunk
        except OSError:  # end of file on Linux
            pass
    os.close(controller)
    return output.decode().split("=====")[:-1]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    state = {f"layers.{index}.w": torch.full((MIB // 2,), float(index + 1)) for index in range(5)}
    save_file(state, "a.safetensors")
    save_file({**state, "layers.2.w": torch.ones(MIB // 2)}, "b.safetensors")
    torch.save(state, "a.pt")
    return tmp_path


LINES = {
    "inspect a.safetensors --stats": ("reading the values of a.safetensors", 10),
    "diff a.safetensors b.safetensors --values": ("comparing values", 20),
    "remap a.safetensors -o c.safetensors --rule layers.{i}.w=>w.{i}": ("c.safetensors", 10),
    "remap a.pt -o d.safetensors --verify": ("verifying d.safetensors", 20),
    "inspect memory://a.safetensors --stats": ("reading the values of memory://a.safetensors", 10),
}


def test_slow_operations_show_rate_and_time_left(folder: Path) -> None:
    shown = dict(zip(LINES, stderr_on_terminal(folder, 0.1, 0.02, *LINES)))
    for line, (title, total) in LINES.items():
        assert title in shown[line], line
        assert re.search(rf"\d/{total}\.\d MiB", shown[line]), (line, shown[line][-2000:])
        assert re.search(r"\d [kM]B/s", shown[line]), line
        assert re.search(r"0:00:0\d", shown[line]), line
    assert (folder / "stdout").read_text().startswith("a.safetensors holds ")


def test_fast_operations_have_no_bar(folder: Path) -> None:
    quick = stderr_on_terminal(
        folder, 5, 0, "inspect a.safetensors --stats", "inspect a.pt -q --stats"
    )
    assert [text.strip() for text in quick] == ["", ""]
    assert [
        text.strip()
        for text in stderr_on_terminal(folder, 0.05, 0.02, "inspect a.safetensors --stats -q")
    ] == [""]


SUMMARY = re.compile(
    r"summary: [\d.]+ s; read (.+) of (\d+) files?; moved (.+), computed (.+), wrote (.+); "
    r"fetched (.+) in (\d+) requests?\n"
)
NOTHING = ("0 bytes", "0 bytes", "0 bytes")
VERBOSE = {
    "inspect a.safetensors": ("KiB", "1", *NOTHING),
    "inspect a.safetensors --stats": ("10.0 MiB", "1", *NOTHING),
    "diff a.safetensors b.safetensors --values": ("MiB", "2", *NOTHING),
    "remap a.safetensors -o c.safetensors --rule layers.{i}.w=>w.{i}": (
        "10.0 MiB",
        "1",
        "10.0 MiB",
        "0 bytes",
        "10.0",
    ),
    "remap a.safetensors -o e.pt --rules half.toml": (
        "10.0 MiB",
        "2",
        "0 bytes",
        "5.0 MiB",
        "5.0 MiB",
    ),
    "remap a.safetensors --in-place --rule layers.{i}.w=>w.{i}": (
        "KiB",
        "1",
        "0 bytes",
        "0 bytes",
        "bytes",
    ),
    "swap-weights p.pt2 new.pt -o o.pt2": ("KiB", "2", "KiB", "", "KiB"),
    "check a.safetensors": ("KiB", "1", *NOTHING),
    "inspect none.pt": ("0 bytes", "0", *NOTHING),
}


@pytest.mark.parametrize("line", VERBOSE)
def test_verbose_summary_counts_bytes(folder: Path, run: Run, line: str) -> None:
    Path("half.toml").write_text('[[rule]]\ncast = "layers.{i}.w"\ndtype = "float16"\n')
    if "p.pt2" in line:
        net = torch.nn.Linear(3, 2)
        torch.export.save(torch.export.export(net, (torch.ones(1, 3),)), "p.pt2")
        torch.save(net.state_dict(), "new.pt")
    done = run(*line.split(), "-v")
    found = SUMMARY.findall(done.err)
    assert len(found) == 1, done.err
    assert all(expected in actual for expected, actual in zip(VERBOSE[line], found[0])), found
    assert found[0][5:] == ("0 bytes", "0")


def test_bytes_are_counted_once_by_kind(folder: Path, run: Run) -> None:
    state = {f"layers.{index}.w": 2 * MIB for index in range(5)}
    assert run("remap", "a.pt", "-o", "d.safetensors").status == 0
    assert (io_progress.counts.moved, io_progress.counts.computed) == (sum(state.values()), 0)
    assert io_progress.counts.written == Path("d.safetensors").stat().st_size
    quiet = run("remap", "a.pt", "-o", "f.safetensors", "-v", "-q")
    assert quiet.said == (0, "")


def test_fetched_bytes_are_counted(folder: Path, run: Run) -> None:
    import fsspec

    fsspec.filesystem("memory").pipe("/verbose.safetensors", Path("a.safetensors").read_bytes())
    done = run("inspect", "memory://verbose.safetensors", "--stats", "-v", "--format", "json")
    assert json.loads(done.out)["bytes"] == Path("a.safetensors").stat().st_size
    ((*_, fetched, requests),) = SUMMARY.findall(done.err)
    assert fetched.startswith(("10.", "11."))
    assert int(requests) >= 2


def test_slow_tracing_suggests_a_names_file(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text("import torch\ndef build(n): return torch.nn.Linear(n, n)\n")
    torch.save(torch.nn.Linear(3, 3).state_dict(), "a.pt")
    model = ("--model", "net.py:build(n=3)")
    assert run("diff", "a.pt", *model)[0] == 0
    (seconds,) = io_progress.counts.traced.values()
    assert progress._on_tracing(3 * seconds) == ""
    command = re.search(r"needs neither: ckpttool (.*)\n$", progress._on_tracing(1.5 * seconds))
    assert command is not None
    assert run(*shlex.split(command[1]))[0] == 0
    assert progress._on_tracing(0) == ""
    assert run("diff", "a.pt", "--model", "names.json")[0] == 0
    assert not io_progress.counts.traced


def test_closed_bar_does_not_appear(monkeypatch: pytest.MonkeyPatch) -> None:
    """This also holds if its delay ends just after it was closed."""
    monkeypatch.setattr(progress, "_rich", None)
    bar = progress._Bar("title", 5)
    bar.advance(3)
    bar.close()
    bar._appear()
    assert bar._progress is None


def test_summary_of_a_rank_names_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert progress._line(1).endswith("requests")
    monkeypatch.setattr(job, "_current", job.Job(1, 3, HashStore()))
    assert progress._line(1).endswith("requests (rank 1 of 3)")
