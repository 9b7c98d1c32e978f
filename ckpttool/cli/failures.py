"""Failures in words: any exception that ends a command becomes an error line, a hint and an exit status."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from signal import Signals
from typing import Any

from ckpttool.cli.streams import clipped, for_log
from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.schema import ERROR
from ckpttool.core.text import number, shell, visible
from ckpttool.core.values import dataclass
from ckpttool.io.interrupts import Terminated
from ckpttool.report.collapse import collapse
from ckpttool.report.renderers import json

_OS_HINTS = {
    errno.ENOENT: "check the path",
    errno.ENOSPC: "free some space, or write to another disk",
    errno.EDQUOT: "your quota is used up: free some space, or write to another disk",
    errno.EACCES: "check the permissions",
    errno.EPERM: "check the permissions",
    errno.EROFS: "the file system is mounted read-only: write somewhere else",
    errno.EISDIR: "this is a directory: name a file",
    errno.ENOTDIR: "a part of this path is a file: check the path",
    errno.EMFILE: "raise the limit of open files: ulimit -n 4096",
    errno.ENAMETOOLONG: "choose a shorter name",
}
_MOST = 10  # lines of problems; a program reads all of them
_LS_HELPS = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR)


@dataclass(frozen=True, slots=True)
class Failure:
    """What stderr says, and the exit status. Without `hint` the message stands alone, without both nothing is said."""

    status: int
    message: str = ""
    hint: str = ""
    problems: tuple[Problem, ...] = ()


class OfAllRanks(Exception):
    """What a command of several ranks failed with."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def failure_of(error: BaseException) -> Failure:
    """The failure that the exception means."""
    for kind, describe in _KINDS:
        if isinstance(error, kind):
            return describe(error)
    return _internal(error)


def say(failure: Failure, form: str = "text") -> int:
    """Prints the failure on stderr: the error, the problems, the hint, a line each. Returns the exit status.

    With `form` ``json`` a program reads the same on stdout, as one object: ``ckpttool.error/1``; with ``github`` as an
    annotation.
    """
    lines = [f"error: {visible(failure.message)}"] if failure.message else []
    lines += [f"  {visible(line)}" for line in problem_lines(failure.problems)]
    lines += [f"hint: {visible(failure.hint)}"] if failure.hint else []
    with suppress(OSError):
        sys.stderr.writelines(f"{for_log(clipped(line), 'text')}\n" for line in lines)
        if form == "github" and failure.message:
            from ckpttool.report.renderers import github

            hints = [f"hint: {failure.hint}"] if failure.hint else []
            lines = [failure.message, *problem_lines(failure.problems), *hints]
            sys.stdout.write(github.failure("ckpttool", lines))
        if form == "json" and failure.message:
            said = ERROR.write((failure.status, failure.message, failure.problems, failure.hint))
            sys.stdout.write(for_log(json.render(said), "json"))
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            stream.flush()
        except OSError:  # a closed pipe, a full disk: drop the rest, or the interpreter fails on it at its end
            _discard(descriptor)
    return failure.status


def problem_lines(problems: Sequence[Problem]) -> list[str]:
    """A line for each problem; of many, one for the same problem in repeated layers, and how many more there are."""
    if len(problems) <= _MOST:
        return list(map(str, problems))
    keys: dict[str, list[str]] = {}
    for problem in problems:
        keys.setdefault(problem.problem, []).append(problem.key)
    groups = [(text, group) for text, own in keys.items() for group in collapse((key, None) for key in own)]
    hidden = sum(len(group.keys) for _, group in groups[_MOST:])
    lines = [f"{text} @ {group.pattern}" for text, group in groups[:_MOST]]
    return [*lines, f"... and {number(hidden)} more (--format json)"] if hidden else lines


def _discard(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _ours(error: CkptError) -> Failure:
    return Failure(error.exit_status, error.message, error.hint, error.problems)


def _broken_pipe(error: BrokenPipeError) -> Failure:
    return Failure(128 + 13)  # the status of a program that SIGPIPE ended


def _os_error(error: OSError) -> Failure:
    where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, (str, bytes)) else ""
    hint = _OS_HINTS.get(error.errno or 0, "check the file, and the disk it is on")
    if where and error.errno in _LS_HELPS:
        hint += f": {shell('ls', '-ld', _nearest(os.fsdecode(error.filename)))}"
    return Failure(2, f"{where}{error.strerror or error}", hint)


def _nearest(path: str) -> str:
    """The path itself, or the first of its parents that exists."""
    while path and not os.path.lexists(path):
        path = os.path.dirname(path)
    return path or "."


def _interrupt(error: KeyboardInterrupt) -> Failure:
    if isinstance(error, Terminated):
        return Failure(128 + error.number, f"ended by {Signals(error.number).name}")
    return Failure(128 + 2, "interrupted")


def _exit(error: SystemExit) -> Failure:
    return Failure(
        2,
        f"code of an operand ended the program: sys.exit({error.code!r})",
        "MODEL and OPTIMIZER operands are imported: keep what a script runs under `if __name__ == '__main__':`",
    )


def _internal(error: BaseException) -> Failure:
    return Failure(
        2,
        f"internal error: {type(error).__name__}: {error}",
        "run it again with CKPTTOOL_DEBUG=1 and report the traceback as a bug of ckpttool",
    )


def _no_module(error: ModuleNotFoundError) -> Failure:
    name = (error.name or "").partition(".")[0]
    if not name or name == "ckpttool":
        return _internal(error)
    return Failure(2, f"this needs {name}, which is not installed", f"pip install {name}")


def _memory(error: MemoryError) -> Failure:
    return Failure(2, f"out of memory{f': {error}' if str(error) else ''}", "free some memory, or use a larger machine")


# The first kind that fits tells.
_KINDS: tuple[tuple[type[BaseException], Callable[[Any], Failure]], ...] = (
    (OfAllRanks, lambda error: error.failure),
    (CkptError, _ours),
    (BrokenPipeError, _broken_pipe),
    (OSError, _os_error),
    (KeyboardInterrupt, _interrupt),
    (SystemExit, _exit),
    (MemoryError, _memory),
    (ModuleNotFoundError, _no_module),
)
