"""The command line as typer sees it: help, the words of what is wrong with it, and every spelling that there is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from inspect import Parameter, Signature
from typing import Annotated, Any

import typer
from typer.main import get_command

from ckpttool import __version__
from ckpttool.cli.defaults import Default
from ckpttool.cli.fields import Loaded, Taken
from ckpttool.errors import CkptError
from ckpttool.options import Argument

Commands = Mapping[str, tuple[str, str]]  # command -> its module, which defines `command`, and its line in the help

# click's UsageError; typer brings its own copy of click since 0.26, so it cannot be imported by name.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]


def run(commands: Commands, args: list[str], loaded: Loaded | None) -> int:
    """Runs a command line that names the command that is loaded, or none, and returns its exit status.

    Raises whatever the command raises, and `CkptError` where the command line is wrong.
    """
    group = get_command(build_app(commands, loaded))
    try:
        with group.make_context("ckpttool", args) as context:
            result = group.invoke(context)
    except typer.Exit as stop:  # --help and --version have said what they say
        return stop.exit_code
    except UsageError as error:
        raise _in_words(error) from None
    return int(result or 0)


def build_app(commands: Commands, loaded: Loaded | None) -> typer.Typer:
    """The typer app; the commands that are not loaded are there for the list of commands in the help."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.callback()(_root)
    for name, (_, summary) in commands.items():
        if loaded is not None and loaded.name == name:
            app.command(name)(typed(loaded))
        else:
            app.command(name, help=summary)(_not_loaded)
    return app


def typed(loaded: Loaded) -> Callable[..., int | None]:
    """The command with a signature that typer reads."""
    parameters = [
        Parameter(one.name, Parameter.KEYWORD_ONLY, default=_in_its_place(one), annotation=_annotation(one))
        for one in loaded.taken
    ]
    context = Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context)

    def run_it(context: Any, **given: Any) -> int | None:
        for one in loaded.taken:
            if isinstance(one.default, Default) and context.get_parameter_source(one.name).name != "COMMANDLINE":
                given[one.name] = one.default
        return loaded.command(**given)

    run_it.__signature__ = Signature([*parameters, context])  # type: ignore[attr-defined]
    run_it.__annotations__ = {parameter.name: parameter.annotation for parameter in (*parameters, context)}
    run_it.__doc__ = loaded.help
    return run_it


def _in_its_place(one: Taken) -> Any:
    return one.default.instead if isinstance(one.default, Default) else one.default


def _annotation(one: Taken) -> Any:
    mark = one.mark
    if isinstance(mark, Argument):
        return Annotated[one.annotation, typer.Argument(metavar=mark.metavar, help=mark.help)]
    option = typer.Option(
        *mark.flags, metavar=mark.metavar, help=mark.help, min=mark.least, callback=_checked(mark.check)
    )
    return Annotated[one.annotation, option]


def _checked(check: Callable[[Any], object] | None) -> Callable[[Any], Any] | None:
    """Typer's callback: it gives the value, and is called where there is none too."""
    if check is None:
        return None

    def checked(value: Any) -> Any:
        if value:
            check(value)
        return value

    return checked


def _not_loaded() -> None:
    raise AssertionError("build_app() loads the command that the command line names")


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


def _in_words(error: Any) -> CkptError:
    message = error.message if hasattr(error, "possibilities") else error.format_message()
    message = message[:1].lower() + message[1:].rstrip(".")
    context = error.ctx
    if context is None:
        return CkptError(message, hint="see ckpttool --help")
    near = get_close_matches(getattr(error, "option_name", None) or "", getattr(error, "possibilities", None) or (), 1)
    hint = f"did you mean {near[0]}?" if near else "usage:" + " ".join(context.get_usage().split())[len("Usage:") :]
    return CkptError(message, hint=f"{hint} (more: {context.command_path} --help)")
