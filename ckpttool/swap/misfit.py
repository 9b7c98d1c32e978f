"""Weights that do not fit a program: the error, and what to do about it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from ckpttool.containers.program import INSIDE, is_inlined, program_of
from ckpttool.core.checkpoint import Checkpoint, Section, TensorEntry
from ckpttool.core.errors import Problem, Refused
from ckpttool.core.names import Names
from ckpttool.core.text import plural, shell
from ckpttool.kinds.adapters import adapter_of
from ckpttool.kinds.quantized import parts_by_torch, quantized_weights
from ckpttool.operands.output import outputs
from ckpttool.ruleset.infer_rules import drops
from ckpttool.swap.weight_map import constants_of

# What to do about weights that do not fit: a kind, and the hint of the command line.
Advice = Literal[
    "constants",
    "values",
    "no_values",
    "code",
    "compiled",
    "frozen",
    "adapter",
    "quantized",
    "left_over",
    "model",
    "alone",
    "cast",
    "compare",
]
HINTS: dict[Advice, str] = {
    "constants": "some of them are constants of the program: --constants swaps these too",
    "values": "--constants takes the model's values, --keep-constants keeps the program's",
    "no_values": "--constants takes them from the model's code: add --model package.module:attr, or"
    " file.py:attr; without --constants the program's are kept",
    "code": "a list of names cannot compute them, the model's code can: --model"
    " package.module:attr, or file.py:attr",
    "compiled": INSIDE,
    "frozen": "the program has no weights: torch.jit.freeze(), for example, makes them constants of"
    " its code; save the program again without it",
    "adapter": "the weights have an adapter that is not merged into them: merge it first (PEFT's"
    " merge_and_unload() returns the merged model), save its state_dict(), and swap that",
    "quantized": "the weights are quantized: load them with the library that quantized them, and"
    " save their values (FP8, scaled int8 and MXFP4: `dequantize` in a rules file of `ckpttool"
    " remap`)",
    "left_over": "all weights of the program are there: leave the other keys out, which loses"
    " their effect on the model's output, and try again",
    "model": "state_dict hooks may rename keys when a model is saved: pass the model's definition, "
    "--model file.py:build",
    "alone": "the program has the names of these weights: leave --model out",
    "cast": "--cast converts them to the program's dtypes",
    "compare": "the program may be of another version of the model",
}


class Misfit(Refused):
    """The weights do not fit. `advice` is the kind of the hint, for callers with another hint."""

    def __init__(self, program: str, advice: Advice, problems: Sequence[Problem]) -> None:
        message = f"the weights do not fit {program}: {plural(len(problems), 'problem')}"
        super().__init__(message, hint=HINTS[advice], problems=problems)
        self.advice = advice


def for_compiled_code(
    program: Checkpoint, problem: Problem, entries: Mapping[str, object]
) -> Problem:
    """Return the problem of a weight that is left over, in the words for compiled code: it does not
    use the weight, or holds its values. Other problems stay as they are.
    """
    file, entry = program_of(program), entries.get(problem.key)
    if file is None or not file.compiled or problem.kind != "left_over":
        return problem
    if not isinstance(entry, TensorEntry):
        return problem
    if not is_inlined(entry):
        return replace(problem, problem="unexpected: the compiled code does not use it")
    size = plural(entry.numel, "element")
    text = f"{size}: written into the compiled code, and cannot be swapped"
    return replace(problem, problem=text)


def kind_of_advice(
    program: Checkpoint,
    names: Names | None,
    weights: Section,
    problems: Sequence[Problem],
    constants: bool,
) -> Advice:
    """Return the kind of the hint for all these problems, the most specific one that holds."""
    file = program_of(program)
    keys: defaultdict[str, set[str]] = defaultdict(set)  # by the kind of problem
    for problem in problems:
        keys[problem.kind].add(problem.key)
    if keys.keys() == {"value"}:
        return "values"
    if keys.keys() == {"no_value"}:
        return "no_values"
    left_over = keys.get("left_over", set())
    # without these keys the other weights are not what was trained
    if adapter_of(left_over) is not None:
        return "adapter"
    if _are_quantized(weights, left_over):
        return "quantized"
    constant_names = {entry.key for entry in constants_of(program)}
    if not constants and any(problem.key in constant_names for problem in problems):
        return "constants"
    if "opaque" in keys:
        return "code"
    if "left_over" in keys and file is not None and file.compiled:
        return "compiled"
    if keys.keys() == {"left_over"}:
        return "left_over" if program.section("").tensors else "frozen"
    has_other_names = not keys.keys().isdisjoint(("left_over", "missing", "not_in_model"))
    if names is None and has_other_names:
        return "model"
    if "not_in_model" in keys and keys.keys().isdisjoint(("left_over", "missing")):
        return "alone"
    if "dtype" in keys and "shape" not in keys and not has_other_names:
        return "cast"
    return "compare"


def _are_quantized(weights: Section, keys: Collection[str]) -> bool:
    """Return whether some of the keys are parts of quantized weights."""
    if any(not set(keys).isdisjoint(weight.keys) for weight in quantized_weights(weights)):
        return True
    return any(True for _ in parts_by_torch(weights, keys))


def hint_to_drop_left_over(error: Misfit, weights: Checkpoint, new: Section) -> str:
    """Return the hint with the command that leaves out the keys without a weight."""
    left_over = [problem.key for problem in error.problems]
    patterns = drops(left_over, new.by_key().keys() - left_over) or ("PATTERN",)
    words = []
    for pattern in patterns:
        words += ["--drop", pattern]
    part = next(outputs(weights.source, "part"))
    command = shell("ckpttool", "remap", weights.source, *words, "-o", part)
    return (
        "all weights of the program are there; without the other keys, and their effect on the"
        f" model's output: {command}"
    )
