"""Compare a saved optimizer, and its model, with the optimizer and model that load them."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ckpttool.containers.rank_shards import is_of_ranks, ranks_agree
from ckpttool.core.checkpoint import Checkpoint, Section
from ckpttool.core.errors import CkptError
from ckpttool.core.names import Names, OptimizerParam
from ckpttool.core.text import Note, plural, shell, some, title_of
from ckpttool.diffing.causes import Cause, Code
from ckpttool.diffing.load_notes import compared_by_loading, unreadable_note
from ckpttool.diffing.model import load
from ckpttool.diffing.optimizer_load import OptimizerFit, compare_with_optimizer, note_on_stateless
from ckpttool.diffing.result import HARMLESS, Diff, Entry, statuses_of
from ckpttool.diffing.saved_optimizers import SavedOptimizer, optimizer_section
from ckpttool.formats.folders import optimizers_in
from ckpttool.formats.registry import format_of
from ckpttool.io.files import names_in
from ckpttool.io.paths import join
from ckpttool.operands.checkpoint import is_folder
from ckpttool.operands.model import ModelOperand
from ckpttool.optimizers.forms import read
from ckpttool.optimizers.parameters import Parameters


def optimizer(model: ModelOperand, checkpoint: Checkpoint, ignore_dtype: bool) -> Diff:
    """Compare a saved optimizer, and the model in the same file, with the optimizer and model that
    load them.
    """
    names, section = model.names(), optimizer_section(checkpoint)
    if section is None:
        raise _no_single_optimizer(model, checkpoint)
    if not names.optimizer:
        names = in_model_order(names, section)
    verdict = None
    by_dcp = format_of(checkpoint).holds_each_option(checkpoint, section.path)
    if model.optimizer is not None:
        from ckpttool.tracing.build_optimizer import load_optimizer, optimizer_verdict

        builder = load_optimizer(model.optimizer, model.model)
        verdict = optimizer_verdict(model.definition(), builder, section, by_dcp)
    fit = compare_with_optimizer(SavedOptimizer.of(checkpoint, section), names, verdict, by_dcp)
    fit = _with_copies_of_ranks(fit, section)
    misplaced = _misplaced(checkpoint, section)
    about_model = _model_in_file(model, checkpoint, ignore_dtype)
    notes = [*misplaced, *fit.notes, *about_model.notes]
    if verdict is not None and verdict.converted and not ignore_dtype:
        text = (
            f"loading converts {plural(len(verdict.converted), 'tensor')} of the state to the"
            f" parameter's dtype: {some(verdict.converted)}"
        )
        notes.append(Note(text, "converts"))
    notes += note_on_stateless(section, fit)
    title = names.optimizer_class or "model.parameters()"
    if isinstance(model.optimizer, str):
        title = model.optimizer
    identical = fit.fits and about_model.loads and not misplaced
    failure = f"does not load into {title}"
    if fit.fits and about_model.problem and not misplaced:
        failure = f"loads into {title}, but the model in the file {about_model.problem}"
    return Diff(
        checkpoint.source,
        f"{title} (of {names.model})",
        identical=identical,
        entries=fit.entries,
        notes=tuple(notes),
        harmless=HARMLESS | {Code.OPTION.code},  # loading takes the file's
        other_failure="" if identical else failure,
        asks="optimizer",
        names=(checkpoint.source, title),
        remedy=fit.remedy,
        compared=compared_by_loading(checkpoint, ignore_dtype) | {"optimizers": True},
    )


class _ModelInFile(NamedTuple):
    """Whether the model next to the optimizer loads; `problem` says why not, after "the model in
    the file".
    """

    loads: bool
    problem: str
    notes: tuple[str, ...]


def _model_in_file(model: ModelOperand, checkpoint: Checkpoint, ignore_dtype: bool) -> _ModelInFile:
    """Return whether the model in the same file loads; a file without one does not matter."""
    if not checkpoint.state_dicts:
        unreadable = tuple(unreadable_note(checkpoint))
        return _ModelInFile(not unreadable, "", unreadable)
    try:
        loaded = load(replace(model, optimizer=None), checkpoint, ignore_dtype)
    except CkptError as error:
        text = f"the model in this file was not compared: {error.message} ({error.hint})"
        return _ModelInFile(False, "was not compared", (Note(text, "not-compared"),))
    if loaded.identical:
        return _ModelInFile(True, "", ())
    problem = "does not load as it is"
    command = shell("ckpttool", "diff", *model.words, checkpoint.source)
    text = f"the model in this file {problem} ({command})"
    failing = list(filter(loaded.is_difference, loaded.entries))
    if statuses_of(failing) == {"dtype"}:
        text += f": {min(entry.why() for entry in failing)}"
    return _ModelInFile(False, problem, (Note(text, "other-sections"),))


def _with_copies_of_ranks(fit: OptimizerFit, section: Section) -> OptimizerFit:
    """Return the fit; state of which the ranks hold different copies does not fit."""
    entries = []
    for entry in section.tensors:
        if is_of_ranks(entry) and not ranks_agree(entry):
            key = (entry.key,)
            entries.append(Entry("value", key, key, Cause(Code.RANK_VALUE)))
    if not entries:
        return fit
    return replace(fit, entries=(*fit.entries, *entries), fits=False, remedy=None)


def _misplaced(checkpoint: Checkpoint, section: Section) -> list[str]:
    """Return a note if the optimizer's state is the entry of the scheduler, and the optimizer's
    entry is another.
    """
    is_scheduler = "sched" in section.path.rpartition(".")[2].lower()
    others = []
    for path in checkpoint.others:
        if path.rpartition(".")[2].lower().startswith("optim"):
            others.append(path)
    if not is_scheduler or not others:
        return []
    text = (
        f"the state of the optimizer is in `{section.path}`, and `{others[0]}` has no param"
        " groups: the two entries may be swapped"
    )
    return [Note(text, "misplaced")]


def _no_single_optimizer(model: ModelOperand, checkpoint: Checkpoint) -> CkptError:
    words, source = model.words, checkpoint.source
    paths = [section.path for section in checkpoint.optimizers]
    if paths:
        several = ", ".join(map(title_of, paths))
        hint = f"pick one: {checkpoint.part(paths[0])}"
        return CkptError(f"{source} has several optimizers: {several}", hint=hint)
    files = optimizers_in(names_in(source)) if is_folder(source) else []
    if files:
        path = join(source, files[0])
        if isinstance(model.optimizer, str):
            path = shell("ckpttool", "diff", path, *words, "--optimizer", model.optimizer)
        text = f"{source} has its optimizer in a separate file, {files[0]}"
        return CkptError(text, hint=f"name the file: {path}")
    command = shell("ckpttool", "diff", *words, source)
    if checkpoint.in_memory:
        command = "ckpttool.diff(ckpt, model=...)"
    return CkptError(
        f"{source} has no optimizer: an optimizer that resumes from it starts from scratch",
        hint=f"compare the model only: {command}",
    )


def in_model_order(names: Names, section: Section) -> Names:
    """Return `names` with an optimizer of as many of the model's parameters as the file has, in
    their order.

    Raises `CkptError` unless that is one group, of all parameters or of all trainable ones.
    """
    state, parameters = read(section), Parameters(names)
    count = len(state.params)
    params = [*parameters.shapes]
    if len(params) != count:
        params = [*parameters.trainable]
    if len(state.groups) != 1 or len(params) != count:
        groups = plural(len(state.groups), "param group")
        raise CkptError(
            f"{plural(count, 'parameter')} in {groups}: unclear which optimizer of {names.model}"
            " loads them",
            hint="pass --optimizer file.py:make, the function that makes the optimizer of the"
            " model",
        )
    optimizer = []
    for place, name in enumerate(params):
        optimizer.append(OptimizerParam(place, parameters.fqns[name], 0))
    options = (state.groups[0].hyperparameters,)
    return replace(names, optimizer=tuple(optimizer), optimizer_groups=options)
