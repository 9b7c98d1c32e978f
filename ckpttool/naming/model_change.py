"""The change that a remap makes to a model, looked up by the names of its tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from ckpttool.core import expression as ex
from ckpttool.core.checkpoint import Section, TensorEntry
from ckpttool.core.errors import Problem, Refused
from ckpttool.core.expression import Expression, Ref
from ckpttool.core.plan import Plan
from ckpttool.core.strides import Shape
from ckpttool.core.tables import inverse, selected
from ckpttool.core.values import dataclass
from ckpttool.naming import wrappers
from ckpttool.naming.wrappers import strip


@dataclass(frozen=True)
class ModelChange:
    """The section of the model before a change, and the plan of the change: what the rules do, or
    the complete remap.
    """

    section: Section
    plan: Plan

    @cached_property
    def keeps_places(self) -> bool:
        """Whether every tensor stays one, of the same elements in the same order: ids stay what
        they are.
        """
        return self.keeps_rest and all(_is_counter(entry.key) for entry in self.plan.dropped)

    @property
    def keeps_rest(self) -> bool:
        """Whether every tensor that is not left out stays one, of the same elements in the same
        order.
        """
        return all(
            is_whole(output.source) for output in self.plan.outputs if not _is_counter(output.key)
        )

    def renames(self, names: Sequence[str]) -> bool:
        """Return True if one of the names is a tensor whose key changes."""
        keys = set(self.keys_of(names).values())
        for output in self.plan.outputs:
            if keys.intersection(ex.refs(output.source)) - {output.key}:
                return True
        return False

    def loses(self, names: Sequence[str]) -> bool:
        """Return True if one of the names is a tensor that is left out."""
        first = self.section.aliases()
        kept: set[str] = set()
        for output in self.plan.outputs:
            for key in ex.refs(output.source):
                kept.add(first.get(key, key))
        return any(first.get(key, key) not in kept for key in self.keys_of(names).values())

    @cached_property
    def after(self) -> Section:
        entries = self.section.by_key()
        tensors = []
        for output in self.plan.outputs:
            source = ex.without_cast(output.source)
            entry = entries[source.key] if isinstance(source, Ref) else None
            if isinstance(entry, TensorEntry):
                tensors.append(replace(entry, key=output.key))
        return replace(self.section, tensors=tuple(tensors))

    @cached_property
    def called(self) -> dict[str, str]:
        """Old name -> new name of each tensor that stays complete, without the segments of
        wrappers.
        """
        olds: list[str] = []
        news: list[str] = []
        for output in self.plan.outputs:
            for key in ex.refs(output.source):
                olds.append(key)
                news.append(output.key)
        before = wrappers.canonical_keys(olds)
        after = wrappers.canonical_keys(news)
        return {before[old]: after[new] for old, new in zip(olds, news)}

    def name_after(self, name: str) -> str:
        """Return the new name of a tensor that stays complete; any other name as it is."""
        return self.called.get(name, name)

    def new_names(self, names: Sequence[str]) -> dict[str, str]:
        """Map each name of a tensor that stays complete to its new name. A name without the
        wrappers of its key gets a new name without wrappers.
        """
        keys = self.keys_of(names)
        paths = self._spare_wrappers(keys)
        new_keys: dict[str, str] = {}
        for output in self.plan.outputs:
            source = ex.without_cast(output.source)
            if isinstance(source, Ref):
                new_keys.setdefault(source.key, output.key)
        new_names = {}
        for name, key in keys.items():
            if key in new_keys:
                new_names[name] = copied(strip(new_keys[key], paths))
        return new_names

    def shapes(self, names: Sequence[str]) -> dict[str, Shape]:
        entries = self.section.by_key()
        shapes = {}
        for name, key in self.keys_of(names).items():
            entry = entries.get(key)
            if isinstance(entry, TensorEntry):
                shapes[name] = entry.shape
        return shapes

    def sources(self, before: Mapping[str, Expression], where: str) -> dict[str, Expression] | None:
        """The parameters after the rules, from those before them; None where none is a tensor of
        this model.

        Raise `Refused`, all problems at once, if only some are.
        """
        keys = self.keys_of(list(before))
        if not keys:
            return None
        problems = []
        for name in before:
            if name not in keys:
                problem = "is not a tensor of the model that the rules change"
                problems.append(Problem(problem, name))
        first = self.section.aliases()
        by_first = {first.get(key, key): before[name] for name, key in keys.items()}

        def value_before(key: str) -> Expression:
            return by_first[first.get(key, key)]

        paths = self._spare_wrappers(keys)
        after: dict[Expression, str] = {}
        for output in self.plan.outputs:
            tensors = dict.fromkeys(first.get(key, key) for key in ex.refs(output.source))
            others = [key for key in tensors if key not in by_first]
            if others and len(others) < len(tensors):
                problem = f"is made of {', '.join(others)} too, which the optimizer has not"
                problems.append(Problem(problem, output.key))
            elif tensors and not others:
                source = ex.substitute(output.source, value_before)
                after.setdefault(source, copied(strip(output.key, paths)))
        if problems:
            raise Refused(
                f"{where}: the rules do not fit its parameters",
                hint="--model MODEL says which key each parameter has",
                problems=problems,
            )
        return inverse(after)

    def _spare_wrappers(self, keys: Mapping[str, str]) -> Collection[str]:
        """Return the wrappers in the new keys, if `keys` maps names without wrappers."""
        if all(name == key for name, key in keys.items()):
            return ()
        return wrappers.recognize([output.key for output in self.plan.outputs])

    def keys_of(self, names: Sequence[str]) -> dict[str, str]:
        """Which of the names are which keys: as they are, or without the wrappers' segments of the
        keys.
        """
        keys = self.section.keys
        paths = wrappers.recognize(keys)
        by_name = {strip(key, paths): key for key in reversed(keys)}
        by_name.update(zip(keys, keys))
        return selected(by_name, names)


def copied(text: str) -> str:
    """Return an equal string that is a new object: pickle would write a shared one as a
    reference.
    """
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "surrogatepass")


def _is_counter(key: str) -> bool:
    """Whether it is the counter of an AveragedModel, which wrappers bring and take along."""
    return key.rpartition(".")[2] == wrappers.COUNTER


def is_whole(source: Expression) -> bool:
    """Whether it is one tensor as it is, but perhaps for a cast."""
    return isinstance(ex.without_cast(source), Ref)
