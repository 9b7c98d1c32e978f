"""Compare a checkpoint with what a model loads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckpttool.core.checkpoint import Checkpoint, Section
from ckpttool.core.errors import CkptError
from ckpttool.diffing.adapter import adapter_alone
from ckpttool.diffing.adapter import load as load_adapter
from ckpttool.diffing.causes import Code
from ckpttool.diffing.explain import explain_computed, explain_quantized, with_copies_of_ranks
from ckpttool.diffing.lists import load as load_as_list
from ckpttool.diffing.load_notes import (
    LoadedSection,
    compared_by_loading,
    notes_on_load,
    notes_on_reading,
)
from ckpttool.diffing.loading import compare_load, loads
from ckpttool.diffing.names import exchangeable_keys
from ckpttool.diffing.names_suffice import check_names_suffice
from ckpttool.diffing.result import HARMLESS, Diff, Entry, kinds_by_side, names_outlines, outlines
from ckpttool.diffing.sections import without_dtypes
from ckpttool.formats.remarks import one_rank
from ckpttool.operands.checkpoint import model_section
from ckpttool.operands.model import ModelOperand
from ckpttool.operands.reading import as_read, untied_keys

if TYPE_CHECKING:
    from ckpttool.tracing.loading import Verdict


def load(model: ModelOperand, checkpoint: Checkpoint, ignore_dtype: bool) -> Diff:
    """Compare a checkpoint with what the model loads; for a model's code the answer is torch's
    own.
    """
    section = model_section(checkpoint, model.tables)
    adapter = adapter_alone(checkpoint, section)
    if adapter is not None:
        about_adapter = load_adapter(model, checkpoint, section, adapter)
        if about_adapter is not None:
            return about_adapter
    if section.is_list:
        return load_as_list(model, checkpoint, section, ignore_dtype)
    return _load_section(model, checkpoint, section, ignore_dtype)


def _load_section(
    model: ModelOperand, checkpoint: Checkpoint, section: Section, ignore_dtype: bool
) -> Diff:
    untied: Sequence[tuple[str, str]] = ()
    if model.is_folder:
        untied = untied_keys(model.tables, section)
        model = as_read(model, section, checkpoint.source)
    verdict = _verdict(model, checkpoint, section) if model.is_definition else None
    if model.is_folder and verdict is not None and not verdict.ok:
        model, verdict = _by_from_pretrained(model, checkpoint, section, verdict)
    names = model.names()
    entries = explain_computed(compare_load(names, section, verdict, model.pretrained))
    entries = with_copies_of_ranks(explain_quantized(entries, section), section)
    harmless = HARMLESS | {Code.LOAD_HOOK.code}
    if ignore_dtype:
        entries, harmless = without_dtypes(entries), harmless | {"dtype"}
    if verdict is None and loads(entries):
        check_names_suffice(model, names, checkpoint, section)
    unreadable, of_shards = notes_on_reading(model, checkpoint)
    about = (model, checkpoint, section, names)
    loading = LoadedSection(*about, verdict, entries, ignore_dtype, unreadable, of_shards)
    notes, explain_failure = notes_on_load(loading, untied)
    failure = ""
    if not loading.identical and (explain_failure or not _show_failure(entries)):
        failure = f"does not load into {model.called}"
        if loading.fits:
            failure = f"loads into {model.called}, which converts its dtypes"
    compared = compared_by_loading(checkpoint, ignore_dtype)
    if checkpoint.optimizers:
        compared["optimizers"] = False
    return Diff(
        checkpoint.source,
        f"{model.title} (what {'from_pretrained' if model.pretrained else 'it'} loads)",
        identical=loading.identical,
        entries=entries,
        notes=tuple(notes),
        exchangeable=exchangeable_keys(names),
        harmless=harmless,
        other_failure=failure,
        compared=compared,
        outlines=(outlines(section), names_outlines(names)[0]),
        kinds=kinds_by_side(left=checkpoint.kinds_of(section)),
        section=section.path,
        asks="load",
        names=(checkpoint.source, model.called),
    )


def _show_failure(entries: Sequence[Entry]) -> bool:
    """Return whether the entries show why the load fails: some differ, and every harmless one is on
    both sides.
    """
    differs = False
    for entry in entries:
        if entry.status not in HARMLESS:
            differs = True
        elif not (entry.left and entry.right):
            return False
    return differs


def _verdict(model: ModelOperand, checkpoint: Checkpoint, section: Section) -> Verdict:
    """Return the answer of torch. Raises `CkptError` if torch cannot load it, with a hint for the
    part of one rank.
    """
    try:
        return model.verdict(section)
    except CkptError as error:
        error.hint = "; ".join(one_rank(checkpoint)) or error.hint
        raise


def _by_from_pretrained(
    model: ModelOperand, checkpoint: Checkpoint, section: Section, verdict: Verdict
) -> tuple[ModelOperand, Verdict]:
    """Return the model of a folder as from_pretrained loads it, if that loads the section, which
    load_state_dict refuses: it accepts keys that it does not write.
    """
    from ckpttool.tracing.pretrained import is_pretrained

    if model.pretrained or not is_pretrained(model.definition()):
        return model, verdict
    answer = _verdict(model.by_pretrained, checkpoint, section)
    return (model.by_pretrained, answer) if answer.ok else (model, verdict)
