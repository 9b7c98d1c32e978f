"""Which names of a model of transformers a remap leads from and to: those of its state dict, or of from_pretrained."""

from __future__ import annotations

from dataclasses import dataclass

from ckpttool.checkpoint import Checkpoint
from ckpttool.edits.remap.options import RemapOptions
from ckpttool.names import RUNTIME, Names
from ckpttool.naming.model_form import ModelForm
from ckpttool.operands.model import ModelOperand, as_read
from ckpttool.operands.sections import of_one_model


@dataclass(frozen=True, slots=True)
class Ways:
    """The names that the keys are read by, and where these are not what is written, the names that they lead to."""

    names: Names
    to_names: Names | None
    from_pretrained: bool


def ways(source: Checkpoint, model: ModelOperand, loads: ModelOperand | None, options: RemapOptions) -> Ways:
    """The ways that `options` ask for; `loads` is another model that is to load the output.

    Raises `CkptError` where names of from_pretrained are asked for, and the model has none.
    """
    saved = model
    if options.source_form is ModelForm.PRETRAINED:
        saved = model.by_pretrained
    elif options.source_form is None:
        saved = as_read(model, of_one_model(source, options.sections, model.names())[0], source.source)
    to_pretrained = options.form is ModelForm.PRETRAINED
    target = loads or model
    if to_pretrained:
        target = target.by_pretrained
    form = options.form
    as_they_are = (form is None and options.like is None) or (isinstance(form, ModelForm) and form.names == RUNTIME)
    on_the_way = saved.pretrained == to_pretrained or (as_they_are and not to_pretrained)
    to_names = None if loads is None and on_the_way else target.names()
    return Ways(saved.names(), to_names, saved.pretrained)
