"""The keys of a model that the result of a remap lacks."""

from __future__ import annotations

from ckpttool.core.text import Note, dotted, plural, prefix_of, some
from ckpttool.kinds.adapters import adapter_in
from ckpttool.naming.convert import ModelForm, read_keys
from ckpttool.naming.match import match
from ckpttool.operands.model import ModelOperand
from ckpttool.operands.reading import as_read
from ckpttool.operands.same_model import of_one_model
from ckpttool.remapping.resolve import Inputs
from ckpttool.remapping.result import Remap
from ckpttool.remapping.steps import Request
from ckpttool.remapping.through_models import names_for_load


def missing_keys(outcome: Remap, inputs: Inputs) -> tuple[str, ...]:
    """Return the keys of the model that the result lacks, and that loading needs."""
    saved, other, request = inputs.saved, inputs.other_model, inputs.request
    if saved is None:
        return outcome.missing
    if other is not None and request.rule_steps:
        return _not_reached(outcome, request, other)
    if outcome.missing and inputs.gathered is None:
        return _needed(outcome, request, other or saved)
    return outcome.missing


def note_on_kept_keys(outcome: Remap, inputs: Inputs) -> list[Note]:
    """Return a note if the options are about optimizers only, so that keys stay as they are, and
    the model that is named for them has keys which the file lacks.
    """
    model = inputs.to_model or inputs.model
    if model is None or inputs.request.saved is not None or len(outcome.result.state_dicts) != 1:
        return []
    (section,) = outcome.result.state_dicts
    if section.is_list or adapter_in(section) is not None:  # they lack keys by nature
        return []
    if model.is_folder:
        model = as_read(model, section, outcome.result.source)
    keys = read_keys(model.tables, section).match.missing
    if not keys:
        return []
    missing = [dotted(section.path, key) for key in keys]
    count = plural(len(missing), "key")
    text = f"the keys stay as they are: the file lacks {count} of {model.title}: {some(missing)}"
    return [Note(text, "missing")]


def _not_reached(outcome: Remap, request: Request, loads: ModelOperand) -> tuple[str, ...]:
    """Return the keys of the model that will load the output which the rules do not lead to."""
    names, spare = names_for_load(loads.tables, request.model_form)
    sections = of_one_model(outcome.result, request.options.sections)
    if any(adapter_in(section) is not None for section in sections):
        return ()
    missing: list[str] = []
    for section in sections:
        keys = match(section.keys, names, spare).missing
        missing += [dotted(section.path, key) for key in keys]
    return tuple(missing)


def _needed(outcome: Remap, request: Request, loads: ModelOperand) -> tuple[str, ...]:
    """Return the missing keys that the model's own loading needs: some models save keys only
    sometimes.
    """
    options = request.options
    is_narrowed = options.select is not None or options.trainable_only
    is_renamed = request.like is not None or request.rule_steps
    if is_narrowed or is_renamed or options.form not in (None, ModelForm.SERIALIZED):
        return outcome.missing
    if not loads.is_definition or loads.is_folder:
        return outcome.missing
    from ckpttool.tracing.loading import verdict_on_section

    needed: dict[str, None] = {}
    for path in dict.fromkeys(outcome.plan.sections):
        below = prefix_of(path)
        missing = [key for key in outcome.missing if key.startswith(below)]
        section = outcome.result.section(path)
        if not missing or section.kind != "state_dict":
            continue
        if not verdict_on_section(loads.definition(), section).ok:
            needed.update(dict.fromkeys(missing))
    return tuple(needed)
