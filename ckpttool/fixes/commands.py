"""The commands that an answer prints, and the notes on them."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from typing import NamedTuple

from ckpttool.core.text import MEANINGS, PLACEHOLDERS, Info, Note
from ckpttool.diffing.result import Diff, Fix, Unfixed

PART = Note("the suggested command fixes only some of the differences", "partial-fix")
INFERRED = Note(
    "the suggested rules are inferred from names and shapes; check the values", "inferred-fix"
)
FEW = 3  # keys or problems that a sentence names
_WORD = re.compile(r"[\w.]+")  # of a Python call


class Fixes(NamedTuple):
    """Commands, and notes on them. `is_partial`: they leave some of the differences, those in
    `unfixed`.
    """

    commands: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    is_partial: bool = False
    is_inferred: bool = False
    unfixed: tuple[Unfixed, ...] = ()

    def added_to(self, diff: Diff) -> Diff:
        """Return the diff with the commands, and all notes on them."""
        words = self._words()
        unknown = [name for name in PLACEHOLDERS if name in words]
        notes = [*diff.notes]
        if self.is_partial:
            notes.append(PART)
        if self.is_inferred:
            notes.append(INFERRED)
        notes += self.notes
        if unknown:
            text = f"not tried, because the result depends on {' and '.join(unknown)}"
            notes.append(Info(text, "untried"))
        meanings = [f"{name} is {MEANINGS[name]}" for name in unknown if name in MEANINGS]
        if meanings:
            notes.append(Info(", and ".join(meanings), "old-code"))
        fix = tuple(self._fix(line, words.isdisjoint(unknown)) for line in self.commands)
        return replace(diff, fix=fix, notes=tuple(notes), unfixed=self.unfixed)

    def _words(self) -> set[str]:
        """Return the words of the command lines and of the Python calls."""
        words: set[str] = set()
        for line in self.commands:
            is_shell = line.startswith("ckpttool ")
            words.update(shlex.split(line) if is_shell else _WORD.findall(line))
        return words

    def _fix(self, line: str, tried: bool) -> Fix:
        """Return the line as a fix; one that leaves differences, or guesses, has no options to
        apply.
        """
        is_all = not self.is_partial and not self.unfixed
        if not isinstance(line, Fix):
            return Fix(line, complete=tried and is_all, tried=tried)
        complete = tried and is_all and line.complete
        if not is_all or self.is_inferred or line.options is None:
            return Fix(line, complete=complete, tried=tried)
        return Fix(line, complete=complete, tried=tried, options=line.options, source=line.source)
