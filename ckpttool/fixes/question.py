"""A diff with what it compared, to compare other checkpoints in the same way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CkptError
from ckpttool.core.values import dataclass
from ckpttool.diffing.explain import explain_computed
from ckpttool.diffing.options import DiffOptions
from ckpttool.diffing.renames import suggestions
from ckpttool.diffing.result import (
    HARMLESS,
    Diff,
    Entry,
    Outline,
    Outlines,
    alike,
    names_outlines,
    outlines,
    statuses_of,
)
from ckpttool.diffing.run import run
from ckpttool.diffing.sections import compare
from ckpttool.fixes.rules_file import Rules, suggested
from ckpttool.naming.evidence import Inference
from ckpttool.naming.match import prefixes
from ckpttool.naming.wrappers import canonical_in, canonical_keys
from ckpttool.operands.checkpoint import model_section
from ckpttool.operands.model import ModelOperand
from ckpttool.operands.names_files import saved_by


class LikelyNames(NamedTuple):
    """Two checkpoints compared by name, and their likely renames; None if nothing looked for
    them.
    """

    left: Checkpoint
    right: Checkpoint
    entries: Sequence[Entry]
    inferred: Inference | None

    def rules(self) -> Rules | None:
        """Return the rules that lead from the left's names to the right's."""
        return suggested(self.entries, self.inferred, self.left, self.right)


@dataclass(frozen=True)
class DiffQuestion:
    """A diff with its operands and options, to ask the same about other checkpoints. `model` is
    read once.

    `optimizer_path` is the section of the only optimizer in question, if a command changes the
    complete file. `opened` are left and right as a command without the model reads them, if that
    differs.
    """

    left: Checkpoint | None
    right: Checkpoint | None
    options: DiffOptions
    model: ModelOperand | None
    diff: Diff
    optimizer_path: str | None = None
    opened: tuple[Checkpoint | None, Checkpoint | None] | None = None

    @property
    def two(self) -> tuple[Checkpoint, Checkpoint]:
        """The two checkpoints of a question about two."""
        assert self.left is not None
        assert self.right is not None
        return self.left, self.right

    @property
    def model_options(self) -> dict[str, Any]:
        """The options that name the model."""
        options = self.options
        return {"model": options.model, "materialize": options.materialize}

    @property
    def outlines(self) -> tuple[Outlines, ...]:
        """The tensors of the right, or of the model in both of its forms."""
        if self.right is not None:
            return (outlines(model_section(self.right)),)
        assert self.model is not None
        return names_outlines(self.model.names())

    @cached_property
    def prefixes(self) -> tuple[list[str], ...]:
        """The prefixes of left below which it has the most names of right, or of the model in both
        of its forms.
        """
        assert self.left is not None
        if self.right is not None:
            forms = [canonical_in(model_section(self.right))]
        else:
            assert self.model is not None
            tables = self.model.tables
            forms = [canonical_keys({*tables.serialized_names.values()})]
            forms.append(canonical_keys({*tables.runtime_names.values()}))
        keys = {*canonical_in(model_section(self.left)).values()}
        return tuple(prefixes(keys, {*names.values()}) for names in forms)

    @cached_property
    def parts(self) -> list[str]:
        """The prefixes of left below which it has the names of right, if there are several: a
        choice is a guess.

        If some of them have the shapes of right below them, return only these.
        """
        if self.left is None or not self.left.state_dicts:
            return []
        several = [many for many in self.prefixes if len(many) > 1 and "" not in many]
        if not several:
            return []
        section = model_section(self.left)
        tensors = outlines(section)
        by_name = {name: tensors.get(key) for key, name in canonical_in(section).items()}
        expected: dict[str, Outline] = {}
        for side in reversed(self.outlines):
            expected.update(side)
        shapes = {name: expected[key].shape for key, name in canonical_keys(expected).items()}

        def fits(prefix: str) -> bool:
            for name, shape in shapes.items():
                tensor = by_name.get(f"{prefix}.{name}")
                if tensor is not None and tensor.shape != shape:
                    return False
            return True

        return list(filter(fits, several[0])) or several[0]

    @cached_property
    def likely(self) -> LikelyNames:
        """The likely renames from left to right, or to the keys that the model saves."""
        assert self.left is not None
        if self.right is not None:
            return LikelyNames(self.left, self.right, self.diff.entries, self.diff.inferred)
        return self.likely_from(self.left)

    def likely_from(self, left: Checkpoint) -> LikelyNames:
        """Return the likely renames from the names of this checkpoint instead of left."""
        right = self.right
        if right is None:
            assert self.model is not None
            right = saved_by(self.model.names())
        entries = explain_computed(compare(model_section(left), model_section(right)))
        return LikelyNames(left, right, entries, suggestions(left, right, entries, False))

    @cached_property
    def rules(self) -> Rules | None:
        """The rules that make the likely renames; None for an adapter, which follows its base."""
        return None if self.diff.asks == "adapter" else self.likely.rules()

    def ask_again(
        self, left: Checkpoint, right: Checkpoint | None, *, reads_values: bool = False
    ) -> Diff:
        """Ask the same question about other checkpoints, without suggestions.

        Values that were compared are compared again only if it `reads_values`: a rename does not
        change them.
        """
        path = self.optimizer_path
        if path is not None and self.right is not None:
            left = replace(left, sections=(replace(left.section(path), path=""),))
        elif path is not None:
            sections = [s for s in left.sections if s.kind != "optimizer" or s.path == path]
            left = replace(left, sections=tuple(sections))
        if reads_values:
            with self.options.comparing(left, right):
                return run(left, right, self.options, self.model, infers=False)
        options = replace(self.options, values=False, rtol=0.0, atol=0.0)
        return run(left, right, options, self.model, infers=False)

    @property
    def has_unread_values(self) -> bool:
        """Whether values are compared, and some were not because their tensors have no counterpart
        by name.
        """
        unpaired = bool(statuses_of(self.diff.entries) & {"missing", "transformed"})
        return self.options.comparison is not None and unpaired

    def remaining(self, diff: Diff) -> int:
        """Return how much a remap could fix: a name counts more than a shape or dtype, and values
        do not count.
        """
        harmless = HARMLESS | diff.harmless
        of_one_name = {"shape": 1, "dtype": 1, "value": 1 if self.right is None else 0}
        total = 0
        for group in alike(diff.entries):
            if group[0].is_one_of(harmless):
                continue
            count = of_one_name.get(group[0].status, 2)
            for entry in group:
                total += count if entry.left == entry.right else 2
        return total

    def different_values(self, diff: Diff) -> list[Entry]:
        """Return the tensors of two checkpoints with different values, under one name or two."""
        if self.right is None:
            return []
        return [entry for entry in diff.entries if entry.status == "value"]


def model_path(checkpoint: Checkpoint) -> str | None:
    """Return the path of the model's state dict, None if the file has none or if it is unclear
    which it is.
    """
    try:
        return model_section(checkpoint).path
    except CkptError:
        return None
