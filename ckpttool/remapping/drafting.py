"""The plan of each section: a draft that goes through the steps of the request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ckpttool.core.checkpoint import Checkpoint, Section
from ckpttool.core.errors import Refused
from ckpttool.core.names import RUNTIME, SERIALIZED
from ckpttool.core.plan import Plan, compose
from ckpttool.core.tables import without_tensors
from ckpttool.core.values import dataclass
from ckpttool.evaluate.apply import apply
from ckpttool.kinds.adapters import Adapter, adapter_in
from ckpttool.naming import wrappers
from ckpttool.naming.convert import Form, ModelForm, check_versions, read_keys
from ckpttool.naming.wrappers import Chain
from ckpttool.operands.load_plan import LOAD_HOOK, by_loading
from ckpttool.operands.model import ModelOperand
from ckpttool.remapping.adapter import apply_rules_of_base, to_other_base
from ckpttool.remapping.steps import (
    Draft,
    Request,
    apply_rules,
    apply_rules_like_first,
    cast_floats,
    convert,
    new_draft,
    notes_on_like,
    rewrap,
    select,
    take_names,
    unwrap,
    without_peft,
)
from ckpttool.remapping.through_models import (
    place_counters,
    to_model_form,
    to_other_model,
    with_common_keys,
    without_pruning,
)


@dataclass(frozen=True, slots=True)
class SectionTask:
    """A section to rename, for the steps.

    `adapter` is what its keys show of one, `start` the draft before the first step, `first` the
    finished draft of the first section, if this is another one. `of_trainer`: a Lightning Trainer
    wrote the section.
    """

    request: Request
    section: Section
    adapter: Adapter | None
    start: Draft
    first: Draft | None
    of_trainer: bool = False

    @property
    def form(self) -> Form | None:
        """The form that the keys get."""
        return self.request.options.form


def drafts_of(
    source: Checkpoint, sections: Sequence[Section], request: Request, lightning: bool
) -> list[Draft]:
    """Return the draft of each section. A problem of a further section is reported under its
    path.
    """
    drafts: list[Draft] = []
    for section in sections:
        first = drafts[0] if drafts else None
        try:
            drafts.append(_draft(section, request, lightning, first))
        except Refused as error:
            if not source.in_memory and len(sections) == 1:
                raise
            message, hint = error.message, error.hint
            if source.in_memory:
                hint = hint.replace("ckpttool inspect CKPT", source.inspect_call)
            if len(sections) > 1:
                message = f"{section.title}: {message}"
                hint = f"{hint}; --sections '{sections[0].path}' changes that one alone"
            raise Refused(message, hint=hint, problems=error.problems) from None
    return drafts


def _draft(section: Section, request: Request, lightning: bool, first: Draft | None) -> Draft:
    """Go through the steps; `first` is another section's draft."""
    start = new_draft(section, request.options.source_form, lightning)
    adapter = adapter_in(section)
    if adapter is not None and adapter.alone and not _is_for_peft(request.options.form):
        start = without_peft(start)
    task = SectionTask(request, section, adapter, start, first, lightning)
    draft = start
    for step in _STEPS:
        draft = step(draft, task)
    return draft


def _is_for_peft(form: Form | None) -> bool:
    return isinstance(form, Chain) and "peft" in form.words


# Steps


def _by_function(draft: Draft, task: SectionTask) -> Draft:
    converter = task.request.converter
    return draft if converter is None else convert(draft, converter)


def _through_models(draft: Draft, task: SectionTask) -> Draft:
    """Bring the keys to the requested form of a model's names, or to the names of another model."""
    request = task.request
    saved, loads = request.saved, request.loads
    if saved is None:
        return draft
    if task.adapter is not None and loads is not None:
        return to_other_base(draft, saved.tables, loads.tables, loads.code)
    if loads is not None and _asks_for_keys_of_model(request):
        kept = with_common_keys(draft, saved, loads)
        if kept is not None:
            return kept
    draft = _to_form(draft, task, saved)
    if loads is not None:
        draft = to_other_model(draft, request, loads)
    return place_counters(draft, keep=request.like is not None or isinstance(task.form, Chain))


def _asks_for_keys_of_model(request: Request) -> bool:
    """Return whether the options ask for all keys that the model saves, and name no form of the
    file's.
    """
    options = request.options
    if options.trainable_only or options.source_form is not None:
        return False
    return request.model_form is ModelForm.SERIALIZED


