"""The entry point: import the command's module, run it, and turn every exception into an exit
status.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from itertools import pairwise

from ckpttool.cli import parser, ranks, topics
from ckpttool.cli.failures import failure_of, say
from ckpttool.cli.streams import collected, logged, nothing_left, set_up
from ckpttool.core.options import on_command_line
from ckpttool.io import handles, sources
from ckpttool.io.syscalls import ended_by_signals

_SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "fish")


def process() -> int:
    """Run `main` as the whole process, which does not search for cyclic garbage at its end.

    What the exit handlers of a model's code print goes to stderr, so that it does not follow the
    result.
    """
    status = main()
    sys.stdout = sys.stderr
    gc.freeze()
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: the arguments of the process) and return its exit status.
    Never raise.
    """
    set_up()
    # an index is many small values without cycles: searching them is half the time
    gc.set_threshold(100_000, 50, 100)
    args = sys.argv[1:] if argv is None else list(argv)
    try:
        sources.forget_all()
        with (
            on_command_line(),
            ended_by_signals(),
            nothing_left(),
            logged(),
            collected(),
            handles.kept(),
        ):
            status = ranks.run(args, run) if _is_rank() else run(args)
        sys.stdout.flush()
        return status
    except BaseException as error:
        if os.environ.get("CKPTTOOL_DEBUG") == "1":
            import traceback

            traceback.print_exc()
        return say(failure_of(error), _format_of(args))


def _is_rank() -> bool:
    """Return True if torchrun or a similar launcher started this process as one of several.

    A process that a rank's own program starts has the rank's environment, but is not a rank.
    """
    job = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"
    return job and not _is_started_by_rank(os.getppid())


def _is_started_by_rank(pid: int) -> bool:
    """Return whether the process is a rank, or a shell that a rank started. False without /proc."""
    names = ("TORCHELASTIC_RUN_ID", "RANK", "MASTER_PORT")
    variables = {f"{name}={os.environ.get(name)}".encode() for name in names}
    try:
        with open(f"/proc/{pid}/stat") as file:
            name, _, rest = file.read().partition("(")[2].rpartition(")")
        parent = int(rest.split()[1])
        with open(f"/proc/{pid}/environ", "rb") as file:
            if not variables.issubset(file.read().split(b"\0")):
                return _is_worker(pid, parent)
    except OSError:
        return False
    return _is_started_by_rank(parent) if name in _SHELLS else True


def _is_worker(pid: int, parent: int) -> bool:
    """Return whether the process runs a function, as a worker of ``elastic_launch`` does, which
    sets RANK itself.

    A launcher is another program; a worker was forked, or started by `multiprocessing`.
    """
    lines = []
    for number in (pid, parent):
        with open(f"/proc/{number}/cmdline", "rb") as file:
            lines.append(file.read())
    return b"multiprocessing.spawn" in lines[0] or lines[0] == lines[1]


def _format_of(args: Sequence[str]) -> str:
    """Return the format of the output, also if the command line is wrong."""
    words: list[str] = []
    for word in args:
        words += word.split("=", 1) if word.startswith("--format=") else [word]
    formats = [value for flag, value in pairwise(words) if flag == "--format"]
    return formats[-1] if formats else "text"


def run(args: Sequence[str]) -> int:
    """Run one command line and return 0 or 1. Raise whatever the command raises, and `CkptError`
    for bad usage.
    """
    if "_CKPTTOOL_COMPLETE" in os.environ:  # a shell asks for completions
        return parser.complete()
    if not args or args[0] == "help":
        text = topics.text("".join(args[1:2])) if len(args) != 1 else None
        if text is not None:
            sys.stdout.write(text)
            return 0
        args = [*args[1:2], "--help"]
    return parser.run(args)
