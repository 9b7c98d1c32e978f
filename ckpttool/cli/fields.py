"""Commands from dataclasses: each field that is marked as an option becomes one of the command's.

What a command takes is written down once, in its signature; `parse` and `by_typer` both read it from there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import MISSING, fields
from inspect import Parameter, Signature
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from ckpttool.cli.streams import quiet
from ckpttool.cli.summary import watched
from ckpttool.limits import limited, raised
from ckpttool.options import Argument, Option, option
from ckpttool.values import dataclass

Options = TypeVar("Options")


def with_options(
    options: type[Options], without: Collection[str] = ()
) -> Callable[[Callable[..., int | None]], Callable[..., int | None]]:
    """The function with the fields of the dataclass `options` as parameters of its own.

    It is called with its own parameters by name, and with `options`, filled from the command line. `without` are fields
    that it takes in another way.
    """
    hints: dict[str, Any] = get_type_hints(options, include_extras=True)
    own_fields = [field for field in fields(options) if field.name not in without]  # type: ignore[arg-type]
    names = [field.name for field in own_fields]
    made = [_parameter(field, hints[field.name]) for field in own_fields]

    def decorate(function: Callable[..., int | None]) -> Callable[..., int | None]:
        own_hints = get_type_hints(function, include_extras=True)
        own = Signature.from_callable(function).parameters
        first = [own[name].replace(annotation=own_hints[name]) for name in own if own[name].default is Parameter.empty]
        last = [
            own[name].replace(annotation=own_hints[name]) for name in own if own[name].default is not Parameter.empty
        ]
        first = [parameter for parameter in first if parameter.name != "options"]

        def command(**given: Any) -> int | None:
            asked = options(**{name: given.pop(name) for name in names})
            return function(options=asked, **given)

        parameters = [*first, *made, *last]
        command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        command.__doc__ = function.__doc__
        return command

    return decorate


def with_common(function: Callable[..., int | None]) -> Callable[..., int | None]:
    """The command with the options that all have: the limits that ``--limit`` raises, and whether it is ``--quiet``."""

    def command(**given: Any) -> int | None:
        given.pop("no_defaults", None)
        limits, is_quiet, verbose = (given.pop(name, None) for name in ("limit", "quiet", "verbose"))
        with limited(raised(limits or ())), quiet(bool(is_quiet)), watched(bool(verbose)):
            return function(**given)

    signature = Signature.from_callable(function)
    own = [p.replace(annotation=hint) for p, hint in zip(signature.parameters.values(), _hints(function, signature))]
    command.__signature__ = Signature([*own, *_COMMON])  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *_COMMON)}
    command.__doc__ = function.__doc__
    return command


def _hints(function: Callable[..., Any], signature: Signature) -> list[Any]:
    hints = get_type_hints(function, include_extras=True)
    return [hints[name] for name in signature.parameters]


def _common(name: str, kind: Any, default: Any, mark: Option) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, mark])


_COMMON = (
    _common(
        "limit",
        list[str] | None,
        None,
        option(
            "--limit",
            metavar="NAME=VALUE",
            help="Raise a limit that an error names; VALUE may end in K, M, G. Repeatable.",
        ),
    ),
    _common("quiet", bool, False, option("-q", "--quiet", help="Print errors only; the exit status is the answer.")),
    _common(
        "verbose",
        bool,
        False,
        option("-v", "--verbose", help="Say on stderr what was read, moved, computed and fetched, and the time."),
    ),
    _common(
        "no_defaults",
        bool,
        False,
        option("--no-defaults", help="Take no option from CKPTTOOL_* variables and pyproject.toml."),
    ),
)


def _parameter(field: Any, hint: Any) -> Parameter:
    kind, mark = get_args(hint)
    default = None if field.default is MISSING else field.default
    return Parameter(
        field.name, Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=Annotated[_plain(kind), mark]
    )


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
    return next(part for part in get_args(kind) if part is not type(None)) if get_origin(kind) in _UNIONS else kind


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
