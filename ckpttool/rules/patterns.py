"""Patterns over dotted keys, and the renames that they make of a set of keys."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from time import thread_time
from typing import Any, Protocol

from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.core.keys import dotted
from ckpttool.core.limits import limits, spent
from ckpttool.core.values import dataclass

# A brace that repeats nothing: literal for Python, a fuzzy match for `regex`.
_BRACE = re.compile(r"\\.|\{(?!\d+(?:,\d*)?\}|,\d*\})", re.DOTALL)
_POSIX = re.compile(r"\[\[:\^?\w+:\]")


class Regex:
    """One expression. Its matches have one time limit in each call of the program."""

    def __init__(self, text: str) -> None:
        """Raise `re.error` and OverflowError if Python does not take the expression."""
        import regex  # takes 20 ms

        if _POSIX.search(text):
            raise re.error("Python has no classes such as [[:alpha:]]")
        re.compile(text)
        self.text = text
        self.pattern = regex.compile(_BRACE.sub(lambda found: r"\{" if found[0] == "{" else found[0], text), regex.V0)

    def fullmatch(self, key: str) -> Any:
        """Return the match, or None. Raise `CkptError` if all matches of this call take longer than the limit."""
        left = limits().rules_seconds - spent.get(self.text, 0.0)
        start = thread_time()
        try:
            if left > 0:
                return self.pattern.fullmatch(key, timeout=left)
        except TimeoutError:
            pass
        finally:
            spent[self.text] = spent.get(self.text, 0.0) + thread_time() - start
        raise CkptError(
            f"the regular expression {self.text!r:.200} takes too long: {limits().named('rules_seconds')}",
            hint="do not repeat a group that repeats something itself, as in (a+)+",
        )


@lru_cache(maxsize=1000)
def compiled(text: str) -> Regex:
    """Return the expression. Raise ValueError, in words, if it is not one."""
    try:
        return Regex(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from None


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


_SYNTAX = "a rule is 'FROM => TO', as in 'layers.{i}.layer.{rest*} => layers.{i}.{rest*}' or 're:(.*)_old => \\1'"


_SPECIAL = re.compile(r"^re:|[{}*?\[]")  # in every pattern that may name another key than itself


class Renaming(Protocol):
    """What gives some keys a new name."""

    def apply(self, key: str) -> str | None:
        """The key's new name, or None where it keeps its own."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule, compiled: FROM as a pattern, with the segments of TO, or a regular expression with its replacement."""

    text: str
    source: Pattern | Regex
    template: tuple[Token, ...] | str

    def apply(self, key: str) -> str | None:
        """The key's new name, or None where the rule does not match.

        Raises `Refused` where it matches in two ways, or leaves nothing of the key.
        """
        name = self._expand(key) if isinstance(self.source, Regex) else self._fill(key, self.source)
        if name == "":
            raise Refused(
                f"the rule {self.text!r} leaves nothing of a key",
                hint="let TO keep a segment at least",
                problems=[Problem("would have no name", key)],
            )
        return name

    def _fill(self, key: str, source: Pattern) -> str | None:
        segments = key.split(".")
        found = _two_ways(source, segments, self.text) if source.only is None else source.only.ways(segments)
        if not found:
            return None
        if len(found) > 1:
            raise Refused(
                f"the rule {self.text!r} matches a key in more than one way",
                hint="name more of the segments literally, or write the rule as a regular expression (re:…)",
                problems=[Problem("ambiguous match", key)],
            )
        assert not isinstance(self.template, str)
        bound, name = found[0], list[str]()
        for token in self.template:
            name += segments[bound[token.name]] if token.name else (token.text,)
        return ".".join(name)

    def _expand(self, key: str) -> str | None:
        assert isinstance(self.source, Regex)
        assert isinstance(self.template, str)
        found = self.source.fullmatch(key)
        try:
            return None if found is None else str(found.expand(self.template))
        except (re.error, IndexError) as error:
            raise CkptError(f"not a replacement: {self.text!r}: {error}", hint=_SYNTAX) from None


def _two_ways(source: Pattern, segments: Sequence[str], text: str) -> list[Bound]:
    """The ways in which the pattern matches, two of them at most."""
    try:
        return list(islice(ways(source, segments), 2))
    except TooManyTries:
        raise CkptError(
            f"the variables of {text!r:.200} stand twice in too many ways for a key of {len(segments):,} segments",
            hint="name more of the segments literally",
        ) from None


