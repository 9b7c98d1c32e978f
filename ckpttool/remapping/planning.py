"""From the inputs of a remap to its result on the index, for any format. Nothing is written."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ckpttool.core.checkpoint import Checkpoint, Section
from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.text import dotted, plural
from ckpttool.formats.opening import note_on
from ckpttool.kinds.adapters import adapter_in
from ckpttool.kinds.table import with_kinds
from ckpttool.naming.convert import ModelForm
from ckpttool.naming.match import match
from ckpttool.operands.checkpoint import saved_state_dicts
from ckpttool.operands.initial_state import initial_states
from ckpttool.operands.model import ModelOperand
from ckpttool.operands.output import command, target_for
from ckpttool.operands.same_model import of_one_model
from ckpttool.optimizers.request import Create, OfSection, OptimizerRequest
from ckpttool.remapping.by_position import notes_on_lists
from ckpttool.remapping.filling import fill
from ckpttool.remapping.gather import with_gathered_optimizers
from ckpttool.remapping.options import RemapOptions
from ckpttool.remapping.plan import remap as remap_index
from ckpttool.remapping.plan import with_optimizers
from ckpttool.remapping.resolve import Inputs, resolve
from ckpttool.remapping.restore import with_lost_versions, with_steps_of_norms
from ckpttool.remapping.result import Remap
from ckpttool.remapping.steps import Request, loadable


def plan_remap(
    source: Checkpoint,
    options: RemapOptions,
    model: ModelOperand | None,
    to_model: ModelOperand | None,
    dtype: str | None = None,
) -> Remap:
    """Return the result of `options` for `source` on the index. Raise as `run` does.

    `model` is the model that saved the source, `to_model` the result of `loading_model`, `dtype`
    what floating-point tensors are cast to.
    """
    inputs = resolve(source, options, model, to_model, dtype)
    outcome = remap_index(inputs.whole, inputs.request)
    if inputs.saved is not None and inputs.saved.pretrained:
        outcome = replace(outcome, source_form=str(ModelForm.PRETRAINED))
    if inputs.gathered is not None and inputs.names is not None:
        outcome = with_gathered_optimizers(outcome, inputs.gathered, inputs.names)
    outcome = replace(outcome, missing=_missing(outcome, inputs))
    if inputs.fillers:
        outcome = fill(outcome, inputs.fillers, inputs.request)
    outcome = _with_versions(outcome, inputs)
    outcome = replace(outcome, notes=(*_notes_of_source(outcome, inputs.source), *outcome.notes))
    if outcome.result.optimizers or options.optimizer_keys is not None:
        outcome = with_optimizers(outcome, _for_optimizers(inputs))
    other_names = None if inputs.other_model is None else inputs.to_names
    lists = notes_on_lists(outcome, inputs.names, other_names, inputs.request.called)
    changes = inputs.gathered is not None or changes_content(inputs.source, outcome)
    result = with_kinds(outcome.result)
    return replace(outcome, result=result, notes=(*outcome.notes, *lists), changes_content=changes)


def _missing(outcome: Remap, inputs: Inputs) -> tuple[str, ...]:
    """Return the keys of the model that the result lacks, and that loading needs."""
    saved, other, request = inputs.saved, inputs.other_model, inputs.request
    if saved is None:
        return outcome.missing
    if other is not None and request.rule_steps:
        return _not_reached(outcome, request, other)
    if outcome.missing and inputs.gathered is None:
        return _needed(outcome, request, other or saved)
    return outcome.missing


def _with_versions(outcome: Remap, inputs: Inputs) -> Remap:
    """Return the result with what older versions of its modules did not save."""
    if not inputs.request.changes or inputs.gathered is not None:
        return outcome
    outcome = with_steps_of_norms(outcome)
    out = inputs.options.target(inputs.source.source)
    if out is not None and not target_for(out, inputs.source).format.holds.versions:
        return outcome
    return with_lost_versions(outcome, inputs.request, inputs.other_model or inputs.saved)


def _notes_of_source(outcome: Remap, source: Checkpoint) -> tuple[str, ...]:
    """Return the notes of the source; other files of its folder that are dropped are not noted."""
    if outcome.result.other_files == source.other_files:
        return source.notes
    about_files = note_on(source.other_files)
    notes = [note for note in source.notes if note not in about_files]
    return (*notes, *note_on(outcome.result.other_files))


def _for_optimizers(inputs: Inputs) -> OptimizerRequest:
    """Return what the optimizers get, but for the effect of the remap on the model."""
    options, source = inputs.options, inputs.source
    form = None
    if isinstance(options.form, ModelForm) and options.form is not ModelForm.PRETRAINED:
        form = options.form.names
    return OptimizerRequest(
        options.optimizer_keys,
        inputs.names,
        inputs.to_names,
        inputs.request.called,
        form,
        create=_create(inputs.to_model or inputs.model, options),
        of_sections=_of_sections(inputs),
        state_dicts=saved_state_dicts(source),
        old_model=_command_with_old_model(source, options),
        output=options.target(source.source),
    )


def _of_sections(inputs: Inputs) -> dict[str, OfSection]:
    """Return the names of the models that saved and will load the optimizer of each section, and
    what creates state, if the optimizers are named by their sections. Raise `CkptError` for
    sections that are none.
    """
    named = inputs.options.optimizers
    paths = [section.path for section in inputs.source.optimizers]
    problems = [Problem("not an optimizer", path) for path in named if path not in paths]
    if problems:
        sections = f"its optimizers are {', '.join(paths)}" if paths else "it holds no optimizer"
        raise CkptError(
            f"{inputs.source.source}: {plural(len(problems), 'section')} named, but no optimizer",
            hint=f"{sections}: `{inputs.source.inspect_call}` lists its sections",
            problems=problems,
        )
    of_sections: dict[str, OfSection] = {}
    for path, (optimizer, to_optimizer) in named.items():
        saved = None if inputs.model is None else inputs.model.with_optimizer(optimizer)
        loads = None if inputs.to_model is None else inputs.to_model.with_optimizer(to_optimizer)
        of_sections[path] = (
            None if saved is None else saved.names(),
            None if loads is None else loads.names(),
            _create(loads or saved, inputs.options),
        )
    return of_sections


def _create(loads: ModelOperand | None, options: RemapOptions) -> Create | None:
    """Return what creates state for parameters without any: the optimizer, with --partial."""
    if not options.partial or loads is None or not loads.is_definition or loads.optimizer is None:
        return None
    return partial(initial_states, loads)


def _not_reached(outcome: Remap, request: Request, loads: ModelOperand) -> tuple[str, ...]:
    """Return the keys of the model that will load the output which the rules do not lead to."""
    names, spare = loadable(loads.tables, request.model_form)
    sections = of_one_model(outcome.result, request.options.sections)
    if any(adapter_in(section) is not None for section in sections):
        return ()
    return tuple(
        dotted(section.path, key)
        for section in sections
        for key in match(section.keys, names, spare).missing
    )


def _needed(outcome: Remap, request: Request, loads: ModelOperand) -> tuple[str, ...]:
    """Return the missing keys that the model's own loading needs: some models save keys only
    sometimes.
    """
    options = request.options
    narrowed = options.select is not None or options.trainable_only
    renamed = (
        request.like is not None
        or request.rule_steps
        or options.form not in (None, ModelForm.SERIALIZED)
    )
    if narrowed or renamed or not loads.is_definition or loads.is_folder:
        return outcome.missing
    from ckpttool.tracing.loading import load_verdict

    needed = []
    for path in dict.fromkeys(outcome.plan.sections):
        missing = [key for key in outcome.missing if key.startswith(f"{path}." if path else "")]
        section = outcome.result.section(path)
        if (
            missing
            and section.kind == "state_dict"
            and not load_verdict(loads.definition(), section).ok
        ):
            needed += missing
    return tuple(dict.fromkeys(needed))


def _command_with_old_model(source: Checkpoint, options: RemapOptions) -> str | None:
    """Return the same command with the model named that saved the checkpoint; None if the options
    name another one.
    """
    if (
        not isinstance(options.model, str)
        or options.to_model is not None
        or options.to_optimizer is not None
    ):
        return None
    swapped = replace(
        options,
        model="OLD",
        to_model=options.model,
        to_optimizer=options.optimizer,
        out=None if options.in_place else options.out or "OUT",
        dry_run=False,
    )
    return command("remap", (source.source,), swapped)


# Changes


def changes_content(source: Checkpoint, outcome: Remap) -> bool:
    """Return whether the result holds something else than `source`: other names, values, entries or
    order.
    """
    plan, result = outcome.plan, outcome.result
    if plan.dropped or plan.runs or not all(output.is_unchanged for output in plan.outputs):
        return True
    if result.sections is source.sections:
        return False
    return len(result.sections) != len(source.sections) or not all(
        map(_same, source.sections, result.sections)
    )


def _same(left: Section, right: Section) -> bool:
    if left is right:
        return True
    return _described(left) == _described(right) and left.mapping == right.mapping


def _described(section: Section) -> tuple[object, ...]:
    modules = list(section.modules or ())
    place = section.path, section.kind, section.form, section.packed_as
    return (*place, modules, section.keys)