def _to_form(draft: Draft, task: SectionTask, saved: ModelOperand) -> Draft:
    """Bring the keys to the form, after what the model computes when it loads them: pruned weights
    from their masks, and keys that only its load hooks know.
    """
    request, section = task.request, task.section
    counters = tuple(wrappers.counters(section.keys))
    rest = without_tensors(section, counters)
    pruned = without_pruning(rest, saved.tables)
    if pruned is not None:
        whole = _loaded(pruned, rest)
        after = to_model_form(replace(draft, section=whole), request, saved)
        plan = compose(pruned, after.plan)
        return replace(after, section=section, plan=plan, counters=counters)
    load_plan = None if request.options.source_form is not None else by_loading(saved, rest)
    if load_plan is None:
        return to_model_form(draft, request, saved)
    loaded = _loaded(load_plan, rest)
    if request.form_by_model.names == SERIALIZED:
        reading = replace(read_keys(saved.tables, loaded, RUNTIME), form=SERIALIZED)
        # the versions of the file would be in the output
        check_versions(saved.names(), loaded, reading)
    after = to_model_form(replace(draft, section=replace(loaded, form=RUNTIME)), request, saved)
    plan = compose(load_plan, after.plan)
    return replace(after, section=section, plan=plan, form=LOAD_HOOK, counters=counters)


def _loaded(plan: Plan, section: Section) -> Section:
    """Return the section as the plan leaves it."""
    return apply(plan, Checkpoint.of(section)).section(section.path)


def _submodule(draft: Draft, task: SectionTask) -> Draft:
    prefix = task.request.options.select
    if prefix is None:
        return draft
    return select(draft, prefix, keys_are_model_names=task.request.saved is not None)


def _names_or_wrappers(draft: Draft, task: SectionTask) -> Draft:
    """Take over the names of another checkpoint, or add and remove wrappers."""
    request, form = task.request, task.form
    if request.like is not None:
        return take_names(draft, request.like)
    if isinstance(form, Chain):
        return rewrap(draft, _around_module(form, task))
    if form is not None and request.saved is None:
        return rewrap(draft, Chain(()))
    return draft


def _around_module(form: Chain, task: SectionTask) -> Chain:
    """Return the chain without its innermost ``lightning`` if the keys belong to a LightningModule
    with several attributes already: none of them is the wrapped model.

    model.weight, loss.scale  ─ ddp(lightning) ─▶  module.model.weight, module.loss.scale
    """
    is_read_from_keys = task.request.options.source_form is None
    is_module = task.of_trainer and "lightning" not in task.start.evidence.words
    if is_read_from_keys and is_module and form.words[-1:] == ("lightning",):
        return Chain(form.words[:-1])
    return form


def _rules(draft: Draft, task: SectionTask) -> Draft:
    """Apply the rules. In an adapter, they are about its base. In a further section, they give the
    names that the first section got.
    """
    request = task.request
    if not request.rule_steps:
        return draft
    if task.adapter is not None and (request.saved is None or request.loads is None):
        return apply_rules_of_base(draft, request.rule_steps)
    if task.first is not None and request.saved is None:
        return apply_rules_like_first(draft, request.rule_steps, task.first)
    return apply_rules(draft, request.rule_steps, is_new=draft is task.start)


def _cast(draft: Draft, task: SectionTask) -> Draft:
    dtype = task.request.dtype
    return draft if dtype is None else cast_floats(draft, dtype, is_new=draft is task.start)


def _notes_on_names(draft: Draft, task: SectionTask) -> Draft:
    like = task.request.like
    if like is None or task.request.options.fill_from:  # then the end result is compared
        return draft
    return replace(draft, notes=(*draft.notes, *notes_on_like(draft.keys, like)))


def _unwrapped(draft: Draft, task: SectionTask) -> Draft:
    model = task.request.unwrapped
    return draft if model is None else unwrap(draft, model.tables)


# in their order: rules are about the names that the steps before them lead to
_STEPS: tuple[Callable[[Draft, SectionTask], Draft], ...] = (
    _by_function,
    _through_models,
    _submodule,
    _names_or_wrappers,
    _rules,
    _notes_on_names,
    _unwrapped,
    _cast,
)