def parse(text: str, *, reverse: bool = False) -> Rule:
    """Compiles ``FROM => TO`` (``TO => FROM`` with `reverse`). Raises `CkptError` on bad syntax."""
    left, arrow, right = text.partition("=>")
    left, right = left.strip(), right.strip()
    if not arrow or not left or not right:
        raise CkptError(f"not a rule: {text!r}", hint=_SYNTAX)
    if left.startswith("re:"):
        if reverse:
            raise CkptError(f"a regular expression has no reverse: {text!r}", hint="write the reverse rule itself")
        return Rule(text, _regex(left[3:].strip(), text), right)
    if reverse:
        left, right = right, left
    kinds = set(_names(left)) | set(_names(right))
    both = sorted(name for name in kinds if name + "*" in kinds)
    if both:
        raise CkptError(f"the rule {text!r} uses {{{both[0]}}} and {{{both[0]}*}}: name them differently", hint=_SYNTAX)
    unbound = set(_names(right)) - set(_names(left))
    if unbound:
        raise CkptError(f"the rule {text!r} uses {{{min(unbound)}}}, which the other side does not bind", hint=_SYNTAX)
    return Rule(text, _pattern(left), tuple(map(token_of, _segments(right))))


def _regex(expression: str, text: str) -> Regex:
    try:
        return compiled(expression)
    except ValueError as error:
        raise CkptError(f"not a regular expression: {text!r:.200}: {error}", hint=_SYNTAX) from None


class InTurn:
    """Rules, of which the first that matches a key renames it. Those that name one key are looked up by it."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._count = len(rules)
        self._literal: dict[str, tuple[int, Rule]] = {}
        self._others: list[tuple[int, Rule]] = []
        for at, rule in enumerate(rules):
            if isinstance(rule.source, Regex) or any(token.name for token in rule.source.tokens):
                self._others.append((at, rule))
            else:
                self._literal.setdefault(".".join(token.text for token in rule.source.tokens), (at, rule))

    def first(self, key: str) -> tuple[Rule | None, str | None]:
        """The rule, and the key's new name; neither where none matches. Raises as `Rule.apply` does."""
        place, literal = self._literal.get(key, (self._count, None))
        for at, rule in self._others:
            if at > place:
                break
            name = rule.apply(key)
            if name is not None:
                return rule, name
        return (None, None) if literal is None else (literal, literal.apply(key))


class Naming:
    """Patterns, as `matches` takes them; those that name one key are looked up by it."""

    def __init__(self, texts: Iterable[str]) -> None:
        own = list(texts)
        self._literal = {text for text in own if not _SPECIAL.search(text)}
        self._others = [text for text in own if _SPECIAL.search(text)]

    def hits(self, key: str) -> list[str]:
        """Those that name the key. Raises as `matches` does."""
        return [*([key] if key in self._literal else []), *(text for text in self._others if matches(text, key))]


def names_entry(pattern: str, section: str, key: str) -> bool:
    """Return whether the pattern names the key itself, or the key below the path of its section."""
    return matches(pattern, key) or (bool(section) and matches(pattern, dotted(section, key)))


def matches(text: str, key: str) -> bool:
    """Whether `text` names `key`: a rule's FROM, a regular expression after ``re:``, or a shell pattern with ``*``."""
    if not _SPECIAL.search(text):
        return text == key
    if text.startswith("re:"):
        return _regex(text[3:], text).fullmatch(key) is not None
    if VARIABLE.search(text):
        return bool(_two_ways(_pattern(text), key.split("."), text))
    # As `fnmatch`, whose time may grow with a power of the key's length for a pattern of many stars.
    return text == key or _shell_pattern(text).fullmatch(key) is not None


@lru_cache(maxsize=1000)
def _shell_pattern(text: str) -> re.Pattern[str]:
    return re.compile(fnmatch.translate(text))


@lru_cache  # a pattern is held against every key
def _pattern(text: str) -> Pattern:
    return pattern_of(_segments(text))


def _segments(text: str) -> list[str]:
    segments = text.split(".")
    for segment in segments:
        if VARIABLE.search(segment) and not VARIABLE.fullmatch(segment):
            raise CkptError(
                f"{segment!r}: a variable stands for whole segments between dots",
                hint="for a part of a segment write a regular expression: 're:layer(\\d+)\\.(.*) => layers.\\1.\\2'",
            )
    return segments


def _names(text: str) -> list[str]:
    return [name + star for name, star in VARIABLE.findall(text)]
