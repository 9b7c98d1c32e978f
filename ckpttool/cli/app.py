"""The entry point: import the command's module, run it, and turn every exception into an exit status."""

from __future__ import annotations

import gc
import io
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, suppress
from itertools import pairwise

from ckpttool.cli.defaults import with_defaults
from ckpttool.cli.failures import failure_of, say
from ckpttool.cli.params import COMMANDS, Command, common_options, load, parse
from ckpttool.cli.streams import collected, logged, nothing_left, set_up
from ckpttool.core.errors import CkptError
from ckpttool.io import sources
from ckpttool.io.syscalls import ended_by_signals

_SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "fish")


def process() -> int:
    """Run `main` as the whole process, which does not search for cyclic garbage at its end."""
    status = main()
    gc.freeze()
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: the arguments of the process) and return its exit status. Never raise."""
    set_up()
    gc.set_threshold(100_000, 50, 100)  # an index is many small values without cycles: searching them is half the time
    args = sys.argv[1:] if argv is None else list(argv)
    try:
        sources.forget_all()
        with ended_by_signals(), nothing_left(), logged(), collected():
            status = _run_by_rank(args) if _is_rank() else run(args)
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
    own = {f"{name}={os.environ.get(name)}".encode() for name in ("TORCHELASTIC_RUN_ID", "RANK", "MASTER_PORT")}
    try:
        with open(f"/proc/{pid}/stat") as file:
            name, _, rest = file.read().partition("(")[2].rpartition(")")
        parent = int(rest.split()[1])
        with open(f"/proc/{pid}/environ", "rb") as file:
            if not own.issubset(file.read().split(b"\0")):
                return _is_worker(pid, parent)
    except OSError:
        return False
    return _is_started_by_rank(parent) if name in _SHELLS else True


def _is_worker(pid: int, parent: int) -> bool:
    """Return whether the process runs a function, as a worker of ``elastic_launch`` does, which sets RANK itself.

    A launcher is another program; a worker was forked, or started by `multiprocessing`.
    """
    lines = []
    for number in (pid, parent):
        with open(f"/proc/{number}/cmdline", "rb") as file:
            lines.append(file.read())
    return b"multiprocessing.spawn" in lines[0] or lines[0] == lines[1]


def _run_by_rank(args: list[str]) -> int:
    from ckpttool.cli import ranks

    return ranks.run(args, run)


def _format_of(args: Sequence[str]) -> str:
    """Return the format of the output; without `parse`, since the command line may be wrong."""
    words = [part for word in args for part in (word.split("=", 1) if word.startswith("--format=") else [word])]
    formats = [value for flag, value in pairwise(words) if flag == "--format"]
    name = next((arg for arg in args if arg in COMMANDS), None)
    if not formats and name is not None:
        with suppress(CkptError, OSError, ImportError), redirect_stderr(io.StringIO()):  # it was reported already
            default = _loaded(name, args).defaults.get("format")
            formats = [default.value] if default is not None else []
    return str(formats[-1]) if formats else "text"


def run(args: list[str]) -> int:
    """Run one command line and return 0 or 1. Raise whatever the command raises, and `CkptError` for bad usage."""
    if "_CKPTTOOL_COMPLETE" in os.environ:  # a shell asks for completions
        from ckpttool.cli import by_typer

        line = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")
        name = next((word for word in line.split()[1:] if word in COMMANDS), None)
        return by_typer.complete(None if name is None else load(name))
    if not args or args[0] == "help":
        from ckpttool.cli import topics

        text = topics.text(*args[1:2]) if len(args) != 1 else None
        if text is not None:
            sys.stdout.write(text)
            return 0
        args = [*args[1:2], "--help"]
    args = _command_first(args)
    name = next((arg for arg in args if not arg.startswith("-")), None)
    if not args or (name is not None and name not in COMMANDS):
        from difflib import get_close_matches

        near = get_close_matches(name or "", COMMANDS, 1)
        hint = f"did you mean `ckpttool {near[0]}`?" if near else f"the commands are {', '.join(COMMANDS)}"
        message = f"no such command: {name}" if name else "no command given"
        raise CkptError(message, hint=f"{hint} (more: ckpttool --help)")
    command = None if name is None else _loaded(name, args)
    if command is not None and args[0] == name and (given := parse(command, args[1:])) is not None:
        return int(command.run(given) or 0)
    from ckpttool.cli import by_typer

    return by_typer.run(args, command)


def _command_first(args: list[str]) -> list[str]:
    """Return the words with the common options that come before the command after it."""
    if not args or not args[0].startswith("-"):
        return args
    takes_value = {flag: mark.metavar is not None for mark in common_options() for flag in mark.flags}
    at = 0
    while at < len(args) and (flag := args[at].partition("=")[0]) in takes_value:
        at += 2 if takes_value[flag] and flag == args[at] else 1
    before, rest = args[:at], args[at:]
    return [rest[0], *before, *rest[1:]] if rest and rest[0] in COMMANDS else args


def _loaded(name: str, args: Sequence[str]) -> Command:
    """Return the command with its defaults from other places, unless the command line asks for help only."""
    command = load(name)
    return command if {"--help", "-h", "--no-defaults"} & set(args) else with_defaults(command)
