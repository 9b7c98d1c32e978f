"""What ends a command, in words: of one process, and of the ranks of a job, which all end with one status."""

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

from ckpttool.cli import ranks
from ckpttool.cli.failures import Failure, OfAllRanks, failure_of
from ckpttool.core.errors import CkptError, Problem
from ckpttool.distributed.job import Job
from ckpttool.io.syscalls import Terminated


def of_system(number: int, *filename: Any) -> OSError:
    return OSError(number, os.strerror(number), *filename)


@pytest.mark.parametrize(
    ("error", "status", "message", "hint"),
    [
        (of_system(errno.ENOSPC, "o.pt"), 2, "o.pt: No space left on device", "free some space, or write to another d"),
        (of_system(errno.EDQUOT, b"o.pt"), 2, "o.pt: Disk quota exceeded", "your quota is used up"),
        (of_system(errno.EROFS, "o.pt"), 2, "o.pt: Read-only file system", "is mounted read-only"),
        (of_system(errno.EISDIR, "o.pt"), 2, "o.pt: Is a directory", "name a file"),
        (of_system(errno.EMFILE), 2, "Too many open files", "ulimit -n 4096"),
        (of_system(errno.ENAMETOOLONG, "o" * 300), 2, "o" * 300 + ": File name too long", "choose a shorter name"),
        (of_system(errno.ENOENT, "gone/a.pt"), 2, "gone/a.pt: No such file or directory", "check the path: ls -ld ."),
        (of_system(errno.ENOTDIR, "here/a.pt"), 2, "here/a.pt: Not a directory", "check the path: ls -ld here"),
        (of_system(errno.EPERM, b"here"), 2, "here: Operation not permitted", "check the permissions: ls -ld here"),
        (of_system(errno.EACCES), 2, "Permission denied", "check the permissions"),
        (of_system(errno.EIO, 3), 2, "Input/output error", "check the file, and the disk it is on"),
        (KeyboardInterrupt(), 130, "interrupted", ""),
        (Terminated(signal.SIGTERM), 143, "ended by SIGTERM", ""),
        (MemoryError("4 GiB"), 2, "out of memory: 4 GiB", "use a larger machine"),
        (BrokenPipeError(), 141, "", ""),
        (SystemExit(3), 2, "code of an operand ended the program: sys.exit(3)", "__main__"),
        (ModuleNotFoundError("no more"), 2, "internal error: ModuleNotFoundError: no more", "CKPTTOOL_DEBUG=1"),
        (OfAllRanks(Failure(1, "no")), 1, "no", ""),
    ],
    ids=repr,
)
def test_what_ends_a_command_is_said(
    error: BaseException, status: int, message: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").touch()
    failure = failure_of(error)
    assert (failure.status, failure.message) == (status, message)
    assert failure.hint.endswith(hint) if hint.startswith("check") else hint in failure.hint
    assert bool(failure.hint) == bool(hint)


HEARD = Failure(2)  # of a rank that stopped since another one failed


@pytest.mark.parametrize(
    ("ends", "status", "said"),
    [
        ([0, 0, 0], 0, None),
        ([1, 0, 0], 1, None),
        ([0, HEARD, Failure(2, "no disk", "buy one")], 2, Failure(2, "no disk", "buy one")),
        (
            [HEARD, Failure(1, "refused", "", (Problem("no", "w"),))],
            1,
            Failure(1, "refused", "", (Problem("no", "w"),)),
        ),
        (
            [Failure(2, "a", "h"), Failure(2, "c"), Failure(2, "b"), HEARD, Failure(2, "c"), Failure(2, "a")],
            2,
            Failure(2, "a", "h", (Problem("c", "rank 1"), Problem("b", "rank 2"))),
        ),
    ],
)
def test_all_ranks_end_with_one_status_and_the_first_says_why(
    ends: Sequence[Failure | int], status: int, said: Failure | None
) -> None:
    store, found = HashStore(), dict[int, int | Failure]()

    def one(rank: int) -> None:
        try:
            found[rank] = vars(ranks)["_verdict"](Job(rank, len(ends), store), ends[rank])
        except OfAllRanks as error:
            found[rank] = error.failure

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(ends))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found.pop(0) == (said or status)
    silent = Failure(status) if status else 0
    assert found == dict.fromkeys(range(1, len(ends)), silent)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tracebacks have notes from Python 3.11 on")
def test_a_traceback_shows_problems_and_the_hint() -> None:
    problems = [Problem("is missing", f"layers.{at}.w") for at in range(25)]
    text = "".join(traceback.format_exception(CkptError("wrong names", hint="pass --rule", problems=problems)))
    lines = text.splitlines()[-23:]
    assert lines[0] == "ckpttool.core.errors.CkptError: wrong names"
    assert lines[1:21] == [f"  is missing @ layers.{at}.w" for at in range(20)]
    assert lines[21:] == ["  and 5 more", "hint: pass --rule"]
    assert "hint: check it" in "".join(traceback.format_exception(CkptError("no file", hint="check it")))
