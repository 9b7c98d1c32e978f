"""The request of a remap, and the steps that change the plan of a section: models, submodule,
wrappers, rules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from typing import TYPE_CHECKING

from ckpttool.core import expression as ex
from ckpttool.core.checkpoint import Checkpoint, Section
from ckpttool.core.errors import Refused
from ckpttool.core.expression import Ref
from ckpttool.core.plan import Dropped, Output, Plan, compose, in_turn, module_renames
from ckpttool.core.tables import inverse, new_paths, without_tensors
from ckpttool.core.text import plural
from ckpttool.core.values import dataclass
from ckpttool.evaluate.apply import Runner, apply
from ckpttool.naming import wrappers
from ckpttool.naming.convert import Form, ModelForm, read_keys
from ckpttool.naming.match import NameTables, aliases_with_variants, align
from ckpttool.naming.model_change import ModelChange
from ckpttool.naming.wrappers import Chain, Evidence, strip
from ckpttool.operands.model import ModelOperand
from ckpttool.remapping.options import RemapOptions

if TYPE_CHECKING:
    from ckpttool.ruleset.steps import Step as RuleStep
    from ckpttool.tracing.converter import Converter

_NO_COUNTER = "AveragedModel's counter, which only that wrapper has"


@dataclass(frozen=True, slots=True)
class Request:
    """The options of a remap, and the values that they name.

    `saved` is the model with the names that the keys have, `loads` another model that will load
    them, `unwrapped` a model whose keys lose their wrappers in the end, if nothing else is
    requested of them. `like` is a state dict whose naming is used. `compare` is the command that
    compares the checkpoint with the model. `rule_steps`, from the command line or a file, come
    last. `dtype` is what floating-point tensors are cast to, `converter` the user's function.
    """

    options: RemapOptions
    compare: str
    saved: ModelOperand | None = None
    loads: ModelOperand | None = None
    unwrapped: ModelOperand | None = None
    like: Section | None = None
    rule_steps: Sequence[RuleStep] = ()
    dtype: str | None = None
    converter: Converter | None = None

    @property
    def changes(self) -> bool:
        """Whether the keys or tensors of the model's section may change."""
        options = self.options
        if self.rule_steps or options.trainable_only:
            return True
        models = (self.saved, self.loads, self.unwrapped, self.like, self.converter)
        given = (*models, options.to, options.from_, options.select, self.dtype)
        return any(value is not None for value in given)

    @property
    def model_form(self) -> ModelForm:
        """The form of the model's names that is requested, or that a chain of wrappers goes
        around.
        """
        form = self.options.form
        return form if isinstance(form, ModelForm) else ModelForm.SERIALIZED

    @property
    def rename_by_rules(self) -> Callable[[str], str] | None:
        """A function that returns the name which the rules give to a name without a tensor; None
        without rules.
        """
        if not self.rule_steps:
            return None
        from ckpttool.ruleset.steps import name_after

        return partial(name_after, self.rule_steps)

    @property
    def form_by_model(self) -> ModelForm:
        """The form that the first model's step leads to; another model's step begins at the runtime
        names.
        """
        if self.loads is not None:
            return ModelForm.RUNTIME
        if self.like is None or self.saved is None:
            return self.model_form
        return ModelForm(read_keys(self.saved.tables, self.like).form)


