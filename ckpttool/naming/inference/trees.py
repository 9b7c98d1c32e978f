"""The same tree of names below other modules: how well two prefixes explain the keys of two sides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckpttool.naming.inference.values import Group, Template, Tensor


def inserted(one: Template, other: Template) -> str:
    """The segment that the longer of two names has and the shorter has not; empty where they differ by more."""
    short, long = sorted((one, other), key=len)
    if len(long) - len(short) != 1:
        return ""
    return next((part for at, part in enumerate(long) if long[:at] + long[at + 1 :] == short), "")


def fit(left: Tensor, right: Tensor) -> bool:
    """Whether the two have one shape, or one that is the other's transposed."""
    return left.shape == right.shape or (len(left.shape) == 2 and left.shape == right.shape[::-1])


def fits(trees: Iterable[tuple[Group, Group]]) -> int:
    """How many tensors of these groups, layer by layer, have a like on the other side."""
    return sum(
        at in theirs.members and fit(one, theirs.members[at])
        for mine, theirs in trees
        for at, one in mine.members.items()
    )


def ties(
    ranked: Sequence[tuple[Template, Template]], found: dict[tuple[Template, Template], list[tuple[Group, Group]]]
) -> bool:
    """Whether the second best explanation explains as much as the best, as shortly, and something else."""
    if len(ranked) < 2:
        return False
    best, second = ranked[:2]
    alike = fits(found[best]) == fits(found[second]) and sum(map(len, best)) == sum(map(len, second))
    sides = ({(side, pair[side].template) for pair in found[at] for side in (0, 1)} for at in (best, second))
    return alike and bool(set.intersection(*sides))
