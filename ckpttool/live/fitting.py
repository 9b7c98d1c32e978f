"""Find what a live model and its optimizer load from a checkpoint: the section as it is, or after
the remap that `diff` suggests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpttool.core.checkpoint import Checkpoint, Section
from ckpttool.core.errors import Problem, Refused
from ckpttool.core.optimizer_state import ID
from ckpttool.core.text import code_of, notes_with, plural
from ckpttool.diffing.causes import Code
from ckpttool.diffing.options import DiffOptions
from ckpttool.diffing.result import Diff, statuses_of
from ckpttool.diffing.run import run
from ckpttool.fixes.fix import applicable
from ckpttool.fixes.optimizer import known_remap
from ckpttool.fixes.question import DiffQuestion
from ckpttool.fixes.suggest import answered
from ckpttool.fixes.trial import try_remap
from ckpttool.operands.checkpoint import model_section, open_operand
from ckpttool.operands.model import ModelOperand
from ckpttool.operands.output import command
from ckpttool.remapping.options import RemapOptions
from ckpttool.remapping.planning import plan_remap
from ckpttool.remapping.resolve import loading_model


def fitting_model(
    source: Checkpoint, model: ModelOperand, cast: bool
) -> tuple[Section, str | None, bool]:
    """Return a section that a strict load takes, the command that makes it, if there is one, and
    whether only the model's own code loads it: it lacks keys, or has other shapes.
    """
    options = DiffOptions(model=model, ignore_dtype=cast)
    diff, fix = run(source, None, options, model), None
    if not diff.identical:
        answer = answered(DiffQuestion(source, None, options, model, diff))
        try:
            fix = applicable(answer, command("diff", (source.source,), options), casts=False)
        except Refused as error:
            if not cast and "dtype" in statuses_of(diff.entries):
                error.hint = f"cast=True converts the dtypes; {error.hint}"
            elif "missing" in statuses_of(diff.entries):
                error.hint = f"partial=True loads what fits, and returns the rest; {error.hint}"
            raise
        source = open_operand(fix.source) if fix.source else source
        saved_by = None if fix.options.model is None else model
        source = plan_remap(source, fix.options, saved_by, None).result
        diff = run(source, None, options, model, infers=False)
    _check_values_stay(diff)
    by_code = bool(statuses_of(diff.entries) & {"missing", "shape", "unexpected"})
    return model_section(source), None if fix is None else str(fix), by_code


def _check_values_stay(diff: Diff) -> None:
    """Raise `Refused` if a load hook computes other values than the file has."""
    problems = []
    for entry in diff.entries:
        if entry.has(Code.LOAD_HOOK_CHANGES):
            problems += [Problem(entry.why(), key, "opaque") for key in entry.left]
    if problems:
        raise Refused(
            f"only the model's own code loads {plural(len(problems), 'tensor')} of this file",
            hint="let the model load the state dict itself, with load_state_dict",
            problems=problems,
        )


def fitting_state(
    source: Checkpoint, model: ModelOperand, cast: bool
) -> tuple[str, Mapping[Any, Any]]:
    """Return the path of the optimizer's state, and the state by the ids of the optimizer of
    `model`.
    """
    options = DiffOptions(model=model, optimizer=model.optimizer)
    diff = after = run(source, None, options, model)
    question = DiffQuestion(source, None, options, model, diff)
    if diff.remedy is None:
        remap = RemapOptions(model=model, optimizer=model.optimizer, optimizer_keys=ID)
    else:
        candidate = known_remap(question, diff.remedy)
        fix = None if candidate is None else try_remap(question, candidate[1], candidate[0])
        if candidate is None or fix is None or fix.after.remedy is not None:
            raise _no_fix(question)
        remap, after = replace(candidate[1], optimizer_keys=ID), fix.after
    converts = notes_with(after.notes, "converts")
    if converts and not cast:
        hint = "cast=True converts them"
        raise Refused(
            f"the optimizer state of {source.source} has other dtypes: {converts[0]}", hint=hint
        )
    saved_by = model.with_optimizer(remap.optimizer)
    result = plan_remap(source, remap, saved_by, loading_model(remap, saved_by)).result
    (section,) = result.optimizers
    assert section.mapping is not None
    return section.path, section.mapping


def _no_fix(question: DiffQuestion) -> Refused:
    """Return the refusal of a state that no remap brings into the form of the optimizer."""
    answer, title = answered(question), question.diff.left
    # `fitting_model` fixes what other sections lack
    notes = [note for note in answer.notes if code_of(note) != "other-sections"]
    hint = "; ".join((*answer.fix, *notes[-2:])) or "start the optimizer from scratch"
    return Refused(
        f"the optimizer state of {title} does not fit this optimizer",
        hint=hint,
        problems=question.diff.problems((title, "the optimizer")),
    )
