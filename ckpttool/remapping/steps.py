"""The steps of a remap that need no model, and the request that all steps carry out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttool.core.checkpoint import Section
from ckpttool.core.errors import Refused
from ckpttool.core.names import Names
from ckpttool.core.plan import Dropped, Output, compose
from ckpttool.core.text import plural
from ckpttool.core.values import dataclass
from ckpttool.naming import wrappers
from ckpttool.naming.call_variants import aliases
from ckpttool.naming.convert import Form, ModelForm, read
from ckpttool.naming.match import NameTables, align
from ckpttool.naming.wrappers import Chain, strip
from ckpttool.operands.model import ModelOperand
from ckpttool.remapping.model_steps import NO_COUNTER, ByModel, Counters, Draft, Step, ToModel, renamed, select
from ckpttool.remapping.rule_effects import RuleEffect

if TYPE_CHECKING:
    from ckpttool.rules.steps import Step as RuleStep


@dataclass(frozen=True, slots=True)
class Select:
    """One submodule, under its own names unless `keep_prefix`. `by_model`: the keys are a model's by now."""

    prefix: str
    keep_prefix: bool = False
    by_model: bool = False

    def apply(self, draft: Draft) -> Draft:
        """Raises `Refused` where nothing is below the prefix."""
        paths = wrappers.recognise(draft.keys) if self.by_model else draft.wrappers.paths
        plan, own = select(draft.plan, paths, self.prefix)
        canonical = {key: strip(key, paths) for key in own}
        if not self.keep_prefix:
            plan = renamed(plan, draft.section, own)
            canonical = {own[key]: name.removeprefix(f"{self.prefix}.") for key, name in canonical.items()}
        return replace(draft, plan=plan, canonical=canonical)


@dataclass(frozen=True, slots=True)
class TakeOver:
    """The keys of another checkpoint; what that one has not keeps its name."""

    other: Section

    def apply(self, draft: Draft) -> Draft:
        """Names differ by wrappers' segments only. Raises `Refused` where none does: the naming is another model's."""
        names = align(draft.keys, self.other.by_key())
        if not names and draft.keys:
            raise Refused(
                "--like: the two have no name in common, wrappers left aside",
                hint="what save_pretrained writes has names of its own: --model hf:FOLDER --to pretrained instead; "
                "between two definitions `ckpttool diff CKPT LIKE --suggest rules.toml` looks for rules",
            )
        return replace(draft, plan=draft.renamed(names))


@dataclass(frozen=True, slots=True)
class TakenOver:
    """Notes on what the output and the other checkpoint do not have in common, once all renames are done."""

    other: Section

    def apply(self, draft: Draft) -> Draft:
        """The draft with the notes."""
        made, wanted = set(draft.keys), self.other.by_key()
        own = [key for key in draft.keys if key not in wanted]
        rest = [key for key in wanted if key not in made]
        notes = list(draft.notes)
        if own:
            notes.append(f"the other checkpoint has no name for {plural(len(own), 'key')}: {_first(own)}")
        if rest:
            left_out = f"not in the output are {plural(len(rest), 'key')} of the other checkpoint: {_first(rest)}"
            notes.append(left_out + _twins(rest, self.other))
        return replace(draft, notes=tuple(notes))


def _first(keys: Sequence[str]) -> str:
    return ", ".join(keys[:5]) + (", ..." if len(keys) > 5 else "")


def _twins(keys: Sequence[str], other: Section) -> str:
    """What writes second names, where all of `keys` are second names of tensors (ties, call variants)."""
    twins = aliases(other)
    return "; all are second names, which --model MODEL --to FORM writes" if twins.keys() >= set(keys) else ""


@dataclass(frozen=True, slots=True)
class Rewrap:
    """Wrappers' segments taken out of the keys, and those of the chain put in."""

    wanted: Chain

    def apply(self, draft: Draft) -> Draft:
        """A counter that the chain has no place for is dropped; one that it needs is made."""
        canonical = {key: draft.canonical.get(key, key) for key in draft.keys}
        path = draft.section.path
        counted = [key for key in wrappers.counters([entry.key for entry in draft.section.tensors]) if key in canonical]
        names, gone = wrappers.rewrap(canonical, self.wanted, counted)
        dropped = [Dropped(path, key, NO_COUNTER) for key in gone]
        kept = tuple(output for output in draft.plan.outputs if output.key in names)
        plan = replace(draft.plan, outputs=kept, dropped=(*draft.plan.dropped, *dropped))
        plan = renamed(plan, draft.section, names)
        made = tuple(Output(path, key, source) for key, source in wrappers.new_counter(self.wanted, counted).items())
        return replace(draft, plan=replace(plan, outputs=(*made, *plan.outputs)))


