"""Steps that need no model: one submodule, another checkpoint's names, wrappers, the user's rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttool.checkpoint import Section
from ckpttool.edits.remap.by_model import NO_COUNTER
from ckpttool.edits.remap.draft import Draft, renamed
from ckpttool.edits.remap.narrow import select
from ckpttool.edits.remap.ruled import Ruled
from ckpttool.errors import Refused
from ckpttool.naming.alignment import align
from ckpttool.naming.call_variants import aliases
from ckpttool.naming.forms import read
from ckpttool.naming.name_tables import NameTables
from ckpttool.naming.wrappers import chain
from ckpttool.naming.wrappers.chain import Chain
from ckpttool.naming.wrappers.table import strip
from ckpttool.plan import Dropped, Output, compose
from ckpttool.values import dataclass
from ckpttool.words import plural

if TYPE_CHECKING:
    from ckpttool.edits.rules.steps import Step as RuleStep


@dataclass(frozen=True, slots=True)
class Select:
    """One submodule, under its own names unless `keep_prefix`. `by_model`: the keys are a model's by now."""

    prefix: str
    keep_prefix: bool = False
    by_model: bool = False

    def apply(self, draft: Draft) -> Draft:
        """Raises `Refused` where nothing is below the prefix."""
        paths = chain.recognise(draft.keys) if self.by_model else draft.wrappers.paths
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
        counted = [key for key in chain.counters([entry.key for entry in draft.section.tensors]) if key in canonical]
        names, gone = chain.rewrap(canonical, self.wanted, counted)
        dropped = [Dropped(path, key, NO_COUNTER) for key in gone]
        kept = tuple(output for output in draft.plan.outputs if output.key in names)
        plan = replace(draft.plan, outputs=kept, dropped=(*draft.plan.dropped, *dropped))
        plan = renamed(plan, draft.section, names)
        made = tuple(Output(path, key, source) for key, source in chain.new_counter(self.wanted, counted).items())
        return replace(draft, plan=replace(plan, outputs=(*made, *plan.outputs)))


@dataclass(frozen=True, slots=True)
class Unwrap:
    """Wrappers' segments taken out of the keys, if the model named has none there."""

    tables: NameTables

    def apply(self, draft: Draft) -> Draft:
        """Return the draft with the keys of the model itself; AveragedModel's counter is dropped."""
        if not any(read(self.tables, keys).match.wrapped for keys in (draft.section, draft.evaluated())):
            return draft
        names = chain.canonical_keys(draft.keys, lightning="lightning" in draft.wrappers.words)
        return Rewrap(Chain(())).apply(replace(draft, canonical=names))


@dataclass(frozen=True, slots=True)
class ByRuleSteps:
    """The user's rules: those of the command line as one step, then those of a file."""

    steps: Sequence[RuleStep]

    def apply(self, draft: Draft) -> Draft:
        """Raises `Refused` as `rules.steps.plan_of` does."""
        from ckpttool.edits.rules.steps import plan_of

        section = draft.evaluated()
        plan = plan_of(self.steps, section)
        return replace(draft, plan=compose(draft.plan, plan), ruled=Ruled(section, plan))


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
