"""The commands, and their parameters as their signatures describe them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from importlib import import_module
from inspect import Signature
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from ckpttool.cli.output import Report
from ckpttool.cli.progress import watched
from ckpttool.cli.streams import quiet
from ckpttool.core.limits import limited, with_memory
from ckpttool.core.options import COMMON, Argument, Option, OutputOptions
from ckpttool.core.values import dataclass

# Command -> its module, which defines `command`, and the first line of its help. Modules are
# imported when they run.
COMMANDS: dict[str, tuple[str, str]] = {
    "inspect": (
        "ckpttool.cli.commands.inspect",
        "Show what is in a checkpoint: keys, dtypes, shapes, aliases.",
    ),
    "trace": ("ckpttool.cli.commands.trace", "Every name of every tensor of a model."),
    "diff": ("ckpttool.cli.commands.diff", "What differs, why, and the command that fixes it."),
    "explain": (
        "ckpttool.cli.commands.explain",
        "One tensor: all its names, and the hook that renames it.",
    ),
    "fix": ("ckpttool.cli.commands.fix", "Write a checkpoint with the fix that `diff` suggests."),
    "remap": (
        "ckpttool.cli.commands.remap",
        "Rewrite the keys, optimizer ids and format of a checkpoint.",
    ),
    "convert": (
        "ckpttool.cli.commands.convert",
        "Write a checkpoint in another format, dtype or shards.",
    ),
    "swap-weights": (
        "ckpttool.cli.commands.swap_weights",
        "Put new weights into an exported program.",
    ),
    "check": ("ckpttool.cli.commands.check", "Files of a repository: names, rules, pickles."),
    "undo": ("ckpttool.cli.commands.undo", "Roll back an interrupted or the last edit in place."),
    "rules": ("ckpttool.cli.commands.rules", "List the preset rules; with NAME print one as TOML."),
    "schema": (
        "ckpttool.cli.commands.schema",
        "The JSON Schema of an object that the commands write.",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Common:
    """The options that all commands have."""

    quiet: Annotated[
        bool, Option("-q, --quiet", "Print errors only; the exit status is the answer.", COMMON)
    ] = False
    verbose: Annotated[
        bool,
        Option(
            "-v, --verbose",
            "Say on stderr what was read, moved, computed and fetched, and the time.",
            COMMON,
        ),
    ] = False
    max_memory: Annotated[
        str | None,
        Option(
            "--max-memory SIZE", "Memory for what a file describes (default 1G), as in 4G.", COMMON
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class Param:
    """An option or argument: how it is written, its type for typer, its default (`Parameter.empty`:
    required).
    """

    mark: Option | Argument
    kind: Any
    default: Any

    @property
    def flags(self) -> tuple[str, ...]:
        return self.mark.flags if isinstance(self.mark, Option) else ()


@dataclass(frozen=True, slots=True)
class Command:
    """A command: its function, and its parameters by name."""

    function: Callable[..., int | None]
    groups: Mapping[str, Any]  # parameter of the function -> dataclass of options
    params: Mapping[str, Param]

    def run(self, values: Mapping[str, Any]) -> int | None:
        """Call the function with the values of all parameters."""

        def filled(options: Any) -> Any:
            return options(**{field.name: values[field.name] for field in fields(options)})

        names = Signature.from_callable(self.function).parameters
        common = filled(Common)
        with limited(with_memory(common.max_memory)), quiet(common.quiet), watched(common.verbose):
            arguments = {}
            for name in names:
                is_group = name in self.groups
                arguments[name] = filled(self.groups[name]) if is_group else values[name]
            return self.function(**arguments)


def load(name: str) -> Command:
    """Import the module of the command, and read its signature.

    A parameter that is a dataclass of options becomes one option for each of its fields. An option
    that several of them have is given once.
    """
    function = import_module(COMMANDS[name][0]).command
    hints = get_type_hints(function, include_extras=True)
    groups = {key: hint for key, hint in hints.items() if is_dataclass(hint)}
    params: dict[str, Param] = {}
    for key, parameter in Signature.from_callable(function).parameters.items():
        if key in groups:
            options = _params_of(groups[key])
        else:
            options = {key: _param(hints[key], parameter.default)}
        for name, param in options.items():
            params.setdefault(name, param)
    return Command(function, groups, params | _params_of(Common))


def common_options() -> list[Option]:
    """Return the options that all commands have, and the options of all commands that write."""
    params = _params_of(Common) | _params_of(Report) | _params_of(OutputOptions)
    marks = (param.mark for param in params.values() if isinstance(param.mark, Option))
    return [mark for mark in marks if mark.group == COMMON]


def _params_of(options: Any) -> dict[str, Param]:
    hints = get_type_hints(options, include_extras=True)
    return {field.name: _param(hints[field.name], field.default) for field in fields(options)}


def _param(hint: Any, default: Any) -> Param:
    # Python 3.10 makes a union of a hint whose default is None
    kind, mark = get_args(_not_none(hint))
    kind = _not_none(kind)
    if kind is Any:  # an object in Python
        kind = str
    repeats = get_origin(kind) is Sequence or (isinstance(mark, Option) and mark.repeats)
    return Param(mark, list[str] if repeats else kind, default)


def _not_none(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) in (Union, type(int | None)) else hint
