"""What is asked of the model section's keys, and the steps that carry it out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttool.checkpoint import Section
from ckpttool.edits.remap.by_model import ByModel, Counters, ToModel
from ckpttool.edits.remap.draft import Step
from ckpttool.edits.remap.renaming import ByRuleSteps, Rewrap, Select, TakenOver, TakeOver, Unwrap
from ckpttool.names import Names
from ckpttool.naming.forms import read
from ckpttool.naming.model_form import Form, ModelForm
from ckpttool.naming.name_tables import NameTables
from ckpttool.naming.wrappers.chain import Chain
from ckpttool.operands.model import ModelOperand
from ckpttool.values import dataclass

if TYPE_CHECKING:
    from ckpttool.edits.rules.steps import Step as RuleStep


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
