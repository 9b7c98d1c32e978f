"""Compare the values of many tensors with all ranks of a job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from ckpttool.core.checkpoint import TensorEntry
from ckpttool.diffing.pairs import Values
from ckpttool.distributed.job import Question, answers, current, only_first
from ckpttool.evaluate.compare import Change, Difference


def compare_on_ranks(
    values: Values | None, *comparisons: Callable[[Values], object]
) -> Values | None:
    """Return `values` with all answers that the comparisons need, found by the ranks of the job;
    then rank 0 goes on.

    Every rank runs the comparisons once, as if all values were equal, to learn which tensors they
    compare. Comparisons that are made only if values differ are computed when they are needed.
    Without a job, return `values`.
    """
    if values is None or current() is None:
        return values
    compute = values
    # keeps alive what the keys are ids of
    pairs: dict[tuple[object, object], tuple[TensorEntry, TensorEntry]] = {}

    def note(left: TensorEntry, right: TensorEntry) -> None:
        if left.storage is not None and right.storage is not None:
            pairs.setdefault((left.identity, right.identity), (left, right))

    def as_json(left: TensorEntry, right: TensorEntry) -> dict[str, Any] | None:
        difference = compute(left, right)
        return None if difference is None else asdict(difference)

    for comparison in comparisons:
        comparison(note)
    questions = {}
    for identities, (left, right) in pairs.items():
        nbytes = left.nbytes + right.nbytes
        questions[identities] = Question(left.key, nbytes, partial(as_json, left, right))
    answered = answers("comparing values", questions)
    only_first()

    def look_up(left: TensorEntry, right: TensorEntry) -> Difference | None:
        identities = left.identity, right.identity
        if identities not in pairs:
            return compute(left, right)
        answer = answered[identities]
        return None if answer is None else _difference(**answer)

    return look_up


def _difference(
    text: str, spread: Sequence[tuple[int, int]], change: dict[str, Any] | None
) -> Difference:
    """Return the difference that a rank wrote as JSON, which has lists for tuples."""
    pairs = tuple((exponent, count) for exponent, count in spread)
    return Difference(text, pairs, None if change is None else Change(**change))