@dataclass(frozen=True, slots=True)
class Draft:
    """The plan for one section so far. Every step returns a new draft.

    `section` is as it was read, `evidence` what its keys show of wrappers, `form` the form of its
    keys. `canonical` maps the keys that the plan writes, or wrote before the rules, to canonical
    names. `counters` are the keys of AveragedModels' counters, which are set aside while the keys
    go through a model's names: a model has none. `runners` run models' code for the plan. `ruled`
    is what the rules did. `missing` are the keys of the target model that the plan does not write.
    """

    section: Section
    plan: Plan
    evidence: Evidence
    canonical: Mapping[str, str]
    form: str | None = None
    counters: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    runners: Mapping[str, Runner] = field(default_factory=dict)
    ruled: ModelChange | None = None
    missing: tuple[str, ...] = ()

    @property
    def keys(self) -> list[str]:
        return [output.key for output in self.plan.outputs]

    def evaluated(self) -> Section:
        """The section after the plan, on the index; without the counters that are set aside."""
        section = without_tensors(self.section, self.counters)
        result = apply(self.plan, Checkpoint.of(section), self.runners)
        return result.section(section.path)

    def renamed(self, names: Mapping[str, str]) -> Draft:
        """The draft with new names for outputs; a key without a new name keeps its own.
        ``_metadata`` follows.
        """
        plan, section = self.plan, self.section
        outputs = []
        for output in plan.outputs:
            key = names.get(output.key, output.key)
            outputs.append(Output(output.section, key, output.source))
        modules = plan.modules
        if section.modules is not None:
            # path in the file  ─ plan so far ─▶  current path  ─ new names ─▶  path in the result
            new_names = {key: new for key, new in names.items() if key != new}
            current = new_paths(modules)
            paths = [current.get(path, path) for path in section.modules]
            modules = in_turn(modules, module_renames(section.path, paths, new_names))
        canonical = {names.get(key, key): name for key, name in self.canonical.items()}
        plan = replace(plan, outputs=tuple(outputs), modules=modules)
        return replace(self, plan=plan, canonical=canonical)

    def with_outputs(self, outputs: Iterable[Output]) -> Draft:
        return replace(self, plan=replace(self.plan, outputs=tuple(outputs)))

    def with_dropped_counters(self, keys: Sequence[str]) -> Draft:
        """Return the draft with a record that these counters of AveragedModels are dropped."""
        dropped = [*self.plan.dropped]
        for key in keys:
            dropped.append(Dropped(self.section.path, key, _NO_COUNTER, "counter"))
        return replace(self, plan=replace(self.plan, dropped=tuple(dropped)))


def identity_plan(sections: Iterable[Section]) -> Plan:
    """Return the plan that keeps every entry of the sections under its key."""
    outputs: list[Output] = []
    for section in sections:
        outputs += [Output(section.path, key, Ref(key)) for key in section.keys]
    return Plan(tuple(outputs))


def new_draft(section: Section, form: Form | None, lightning: bool) -> Draft:
    """Return the draft that keeps every key. Wrappers are as `form` says, or as the keys show."""
    keys = section.keys
    if form is None:
        evidence = wrappers.evidence_in(section, lightning=lightning)
    elif isinstance(form, Chain):
        evidence = wrappers.declared(form, keys)
    else:  # these are names without wrappers
        evidence = Evidence((), (), frozenset())
    paths = evidence.paths
    canonical = {key: strip(key, paths) for key in keys} if paths else dict(zip(keys, keys))
    return Draft(section, identity_plan([section]), evidence, canonical, evidence.form)


def without_peft(draft: Draft) -> Draft:
    """Return the draft of an adapter's own file: PEFT's root is a part of its keys, not a
    wrapper.
    """
    evidence = draft.evidence.without_peft()
    paths = evidence.paths
    canonical = {key: strip(key, paths) for key in draft.canonical}
    return replace(draft, evidence=evidence, canonical=canonical, form=evidence.form)


# Submodule, wrappers, rules


def only_outputs(plan: Plan, outputs: list[Output], reason: str) -> Plan:
    """Return the plan with these of its outputs; sources that no other output reads are dropped."""
    still_read = set(_sources(outputs))
    dropped = []
    for place in dict.fromkeys(_sources(plan.outputs)):
        if place not in still_read:
            dropped.append(Dropped(*place, reason))
    return replace(plan, outputs=tuple(outputs), dropped=(*plan.dropped, *dropped))


def _sources(outputs: Iterable[Output]) -> Iterator[tuple[str, str]]:
    """Yield section and key of everything that the outputs read."""
    for output in outputs:
        for key in ex.refs(output.source):
            yield output.section, key


