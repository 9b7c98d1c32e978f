"""Add the commands that fix a diff to it, and inferred rules if they fix more."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CkptError
from ckpttool.core.names import RUNTIME, SERIALIZED
from ckpttool.core.text import MODEL, OLD, OPTIMIZER, Info, Note, notes_with
from ckpttool.diffing.models import is_written_program
from ckpttool.diffing.result import Diff, Fix, Unfixed, statuses_of
from ckpttool.fixes.choose import tried_fixes
from ckpttool.fixes.commands import Fixes
from ckpttool.fixes.presets import known_names, with_preset
from ckpttool.fixes.question import DiffQuestion
from ckpttool.fixes.rules_file import Rules, by_file, renamed, suggested, with_file
from ckpttool.fixes.search import by_rules
from ckpttool.fixes.trial import TriedFix, try_remap
from ckpttool.fixes.unfixed import advice_on, unfixed_by
from ckpttool.operands.checkpoint import model_section
from ckpttool.operands.output import command, outputs
from ckpttool.remapping.options import RemapOptions
from ckpttool.remapping.planning import plan_remap

_RULES = ("--rule", "--rules", "--suggest", "rule=", "rules=")  # words of a line, and of Python


def _has_rules(line: str) -> bool:
    """Return whether a command renames by rules, or writes a file of them."""
    words = re.findall(r"[\w-]+=?", line)
    return not set(words).isdisjoint(_RULES)


def answered(question: DiffQuestion, suggests: bool = False) -> Diff:
    """Return the diff with the fixes that apply. `suggests`: also give the inferred rules if no
    command needs their file.

    Nothing fixes an adapter on one side. A preset that is known by the names comes next, then the
    commands that were tried on the index. If these leave differences, parts of left are named that
    have right's names, or rules are inferred: between two checkpoints, for an adapter, to a model.
    """
    if _has_one_adapter(question):
        unfixed = unfixed_by(question, None)
        return Fixes(unfixed=unfixed).added_to(replace(question.diff, inferred=None))
    names = None if suggests else known_names(question)
    if names is not None:
        answer = with_preset(question, names)
        if answer is not None:
            return answer
        notes = (*question.diff.notes, names.note)
        question = replace(question, diff=replace(question.diff, notes=notes))
    fixes = tried_fixes(question)
    if fixes.unfixed and question.parts:
        return _with_parts(question, fixes)
    if question.left is None:
        return fixes.added_to(question.diff)
    if question.right is not None:
        return _with_rules_between(question, fixes, suggests)
    if question.diff.asks == "adapter" and not fixes.commands:
        line = renamed(question.left.source, RemapOptions(rule=("FROM => TO",)))
        note = Info(f"an adapter follows the rules that rename its base: {line}", "other-names")
        return fixes._replace(notes=(*fixes.notes, note)).added_to(question.diff)
    return _with_rules_to_model(question, fixes, suggests)


def _has_one_adapter(question: DiffQuestion) -> bool:
    """Return whether only one of two checkpoints has an adapter: no rename turns one into the
    other. A note of the diff says so, and how the adapter is merged.
    """
    if question.right is None:
        return False
    return bool(notes_with(question.diff.notes, "adapter"))


def _with_parts(question: DiffQuestion, fixes: Fixes) -> Diff:
    """Return the diff with a note on the parts of left that have the names of right: the user must
    choose one.
    """
    left, parts = question.left, question.parts
    assert left is not None
    out = next(outputs(left.source, parts[0].rpartition(".")[2]))
    line = command("remap", (left.source,), RemapOptions(select=parts[0], out=out))
    words = "{left} has the names and shapes of {right} below {}; to take them: {}"
    if len(parts) > 1:
        words = "{left} has names of {right} below each of {}; to take one: {}"
    note = Note.about(words, "several-parts", ", ".join(parts), line)
    fixes = fixes._replace(notes=(*fixes.notes, note))
    return fixes.added_to(replace(question.diff, inferred=None))


def _with_rules_between(question: DiffQuestion, fixes: Fixes, suggests: bool) -> Diff:
    """Return the diff of two checkpoints with the commands, and the rules from left's names to
    right's.
    """
    (left, right), diff = question.two, question.diff
    compares_values = question.options.comparison is not None
    rules = question.rules
    if compares_values:
        rules = suggested(diff.entries, diff.inferred, left, right, compares_values)
    if rules is None or diff.inferred is None:
        return fixes.added_to(diff)
    trial = None
    needs_file = rules.few is None and (not fixes.commands or fixes.is_partial)
    if suggests or (needs_file and not is_written_program(left)):
        trial = by_rules(question, rules.text())
    if suggests and trial is None:
        return _untried_rules(question, fixes, rules)
    rules_options = None
    if trial is not None:
        rules_options = _other_options(trial)
        flags = ["--values"] if compares_values else []
        commands = with_file(left.source, right.source, *flags, options=rules_options)
        unfixed = unfixed_by(question, trial)
        is_partial = bool(rules.undone) or not trial.after.identical
        advice = () if rules.undone else tuple(advice_on(question, unfixed))
        is_inferred = bool(diff.inferred.pairs)
        fixes = Fixes(commands, advice, is_partial, is_inferred, unfixed)
    if suggests or not fixes.commands or any(map(_has_rules, fixes.commands)):
        fixes = fixes._replace(notes=(*fixes.notes, *rules.undone))
    return replace(fixes.added_to(diff), rules=rules.text(), rules_options=rules_options)


def _with_rules_to_model(question: DiffQuestion, fixes: Fixes, suggests: bool) -> Diff:
    """Return the diff of a checkpoint and a model with the commands; or with a file of inferred
    rules, if that leaves fewer differences or is requested.
    """
    left, diff = question.left, question.diff
    assert left is not None
    if fixes.is_inferred:
        diff = _with_likely_renames(question)
    wants_more = suggests or not fixes.commands or fixes.is_partial
    takes_rules = question.model is not None and left.state_dicts and not is_written_program(left)
    if not wants_more or not takes_rules:
        return fixes.added_to(diff)
    rules = question.rules
    about_optimizer = diff.remedy is not None or question.options.optimizer is not None
    if rules is None or (not suggests and (about_optimizer or left.in_memory)):
        return fixes.added_to(diff)
    trial = by_rules(question, rules.text(), at_least_half=not suggests)
    if about_optimizer and trial is not None and not trial.after.identical:
        trial = None  # only the old model's code knows whose state is left
    if trial is None:
        return _untried_rules(question, fixes, rules) if suggests else fixes.added_to(diff)
    unfixed = unfixed_by(question, trial)
    if suggests:
        answer = _with_rules_file(question, trial, rules, unfixed)
        return replace(answer, rules=rules.text(), rules_options=_other_options(trial))
    if not fixes.commands or _count_keys(unfixed) < _count_keys(fixes.unfixed):
        return _with_rules_file(question, trial, rules, unfixed)
    return fixes.added_to(diff)


def _with_likely_renames(question: DiffQuestion) -> Diff:
    """Return the diff with the pairs of names that inferred rules rest on."""
    return replace(question.diff, inferred=question.likely.inferred)


def _untried_rules(question: DiffQuestion, fixes: Fixes, rules: Rules) -> Diff:
    """Return the diff with rules that no remap could try. If left has the state of an optimizer,
    the command names the old model, whose keys have no wrappers: the rules are about these keys.
    """
    left, diff = question.left, _with_likely_renames(question)
    assert left is not None
    optimizers = left.optimizers
    if not optimizers:
        fixes = fixes._replace(notes=(*fixes.notes, *rules.undone))
        return replace(fixes.added_to(diff), rules=rules.text())
    rules = _without_wrappers(question) or rules
    diff_options = question.options
    options = RemapOptions(
        model=OLD,
        to_model=diff_options.model or MODEL,
        materialize=diff_options.materialize,
        to_optimizer=diff_options.optimizer or (OPTIMIZER if len(optimizers) == 1 else None),
        partial=bool(rules.remaining),
    )
    answer = Fixes((by_file(left.source, "RULES", options),), rules.undone, is_inferred=True)
    return replace(answer.added_to(diff), rules=rules.text(), rules_options=options)


def _without_wrappers(question: DiffQuestion) -> Rules | None:
    """Return the rules from left's names without wrappers; None if there are none."""
    left = question.left
    assert left is not None
    section = replace(model_section(left), path="")
    try:
        plan = plan_remap(Checkpoint.of(section), RemapOptions(to=SERIALIZED), None, None)
    except CkptError:
        return None
    unwrapped = replace(plan.result, source=left.source, format=left.format)
    return question.likely_from(unwrapped).rules()


