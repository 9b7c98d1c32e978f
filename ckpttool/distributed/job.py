"""The ranks of one job: messages through the key-value store, and work shared among them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import field
from typing import Any, Protocol, TypeVar

from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.values import dataclass
from ckpttool.io import progress, sources

_FAILED = "failed"
_SHORTEST, _LONGEST = 0.01, 0.2  # seconds between two looks at the store: a thousand ranks that wait are no load


class Store(Protocol):
    """What of ``torch.distributed.Store`` is used."""

    def set(self, key: str, value: str, /) -> object:
        """Sets the key."""

    def get(self, key: str, /) -> bytes:
        """The value of a key that is set."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all of the keys are set."""

    def add(self, key: str, count: int, /) -> int:
        """Adds to a counter, which begins at 0; what it then is."""


class RankDone(BaseException):
    """This rank has done its part; what is left of the command is the first rank's."""


class FailedElsewhere(BaseException):
    """Another rank has failed, and says why."""


@dataclass(slots=True)
class Job:
    """This rank of a job of `size` ranks, all of which run `command`. `rounds`: how often they have agreed."""

    rank: int
    size: int
    store: Store
    command: Sequence[str] = ()
    _alone: bool = field(default=False, init=False)
    rounds: int = field(default=0, init=False)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that speaks, and does what one alone may do."""
        return self.rank == 0

    def tell(self, key: str, value: object) -> None:
        """Says something that every rank may hear, once."""
        self.store.set(key, json.dumps(value))

    def hear(self, key: str, *, whatever: bool = False) -> Any:
        """Waits for what a rank says. Raises `FailedElsewhere` where one fails meanwhile, unless `whatever` happens.

        It waits as long as it takes: a rank that dies ends the others, by way of torchrun.
        """
        pause = _SHORTEST
        while not self.store.check([key]):
            if not whatever:
                self.check()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
        return json.loads(self.store.get(key))

    def heard_of_all(self, key: str, *, whatever: bool = False) -> list[Any]:
        """What every rank says under ``KEY/RANK``, by rank."""
        return [self.hear(f"{key}/{rank}", whatever=whatever) for rank in range(self.size)]

    def next(self, counter: str) -> int:
        """0, 1, …: each number goes to one rank."""
        return self.store.add(counter, 1) - 1

    def agree(self, digest: str) -> None:
        """Waits until all ranks have come here with the digest of one plan. Raises `CkptError` where one has another.

        A rank that does not come fails, or dies: both end the others.
        """
        self.rounds += 1
        name = f"plan/{self.rounds}"
        self.tell(f"{name}/{self.rank}", digest)
        if self.is_first:
            others = [rank for rank, other in enumerate(self.heard_of_all(name)) if other != digest]
            if others:
                raise CkptError(
                    "the ranks do not mean the same",
                    hint="give all of them the same command, files and model; a model's code must not draw lots",
                    problems=[Problem("another plan than rank 0", f"rank {rank}") for rank in others],
                )
            self.tell(name, digest)
        self.hear(name)

    def of_first(self, key: str, ask: Callable[[], Any]) -> Any:
        """What the first rank finds, once, and says: JSON, the same on every rank. Raises what `ask` raises there."""
        if self.is_first and not self.store.check([key]):
            self.tell(key, ask())
        return self.hear(key)

    def fail(self) -> None:
        """Lets the other ranks know that this one fails."""
        self.tell(_FAILED, self.rank)

    def check(self) -> None:
        """Raises `FailedElsewhere` where another rank has failed."""
        if self.store.check([_FAILED]):
            raise FailedElsewhere

    def only_first(self) -> None:
        """From here on the first rank is alone, once the others have come here too: these leave. Raises `Left`."""
        if not self.is_first:
            self.tell(f"left/{self.rank}", None)
            raise RankDone
        for rank in range(1, self.size):
            self.hear(f"left/{rank}")
        self._alone = True


_current: Sequence[Job] = ()


def current() -> Job | None:
    """The job that this process is a rank of, as long as its work is to be shared."""
    return None if not _current or _current[0]._alone else _current[0]


def enter(job: Job) -> None:
    """The process is a rank of the job from now on."""
    global _current
    _current = (job,)


def only_first() -> None:
    """`Job.only_first`, where there is a job."""
    job = current()
    if job is not None:
        job.only_first()


Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Question:
    """One that reads about `nbytes` of `what`; its answer is of what JSON has."""

    what: str
    nbytes: int
    find: Callable[[], Any]

    def answer(self) -> Any:
        """Finds it, as a part of the work at hand."""
        with progress.part(self.nbytes):
            return self.find()


def answers(title: str, questions: Mapping[Key, Question]) -> dict[Key, Any]:
    """The answer to each question, by one process or by all ranks of the job that it is one of: a piece of work.

    Each rank takes the next question that nobody has, the largest first. Raises `CkptError` where the ranks do not ask
    the same of the same files, and what an answer raises; `FailedElsewhere` where it did so on another rank.
    """
    job = current()
    with progress.doing(title, sum(question.nbytes for question in questions.values())):
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
        progress.advance(sum(questions[number].nbytes for number in order[told:at]))  # what others took
        told = at + 1
        found.append((order[at], questions[order[at]].answer()))
    return found
