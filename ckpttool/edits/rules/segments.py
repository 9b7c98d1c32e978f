"""Patterns over dotted keys, `{x}` for one segment and `{x*}` for any number, matched in time of the order of
segments of the key × segments of the pattern: whoever writes a rule, or a key, does not choose how long it takes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from ckpttool.values import dataclass

VARIABLE = re.compile(r"\{([A-Za-z_]\w*)(\*?)\}")
_MOST_TRIES = 100_000  # places tried for variables that stand twice, where the first choice need not be the right one

Bound = dict[str, slice]  # a variable, and the segments that it stands for


class TooManyTries(ValueError):
    """Variables that stand twice leave too many ways open."""


@dataclass(frozen=True, slots=True)
class Token:
    """One segment of a pattern: a `name` that is bound, with `star` to any number of segments, else this `text`."""

    text: str
    name: str = ""
    star: bool = False

    def fits(self, segment: str) -> bool:
        """Whether it can stand for this one segment."""
        return bool(self.name) or segment == self.text


@dataclass(frozen=True, slots=True)
class OnlyWay:
    """What each token stands for where there is no choice: `literals` by their places, the variables in `bound`.

    Places behind a star are counted from the end of the key, so they are the same for every key. `count` is how many
    segments it has: exactly, or with a `star` at least.
    """

    literals: tuple[tuple[int, str], ...]
    bound: Bound
    count: int
    star: bool

    def ways(self, segments: Sequence[str]) -> tuple[Bound, ...]:
        """The way in which it matches a key of these segments; none where it does not."""
        if len(segments) < self.count or (len(segments) > self.count and not self.star):
            return ()
        for at, text in self.literals:
            if segments[at] != text:
                return ()
        return (self.bound,)


@dataclass(frozen=True, slots=True)
class Pattern:
    """The tokens of a pattern, and the only way in which it can match; None where there may be several."""

    tokens: tuple[Token, ...]
    only: OnlyWay | None


def token_of(segment: str) -> Token:
    """The token that is written so."""
    match = VARIABLE.fullmatch(segment)
    return Token(segment) if match is None else Token("", match[1], match[2] == "*")


def pattern_of(segments: Sequence[str]) -> Pattern:
    """The pattern that is written with these segments."""
    tokens = tuple(map(token_of, segments))
    return Pattern(tokens, _only_way(tokens))


def _only_way(tokens: Sequence[Token]) -> OnlyWay | None:
    """That of a pattern that has one star at most, and no variable twice."""
    names = [token.name for token in tokens if token.name]
    stars = [index for index, token in enumerate(tokens) if token.star]
    if len(stars) > 1 or len(set(names)) < len(names):
        return None
    count = len(tokens)
    star = stars[0] if stars else count
    begins = [index if index <= star else index - count for index in range(count)]
    ends = [index + 1 if index < star else index + 1 - count or None for index in range(count)]
    literals = tuple((begin, token.text) for begin, token in zip(begins, tokens) if not token.name)
    bound = {token.name: slice(begin, end) for begin, end, token in zip(begins, ends, tokens) if token.name}
    return OnlyWay(literals, bound, count - len(stars), bool(stars))


def ways(pattern: Pattern, segments: Sequence[str]) -> Iterable[Bound]:
    """Each way in which the pattern matches a key of these segments.

    Raises `TooManyTries` where variables that stand twice leave too many ways open.
    """
    if pattern.only is None:
        return _searched(pattern.tokens, segments)
    return pattern.only.ways(segments)


def _searched(pattern: Sequence[Token], segments: Sequence[str]) -> Iterator[Bound]:
    """By way of a table of what can be matched from where: no branch that is followed ends in nothing."""
    reachable = _reachable(pattern, segments)
    if not reachable[0][0]:
        return
    todo = [(0, Bound(), _ends(pattern[0], 0, segments, {}, reachable[1]))]
    for _ in range(_MOST_TRIES + 2 * len(pattern) * len(segments)):
        index, bound, ends = todo[-1]
        place = next(ends, None)
        if place is None:
            todo.pop()
            if not todo:
                return
            continue
        token = pattern[index]
        more = {**bound, token.name: slice(*place)} if token.name else bound
        if index + 1 == len(pattern):
            yield more
        else:
            following = _ends(pattern[index + 1], place[1], segments, more, reachable[index + 2])
            todo.append((index + 1, more, following))
    raise TooManyTries


def _ends(
    token: Token, at: int, segments: Sequence[str], bound: Bound, reachable: bytearray
) -> Iterator[tuple[int, int]]:
    """Where the token may begin and end, from segment `at` on, of the places from which the rest can be matched."""
    if token.name in bound:
        value = segments[bound[token.name]]
        after = at + len(value)
        if after < len(reachable) and reachable[after] and segments[at:after] == value:
            yield at, after
    elif token.star:
        yield from ((at, end) for end in range(at, len(segments) + 1) if reachable[end])
    else:
        yield at, at + 1


def _reachable(pattern: Sequence[Token], segments: Sequence[str]) -> list[bytearray]:
    """For each token and place of the key whether that token and those behind it can match from there to the end."""
    count = len(segments)
    table = [bytearray(count + 1) for _ in range(len(pattern) + 1)]
    table[-1][count] = 1
    for index in range(len(pattern) - 1, -1, -1):
        token, row, below = pattern[index], table[index], table[index + 1]
        if token.star:
            row[count] = below[count]
            for at in range(count - 1, -1, -1):
                row[at] = below[at] or row[at + 1]
        else:
            for at in range(count):
                row[at] = below[at + 1] and token.fits(segments[at])
    return table
