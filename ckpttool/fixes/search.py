"""Search for the remap that fixes a diff: each candidate is tried."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ckpttool.core.errors import CkptError
from ckpttool.core.optimizer_state import FQN as FQN_KEYS
from ckpttool.diffing.causes import Code
from ckpttool.fixes.candidates import to_compare, to_load, to_load_model
from ckpttool.fixes.question import DiffQuestion, model_path
from ckpttool.fixes.trial import TriedFix, try_cast, try_remap
from ckpttool.formats.registry import format_of
from ckpttool.formats.remarks import one_rank
from ckpttool.operands.checkpoint import open_operand, split
from ckpttool.remapping.options import FLOATS, RemapOptions
from ckpttool.remapping.planning import plan_remap
from ckpttool.remapping.resolve import loading_model


def best_remap(question: DiffQuestion) -> TriedFix | None:
    """Return the first remap after which the two are the same, or else the remap that leaves the
    fewest differences.
    """
    if not _may_help(question):
        return None
    candidates = to_load(question) if question.right is None else to_compare(question)
    best = None
    fewest = question.remaining(question.diff)
    for word, options in candidates:
        trial = try_remap(question, options, word, fewest)
        if trial is None:
            continue
        only_values_are_left = question.different_values(trial.after)
        if trial.after.identical or only_values_are_left:
            return trial
        best = trial
        fewest = question.remaining(trial.after)
    if best is None:
        return _of_section_alone(question)
    return _with_rules_after(question, best, fewest) or best


def _of_section_alone(question: DiffQuestion) -> TriedFix | None:
    """Return the remap of the model's section in files of ranks, which fixes everything there.

    Other entries of rank files have no place in one file.
    """
    left = question.left
    if left is None or not format_of(left).holds.rank_parts:
        return None
    for smaller in _of_section(question):
        trial = best_remap(smaller)
        if trial is not None and trial.after.identical:
            return replace(trial, part=True)
    return None


def best_cast(question: DiffQuestion) -> TriedFix | None:
    """Return the conversion that fixes everything, if only dtypes differ and right has one."""
    dtypes = set[str]()
    for entry in filter(question.diff.is_difference, question.diff.entries):
        if entry.statuses != {"dtype"} or entry.has(Code.SCALED):
            return None
        (key,) = entry.right
        dtypes.update(side[key].dtype for side in question.outlines if key in side)
    if len(dtypes) != 1:
        return None
    (dtype,) = dtypes
    return try_cast(question, dtype) if dtype in FLOATS else None


def _may_help(question: DiffQuestion) -> bool:
    """Return False if no remap can fix the diff: it is not about names, or a choice is a guess."""
    left = question.left
    assert left is not None
    # no command has what the other ranks hold
    if one_rank(left) or question.parts:
        return False
    return not _only_tensors_differ(question) or format_of(left).holds.rank_parts


def _only_tensors_differ(question: DiffQuestion) -> bool:
    """Return whether all names are right, and shapes, dtypes or values differ."""
    of_tensors = {"shape", "dtype"}
    if question.right is not None:
        of_tensors.add("value")
    differ = False
    for entry in question.diff.entries:
        if entry.status == "same":
            continue
        if not entry.statuses <= of_tensors:
            return False
        differ = True
    return differ


def complete_for_model(question: DiffQuestion) -> TriedFix | None:
    """Return the remap after which the model loads, in a file whose optimizer state fits."""
    for word, options in to_load_model(question):
        trial = try_remap(question, options, word)
        if trial is not None and trial.after.identical:
            return trial
    return None


def _with_rules_after(question: DiffQuestion, best: TriedFix, most: int) -> TriedFix | None:
    """Return the same remap with a few inferred renames of the names that it leads to, if that
    fixes everything.

    The names of wrapped keys are compared best without the wrappers, which `best` removes.
    """
    options, left = best.options, question.left
    if left is None or question.model is None:
        return None
    if not isinstance(options, RemapOptions) or options.has_rules:
        return None
    options = replace(options, out=None, partial=False)
    try:
        model = None if options.model is None else question.model.with_optimizer(options.optimizer)
        read = replace(options, model=model)
        unwrapped = plan_remap(left, read, model, loading_model(read, model)).result
        rules = replace(question, left=unwrapped, diff=best.after).rules
    except CkptError:
        return None
    few = None if rules is None else rules.few
    if few is None or not few.rule or few.drop:
        return None
    trial = try_remap(question, replace(options, rule=few.rule), "renamed", most)
    return trial if trial is not None and trial.after.identical else None


def selected(question: DiffQuestion) -> TriedFix | None:
    """Return the remap that takes the model's keys from below the only prefix under which left has
    all of them.

    What is not below the prefix is left out: the model has no place for it. If other sections stand
    against that, such as an optimizer of all parameters, the section of the model is taken alone.
    """
    left = question.left
    if left is None or question.right is not None or question.model is None:
        return None
    if question.parts or one_rank(left):
        return None
    questions = (question, *_of_section(question))
    for prefix in _only_prefixes(question):
        for smaller in questions:
            trial = _taken(smaller, prefix)
            if trial is not None:
                return replace(trial, part=smaller is not question)
    return None


def _of_section(question: DiffQuestion) -> Iterator[DiffQuestion]:
    """Yield the same question about the section of the model alone, if the file has others."""
    left = question.left
    assert left is not None
    path = model_path(left)
    if path and split(left.source)[1] is None and not left.in_memory:
        yield replace(question, left=open_operand(left.part(path)), opened=None)


def _only_prefixes(question: DiffQuestion) -> list[str]:
    """Return the prefixes that are the only one with most names of a form of the model."""
    only = [prefixes[0] for prefixes in question.prefixes if len(prefixes) == 1]
    return list(dict.fromkeys(filter(None, only)))


def _taken(question: DiffQuestion, prefix: str) -> TriedFix | None:
    """Return the remap that takes what is below the prefix, if the model loads it then."""
    word = prefix.rpartition(".")[2]
    for to in (None, "serialized"):
        trial = try_remap(question, RemapOptions(select=prefix, to=to), word, loses_keys=True)
        if trial is not None and trial.after.identical and not trial.stateless:
            return trial
    return None


def by_rules(question: DiffQuestion, rules: str, *, at_least_half: bool = True) -> TriedFix | None:
    """Return the remap by inferred rules; with `at_least_half`, for a model only if it fixes half
    of the differences or more.

    If the rules make other parameters, the optimizer in the file needs their order from the model
    that loads the output, or their names.
    """
    diff_options, plain = question.options, RemapOptions(rules=rules)
    if question.right is not None:
        most = None
        with_optimizer = replace(plain, optimizer_keys=FQN_KEYS)
    else:
        most = question.remaining(question.diff) // 2 + 1 if at_least_half else None
        with_optimizer = replace(
            plain,
            to_model=diff_options.model,
            materialize=diff_options.materialize,
            to_optimizer=diff_options.optimizer,
        )
    for options in (plain, with_optimizer):
        trial = try_remap(question, options, "renamed", most)
        if trial is not None:
            return trial
    return None
