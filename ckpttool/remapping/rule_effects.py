"""What becomes of an optimizer's parameters when rules or a new form change the model's tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from ckpttool.core import expression as ex
from ckpttool.core.checkpoint import Section, TensorEntry
from ckpttool.core.errors import Problem, Refused
from ckpttool.core.expression import Expression, Op, Ref
from ckpttool.core.plan import Plan
from ckpttool.core.values import dataclass
from ckpttool.naming import wrappers
from ckpttool.naming.wrappers import strip

_CAST = "aten._to_copy.default"


@dataclass(frozen=True)
class RuleEffect:
    """The model's section before a change (by rules, or all of it), and the plan of the change."""

    section: Section
    plan: Plan

    @cached_property
    def keeps_places(self) -> bool:
        """Whether every tensor stays one, of the same elements in the same order: ids stay what they are."""
        gone = [one for one in self.plan.dropped if not _is_counter(one.key)]
        return not gone and all(is_whole(one.source) for one in self.plan.outputs if not _is_counter(one.key))

    def renames(self, names: Sequence[str]) -> bool:
        """Return True if one of the names is a tensor whose key changes."""
        keys = set(self._keys(names).values())
        return any(ref in keys and ref != output.key for output in self.plan.outputs for ref in ex.refs(output.source))

    def loses(self, names: Sequence[str]) -> bool:
        """Return True if one of the names is a tensor that is left out."""
        first = self.section.aliases()
        kept = {first.get(ref, ref) for output in self.plan.outputs for ref in ex.refs(output.source)}
        return any(first.get(key, key) not in kept for key in self._keys(names).values())

    @cached_property
    def after(self) -> Section:
        """The tensors that stay whole, under their new keys."""
        entries = self.section.by_key()
        outputs = [(output.key, entries[ref]) for output in self.plan.outputs for ref in _whole(output.source)]
        tensors = (replace(entry, key=key) for key, entry in outputs if isinstance(entry, TensorEntry))
        return replace(self.section, tensors=tuple(tensors))

    @cached_property
    def called(self) -> dict[str, str]:
        """Old name -> new name of each tensor that stays complete, without the segments of wrappers."""
        pairs = [(key, output.key) for output in self.plan.outputs for key in ex.refs(output.source)]
        before, after = (wrappers.canonical_keys(keys) for keys in zip(*pairs)) if pairs else ({}, {})
        return {before[key]: after[new] for key, new in pairs}

    def shapes(self, names: Sequence[str]) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters of these names that are tensors of the model."""
        entries = self.section.by_key()
        found = ((name, entries.get(key)) for name, key in self._keys(names).items())
        return {name: entry.shape for name, entry in found if isinstance(entry, TensorEntry)}

    def sources(self, found: Mapping[str, Expression], where: str) -> dict[str, Expression] | None:
        """The parameters after the rules, from those before them; None where none is a tensor of this model.

        Raise `Refused`, all problems at once, if only some are.
        """
        keys = self._keys(list(found))
        if not keys:
            return None
        problems = [
            Problem("is no tensor of the model that the rules change", name) for name in found if name not in keys
        ]
        first = self.section.aliases()
        names = {first.get(key, key): name for name, key in keys.items()}
        literal = all(name == key for name, key in keys.items())
        paths = () if literal else wrappers.infer([output.key for output in self.plan.outputs]).paths
        known = {
            key: found[names[first.get(key, key)]] for key in self.section.by_key() if first.get(key, key) in names
        }
        made: dict[Expression, str] = {}
        for output in self.plan.outputs:
            read = list(dict.fromkeys(first.get(key, key) for key in ex.refs(output.source)))
            others = [key for key in read if key not in names]
            if others and len(others) < len(read):
                problems.append(Problem(f"is made of {', '.join(others)} too, which the optimizer has not", output.key))
            elif read and not others:
                source = ex.substitute(output.source, known.__getitem__)
                made.setdefault(source, copied(strip(output.key, paths)))
        if problems:
            raise Refused(
                f"{where}: the rules do not fit its parameters",
                hint="--model MODEL says which key each parameter has",
                problems=problems,
            )
        return {name: source for source, name in made.items()}

    def _keys(self, names: Sequence[str]) -> dict[str, str]:
        """Which of the names are which keys: as they are, or without the wrappers' segments of the keys."""
        keys = list(self.section.by_key())
        paths = wrappers.infer(keys).paths
        stripped = {strip(key, paths): key for key in reversed(keys)}
        there = set(keys)
        return {name: name if name in there else stripped[name] for name in names if name in there or name in stripped}


def copied(text: str) -> str:
    """Return an equal string that is a new object: pickle would write a shared one as a reference."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "surrogatepass")


def _is_counter(key: str) -> bool:
    """Whether it is the counter of an AveragedModel, which wrappers bring and take along."""
    return key.rpartition(".")[2] == wrappers.COUNTER


def _whole(source: Expression) -> Iterable[str]:
    return ex.refs(source) if is_whole(source) else ()


def is_whole(source: Expression) -> bool:
    """Whether it is one tensor as it is, but perhaps for a cast."""
    return isinstance(source, Ref) or (
        isinstance(source, Op) and source.op == _CAST and isinstance(source.args[0], Ref)
    )
