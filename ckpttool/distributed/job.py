"""The ranks of one job of torchrun: messages through its key-value store, and work that they
share.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import field
from datetime import timedelta
from heapq import heappop, heappush
from itertools import chain
from typing import Any, Protocol, TypeVar

from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.values import dataclass
from ckpttool.io import progress, sources

_FAILED = "failed"
# seconds between two looks at the store: a thousand waiting ranks do not load it
_SHORTEST, _LONGEST = 0.01, 0.2

Result = TypeVar("Result")
Key = TypeVar("Key", bound=Hashable)


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that is used."""

    def set(self, key: str, value: str, /) -> object: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...

    def add(self, key: str, count: int, /) -> int: ...


class RankDone(BaseException):
    """This rank has done its part; the first rank does the rest of the command."""


class FailedElsewhere(BaseException):
    """Another rank has failed, and reports why."""


@dataclass(slots=True)
class Job:
    """This rank of a job of `size` ranks, all of which run `command`. `rounds`: how often they have
    agreed.
    """

    rank: int
    size: int
    store: Store
    command: Sequence[str] = ()
    _alone: bool = field(default=False, init=False)
    rounds: int = field(default=0, init=False)

    @property
    def is_first(self) -> bool:
        """True for the rank that prints, and that does what only one rank may do."""
        return self.rank == 0

    def tell(self, key: str, value: object) -> None:
        """Set a key that every rank can hear, once."""
        self.store.set(key, json.dumps(value))

    def hear(self, key: str, *, ignore_failures: bool = False) -> Any:
        """Wait until a rank sets the key. Raises `FailedElsewhere` if one fails meanwhile, but not
        with `ignore_failures`.

        It waits without a time limit: if a rank dies, torchrun ends the others.
        """
        pause = _SHORTEST
        while not self.store.check([key]):
            if not ignore_failures:
                self.check()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
        return json.loads(self.store.get(key))

    def gather(self, key: str, *, ignore_failures: bool = False) -> list[Any]:
        """Return what every rank tells under ``KEY/RANK``, by rank."""
        return [
            self.hear(f"{key}/{rank}", ignore_failures=ignore_failures) for rank in range(self.size)
        ]

    def agree(self, digest: str) -> None:
        """Wait until all ranks have the same digest of one plan. Raises `CkptError` if one has
        another.
        """
        self.rounds += 1
        name = f"plan/{self.rounds}"
        self.tell(f"{name}/{self.rank}", digest)
        if self.is_first:
            problems = []
            for rank, other in enumerate(self.gather(name)):
                if other != digest:
                    problems.append(Problem("another plan than rank 0", f"rank {rank}"))
            if problems:
                raise CkptError(
                    "the ranks planned different outputs",
                    hint="give all of them the same command, files and model; a model's code must"
                    " not be random",
                    problems=problems,
                )
            self.tell(name, digest)
        self.hear(name)

    def of_first(self, key: str, ask: Callable[[], Any]) -> Any:
        """Return what the first rank finds, once, as JSON. Raises what `ask` raises there."""
        if self.is_first and not self.store.check([key]):
            self.tell(key, ask())
        return self.hear(key)

    def fail(self) -> None:
        self.tell(_FAILED, self.rank)

    def check(self) -> None:
        if self.store.check([_FAILED]):
            raise FailedElsewhere

    def only_first(self) -> None:
        if not self.is_first:
            self.tell(f"left/{self.rank}", None)
            raise RankDone
        for rank in range(1, self.size):
            self.hear(f"left/{rank}")
        self._alone = True


def assigned(sizes: Mapping[Key, int], ranks: int) -> list[list[Key]]:
    """Return the keys of each rank, the same on all of them: the largest first, each to the rank
    with the least.
    """
    loads = [(0, rank) for rank in range(ranks)]
    shares: list[list[Key]] = [[] for _ in range(ranks)]
    for key in sorted(sizes, key=lambda key: -sizes[key]):
        load, rank = heappop(loads)
        shares[rank].append(key)
        heappush(loads, (load + sizes[key], rank))
    return shares


_current: Job | None = None


def current() -> Job | None:
    """Return the job that this process is a rank of, while its work is shared."""
    return None if _current is None or _current._alone else _current


def enter(job: Job) -> None:
    global _current
    _current = job


def only_first() -> None:
    job = current()
    if job is not None:
        job.only_first()


@dataclass(frozen=True, slots=True)
class Question:
    """A question that reads about `nbytes` of `what`; its answer is JSON."""

    what: str
    nbytes: int
    find: Callable[[], Any]

    def answer(self) -> Any:
        with progress.part(self.nbytes):
            return self.find()


def answers(title: str, questions: Mapping[Key, Question]) -> dict[Key, Any]:
    """Return the answer to each question, found by this process or shared by all ranks of its job.

    Raises `CkptError` if the ranks do not ask the same about the same files, and what an answer
    raises; `FailedElsewhere` if it did so on another rank.
    """
    job = current()
    with progress.doing(title, sum(question.nbytes for question in questions.values())):
        if job is None:
            return {key: question.answer() for key, question in questions.items()}
        pending = list(questions.values())
        digest = _digest(job, pending)
        job.agree(digest)
        sizes = {number: question.nbytes for number, question in enumerate(pending)}
        share = assigned(sizes, job.size)[job.rank]
        # other ranks answer the rest
        progress.advance(sum(sizes.values()) - sum(sizes[number] for number in share))
        answered = []
        for number in share:
            job.check()
            answered.append([number, pending[number].answer()])
        name = f"answers/{digest}"
        job.tell(f"{name}/{job.rank}", answered)
        if job.is_first:
            by_number = dict(chain.from_iterable(job.gather(name)))
            job.tell(name, [by_number[number] for number in range(len(pending))])
        return dict(zip(questions, job.hear(name)))


def _digest(job: Job, questions: Sequence[Question]) -> str:
    """Return what is the same on all ranks that ask these questions about the same files."""
    import hashlib  # loads OpenSSL

    # later, each rank has opened files that others have not
    states = {} if job.rounds else sources.states()
    what = [[question.what, question.nbytes] for question in questions]
    text = json.dumps([job.rounds, list(job.command), states, what])
    return hashlib.sha256(text.encode()).hexdigest()


PATIENCE = 120.0  # seconds until all ranks have imported torch and joined


def join(command: Sequence[str]) -> Job:
    """Return this rank of the job, once all ranks are there. Raises `CkptError` if some are
    missing.
    """
    from torch.distributed import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    try:
        whole, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=PATIENCE)))
        # torchrun's store outlives ranks that it restarts
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = PrefixStore(f"ckpttool/{attempt}/{size}", whole)
        come = store.add("come", 1)
        until = time.monotonic() + PATIENCE
        while come < size and time.monotonic() < until:
            time.sleep(0.05)
            come = store.add("come", 0)
    except (RuntimeError, ValueError) as error:
        raise CkptError(
            f"the ranks do not find each other: {str(error).partition(chr(10))[0]}", hint=_ALONE
        ) from error
    if come != size:
        raise CkptError(f"{come} processes take part in a job of {size} ranks", hint=_ALONE)
    return Job(rank, size, store, tuple(command))


_ALONE = "to run a command alone inside of a job of torchrun: env -u TORCHELASTIC_RUN_ID ckpttool …"
