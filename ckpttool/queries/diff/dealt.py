"""Comparing values by all ranks of a job: what will be asked is known from the index, and is dealt out before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from ckpttool.checkpoint import TensorEntry
from ckpttool.evaluate.with_numpy import Difference
from ckpttool.io.together.deal import Question, answers
from ckpttool.io.together.job import current, only_first
from ckpttool.queries.diff.keys import Values


def dealt(values: Values | None, *comparisons: Callable[[Values], object]) -> Values | None:
    """`values`, with all that these comparisons ask it answered by the ranks of the job; the first then is alone.

    They are made once on every rank, as if all values were the same, to hear what they ask. What they ask besides where
    values differ is found when it is asked. Without a job it is `values` itself.
    """
    if values is None or current() is None:
        return values
    pairs: dict[tuple[object, object], tuple[TensorEntry, TensorEntry]] = {}  # keeps alive what the keys are ids of

    def noted(left: TensorEntry, right: TensorEntry) -> None:
        if left.storage is not None and right.storage is not None:
            pairs.setdefault((left.identity, right.identity), (left, right))

    for compare in comparisons:
        compare(noted)
    asked = {at: Question(a.key, a.nbytes + b.nbytes, partial(_asked, values, a, b)) for at, (a, b) in pairs.items()}
    found = answers("comparing values", asked)
    only_first()

    def known(left: TensorEntry, right: TensorEntry) -> Difference | None:
        at = left.identity, right.identity
        return _told(found[at]) if at in pairs else values(left, right)

    return known


def _asked(values: Values, left: TensorEntry, right: TensorEntry) -> dict[str, Any] | None:
    found = values(left, right)
    return None if found is None else asdict(found)


def _told(found: dict[str, Any] | None) -> Difference | None:
    if found is None:
        return None
    return Difference(found["text"], tuple((exponent, count) for exponent, count in found["spread"]))
