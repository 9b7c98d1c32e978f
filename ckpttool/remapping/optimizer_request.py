"""The request of a remap to the optimizers in a file."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from shlex import quote

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.core.text import OLD, plural
from ckpttool.formats.folders import optimizers_in
from ckpttool.formats.opening import files_next_to
from ckpttool.naming.convert import ModelForm
from ckpttool.operands.checkpoint import saved_state_dicts
from ckpttool.operands.initial_state import initial_states
from ckpttool.operands.model import ModelOperand
from ckpttool.operands.output import command
from ckpttool.optimizers.request import Create, OfSection, OptimizerRequest
from ckpttool.remapping.options import RemapOptions
from ckpttool.remapping.resolve import Inputs


def optimizer_request(inputs: Inputs) -> OptimizerRequest:
    """Return what the optimizers get, but for the effect of the remap on the model."""
    options, source = inputs.options, inputs.source
    form = None
    if isinstance(options.form, ModelForm) and options.form is not ModelForm.PRETRAINED:
        form = options.form.names
    return OptimizerRequest(
        options.optimizer_keys,
        inputs.names,
        inputs.to_names,
        inputs.request.rename_by_rules,
        form,
        create=_create(inputs.to_model or inputs.model, options),
        of_sections=_of_sections(inputs),
        state_dicts=saved_state_dicts(source),
        old_model=_command_with_old_model(source, options),
        output=options.target(source.source),
    )


def check_has_optimizer(inputs: Inputs) -> None:
    """Raise `Refused` if a new optimizer is named for a checkpoint without any."""
    source = inputs.source
    if inputs.options.to_optimizer is None or source.optimizers:
        return
    hint = f"`{source.inspect_call}` lists its sections; leave --to-optimizer out"
    files = optimizers_in([*files_next_to(source, source.source)])
    if files:
        place = f"{source.source}/{files[0]}"
        hint = f"it is in a separate file: name {quote(place)} as CKPT"
    raise Refused(f"{source.source} holds no optimizer", hint=hint)


def _of_sections(inputs: Inputs) -> dict[str, OfSection]:
    """Return the names of the models that saved and will load the optimizer of each section, and
    what creates state, if the optimizers are named by their sections. Raise `CkptError` for
    sections that are none.
    """
    source, model, to_model = inputs.source, inputs.model, inputs.to_model
    named = inputs.options.optimizers
    paths = [section.path for section in source.optimizers]
    problems = [Problem("not an optimizer", path) for path in named if path not in paths]
    if problems:
        sections = f"its optimizers are {', '.join(paths)}" if paths else "it holds no optimizer"
        raise CkptError(
            f"{source.source}: {plural(len(problems), 'section')} named, but no optimizer",
            hint=f"{sections}: `{source.inspect_call}` lists its sections",
            problems=problems,
        )
    of_sections: dict[str, OfSection] = {}
    for path, (optimizer, to_optimizer) in named.items():
        saved = None if model is None else model.with_optimizer(optimizer)
        loads = None if to_model is None else to_model.with_optimizer(to_optimizer)
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


def _command_with_old_model(source: Checkpoint, options: RemapOptions) -> str | None:
    """Return the same command with the model named that saved the checkpoint; None if the options
    name another one.
    """
    has_target = options.to_model is not None or options.to_optimizer is not None
    if has_target or not isinstance(options.model, str):
        return None
    swapped = replace(
        options,
        model=OLD,
        to_model=options.model,
        to_optimizer=options.optimizer,
        out=None if options.in_place else options.out or "OUT",
        dry_run=False,
    )
    return command("remap", (source.source,), swapped)
