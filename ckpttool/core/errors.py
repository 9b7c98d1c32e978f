"""Errors: one line that says what is wrong, one that says how to fix it, and the exit status."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby

from ckpttool.core.values import dataclass, public


@public
@dataclass(frozen=True, slots=True)
class Problem:
    """A problem of one key or path; ``str`` gives ``problem @ key``.

    Attributes:
        problem: The fault, without the key.
        key: The key or path that has the problem.
        kind: The code of the problem (`ckpttool.core.codes`), for code that chooses a hint.
    """

    problem: str
    key: str
    kind: str = "other"

    def __str__(self) -> str:
        return f"{self.problem} @ {self.key}"

    @staticmethod
    def parse(text: str) -> Problem:
        """Return the problem from the result of ``str``, without its kind."""
        problem, _, key = text.rpartition(" @ ")
        return Problem(problem or text, key if problem else "")


def same_problem(problem: str, keys: Iterable[str], kind: str = "other") -> list[Problem]:
    """Return the problem once for each key."""
    return [Problem(problem, key, kind) for key in keys]


_SHOWN = 20  # problems in a traceback
_REPEATED = 3  # keys that repeat the problem that they have


class CkptError(Exception):
    """No answer: bad usage, unreadable or unsafe input, I/O failure (exit status 2).

    Attributes:
        message: One line that says what is wrong.
        hint: How to fix it, if possible with a command that can be pasted.
        problems: Every problem at once, each with its key.
    """

    exit_status = 2

    def __init__(self, message: str, *, hint: str, problems: Sequence[Problem] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.problems = tuple(problems)
        self.hint = hint

    @property
    def hint(self) -> str:
        """How to fix it; a new hint is also shown by a traceback."""
        return self._hint

    @hint.setter
    def hint(self, hint: str) -> None:
        self._hint = hint
        self._add_notes()

    def _add_notes(self) -> None:
        """Set what a traceback shows after the message, from Python 3.11 on."""
        self.__notes__ = []
        for text, group in groupby(self.problems[:_SHOWN], key=lambda problem: problem.problem):
            keys = [problem.key for problem in group]
            if len(keys) > _REPEATED:
                self.__notes__ += [f"  {text}:", *(f"    {key}" for key in keys)]
            else:
                self.__notes__ += [f"  {text} @ {key}" for key in keys]
        more = len(self.problems) - _SHOWN
        if more > 0:
            self.__notes__.append(f"  and {more} more")
        self.__notes__.append(f"hint: {self.hint}")

    def rewrite(self, change: Callable[[str], str]) -> None:
        """Change the texts of the error."""
        self.message = change(self.message)
        self.problems = tuple(
            replace(problem, problem=change(problem.problem)) for problem in self.problems
        )
        self.hint = change(self.hint)
        self.args = (self.message,)


class Refused(CkptError):
    """The answer is no: a change that would lose, collide, guess or not fit. Nothing was written
    (exit status 1).
    """

    exit_status = 1
