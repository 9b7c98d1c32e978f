"""A model's parameters as optimizers see them: tied ones once, in ``model.parameters()`` order, or in param groups."""

from __future__ import annotations

from functools import cached_property

from ckpttool.names import Names, RuntimeTensor
from ckpttool.optimizer_state import FQN, OptimizerState, Param, ParamGroup
from ckpttool.values import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Parameters:
    """A model's parameters by canonical name, in ``model.parameters()`` order: tied ones once."""

    names: Names

    @cached_property
    def shapes(self) -> dict[str, Shape | None]:
        """Canonical name -> shape, for every parameter."""
        return {t.canonical: t.shape for t in self._first}

    @cached_property
    def trainable(self) -> tuple[str, ...]:
        """The canonical names of the parameters that require a gradient."""
        return tuple(t.canonical for t in self._first if t.trainable)

    @cached_property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The canonical names in the groups of the model's optimizer, in its order; empty without an optimizer."""
        count = max(len(self.names.optimizer_groups), *(p.group + 1 for p in self.names.optimizer), 0)
        ordered = sorted(self.names.optimizer, key=lambda p: p.id)
        return tuple(tuple(self.canonical[p.fqn] for p in ordered if p.group == group) for group in range(count))

    @property
    def fresh_optimizer(self) -> OptimizerState:
        """The model's optimizer before its first step."""
        options = [*self.names.optimizer_groups, *[{}] * (len(self.groups) - len(self.names.optimizer_groups))]
        return OptimizerState(FQN, tuple(ParamGroup(tuple(own), o) for own, o in zip(self.groups, options)), {})

    @cached_property
    def first_step(self) -> dict[Param, tuple[str, ...]]:
        """Canonical name -> the names of the state that the optimizer's first step gives it; without unknown ones."""
        return {self.canonical[p.fqn]: p.state for p in self.names.optimizer if p.state}

    @cached_property
    def canonical(self) -> dict[str, str]:
        """Every name of every parameter, canonical or not, -> the canonical name of its first FQN."""
        first = {t.fqn: t for t in self.names.runtime if t.kind == "parameter"}
        found = {t.canonical: first[t.alias_of or t.fqn].canonical for t in first.values()}
        found.update((t.fqn, first[t.alias_of or t.fqn].canonical) for t in first.values())
        return found

    @cached_property
    def _first(self) -> list[RuntimeTensor]:
        return [t for t in self.names.runtime if t.kind == "parameter" and t.alias_of is None]