def select(draft: Draft, prefix: str, keys_are_model_names: bool) -> Draft:
    """Keep one submodule, under its own names. Raise `Refused` if nothing is below the prefix.

    `prefix` has all segments of wrappers, or none of them. The wrappers inside the submodule, and
    around itself, are in its own names: its keys alone show them, as in a file of the submodule.
    """
    paths = wrappers.recognize(draft.keys) if keys_are_model_names else draft.evidence.paths
    inner_names = {}
    as_written = {}
    for key in draft.keys:
        inner = _below(prefix, key, paths)
        if inner:
            inner_names[key] = inner
        if key.startswith(f"{prefix}."):
            as_written[key] = key.removeprefix(f"{prefix}.")
    inner_names = inner_names or as_written
    if not inner_names:
        heads = list(dict.fromkeys(strip(key, paths).partition(".")[0] for key in draft.keys))
        raise Refused(
            f"no key is below {prefix!r}",
            hint=f"--select takes the dotted path of a submodule; there are {', '.join(heads[:8])}",
        )
    outputs = [output for output in draft.plan.outputs if output.key in inner_names]
    draft = replace(draft, plan=only_outputs(draft.plan, outputs, f"not below {prefix}"))
    inner_paths = wrappers.recognize(inner_names.values())
    canonical = {inner: strip(inner, inner_paths) for inner in inner_names.values()}
    return replace(draft.renamed(inner_names), canonical=canonical)


def _below(prefix: str, key: str, paths: Collection[str]) -> str:
    """Return the rest of the key below the module that is `prefix` without wrappers, or an empty
    text.
    """
    segments = key.split(".")
    for depth in range(1, len(segments)):
        if strip(".".join(segments[:depth]), paths) == prefix:
            return ".".join(segments[depth:])
    return ""


def take_names(draft: Draft, other: Section) -> Draft:
    """Rename keys to the keys of another checkpoint that differ by wrappers only; other keys
    stay.
    """
    names = align(draft.keys, other.by_key())
    if not names and draft.keys:
        raise Refused(
            "--like: the checkpoints have no key in common, even without wrappers",
            hint="save_pretrained writes other names: --model hf:FOLDER --to pretrained instead; "
            "between two definitions `ckpttool diff CKPT LIKE --suggest rules.toml` looks for"
            " rules",
        )
    return draft.renamed(names)


def notes_on_like(keys: Sequence[str], other: Section) -> list[str]:
    """Return notes on the keys that the output and the other checkpoint do not have in common."""
    written, expected = set(keys), other.by_key()
    only_here = [key for key in keys if key not in expected]
    only_there = [key for key in expected if key not in written]
    notes = []
    if only_here:
        count = plural(len(only_here), "key")
        notes.append(f"the other checkpoint has no name for {count}: {_first_five(only_here)}")
    if only_there:
        count = plural(len(only_there), "key")
        note = f"not in the output are {count} of the other checkpoint: {_first_five(only_there)}"
        if aliases_with_variants(other).keys() >= set(only_there):  # ties, call variants
            note += "; all are second names, which --model MODEL --to FORM writes"
        notes.append(note)
    return notes


def _first_five(keys: Sequence[str]) -> str:
    return ", ".join(keys[:5]) + (", ..." if len(keys) > 5 else "")


def rewrap(draft: Draft, target: Chain) -> Draft:
    """Replace the wrappers in the keys by the chain.

    A counter that the chain has no place for is dropped; one that it needs is added.
    """
    canonical = {key: draft.canonical.get(key, key) for key in draft.keys}
    counters = set(wrappers.counters(draft.keys))
    counters.update(wrappers.counters(draft.section.tensor_keys))
    counted = [key for key in draft.keys if key in counters]
    names, removed = wrappers.rewrap(canonical, target, counted)
    outputs: list[Output] = []
    dropped: list[str] = []
    for output in draft.plan.outputs:
        if output.key in names:
            outputs.append(output)
        if output.key in removed:
            dropped += ex.refs(output.source)
    draft = draft.with_outputs(outputs).with_dropped_counters(dropped).renamed(names)
    new = []
    for key, value in wrappers.new_counter(target, counted).items():
        new.append(Output(draft.section.path, key, value))
    return draft.with_outputs((*new, *draft.plan.outputs))


