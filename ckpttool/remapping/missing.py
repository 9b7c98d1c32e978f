"""The keys of a model that the result of a remap lacks."""

from __future__ import annotations

from ckpttool.core.text import dotted
from ckpttool.kinds.adapters import adapter_in
from ckpttool.naming.convert import ModelForm
from ckpttool.naming.match import match
from ckpttool.operands.model import ModelOperand
from ckpttool.operands.same_model import of_one_model
from ckpttool.remapping.resolve import Inputs
from ckpttool.remapping.result import Remap
from ckpttool.remapping.steps import Request
from ckpttool.remapping.through_models import loadable


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
