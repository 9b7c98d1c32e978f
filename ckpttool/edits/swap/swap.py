"""Puts a checkpoint's weights into an exported program: which key feeds which FQN, and all that stands against it.

The program's graph and sample inputs are not looked at; only the storages of its weights are replaced, and those of its
constants where that is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ckpttool import expression as ex
from ckpttool.checkpoint import Checkpoint, Section, TensorEntry
from ckpttool.edits.swap.feed import chosen_constants, constants_of, feed_by_keys, feed_by_model
from ckpttool.edits.swap.fit import fit_all
from ckpttool.edits.swap.program import replaced
from ckpttool.errors import Problem, Refused
from ckpttool.evaluate.apply import run_code
from ckpttool.evaluate.compare import same_values
from ckpttool.expression import Expression
from ckpttool.formats.pt2.aotinductor import INSIDE, OUTSIDE
from ckpttool.formats.pt2.program import program_of
from ckpttool.names import Names
from ckpttool.operands.model import ModelOperand
from ckpttool.words import plural

SCHEMA = "ckpttool.swap/1"


@dataclass(frozen=True, slots=True)
class Swap:
    """The program with its new weights. `sources`: FQN -> expression over the checkpoint's keys.

    `form` is the form that the checkpoint's keys were read in; `ignored` are its entries that no program holds.
    """

    program: Checkpoint
    sources: Mapping[str, Expression]
    form: str
    ignored: tuple[str, ...]

    @property
    def constants(self) -> tuple[str, ...]:
        """The program's constants that stay as they are."""
        return tuple(entry.key for entry in constants_of(self.program) if entry.key not in self.sources)

    @property
    def by_code(self) -> tuple[str, ...]:
        """The weights that were computed by running the model's own loading on the checkpoint."""
        return tuple(fqn for fqn, source in self.sources.items() if any(ex.calls(source)))

    def to_json(self, program: str, weights: str, output: str) -> dict[str, object]:
        """The `swap-weights` object of the contract."""
        program_file = program_of(self.program)
        return {
            "schema": SCHEMA,
            "program": program,
            "weights": weights,
            "output": output,
            "swapped": len(self.sources),
            "kept": [],
            "constants": list(self.constants),
            "layout": self.program.format if program_file is None else program_file.layout,
            "from": self.form,
            "ignored": list(self.ignored),
            "by_code": list(self.by_code),
        }


# What to do about weights that do not fit: a kind, and what the command line says of it.
Advice = Literal["constants", "compiled", "model", "cast", "compare"]
_HINTS: dict[Advice, str] = {
    "constants": "some of them are constants of the program: --constants swaps these too",
    "compiled": INSIDE,
    "model": "state_dict hooks may rename keys when a model is saved: pass the model's definition, "
    "--model file.py:build",
    "cast": "--cast converts them to the program's dtypes",
    "compare": "`ckpttool diff PROGRAM WEIGHTS` compares the two; the program may be of another version of the model",
}


class Misfit(Refused):
    """The weights do not fit. `advice` is the kind of the hint, for callers who have other words for it."""

    def __init__(self, advice: Advice, problems: Sequence[Problem]) -> None:
        message = f"the weights do not fit the program: {plural(len(problems), 'problem')}"
        super().__init__(message, hint=_HINTS[advice], problems=problems)
        self.advice = advice


def swap(
    program: Checkpoint,
    weights: Section,
    names: Names | None = None,
    *,
    form: str | None = None,
    cast: bool = False,
    packed: bool = False,
    constants: bool = False,
    code: ModelOperand | None = None,
) -> Swap:
    """`program` with every weight replaced by what `weights` holds for it, and with `constants` every constant that it
    holds too.

    Raises `Refused`, with all problems at once, where a weight is missing, left over, of another shape or dtype (`cast`
    allows another dtype), or where the names of one tensor got different values. `packed` also takes what is no dense
    tensor (quantized, sparse, subclasses): in memory such a weight is an object like any other. `code` is the model
    itself, which computes what `names` do not say.
    """
    target = _target(program)
    chosen = chosen_constants(program, weights) if constants else {}
    taken = {key for source in chosen.values() for key in ex.refs(source)}
    rest = replace(weights, tensors=tuple(entry for entry in weights.tensors if entry.key not in taken))
    arguments = None if code is None else code.arguments
    feed = feed_by_keys(target, rest) if names is None else feed_by_model(target, rest, names, form, arguments)
    feed.sources.update(chosen)
    runners = {} if code is None else {run.way: code.run for run in feed.runs}
    found, have = run_code(weights, list(feed.sources.values()), feed.runs, runners)
    sources = dict(zip(feed.sources, found))
    wanted = (*target.tensors, *(entry for entry in constants_of(program) if entry.key in chosen))
    fitted, misfits = fit_all(wanted, sources, have, cast, packed)
    problems = [*feed.problems, *misfits]
    for section in program.sections:
        problems += _untied(section, fitted, weights, feed.twins if section is target else ())
    if problems:
        raise Misfit(_advice(program, names, problems), problems)
    sections = tuple(replace(section, tensors=replaced(section.tensors, fitted)) for section in program.sections)
    return Swap(replace(program, sections=sections), feed.sources, feed.form, tuple(feed.ignored))


def _target(program: Checkpoint) -> Section:
    """The program's state dict. Raises `Refused` where the file holds none that could be replaced."""
    if not program.sections:
        raise Refused(f"{program.source} is compiled code that holds its weights itself", hint=OUTSIDE)
    return program.section("")


def _untied(
    target: Section, fitted: Mapping[str, TensorEntry], weights: Section, twins: Sequence[tuple[str, str]]
) -> list[Problem]:
    """Names of one tensor that would get different values: the program's own ties, and those of the model."""
    have = weights.by_key()
    pairs = [(key, first, fitted.get(key), fitted.get(first)) for key, first in target.aliases().items()]
    tensors = {key: entry for key, entry in have.items() if isinstance(entry, TensorEntry)}
    pairs += [(key, twin, tensors.get(key), tensors.get(twin)) for key, twin in twins]
    return [
        Problem(f"tied to {first}, and its new value is another one", key)
        for key, first, left, right in pairs
        if left is not None and right is not None and not same_values(left, right)
    ]


def _advice(program: Checkpoint, names: Names | None, problems: Sequence[Problem]) -> Advice:
    kinds, file = {problem.kind for problem in problems}, program_of(program)
    if {entry.key for entry in constants_of(program)} & {problem.key for problem in problems}:
        return "constants"
    if "left_over" in kinds and file is not None and file.compiled:
        return "compiled"
    if names is None and kinds & {"left_over", "missing"}:
        return "model"
    return "cast" if "dtype" in kinds and not kinds & {"shape", "left_over", "missing"} else "compare"
