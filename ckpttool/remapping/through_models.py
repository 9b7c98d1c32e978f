"""Steps of a plan that need a model: its keys in another form, or under another model's names."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ckpttool.core import expression as ex
from ckpttool.core.checkpoint import Checkpoint, Section, TensorEntry
from ckpttool.core.errors import Problem, Refused, same_problem
from ckpttool.core.expression import Op, Ref
from ckpttool.core.names import RUNTIME, SERIALIZED, Names
from ckpttool.core.plan import Output, Plan, compose
from ckpttool.core.tables import with_sections, without_tensors
from ckpttool.core.text import plural
from ckpttool.evaluate.apply import Runner
from ckpttool.evaluate.compare import same_values
from ckpttool.kinds.adapters import adapter_in
from ckpttool.naming import wrappers
from ckpttool.naming.convert import (
    NOT_READ_BACK,
    ModelForm,
    Reading,
    check_versions,
    plan_form_change,
    read_keys,
    with_model_run,
)
from ckpttool.naming.match import NameTables, drop_variants, with_variants, without_variants
from ckpttool.operands.model import ModelOperand
from ckpttool.remapping.steps import Draft, Request, only_outputs


def to_model_form(draft: Draft, request: Request, model: ModelOperand) -> Draft:
    """Rename the keys to a form of the model that saved them. Raise `Refused` if they are not this
    model's.
    """
    tables, to = model.tables, request.form_by_model
    names = tables.names
    section, reading, counters = _read_without_counters(draft.section, tables, request)
    if not reading.match.names:
        raise _not_its_keys(section, request, names)
    if reading.form != to.names:
        check_versions(names, section, reading)
    moved = plan_form_change(tables, section, reading, to.names, request.like is None)
    plan = _with_code(moved.plan, model, section, reading)
    plan, variant_problems = _adapt_variants(plan, tables, section, reading, to)
    lost = _lost(section, moved.copies)
    problems = [*moved.problems, *variant_problems]
    hint = f"compare them: {request.compare}; --rule 'FROM => TO' renames keys"
    _raise_misfit(f"the checkpoint does not fit {names.model}", problems, lost, hint)
    missing = missing_names(tables, to, plan)
    if request.options.trainable_only:
        plan, missing = _trained(plan, missing, tables, to.names)
    notes = list(draft.notes)
    if to is ModelForm.UNFLATTENED and not any("@" in output.key for output in plan.outputs):
        notes.append(
            "no call variants (`gate@1`): neither the file nor the model has any; if"
            " torch.export.unflatten makes some, name the unflattened module as the model"
        )
    if reading.ambiguous:
        notes.append(
            "the keys fit the serialized and the runtime form, whose values differ: read as"
            " serialized, which is what state_dict() writes (--from runtime says otherwise)"
        )
    if not names.roundtrips:
        notes.append(NOT_READ_BACK)
    return replace(
        draft,
        plan=plan,
        canonical=tables.canonical_names(to.names),
        form=_form_of(draft, reading),
        missing=missing,
        counters=counters,
        notes=tuple(notes),
        runners=_with_runner(draft.runners, plan, model.code),
    )


def _read_without_counters(
    section: Section, tables: NameTables, request: Request
) -> tuple[Section, Reading, tuple[str, ...]]:
    """Return the section without the counters of AveragedModels that the model does not have, the
    reading of its keys, and these counters.
    """
    source_form = request.options.source_form
    form = source_form.names if isinstance(source_form, ModelForm) else None
    reading = read_keys(tables, section, form)
    unmatched = set(reading.match.unmatched)
    counters = [key for key in wrappers.counters(section.tensor_keys) if key in unmatched]
    if not counters:
        return section, reading, ()
    section = without_tensors(section, counters)
    return section, read_keys(tables, section, form), tuple(counters)


def _form_of(draft: Draft, reading: Reading) -> str:
    """Return the form that the keys had, for the report: the wrappers in them, or the model's."""
    if reading.match.wrapped:
        return draft.evidence.form or "wrapped"
    return reading.form


def _adapt_variants(
    plan: Plan, tables: NameTables, section: Section, reading: Reading, to: ModelForm
) -> tuple[Plan, list[Problem]]:
    """Return the plan with the call variants of the form: an unflattened program has all of them,
    an exported one has none.
    """
    dropped, problems = drop_variants(reading.match.variants, reading.match.names, section)
    outputs = list(plan.outputs)
    if to is ModelForm.EXPORTED:
        outputs, more_dropped, more_problems = without_variants(outputs, tables.first, section)
        dropped, problems = dropped + more_dropped, problems + more_problems
    elif to is ModelForm.UNFLATTENED:
        outputs = with_variants(outputs, tables.first)
        outputs += _variants_of_file(outputs, reading, section)
        kept = {name for output in outputs for name in ex.refs(output.source)}
        dropped = [gone for gone in dropped if gone.key not in kept]
    plan = replace(plan, outputs=tuple(outputs), dropped=(*plan.dropped, *dropped))
    return plan, problems


