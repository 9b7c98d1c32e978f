"""The command line as typer sees it: help, the words of what is wrong with it, and every spelling that there is."""

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
from ckpttool.cli.fields import Loaded, Taken
from ckpttool.core.errors import CkptError
from ckpttool.core.options import Argument
from ckpttool.core.text import shell

# The headings of the help, and the options under each; what is under none is the command's own.
_GROUPS = {
    "The model": ("model", "model_kwargs", "materialize", "optimizer"),
    "Which names": (
        "sections",
        *("to", "from_", "select", "keep_prefix", "trainable_only", "rule", "rules", "size", "reverse", "drop", "like"),
        "partial",
        *("sections", "to_model", "to_model_kwargs", "units", "world_size"),
    ),
    "Optimizers": ("to_optimizer", "optimizer_keys"),
    "What fails": ("fail_on", "ignore", "ignore_file", "fail_on_unused", "exit_zero"),
    "The output": (
        "out",
        "keep_pickled_code",
        "plan",
        "save_plan",
        "keep_aliases",
        "max_shard_size",
        "torch_format",
        "link",
    ),
    "How it is written": ("in_place", "no_undo", "copy", "undo", "force", "dry_run", "verify", "no_fsync"),
    "The report": ("format", "report", "manifest", "all", "quiet", "verbose"),
    "In common": ("limit", "no_defaults", "help"),
}
ABOUT = """Inspect, diff and convert PyTorch checkpoints, and put new weights into exported programs.

Exit status: 0 the same, or done; 1 the answer is no; 2 no answer. `ckpttool help COMMAND` has examples.
"""
_HELP = {"help_option_names": ["-h", "--help"]}
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
        raise _in_words(error, args) from None
    return int(result or 0)


def complete(commands: Commands, loaded: Loaded | None) -> int:
    """Answer the shell that set ``_CKPTTOOL_COMPLETE``: print what it can offer, or the script that it sources."""
    with suppress(SystemExit, typer.Exit):
        get_command(build_app(commands, loaded)).main(prog_name="ckpttool")
    return 0


def build_app(commands: Commands, loaded: Loaded | None) -> typer.Typer:
    """The typer app; the commands that are not loaded are there for the list of commands in the help."""
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
        """Writes the arguments, then the options, group by group."""
        sections: dict[str, list[Any]] = {}
        for param in self.get_params(ctx):
            sections.setdefault(_section(param), []).append(param.get_help_record(ctx))
        order = ["Arguments", "Options", *_GROUPS]
        for title in sorted(sections, key=order.index):
            with formatter.section(title):
                formatter.write_dl(sections[title])


def _section(param: Any) -> str:
    if param.param_type_name == "argument":
        return "Arguments"
    return next((title for title, names in _GROUPS.items() if param.name in names), "Options")


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
        from ckpttool import __version__

        typer.echo(f"ckpttool {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _in_words(error: Any, args: Sequence[str]) -> CkptError:
    message = error.message if hasattr(error, "possibilities") else error.format_message()
    message = message[:1].lower() + message[1:].rstrip(".")
    context = error.ctx
    if context is None:
        return CkptError(message, hint="see ckpttool --help")
    meant = _as_cp_is_called(context.command, message, args)
    if meant:
        return CkptError(message, hint=f"-o names the output: {shell('ckpttool', *meant)}")
    near = get_close_matches(getattr(error, "option_name", None) or "", getattr(error, "possibilities", None) or (), 1)
    hint = f"did you mean {near[0]}?" if near else "usage:" + " ".join(context.get_usage().split())[len("Usage:") :]
    return CkptError(message, hint=f"{hint} (more: {context.command_path} --help)")


_EXTRA = re.compile(r"extra argument(?:\(s\))? \((.*)\)$", re.DOTALL)


def _as_cp_is_called(command: Any, message: str, args: Sequence[str]) -> list[str]:
    """The arguments with ``-o`` before the one that was too many, where a command that writes has no OUT yet."""
    extra = "".join(_EXTRA.findall(message))
    outs = {flag for param in command.params if param.name == "out" for flag in param.opts}
    if not outs or not outs.isdisjoint(args) or args.count(extra) != 1:
        return []
    place = args.index(extra)
    return [*args[:place], "-o", *args[place:]]
