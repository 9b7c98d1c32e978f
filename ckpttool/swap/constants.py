"""The tensors of a program that the new weights do not have: constants, and buffers that are not
saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ckpttool.core.checkpoint import Section, TensorEntry
from ckpttool.core.errors import Problem
from ckpttool.core.expression import Expression, Ref
from ckpttool.evaluate.compare import difference, same_values
from ckpttool.operands.model import ModelOperand
from ckpttool.swap.options import SwapOptions
from ckpttool.swap.result import ComparedConstant
from ckpttool.swap.weight_map import WeightMap

_REMADE = "a constant of the program, which the model's loading computes from the checkpoint"


class ModelConstants(NamedTuple):
    """The constants, `compared` with the model's. `values` are the model's values that differ, and
    `sources` say which constants get one of them.
    """

    compared: list[ComparedConstant]
    values: Mapping[str, TensorEntry]
    sources: Mapping[str, Expression]
    problems: list[Problem]


def compare_constants(
    entries: Sequence[TensorEntry],
    names: Mapping[str, str],
    code: ModelOperand | None,
    weight_map: WeightMap,
    options: SwapOptions,
) -> ModelConstants:
    """Compare the program's tensors, by their canonical names, with the model's after it has loaded
    the weights. It is a problem if they differ and no option decides.
    """
    verdict = "from_model" if options.constants else "different"
    compared, values = _compared(entries, names, code, weight_map.state_dict, verdict)
    sources: dict[str, Expression] = {}
    problems: list[Problem] = []
    for constant in compared:
        if constant.verdict == "from_model":
            sources[constant.name] = Ref(_of_model(constant.name))
        elif options.keep_constants:
            continue
        elif constant.verdict == "different":
            text = f"the model has another value for it ({constant.reason})"
            problems.append(Problem(text, constant.name, "value"))
        elif constant.verdict == "not_compared" and constant.name in weight_map.remade:
            problems.append(Problem(_REMADE, constant.name))
    return ModelConstants(compared, values, sources, problems)


def _compared(
    entries: Sequence[TensorEntry],
    names: Mapping[str, str],
    code: ModelOperand | None,
    state_dict: Section | None,
    if_different: str,
) -> tuple[list[ComparedConstant], dict[str, TensorEntry]]:
    """Return the comparisons, and the values that differ; `if_different` is their verdict."""
    if code is None or not entries:
        reason = "no code of a model was given"
        return [ComparedConstant(entry.key, "not_compared", reason) for entry in entries], {}
    model_values = code.constants([names[entry.key] for entry in entries], state_dict)
    compared: list[ComparedConstant] = []
    different: dict[str, TensorEntry] = {}
    for entry in entries:
        value = model_values[names[entry.key]]
        if isinstance(value, str):
            compared.append(ComparedConstant(entry.key, "not_compared", value))
        elif entry.storage is None:
            reason = "the program does not tell its value"
            compared.append(ComparedConstant(entry.key, "not_compared", reason))
        elif same_values(entry, value):
            compared.append(ComparedConstant(entry.key, "equal"))
        else:
            compared.append(ComparedConstant(entry.key, if_different, _difference(entry, value)))
            different[_of_model(entry.key)] = value
    return compared, different


def _difference(entry: TensorEntry, value: TensorEntry) -> str:
    if (entry.dtype, entry.shape) != (value.dtype, value.shape):
        program_has = f"the program has {entry.dtype} {list(entry.shape)}"
        return f"{value.dtype} {list(value.shape)}, {program_has}"
    differs = difference(entry, value, 0, 0)
    return "" if differs is None else differs.text


def _of_model(name: str) -> str:
    return f"{name} of the model"
