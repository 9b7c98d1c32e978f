"""Optimizers in a file of several models (a generator and a discriminator): each follows its own
model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field, replace
from typing import Any

from ckpttool.core.checkpoint import Checkpoint, Section
from ckpttool.core.errors import Problem, Refused
from ckpttool.core.plan import Plan
from ckpttool.core.tables import by_path, without_tensors
from ckpttool.core.text import Info, plural, shell, some
from ckpttool.core.values import dataclass
from ckpttool.naming.match import NameTables
from ckpttool.naming.model_change import ModelChange
from ckpttool.operands.checkpoint import saved_state_dicts
from ckpttool.optimizers import forms
from ckpttool.optimizers.identify import could_be_of, listed_names
from ckpttool.optimizers.key_order import has_names_of
from ckpttool.optimizers.move import remap_optimizer
from ckpttool.optimizers.request import OptimizerRequest
from ckpttool.remapping.plan import with_dropped_tensors
from ckpttool.remapping.result import Remap
from ckpttool.remapping.steps import identity_plan


@dataclass(frozen=True, slots=True)
class OptimizerModels:
    """The models of the optimizers in a file, if it has other models next to the changed model.

    Attributes:
        requests: The path of an optimizer -> its own request. Others have the common request.
        of_others: The path of an optimizer -> the path of its model, which is not the one that
            changes.
    """

    requests: dict[str, OptimizerRequest] = field(default_factory=dict)
    of_others: dict[str, str] = field(default_factory=dict)

    def notes(self, changed: Sequence[str]) -> Iterator[Info]:
        """Yield a note for each optimizer of another model, if it is not among the `changed`."""
        for optimizer, model in self.of_others.items():
            if optimizer not in changed:
                yield Info(f"{optimizer} is of {model}, and stays as it is", "remap")


def models_of_optimizers(
    source: Checkpoint, outcome: Remap, request: OptimizerRequest
) -> OptimizerModels:
    """Return the request of each optimizer that is not, or not surely, of the model that changes.

    Names and shapes in the file tell it. Raise `Refused` if an optimizer can be of several models,
    and the result depends on it.
    """
    result = OptimizerModels()
    changed = _paths_of_model(source, outcome, request)
    if len(changed) < 2 and all(section.path in changed for section in source.state_dicts):
        return result
    file = _SeveralModels(source, outcome, request, changed)
    fitting: dict[str, list[str]] = {}
    for optimizer in source.optimizers:
        if optimizer.path not in request.of_sections:
            fitting[optimizer.path] = file.models_of(optimizer)
    for optimizer in outcome.result.optimizers:
        models = fitting.get(optimizer.path, [])
        if not models:
            continue
        if len(models) > 1 and file.is_shared(models[0], fitting):
            model = file.only_result(optimizer, models)
        else:
            model = file.first(models)
        result.requests[optimizer.path] = file.request_of(model, models)
        if model not in changed and changed:
            result.of_others[optimizer.path] = model
            _check_form(source, optimizer, model, request)
    return result


def _paths_of_model(
    source: Checkpoint, outcome: Remap, request: OptimizerRequest
) -> tuple[str, ...]:
    """Return the paths of the state dicts of the model that changes, or that the user names."""
    if outcome.model_paths or request.names is None:
        return outcome.model_paths
    tables = NameTables(request.names)
    return tuple(section.path for section in source.state_dicts if has_names_of(section, tables))


@dataclass(frozen=True)
class _SeveralModels:
    """A file of several models, what a remap does to it, and the common request of optimizers.

    `changed` are the paths of the model that changes.
    """

    source: Checkpoint
    outcome: Remap
    request: OptimizerRequest
    changed: tuple[str, ...]

    def models_of(self, optimizer: Section) -> list[str]:
        """Return the paths of the state dicts that the optimizer can be of; of all that lose a
        tensor if it fits none and no model changes.
        """
        state, sections = forms.read(optimizer), self.source.state_dicts
        paths = [section.path for section in sections if could_be_of(state, section)]
        if paths or self.changed or not state.params:
            return paths
        losing = {gone.section for gone in self.outcome.plan.dropped}
        return [section.path for section in sections if section.path in losing]

    def is_shared(self, model: str, fitting: dict[str, list[str]]) -> bool:
        """Return whether more optimizers fit the model than one model has: another model, with the
        same names and shapes, has some of them.
        """
        section = self.source.section(model)
        count = 0
        names: list[str] = []
        for optimizer in self.source.optimizers:
            if model in fitting.get(optimizer.path, ()):
                state = forms.read(optimizer)
                count += len(state.params)
                names += (listed_names(state) or {}).values()
        return count > len(section.tensors) or len(set(names)) < len(names)

    def first(self, models: Sequence[str]) -> str:
        """Return the model that changes, or else one that loses nothing, or else the first."""
        losing = {gone.section for gone in self.outcome.plan.dropped}
        ranked = sorted(models, key=lambda path: (path not in self.changed, path in losing))
        return ranked[0]

    def only_result(self, optimizer: Section, models: Sequence[str]) -> str:
        """Return the first of the models. Raise `Refused` if the optimizer would not be the same
        for all of them.
        """
        results: list[Any] = []
        for model in models:
            done = remap_optimizer(optimizer, self.request_of(model, models))
            mapping = optimizer.mapping if done is None else done[0].mapping
            if mapping not in results:
                results.append(mapping)
        if len(results) == 1:
            return self.first(models)
        raise Refused(
            f"{optimizer.title} may be the optimizer of {' or '.join(models)}: they have the same"
            " names and shapes, and do not change alike",
            hint=f"change them together (--sections {','.join(models)}, and --drop for the same"
            f" keys of each), or leave the optimizer out: {shell('--drop', optimizer.path)}",
            problems=[Problem("may be its model", model) for model in models],
        )

    def request_of(self, model: str, models: Sequence[str]) -> OptimizerRequest:
        """Return the request for an optimizer of this model, which can also be of the others."""
        evidence = []
        for section in saved_state_dicts(self.source):
            if section.path in models:
                evidence.append(section)
        evidence = evidence or [*self.request.state_dicts]
        request = replace(self.request, state_dicts=evidence)
        if model in self.outcome.model_paths[:1]:
            return request
        if model in self.outcome.model_paths:
            return self._changed_together(model, request)
        if model not in self.changed:
            keys, output = self.request.keys, self.request.output
            request = OptimizerRequest(keys, state_dicts=evidence, output=output)
        after = by_path(self.outcome.result.sections).get(model)
        if after is None:  # dropped as a whole
            return request
        change = ModelChange(after, identity_plan([after]))
        narrowed = with_dropped_tensors(change, self.source, self.outcome.plan.dropped)
        if narrowed is None and model in self.changed:
            return request
        return replace(request, model=change, narrowed=narrowed, model_keys=after.keys)

    def _changed_together(self, model: str, request: OptimizerRequest) -> OptimizerRequest:
        """Return the request for an optimizer of one of several models that change together; the
        common request is about the first of them.
        """
        section, plan = self.source.section(model), self.outcome.plan
        outputs = tuple(output for output in plan.outputs if output.section == model)
        dropped = tuple(gone for gone in plan.dropped if gone.section == model)
        rest = without_tensors(section, {gone.key for gone in dropped})
        change = ModelChange(rest, Plan(outputs))
        return replace(
            request,
            ruled=change if request.ruled is not None and request.names is None else request.ruled,
            model=change,
            narrowed=ModelChange(section, Plan(outputs, dropped)) if dropped else None,
            model_keys=self.outcome.result.section(model).keys,
        )


def _check_form(
    source: Checkpoint, optimizer: Section, model: str, request: OptimizerRequest
) -> None:
    """Raise `Refused` if the ids of another model's optimizer would need names, which nothing
    gives.
    """
    state = forms.read(optimizer)
    if request.keys in (None, state.form) or listed_names(state) is not None:
        return
    part = f"{source.source}::{optimizer.path}"
    words = ["--model", "MODEL", "--optimizer-keys", str(request.keys), "-o", "OUT"]
    shapes = plural(len(state.params), "parameter")
    raise Refused(
        f"{optimizer.title} is of {model}, whose model is not given: nothing names its {shapes}",
        hint=f"convert it alone, with its own model: {shell('ckpttool', 'remap', part, *words)}",
        problems=[Problem(f"{shapes} of {model}", some([optimizer.path]))],
    )