def _with_rules_file(
    question: DiffQuestion, trial: TriedFix, rules: Rules, unfixed: tuple[Unfixed, ...]
) -> Diff:
    """Return the diff with the commands that write the rules to a file, and apply it."""
    left, model = question.left, question.model
    assert left is not None
    assert model is not None
    to_file, line = with_file(left.source, *model.words, options=_other_options(trial))
    fix = Fix(line, complete=trial.after.identical, options=trial.options)
    fixes = Fixes((to_file, fix), is_inferred=True)
    if not trial.after.identical or rules.undone:
        notes = (*advice_on(question, unfixed), *rules.undone)
        fixes = fixes._replace(notes=notes, is_partial=True, unfixed=unfixed)
    return fixes.added_to(_with_likely_renames(question))


def unpacked(question: DiffQuestion) -> Diff:
    """Return the diff of a pickled module or a list that fits, with the command that writes a state
    dict which also fits: under the names that the model saves, or that it has.

    A list has no buffers: the command is a part of the fix if the model loads some.
    """
    for form in (SERIALIZED, RUNTIME):
        options = RemapOptions(**question.model_options, to=form)
        trial = try_remap(question, options, form)
        if trial is None:
            continue
        if trial.after.identical:
            return Fixes((trial.fix,)).added_to(question.diff)
        differing = list(filter(trial.after.is_difference, trial.after.entries))
        if statuses_of(differing) == {"missing"}:
            unfixed = unfixed_by(question, trial)
            advice = tuple(advice_on(question, unfixed))
            return Fixes((trial.fix,), advice, True, unfixed=unfixed).added_to(question.diff)
    return question.diff


def _count_keys(unfixed: Sequence[Unfixed]) -> int:
    return sum(len(group.keys) for group in unfixed)


def _other_options(trial: TriedFix) -> RemapOptions:
    """Return the options of a remap by a rules file, without the rules and the output."""
    assert isinstance(trial.options, RemapOptions)
    return replace(trial.options, rules=None, out=None)
