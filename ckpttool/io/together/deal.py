"""Questions that read many bytes, dealt out: each rank answers some of them, and every rank hears all answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

from ckpttool.io import sources, work
from ckpttool.io.together.job import Job, current
from ckpttool.values import dataclass

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Question:
    """One that reads about `nbytes` of `what`; its answer is of what JSON has."""

    what: str
    nbytes: int
    find: Callable[[], Any]

    def answer(self) -> Any:
        """Finds it, as a part of the work at hand."""
        with work.part(self.nbytes):
            return self.find()


def answers(title: str, questions: Mapping[Key, Question]) -> dict[Key, Any]:
    """The answer to each question, by one process or by all ranks of the job that it is one of: a piece of work.

    Each rank takes the next question that nobody has, the largest first. Raises `CkptError` where the ranks do not ask
    the same of the same files, and what an answer raises; `FailedElsewhere` where it did so on another rank.
    """
    job = current()
    with work.doing(title, sum(question.nbytes for question in questions.values())):
        if job is None:
            return {key: question.answer() for key, question in questions.items()}
        return dict(zip(questions, _of_all(job, list(questions.values()))))


def _of_all(job: Job, questions: Sequence[Question]) -> list[Any]:
    import hashlib  # loads OpenSSL

    asked = [[question.what, question.nbytes] for question in questions]
    known = {} if job.rounds else sources.states()  # later each rank has opened files that others have not
    digest = hashlib.sha256(json.dumps([job.rounds, list(job.command), known, asked]).encode()).hexdigest()
    job.agree(digest)
    name = f"answers/{digest}"
    job.tell(f"{name}/{job.rank}", _own(job, f"next/{digest}", questions))
    if job.is_first:
        told = {number: answer for some in job.heard_of_all(name) for number, answer in some}
        job.tell(name, [told[number] for number in range(len(questions))])
    found: list[Any] = job.hear(name)
    return found


def _own(job: Job, counter: str, questions: Sequence[Question]) -> list[tuple[int, Any]]:
    """The answers that this rank found, by the numbers of their questions."""
    order = sorted(range(len(questions)), key=lambda number: -questions[number].nbytes)
    found = []
    told = 0
    while (at := job.next(counter)) < len(order):
        job.check()
        work.advance(sum(questions[number].nbytes for number in order[told:at]))  # what others took
        told = at + 1
        found.append((order[at], questions[order[at]].answer()))
    return found
