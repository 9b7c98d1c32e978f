"""From the options of a remap to its inputs: every operand is open, every model is known."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttool.core.checkpoint import Checkpoint, Section
from ckpttool.core.names import RUNTIME, Names
from ckpttool.core.optimizer_state import ID
from ckpttool.core.options import ModelOptions
from ckpttool.core.values import dataclass
from ckpttool.naming.convert import ModelForm
from ckpttool.operands.checkpoint import model_section, open_operand
from ckpttool.operands.model import ModelOperand
from ckpttool.operands.output import command
from ckpttool.operands.reading import as_read, read_for_model
from ckpttool.operands.same_model import of_one_model
from ckpttool.remapping.filling import Filler, filler_of
from ckpttool.remapping.gather import Gathered, gather_ranks, merge_replicas
from ckpttool.remapping.options import RemapOptions
from ckpttool.remapping.steps import Request
from ckpttool.ruleset.patterns import parse

if TYPE_CHECKING:
    from ckpttool.ruleset.steps import Step as RuleStep


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything that the options of a remap name, open and known.

    `source` is the checkpoint as the model reads it, `gathered` its tensors assembled from the
    parts of ranks, if it has such parts. `model` saved it, and `to_model` will load the output, if
    that is not `model`: another model, or the same with another optimizer. `request` is what the
    steps do to the keys. `fillers` have what the result lacks.
    """

    options: RemapOptions
    source: Checkpoint
    gathered: Gathered | None
    model: ModelOperand | None
    to_model: ModelOperand | None
    request: Request
    fillers: tuple[Filler, ...] = ()

    @property
    def whole(self) -> Checkpoint:
        """The checkpoint with whole tensors."""
        return self.source if self.gathered is None else self.gathered.checkpoint

    @property
    def names(self) -> Names | None:
        """The names of the model that saved the checkpoint."""
        return None if self.model is None else self.model.names()

    @property
    def to_names(self) -> Names | None:
        """The names of the model that will load the output, if that is not `model`."""
        return None if self.to_model is None else self.to_model.names()

    @property
    def other_model(self) -> ModelOperand | None:
        """Another model that will load the output; None if only the optimizer is another one."""
        return None if self.options.to_model is None else self.to_model

    @property
    def named_by(self) -> ModelOperand | None:
        """The model whose names the result has; None if no model is named."""
        return self.request.loads or self.other_model or self.request.saved

    @property
    def saved(self) -> ModelOperand | None:
        """The model with the names that the keys have; None if the keys stay as they are."""
        return self.request.saved


def resolve(
    source: Checkpoint,
    options: RemapOptions,
    model: ModelOperand | None,
    to_model: ModelOperand | None,
    dtype: str | None = None,
) -> Inputs:
    """Return the inputs of the remap of `source`.

    `model` is the model that saved the source, `to_model` the result of `loading_model`, `dtype`
    what floating-point tensors are cast to. Raise
    `CkptError` if an operand cannot be read, `Refused` if parts of ranks do not fit together.
    """
    source = merge_replicas(read_for_model(source, model))
    names = None if model is None else model.names()
    gathered = gather_ranks(source, names, options.source_units)
    request = replace(_plain_request(source, options, model), dtype=dtype)
    inputs = Inputs(options, source, gathered, model, to_model, request)
    if options.using is not None:
        from ckpttool.tracing.converter import converter_of

        converter = converter_of(options.using, inputs.whole, options.materialize)
        inputs = replace(inputs, request=replace(request, converter=converter))
    fillers = tuple(filler_of(operand) for operand in options.fill_from or ())
    return replace(inputs, request=_with_models(inputs), fillers=fillers)


def loading_model(options: RemapOptions, model: ModelOperand | None) -> ModelOperand | None:
    """Return what will load the output if that is not `model`: another model, or the same with
    another optimizer.
    """
    optimizer = None if options.optimizers else options.to_optimizer
    if options.to_model is not None:
        return ModelOperand(options.to_model, options.materialize, optimizer, option="--to-model")
    if options.to_optimizer is None or model is None:
        return None
    return model.with_optimizer(optimizer)


def _plain_request(
    source: Checkpoint, options: RemapOptions, model: ModelOperand | None
) -> Request:
    """Return the request without models."""
    compare = ""
    if model is not None:
        named = ModelOptions(model=options.model, materialize=options.materialize)
        compare = command("diff", (source.source,), named)
    like = _like(options, model)
    return Request(options, compare, like=like, rule_steps=_rule_steps(options))


def _like(options: RemapOptions, model: ModelOperand | None) -> Section | None:
    """Return the state dict whose naming is used."""
    other = options.like
    if other is None:
        return None
    if not isinstance(other, Checkpoint):
        other = open_operand(other)
    return model_section(read_for_model(other, model))


def _with_models(inputs: Inputs) -> Request:
    """Return the request with the models whose names the keys have and get."""
    options, request, model = inputs.options, inputs.request, inputs.model
    if inputs.gathered is None and _is_about_optimizers_only(inputs):
        by_names = options.optimizer_keys not in (None, ID) and inputs.source.state_dicts
        # as torch.distributed.checkpoint names them
        return replace(request, unwrapped=model if by_names else None)
    if model is None:
        return replace(request, loads=inputs.to_model)
    # rules lead to the names of the other model themselves
    other = None if options.has_rules else inputs.other_model
    saved, loads = _read_and_written_by(inputs.whole, model, other, options)
    return replace(request, saved=saved, loads=loads)


def _is_about_optimizers_only(inputs: Inputs) -> bool:
    """Return whether models are named for their optimizers only, while the keys stay as they
    are.
    """
    options = inputs.options
    if options.optimizer_keys is None and inputs.to_model is None:
        return False
    if options.trainable_only or (options.to_model is not None and inputs.source.state_dicts):
        return False
    about_keys = (options.to, options.from_, options.like, options.select, options.fill_from)
    return all(option is None for option in about_keys)


def _read_and_written_by(
    source: Checkpoint, model: ModelOperand, other: ModelOperand | None, options: RemapOptions
) -> tuple[ModelOperand, ModelOperand | None]:
    """Return the model with the names that the keys have, and if they get names of another one,
    that one.

    Each is a model under its own names or the names of from_pretrained. `other` is another model
    that will load the output. Raise `CkptError` if names of from_pretrained are requested, and the
    model has none.
    """
    saved, form = model, options.form
    if options.source_form is ModelForm.PRETRAINED:
        saved = model.by_pretrained
    elif options.source_form is None:
        saved = as_read(
            model, of_one_model(source, options.sections, model.names())[0], source.source
        )
    target = other or model
    if form is ModelForm.PRETRAINED:
        target, needs_target = target.by_pretrained, not saved.pretrained
    else:
        unchanged = form is None and options.like is None
        to_runtime = isinstance(form, ModelForm) and form.names == RUNTIME
        needs_target = saved.pretrained and not unchanged and not to_runtime
    return saved, target if other is not None or needs_target else None


def _rule_steps(options: RemapOptions) -> tuple[RuleStep, ...]:
    rules = tuple(parse(text, reverse=options.reverse) for text in options.rule or ())
    if options.rules is None:
        if not rules:
            return ()
        from ckpttool.ruleset.steps import RulePlace, rename

        return (rename(RulePlace("--rule"), rules),)
    from ckpttool.ruleset.parse import read_rules

    return read_rules(options.rules, reverse=options.reverse, rules=rules)
