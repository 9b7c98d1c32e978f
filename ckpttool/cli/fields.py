"""Commands from dataclasses: each field that is marked as an option becomes one of the command's.

What a command takes is written down once, in its signature; `parse` and `by_typer` both read it from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from inspect import Parameter, Signature
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from ckpttool.cli.progress import watched
from ckpttool.cli.streams import quiet
from ckpttool.core.limits import limited, raised
from ckpttool.core.options import Argument, Option, option
from ckpttool.core.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Common:
    """The options that all commands have."""

    limit: Annotated[
        Sequence[str] | None,
        option(
            "--limit",
            metavar="NAME=VALUE",
            help="Raise a limit that an error names; VALUE may end in K, M, G. Repeatable.",
        ),
    ] = None
    quiet: Annotated[bool, option("-q", "--quiet", help="Print errors only; the exit status is the answer.")] = False
    verbose: Annotated[
        bool, option("-v", "--verbose", help="Say on stderr what was read, moved, computed and fetched, and the time.")
    ] = False
    no_defaults: Annotated[
        bool, option("--no-defaults", help="Take no option from CKPTTOOL_* variables and pyproject.toml.")
    ] = False


def with_common(function: Callable[..., int | None]) -> Callable[..., int | None]:
    """The command as the command line calls it: by name, with each option by itself, and with those that all have.

    A parameter of the function that is a dataclass of options has a parameter for each field in its place. What several
    of them have, or the function itself, is given once, to each.
    """
    own = Signature.from_callable(function).parameters
    hints = get_type_hints(function, include_extras=True)
    groups = {name: hints[name] for name in own if is_dataclass(hints[name])}
    parameters: dict[str, Parameter] = {}
    for name, parameter in own.items():
        made = _parameters(groups[name]) if name in groups else [parameter.replace(annotation=hints[name])]
        parameters |= {one.name: one for one in made if one.name not in parameters}
    parameters |= {one.name: one for one in _parameters(Common)}

    def command(**given: Any) -> int | None:
        common = _filled(Common, given)
        asked = {name: _filled(groups[name], given) if name in groups else given[name] for name in own}
        with limited(raised(common.limit or ())), quiet(common.quiet), watched(common.verbose):
            return function(**asked)

    command.__signature__ = Signature([*parameters.values()])  # type: ignore[attr-defined]
    command.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    command.__doc__ = function.__doc__
    return command


def _filled(options: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """The dataclass, of the values that it has fields for."""
    return options(**{field.name: given[field.name] for field in fields(options)})  # type: ignore[arg-type]


def _parameters(options: Any) -> list[Parameter]:
    """A parameter for each field of the dataclass."""
    hints, made = get_type_hints(options, include_extras=True), []
    for field in fields(options):
        kind, mark = get_args(hints[field.name])
        annotation: Any = Annotated[_plain(kind), mark]
        made.append(
            Parameter(field.name, Parameter.POSITIONAL_OR_KEYWORD, default=field.default, annotation=annotation)
        )
    return made


def _plain(kind: Any) -> Any:
    """The type of an option on the command line: a text in the place of an object, a list in that of a sequence."""
    if kind is Any:
        return str | None
    if get_origin(kind) in _UNIONS:
        plain: Any = _plain(_some(kind))
        return plain | None
    origin = get_origin(kind)
    return list[str] if origin is Sequence else kind


_UNIONS = (Union, type(int | None))


def _some(kind: Any) -> Any:
    """What may also be None, where it is not."""
    return get_args(kind)[0] if get_origin(kind) in _UNIONS else kind


@dataclass(frozen=True, slots=True)
class Taken:
    """What a command takes under `name`: values of a type (bool, str, int, float), `many` or one, and their words."""

    name: str
    annotation: Any
    mark: Option | Argument
    default: Any

    @property
    def required(self) -> bool:
        """Whether there is nothing in its place."""
        return self.default is Parameter.empty

    @property
    def many(self) -> bool:
        """Whether it is a list of values."""
        return get_origin(_some(self.annotation)) is list

    @property
    def kind(self) -> type:
        """The type of a value."""
        kind = _some(self.annotation)
        found: type = get_args(kind)[0] if self.many else kind
        return found


def taken_by(command: Callable[..., Any]) -> list[Taken]:
    """All that a command takes, in order."""
    hints = get_type_hints(command, include_extras=True)
    taken = []
    for name, parameter in Signature.from_callable(command).parameters.items():
        annotation, mark = get_args(_some(hints[name]))  # Python 3.10 wraps what is None by default into a union
        taken.append(Taken(name, annotation, mark, parameter.default))
    return taken


@dataclass(frozen=True, slots=True)
class Loaded:
    """A command, ready to run: its name, the function that is called by name with all that it takes, and its help."""

    name: str
    command: Callable[..., int | None]
    taken: Sequence[Taken]
    help: str | None
