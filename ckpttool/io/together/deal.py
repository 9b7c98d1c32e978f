"""Questions that read many bytes, dealt out: each rank answers some of them, and every rank hears all answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ckpttool.io import sources
from ckpttool.io.together.job import Job, current

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Question:
    """One that reads about `nbytes` of `what`; its answer is of what JSON has."""

    what: str
    nbytes: int
    answer: Callable[[], Any]


def answers(questions: Mapping[Key, Question]) -> dict[Key, Any]:
    """The answer to each question, by one process or by all ranks of the job that it is one of.

    Each rank takes the next question that nobody has, the largest first. Raises `CkptError` where the ranks do not ask
    the same of the same files, and what an answer raises; `FailedElsewhere` where it did so on another rank.
    """
    job = current()
    if job is None:
        return {key: question.answer() for key, question in questions.items()}
    found = _of_all(job, list(questions.values()))
    return dict(zip(questions, found))


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
    while (at := job.next(counter)) < len(order):
        job.check()
        found.append((order[at], questions[order[at]].answer()))
    return found
