"""The command line as typer reads it: commands, their help, errors, and completion."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from inspect import Parameter, Signature
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from ckpttool.cli.params import COMMANDS, Command, Param, common_options, load
from ckpttool.cli.topics import EXIT_STATUS, fitted, versions
from ckpttool.core.errors import CkptError
from ckpttool.core.options import BECOMES, COMMON, IS, Choices, Option
from ckpttool.core.text import shell

# The headings of the help in their order. `ckpttool help options` describes the common options;
# this only names them.
_GROUPS = (
    "Arguments",
    "Options",
    IS,
    BECOMES,
    "Names",
    "Keys",
    "What fails",
    "Output",
    "Reports",
    "Advanced",
    COMMON,
)
ABOUT = f"""\
Inspect, diff and convert PyTorch checkpoints, and put new weights into exported programs.

Exit status: {EXIT_STATUS} `ckpttool help COMMAND` has examples,
`ckpttool help rules`, `patterns`, `forms` and `options` describe what commands have in common.
"""
_HELP = {"help_option_names": ["-h", "--help"]}

_COMPLETION = ("--show-completion", "--install-completion")
# typer then takes the name of a shell
_NAMED_SHELL = "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"

# click's UsageError; typer brings its own copy of click since 0.26, so it cannot be imported by
# name.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]


def run(args: Sequence[str]) -> int:
    """Run a command line and return its exit status.

    Raise whatever the command raises, and `CkptError` if the command line is wrong.
    """
    group, args = _group(names_shell=args[0] in _COMPLETION and len(args) > 1), _command_first(args)
    try:
        with _root_context(group, args) as context:
            return int(group.invoke(context) or 0)
    except typer.Exit as stop:  # --help, --version and --show-completion have said what they say
        return stop.exit_code
    except UsageError as error:
        raise _error_of(error, args) from None


def _root_context(group: Any, args: Sequence[str]) -> Any:
    """Return the context of the options before the command; typer's two about completion end the
    process.
    """
    try:
        return group.make_context("ckpttool", list(args))
    except SystemExit as stop:
        if stop.code:
            shells = "bash, zsh, fish, powershell or pwsh"
            hint = f"name the shell, {shells}: ckpttool --show-completion bash"
            raise CkptError("this shell has no completions", hint=hint) from None
        raise typer.Exit from None


def complete() -> int:
    """Answer the shell that set ``_CKPTTOOL_COMPLETE``: print what it can offer, or the script that
    it sources.
    """
    with suppress(SystemExit, typer.Exit):
        _group().main(prog_name="ckpttool")
    return 0


def _command_first(args: Sequence[str]) -> Sequence[str]:
    """Return the words with the common options that come before the command after it."""
    if not args[0].startswith("-"):
        return args
    takes_value: dict[str, bool] = {}
    for mark in common_options():
        takes_value.update(dict.fromkeys(mark.flags, mark.metavar is not None))
    at = 0
    while at < len(args):
        flag = args[at].partition("=")[0]
        if flag not in takes_value:
            break
        at += 2 if takes_value[flag] and flag == args[at] else 1
    options, rest = args[:at], args[at:]
    if not rest or rest[0].startswith("-"):
        return args
    return [rest[0], *options, *rest[1:]]


def _group(*, names_shell: bool = False) -> Any:
    """Return all commands; `names_shell`: the options about completion take the name of a shell."""
    app = typer.Typer(rich_markup_mode=None, cls=_AllCommands, context_settings=_HELP)
    app.callback(help=ABOUT)(_root)
    if not names_shell:
        return get_command(app)
    os.environ[_NAMED_SHELL] = "1"
    try:
        return get_command(app)
    finally:
        del os.environ[_NAMED_SHELL]


def _print_versions(asked: bool) -> None:
    if asked:
        typer.echo(versions())
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option(
            *("--version", "-V"),
            callback=_print_versions,
            is_eager=True,
            help="Print the versions of ckpttool, Python, torch and safetensors.",
        ),
    ] = False,
) -> None:
    pass


class _WithoutPydantic:
    """A command whose values typer converts as they are, if they need no conversion.

    typer 0.29 and newer ask pydantic, also about texts and options that are left out. It takes 0.1
    s to import.
    """

    described: Mapping[str, Param] = {}

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            described = self.described.get(param.name)
            is_text = described is not None and described.kind in (str, list[str])
            param._runtime_param = _Conversion(param, is_text)
        return params


class _Conversion:
    def __init__(self, param: Any, is_text: bool) -> None:
        self._param, self._is_text = param, is_text

    def coerce(self, value: Any, *args: Any, **keywords: Any) -> Any:
        if self._is_text or not isinstance(value, str):
            return value
        self._param._runtime_param = None
        return self._param.get_runtime_param().coerce(value, *args, **keywords)


class _AllCommands(_WithoutPydantic, TyperGroup):
    """All commands; the module of a command is imported if the command line names it."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_help(self, ctx: Any) -> str:
        return _fitted(super().get_help(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _typed(cmd_name, load(cmd_name)) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in COMMANDS and not ctx.resilient_parsing:
            hint = f"the commands are {', '.join(COMMANDS)}"
            near = get_close_matches(args[0], COMMANDS, 1)
            if args[0] in _COMMANDS_MEANT:
                hint = _COMMANDS_MEANT[args[0]]
            elif near:
                hint = f"did you mean `ckpttool {near[0]}`?"
            raise CkptError(f"no such command: {args[0]}", hint=f"{hint} (more: ckpttool --help)")
        return super().resolve_command(ctx, args)


class _OneCommand(_WithoutPydantic, TyperCommand):
    """A command whose help has the options under headings."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        self._check_given_once(args)
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed

    def _check_given_once(self, args: Sequence[str]) -> None:
        """Raise `CkptError` if an option names two models or two optimizers: click takes the last
        one, and the answer would be about that one alone.
        """
        by_flag: dict[str, Param] = {}
        for param in self.described.values():
            by_flag.update(dict.fromkeys(param.flags, param))
        given: dict[str, str] = {}
        words = iter(args)
        for word in words:
            flag, equals, value = word.partition("=")
            named = by_flag.get(flag)
            if named is None or not isinstance(named.mark, Option) or named.mark.metavar is None:
                continue
            if not equals:
                value = next(words, "")
            if named.mark.group not in (IS, BECOMES) or named.kind == list[str]:
                continue
            if given.setdefault(flag, value) != value:
                text = f"{flag} is given twice: {given[flag]} and {value}"
                raise CkptError(text, hint=self._hint_on_two(flag, given[flag], value))

    def _hint_on_two(self, flag: str, first: str, second: str) -> str:
        if self.name != "diff" or flag != "--model":
            return "name one of them"
        from ckpttool.cli.commands.diff import line_of_models

        return f"name one of them; to compare the two: {line_of_models(first, second)}"

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [param for param in self.described.values() if not param.flags]
        return ["[OPTIONS]", *(str(param.mark.metavar) for param in arguments)]

    def get_help(self, ctx: Any) -> str:
        return _fitted(super().get_help(ctx))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[Any]] = {title: [] for title in _GROUPS}
        for param in self.described.values():
            mark = param.mark
            if isinstance(mark, Option):
                groups[mark.group].append((mark.spelled, mark.help))
            else:
                groups["Arguments"].append((mark.metavar, mark.help))
        common = ", ".join(spelled.split()[0].rstrip(",") for spelled, _ in groups.pop(COMMON))
        for title, rows in groups.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)
        with formatter.section(COMMON):
            formatter.write_text(f"{common}, -h (described in `ckpttool help options`)")
        with formatter.section("Exit status"):
            formatter.write_text(EXIT_STATUS)


def _fitted(text: str) -> str:
    """Return a help whose examples fit the terminal too."""
    return fitted(text, shutil.get_terminal_size().columns).rstrip("\n")


def _typed(name: str, command: Command) -> _OneCommand:
    """Return the command with a signature that typer reads."""

    defaults = {}
    parameters = []
    for key, param in command.params.items():
        defaults[key] = None if param.default is Parameter.empty else param.default
        parameters.append(
            Parameter(
                key, Parameter.KEYWORD_ONLY, default=param.default, annotation=_annotation(param)
            )
        )

    def run_it(**values: Any) -> int | None:
        given = {key: value for key, value in values.items() if value not in (None, [], ())}
        return command.run({**defaults, **given})

    run_it.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run_it.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run_it.__doc__ = command.function.__doc__
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(name, cls=_OneCommand, context_settings=_HELP)(run_it)
    typed: Any = get_command(app)
    typed.described = command.params
    return typed  # type: ignore[no-any-return]


def _annotation(param: Param) -> Any:
    mark = param.mark
    if not isinstance(mark, Option):
        return Annotated[
            param.kind,
            typer.Argument(
                metavar=mark.metavar, help=mark.help, autocompletion=_completion(mark.choices)
            ),
        ]

    def checked(value: Any) -> Any:
        if value and mark.check is not None:
            mark.check(value)
        return value

    callback = None if mark.check is None else checked
    return Annotated[
        param.kind,
        typer.Option(
            *mark.flags,
            metavar=mark.metavar,
            help=mark.help,
            min=mark.least,
            callback=callback,
            autocompletion=_completion(mark.choices),
        ),
    ]


def _completion(choices: Choices | None) -> Callable[[str], list[str]] | None:
    """Return what typer asks for the values that begin with a text; None leaves it to the shell,
    which offers files.
    """
    if choices is None:
        return None

    def beginning(incomplete: str) -> list[str]:
        words = choices() if callable(choices) else choices
        return [word for word in words if word.startswith(incomplete)]

    return beginning


# What other tools call it -> what it is called here.
_OPTIONS_MEANT = {
    "--json": "--format json",
    "--rename": "--rule",
    "--strip-prefix": "--rule 'PREFIX.{x*} => {x*}'",
    "--prefix": "--rule '{x*} => PREFIX.{x*}'",
    "--tolerance": "--rtol or --atol",
    "--out": "-o",
    "--output": "-o",
}
_COMMANDS_MEANT = {
    "swap": "did you mean `ckpttool swap-weights`?",
    "rename": "did you mean `ckpttool remap`?",
    "load": "in Python: ckpttool.load(CKPT, model)",
}
_LIKENESS = 0.7  # of a mistyped option

_EXTRA = re.compile(r"extra argument(?:\(s\))? \((.*)\)$", re.DOTALL)


def _error_of(error: Any, args: Sequence[str]) -> CkptError:
    message = error.message if hasattr(error, "possibilities") else error.format_message()
    message = message[:1].lower() + message[1:].rstrip(".")
    context = error.ctx
    if context is None:
        return CkptError(message, hint="see ckpttool --help")
    lacks_model = _lacks(error, "--model", args)
    extra = "".join(_EXTRA.findall(message))
    if lacks_model:
        from ckpttool.operands.checkpoint import is_code

        extra = next(filter(is_code, args), "")
    corrected = _with_option(extra, context, args)
    if corrected is not None:
        return CkptError(message, hint=corrected)
    if lacks_model:
        line = shell("ckpttool", *args, "--model", "MODEL")
        return CkptError(message, hint=f"name the model, such as model.py:build: {line}")
    usage = " ".join(context.get_usage().split())
    hint = usage.replace("Usage:", "usage:", 1)
    if hasattr(error, "possibilities") and context.parent is not None:
        flag = getattr(error, "option_name", "")
        hint = _on_option(flag, context.info_name, error.possibilities or (), hint)
    return CkptError(message, hint=f"{hint} (more: {context.command_path} --help)")


def _on_option(flag: str, command: str, possibilities: Sequence[str], usage: str) -> str:
    """Return a hint on an option that the command does not have; `usage` if nothing is like it."""
    others = [name for name in COMMANDS if flag and _takes(name, flag)]
    if others:
        return f"it is for `ckpttool {others[0]}`; {usage}"
    meant = _OPTIONS_MEANT.get(flag, "")
    if meant and _takes(command, meant.split()[0]):
        return f"did you mean {meant}?"
    near = get_close_matches(flag, possibilities, 1, _LIKENESS)
    return f"did you mean {near[0]}?" if near else usage


def _lacks(error: Any, flag: str, args: Sequence[str]) -> bool:
    """Return whether the error is that a required option is missing."""
    if flag not in getattr(getattr(error, "param", None), "opts", ()):
        return False
    return not any(word.partition("=")[0] == flag for word in args)


def _with_option(extra: str, context: Any, args: Sequence[str]) -> str | None:
    """Return the line with an option before the argument that is too many: ``--model`` before a
    model, and -o if a command that writes was called as `cp` is. None if there is no such argument.
    """
    from ckpttool.operands.checkpoint import is_code

    if args.count(extra) != 1:
        return None
    flag, meaning = "-o", "-o names the output"
    if is_code(extra):
        flag, meaning = "--model", "--model names the model"
    flags: list[str] = []
    for param in context.command.params:
        if flag in param.opts:
            flags += param.opts
    if not flags or not set(flags).isdisjoint(args):
        return None
    place = args.index(extra)
    return f"{meaning}: {shell('ckpttool', *args[:place], flag, *args[place:])}"


def _takes(command: str, flag: str) -> bool:
    """Return True if the command has an option or an argument of this name, or is called so."""
    if flag == f"--{command}":
        return True
    for name, param in load(command).params.items():
        if flag in (param.flags or (f"--{name}",)):
            return True
    return False
