"""Which names of a model of transformers a remap leads from and to: those of its state dict, or of from_pretrained."""

from __future__ import annotations

from ckpttool.checkpoint import Checkpoint
from ckpttool.edits.remap.options import RemapOptions
from ckpttool.names import RUNTIME
from ckpttool.naming.model_form import ModelForm
from ckpttool.operands.model import ModelOperand, as_read
from ckpttool.operands.sections import of_one_model


def ways(
    source: Checkpoint, model: ModelOperand, loads: ModelOperand | None, options: RemapOptions
) -> tuple[ModelOperand, ModelOperand | None]:
    """The model under the names that the keys are read by, and where they lead to other names, what has these.

    `loads` is another model that is to load the output. Raises `CkptError` where names of from_pretrained are asked
    for, and the model has none.
    """
    saved = model
    if options.source_form is ModelForm.PRETRAINED:
        saved = model.by_pretrained
    elif options.source_form is None:
        saved = as_read(model, of_one_model(source, options.sections, model.names())[0], source.source)
    to_pretrained, form = options.form is ModelForm.PRETRAINED, options.form
    target = loads or model
    if to_pretrained:
        target = target.by_pretrained
    as_they_are = (form is None and options.like is None) or (isinstance(form, ModelForm) and form.names == RUNTIME)
    on_the_way = saved.pretrained == to_pretrained or (as_they_are and not to_pretrained)
    return saved, None if loads is None and on_the_way else target
