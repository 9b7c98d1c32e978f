"""The parameters of a model and of its optimizer, by canonical name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from ckpttool.core.names import Names, RuntimeTensor, first_parameters
from ckpttool.core.optimizer_state import (
    FQN,
    OptimizerState,
    Param,
    ParamGroup,
)
from ckpttool.core.strides import Shape
from ckpttool.core.values import dataclass


@dataclass(frozen=True)
class Parameters:
    """A model's parameters by canonical name, in ``model.parameters()`` order. Tied parameters are
    one.
    """

    names: Names

    @cached_property
    def _first(self) -> list[RuntimeTensor]:
        return first_parameters(self.names.runtime)

    @cached_property
    def shapes(self) -> dict[str, Shape | None]:
        return {t.canonical: t.shape for t in self._first}

    @cached_property
    def trainable(self) -> tuple[str, ...]:
        return tuple(t.canonical for t in self._first if t.trainable)

    @cached_property
    def canonical(self) -> dict[str, str]:
        """Return name -> canonical name of its first FQN, for all names of all parameters."""
        parameters = {t.fqn: t for t in self.names.runtime if t.kind == "parameter"}
        by_canonical: dict[str, str] = {}
        by_fqn: dict[str, str] = {}
        for fqn, tensor in parameters.items():
            first = parameters[tensor.first_name].canonical
            by_canonical[tensor.canonical] = first
            by_fqn[fqn] = first
        return by_canonical | by_fqn

    @cached_property
    def fqns(self) -> dict[str, str]:
        """Return canonical name -> the FQN that the parameter has first."""
        return {t.canonical: t.fqn for t in self._first}

    @cached_property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Return the canonical names in the groups of the model's optimizer, in its order; empty
        without one.
        """
        groups: list[list[str]] = [[] for _ in self.names.optimizer_groups]
        for param in sorted(self.names.optimizer, key=lambda param: param.id):
            while len(groups) <= param.group:
                groups.append([])
            groups[param.group].append(self.canonical[param.fqn])
        return tuple(map(tuple, groups))

    @cached_property
    def options(self) -> tuple[Mapping[str, Any], ...]:
        """Return the hyperparameters of each group. Those with several values (``betas``) are
        tuples, as in torch; names files have lists.
        """
        groups = []
        for options in self.names.optimizer_groups:
            values = {}
            for name, value in options.items():
                values[name] = tuple(value) if isinstance(value, list) else value
            groups.append(values)
        return tuple(groups)

    @property
    def fresh_optimizer(self) -> OptimizerState:
        """Return the state of the model's optimizer before its first step."""
        groups = []
        for index, params in enumerate(self.groups):
            options = self.options[index] if index < len(self.options) else {}
            groups.append(ParamGroup(params, options))
        return OptimizerState(FQN, tuple(groups), {})

    @cached_property
    def first_step(self) -> dict[Param, tuple[str, ...]]:
        """Return canonical name -> the names of the state that the optimizer's first step creates,
        if known.
        """
        return {self.canonical[p.fqn]: p.state for p in self.names.optimizer if p.state}
