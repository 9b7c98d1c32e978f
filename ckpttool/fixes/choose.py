"""Choose the commands that fix a diff, each tried."""

from __future__ import annotations

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.tables import present
from ckpttool.core.text import Info, Note, plural, some
from ckpttool.diffing.adapter import adapter_alone
from ckpttool.diffing.models import is_written_program
from ckpttool.fixes.commands import Fixes
from ckpttool.fixes.names import model_fixes
from ckpttool.fixes.optimizer import optimizer_fixes
from ckpttool.fixes.question import DiffQuestion
from ckpttool.fixes.rules_file import Rules
from ckpttool.fixes.search import best_cast, best_remap, complete_for_model, selected
from ckpttool.fixes.swaps import swap_fix
from ckpttool.fixes.trial import TriedFix, try_recorded_names
from ckpttool.fixes.unfixed import advice_on, unfixed_by
from ckpttool.fixes.unknown_model import commands_with_a_model
from ckpttool.formats.registry import is_program
from ckpttool.formats.remarks import one_rank
from ckpttool.operands.checkpoint import model_section
from ckpttool.remapping.options import RemapOptions

DROPPED = Info(
    "--drop leaves out second names only: their values are in the output under another name",
    "drops-names",
)


OWN_NAMES = Info(
    "swap-weights gives the program all of the weights; the program keeps its names",
    "program-names",
)


def tried_fixes(question: DiffQuestion) -> Fixes:
    """Return the commands that fix the diff, each tried."""
    left, diff = question.left, question.diff
    if diff.remedy is not None:
        return optimizer_fixes(question, diff.remedy)
    if left is None:
        return model_fixes(question)
    if not left.state_dicts:
        return Fixes()
    if question.options.optimizer is None or question.right is not None:
        return _fixes_of_names(question)
    # the state fits, the model may not
    trial = None if diff.identical else complete_for_model(question)
    return Fixes() if trial is None else Fixes((trial.fix,))


def _fixes_of_names(question: DiffQuestion) -> Fixes:
    """Return the swap or the remap after which the names fit."""
    left, right = question.left, question.right
    assert left is not None
    has_program = right is not None and (is_program(left) or is_program(right))
    swap, notes = swap_fix(question) if has_program else (None, [])
    if swap is not None and swap.after.identical:
        return Fixes((swap.fix,))
    remap = _remap_fix(question)
    if swap is not None and remap is not None and remap.drops:
        remap = None  # the program takes what only a remap would drop
    is_guess = remap is not None and remap.infers
    is_proven = remap is not None and remap.is_proven
    commands = [trial.fix for trial in present((swap, remap))]
    with_model: tuple[str, ...] = ()
    if not commands or (has_program and not is_proven):  # the program's own model knows better
        with_model = commands_with_a_model(question, has_program)
        if with_model and swap is None and not is_guess:
            commands = []
    if swap is not None:
        notes.append(OWN_NAMES)
    if remap is not None:
        notes += _notes_on(remap)
    fixes = Fixes((*with_model, *commands), tuple(notes), is_inferred=is_guess)
    if with_model or swap is not None:
        return fixes
    return _with_unfixed(question, fixes, remap)


def _with_unfixed(question: DiffQuestion, fixes: Fixes, remap: TriedFix | None) -> Fixes:
    """Return the fixes with the differences that the remap leaves, if there is one."""
    left, right = question.left, question.right
    assert left is not None
    if remap is not None and not remap.after.identical:
        fixes = fixes._replace(is_partial=True)
    if one_rank(left):  # a note of the diff says everything
        return fixes
    unfixed = unfixed_by(question, remap)
    fixes = fixes._replace(unfixed=unfixed)
    if remap is None and _is_adapter_alone(left, right):
        return fixes
    advice = advice_on(question, unfixed, _open_rules(question))
    return fixes._replace(notes=(*fixes.notes, *advice))


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
    if best is not None and best.is_proven:
        return best
    return try_recorded_names(question) or selected(question) or best


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
