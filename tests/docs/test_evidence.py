"""`make evidence` writes only the results of its runs; tried in a small repository."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from places import ROOT

PAGE = "docs/maintainers/testing.md"
TESTS = """
import os, pytest

@pytest.mark.parametrize("seed", range(int(os.environ["CKPTTOOL_PAIRS"]) // 100))
def test_pair(seed, record_property):
    record_property("cases", 3)
    assert seed != int(os.environ.get("BROKEN", -1))

def test_other():
    pytest.skip("needs a GPU")
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("PYTEST_ADDOPTS", "EVIDENCE_RESULTS", "PYTEST_XDIST_WORKER", "BROKEN"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "Makefile").write_text(
        f"test suites:\n\t{sys.executable} -m pytest -q -p no:cacheprovider -p no:xdist\n"
    )
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    (tmp_path / ".gitignore").write_text("__pycache__\n")
    for name in (".ci/evidence.py", PAGE):
        (tmp_path / name).parent.mkdir(parents=True)
        shutil.copy(ROOT / name, tmp_path / name)
    commit(tmp_path)
    return tmp_path


def commit(repository: Path) -> str:
    git = ["git", "-c", "user.name=n", "-c", "user.email=e", "-c", "init.defaultBranch=main"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], cwd=repository, check=True)
    return head(repository)


def head(repository: Path) -> str:
    command = ["git", "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(
        command, cwd=repository, check=True, capture_output=True, text=True
    ).stdout.strip()


def evidence(repository: Path, *runs: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ".ci/evidence.py", *runs]
    return subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)


def row(repository: Path, run: str) -> list[str]:
    (line,) = [
        line
        for line in (repository / PAGE).read_text().splitlines()
        if line.startswith(f"| {run} | ")
    ]
    return line.strip("| ").split(" | ")[2:7]


def test_run_updates_only_its_row(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = head(repository)
    before = (repository / PAGE).read_text()
    done = evidence(repository, "pairs")
    assert done.returncode == 0, done.stdout + done.stderr
    cases, failures, skipped, _, at = row(repository, "pairs")
    assert (cases, failures, skipped, at) == ("300", "0", "1", first)
    other = [line for line in before.splitlines() if not line.startswith("| pairs | ")]
    assert set(other) <= set((repository / PAGE).read_text().splitlines())

    (repository / "more.txt").write_text("")
    second = commit(repository)
    monkeypatch.setenv("BROKEN", "2")
    assert evidence(repository, "resumes").returncode == 1
    cases, failures, skipped, _, at = row(repository, "resumes")
    assert (cases, failures, skipped, at) == ("75", "1", "1", second)
    page = (repository / PAGE).read_text()
    assert "\n- resumes: `test_it::test_pair[2]`\n" in page
    assert (
        max(map(len, (line for line in page.splitlines() if line.startswith("| resumes ")))) < 200
    )
    assert row(repository, "pairs")[4] == first


def test_failed_command_without_a_result_counts_as_a_failure(repository: Path) -> None:
    for _ in range(2):  # this Makefile has no such target
        done = evidence(repository, "faults")
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
    assert (repository / PAGE).read_text().count("| **1 together** |") == 1
    assert row(repository, "faults")[:2] == ["0", "1"]
    assert (repository / PAGE).read_text().count("- faults: `exit status 2`") == 1


def test_module_that_is_skipped_is_named(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (repository / "test_more.py").write_text("import pytest\npytest.importorskip('nothing')\n")
    commit(repository)
    monkeypatch.setenv("CKPTTOOL_PAIRS", "100")
    assert evidence(repository, "suites").returncode == 0
    assert "| more | 0 | 0 | 1: 1 collection skipped |" in (repository / PAGE).read_text()


def test_modified_tree_and_unknown_run_are_refused(repository: Path) -> None:
    page = (repository / PAGE).read_text()
    assert "no such run: pears" in evidence(repository, "pears").stderr
    (repository / "test_it.py").write_text("")
    done = evidence(repository, "pairs")
    assert done.returncode == 1
    assert "test_it.py" in done.stderr
    assert (repository / PAGE).read_text() == page