def unwrap(draft: Draft, tables: NameTables) -> Draft:
    """Remove the segments of wrappers, if the model has none there; AveragedModel's counter is
    dropped.
    """
    # earlier steps may have removed the wrappers of the file, or have added some
    sections = (draft.section, draft.evaluated())
    if not any(read_keys(tables, section).match.wrapped for section in sections):
        return draft
    names = wrappers.canonical_keys(draft.keys, lightning="lightning" in draft.evidence.words)
    return rewrap(replace(draft, canonical=names), Chain(()))


def apply_rules(draft: Draft, steps: Sequence[RuleStep], *, is_new: bool = False) -> Draft:
    """Apply the rules; `is_new`: the draft changes nothing yet. Raise `Refused` as
    `ruleset.steps.plan_of` does.
    """
    from ckpttool.ruleset.steps import plan_of

    section = draft.section if is_new else draft.evaluated()
    plan = plan_of(steps, section)
    ruled = ModelChange(section, plan)
    return replace(draft, plan=plan if is_new else compose(draft.plan, plan), ruled=ruled)


def convert(draft: Draft, converter: Converter) -> Draft:
    """Let the user's function convert the section. Raise as `Converter.plan`.

    This is the first step: its plan replaces the plan of the draft.
    """
    section = draft.section
    plan, notes = converter.plan(section.path, section.keys)
    notes = (*draft.notes, *notes)
    result = replace(draft, plan=plan, ruled=ModelChange(section, plan), notes=notes)
    after = new_draft(result.evaluated(), None, lightning=False)
    return replace(result, evidence=after.evidence, canonical=after.canonical, form=after.form)


def cast_floats(draft: Draft, dtype: str, *, is_new: bool) -> Draft:
    """Cast all floating-point tensors. Raise `Refused` if some are not dense."""
    from ckpttool.ruleset import steps

    try:
        return apply_rules(draft, (steps.cast_floats(dtype),), is_new=is_new)
    except Refused as error:
        raise Refused(
            f"{plural(len(error.problems), 'tensor')} cannot be cast to {dtype}",
            hint="only dense tensors can be cast: --drop them with `ckpttool remap` first",
            problems=error.problems,
        ) from None


def apply_rules_like_first(draft: Draft, steps: Sequence[RuleStep], first: Draft) -> Draft:
    """Apply rules that were written for the keys of the first section, which may differ from these
    by one prefix.

    `first` is the finished draft of the first section.
    """
    prefix_pair = _only_prefixes(first, draft)
    if prefix_pair is None:
        return apply_rules(draft, steps)
    first_prefix, prefix = prefix_pair
    others, as_in_first = set(), {}
    for key in draft.keys:
        if key.startswith(prefix):
            as_in_first[key] = first_prefix + key.removeprefix(prefix)
        else:
            others.add(key)
    changed = apply_rules(draft.renamed(as_in_first), steps)
    back = {}
    for key in changed.keys:
        if key.startswith(first_prefix) and key not in others:
            back[key] = prefix + key.removeprefix(first_prefix)
    return replace(changed.renamed(back), canonical=draft.canonical)


def _only_prefixes(first: Draft, draft: Draft) -> tuple[str, str] | None:
    """Return the prefixes in which all keys of two sections differ, before the rules; None if they
    differ in another way.
    """
    first_keys = inverse(first.canonical)
    prefixes = set()
    for key, name in draft.canonical.items():
        if name in first_keys:
            prefixes.add(_different_prefixes(first_keys[name], key))
    return prefixes.pop() if len(prefixes) == 1 else None


def _different_prefixes(left: str, right: str) -> tuple[str, str] | None:
    """Return what two keys have above their common end; None if neither is the end of the other.

    ``model.head.bias`` and ``head.bias`` differ in ``model.`` and an empty text.
    """
    if left.endswith(right):
        return left.removesuffix(right), ""
    if right.endswith(left):
        return "", right.removesuffix(left)
    return None