def _variants_of_file(
    outputs: Sequence[Output], reading: Reading, section: Section
) -> list[Output]:
    """Return the call variants that only the file has: a model that is not unflattened has none."""
    names = {output.key for output in outputs}
    paths = wrappers.recognize(section.keys)
    variants = []
    for key in reading.match.variants:
        name = wrappers.strip(key, paths)
        if name not in names:
            variants.append(Output(section.path, name, Ref(key)))
    return variants


def _not_its_keys(section: Section, request: Request, names: Names) -> Refused:
    """Return the error for a section none of whose keys is a name of the model."""
    hint = f"compare them: {request.compare}"
    adapter = adapter_in(section)
    if adapter is not None and adapter.alone:
        follows = "pass --to-model NEW, the model it will be put on, or rules"
        if request.loads is not None or request.rule_steps:
            follows = "leave --model out: its keys name modules"
        hint = f"{adapter.title} without its model: {follows}"
    problems = same_problem("not a key of this model", section.by_key())
    return Refused(
        f"0 of {len(problems)} keys are names of {names.model}", hint=hint, problems=problems
    )


def _with_code(plan: Plan, model: ModelOperand, section: Section, reading: Reading) -> Plan:
    """Return the plan with the values that only the model's own code computes, if it may run."""
    if model.code is None:
        return plan
    return with_model_run(plan, model.tables, section, reading, model.code.arguments)


def to_other_model(draft: Draft, request: Request, model: ModelOperand) -> Draft:
    """Rename one model's runtime names to a form of another model. Raise `Refused` if it has other
    tensors.
    """
    tables, section = model.tables, draft.evaluated()
    names = tables.names
    reading = read_keys(tables, section, RUNTIME)
    moved = plan_form_change(tables, section, reading, request.model_form.names)
    plan = _with_code(moved.plan, model, section, reading)
    plan, variant_problems = _adapt_variants(plan, tables, section, reading, request.model_form)
    problems = [*moved.problems, *variant_problems]
    for entry in section.tensors:
        shape = tables.shape_of(reading.match.names.get(entry.key, ""), RUNTIME)
        if shape is not None and shape != entry.shape:
            problem = f"shape {list(entry.shape)}, {names.model} has {list(shape)}"
            problems.append(Problem(problem, entry.key, "shape"))
    lost = _lost(section, moved.copies)
    hint = "rename keys with --rule 'FROM => TO', or name the model that has a place for them"
    _raise_misfit(f"the tensors do not fit {names.model}", problems, lost, hint)
    return replace(
        draft,
        plan=compose(draft.plan, plan),
        canonical=tables.canonical_names(request.model_form.names),
        runners=_with_runner(draft.runners, plan, model.code),
        missing=missing_names(tables, request.model_form, plan),
    )


_KEEP_ONE = (
    "to keep both, name a model that does not tie them (for hf:FOLDER, set tie_word_embeddings to"
    " false in its config.json); --drop KEY leaves one of them out"
)


def _raise_misfit(
    message: str, problems: Sequence[Problem], lost: Sequence[Problem], hint: str
) -> None:
    """Raise `Refused` if there are problems, or values that would be `lost`."""
    if problems or lost:
        raise Refused(
            f"{message}: {plural(len(problems) + len(lost), 'problem')}",
            hint=hint if problems else _KEEP_ONE,
            problems=[*problems, *lost],
        )


def with_common_keys(draft: Draft, saved: ModelOperand, loads: ModelOperand) -> Draft | None:
    """Return the draft with the keys as they are, if both models save the same keys, and hold them
    in different tensors; None for other models.

    saved  q, k, v  ─ hook ─▶  qkv.weight        loads  qkv.weight  ─▶  qkv.weight
    """
    section, tables = draft.section, loads.tables
    match = read_keys(saved.tables, section, SERIALIZED).match
    if match.unmatched or match.problems or match.wrapped or not match.names:
        return None
    dropped, differing = drop_variants(match.variants, match.names, section)
    if differing:
        return None
    fqns: set[str] = set()
    for key in match.names.values():
        source = saved.tables.saved.get(key)
        fqns.update(() if source is None else ex.refs(source))
    if fqns <= tables.runtime_names.keys():
        return None
    outputs = [output for output in draft.plan.outputs if output.key not in match.variants]
    for entry in section.tensors:
        if entry.key in match.variants:
            continue
        if tables.shape_of(match.names[entry.key], SERIALIZED) != entry.shape:
            return None
    plan = replace(draft.plan, outputs=tuple(outputs), dropped=(*draft.plan.dropped, *dropped))
    return replace(
        draft,
        plan=plan,
        canonical=tables.serialized_names,
        form=SERIALIZED,
        missing=missing_names(tables, ModelForm.SERIALIZED, plan),
    )


