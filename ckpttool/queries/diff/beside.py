"""What two checkpoints hold beside the models that a diff is about: compared, or else named as not compared.

The models alone decide whether the two are the same; what is found here is told in notes.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckpttool.checkpoint import Checkpoint, Section
from ckpttool.errors import CkptError
from ckpttool.evaluate.compare import same_objects
from ckpttool.names import Names
from ckpttool.naming.versions import otherwise
from ckpttool.queries.diff.keys import Values, compare
from ckpttool.queries.diff.optimizer import SavedOptimizer, compare_optimizers
from ckpttool.queries.diff.outside import loose
from ckpttool.queries.diff.result import EITHER_WAY, Entry
from ckpttool.values import dataclass
from ckpttool.words import plural, shell, some

NOT_COMPARED = "not compared"


@dataclass(frozen=True, slots=True)
class Beside:
    """Two checkpoints without the models in them."""

    left: Checkpoint
    right: Checkpoint
    models: tuple[Section, Section]
    names: Names | None
    values: Values | None

    def compared(self) -> tuple[list[str], dict[str, bool]]:
        """Sentences on what is not the same or was not compared, and which aspects were compared completely."""
        sections = [*self.of_sections(), *self._one_sided()]
        notes = [*sections, *self._versions(), *self._objects()]
        skipped = any(note.startswith(NOT_COMPARED) for note in sections)
        code = any(side.format in ("pt2", "torchscript") for side in (self.left, self.right))
        return notes, {
            "values": self.values is not None,
            **dict.fromkeys(("aliases", "metadata"), False),
            **dict.fromkeys(("optimizers", "other_sections"), not skipped),
            "objects": self.values is not None,
            **({"code": False} if code else {}),
        }

    def of_sections(self) -> list[str]:
        """On each optimizer and state dict under one path on both sides; nothing else here asks for values."""
        mine, theirs = self._sections()
        return [note for path in mine if path in theirs for note in self._pair(mine[path], theirs[path])]

    def _sections(self) -> tuple[dict[str, Section], dict[str, Section]]:
        """The sections beside the models, by path; loose tensors are compared as the models are."""
        mine, theirs = (
            {s.path: s for s in side.sections if s.kind != "other" and s.path != model.path}
            for side, model in zip((self.left, self.right), self.models)
        )
        return mine, theirs

    def _pair(self, mine: Section, theirs: Section) -> Iterator[str]:
        if mine.kind != theirs.kind:
            yield f"{mine.title}: {mine.kind} on the left, {theirs.kind} on the right"
            return
        try:
            entries = self._compared(mine, theirs)
        except CkptError as error:
            yield f"{NOT_COMPARED}: {mine.title}: {error.message}"
            return
        count = sum(entry.status not in EITHER_WAY for entry in entries)
        if count:
            sides = (f"{one.source}::{mine.path}" for one in (self.left, self.right))
            words = shell("ckpttool", "diff", *["--values"] * (self.values is not None), *sides)
            yield f"{mine.title}: {plural(count, 'difference')} ({words})"

    def _compared(self, mine: Section, theirs: Section) -> tuple[Entry, ...]:
        if mine.kind == "state_dict":
            return compare(mine, theirs, self.values)
        saved = SavedOptimizer.of(self.left, mine), SavedOptimizer.of(self.right, theirs)
        return compare_optimizers(*saved, self.names, self.values).entries

    def _one_sided(self) -> Iterator[str]:
        mine, theirs = self._sections()
        left, right = loose(self.left), loose(self.right)
        for side, source, own, others, tensors, known in (
            ("left", self.left.source, mine, theirs, left, right),
            ("right", self.right.source, theirs, mine, right, left),
        ):
            alone = [section.title for path, section in own.items() if path not in others]
            if alone:
                yield f"{NOT_COMPARED}: {some(alone)} of {side} ({source}::{alone[0]} is one)"
            further = [key for key in tensors if key not in known]
            if further:
                what = plural(len(further), "entry")
                yield f"{NOT_COMPARED}: {what} outside of state dicts that only {side} has: {some(further)}"

    def _versions(self) -> Iterator[str]:
        others = otherwise(*self.models)
        if others:
            what = f"{plural(len(others), 'module')} of other versions (_metadata), which loading may read otherwise"
            yield f"{NOT_COMPARED}: {what}: {some(others)}"

    def _objects(self) -> Iterator[str]:
        """On what is no tensor, where values are asked for."""
        if self.values is None:
            return
        mine, theirs = ({entry.key: entry for entry in side.objects} for side in (self.left, self.right))
        for side, own, others in (("left", mine, theirs), ("right", theirs, mine)):
            alone = [path or "(root)" for path in own if path not in others]
            if alone:
                yield f"beside the tensors only {side} has {some(alone)}"
        unlike = [path or "(root)" for path in mine if path in theirs and not same_objects(mine[path], theirs[path])]
        if unlike:
            yield f"no tensor, and other values: {some(unlike)}"
