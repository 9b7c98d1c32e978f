"""Patterns over dotted keys, `{x}` for one segment and `{x*}` for any number, matched in time of the order of
segments of the key × segments of the pattern: whoever writes a rule, or a key, does not choose how long it takes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

VARIABLE = re.compile(r"\{([A-Za-z_]\w*)(\*?)\}")
_MOST_TRIES = 100_000  # places tried for variables that stand twice, where the first choice need not be the right one

Bound = dict[str, tuple[int, int]]  # a variable, and where the segments that it stands for begin and end


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
class Pattern:
    """The tokens of a pattern; with `direct`, what each stands for follows from the number of the key's segments."""

    tokens: tuple[Token, ...]
    stars: tuple[int, ...]
    direct: bool


def pattern_of(segments: Sequence[str]) -> Pattern:
    """The pattern that is written with these segments."""
    found = [(segment, VARIABLE.fullmatch(segment)) for segment in segments]
    tokens = tuple(Token(text) if match is None else Token("", match[1], match[2] == "*") for text, match in found)
    names = [token.name for token in tokens if token.name]
    stars = tuple(index for index, token in enumerate(tokens) if token.star)
    return Pattern(tokens, stars, len(stars) < 2 and len(set(names)) == len(names))


def ways(pattern: Pattern, segments: Sequence[str]) -> Iterator[Bound]:
    """Each way in which the pattern matches a key of these segments.

    Raises `TooManyTries` where variables that stand twice leave too many ways open.
    """
    if pattern.direct:
        found = _only_way(pattern, segments)
        return iter(() if found is None else (found,))
    return _searched(pattern.tokens, segments)


def _only_way(pattern: Pattern, segments: Sequence[str]) -> Bound | None:
    tokens, more = pattern.tokens, len(segments) - len(pattern.tokens)
    if more < -1 if pattern.stars else more != 0:
        return None
    bound: Bound = {}
    at = 0
    for token in tokens:
        end = at + 1 + (more if token.star else 0)
        if token.name:
            bound[token.name] = (at, end)
        elif segments[at] != token.text:
            return None
        at = end
    return bound


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
        more = {**bound, token.name: place} if token.name else bound
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
        start, end = bound[token.name]
        value = segments[start:end]
        after = at + len(value)
        if after < len(reachable) and reachable[after] and segments[at:after] == value:
            yield at, after
    elif token.star:
        yield from ((at, end) for end in range(at, len(segments) + 1) if reachable[end])
    elif at < len(segments) and token.fits(segments[at]) and reachable[at + 1]:
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
