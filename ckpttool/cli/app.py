"""The entry point: picks the command's module, runs it, and holds the only catch of the program."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from importlib import import_module
from itertools import pairwise
from typing import Annotated

import typer
from typer.main import get_command

from ckpttool import __version__
from ckpttool.cli.failures import failure_of, say
from ckpttool.cli.fields import with_limits
from ckpttool.cli.logs import logged
from ckpttool.cli.streams import nothing_left, set_up
from ckpttool.cli.warned import collected
from ckpttool.errors import CkptError
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
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line (default: that of the process) and returns its exit status. Never raises."""
    set_up()
    gc.set_threshold(100_000, 50, 100)  # an index is many small values without cycles: searching them is half the time
    args = sys.argv[1:] if argv is None else list(argv)
    try:
        sources.forget_all()
        with ended_by_signals(), nothing_left(), logged(), collected():
            status = run(args)
        sys.stdout.flush()
        return status
    except BaseException as error:
        if os.environ.get("CKPTTOOL_DEBUG") == "1":
            traceback.print_exc()
        return say(failure_of(error), as_json=_asks_for_json(args))


def _asks_for_json(args: Sequence[str]) -> bool:
    """Whether the command line asks for JSON; looked for by hand, since it may be the command line that is wrong."""
    return "--format=json" in args or ("--format", "json") in pairwise(args)


def run(args: list[str]) -> int:
    """Runs one command line and returns 0 or 1. Raises whatever the command raises, and click's usage errors."""
    name = next((arg for arg in args if not arg.startswith("-")), None)
    if not args or (name is not None and name not in COMMANDS):
        raise _no_such_command(name)
    group = get_command(build_app({name} if name else ()))
    try:
        with group.make_context("ckpttool", args) as context:
            result = group.invoke(context)
    except typer.Exit as stop:  # --help and --version have said what they say
        return stop.exit_code
    return int(result or 0)


def build_app(loaded: Collection[str] = tuple(COMMANDS)) -> typer.Typer:
    """The typer app. Commands in `loaded` are imported; the others are there for the list of commands in the help."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.callback()(_root)
    for name, (module, summary) in COMMANDS.items():
        if name in loaded:
            app.command(name)(with_limits(import_module(module).command))
        else:
            app.command(name, help=summary)(_not_loaded)
    return app


def _not_loaded() -> None:
    raise AssertionError("run() loads the command that the command line names")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"ckpttool {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Inspect, diff and convert PyTorch checkpoints, and put new weights into exported programs.

    Exit status: 0 the same, or done; 1 the answer is no; 2 no answer.
    """


def _no_such_command(name: str | None) -> CkptError:
    near = get_close_matches(name or "", COMMANDS, 1)
    hint = f"did you mean `ckpttool {near[0]}`?" if near else f"the commands are {', '.join(COMMANDS)}"
    return CkptError(f"no such command: {name}" if name else "no command given", hint=f"{hint} (more: ckpttool --help)")
