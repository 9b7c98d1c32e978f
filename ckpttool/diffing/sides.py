"""The two sides of a comparison: what is compared with what."""

from __future__ import annotations

from dataclasses import replace

from ckpttool.core.checkpoint import AnyEntry, Checkpoint, Section
from ckpttool.core.names import Names
from ckpttool.core.values import dataclass
from ckpttool.diffing.causes import FIELDS
from ckpttool.formats.registry import is_program


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison: a checkpoint, and the section of it that is compared, its model or
    its optimizer.

    `field` is the name of the side in the words of a `Note`.
    """

    checkpoint: Checkpoint
    section: Section
    field: str

    @property
    def source(self) -> str:
        """The operand."""
        return self.checkpoint.source

    @property
    def others(self) -> dict[str, Section]:
        """The state dicts and optimizers besides the compared section, by path."""
        sections = {}
        for section in self.checkpoint.sections:
            if section.kind != "other" and section.path != self.section.path:
                sections[section.path] = section
        return sections

    @property
    def loose_entries(self) -> dict[str, AnyEntry]:
        """The entries outside of state dicts and optimizers, by their dotted path."""
        entries: dict[str, AnyEntry] = {}
        for section in self.checkpoint.sections:
            if section.kind == "other":
                entries.update(section.by_key())
        return entries


@dataclass(frozen=True, slots=True)
class BothSides:
    """The two sides of a comparison. `names` are the names of the model that both are read with, if
    one was named.
    """

    left: Side
    right: Side
    names: Names | None = None

    @staticmethod
    def of(
        left: tuple[Checkpoint, Section],
        right: tuple[Checkpoint, Section],
        names: Names | None = None,
    ) -> BothSides:
        """Return the sides with these sections."""
        return BothSides(Side(*left, FIELDS[0]), Side(*right, FIELDS[1]), names)

    @property
    def each_way(self) -> tuple[tuple[Side, Side], tuple[Side, Side]]:
        """Each side with the other one."""
        return (self.left, self.right), (self.right, self.left)

    def with_sections(self, left: Section, right: Section) -> BothSides:
        """Return the same sides with these sections."""
        return replace(
            self, left=replace(self.left, section=left), right=replace(self.right, section=right)
        )

    @property
    def has_program(self) -> bool:
        return is_program(self.left.checkpoint) or is_program(self.right.checkpoint)
