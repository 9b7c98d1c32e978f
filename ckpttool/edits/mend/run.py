"""What mends a diff: the first way that works, or the best of those that mend a part, and what remains in words."""

from __future__ import annotations

from dataclasses import replace

from ckpttool.checkpoint import Checkpoint
from ckpttool.edits.mend import ways
from ckpttool.edits.mend.attempt import Attempt, Question, try_remap
from ckpttool.edits.mend.command import untried
from ckpttool.edits.mend.remains import sentences
from ckpttool.edits.mend.with_a_model import with_a_model
from ckpttool.edits.rules.mend import INFERRED, OF_RULES, PART, Suggested, needs_file
from ckpttool.formats.ranks.files import one_rank
from ckpttool.operands.model import ModelOperand
from ckpttool.queries.diff.result import Diff
from ckpttool.words import Info

_NOT_BY_NAMES = {"shape", "dtype", "value"}
DROPPED = Info("--drop leaves out second names only: their values are in the output, under another name")
UNREAD = "values of tensors without a partner by name were not compared: diff --values of the output does"
_UNPAIRED = ("missing", "transformed")
OWN_NAMES = Info("swap-weights gives the program all of the weights, and leaves it the names that it has")


def answered(question: Question, diff: Diff, suggests: bool = False) -> Diff:
    """Return the diff with fixes, and a note on those that could not be tried.

    `suggests`: give the rules that lead to a model's keys too, even if a command needs no file for them.
    """
    found = _answered(question, diff, suggests)
    return replace(found, notes=(*found.notes, *untried(found.fix)))


def _answered(question: Question, diff: Diff, suggests: bool) -> Diff:
    """`diff`, the answer, with commands that mend it. Suggested rules in a file mend what nothing else mends whole."""
    if question.left is None or question.right is None:
        done = mended(question, diff)
        return _with_rules(done, diff, question.left, question.model) if suggests else done
    suggested = Suggested(diff, question.left, question.right)
    done = mended(question, diff, suggested)
    if diff.inferred is None:
        return done
    ruled = suggested.told(values=question.options.comparison is not None)
    if needs_file(ruled) and (not done.fix or PART in done.notes):
        return replace(ruled, notes=(*ruled.notes, *([INFERRED] if diff.inferred.pairs else [])))
    more = tuple(note for note in ruled.notes if note not in (*done.notes, PART))  # not of the rules' command
    return replace(done, rules=ruled.rules, notes=(*done.notes, *more))


def _with_rules(done: Diff, diff: Diff, left: Checkpoint | None, model: ModelOperand | None) -> Diff:
    """`done`, made of `diff`, with the rules that lead from the checkpoint's keys to the model's."""
    if left is None or model is None or not left.state_dicts or left.format == "pt2":
        return done
    ruled = ways.suggested_for(left, model).told()
    if ruled.rules is None:
        return done
    undone = [note for note in ruled.notes if note == PART or note.startswith(OF_RULES)]
    notes = [note for note in (done if undone else diff).notes if note not in (PART, INFERRED)]
    return replace(done, rules=ruled.rules, notes=(*notes, *undone, INFERRED))


def mended(question: Question, diff: Diff, suggested: Suggested | None = None) -> Diff:
    """`diff` with commands that mend it, each tried, and a sentence for what none of them mends.

    `suggested` are the rules that two checkpoints suggest.
    """
    if diff.remedy is not None:
        from ckpttool.edits.mend.optimizer import mended as with_state  # few diffs are about an optimizer

        return with_state(question, diff, diff.remedy)
    if question.left is None:
        from ckpttool.edits.mend.model_alone import of_names

        return of_names(question, diff)
    if not question.left.state_dicts:
        return diff
    if question.options.optimizer is not None and question.right is None:  # the state fits, the model may not
        fixes = (try_remap(question, options, word) for word, options in ways.next_to_state(question))
        whole = next((fix for fix in fixes if fix is not None and fix.after.identical), None)
        return diff if diff.identical or whole is None else replace(diff, fix=(whole.command,))
    swaps, notes = _swaps(question)
    if swaps and swaps[0].after.identical:
        return replace(diff, fix=(swaps[0].command,))
    best = _best(question, question.left, diff, suggested)
    best = None if swaps and best and best.drops else best  # the program takes what only a remap would drop
    found = [*swaps, *([best] if best else [])]
    swappable = bool(best and best.infers) and is_about_a_program(question)  # the program's own model knows better
    unknown = with_a_model(question, diff) if swappable or not found else ()
    notes += [OWN_NAMES] if swaps else []
    notes += [INFERRED] if best and best.infers else []
    notes += [DROPPED] if best and best.drops else []
    unpaired = question.options.comparison is not None and any(e.status in _UNPAIRED for e in diff.entries)
    notes += [UNREAD] if best and unpaired else []
    if not unknown and not swaps:
        notes += [PART] if best and not best.after.identical else []
        notes += sentences(question.left, diff, _left_over(question, diff, best))
    return replace(diff, fix=(*unknown, *(attempt.command for attempt in found)), notes=(*diff.notes, *notes))


def _left_over(question: Question, diff: Diff, best: Attempt | None) -> Diff:
    """What still differs once the best way is gone: values, which it was not asked about, as they do now."""
    if best is None:
        return diff
    names = () if best.after.identical else best.after.entries
    return replace(best.after, entries=(*names, *question.of_values(diff)))


def _best(question: Question, left: Checkpoint, diff: Diff, suggested: Suggested | None) -> Attempt | None:
    """The first way after which the two are the same; else the one that leaves the least to do, if it helps at all."""
    differing = {entry.status for entry in diff.entries} - {"same"}
    if any(entry.left != entry.right for entry in question.of_values(diff)):
        differing.add("renamed")  # the names can be mended where the values cannot
    if one_rank(left):
        return None  # what the other ranks hold, no command makes of it
    not_by_names = _NOT_BY_NAMES if question.right is not None else _NOT_BY_NAMES - {"value"}
    if differing and differing <= not_by_names and left.format != "rank_files":
        return None
    worth = ways.to_load(question, diff) if suggested is None else ways.to_compare(question, diff, suggested)
    best, least = None, question.remaining(diff)
    for word, options in worth:
        attempt = try_remap(question, options, word, least)
        if attempt is not None and attempt.after.identical:
            return attempt
        if attempt is not None:
            best, least = attempt, question.remaining(attempt.after)
    return best


def _swaps(question: Question) -> tuple[list[Attempt], list[str]]:
    if not is_about_a_program(question):
        return [], []
    from ckpttool.edits.mend.swapped import by_swap  # with the formats of programs

    return by_swap(question)


def is_about_a_program(question: Question) -> bool:
    """Whether one of two checkpoints is an exported program."""
    left, right = question.left, question.right
    return left is not None and right is not None and "pt2" in (left.format, right.format)
