"""Errors that end a command: their messages and hints, and the common exit status of all ranks of a
job.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from ckpttool import CkptError, Problem, Refused
from ckpttool.cli import ranks
from ckpttool.cli.failures import Failure, OfAllRanks, failure_of, problem_lines
from ckpttool.distributed.job import Job
from ckpttool.io.syscalls import Terminated


def os_error(number: int, *filename: Any) -> OSError:
    return OSError(number, os.strerror(number), *filename)


@pytest.mark.parametrize(
    ("error", "status", "message", "hint"),
    [
        (
            os_error(errno.ENOSPC, "o.pt"),
            2,
            "o.pt: No space left on device",
            "free some space, or write to another d",
        ),
        (os_error(errno.EDQUOT, b"o.pt"), 2, "o.pt: Disk quota exceeded", "your quota is used up"),
        (os_error(errno.EROFS, "o.pt"), 2, "o.pt: Read-only file system", "is mounted read-only"),
        (os_error(errno.EISDIR, "o.pt"), 2, "o.pt: Is a directory", "name a file"),
        (os_error(errno.EMFILE), 2, "Too many open files", "ulimit -n 4096"),
        (
            os_error(errno.ENAMETOOLONG, "o" * 300),
            2,
            "o" * 300 + ": File name too long",
            "choose a shorter name",
        ),
        (
            os_error(errno.ENOENT, "gone/a.pt"),
            2,
            "gone/a.pt: No such file or directory",
            "check the path: ls -ld .",
        ),
        (
            os_error(errno.ENOTDIR, "here/a.pt"),
            2,
            "here/a.pt: Not a directory",
            "check the path: ls -ld here",
        ),
        (
            os_error(errno.EPERM, b"here"),
            2,
            "here: Operation not permitted",
            "check the permissions: ls -ld here",
        ),
        (os_error(errno.EACCES), 2, "Permission denied", "check the permissions"),
        (os_error(errno.EIO, 3), 2, "Input/output error", "check the file, and the disk it is on"),
        (KeyboardInterrupt(), 130, "interrupted", ""),
        (Terminated(signal.SIGTERM), 143, "ended by SIGTERM", ""),
        (MemoryError("4 GiB"), 2, "out of memory: 4 GiB", "use a larger machine"),
        (BrokenPipeError(), 141, "", ""),
        (SystemExit(3), 2, "code of an operand ended the program: sys.exit(3)", "__main__"),
        (
            ModuleNotFoundError("no more"),
            2,
            "internal error: ModuleNotFoundError: no more",
            "CKPTTOOL_DEBUG=1",
        ),
        (OfAllRanks(Failure(1, "no")), 1, "no", ""),
    ],
    ids=repr,
)
def test_exception_has_a_message_and_a_hint(
    error: BaseException,
    status: int,
    message: str,
    hint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").touch()
    failure = failure_of(error)
    assert (failure.status, failure.message) == (status, message)
    assert failure.hint.endswith(hint) if hint.startswith("check") else hint in failure.hint
    assert bool(failure.hint) == bool(hint)


STOPPED = Failure(2)  # a rank that stopped because another one failed


@pytest.mark.parametrize(
    ("ends", "status", "expected"),
    [
        ([0, 0, 0], 0, None),
        ([1, 0, 0], 1, None),
        ([0, STOPPED, Failure(2, "no disk", "buy one")], 2, Failure(2, "no disk", "buy one")),
        (
            [STOPPED, Failure(1, "refused", "", (Problem("no", "w"),))],
            1,
            Failure(1, "refused", "", (Problem("no", "w"),)),
        ),
        (
            [
                Failure(2, "a", "h"),
                Failure(2, "c"),
                Failure(2, "b"),
                STOPPED,
                Failure(2, "c"),
                Failure(2, "a"),
            ],
            2,
            Failure(2, "a", "h", (Problem("c", "rank 1"), Problem("b", "rank 2"))),
        ),
    ],
)
def test_all_ranks_exit_with_one_status_and_rank_0_reports_why(
    ends: Sequence[Failure | int], status: int, expected: Failure | None
) -> None:
    store, found = HashStore(), dict[int, int | Failure]()

    def run_rank(rank: int) -> None:
        try:
            found[rank] = vars(ranks)["_verdict"](Job(rank, len(ends), store), ends[rank])
        except OfAllRanks as error:
            found[rank] = error.failure

    threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(len(ends))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found.pop(0) == (expected or status)
    silent = Failure(status) if status else 0
    assert found == dict.fromkeys(range(1, len(ends)), silent)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tracebacks have notes from Python 3.11 on")
def test_traceback_shows_problems_and_hint() -> None:
    problems = [Problem("is missing", f"layers.{at}.w") for at in range(25)]
    text = "".join(
        traceback.format_exception(CkptError("wrong names", hint="pass --rule", problems=problems))
    )
    lines = text.splitlines()[-24:]
    assert lines[:2] == ["ckpttool.core.errors.CkptError: wrong names", "  is missing:"]
    assert lines[2:22] == [f"    layers.{at}.w" for at in range(20)]
    assert lines[22:] == ["  and 5 more", "hint: pass --rule"]
    assert "hint: check it" in "".join(
        traceback.format_exception(CkptError("no file", hint="check it"))
    )


def test_failure_has_the_status_of_its_error() -> None:
    assert failure_of(CkptError("m", hint="h")).status == 2
    assert failure_of(Refused("m", hint="h", problems=[Problem("p", "k")])).problems == (
        Problem("p", "k"),
    )


def test_missing_package_is_named() -> None:
    failure = failure_of(ModuleNotFoundError("No module named 'torch._C'", name="torch._C"))
    assert (failure.status, failure.message) == (2, "this needs torch, which is not installed")
    assert failure.hint == "pip install torch"
    assert failure_of(ModuleNotFoundError("", name="ckpttool.nowhere")).message.startswith(
        "internal error"
    )


def test_many_problems_are_grouped() -> None:
    few = [Problem(f"{i} are gone", f"k{i}") for i in range(10)]
    assert problem_lines(few) == list(map(str, few))
    layers = [Problem("gone", f"layers.{i}.w") for i in range(100)]
    assert problem_lines([*layers, Problem("odd", "x")]) == ["gone @ layers.{0-99}.w", "odd @ x"]
    many = problem_lines([Problem("gone", f"k{i}") for i in range(42)])
    shown = ["  k0", "  k1", "  k2", "  k3", "  k4"]
    assert many == ["gone (42):", *shown, "... and 37 more (--format json)"]
    details = [Problem(f"of another shape here: [{i}] instead of [9]", f"k{i}") for i in range(4)]
    assert problem_lines(details) == [
        "of another shape here (4):",
        *(f"  [{i}] instead of [9] @ k{i}" for i in range(4)),
    ]
    reasons = problem_lines([Problem(f"reason {i}", "w") for i in range(42)])
    assert (len(reasons), reasons[-1]) == (11, "... and 32 more (--format json)")
