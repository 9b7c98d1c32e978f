"""Any exception that ends a command becomes an error line, a hint and an exit status."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from signal import Signals

from ckpttool.cli.streams import clipped, for_log
from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.text import number, shell, visible
from ckpttool.core.values import dataclass
from ckpttool.io.syscalls import Terminated

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
# Problems that have a line each, reasons, and keys of all reasons; `--format json` has all of them
_MOST = 10
_FEW = 3  # keys with the same problem that repeat it
_WORDS = 4  # of a reason before the details of one key
_LS_HELPS = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR)


@dataclass(frozen=True, slots=True)
class Failure:
    """What stderr says, and the exit status; an empty `hint` or `message` is not printed."""

    status: int
    message: str = ""
    hint: str = ""
    problems: tuple[Problem, ...] = ()


class OfAllRanks(Exception):
    """The failure of a command that several ranks share."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def failure_of(error: BaseException) -> Failure:
    """Return the failure that the exception means."""
    if isinstance(error, OfAllRanks):
        return error.failure
    if isinstance(error, CkptError):
        return Failure(error.exit_status, error.message, error.hint, error.problems)
    if isinstance(error, BrokenPipeError):
        return Failure(128 + 13)  # the status of a program that SIGPIPE ended
    package = _failed_import(error)
    if package and not isinstance(
        error, (ModuleNotFoundError, MemoryError, KeyboardInterrupt, Terminated)
    ):
        return Failure(
            2,
            f"{package} cannot be imported: {type(error).__name__}: {error}",
            f"install {package} again in this environment: python -c 'import {package}' has to"
            " succeed",
        )
    if isinstance(error, OSError):
        return _os_error(error)
    if isinstance(error, Terminated):
        return Failure(128 + error.number, f"ended by {Signals(error.number).name}")
    if isinstance(error, KeyboardInterrupt):
        return Failure(128 + 2, "interrupted")
    if isinstance(error, SystemExit):
        return Failure(
            2,
            f"code of an operand ended the program: sys.exit({error.code!r})",
            "MODEL and OPTIMIZER operands are imported: keep what a script runs under `if __name__"
            " == '__main__':`",
        )
    if isinstance(error, MemoryError):
        reason = f": {error}" if str(error) else ""
        return Failure(2, f"out of memory{reason}", "free some memory, or use a larger machine")
    if isinstance(error, ModuleNotFoundError):
        name = (error.name or "").partition(".")[0]
        if name and name != "ckpttool":
            return Failure(2, f"this needs {name}, which is not installed", f"pip install {name}")
    return Failure(
        2,
        f"internal error: {type(error).__name__}: {error}",
        "run it again with CKPTTOOL_DEBUG=1 and report the traceback as a bug of ckpttool",
    )


def _failed_import(error: BaseException) -> str:
    """Return the name of the package that ckpttool was importing; empty if the error came from
    somewhere else.
    """
    trace, importer = error.__traceback__, False
    while trace is not None:
        package = str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0]
        if importer and package != "ckpttool" and trace.tb_frame.f_code.co_name == "<module>":
            return package
        importer, trace = package == "ckpttool", trace.tb_next
    return ""


def _os_error(error: OSError) -> Failure:
    hint = _OS_HINTS.get(error.errno or 0, "check the file, and the disk it is on")
    if not isinstance(error.filename, (str, bytes)):
        return Failure(2, str(error.strerror or error), hint)
    path = os.fsdecode(error.filename)
    if error.errno in _LS_HELPS:
        existing = path
        while existing and not os.path.lexists(existing):
            existing = os.path.dirname(existing)
        hint += f": {shell('ls', '-ld', existing or '.')}"
    return Failure(2, f"{path}: {error.strerror or error}", hint)


def say(failure: Failure, form: str = "text") -> int:
    """Print the failure on stderr: the error, the problems, the hint, a line each. Return the exit
    status.

    If `form` is ``json``, also print it on stdout as one object, ``ckpttool.error/1``; if
    ``github``, as an annotation.
    """
    problems = problem_lines(failure.problems)
    hints = [f"hint: {failure.hint}"] if failure.hint else []
    lines = [f"error: {failure.message}"] if failure.message else []
    lines += [f"  {line}" for line in problems]
    lines += hints
    with suppress(OSError):
        for line in lines:
            shown = for_log(clipped(visible(line)), "text")
            sys.stderr.write(f"{shown}\n")
        if form == "github" and failure.message:
            from ckpttool.report.renderers import github

            sys.stdout.write(github.failure(failure.message, [*problems, *hints]))
        if form == "json" and failure.message:
            sys.stdout.write(_as_json(failure))
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            stream.flush()
        # a closed pipe, a full disk: drop the rest, or the interpreter fails on it at its end
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
    return failure.status


def _as_json(failure: Failure) -> str:
    from ckpttool.core.schema import ERROR
    from ckpttool.report.renderers import json

    code = "refused" if failure.status == 1 else "error"
    members = (failure.status, code, failure.message, failure.problems, failure.hint)
    return for_log(json.render(ERROR.write(members)), "json")


def problem_lines(problems: Sequence[Problem]) -> list[str]:
    """Return a line for each problem. A reason that many keys have is printed once, above its
    first keys, in which repeated layers are one.
    """
    by_reason: dict[str, list[Problem]] = {}
    for problem in problems:
        reason = problem.problem.partition(": ")[0]
        is_sentence = reason.count(" ") >= _WORDS - 1
        by_reason.setdefault(reason if is_sentence else problem.problem, []).append(problem)
    most_keys = _MOST
    if len(problems) > _MOST:
        most_keys = max(_FEW, _MOST // (len(by_reason) + 1))
    lines: list[str] = []
    hidden = len(problems)
    for reason, group in islice(by_reason.items(), _MOST):
        shown, count = _of_one_reason(reason, group, most_keys)
        lines += shown
        hidden -= count
    return [*lines, f"... and {number(hidden)} more (--format json)"] if hidden else lines


def _of_one_reason(reason: str, problems: Sequence[Problem], most: int) -> tuple[list[str], int]:
    """Return the lines of problems that begin with the same reason, and how many of them they
    say.
    """
    if len(problems) <= _FEW:
        return list(map(str, problems)), len(problems)
    from ckpttool.report.collapse import collapse_keys

    total = number(len(problems))
    text = problems[0].problem
    if any(problem.problem != text for problem in problems):
        lines = [f"{reason} ({total}):"]
        for problem in problems[:most]:
            rest = str(problem).removeprefix(f"{reason}: ")
            lines.append(f"  {rest}")
        return lines, len(lines) - 1
    lines, count = [f"{text} ({total}):"], 0
    keys = (problem.key for problem in problems)
    for group in islice(collapse_keys(keys), most):
        if len(group.keys) == len(problems):
            return [f"{text} @ {group.pattern}"], len(problems)
        lines.append(f"  {group.pattern}")
        count += len(group.keys)
    return lines, count