@dataclass(frozen=True, slots=True)
class Unwrap:
    """Wrappers' segments taken out of the keys, if the model named has none there."""

    tables: NameTables

    def apply(self, draft: Draft) -> Draft:
        """Return the draft with the keys of the model itself; AveragedModel's counter is dropped."""
        if not any(read(self.tables, keys).match.wrapped for keys in (draft.section, draft.evaluated())):
            return draft
        names = wrappers.canonical_keys(draft.keys, lightning="lightning" in draft.wrappers.words)
        return Rewrap(Chain(())).apply(replace(draft, canonical=names))


@dataclass(frozen=True, slots=True)
class ByRuleSteps:
    """The user's rules: those of the command line as one step, then those of a file."""

    steps: Sequence[RuleStep]

    def apply(self, draft: Draft) -> Draft:
        """Raises `Refused` as `rules.steps.plan_of` does."""
        from ckpttool.rules.steps import plan_of

        section = draft.evaluated()
        plan = plan_of(self.steps, section)
        return replace(draft, plan=compose(draft.plan, plan), ruled=RuleEffect(section, plan))


@dataclass(frozen=True, slots=True)
class Prefixed:
    """Rules that were written for keys that begin with `shown`, where those of a further section begin with `own`."""

    rules: ByRuleSteps
    own: str
    shown: str

    def apply(self, draft: Draft) -> Draft:
        """Raises `Refused` as the rules do, with keys as they were written for."""
        ours = [key for key in draft.keys if key.startswith(self.own)]
        others = {key for key in draft.keys if not key.startswith(self.own)}
        names = {key: self.shown + key.removeprefix(self.own) for key in ours}
        done = self.rules.apply(replace(draft, plan=draft.renamed(names)))
        back = [key for key in done.keys if key.startswith(self.shown) and key not in others]
        return replace(done, plan=done.renamed({key: self.own + key.removeprefix(self.shown) for key in back}))


@dataclass(frozen=True, slots=True)
class RemapRequest:
    """What is asked; all of it may be left out.

    `names` are those of the model that saved the keys, `to_names` those of another model that is to load them; `to` is
    the form that they get, `source_form` the one that they are in, where it is not to be recognised. `like` is a state
    dict whose naming is taken over. `rule_steps`, of the command line or of a file, come last. `select` narrows to one
    submodule, under its own names unless `keep_prefix`, and `trainable_only` to what `names` say is trained. `sections`
    are the paths of the state dicts that are changed, with commas between them; None for all that hold the model.
    `unwrapped` is a model whose own keys get no wrappers in the end, though nothing else is asked of its names.
    `code` and `to_code` are the two models themselves, where they are code.
    """

    names: Names | None = None
    to: Form | None = None
    source_form: Form | None = None
    to_names: Names | None = None
    like: Section | None = None
    rule_steps: Sequence[RuleStep] = ()
    select: str | None = None
    keep_prefix: bool = False
    trainable_only: bool = False
    sections: str | None = None
    code: ModelOperand | None = None
    to_code: ModelOperand | None = None
    unwrapped: Names | None = None

    @property
    def changes(self) -> bool:
        """Whether anything is asked at all."""
        return replace(self, sections=None) != RemapRequest()

    @property
    def model_form(self) -> ModelForm:
        """The form of the model's own names that `to` is, or that a chain of wrappers is put around."""
        return self.to if isinstance(self.to, ModelForm) else ModelForm.SERIALIZED

    def steps(self) -> Iterator[Step]:
        """The model's way, then the submodule, the wrappers, the rules."""
        if self.names is not None:
            yield from self._through_models(NameTables(self.names))
        if self.select is not None:
            yield Select(self.select, self.keep_prefix, by_model=self.names is not None)
        if self.like is not None:
            yield TakeOver(self.like)
        elif isinstance(self.to, Chain):
            yield Rewrap(self.to)
        elif self.to is not None and self.names is None:
            yield Rewrap(Chain(()))
        if self.rule_steps:
            yield ByRuleSteps(self.rule_steps)
        if self.like is not None:
            yield TakenOver(self.like)
        if self.unwrapped is not None:
            yield Unwrap(NameTables(self.unwrapped))

    def _through_models(self, tables: NameTables) -> Iterator[Step]:
        form = self.source_form if isinstance(self.source_form, ModelForm) else None
        yield ByModel(tables, self.form_by_model(tables), form, self.trainable_only, self.like is None, self.code)
        if self.to_names is not None:
            yield ToModel(NameTables(self.to_names), self.model_form, self.to_code)
        yield Counters(keep=self.like is not None or isinstance(self.to, Chain))

    def form_by_model(self, tables: NameTables) -> ModelForm:
        """The form that the model's own step leads to; another model's step begins at the runtime names."""
        if self.to_names is not None:
            return ModelForm.RUNTIME
        return self.model_form if self.like is None else ModelForm(read(tables, self.like).form)
