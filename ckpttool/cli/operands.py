"""The MODEL operand and what goes with it, the same for every command that takes one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpttool.errors import CkptError
from ckpttool.naming.names import Names

if TYPE_CHECKING:
    from ckpttool.naming.load_model import LoadedModel

Model = Annotated[
    str | None,
    typer.Option("--model", metavar="MODEL", help="package.module:attr, file.py:attr, a names file or a .pt2 program."),
]
ModelKwargs = Annotated[
    str, typer.Option("--model-kwargs", metavar="JSON", help="Arguments for MODEL's factory: '{\"layers\": 4}'.")
]
Materialize = Annotated[
    bool, typer.Option("--materialize", help="Build MODEL with real weights instead of on the meta device.")
]
All = Annotated[bool, typer.Option("--all", help="List every key instead of one line for each cause.")]


def load_names(operand: str, kwargs: str = "{}", materialize: bool = False) -> Names:
    """The names of the model that `operand` names: traced, or read from a names file or a program.

    Only a model's own code needs torch. Raises `CkptError` where the operand is none of these.
    """
    if operand.endswith(".json"):
        return Names.from_json(_json(Path(operand)), operand)
    if operand.endswith(".pt2"):
        from ckpttool.naming.exported import names

        return names(operand)
    from ckpttool.naming.trace import trace

    return trace(load_definition(operand, kwargs, materialize))


def is_definition(operand: str) -> bool:
    """Whether the operand is code, whose loading can be tried out, and not a file of names."""
    return not operand.endswith((".json", ".pt2"))


def load_definition(operand: str, kwargs: str = "{}", materialize: bool = False) -> LoadedModel:
    """The model's definition. Raises `CkptError` where `kwargs` is no JSON object or the definition is not found."""
    try:
        arguments: Any = json.loads(kwargs)
    except ValueError as error:
        raise CkptError(f"--model-kwargs is not JSON: {error}", hint="as in --model-kwargs '{\"layers\": 4}'") from None
    if not isinstance(arguments, dict):
        raise CkptError("--model-kwargs is not a JSON object", hint="as in --model-kwargs '{\"layers\": 4}'")
    from ckpttool.naming.load_model import load

    return load(operand, arguments, materialize)


def options(model: str, kwargs: str, materialize: bool) -> list[str]:
    """The same operand as words of a command line, for the commands that a report proposes."""
    words = ["--model", model]
    if kwargs != "{}":
        words += ["--model-kwargs", kwargs]
    return [*words, "--materialize"] if materialize else words


def read_json(path: str, what: str) -> Any:
    """The JSON in the file at `path`. Raises `CkptError` where there is none; `what` says what was expected."""
    try:
        return _json(Path(path))
    except CkptError as error:
        raise CkptError(error.message, hint=what) from error


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CkptError(
            f"{path}: no such file", hint="write a names file with `ckpttool trace MODEL -o names.json`"
        ) from None
    except (ValueError, RecursionError) as error:
        raise CkptError(f"{path} is not JSON: {error}", hint="write it with ckpttool") from None
