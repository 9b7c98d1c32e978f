"""Options of the library's functions and of the commands: type, metavar and help, declared once."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import fields
from functools import wraps
from inspect import Parameter, Signature
from typing import Annotated, Any, TypeVar

from ckpttool.core.limits import spent
from ckpttool.core.values import dataclass

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Option:
    """An option: its `flags` (``-o``, ``--output``), the metavar of its value, its help.

    `least` is the smallest number that it takes; `check` is called with a value, and raises `CkptError` for an invalid
    one.
    """

    flags: tuple[str, ...]
    metavar: str | None
    help: str
    least: float | None = None
    check: Callable[[Any], object] | None = None


@dataclass(frozen=True, slots=True)
class Argument:
    """A positional argument: the metavar of its value, its help."""

    metavar: str
    help: str


def option(
    *flags: str,
    help: str,
    metavar: str | None = None,
    least: float | None = None,
    check: Callable[[Any], object] | None = None,
) -> Option:
    """Mark a field as an option: ``Annotated[str | None, option("--to", metavar="FORM", help="…")]``."""
    return Option(flags, metavar, help, least, check)


def expand_options(
    options: type[Any] | None = None, only: Collection[str] | None = None
) -> Callable[[Function], Function]:
    """Show the fields of the dataclass, or `only` these, in the function's signature instead of ``**options``.

    A call with another keyword raises TypeError, with the closest known name. The function gets an `os.PathLike` as
    text, also in a list.
    """

    def decorate(function: Function) -> Function:
        named = [
            p for p in Signature.from_callable(function).parameters.values() if p.kind is not Parameter.VAR_KEYWORD
        ]
        names = {parameter.name for parameter in named}
        more = [
            Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default)
            for field in (fields(options) if options is not None else ())
            if field.name not in names and (only is None or field.name in only)
        ]
        known = [*names, *(parameter.name for parameter in more)]

        @wraps(function)
        def checked(*args: Any, **keywords: Any) -> Any:
            for name in keywords:
                if name not in known:
                    from difflib import get_close_matches

                    hint = "".join(f"; did you mean {near!r}?" for near in get_close_matches(name, known, 1))
                    raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}{hint}")
            spent.clear()
            texts = {name: _as_text(value) for name, value in keywords.items()}
            return function(*map(_as_text, args), **texts)

        checked.__signature__ = Signature([*named, *more])  # type: ignore[attr-defined]
        return checked  # type: ignore[return-value]

    return decorate


def _as_text(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if isinstance(value, (list, tuple)) and any(isinstance(one, os.PathLike) for one in value):
        return [os.fsdecode(one) if isinstance(one, os.PathLike) else one for one in value]
    return value


def keywords_of(options: Any) -> dict[str, Any]:
    """Return the options as keywords of the function that takes them."""
    return {field.name: getattr(options, field.name) for field in fields(options)}


def several(value: str | Iterable[str] | None) -> tuple[str, ...] | None:
    """Return the values of an option that may be repeated: in Python a string is one value, not its letters."""
    if value is None:
        return None
    return (value,) if isinstance(value, str) else tuple(value)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Whose names: MODEL, and how it is built. In Python an object may take the place of a text."""

    model: Annotated[
        Any,
        option("--model", metavar="MODEL", help="package.module:attr, file.py:attr, a names file or a .pt2 program."),
    ] = None
    model_kwargs: Annotated[
        Any, option("--model-kwargs", metavar="JSON", help="Arguments for MODEL's factory: '{\"layers\": 4}'.")
    ] = None
    materialize: Annotated[
        bool, option("--materialize", help="Build MODEL with real weights instead of on the meta device.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions(ModelOptions):
    """MODEL, and the optimizer of its parameters."""

    optimizer: Annotated[
        Any, option("--optimizer", metavar="OPTIMIZER", help="file.py:make, a function of the model; or a class.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Where an output goes, and how it is written."""

    out: Annotated[str | None, option("-o", "--output", metavar="OUT", help="The file to write.")] = None
    in_place: Annotated[bool, option("--in-place", help="Change the source itself, atomically.")] = False
    no_undo: Annotated[bool, option("--no-undo", help="With --in-place: keep nothing for `ckpttool undo`.")] = False
    force: Annotated[bool, option("--force", help="Overwrite files that exist.")] = False
    dry_run: Annotated[bool, option("--dry-run", help="Say what would be written, and write nothing.")] = False
    verify: Annotated[
        bool, option("--verify", help="Prove that OUT holds every tensor: read it back, or by its store's checksums.")
    ] = False
    keep_pickled_code: Annotated[
        bool, option("--keep-pickled-code", help="Write dangerous pickle imports too, which run when OUT is loaded.")
    ] = False
    no_fsync: Annotated[bool, option("--no-fsync", help="Do not wait until the disk has the bytes.")] = False

    def target(self, source: str) -> str | None:
        """Return the path to write, or None if nothing is written."""
        return source if self.in_place else self.out


@dataclass(frozen=True, kw_only=True)
class FixOptions(OptimizerOptions, OutputOptions):
    """All options of a fix."""
