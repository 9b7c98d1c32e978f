"""Two checkpoints whose relation only a model's code could tell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckpttool.core.checkpoint import AnyEntry, Section, TensorEntry
from ckpttool.core.text import MODEL
from ckpttool.diffing.key_notes import without_segment
from ckpttool.diffing.models import program_and_weights
from ckpttool.diffing.result import statuses_of
from ckpttool.fixes.question import DiffQuestion
from ckpttool.formats.registry import format_of
from ckpttool.naming.wrappers import canonical_in
from ckpttool.operands.checkpoint import model_section
from ckpttool.operands.output import command, outputs
from ckpttool.remapping.options import RemapOptions
from ckpttool.swap.options import SwapOptions

_EQUAL = frozenset({"same", "alias", "extra_state"})


def commands_with_a_model(question: DiffQuestion, has_program: bool) -> tuple[str, ...]:
    """Return commands with the placeholder MODEL if all differences look like the work of a hook,
    or of a rank.

    The weights of a program may be in wrappers too.
    """
    if question.model is not None:
        return ()
    left, right = question.two
    if format_of(left).holds.rank_parts or _lacks_second_names(question):
        return (_remap(question, "serialized"),)
    to = _shortened_form(question, has_program)
    if to is None:
        return ()
    if not has_program:
        return (_remap(question, to),)
    program, weights = program_and_weights(left, right)
    swap = SwapOptions(model=MODEL, out=next(outputs(program.source, "swapped")))
    return (command("swap-weights", (program.source, weights.source), swap),)


def _lacks_second_names(question: DiffQuestion) -> bool:
    """Return whether left lacks only second names of tensors that it has: the model ties them."""
    entries = question.diff.entries
    if statuses_of(entries) - _EQUAL:
        return False
    aliases = [entry for entry in entries if entry.status == "alias"]
    return not all(entry.left for entry in aliases)


def _shortened_form(question: DiffQuestion, has_program: bool) -> str | None:
    """Return the form of right's names if one side's keys are the other's without a segment each,
    as a hook leaves them; else None.
    """
    # a hook, a program or a rank changes names, not values
    equal = _EQUAL | {"renamed"} if has_program else _EQUAL
    only_left: list[str] = []
    only_right: list[str] = []
    for entry in question.diff.entries:
        if entry.status == "unexpected":
            only_left += entry.left
        elif entry.status == "missing":
            only_right += entry.right
        elif entry.status not in equal:
            return None
    if not only_left or len(only_left) != len(only_right):
        return None
    left_section, right_section = map(model_section, question.two)
    left, right = _by_name(left_section, only_left), _by_name(right_section, only_right)
    if _are_shortened(left, right):
        return "exported"
    if _are_shortened(right, left):
        return "serialized"
    return None


def _remap(question: DiffQuestion, to: str) -> str:
    """Return the remap to the form; a tied model gets a torch file, which holds each of its
    names.
    """
    left, right = question.two
    is_tied = bool(model_section(left).aliases() or model_section(right).aliases())
    names = list(outputs(left.source, to))
    out = names[-1] if is_tied else names[0]
    return command("remap", (left.source,), RemapOptions(model=MODEL, to=to, out=out))


def _by_name(section: Section, keys: Iterable[str]) -> Mapping[str, AnyEntry | None]:
    """Return the entries of these keys by their names without segments of wrappers."""
    names, entries = canonical_in(section), section.by_key()
    return {names.get(key, key): entries.get(key) for key in keys}


def _are_shortened(
    short: Mapping[str, AnyEntry | None], long: Mapping[str, AnyEntry | None]
) -> bool:
    """Return True if each shorter name is exactly one longer name without a segment, with the same
    dtype and shape.
    """
    shortened: set[str] = set()
    for name, entry in long.items():
        match = without_segment(name, short)
        if match is None or match[0] in shortened:
            return False
        if _outline(short[match[0]]) != _outline(entry):
            return False
        shortened.add(match[0])
    return True


def _outline(entry: AnyEntry | None) -> object:
    return (entry.dtype, entry.shape) if isinstance(entry, TensorEntry) else None
