"""Formats of installed packages: they are found by their entry point, asked last, and named in
errors.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpttool
from command import Done
from places import ROOT

EXAMPLE = ROOT / "examples" / "plugin"


def install(site: Path, package: str, entry: str, code: str = "") -> None:
    """Install a package as pip does: its module, and metadata with the entry point."""
    info = site / f"{package.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[ckpttool.formats]\n{entry}\n")
    if code:
        (site / f"{package.replace('-', '_')}.py").write_text(code)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Return a folder for packages, with the example in it."""
    site = tmp_path / "site"
    entry = 'npz = "ckpttool_npz:FORMAT"'
    assert entry in (EXAMPLE / "pyproject.toml").read_text()
    install(site, "ckpttool-npz", entry.replace('"', ""), (EXAMPLE / "ckpttool_npz.py").read_text())
    return site


def run_with(site: Path, *words: object) -> Done:
    """Run the command line in a process that finds the packages in `site`."""
    paths = os.pathsep.join([str(site), str(ROOT)])
    command = [sys.executable, "-m", "ckpttool", *map(str, words)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}
    )
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    arrays: dict[str, Any] = {"layer.weight": np.arange(6.0).reshape(2, 3)}
    np.savez(tmp_path / "weights.npz", **arrays)
    return tmp_path / "weights.npz"


def test_an_installed_format_is_read_compared_and_converted(site: Path, archive: Path) -> None:
    assert "layer.weight" in run_with(site, "inspect", archive).out
    out = archive.with_suffix(".safetensors")
    assert run_with(site, "convert", archive, "-o", out, "--verify").status == 0
    expected = {"layer.weight": torch.arange(6.0, dtype=torch.float64).reshape(2, 3)}
    assert ckpttool.diff(str(out), expected, values=True).identical
    assert run_with(site, "diff", archive, out, "--values").status == 0


def test_a_folder_with_one_file_of_an_installed_format(site: Path, archive: Path) -> None:
    folder = archive.parent / "folder"
    folder.mkdir()
    archive.rename(folder / archive.name)
    assert "layer.weight" in run_with(site, "inspect", folder).out


def test_without_the_package_the_error_says_what_the_file_is(archive: Path) -> None:
    with pytest.raises(ckpttool.CkptError, match="is a NumPy archive"):
        ckpttool.inspect(str(archive))


def test_help_lists_what_is_installed(site: Path) -> None:
    listed = run_with(site, "help", "formats").out
    assert "safetensors" in listed
    (row,) = [line for line in listed.splitlines() if "npz" in line]
    assert "ckpttool-npz" in row


BROKEN = {
    "import": ("broken = broken:FORMAT", "raise RuntimeError('no luck')", "RuntimeError: no luck"),
    "missing": ("broken = broken:NOTHING", "x = 1", "AttributeError"),
    "no format": ("broken = broken:x", "x = 1", "is not a ckpttool.plugin.Format"),
    "same name": (
        "broken = broken:FORMAT",
        "from ckpttool.plugin import Format\nFORMAT = Format('safetensors', 'mine', 'broken')",
        "another format has the name safetensors",
    ),
    "matches": (
        "broken = broken:FORMAT",
        "from ckpttool.plugin import Format\n"
        "FORMAT = Format('x', 'X', 'broken', lambda look: 1 / 0)",
        "ZeroDivisionError",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_package_that_fails_is_named_for_the_files_that_need_it(
    kind: str, site: Path, archive: Path
) -> None:
    entry, code, says = BROKEN[kind]
    install(site, "broken", entry, code)
    save_file({"w": torch.ones(2)}, archive.parent / "good.safetensors")
    assert run_with(site, "inspect", archive.parent / "good.safetensors").status == 0
    assert run_with(site, "inspect", archive).status == 0  # of another package
    (archive.parent / "unknown.bin").write_bytes(b"something else")
    done = run_with(site, "inspect", archive.parent / "unknown.bin")
    assert done.status == 2
    assert "is not a checkpoint that ckpttool knows" in done.err
    (row,) = [line for line in done.err.splitlines() if says in line]
    assert row.endswith("@ broken")


def test_an_exception_of_a_package_is_an_error_that_names_it(site: Path, archive: Path) -> None:
    code = (
        "from ckpttool.plugin import Format\n"
        "def matches(look):\n    return look.path if look.head.startswith(b'XX') else None\n"
        "def read(path):\n    raise KeyError('tensors')\n"
        "FORMAT = Format('xx', 'XX file', 'broken', matches)\n"
    )
    install(site, "broken", "xx = broken:FORMAT", code)
    (archive.parent / "a.xx").write_bytes(b"XX")
    done = run_with(site, "inspect", archive.parent / "a.xx")
    assert done.status == 2
    assert "Traceback" not in done.err
    assert "KeyError: 'tensors'" in done.err
    assert "report it to the authors of the package broken" in done.err


def test_a_checkpoint_must_have_the_format_that_read_it(site: Path, archive: Path) -> None:
    code = (
        "from ckpttool.plugin import Checkpoint, Format\n"
        "def matches(look):\n    return look.path if look.head.startswith(b'XX') else None\n"
        "def read(path):\n    return Checkpoint(path, 'XX', 2, ())\n"
        "FORMAT = Format('xx', 'XX file', __name__, matches)\n"
    )
    install(site, "broken", "xx = broken:FORMAT", code)
    (archive.parent / "a.xx").write_bytes(b"XX")
    done = run_with(site, "inspect", archive.parent / "a.xx")
    assert done.status == 2
    assert "no format is called 'XX'" in done.err
    assert "must give the checkpoint the name of its format" in done.err


def test_the_format_in_contributing_works(site: Path, tmp_path: Path) -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "ONE!" in block]
    install(site, "of-one", "one = of_one:FORMAT", code)
    (tmp_path / "a.one").write_bytes(b"ONE!" + bytes(range(5)))
    out = tmp_path / "out.safetensors"
    assert run_with(site, "convert", tmp_path / "a.one", "-o", out, "--verify").status == 0
    assert load_file(out)["weight"].tolist() == [0, 1, 2, 3, 4]


def test_packages_are_not_looked_for_if_a_format_of_ours_matches(tmp_path: Path) -> None:
    """To list entry points takes as long as a small command."""
    save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors")
    code = "import sys; from ckpttool.formats.opening import open_checkpoint as o; o(sys.argv[1]);"
    code += "sys.exit('importlib.metadata' in sys.modules)"
    words = [sys.executable, "-c", code, str(tmp_path / "a.safetensors")]
    assert subprocess.run(words, cwd=ROOT).returncode == 0
