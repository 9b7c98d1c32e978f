"""The command line as typer sees it: help, error messages, and every spelling."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from inspect import Parameter, Signature
from typing import Annotated, Any

import typer
from typer.core import TyperCommand
from typer.main import get_command

from ckpttool.cli.defaults import Default
from ckpttool.cli.params import Command, Param
from ckpttool.core.errors import CkptError
from ckpttool.core.options import Argument
from ckpttool.core.text import shell

# The headings of the help, and the options under each; all others are under "Options".
_GROUPS = {
    "Model": ("model", "materialize", "optimizer"),
    "Names": (
        *("to", "from_", "select", "trainable_only", "rule", "rules", "reverse", "partial", "drop", "like"),
        *("to_model", "to_optimizer", "optimizer_keys", "sections"),
    ),
    "What fails": ("fail_on", "ignore", "ignore_file", "fail_on_unused", "exit_zero"),
    "Output": (
        *("out", "keep_pickled_code", "save_plan", "keep_aliases", "max_shard_size"),
        *("in_place", "no_undo", "dry_run", "verify", "manifest", "all"),
    ),
}
# Options that `ckpttool help options` describes; the help of a command only names them.
_COMMON = ("quiet", "verbose", "format", "report", "force", "no_fsync", "limit", "no_defaults", "help")
ABOUT = """Inspect, diff and convert PyTorch checkpoints, and put new weights into exported programs.

Exit status: 0: no differences, or success; 1: differences, or refused; 2: error. `ckpttool help COMMAND` has examples,
`ckpttool help patterns` and `ckpttool help options` describe what all commands have in common.
"""
_HELP = {"help_option_names": ["-h", "--help"]}
Commands = Mapping[str, tuple[str, str]]  # command -> its module, which defines `command`, and its line in the help

# click's UsageError; typer brings its own copy of click since 0.26, so it cannot be imported by name.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]


def run(commands: Commands, args: list[str], loaded: Command | None) -> int:
    """Run a command line that names the loaded command, or none, and return its exit status.

    Raise whatever the command raises, and `CkptError` if the command line is wrong.
    """
    group = get_command(build_app(commands, loaded))
    try:
        with group.make_context("ckpttool", args) as context:
            result = group.invoke(context)
    except typer.Exit as stop:  # --help and --version have said what they say
        return stop.exit_code
    except UsageError as error:
        raise _error_of(error, args) from None
    return int(result or 0)


def complete(commands: Commands, loaded: Command | None) -> int:
    """Answer the shell that set ``_CKPTTOOL_COMPLETE``: print what it can offer, or the script that it sources."""
    with suppress(SystemExit, typer.Exit):
        get_command(build_app(commands, loaded)).main(prog_name="ckpttool")
    return 0


def build_app(commands: Commands, loaded: Command | None) -> typer.Typer:
    """Return the typer app; the commands that are not loaded are only listed in the help."""
    app = typer.Typer(rich_markup_mode=None, context_settings=_HELP)
    app.callback(help=ABOUT)(_root)
    for name, (_, summary) in commands.items():
        if loaded is not None and loaded.name == name:
            app.command(name, cls=Grouped)(typed(loaded))
        else:
            app.command(name, help=summary)(_not_loaded)
    return app


class Grouped(TyperCommand):
    """A command whose help has its options under headings."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the options, group by group."""
        sections: dict[str, list[Any]] = {}
        params = {param.name: param for param in self.get_params(ctx)}
        for name, param in params.items():
            if param.param_type_name == "argument":
                record: Any = param.get_help_record(ctx)
                sections.setdefault("Arguments", []).append((param.metavar, record[1]))
            elif name not in _COMMON:
                title = next((title for title, names in _GROUPS.items() if name in names), "Options")
                sections.setdefault(title, []).append(param.get_help_record(ctx))
        order = ["Arguments", "Options", *_GROUPS]
        for title in sorted(sections, key=order.index):
            with formatter.section(title):
                formatter.write_dl(sections[title])
        flags = ", ".join(params[name].opts[0] for name in _COMMON if name in params)
        with formatter.section("Common options"):
            formatter.write_text(f"{flags} (described in `ckpttool help options`)")


def typed(loaded: Command) -> Callable[..., int | None]:
    """Return the command with a signature that typer reads."""
    parameters = [
        Parameter(
            param.name,
            Parameter.KEYWORD_ONLY,
            default=param.default.instead if isinstance(param.default, Default) else param.default,
            annotation=_annotation(param),
        )
        for param in loaded.params
    ]
    context = Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context)

    def run_it(context: Any, **given: Any) -> int | None:
        for param in loaded.params:
            if isinstance(param.default, Default) and context.get_parameter_source(param.name).name != "COMMANDLINE":
                given[param.name] = param.default
        return loaded.run(**given)

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
    near = get_close_matches(getattr(error, "option_name", None) or "", getattr(error, "possibilities", None) or (), 1)
    usage = re.sub(r"[{}]", "", " ".join(context.get_usage().split())[len("Usage:") :])
    hint = f"did you mean {near[0]}?" if near else f"usage:{usage}"
    return CkptError(message, hint=f"{hint} (more: {context.command_path} --help)")
