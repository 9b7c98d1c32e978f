"""A command under torchrun: all ranks share the commands in `SHARED`; the first rank runs every
other one.

Only the first rank prints, and all of them end with the same status.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import asdict, replace

from ckpttool.cli.failures import Failure, OfAllRanks, failure_of
from ckpttool.core.errors import Problem
from ckpttool.distributed import job as together
from ckpttool.distributed.job import FailedElsewhere, Job, RankDone

SHARED = frozenset(("convert", "diff", "inspect", "remap"))
_HEARD = Failure(2)  # of a rank that stopped because another one failed


def run(args: list[str], run_one: Callable[[list[str]], int]) -> int:
    """Return the status of the command line, the same on every rank. Raise `OfAllRanks` if any rank
    failed.
    """
    if os.environ.get("RANK", "0") != "0":
        sys.stdout = sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
    from ckpttool import __version__
    from ckpttool.distributed.job import join

    job = join((__version__, *args))
    together.enter(job)
    try:
        if not SHARED.intersection(args[:1]):
            job.only_first()
        end: Failure | int = run_one(args)
    except RankDone:
        end = 0
    except FailedElsewhere:
        end = _HEARD
    except KeyboardInterrupt:  # a signal: every rank gets it
        raise
    except BaseException as error:
        end = failure_of(error)
        job.fail()
    return _verdict(job, end)


def _verdict(job: Job, end: Failure | int) -> int:
    """Return the status of all ranks, after the `end` of this one. Raise `OfAllRanks` if one
    failed; only the first rank's has a message.
    """
    job.tell(f"end/{job.rank}", asdict(end) if isinstance(end, Failure) else end)
    if not job.is_first:
        status: int = job.hear("verdict", ignore_failures=True)
        job.tell(f"gone/{job.rank}", None)
        if status:
            raise OfAllRanks(Failure(status))
        return status
    ends = job.gather("end", ignore_failures=True)
    failures = {}
    for rank, of_rank in enumerate(ends):
        failure = _failure(of_rank) if isinstance(of_rank, dict) else _HEARD
        if failure != _HEARD:
            failures[rank] = failure
    worst = _together(failures)
    job.tell("verdict", worst.status if worst is not None else ends[0])
    for rank in range(1, job.size):  # the store may be this process
        job.hear(f"gone/{rank}", ignore_failures=True)
    if worst is not None:
        raise OfAllRanks(worst)
    return int(ends[0])


def _failure(end: dict[str, object]) -> Failure:
    problems = tuple(Problem(**problem) for problem in end.pop("problems"))  # type: ignore[attr-defined]
    return Failure(**end, problems=problems)  # type: ignore[arg-type]


def _together(failures: dict[int, Failure]) -> Failure | None:
    """Return the failure of the first rank that failed, with the other messages of the others as
    problems.
    """
    if not failures:
        return None
    first = next(iter(failures.values()))
    messages = {first.message}
    problems = list(first.problems)
    for rank, failure in failures.items():
        if failure.message not in messages:
            messages.add(failure.message)
            problems.append(Problem(failure.message, f"rank {rank}"))
    return replace(first, problems=tuple(problems))
