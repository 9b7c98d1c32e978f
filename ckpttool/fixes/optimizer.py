"""The command that fixes the state of a saved optimizer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ckpttool.core.strides import Shape
from ckpttool.core.text import MODEL, OLD, OLD_OPTIMIZER, OPTIMIZER, Note, Placeholder, some
from ckpttool.diffing.causes import Code
from ckpttool.diffing.result import Remedy
from ckpttool.fixes.candidates import Candidate, own_keys
from ckpttool.fixes.commands import Fixes
from ckpttool.fixes.question import DiffQuestion
from ckpttool.fixes.trial import TriedFix, try_remap
from ckpttool.operands.checkpoint import open_operand, split
from ckpttool.operands.output import FIX, command, outputs
from ckpttool.remapping.options import RemapOptions

FOREIGN = "the new model does not have these keys, and a remap would lose their values"
NO_REMAP = Note(
    "no remap makes this state fit: load the model only, and start the optimizer from scratch",
    "no-fix",
)


def optimizer_fixes(question: DiffQuestion, remedy: Remedy) -> Fixes:
    """Return the command that fixes the state: tried, unless it names what only the user knows;
    else a note.
    """
    assert question.left is not None
    if remedy.foreign_keys:
        return Fixes(notes=(Note(f"{FOREIGN}: {some(remedy.foreign_keys)}", "no-fix"),))
    if remedy.way == "drop_state":
        return Fixes(notes=(NO_REMAP,))
    word, options = _remap_for(question, remedy)
    if _has_placeholder(options):
        path = split(question.left.source)[0]
        line = command("remap", (path,), replace(options, out=next(outputs(path, word))), FIX)
        return Fixes((line,))
    trial = _try_on_file(question, word, options)
    if trial is None:
        return Fixes(notes=(NO_REMAP,))
    if not trial.stateless:
        return Fixes((trial.fix,))
    words = "the command leaves out the state of {}, which the optimizer of {right} does not have"
    return Fixes((trial.fix,), (Note.about(words, "leaves-state", some(trial.stateless)),))


def _try_on_file(question: DiffQuestion, word: str, options: RemapOptions) -> TriedFix | None:
    """Return the remap of the complete file, also if the optimizer alone is compared. It may leave
    state out that no parameter has, and also fixes the keys of the model in the file.
    """
    left = question.left
    assert left is not None
    path, optimizer_path = split(left.source)
    file, opened = left, question.opened
    if optimizer_path is not None:
        file, opened = open_operand(path), None
    file_question = replace(question, left=file, opened=opened, optimizer_path=optimizer_path)
    most = question.remaining(question.diff)
    trial = try_remap(file_question, options, word, most)
    if trial is None:
        trial = try_remap(file_question, options, word, most, loses_state=True)
    if trial is not None and (trial.after.identical or trial.stateless):
        return trial
    if file.state_dicts and options.model is not None:
        for with_keys in own_keys(file, options):
            whole = try_remap(file_question, with_keys, word, most)
            if whole is not None and whole.after.identical:
                return whole
    return trial


def _has_placeholder(options: RemapOptions) -> bool:
    """Return True if an option names what only the user knows."""
    for value in vars(options).values():
        if isinstance(value, Placeholder):
            return True
    return False


def known_remap(question: DiffQuestion, remedy: Remedy) -> Candidate | None:
    """Return the remap of a remedy; None if there is none, or if only the user knows an option."""
    if remedy.way == "drop_state":
        return None
    word, options = _remap_for(question, remedy)
    return None if _has_placeholder(options) else (word, options)


def _remap_for(question: DiffQuestion, remedy: Remedy) -> Candidate:
    """Return the remap of a remedy, with placeholders for what the question does not name."""
    return _REMAPS[remedy.way](question, remedy)


def _model(question: DiffQuestion) -> dict[str, Any]:
    """Return the options that name the model, or a placeholder."""
    return {"model": MODEL} if question.options.model is None else question.model_options


def _optimizer(question: DiffQuestion) -> Any:
    return None if question.model is None else question.model.optimizer


def _by_name(question: DiffQuestion, remedy: Remedy) -> Candidate:
    optimizer = _optimizer(question)
    options = RemapOptions(**_model(question), optimizer=optimizer, optimizer_keys=remedy.form)
    return "ordered", options


def _regrouped(question: DiffQuestion, remedy: Remedy) -> Candidate:
    return "mapped", RemapOptions(**_model(question), to_optimizer=_optimizer(question))


def _with_created_state(question: DiffQuestion, remedy: Remedy) -> Candidate:
    options = RemapOptions(
        **_model(question),
        to_optimizer=_optimizer(question),
        optimizer_keys=remedy.form,
        partial=True,
    )
    return "mapped", options


def _from_old_optimizer(question: DiffQuestion, remedy: Remedy) -> Candidate:
    to_optimizer = _optimizer(question) or OPTIMIZER
    options = RemapOptions(**_model(question), optimizer=OLD_OPTIMIZER, to_optimizer=to_optimizer)
    return "mapped", options


def _like_right(question: DiffQuestion, remedy: Remedy) -> Candidate:
    """Return the remap to the order of right. Two models are needed if the files' models have their
    parameters in different orders.
    """
    form, diff_options = remedy.form, question.options
    to_optimizer = _optimizer(question) or OPTIMIZER
    orders_differ = any(e.has(Code.KEY_ORDER, Code.DOUBT) for e in question.diff.entries)
    if not orders_differ:
        options = RemapOptions(**_model(question), to_optimizer=to_optimizer, optimizer_keys=form)
        return form or "ordered", options
    options = RemapOptions(
        model=OLD,
        to_model=diff_options.model or MODEL,
        materialize=diff_options.materialize,
        to_optimizer=to_optimizer,
        optimizer_keys=form,
    )
    return form or "ordered", options


def _keys_by_model(question: DiffQuestion, remedy: Remedy) -> Candidate:
    return remedy.form or "", _by_name(question, remedy)[1]


def _keys(question: DiffQuestion, remedy: Remedy) -> Candidate:
    return remedy.form or "", RemapOptions(optimizer_keys=remedy.form)


def _from_old_model(question: DiffQuestion, remedy: Remedy) -> Candidate:
    diff_options, optimizer = question.options, _optimizer(question)
    old_optimizer = None
    if optimizer is not None and remedy.same_groups is not None:
        old_optimizer = optimizer if remedy.same_groups else OLD_OPTIMIZER
    options = RemapOptions(
        model=OLD,
        optimizer=old_optimizer,
        to_model=diff_options.model,
        materialize=diff_options.materialize,
        to_optimizer=optimizer,
        partial=_lacks_values(question),
    )
    return "mapped", options


def _lacks_values(question: DiffQuestion) -> bool:
    """Return whether the model has values that no tensor of the file can become, whatever its
    name.
    """
    left = question.left
    if question.model is None or left is None or not left.state_dicts:
        return False
    largest = max(left.state_dicts, key=lambda section: len(section.keys))
    in_file, in_model = Counter[Shape](), Counter[Shape]()
    in_file.update(entry.shape for entry in largest.tensors)
    for key in question.model.names().serialized:
        if key.shape is not None:
            in_model[key.shape] += 1
    missing = sum(map(math.prod, (in_model - in_file).elements()))
    left_over = sum(map(math.prod, (in_file - in_model).elements()))
    return missing > left_over


# by the way of a remedy
_REMAPS: dict[str, Callable[[DiffQuestion, Remedy], Candidate]] = {
    "by_name": _by_name,
    "regroup": _regrouped,
    "create_state": _with_created_state,
    "old_optimizer": _from_old_optimizer,
    "like_right": _like_right,
    "keys_by_model": _keys_by_model,
    "keys": _keys,
    "old_model": _from_old_model,
}
