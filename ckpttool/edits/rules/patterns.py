"""The user's rules: ``FROM => TO`` patterns over dotted keys, and the renames that they make of a set of keys.

`{x}` stands for exactly one dotted segment, `{x*}` for any number of segments, all else is literal; after ``re:`` both
sides are a Python regular expression (full match) and its replacement.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import islice
from typing import Protocol

from ckpttool.edits.rules.regex import Regex, compiled
from ckpttool.edits.rules.segments import VARIABLE, Bound, Pattern, Token, TooManyTries, pattern_of, token_of, ways
from ckpttool.errors import CkptError, Problem, Refused
from ckpttool.values import dataclass

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
