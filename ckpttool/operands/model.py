"""The MODEL operand and what goes with it, the same for every command that takes one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpttool.errors import CkptError
from ckpttool.formats.containers import json_text
from ckpttool.names import Names
from ckpttool.operands.checkpoint import split
from ckpttool.plan import Plan

if TYPE_CHECKING:
    from ckpttool.tracing.load_model import LoadedModel


def load_names(operand: str, kwargs: str = "{}", materialize: bool = False, optimizer: str | None = None) -> Names:
    """The names of the model that `operand` names: traced, or read from a names file or a program.

    With `optimizer` the ids that it gives to the parameters are among them. Only code needs torch. Raises `CkptError`
    where an operand is none of these.
    """
    if optimizer is not None:
        return _with_optimizer(operand, kwargs, materialize, optimizer)
    if operand.endswith(".json"):
        return read_names(operand)
    path, program = split(operand)
    if path.endswith(".pt2"):
        from ckpttool.operands.program_names import names

        return names(path, program)
    from ckpttool.tracing.trace import trace

    return trace(load_definition(operand, kwargs, materialize))


def read_names(path: str) -> Names:
    """The names in a names file. Raises `CkptError` where it is none."""
    return Names.from_json(json_text.read_file(path, "write one with `ckpttool trace MODEL -o names.json`"), path)


def read_plan(path: str) -> Plan:
    """The plan in a file. Raises `CkptError` where it is none."""
    return Plan.from_json(json_text.read_file(path, "write one with `ckpttool remap … --save-plan PLAN.json`"), path)


def _with_optimizer(operand: str, kwargs: str, materialize: bool, optimizer: str) -> Names:
    if not is_definition(operand):
        raise CkptError(
            f"--optimizer needs the model's code, and {operand} is a file of names",
            hint="`ckpttool trace MODEL --optimizer O -o names.json` writes a names file that has the ids",
        )
    from ckpttool.tracing.load_optimizer import load_optimizer, with_optimizer
    from ckpttool.tracing.trace import trace

    model = load_definition(operand, kwargs, materialize)
    return with_optimizer(trace(model), model, load_optimizer(optimizer))


def is_definition(operand: str) -> bool:
    """Whether the operand is code, whose loading can be tried out, and not a file of names."""
    return not split(operand)[0].endswith((".json", ".pt2"))


def load_definition(operand: str, kwargs: str = "{}", materialize: bool = False) -> LoadedModel:
    """The model's definition. Raises `CkptError` where `kwargs` is no JSON object or the definition is not found."""
    try:
        arguments: Any = json_text.loads(kwargs)
    except ValueError as error:
        raise CkptError(f"--model-kwargs is not JSON: {error}", hint="as in --model-kwargs '{\"layers\": 4}'") from None
    if not isinstance(arguments, dict):
        raise CkptError("--model-kwargs is not a JSON object", hint="as in --model-kwargs '{\"layers\": 4}'")
    from ckpttool.tracing.load_model import load

    return load(operand, arguments, materialize)


def options(model: str, kwargs: str, materialize: bool) -> list[str]:
    """The same operand as words of a command line, for the commands that a report proposes."""
    words = ["--model", model]
    if kwargs != "{}":
        words += ["--model-kwargs", kwargs]
    return [*words, "--materialize"] if materialize else words
