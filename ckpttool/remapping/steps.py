"""The request of a remap, and the steps that change the plan of a section: models, submodule,
wrappers, rules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING

from ckpttool.core import expression as ex
from ckpttool.core.checkpoint import Checkpoint, Section, TensorEntry
from ckpttool.core.errors import Problem, Refused
from ckpttool.core.expression import Op, Ref
from ckpttool.core.names import RUNTIME, SERIALIZED
from ckpttool.core.plan import Dropped, Output, Plan, compose, in_turn, module_renames
from ckpttool.core.text import plural
from ckpttool.core.values import dataclass
from ckpttool.evaluate.apply import Runner, apply
from ckpttool.evaluate.compare import same_values
from ckpttool.kinds.adapters import adapter_of
from ckpttool.naming import wrappers
from ckpttool.naming.convert import (
    NOT_READ_BACK,
    Form,
    ModelForm,
    check_versions,
    left_to_code,
    move,
    read,
)
from ckpttool.naming.match import (
    NameTables,
    aliases,
    align,
    drop_variants,
    with_variants,
    without_variants,
)
from ckpttool.naming.wrappers import Chain, Evidence, strip
from ckpttool.operands.model import ModelOperand
from ckpttool.remapping.optimizer import RuleEffect
from ckpttool.remapping.options import RemapOptions

if TYPE_CHECKING:
    from ckpttool.ruleset.patterns import Renaming
    from ckpttool.ruleset.steps import Step as RuleStep

NO_COUNTER = "AveragedModel's counter, which only that wrapper has"


@dataclass(frozen=True, slots=True)
class Request:
    """The options of a remap, and the values that they name.

    `saved` is the model with the names that the keys have, `loads` another model that will load
    them, `unwrapped` a model whose keys lose their wrappers in the end, if nothing else is
    requested of them. `like` is a state dict whose naming is used. `compare` is the command that
    compares the checkpoint with the model. `rule_steps`, from the command line or a file, come
    last.
    """

    options: RemapOptions
    compare: str
    saved: ModelOperand | None = None
    loads: ModelOperand | None = None
    unwrapped: ModelOperand | None = None
    like: Section | None = None
    rule_steps: Sequence[RuleStep] = ()

    @property
    def changes(self) -> bool:
        own = self.options
        named = (self.saved, self.loads, self.unwrapped, self.like, own.to, own.from_, own.select)
        return bool(self.rule_steps or own.trainable_only) or any(one is not None for one in named)

    @property
    def model_form(self) -> ModelForm:
        """The form of the model's names that is requested, or that a chain of wrappers goes
        around.
        """
        form = self.options.form
        return form if isinstance(form, ModelForm) else ModelForm.SERIALIZED

    @property
    def renamings(self) -> tuple[Renaming, ...]:
        """The rules as renames of single names."""
        if not self.rule_steps:
            return ()
        from ckpttool.ruleset.steps import Renames

        return (Renames(tuple(self.rule_steps)),)

    @property
    def form_by_model(self) -> ModelForm:
        """The form that the first model's step leads to; another model's step begins at the runtime
        names.
        """
        if self.loads is not None:
            return ModelForm.RUNTIME
        if self.like is None or self.saved is None:
            return self.model_form
        return ModelForm(read(self.saved.tables, self.like).form)


@dataclass(frozen=True, slots=True)
class Draft:
    """The plan for one section so far. Every step returns a new draft.

    `section` is as it was read, `wrappers` what its keys show of wrappers, `form` the form of its
    keys. `canonical` maps the keys that the plan writes to canonical names. `counters` are the keys
    of AveragedModels' counters, which are set aside while the keys go through a model's names: a
    model has none. `runners` run models' code for the plan. `ruled` is what the rules did.
    `missing` are the keys of the target model that the plan does not write.
    """

    section: Section
    plan: Plan
    wrappers: Evidence
    canonical: Mapping[str, str]
    form: str | None = None
    counters: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    runners: Mapping[str, Runner] = field(default_factory=dict)
    ruled: RuleEffect | None = None
    missing: tuple[str, ...] = ()

    @property
    def keys(self) -> list[str]:
        return [output.key for output in self.plan.outputs]

    def evaluated(self) -> Section:
        """The section after the plan, on the index; without the counters that are set aside."""
        tensors = tuple(entry for entry in self.section.tensors if entry.key not in self.counters)
        section = replace(self.section, tensors=tensors)
        return apply(self.plan, Checkpoint.of(section), self.runners).section(section.path)

    def renamed(self, names: Mapping[str, str]) -> Draft:
        """The draft with new names for outputs; a key without a new name keeps its own.
        ``_metadata`` follows.
        """
        plan, section = self.plan, self.section
        outputs = tuple(
            Output(one.section, names.get(one.key, one.key), one.source) for one in plan.outputs
        )
        modules = tuple(plan.modules)
        if section.modules is not None:
            moved = {key: new for key, new in names.items() if key != new}
            before = {m.old: m.new for m in plan.modules}
            paths = (before.get(path, path) for path in section.modules)
            modules = in_turn(modules, module_renames(section.path, paths, moved))
        return replace(self, plan=replace(plan, outputs=outputs, modules=modules))

    def without(self, keys: Sequence[str], reason: str) -> Draft:
        dropped = (Dropped(self.section.path, key, reason) for key in keys)
        return replace(self, plan=replace(self.plan, dropped=(*self.plan.dropped, *dropped)))


def carried(sections: Iterable[Section]) -> Plan:
    return Plan(
        tuple(Output(section.path, key, Ref(key)) for section in sections for key in section.keys)
    )


def new_draft(section: Section, form: Form | None, lightning: bool) -> Draft:
    """Return the draft that keeps every key. Wrappers are as `form` says, or as the keys show."""
    keys = section.keys
    if form is None:
        evidence = wrappers.infer(keys, lightning=lightning)
    elif isinstance(form, Chain):
        evidence = wrappers.declared(form, keys)
    else:  # these are names without wrappers
        evidence = Evidence((), (), frozenset())
    paths = evidence.paths
    canonical = {key: strip(key, paths) for key in keys} if paths else dict(zip(keys, keys))
    return Draft(section, carried([section]), evidence, canonical, evidence.form)


def without_peft(draft: Draft) -> Draft:
    """Return the draft of an adapter's own file: PEFT's root is a part of its keys, not a
    wrapper.
    """
    evidence = draft.wrappers.without_peft()
    paths = evidence.paths
    canonical = {key: strip(key, paths) for key in draft.canonical}
    return replace(draft, wrappers=evidence, canonical=canonical, form=evidence.form)


# Through models


def to_model_form(draft: Draft, request: Request, model: ModelOperand) -> Draft:
    """Rename the keys to a form of the model that saved them. Raise `Refused` if they are not this
    model's.
    """
    tables, to, code = model.tables, request.form_by_model, model.code
    names = tables.names
    source_form = request.options.source_form
    form = source_form.names if isinstance(source_form, ModelForm) else None
    section = draft.section
    reading = read(tables, section, form)
    counted = wrappers.counters([entry.key for entry in section.tensors])
    counters = [key for key in counted if key in reading.match.unmatched]
    if counters:
        section = replace(
            section, tensors=tuple(entry for entry in section.tensors if entry.key not in counters)
        )
        reading = read(tables, section, form)
    if not reading.match.names:
        adapter = adapter_of(section.by_key())
        hint = f"compare them: {request.compare}"
        if adapter is not None and adapter.alone:
            hint = (
                f"{adapter.title} without its model: pass --to-model NEW, the model it will be"
                " put on, or rules"
            )
        problems = [Problem("no name of this model", key) for key in section.by_key()]
        raise Refused(
            f"0 of {len(problems)} keys are names of {names.model}", hint=hint, problems=problems
        )
    if reading.form != to.names:
        check_versions(names, section, reading)
    moved = move(tables, section, reading, to.names, request.like is None)
    plan = (
        moved.plan
        if code is None
        else left_to_code(moved.plan, tables, section, reading, code.arguments)
    )

    # Call variants: an unflattened program has all of them, an exported one has none.
    dropped, variant_problems = drop_variants(reading.match.variants, reading.match.names, section)
    outputs = list(plan.outputs)
    if to is ModelForm.EXPORTED:
        outputs, more, others = without_variants(outputs, tables.first, section)
        dropped, variant_problems = dropped + more, variant_problems + others
    elif to is ModelForm.UNFLATTENED:
        outputs = with_variants(outputs, tables.first)
    plan = replace(plan, outputs=tuple(outputs), dropped=(*plan.dropped, *dropped))
    lost = _lost(section, moved.copies)
    problems = [*moved.problems, *variant_problems, *lost]
    if problems:
        hint = f"compare them: {request.compare}; --rule 'FROM => TO' renames keys"
        raise Refused(
            f"the checkpoint does not fit {names.model}: {plural(len(problems), 'problem')}",
            hint=_KEEP_ONE if len(lost) == len(problems) else hint,
            problems=problems,
        )
    missing = lacking(tables, to, plan)
    if request.options.trainable_only:
        wanted = Plan(tuple(Output(section.path, key, Ref(key)) for key in missing))
        missing = tuple(output.key for output in _trained(wanted, tables, to.names).outputs)
        plan = _trained(plan, tables, to.names)
    notes = list(draft.notes)
    if reading.ambiguous:
        notes.append(
            "the keys fit the serialized and the runtime form, whose values differ: read as"
            " serialized, which is "
            "what state_dict() writes (--from runtime says otherwise)"
        )
    if not names.roundtrips:
        notes.append(NOT_READ_BACK)
    return replace(
        draft,
        plan=plan,
        canonical=tables.serialized_names,
        form=(draft.wrappers.form or "wrapped") if reading.match.wrapped else reading.form,
        missing=missing,
        counters=tuple(counters),
        notes=tuple(notes),
        runners=_with_runner(draft.runners, plan, code),
    )


def to_other_model(draft: Draft, request: Request, model: ModelOperand) -> Draft:
    """Rename one model's runtime names to a form of another model. Raise `Refused` if it has other
    tensors.
    """
    tables, section, code = model.tables, draft.evaluated(), model.code
    names = tables.names
    reading = read(tables, section, RUNTIME)
    moved = move(tables, section, reading, request.model_form.names)
    plan = (
        moved.plan
        if code is None
        else left_to_code(moved.plan, tables, section, reading, code.arguments)
    )
    problems = list(moved.problems)
    for entry in section.tensors:
        shape = tables.runtime_likeness.get(reading.match.names.get(entry.key, ""), ("", None))[1]
        if shape is not None and shape != entry.shape:
            problems.append(
                Problem(
                    f"shape {list(entry.shape)}, {names.model} has {list(shape)}",
                    entry.key,
                    "shape",
                )
            )
    lost = _lost(section, moved.copies)
    problems += lost
    if problems:
        hint = "rename keys with --rule 'FROM => TO', or name the model that has a place for them"
        raise Refused(
            f"the tensors do not fit {names.model}: {plural(len(problems), 'problem')}",
            hint=_KEEP_ONE if len(lost) == len(problems) else hint,
            problems=problems,
        )
    return replace(
        draft,
        plan=compose(draft.plan, plan),
        canonical=tables.serialized_names,
        runners=_with_runner(draft.runners, plan, code),
        missing=lacking(tables, request.model_form, plan),
    )


def without_pruning(section: Section, tables: NameTables) -> Plan | None:
    """Return the plan that computes pruned weights as `torch.nn.utils.prune.remove` does, if the
    model has no masks.

    None if there are none.
    """
    entries = section.by_key()
    canonical = wrappers.canonical_keys(section.keys)
    known = {*tables.serialized_names.values(), *tables.runtime_names.values()}
    masks: dict[str, str] = {}
    for key in entries:
        name = key.removesuffix("_orig")
        original, mask = entries[key], entries.get(f"{name}_mask")
        if (
            name == key
            or not isinstance(original, TensorEntry)
            or not isinstance(mask, TensorEntry)
        ):
            continue
        same = (original.dtype, original.shape) == (mask.dtype, mask.shape)
        if same and name not in entries and canonical[key] not in known:
            masks[key] = f"{name}_mask"
    if not masks:
        return None
    outputs = []
    for key in entries:
        if key in masks:
            pruned = Op("aten.mul.Tensor", (Ref(masks[key]), Ref(key)))
            outputs.append(Output(section.path, key.removesuffix("_orig"), pruned))
        elif key not in masks.values():
            outputs.append(Output(section.path, key, Ref(key)))
    return Plan(tuple(outputs))


def with_counters(draft: Draft, keep: bool) -> Draft:
    """Return the draft with the counters of AveragedModels, which were set aside, first in the plan
    or dropped.
    """
    keys = draft.counters
    done = replace(
        draft, counters=(), canonical={**draft.canonical, **dict.fromkeys(keys, wrappers.COUNTER)}
    )
    if not keep:
        return done.without(keys, NO_COUNTER)
    outputs = (*(Output(draft.section.path, key, Ref(key)) for key in keys), *draft.plan.outputs)
    return replace(done, plan=replace(draft.plan, outputs=outputs))


def loadable(tables: NameTables, to: ModelForm) -> tuple[Mapping[str, str], Collection[str]]:
    """Return the names of the form, as for `match`, and the names that a strict load does not need.

    These are second names of a tensor and buffers that are not saved.
    """
    if to.names == SERIALIZED:
        return tables.serialized_names, {*tables.spare_keys} - {*tables.names.extra_state}
    return tables.runtime_names, {*tables.spare_fqns}


def lacking(tables: NameTables, to: ModelForm, plan: Plan) -> tuple[str, ...]:
    """Return the names of the form that a load needs and that the plan does not write."""
    names, spare = loadable(tables, to)
    keys = {output.key for output in plan.outputs}
    return tuple(name for name in names if name not in keys and name not in spare)


def recorded(tables: NameTables, result: Checkpoint, path: str, form: str) -> Checkpoint:
    """Return `result` with its form recorded if the names, dtypes and shapes do not show it."""
    section = replace(result.section(path), form=None)
    alike = tables.forms_agree and tables.serialized_names.keys() <= section.by_key().keys()
    if not (alike or read(tables, section).form == form):
        section = replace(section, form=form)
    return replace(
        result, sections=tuple(section if s.path == path else s for s in result.sections)
    )


def _trained(plan: Plan, tables: NameTables, form: str) -> Plan:
    """Return the plan without outputs of frozen parameters only, as torch's
    ``ignore_frozen_params``; buffers stay.

    The plan's keys are ``serialized`` or ``runtime`` names, as `form` says.
    """
    frozen = {t.fqn for t in tables.names.runtime if t.kind == "parameter" and not t.trainable}

    def is_trained(output: Output) -> bool:
        source = None if form == RUNTIME else tables.saved.get(output.key)
        parts = {output.key} if source is None else set(ex.refs(source))
        return not parts <= frozen

    return _only(
        plan, [output for output in plan.outputs if is_trained(output)], "the parameter is frozen"
    )


def _only(plan: Plan, outputs: list[Output], reason: str) -> Plan:
    """Return the plan with these of its outputs; sources that no other output reads are dropped."""
    used = {(output.section, key) for output in outputs for key in ex.refs(output.source)}
    read_before = dict.fromkeys(
        (output.section, key) for output in plan.outputs for key in ex.refs(output.source)
    )
    dropped = tuple(Dropped(*place, reason) for place in read_before if place not in used)
    return replace(plan, outputs=tuple(outputs), dropped=(*plan.dropped, *dropped))


def _with_runner(
    runners: Mapping[str, Runner], plan: Plan, code: ModelOperand | None
) -> Mapping[str, Runner]:
    return runners if code is None else {**runners, **{run.way: code.run for run in plan.runs}}


_KEEP_ONE = (
    "to keep both, name a model that does not tie them (for hf:FOLDER, set tie_word_embeddings to"
    " false in its "
    "config.json); --drop KEY leaves one of them out"
)


def _lost(section: Section, copies: Sequence[tuple[str, str]]) -> list[Problem]:
    """Return the keys that the model treats as a copy of another key, and that have other
    values.
    """
    entries = section.by_key()
    return [
        Problem(
            f"the model takes it for a copy of {twin}, but its values differ: they would be lost",
            key,
        )
        for key, twin in copies
        if not same_values(entries[key], entries[twin])
    ]


# Submodule, wrappers, rules


def select(draft: Draft, prefix: str, by_model: bool) -> Draft:
    """Keep one submodule, under its own names. Raise `Refused` if nothing is below the prefix.

    `prefix` has all segments of wrappers, or none of them. The wrappers inside the submodule, and
    around itself, are in its own names: its keys alone show them, as in a file of the submodule.
    `by_model`: the keys are a model's by now.
    """
    paths = wrappers.recognise(draft.keys) if by_model else draft.wrappers.paths

    def below(key: str) -> str:
        parts = key.split(".")
        for depth in range(1, len(parts)):
            if strip(".".join(parts[:depth]), paths) == prefix:
                return ".".join(parts[depth:])
        return ""

    rests = {key: rest for key in draft.keys if (rest := below(key))}
    rests = rests or {
        key: key.removeprefix(f"{prefix}.") for key in draft.keys if key.startswith(f"{prefix}.")
    }
    if not rests:
        heads = dict.fromkeys(strip(key, paths).partition(".")[0] for key in draft.keys)
        raise Refused(
            f"no key is below {prefix!r}",
            hint="--select takes the dotted path of a submodule; there are"
            f" {', '.join(list(heads)[:8])}",
        )
    outputs = [output for output in draft.plan.outputs if output.key in rests]
    draft = replace(draft, plan=_only(draft.plan, outputs, f"not below {prefix}"))
    own = wrappers.infer(rests.values())
    return replace(
        draft.renamed(rests), canonical={rest: strip(rest, own.paths) for rest in rests.values()}
    )


def take_names(draft: Draft, other: Section) -> Draft:
    """Rename keys to the keys of another checkpoint that differ by wrappers only; other keys
    stay.
    """
    names = align(draft.keys, other.by_key())
    if not names and draft.keys:
        raise Refused(
            "--like: the two have no name in common, wrappers left aside",
            hint="save_pretrained writes other names: --model hf:FOLDER --to pretrained instead; "
            "between two definitions `ckpttool diff CKPT LIKE --suggest rules.toml` looks for"
            " rules",
        )
    return draft.renamed(names)


def notes_on_like(draft: Draft, other: Section) -> list[str]:
    """Return notes on the keys that the output and the other checkpoint do not have in common."""

    def first(keys: Sequence[str]) -> str:
        return ", ".join(keys[:5]) + (", ..." if len(keys) > 5 else "")

    written, expected = set(draft.keys), other.by_key()
    own = [key for key in draft.keys if key not in expected]
    rest = [key for key in expected if key not in written]
    notes = []
    if own:
        notes.append(
            f"the other checkpoint has no name for {plural(len(own), 'key')}: {first(own)}"
        )
    if rest:
        note = (
            f"not in the output are {plural(len(rest), 'key')} of the other checkpoint:"
            f" {first(rest)}"
        )
        all_second = aliases(other).keys() >= set(rest)  # ties, call variants
        notes.append(
            note
            + ("; all are second names, which --model MODEL --to FORM writes" if all_second else "")
        )
    return notes


def rewrap(draft: Draft, target: Chain) -> Draft:
    """Replace the wrappers in the keys by the chain.

    A counter that the chain has no place for is dropped; one that it needs is added.
    """
    canonical = {key: draft.canonical.get(key, key) for key in draft.keys}
    as_read = wrappers.counters([entry.key for entry in draft.section.tensors])
    counters = {*as_read, *wrappers.counters(draft.keys)}
    counted = [key for key in draft.keys if key in counters]
    names, removed = wrappers.rewrap(canonical, target, counted)
    outputs = tuple(output for output in draft.plan.outputs if output.key in names)
    dropped = [
        key
        for output in draft.plan.outputs
        if output.key in removed
        for key in ex.refs(output.source)
    ]
    draft = (
        replace(draft, plan=replace(draft.plan, outputs=outputs))
        .without(dropped, NO_COUNTER)
        .renamed(names)
    )
    new = (
        Output(draft.section.path, key, value)
        for key, value in wrappers.new_counter(target, counted).items()
    )
    return replace(draft, plan=replace(draft.plan, outputs=(*new, *draft.plan.outputs)))


def unwrap(draft: Draft, tables: NameTables) -> Draft:
    """Remove the segments of wrappers, if the model has none there; AveragedModel's counter is
    dropped.
    """
    if not any(read(tables, keys).match.wrapped for keys in (draft.section, draft.evaluated())):
        return draft
    names = wrappers.canonical_keys(draft.keys, lightning="lightning" in draft.wrappers.words)
    return rewrap(replace(draft, canonical=names), Chain(()))


def apply_rules(draft: Draft, steps: Sequence[RuleStep], *, is_new: bool = False) -> Draft:
    """Apply the rules; `is_new`: the draft changes nothing yet. Raise `Refused` as
    `rules.steps.plan_of` does.
    """
    from ckpttool.ruleset.steps import plan_of

    section = draft.section if is_new else draft.evaluated()
    plan = plan_of(steps, section)
    return replace(
        draft, plan=plan if is_new else compose(draft.plan, plan), ruled=RuleEffect(section, plan)
    )


def apply_rules_like_first(
    draft: Draft, steps: Sequence[RuleStep], first: Draft, start: Draft
) -> Draft:
    """Apply rules that were written for the keys of the first section, which may differ from these
    by one prefix.

    `start` is the draft of this section before any step.
    """
    keys = {name: key for key, name in first.canonical.items()}
    pairs = [(keys[name], key) for key, name in start.canonical.items() if name in keys]
    prefixes = {
        (key[: len(key) - len(shared)], other[: len(other) - len(shared)])
        for key, other in pairs
        for shared in [key if len(key) < len(other) else other]
        if key.endswith(shared) and other.endswith(shared)
    }
    if len(prefixes) != 1 or not all(
        key.endswith(other) or other.endswith(key) for key, other in pairs
    ):
        return apply_rules(draft, steps)
    ((shown, own),) = prefixes
    others = {key for key in draft.keys if not key.startswith(own)}
    names = {key: shown + key.removeprefix(own) for key in draft.keys if key.startswith(own)}
    done = apply_rules(draft.renamed(names), steps)
    back = [key for key in done.keys if key.startswith(shown) and key not in others]
    return done.renamed({key: own + key.removeprefix(shown) for key in back})