def without_pruning(section: Section, tables: NameTables) -> Plan | None:
    """Return the plan that computes pruned weights as `torch.nn.utils.prune.remove` does; None if
    no weight is pruned, or the model has the masks too.

    weight_orig, weight_mask  ─▶  weight = weight_mask * weight_orig
    """
    entries = section.by_key()
    canonical = wrappers.canonical_in(section)
    model_names = {*tables.serialized_names.values(), *tables.runtime_names.values()}
    masks: dict[str, str] = {}
    for key, original in entries.items():
        name = key.removesuffix("_orig")
        if name == key or name in entries or canonical[key] in model_names:
            continue
        mask = entries.get(f"{name}_mask")
        if not isinstance(original, TensorEntry) or not isinstance(mask, TensorEntry):
            continue
        if (original.dtype, original.shape) == (mask.dtype, mask.shape):
            masks[key] = mask.key
    if not masks:
        return None
    outputs = []
    all_masks = set(masks.values())
    for key in entries:
        if key in masks:
            pruned = Op("aten.mul.Tensor", (Ref(masks[key]), Ref(key)))
            outputs.append(Output(section.path, key.removesuffix("_orig"), pruned))
        elif key not in all_masks:
            outputs.append(Output(section.path, key, Ref(key)))
    return Plan(tuple(outputs))


def place_counters(draft: Draft, keep: bool) -> Draft:
    """Put the counters of AveragedModels, which were set aside, first in the plan; or drop them
    unless `keep`.
    """
    keys = draft.counters
    canonical = {**draft.canonical, **dict.fromkeys(keys, wrappers.COUNTER)}
    draft = replace(draft, counters=(), canonical=canonical)
    if not keep:
        return draft.with_dropped_counters(keys)
    counters = [Output(draft.section.path, key, Ref(key)) for key in keys]
    return draft.with_outputs((*counters, *draft.plan.outputs))


def names_for_load(tables: NameTables, to: ModelForm) -> tuple[Mapping[str, str], Collection[str]]:
    """Return the names of the form for `match`: name -> canonical name, and optional names. Second
    names of a tensor are optional because the plan adds them; buffers that are not saved, because
    no load needs them.

    A strict load needs extra state under its serialized key; a program has no extra state.
    """
    if to.names == SERIALIZED:
        optional = {*tables.spare_keys} - {*tables.names.extra_state}
        return tables.serialized_names, optional
    return tables.runtime_names, {*tables.spare_fqns}


def missing_names(tables: NameTables, to: ModelForm, plan: Plan) -> tuple[str, ...]:
    """Return the names of the form that a load needs and that the plan does not write."""
    names, optional = names_for_load(tables, to)
    present = {output.key for output in plan.outputs}.union(optional)
    return tuple(name for name in names if name not in present)


def with_form_recorded(tables: NameTables, result: Checkpoint, path: str, form: str) -> Checkpoint:
    """Return `result` with the form of the section at `path` recorded, if its names, dtypes and
    shapes do not show it. The form of the source is forgotten.
    """
    section = replace(result.section(path), form=None, has_runtime_names=False)
    has_all_keys = tables.serialized_names.keys() <= section.by_key().keys()
    is_either = tables.forms_agree and has_all_keys
    if not is_either and read_keys(tables, section).form != form:
        section = replace(section, form=form)
    return with_sections(result, {path: section})


def _trained(
    plan: Plan, missing: Sequence[str], tables: NameTables, form: str
) -> tuple[Plan, tuple[str, ...]]:
    """Return the plan and the missing keys without frozen parameters, as torch's
    ``ignore_frozen_params``; buffers stay.

    The keys are ``serialized`` or ``runtime`` names, as `form` says.
    """
    frozen = set()
    for tensor in tables.names.runtime:
        if tensor.kind == "parameter" and not tensor.trainable:
            frozen.add(tensor.fqn)

    def is_trained(key: str) -> bool:
        source = None if form == RUNTIME else tables.saved.get(key)
        fqns = {key} if source is None else set(ex.refs(source))
        return not fqns <= frozen

    outputs = [output for output in plan.outputs if is_trained(output.key)]
    plan = only_outputs(plan, outputs, "the parameter is frozen")
    return plan, tuple(filter(is_trained, missing))


def _with_runner(
    runners: Mapping[str, Runner], plan: Plan, code: ModelOperand | None
) -> Mapping[str, Runner]:
    """Return the functions that run a model's own code, with this model's for the runs of the
    plan.
    """
    if code is None:
        return runners
    return {**runners, **dict.fromkeys((run.way for run in plan.runs), code.run)}


def _lost(section: Section, copies: Sequence[tuple[str, str]]) -> list[Problem]:
    """Return the keys that the model treats as a copy of another key, and that have other
    values.
    """
    entries = section.by_key()
    problems = []
    for key, twin in copies:
        if not same_values(entries[key], entries[twin]):
            problem = (
                f"the model takes it for a copy of {twin}, but its values differ: they would be"
                " lost"
            )
            problems.append(Problem(problem, key))
    return problems
