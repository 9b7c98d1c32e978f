"""The parameters of a command, read from its signature, and the command line in its usual spelling.

A command is described once, in its signature: this module and `by_typer` both read it from there. typer knows every
spelling, and takes 0.1 s to import.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, fields, is_dataclass
from importlib import import_module
from inspect import Parameter, Signature
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from ckpttool.cli.output import Report
from ckpttool.cli.progress import watched
from ckpttool.cli.streams import quiet
from ckpttool.core.errors import CkptError
from ckpttool.core.limits import limited, raised
from ckpttool.core.options import COMMON, Argument, Option, OutputOptions
from ckpttool.core.values import dataclass

# Command -> its module, which defines `command`, and the first line of its help. Modules are imported when they run.
COMMANDS: dict[str, tuple[str, str]] = {
    "inspect": ("ckpttool.cli.commands.inspect", "Show what is in a checkpoint: keys, dtypes, shapes, aliases."),
    "trace": ("ckpttool.cli.commands.trace", "Every name of every tensor of a model."),
    "diff": ("ckpttool.cli.commands.diff", "What differs, why, and the command that fixes it."),
    "explain": ("ckpttool.cli.commands.explain", "One tensor: all its names, and the hook that renames it."),
    "fix": ("ckpttool.cli.commands.fix", "Write a checkpoint with the fix that `diff` suggests."),
    "remap": ("ckpttool.cli.commands.remap", "Rewrite the keys, optimizer ids and format of a checkpoint."),
    "convert": ("ckpttool.cli.commands.convert", "Write a checkpoint in another format or with other shards."),
    "swap-weights": ("ckpttool.cli.commands.swap_weights", "Put new weights into an exported program."),
    "check": ("ckpttool.cli.commands.check", "Files of a repository: names, rules, plans, pickles."),
    "undo": ("ckpttool.cli.commands.undo", "Roll back an interrupted or the last edit in place."),
    "rules": ("ckpttool.cli.commands.rules", "List the preset rules; with NAME print one as TOML."),
    "history": ("ckpttool.cli.commands.history", "Which step of a run changed keys, dtypes, optimizers."),
    "diff3": ("ckpttool.cli.commands.diff3", "What two checkpoints each changed since a common base."),
    "schema": ("ckpttool.cli.commands.schema", "The JSON Schema of an object that the commands write."),
}


@dataclass(frozen=True, kw_only=True)
class Common:
    """The options that all commands have."""

    quiet: Annotated[bool, Option("-q, --quiet", "Print errors only; the exit status is the answer.", COMMON)] = False
    verbose: Annotated[
        bool, Option("-v, --verbose", "Say on stderr what was read, moved, computed and fetched, and the time.", COMMON)
    ] = False
    limit: Annotated[
        Sequence[str] | None,
        Option(
            "--limit NAME=VALUE", "Raise a limit that an error names; VALUE may end in K, M, G. Repeatable.", COMMON
        ),
    ] = None
    no_defaults: Annotated[
        bool, Option("--no-defaults", "Take no option from CKPTTOOL_* variables and pyproject.toml.", COMMON)
    ] = False


@dataclass(frozen=True, slots=True)
class Param:
    """An option or argument: one value or `many`, each of type `kind` (bool, str, int, float)."""

    name: str
    annotation: Any
    mark: Option | Argument
    default: Any

    @property
    def is_required(self) -> bool:
        return self.default is Parameter.empty

    @property
    def flags(self) -> tuple[str, ...]:
        return self.mark.flags if isinstance(self.mark, Option) else ()

    @property
    def many(self) -> bool:
        return get_origin(_not_none(self.annotation)) is list

    @property
    def kind(self) -> type:
        kind = _not_none(self.annotation)
        only: type = get_args(kind)[0] if self.many else kind
        return only


@dataclass(frozen=True, slots=True)
class Default:
    """The value of an option that the command line leaves out, and the `place` that it comes from.

    `own`: it is for this command, and not for all.
    """

    value: Any
    place: str
    own: bool = False


@dataclass(frozen=True, slots=True)
class Command:
    """A command: its name, its parameters, its help, and a function that runs it with the values that are given."""

    name: str
    params: Sequence[Param]
    run: Callable[[Mapping[str, Any]], int | None]
    help: str | None
    defaults: Mapping[str, Default] = field(default_factory=dict)

    def needs(self, param: Param) -> bool:
        """Return True if the command line must give the parameter."""
        return param.is_required and param.name not in self.defaults


def load(name: str) -> Command:
    """Import the module of the command, and return the command."""
    return command_of(name, import_module(COMMANDS[name][0]).command)


def command_of(name: str, function: Callable[..., int | None]) -> Command:
    """Return the command that the function defines, with the options that all commands have.

    A parameter of the function that is a dataclass of options becomes one option for each of its fields. An option
    that several of them have is given once.
    """
    hints = get_type_hints(function, include_extras=True)
    parameters = Signature.from_callable(function).parameters
    groups = {key: hints[key] for key in parameters if is_dataclass(hints[key])}
    params: dict[str, Param] = {}
    for key, parameter in parameters.items():
        own = _params_of(groups[key]) if key in groups else [_param(key, hints[key], parameter.default)]
        params |= {param.name: param for param in own if param.name not in params}
    params |= {param.name: param for param in _params_of(Common)}

    def run(given: Mapping[str, Any]) -> int | None:
        values = {name: param.default for name, param in params.items()} | dict(given)

        def filled(options: Any) -> Any:
            return options(**{field.name: values[field.name] for field in fields(options)})

        common = filled(Common)
        with limited(raised(common.limit or ())), quiet(common.quiet), watched(common.verbose):
            return function(**{key: filled(groups[key]) if key in groups else values[key] for key in parameters})

    return Command(name, list(params.values()), run, function.__doc__)


def common_options() -> list[Option]:
    """Return the options that all commands have, and the options of all commands that write."""
    params = {param.name: param for options in (Common, Report, OutputOptions) for param in _params_of(options)}
    marks = (param.mark for param in params.values() if isinstance(param.mark, Option))
    return [mark for mark in marks if mark.group == COMMON]


def _params_of(options: Any) -> Iterator[Param]:
    hints = get_type_hints(options, include_extras=True)
    return (_param(field.name, hints[field.name], field.default) for field in fields(options))


def _param(name: str, hint: Any, default: Any) -> Param:
    kind, mark = get_args(_not_none(hint))  # Python 3.10 makes a union of a hint whose default is None
    return Param(name, _on_command_line(kind), mark, default)


def _on_command_line(kind: Any) -> Any:
    """Return the type of an option on the command line: text instead of an object, a list instead of a sequence."""
    if kind is Any:
        return str | None
    if get_origin(kind) in _UNIONS:
        only: Any = _on_command_line(_not_none(kind))
        return only | None
    return list[str] if get_origin(kind) is Sequence else kind


_UNIONS = (Union, type(int | None))


def _not_none(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) in _UNIONS else kind


class Unusual(Exception):
    """Only typer can read this command line, or say what is wrong with it."""


def parse(command: Command, args: Sequence[str]) -> dict[str, Any] | None:
    """Return the values that are given, by name, the same that typer would give; None if typer must parse it.

    It parses ``--help``, everything that is wrong, and unusual spellings: ``-oOUT``, ``--``, values that
    begin with a dash, numbers in other forms than 12, 0.5 and 1e-05.
    """
    flags = {flag: param for param in command.params for flag in param.flags}
    texts: dict[str, list[str]] = {}
    places: list[str] = []
    words = iter(args)
    for word in words:
        if not word.startswith("-"):
            places.append(word)
            continue
        flag, equals, text = word.partition("=") if word.startswith("--") else (word, "", "")
        param = flags.get(flag)
        if param is None or (equals and param.kind is bool):
            return None
        if param.kind is not bool and not equals:
            text = next(words, "-")
        if text.startswith("-"):
            return None
        texts.setdefault(param.name, []).append(text)
    for param in command.params:
        if not param.flags and places:
            taken = len(places) if param.many else 1
            texts[param.name], places = places[:taken], places[taken:]
    if places or any(command.needs(param) and param.name not in texts for param in command.params):
        return None
    try:
        return {param.name: value_of(param, texts[param.name]) for param in command.params if param.name in texts}
    except (Unusual, CkptError):
        return None


_NUMBERS = {
    int: re.compile(r"0|[1-9][0-9]{0,17}"),
    float: re.compile(r"(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?(e-?[0-9]{1,2})?"),
}


def value_of(param: Param, texts: list[str]) -> Any:
    """Return the value of the texts. Raise `Unusual`, and what checks raise."""
    if param.kind is bool:
        return True
    for text in texts:
        # Bytes that are not text appear as lone surrogates, which are not printable.
        if not (text.isprintable() if param.kind is str else _NUMBERS[param.kind].fullmatch(text)):
            raise Unusual
    values = [param.kind(text) for text in texts]
    value = values if param.many else values[-1]
    if isinstance(param.mark, Option) and param.mark.check is not None:
        param.mark.check(value)
    return value
