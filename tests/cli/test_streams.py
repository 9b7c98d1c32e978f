"""Output in terminals and job logs is encoded and escaped; torch leaves no temporary files."""

from __future__ import annotations

import getpass
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from command import main

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
KEYS = ["ünter.weight", "名前", "𝛼", "a\n::error::b", "::error::c", "x##[error]d"]


@pytest.fixture
def odd_keys(tmp_path: Path) -> str:
    torch.save({key: torch.ones(1) for key in KEYS}, tmp_path / "odd.pt")
    return str(tmp_path / "odd.pt")


def run(*args: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    line = [sys.executable, "-m", "ckpttool", *args]
    return subprocess.run(
        line, capture_output=True, env={**os.environ, **env}, timeout=120, check=False
    )


def test_json_is_valid_in_an_ascii_locale(odd_keys: str) -> None:
    done = run("inspect", odd_keys, "--format", "json", **ASCII)
    assert done.returncode == 0
    assert done.stdout.isascii()
    assert [tensor["key"] for tensor in json.loads(done.stdout)["tensors"]] == KEYS
    failed = run("inspect", f"{odd_keys}::größe", "--format", "json", **ASCII)
    assert "has no section" in json.loads(failed.stdout)["error"]


@pytest.mark.parametrize("format", ["text", "markdown", "html", "github", "json"])
def test_key_is_not_a_workflow_command_in_a_github_log(
    odd_keys: str, format: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert main(["inspect", odd_keys, "--all", "--format", format]) == 0
    lines = capfd.readouterr().out.splitlines()
    commands = [line for line in lines if line.lstrip().startswith("::") and "error::" in line]
    assert commands == []
    assert not any("##[" in line for line in lines)
    if format == "json":
        assert [tensor["key"] for tensor in json.loads("\n".join(lines))["tensors"]] == KEYS
    assert main(["remap", odd_keys, "-o", f"{odd_keys}.pt", "--rule", "##[x] => y"]) == 1
    error = capfd.readouterr().err
    assert "##[" not in error
    assert not any(line.lstrip().startswith("::") for line in error.splitlines())


def test_keys_are_not_escaped_outside_of_a_job(
    odd_keys: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", odd_keys]) == 0
    assert "::error::c" in capfd.readouterr().out


def test_long_error_line_is_clipped(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    torch.save(
        {"k" * 1_000_000: torch.ones(1), "l" * 1_000_000: torch.ones(1)}, tmp_path / "long.pt"
    )
    line = [
        "remap",
        str(tmp_path / "long.pt"),
        "-o",
        str(tmp_path / "o.pt"),
        "--rule",
        "re:[kl]* => w",
    ]
    assert main(line) == 1
    error = capfd.readouterr().err
    assert len(error) < 50_000
    assert "characters …" in error


def test_torch_leaves_no_temporary_files(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("from torch import nn\nbuild = lambda: nn.Linear(2, 2)\n")
    (tmp_path / "tmp").mkdir()
    done = run("trace", f"{tmp_path / 'model.py'}:build", TMPDIR=str(tmp_path / "tmp"))
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "tmp").iterdir()) == []


_LOUD = """
import atexit, ctypes, os, subprocess, sys
import torch
subprocess.run(["echo", "a child"])
ctypes.CDLL(None).puts(b"a library in C")
os.write(1, b"a descriptor\\n")
print("an import")
atexit.register(print, "an exit handler")
def build():
    sys.__stdout__.write("the first stdout\\n")
    sys.__stdout__.flush()
    os.system("echo a shell")
    os.chdir("/")
    return torch.nn.Linear(2, 2)
"""


def test_output_of_the_models_code_goes_to_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loud.py").write_text(_LOUD)
    torch.save(nn.DataParallel(nn.Linear(2, 2)).state_dict(), tmp_path / "wrapped.pt")
    monkeypatch.chdir(tmp_path)
    done = run(
        "remap",
        "wrapped.pt",
        "--model",
        "loud.py:build",
        "--to",
        "serialized",
        "-o",
        "o.pt",
        "--format",
        "json",
    )
    assert json.loads(done.stdout)["output"] == "o.pt"
    # not in the folder that the model's code went to
    assert torch.load("o.pt").keys() == {"weight", "bias"}
    said = {
        "a child",
        "a library in C",
        "a descriptor",
        "an import",
        "an exit handler",
        "the first stdout",
        "a shell",
    }
    assert said <= set(done.stderr.decode().splitlines())


def test_metadata_keys_that_are_not_strings_are_kept(tmp_path: Path) -> None:
    state: Any = nn.Sequential(nn.BatchNorm1d(2)).state_dict()
    state._metadata = OrderedDict({1: {"version": 1}, **state._metadata, ("a", 2): {}})
    torch.save(state, tmp_path / "m.pt")
    assert main(["inspect", str(tmp_path / "m.pt")]) == 0
    line = ["remap", str(tmp_path / "m.pt"), "-o", str(tmp_path / "o.pt")]
    assert main([*line, "--rule", "0.{x} => bn.{x}"]) == 0
    metadata = torch.load(tmp_path / "o.pt")._metadata
    assert list(metadata) == [1, "", "bn", ("a", 2)]
    assert main([*line, "--force", "--to", "ddp"]) == 0
    assert next(iter(torch.load(tmp_path / "o.pt")._metadata)) == 1


@pytest.mark.parametrize(
    ("case", "stays"),
    [
        ("inside", False),
        ("before", True),
        ("full", True),
        ("named", True),
        ("nobody", True),
        ("none", False),
    ],
)
def test_only_an_empty_folder_created_by_torch_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, stays: bool
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(getpass, "getuser", lambda: "a/b")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    if case == "named":
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    if case == "nobody":
        monkeypatch.setattr(getpass, "getuser", lambda: {}["no such user"])
    folder = tmp_path / "torchinductor_a_b"
    if case == "before":
        folder.mkdir()
        os.utime(folder, (1, 1))

    def build() -> nn.Module:
        if case not in ("before", "none"):
            folder.mkdir(exist_ok=True)
            os.utime(folder, (time.time(),) * 2)  # file times have a coarse resolution
        if case == "full":
            (folder / "kept").touch()
        return nn.Linear(2, 2)

    monkeypatch.setattr(nn, "Built", build, raising=False)
    assert main(["trace", "torch.nn:Built"]) == 0
    assert folder.exists() is stays


def test_long_line_is_clipped_in_the_middle(
    odd_keys: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def line_of(section: str) -> str:
        assert main(["inspect", f"{odd_keys}::{section}"]) == 2
        return capfd.readouterr().err.splitlines()[0]

    begin, end = line_of("x").split("x", 1)
    room = 4000 - len(begin) - len(end)
    assert line_of("x" * room) == f"{begin}{'x' * room}{end}"
    half = "x" * (2000 - len(begin)), "x" * (2000 - len(end))
    assert line_of("x" * (room + 1)) == f"{begin}{half[0]} … 1 characters … {half[1]}{end}"


def test_report_path_that_is_a_folder_is_refused(
    odd_keys: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r.md").mkdir()
    assert main(["inspect", odd_keys, "--report", str(tmp_path / "r.md"), "--force"]) == 2
    assert "r.md is a folder\nhint: name a file" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["diff", "{keys}", "{keys}", "--suggest", "-"], "--suggest writes a file"),
        (["trace", "torch.nn:Identity", "-o", "-"], "- is not the name of a file"),
    ],
)
def test_no_file_is_called_dash(
    command: list[str],
    message: str,
    odd_keys: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([word.format(keys=odd_keys) for word in command]) == 2
    assert f"error: {message}\nhint: name " in capfd.readouterr().err
    assert not (tmp_path / "-").exists()
