"""Suggest the commands that fix a diff, and say why if there are none."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CkptError
from ckpttool.core.names import RUNTIME, SERIALIZED
from ckpttool.core.text import Info, Note, plural, some
from ckpttool.diffing.adapter import adapter_alone
from ckpttool.diffing.checkpoints import is_written_program
from ckpttool.diffing.others import is_program
from ckpttool.diffing.result import Diff, Fix, Unfixed
from ckpttool.fixes.commands import FEW, Fixes
from ckpttool.fixes.names import model_fixes
from ckpttool.fixes.optimizer import optimizer_fixes
from ckpttool.fixes.rules_file import Rules, by_file, suggested, with_file
from ckpttool.fixes.search import best_cast, best_remap, by_rules, complete_for_model, selected
from ckpttool.fixes.trial import DiffQuestion, TriedFix, try_remap, try_swap
from ckpttool.fixes.unfixed import advice_on, unfixed_by
from ckpttool.fixes.unknown_model import commands_with_a_model
from ckpttool.formats.remarks import one_rank
from ckpttool.operands.checkpoint import model_section
from ckpttool.operands.output import command, outputs
from ckpttool.remapping.options import RemapOptions
from ckpttool.remapping.planning import plan_remap
from ckpttool.swap.swap import Misfit, SwapOptions

DROPPED = Info(
    "--drop leaves out second names only: their values are in the output under another name",
    "drops-names",
)
OWN_NAMES = Info(
    "swap-weights gives the program all of the weights; the program keeps its names",
    "program-names",
)
_RULES = re.compile(r"\brules?\b")  # in a command or in Python


def answered(question: DiffQuestion, suggests: bool = False) -> Diff:
    """Return the diff with fixes. `suggests`: also give the rules to a model's keys if no command
    needs their file.
    """
    fixes = _fixes(question)
    if fixes.unfixed and question.parts:
        return _with_parts(question, fixes)
    if question.left is None:
        return fixes.added_to(question.diff)
    if question.right is not None:
        return _with_rules_between(question, fixes, suggests)
    return _with_rules_to_model(question, fixes, suggests)


def _with_parts(question: DiffQuestion, fixes: Fixes) -> Diff:
    """Return the diff with a note on the parts of left that have the names of right: a choice is a
    guess.
    """
    left, parts = question.left, question.parts
    assert left is not None
    word = parts[0].rpartition(".")[2]
    line = command(
        "remap",
        (left.source,),
        RemapOptions(select=parts[0], out=next(outputs(left.source, word))),
    )
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
    if suggests or (needs_file and not is_written_program(left) and not is_written_program(right)):
        trial = by_rules(question, rules.text())
    if suggests and trial is None:
        return _untried_rules(question, fixes, rules)
    if trial is not None:
        flags = ["--values"] if compares_values else []
        commands = with_file(left.source, right.source, *flags, options=_printed(trial))
        unfixed = unfixed_by(question, trial)
        is_partial = bool(rules.undone) or not trial.after.identical
        advice = () if rules.undone else tuple(advice_on(question, unfixed))
        fixes = Fixes(commands, advice, is_partial, bool(diff.inferred.pairs), unfixed)
    if suggests or not fixes.commands or any(map(_RULES.search, fixes.commands)):
        fixes = fixes._replace(notes=(*fixes.notes, *rules.undone))
    rules_options = None if trial is None else _printed(trial)
    return replace(fixes.added_to(diff), rules=rules.text(), rules_options=rules_options)


def _with_rules_to_model(question: DiffQuestion, fixes: Fixes, suggests: bool) -> Diff:
    """Return the diff of a checkpoint and a model with the commands; or with a file of inferred
    rules, if that leaves fewer differences or is requested.
    """
    left, diff = question.left, question.diff
    assert left is not None
    is_open = suggests or not fixes.commands or fixes.is_partial
    if question.model is None or not left.state_dicts or is_written_program(left) or not is_open:
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
    if suggests or not fixes.commands or _is_fewer(unfixed, fixes.unfixed):
        answer = _by_file(question, trial, rules, unfixed)
        if suggests:
            return replace(answer, rules=rules.text(), rules_options=_printed(trial))
        return answer
    return fixes.added_to(diff)


def _untried_rules(question: DiffQuestion, fixes: Fixes, rules: Rules) -> Diff:
    """Return the diff with rules that no remap could try. If left has the state of an optimizer,
    the command names the old model, whose keys have no wrappers: the rules are about these keys.
    """
    left, diff = question.left, question.diff
    assert left is not None
    optimizers = [section for section in left.sections if section.kind == "optimizer"]
    if not optimizers:
        fixes = fixes._replace(notes=(*fixes.notes, *rules.undone))
        return replace(fixes.added_to(diff), rules=rules.text())
    rules = _without_wrappers(question) or rules
    diff_options = question.options
    options = RemapOptions(
        model="OLD",
        to_model=diff_options.model or "MODEL",
        materialize=diff_options.materialize,
        to_optimizer=diff_options.optimizer or ("OPTIMIZER" if len(optimizers) == 1 else None),
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
    return question.rules_from(replace(plan.result, source=left.source, format=left.format))


def _by_file(
    question: DiffQuestion, trial: TriedFix, rules: Rules, unfixed: tuple[Unfixed, ...]
) -> Diff:
    """Return the diff with the commands that write the rules to a file, and apply it."""
    left, model = question.left, question.model
    assert left is not None
    assert model is not None
    to_file, line = with_file(left.source, *model.words, options=_printed(trial))
    fix = Fix(line, complete=trial.after.identical, options=trial.options)
    commands = (to_file, fix)
    if trial.after.identical and not rules.undone:
        return Fixes(commands, is_inferred=True).added_to(question.diff)
    notes = (*advice_on(question, unfixed), *rules.undone)
    return Fixes(commands, notes, True, True, unfixed).added_to(question.diff)


def unpacked(question: DiffQuestion) -> Diff:
    """Return the diff of a pickled module or a list that fits, with the command that writes a state
    dict which also fits: under the names that the model saves, or that it has.

    A list has no buffers: the output does not have them either.
    """
    for form in (SERIALIZED, RUNTIME):
        options = RemapOptions(**question.model_options, to=form)
        trial = try_remap(question, options, form)
        if trial is None:
            continue
        differing = [entry for entry in trial.after.entries if trial.after.is_difference(entry)]
        if differing and all(entry.status == "missing" for entry in differing):
            trial = replace(trial, after=question.diff)
        if trial.after.identical:
            return Fixes((trial.fix,)).added_to(question.diff)
    return question.diff


def _is_fewer(unfixed: Sequence[Unfixed], other: Sequence[Unfixed]) -> bool:
    """Return True if fewer keys are left than by the other command."""
    return sum(len(left.keys) for left in unfixed) < sum(len(left.keys) for left in other)


def _printed(trial: TriedFix) -> RemapOptions:
    """Return the options of a remap by a rules file, but for the rules and the output."""
    assert isinstance(trial.options, RemapOptions)
    return replace(trial.options, rules=None, out=None)


def _fixes(question: DiffQuestion) -> Fixes:
    """Return the commands that fix the diff, each tried."""
    left, diff = question.left, question.diff
    if diff.remedy is not None:
        return optimizer_fixes(question, diff.remedy)
    if left is None:
        return model_fixes(question)
    if not left.state_dicts:
        return Fixes()
    if question.options.optimizer is not None and question.right is None:
        # the state fits, the model may not
        trial = None if diff.identical else complete_for_model(question)
        return Fixes() if trial is None else Fixes((trial.fix,))
    return _fixes_of_names(question)


def _fixes_of_names(question: DiffQuestion) -> Fixes:
    """Return the swap or the remap after which the names fit."""
    left = question.left
    assert left is not None
    has_program = question.right is not None and is_program(left, question.right)
    swap, notes = _swap_fix(question) if has_program else (None, [])
    if swap is not None and swap.after.identical:
        return Fixes((swap.fix,))
    remap = _remap_fix(question)
    if swap is not None and remap is not None and remap.drops:
        remap = None  # the program takes what only a remap would drop
    is_guess = remap is not None and remap.infers
    commands = [trial.fix for trial in (swap, remap) if trial is not None]
    with_model: tuple[str, ...] = ()
    is_whole = remap is not None and remap.after.identical and not is_guess
    if not commands or (has_program and not is_whole):  # the program's own model knows better
        with_model = commands_with_a_model(question, has_program)
        if with_model and swap is None and not is_guess:
            commands = []
    if swap is not None:
        notes.append(OWN_NAMES)
    if remap is not None:
        notes += _notes_on(remap)
    commands_of_all = (*with_model, *commands)
    if with_model or swap is not None:
        return Fixes(commands_of_all, tuple(notes), is_inferred=is_guess)
    is_partial = remap is not None and not remap.after.identical
    unfixed: tuple[Unfixed, ...] = ()
    if not one_rank(left):  # else a note of the diff says everything
        unfixed = unfixed_by(question, remap)
        if remap is not None or not _is_adapter_alone(left, question.right):
            notes += advice_on(question, unfixed, _open_rules(question))
    return Fixes(commands_of_all, tuple(notes), is_partial, is_guess, unfixed)


def _open_rules(question: DiffQuestion) -> Rules | None:
    """Return the rules that `--suggest` would write; None if there are none."""
    left = question.left
    assert left is not None
    if left.in_memory or question.parts or is_written_program(left):
        return None
    return question.rules


def _is_adapter_alone(*checkpoints: Checkpoint | None) -> bool:
    """Return True if one is an adapter without its base: the other one has other keys by nature."""
    for checkpoint in filter(None, checkpoints):
        section = model_section(checkpoint) if checkpoint.state_dicts else None
        if section is not None and adapter_alone(checkpoint, section) is not None:
            return True
    return False


def _remap_fix(question: DiffQuestion) -> TriedFix | None:
    """Return the best remap, or the conversion if only dtypes differ; one that takes a part of
    left, if the others leave or guess something.
    """
    cast = best_cast(question)
    if cast is not None:
        return cast
    best = best_remap(question)
    if best is not None and best.after.identical and not best.infers:
        return best
    return selected(question) or best


def _notes_on(remap: TriedFix) -> list[Note]:
    """Return notes on what the remap leaves out."""
    notes: list[Note] = []
    if remap.drops:
        notes.append(DROPPED)
    if remap.code:
        text = f"the command leaves out {some(remap.code)}, which would run code when it is loaded"
        notes.append(Info(text, "drops-code"))
    takes_part = isinstance(remap.options, RemapOptions) and remap.options.select
    if takes_part and remap.left_out:
        count = plural(len(remap.left_out), "entry")
        words = f"the command leaves out {count} of {{left}} that the model does not have: {{}}"
        notes.append(Info.about(words, "leaves-keys", some(remap.left_out)))
    return notes


def _swap_fix(question: DiffQuestion) -> tuple[TriedFix | None, list[str]]:
    """Return the swap that works if one of two checkpoints is a program; else why none does, if
    that is final.
    """
    options = SwapOptions(**question.model_options)
    fix = try_swap(question, options)
    for _ in range(2):  # constants, and then another dtype
        if isinstance(fix, Misfit) and fix.advice in ("constants", "cast"):
            constants = options.constants or fix.advice == "constants"
            options = replace(options, constants=constants, cast=fix.advice == "cast")
            fix = try_swap(question, options)
    if isinstance(fix, TriedFix):
        return fix, []
    if question.options.model is None:
        return None, []
    return None, [Note(_refusal(fix), "no-fix")]


def _refusal(error: CkptError) -> str:
    """Return why swap-weights is refused, with the first problems."""
    if not error.problems:
        return error.message
    problems = "; ".join(map(str, error.problems[:FEW]))
    if len(error.problems) > FEW:
        problems += f"; and {plural(len(error.problems) - FEW, 'problem')} more"
    hint = f"; {error.hint}" if isinstance(error, Misfit) and error.advice == "values" else ""
    return f"swap-weights would be refused: {error.message} ({problems}){hint}"
