"""The command line as typer sees it: help, error messages, and every spelling."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from inspect import Parameter, Signature
from typing import Annotated, Any

import typer
from typer.core import TyperCommand
from typer.main import get_command

from ckpttool.cli.params import COMMANDS, Command, Param, load
from ckpttool.cli.topics import EXIT_STATUS
from ckpttool.core.errors import CkptError
from ckpttool.core.options import COMMON, Argument
from ckpttool.core.text import shell

# The headings of the help in their order. `ckpttool help options` describes the common options; this only names them.
_GROUPS = ("Options", "Names", "Optimizer", "What fails", "Output", "Reports", "Advanced", COMMON)
ABOUT = f"""Inspect, diff and convert PyTorch checkpoints, and put new weights into exported programs.

Exit status: {EXIT_STATUS} `ckpttool help COMMAND` has examples,
`ckpttool help patterns` and `ckpttool help options` describe what all commands have in common.
"""
_HELP = {"help_option_names": ["-h", "--help"]}

# click's UsageError; typer brings its own copy of click since 0.26, so it cannot be imported by name.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]


def run(args: list[str], loaded: Command | None) -> int:
    """Run a command line that names the loaded command, or none, and return its exit status.

    Raise whatever the command raises, and `CkptError` if the command line is wrong.
    """
    group = get_command(build_app(loaded))
    try:
        with group.make_context("ckpttool", args) as context:
            result = group.invoke(context)
    except typer.Exit as stop:  # --help and --version have said what they say
        return stop.exit_code
    except UsageError as error:
        raise _error_of(error, args) from None
    return int(result or 0)


def complete(loaded: Command | None) -> int:
    """Answer the shell that set ``_CKPTTOOL_COMPLETE``: print what it can offer, or the script that it sources."""
    with suppress(SystemExit, typer.Exit):
        get_command(build_app(loaded)).main(prog_name="ckpttool")
    return 0


def build_app(loaded: Command | None) -> typer.Typer:
    """Return the typer app; the commands that are not loaded are only listed in the help."""
    app = typer.Typer(rich_markup_mode=None, context_settings=_HELP)
    app.callback(help=ABOUT)(_root)
    for name, (_, summary) in COMMANDS.items():
        if loaded is not None and loaded.name == name:
            app.command(name, cls=Grouped, context_settings={"obj": loaded})(typed(loaded))
        else:
            app.command(name, help=summary)(_not_loaded)
    return app


class Grouped(TyperCommand):
    """A command whose help is written from its `Command`, with the options under headings."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line after the name of the command."""
        return ["[OPTIONS]", *(str(param.mark.metavar) for param in ctx.obj.params if not param.flags)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the options, group by group."""
        groups: dict[str, list[Any]] = {"Arguments": [], **{title: [] for title in _GROUPS}}
        for param in ctx.obj.params:
            row = (param.mark.spelled, param.mark.help) if param.flags else (param.mark.metavar, param.mark.help)
            groups[param.mark.group if param.flags else "Arguments"].append(row)
        common = ", ".join(spelled.split()[0].rstrip(",") for spelled, _ in groups.pop(COMMON))
        for title, rows in groups.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)
        with formatter.section(COMMON):
            formatter.write_text(f"{common}, -h (described in `ckpttool help options`)")
        with formatter.section("Exit status"):
            formatter.write_text(EXIT_STATUS)


def typed(loaded: Command) -> Callable[..., int | None]:
    """Return the command with a signature that typer reads."""
    parameters = [
        Parameter(
            param.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if loaded.needs(param) else None if param.is_required else param.default,
            annotation=_annotation(param),
        )
        for param in loaded.params
    ]
    context = Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context)

    def run_it(context: Any, **values: Any) -> int | None:
        is_given = {name: context.get_parameter_source(name).name == "COMMANDLINE" for name in values}
        return loaded.run({name: value for name, value in values.items() if is_given[name]})

    run_it.__signature__ = Signature([*parameters, context])  # type: ignore[attr-defined]
    run_it.__annotations__ = {parameter.name: parameter.annotation for parameter in (*parameters, context)}
    run_it.__doc__ = loaded.help
    return run_it


def _annotation(param: Param) -> Any:
    mark = param.mark
    if isinstance(mark, Argument):
        return Annotated[param.annotation, typer.Argument(metavar=mark.metavar, help=mark.help)]

    def checked(value: Any) -> Any:
        if value and mark.check is not None:
            mark.check(value)
        return value

    option = typer.Option(
        *mark.flags,
        metavar=mark.metavar,
        help=mark.help,
        min=mark.least,
        callback=None if mark.check is None else checked,
    )
    return Annotated[param.annotation, option]


def _not_loaded() -> None:
    raise AssertionError("build_app() loads the command that the command line names")


def _print_version(asked: bool) -> None:
    if asked:
        from ckpttool.cli.topics import versions

        typer.echo(versions())
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            "-V",
            callback=_print_version,
            is_eager=True,
            help="Print the versions of ckpttool, Python, torch and safetensors.",
        ),
    ] = False,
) -> None:
    pass


_EXTRA = re.compile(r"extra argument(?:\(s\))? \((.*)\)$", re.DOTALL)


def _error_of(error: Any, args: Sequence[str]) -> CkptError:
    message = error.message if hasattr(error, "possibilities") else error.format_message()
    message = message[:1].lower() + message[1:].rstrip(".")
    context = error.ctx
    if context is None:
        return CkptError(message, hint="see ckpttool --help")
    # A command that writes, called as `cp` is: -o is missing before the argument that is too many.
    extra = "".join(_EXTRA.findall(message))
    outs = {flag for param in context.command.params if param.name == "out" for flag in param.opts}
    if outs and outs.isdisjoint(args) and args.count(extra) == 1:
        place = args.index(extra)
        return CkptError(message, hint=f"-o names the output: {shell('ckpttool', *args[:place], '-o', *args[place:])}")
    is_unknown = hasattr(error, "possibilities") and context.parent is not None
    flag = getattr(error, "option_name", "") if is_unknown else ""
    others = [name for name in COMMANDS if flag in (f"--{name}", *_spellings(load(name)))] if flag else []
    near = get_close_matches(flag, getattr(error, "possibilities", None) or (), 1)
    usage = " ".join(context.get_usage().split())[len("Usage:") :]
    hint = f"did you mean {near[0]}?" if near and not others else f"usage:{usage}"
    if others:
        hint = f"it is for `ckpttool {others[0]}`; {hint}"
    return CkptError(message, hint=f"{hint} (more: {context.command_path} --help)")


def _spellings(command: Command) -> list[str]:
    return [flag for param in command.params for flag in (param.flags or (f"--{param.name}",))]
