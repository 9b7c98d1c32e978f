"""The entry point: picks the command's module, runs it, and holds the only catch of the program."""

from __future__ import annotations

import gc
import io
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, suppress
from importlib import import_module
from itertools import pairwise

from ckpttool.cli.defaults import Default, chosen, with_defaults, words_of
from ckpttool.cli.failures import failure_of, say
from ckpttool.cli.fields import Loaded, taken_by, with_common
from ckpttool.cli.logs import collected, logged
from ckpttool.cli.parse import parse
from ckpttool.cli.streams import nothing_left, set_up
from ckpttool.core.errors import CkptError
from ckpttool.io import sources
from ckpttool.io.interrupts import ended_by_signals

# Command -> its module, which defines `command`, and the first line of its help. Modules are imported when they run.
COMMANDS: dict[str, tuple[str, str]] = {
    "inspect": ("ckpttool.cli.commands.inspect", "What is in a checkpoint: keys, dtypes, shapes, aliases."),
    "trace": ("ckpttool.cli.commands.trace", "Every name of every tensor of a model."),
    "diff": ("ckpttool.cli.commands.diff", "What differs, why, and the command that mends it."),
    "explain": ("ckpttool.cli.commands.explain", "One tensor: all its names, and the hook that renames it."),
    "remap": ("ckpttool.cli.commands.remap", "Rewrite the keys, optimizer ids and format of a checkpoint."),
    "swap-weights": ("ckpttool.cli.commands.swap_weights", "Put new weights into an exported program."),
    "undo": ("ckpttool.cli.commands.undo", "Roll back an interrupted or the last edit in place."),
    "check": ("ckpttool.cli.commands.check", "Files of a repository: names, rules, plans, pickles."),
    "schema": ("ckpttool.cli.commands.schema", "The JSON Schema of an object that the commands write."),
}
_SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "fish")


def process() -> int:
    """`main`, as all that a process does: what is left at its end is not searched for cycles once more."""
    status = main()
    gc.freeze()
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line (default: that of the process) and returns its exit status. Never raises."""
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
    """Whether torchrun, or what starts processes as it does, started this process as one of several.

    A process that a rank's own program starts has the rank's environment, and is not a rank.
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

    A launcher is a program of its own; a worker was forked, or started by `multiprocessing`.
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
    """The format of the output; looked for by hand, since it may be the command line that is wrong."""
    words = [part for word in args for part in (word.split("=", 1) if word.startswith("--format=") else [word])]
    asked = [value for flag, value in pairwise(words) if flag == "--format"]
    name = next((arg for arg in args if arg in COMMANDS), None)
    if not asked and name is not None:
        with suppress(CkptError, OSError, ImportError), redirect_stderr(io.StringIO()):  # it was said already
            defaults = [one.default for one in _loaded(name, args).taken if one.name == "format"]
            asked = [default.value for default in defaults if isinstance(default, Default)]
    return str(asked[-1]) if asked else "text"


def run(args: list[str]) -> int:
    """Runs one command line and returns 0 or 1. Raises whatever the command raises, and `CkptError` for bad usage."""
    if "_CKPTTOOL_COMPLETE" in os.environ:  # a shell asks what to offer after Tab
        from ckpttool.cli import by_typer

        line = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")
        name = next((word for word in line.split()[1:] if word in COMMANDS), None)
        return by_typer.complete(COMMANDS, None if name is None else _loaded(name, ["--no-defaults"]))
    if args[:1] == ["help"]:
        args = [*args[1:2], "--help"]
    name = next((arg for arg in args if not arg.startswith("-")), None)
    if not args or (name is not None and name not in COMMANDS):
        raise _no_such_command(name)
    loaded = None if name is None else _loaded(name, args)
    given = None if loaded is None or args[0] != name else parse(loaded.taken, args[1:])
    if loaded is not None and given is not None:
        return int(loaded.command(**given) or 0)
    from ckpttool.cli import by_typer

    return by_typer.run(COMMANDS, args, loaded)


def _loaded(name: str, args: Sequence[str]) -> Loaded:
    """The command, which takes what the command line leaves out from elsewhere, where it is not to help only."""
    command = _command(name)
    taken = taken_by(command)
    if not {"--help", "-h", "--no-defaults"} & set(args):
        taken = with_defaults(name, taken, _words)
    return Loaded(name, lambda **given: command(**chosen(name, given)), taken, command.__doc__)


def _words() -> dict[str, set[str]]:
    """Each command's words for its options."""
    return {name: words_of(taken_by(_command(name))) for name in COMMANDS}


def _command(name: str) -> Callable[..., int | None]:
    return with_common(import_module(COMMANDS[name][0]).command)


def _no_such_command(name: str | None) -> CkptError:
    from difflib import get_close_matches

    near = get_close_matches(name or "", COMMANDS, 1)
    hint = f"did you mean `ckpttool {near[0]}`?" if near else f"the commands are {', '.join(COMMANDS)}"
    return CkptError(f"no such command: {name}" if name else "no command given", hint=f"{hint} (more: ckpttool --help)")
