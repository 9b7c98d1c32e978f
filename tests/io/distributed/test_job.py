"""Messages between ranks, and ranks that fail or do not join."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest
from torch.distributed import HashStore, TCPStore

from ckpttool import CkptError
from ckpttool.distributed import job
from ckpttool.distributed.job import FailedElsewhere, Job, Question, RankDone
from ckpttool.io import progress


@pytest.fixture(autouse=True)
def _without_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_current", None)


def test_first_rank_computes_a_value_once() -> None:
    store, calls = HashStore(), list[int]()

    def compute() -> dict[str, int]:
        calls.append(len(calls))
        return {"found": len(calls)}

    for rank in (0, 1, 0):
        assert Job(rank, 2, store).of_first("key", compute) == {"found": 1}
    assert calls == [0]


def test_other_ranks_end_at_only_first() -> None:
    store = HashStore()
    first, other = Job(0, 2, store), Job(1, 2, store)
    job.only_first()  # no effect without a job
    job.enter(other)
    assert job.current() is other
    with pytest.raises(RankDone):
        job.only_first()
    job.enter(first)
    assert job.current() is first
    job.only_first()
    assert job.current() is None
    job.only_first()


def test_ranks_with_different_plans_are_named() -> None:
    store = HashStore()
    for rank, digest in enumerate(("same", "smaller", "same", "Zarger")):
        store.set(f"plan/1/{rank}", f'"{digest}"')
    with pytest.raises(CkptError, match="the ranks planned different outputs") as raised:
        Job(0, 4, store).agree("same")
    assert [problem.key for problem in raised.value.problems] == ["rank 1", "rank 3"]


def test_waiting_for_a_failed_rank_fails() -> None:
    store = HashStore()
    store.set("told", "1")
    Job(1, 2, store).fail()
    assert Job(0, 2, store).hear("told") == 1
    with pytest.raises(FailedElsewhere):
        Job(0, 2, store).hear("never")
    with pytest.raises(FailedElsewhere):
        Job(0, 2, store).check()


def test_questions_are_answered_once_largest_first() -> None:
    """Progress includes the work of other ranks."""
    answered, done = list[str](), list[int]()

    def question(what: str, nbytes: int) -> Question:
        return Question(what, nbytes, lambda: answered.append(what) or what.upper())  # type: ignore[func-returns-value]

    questions = {what: question(what, nbytes) for what, nbytes in (("a", 5), ("b", 50), ("c", 20))}
    store = HashStore()
    job.enter(Job(0, 1, store))
    with progress.shown(lambda title, total: nullcontext(done.append)):
        assert job.answers("all", questions) == {"a": "A", "b": "B", "c": "C"}
    assert answered == ["b", "c", "a"]
    assert sum(done) == 75


def test_assignment_is_the_same_on_all_ranks_and_even() -> None:
    sizes = {"a": 5, "b": 50, "c": 20, "d": 20, "e": 0}
    assert job.assigned(sizes, 2) == [["b"], ["c", "d", "a", "e"]]
    assert job.assigned(sizes, 1) == [["b", "c", "d", "a", "e"]]
    assert job.assigned({}, 3) == [[], [], []]


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    """Return the store of the torchrun agent, and set the environment of a rank."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": store.port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, **address}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(job, "PATIENCE", 0.3)
    return store


def test_job_starts_when_all_ranks_have_joined(
    agent: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Restarted ranks do not see the messages of the job before."""
    threading.Timer(0.1, agent.add, ("ckpttool/0/2/come", 1)).start()
    found = job.join(["remap", "x"])
    assert (found.rank, found.size, list(found.command)) == (1, 2, ["remap", "x"])
    found.tell("said", 5)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    agent.add("ckpttool/1/2/come", 1)
    assert not job.join([]).store.check(["said"])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (0, "1 processes take part in a job of 2 ranks"),
        (2, "3 processes take part in a job of 2 ranks"),
        (None, "the ranks do not find each other: .*RANK expected"),
    ],
)
def test_missing_or_extra_ranks_are_reported(
    agent: TCPStore, monkeypatch: pytest.MonkeyPatch, more: int | None, message: str
) -> None:
    if more is None:
        monkeypatch.delenv("RANK")
    agent.add("ckpttool/0/2/come", more or 0)
    with pytest.raises(CkptError, match=message) as raised:
        job.join(["remap"])
    assert "env -u TORCHELASTIC_RUN_ID" in raised.value.hint
