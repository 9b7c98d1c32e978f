"""Patterns over dotted keys, and renames by them."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from functools import lru_cache
from itertools import islice
from time import thread_time
from typing import Any, NamedTuple

from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.core.limits import limits, spent
from ckpttool.core.text import dotted
from ckpttool.core.values import dataclass

# A brace that repeats nothing: literal for Python, a fuzzy match for `regex`.
_BRACE = re.compile(r"\\.|\{(?!\d+(?:,\d*)?\}|,\d*\})", re.DOTALL)
_POSIX = re.compile(r"\[\[:\^?\w+:\]")
VARIABLE = re.compile(r"\{([A-Za-z_]\w*)(\*?)\}")
_SPECIAL = re.compile(r"^re:|[{}*?\[]")  # in every pattern that may match another key than itself
_SYNTAX = (
    "a rule is 'FROM => TO', as in 'layers.{i}.layer.{rest*} => layers.{i}.{rest*}' or"
    " 're:(.*)_old => \\1' (`ckpttool help rules`)"
)
_MOST_TRIES = 100_000  # places tried for variables that occur twice: the first choice may be wrong


class Regex:
    """A regular expression. All its matches in one call of the program share a time limit."""

    def __init__(self, text: str) -> None:
        """Raise `re.error` or OverflowError if Python does not take the expression."""
        import regex  # takes 20 ms

        if _POSIX.search(text):
            raise re.error("Python has no classes such as [[:alpha:]]")
        re.compile(text)
        self.text = text
        try:
            self.pattern = regex.compile(_BRACE.sub(_escaped_brace, text), regex.V0)
        except regex.error as error:
            raise re.error(str(error)) from None

    def fullmatch(self, key: str) -> Any:
        """Return the match, or None. Raise `CkptError` if all matches of this call take longer than
        the limit.
        """
        left = limits().rules_seconds - spent.get(self.text, 0.0)
        start = thread_time()
        try:
            if left > 0:
                return self.pattern.fullmatch(key, timeout=left)
        except TimeoutError:  # by the clock of `regex`, which runs ahead of `thread_time`
            spent[self.text] = limits().rules_seconds
        finally:
            spent[self.text] = spent.get(self.text, 0.0) + thread_time() - start
        raise CkptError(
            f"the regular expression {self.text!r:.200} takes too long:"
            f" {limits().named('rules_seconds')}",
            hint="do not repeat a group that repeats something itself, as in (a+)+",
        )


@lru_cache(maxsize=1000)
def compiled(text: str) -> Regex:
    """Return the expression. Raise ValueError with a reason if it is not one."""
    try:
        return Regex(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from None


def _escaped_brace(match: re.Match[str]) -> str:
    return r"\{" if match[0] == "{" else match[0]


def _regex(expression: str, text: str) -> Regex:
    try:
        return compiled(expression)
    except ValueError as error:
        raise CkptError(f"not a regular expression: {text!r:.200}: {error}", hint=_SYNTAX) from None


# Patterns with variables

Bound = dict[str, slice]  # a variable, and its segments


class TooManyTries(ValueError):
    """Variables that occur twice leave too many ways open."""


@dataclass(frozen=True, slots=True)
class Token:
    """One segment of a pattern: a variable `name`, with `star` for any number of segments, else
    this `text`.
    """

    text: str
    name: str = ""
    star: bool = False


@dataclass(frozen=True, slots=True)
class Pattern:
    """The tokens of a pattern. With two stars, or with a variable that occurs twice, there may be
    several ways to match a key: `_search` tries.
    """

    tokens: tuple[Token, ...]

    def ways(self, segments: Sequence[str]) -> Iterable[Bound]:
        """Yield each way to match a key of these segments. Raises `TooManyTries` if there are too
        many to try.
        """
        return _search(self.tokens, segments)


@dataclass(frozen=True, slots=True)
class SimplePattern(Pattern):
    """A pattern with one way to match a key: no variable occurs twice, and at most one has a star.

    `literals` are segments with their places, `bound` are the places of the variables, counted from
    the end behind the star. So they are the same for every key.
    """

    literals: tuple[tuple[int, str], ...]
    bound: Bound
    has_star: bool

    @property
    def only_key(self) -> str | None:
        """The key that a pattern without variables matches; None if it has variables."""
        if self.bound:
            return None
        return ".".join(text for _, text in self.literals)

    def ways(self, segments: Sequence[str]) -> Iterable[Bound]:
        return (self.bound,) if self.fits(segments) else ()

    def fits(self, segments: Sequence[str]) -> bool:
        """Return whether the pattern matches a key of these segments."""
        count = len(self.tokens) - self.has_star
        if len(segments) < count or (len(segments) > count and not self.has_star):
            return False
        for at, text in self.literals:
            if segments[at] != text:
                return False
        return True


def _tokens(segments: Iterable[str]) -> tuple[Token, ...]:
    tokens = []
    for segment in segments:
        variable = VARIABLE.fullmatch(segment)
        if variable is None:
            tokens.append(Token(segment))
        else:
            tokens.append(Token("", variable[1], variable[2] == "*"))
    return tuple(tokens)


def pattern_of(segments: Sequence[str]) -> Pattern:
    """Compile a pattern. Its places behind the star count from the end of the key:

    tokens   layers  {i}   {rest*}  weight
    place    0       1     2:-1     -1
    """
    tokens, count = _tokens(segments), len(segments)
    names = [token.name for token in tokens if token.name]
    stars = [index for index, token in enumerate(tokens) if token.star]
    if len(stars) > 1 or len(set(names)) < len(names):
        return Pattern(tokens)
    star = stars[0] if stars else count
    literals = []
    bound: Bound = {}
    for index, token in enumerate(tokens):
        begin = index if index <= star else index - count
        end = index + 1 if index < star else index + 1 - count
        if token.name:
            bound[token.name] = slice(begin, end or None)  # 0 would be the start of the key
        else:
            literals.append((begin, token.text))
    return SimplePattern(tokens, tuple(literals), bound, bool(stars))


def _search(tokens: Sequence[Token], segments: Sequence[str]) -> Iterator[Bound]:
    """Yield each way to match. Only branches that can be completed are followed, as far as one
    variable tells.

    `stack` has a level for each token so far: what the tokens before it bind, and its places that
    are still to be tried.
    """
    count = len(segments)
    reachable = _reachable(tokens, segments)
    if not reachable[0][0]:
        return

    def places(index: int, start: int, bound: Bound) -> Iterator[tuple[int, int]]:
        """Yield where the token may begin and end, from segment `start` on."""
        token, row = tokens[index], reachable[index + 1]
        if token.name in bound:
            value = segments[bound[token.name]]
            end = start + len(value)
            if end <= count and row[end] and segments[start:end] == value:
                yield start, end
        elif token.star:
            for end in range(start, count + 1):
                if row[end]:
                    yield start, end
        else:
            yield start, start + 1

    stack = [(0, Bound(), places(0, 0, {}))]
    for _ in range(_MOST_TRIES + 2 * len(tokens) * count):
        index, bound, open_places = stack[-1]
        place = next(open_places, None)
        if place is None:
            stack.pop()
            if not stack:
                return
            continue
        token = tokens[index]
        more = {**bound, token.name: slice(*place)} if token.name else bound
        if index + 1 == len(tokens):
            yield more
        else:
            stack.append((index + 1, more, places(index + 1, place[1], more)))
    raise TooManyTries


def _reachable(tokens: Sequence[Token], segments: Sequence[str]) -> list[bytearray]:
    """Return, for each token and place, whether this token and those behind it can match from there
    to the end.
    """
    count = len(segments)
    row = bytearray(count + 1)  # behind the last token: only the end of the key
    row[count] = 1
    rows = [row]
    for token in reversed(tokens):
        below, row = row, bytearray(count + 1)
        if token.star:
            row[count] = below[count]
        for place in range(count - 1, -1, -1):
            if token.star:
                row[place] = below[place] or row[place + 1]
            elif token.name or segments[place] == token.text:
                row[place] = below[place + 1]
        rows.append(row)
    return rows[::-1]


def _two_ways(pattern: Pattern, segments: Sequence[str], text: str) -> list[Bound]:
    """Return the ways to match, at most two."""
    try:
        return list(islice(pattern.ways(segments), 2))
    except TooManyTries:
        raise CkptError(
            f"the variables of {text!r:.200} occur twice, in too many ways for a key of"
            f" {len(segments):,} segments",
            hint="write more segments literally",
        ) from None


@lru_cache  # a pattern is tried on every key
def _pattern(text: str) -> Pattern:
    return pattern_of(_segments(text))


def _segments(text: str) -> list[str]:
    segments = text.split(".")
    for segment in segments:
        if VARIABLE.search(segment) and not VARIABLE.fullmatch(segment):
            raise CkptError(
                f"{segment!r}: a variable matches whole segments between dots",
                hint="for a part of a segment write a regular expression: 're:layer(\\d+)\\.(.*)"
                " => layers.\\1.\\2'",
            )
    return segments


def matches(text: str, key: str) -> bool:
    """Return whether `text` matches: a rule's FROM, a regular expression (``re:``), or a shell
    pattern (``*``).
    """
    if not _SPECIAL.search(text):
        return text == key
    if text.startswith("re:"):
        return _regex(text[3:].strip(), text).fullmatch(key) is not None
    if VARIABLE.search(text):
        return bool(_two_ways(_pattern(text), key.split("."), text))
    return text == key or _shell_pattern(text).fullmatch(key) is not None


def names_entry(pattern: str, section: str, key: str) -> bool:
    """Return whether the pattern names the key itself, or the key below the path of its section."""
    return matches(pattern, key) or (bool(section) and matches(pattern, dotted(section, key)))


@lru_cache(maxsize=1000)
def _shell_pattern(text: str) -> re.Pattern[str]:
    return re.compile(fnmatch.translate(text))


class PatternSet:
    """Patterns, as `matches` takes them. Those that are a single key are looked up."""

    def __init__(self, texts: Iterable[str]) -> None:
        texts = list(texts)
        self._literal = {text for text in texts if not _SPECIAL.search(text)}
        self._others = [text for text in texts if _SPECIAL.search(text)]

    def hits(self, key: str) -> list[str]:
        """Return the patterns that match the key. Raises as `matches` does."""
        others = [text for text in self._others if matches(text, key)]
        return [key, *others] if key in self._literal else others


# Rules


@dataclass(frozen=True, slots=True)
class Rule:
    """A compiled rule: FROM as a pattern, with the segments of TO, or a regular expression with its
    replacement.
    """

    text: str
    source: Pattern | Regex
    template: tuple[Token, ...] | str

    def __hash__(self) -> int:  # a pattern has none: it holds a dict
        return hash((self.text, self.template))

    def apply(self, key: str) -> str | None:
        """Return the key's new name, or None if the rule does not match.

        Raises `Refused` if it matches in two ways, or if the new name is empty.
        """
        return self.apply_to(key, key.split("."))

    def apply_to(self, key: str, segments: Sequence[str]) -> str | None:
        """Return what `apply` returns, for a key of these segments."""
        if isinstance(self.source, Regex):
            name = self._expand(key)
        else:
            name = self._fill(key, segments, self.source)
        if name == "":
            raise Refused(
                f"the rule {self.text!r} leaves nothing of a key",
                hint="keep at least one segment in TO",
                problems=[Problem("would have no name", key)],
            )
        return name

    def _fill(self, key: str, segments: Sequence[str], source: Pattern) -> str | None:
        if isinstance(source, SimplePattern):
            if not source.fits(segments):
                return None
            bound = source.bound
        else:
            ways = _two_ways(source, segments, self.text)
            if not ways:
                return None
            bound = ways[0]
            if len(ways) > 1:
                raise Refused(
                    f"the rule {self.text!r} matches a key in more than one way",
                    hint="write more segments literally, or write the rule as a regular expression"
                    " (re:…)",
                    problems=[Problem("ambiguous match", key)],
                )
        name: list[str] = []
        for token in self.template:
            assert isinstance(token, Token)
            name += segments[bound[token.name]] if token.name else (token.text,)
        return ".".join(name)

    def _expand(self, key: str) -> str | None:
        import regex

        assert isinstance(self.source, Regex)
        match = self.source.fullmatch(key)
        try:
            return None if match is None else str(match.expand(self.template))
        except (re.error, regex.error, IndexError) as error:
            raise CkptError(f"not a replacement: {self.text!r}: {error}", hint=_SYNTAX) from None


# The rule that was probably meant

_ARROW = re.compile(r"\s*(?:->|→|=(?!>)|:(?!.*=>))\s*")


def _other_arrow(text: str) -> str:
    """Return a hint with the arrow of a rule for another one: ``a -> b``."""
    sides = _ARROW.split(text)
    if len(sides) != 2 or not all(sides):
        return ""
    return f"write '{sides[0]} => {sides[1]}'"


Variables = set[tuple[str, str]]  # the name, and `*` or nothing


def _same_name(text: str, given: Variables, used: Variables) -> str:
    """Return a hint with one name for a variable that has another name on each side."""
    left, right = given - used, used - given
    if len(left) != 1 or len(right) != 1:
        return ""
    (name, star), (other, other_star) = *left, *right
    if star != other_star:
        return ""
    rule = text.replace(f"{{{other}{star}}}", f"{{{name}{star}}}")
    return f"write '{rule}'"


def without_wildcards(text: str) -> str:
    """Return a hint with variables instead of the ``*`` of a shell; empty if a rule has none.

    A rule takes ``*`` literally: without a name, TO could not say where the text goes.
    """
    left, arrow, right = text.partition("=>")
    if not arrow or text.startswith("re:"):
        return ""
    names = ("x", "y", "z")
    sides = [side.strip().split(".") for side in (left, right)]
    counts = [segments.count("*") for segments in sides]
    if not any(counts):
        return ""
    hint = "write {x*} for any text, on both sides"
    if counts[0] != counts[1] or counts[0] > len(names):
        return hint
    return f"{hint}: '{_stars(sides[0], names)} => {_stars(sides[1], names)}'"


def _stars(segments: Sequence[str], names: Sequence[str]) -> str:
    """Return the key with a variable for each segment that is ``*``."""
    unused = iter(names)
    named = []
    for segment in segments:
        if segment == "*":
            segment = f"{{{next(unused)}*}}"
        named.append(segment)
    return ".".join(named)


def similar_pattern(text: str, keys: Sequence[str]) -> str:
    """Return a hint with the pattern or rule that was probably meant by one that no key matches;
    empty if none is similar.
    """
    left, arrow, right = text.partition("=>")
    left, right = left.strip(), right.strip()
    head = left.partition("{")[0].rstrip(".")  # the segments before the first variable
    if not head or text.startswith("re:") or _SPECIAL.search(head):
        return ""
    similar = _similar_head(head, keys)
    if not similar:
        return ""
    rest = left[len(head) :]
    if not rest and any(key.startswith(f"{similar}.") for key in keys):
        rest = ".{x*}"  # the pattern names a module instead of what is in it
        right += rest
    if similar + rest == left:
        return _with_more_segments(left, right)
    to = f" => {right}" if arrow else ""
    return f"did you mean '{similar}{rest}{to}'?"


def _with_more_segments(left: str, right: str) -> str:
    """Return a hint with ``{x*}`` for ``{x}`` at the end, which is one segment; else empty."""
    variable = re.search(r"\{(\w+)\}$", left)
    if variable is None:
        return ""
    longer = f"{{{variable[1]}*}}"
    to = f" => {right.replace(variable[0], longer)}" if right else ""
    return f"{variable[0]} is one segment: did you mean '{left[: variable.start()]}{longer}{to}'?"


def _similar_head(head: str, keys: Sequence[str]) -> str:
    """Return the beginning of keys that is `head`, with a prefix or without one, or mistyped; empty
    if there is none.
    """
    inside = f".{head}."
    if any(key.startswith(f"{head}.") for key in keys):
        return head
    for key in keys:
        at = f"{key}.".find(inside)
        if at != -1:
            return f"{key[:at]}.{head}"
    segments = head.split(".")
    beginnings = dict.fromkeys(".".join(key.split(".")[: len(segments)]) for key in keys)
    for count in range(1, len(segments)):
        shorter = ".".join(segments[count:])
        if any(f"{key}.".startswith(f"{shorter}.") for key in beginnings):
            return shorter
    near = get_close_matches(head, beginnings, 1, 0.8)
    return near[0] if near else ""


def parse(text: str, *, reverse: bool = False) -> Rule:
    """Compile ``FROM => TO`` (``TO => FROM`` with `reverse`). Raises `CkptError` on bad syntax."""
    left, arrow, right = text.partition("=>")
    left, right = left.strip(), right.strip()
    if "=>" in right:
        raise CkptError(f"a rule has one =>: {text!r}", hint=_SYNTAX)
    if not arrow or not left or not right:
        raise CkptError(f"not a rule: {text!r}", hint=_other_arrow(text) or _SYNTAX)
    if left.startswith("re:"):
        if reverse:
            raise CkptError(
                f"a regular expression has no reverse: {text!r}",
                hint="write the reverse rule itself",
            )
        return Rule(text, _regex(left[3:].strip(), text), right)
    if reverse:
        left, right = right, left
    _check_variables(text, set(VARIABLE.findall(left)), set(VARIABLE.findall(right)))
    return Rule(text, _pattern(left), _tokens(_segments(right)))


def _check_variables(text: str, given: Variables, used: Variables) -> None:
    """Raise `CkptError` for a variable with and without a star, or one that only TO has."""
    for name, star in sorted(given | used):
        if not star and (name, "*") in given | used:
            raise CkptError(
                f"the rule {text!r} uses {{{name}}} and {{{name}*}}: name them differently",
                hint=_SYNTAX,
            )
    unbound = [name + star for name, star in used - given]
    if unbound:
        raise CkptError(
            f"the rule {text!r} uses {{{min(unbound)}}}, which the other side does not bind",
            hint=without_wildcards(text) or _same_name(text, given, used) or _SYNTAX,
        )


class Renamed(NamedTuple):
    """The new name of a key, and the rule that gives it."""

    rule: Rule
    name: str


class RuleList:
    """Rules, of which the first that matches renames a key. Rules for a single key are looked up,
    and so is a key that was renamed before.

    Most patterns match by the number of segments and by their literal segments: for all other keys
    with the same literal segments at these places, the rules are found once.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._count = len(rules)
        self._literal: dict[str, tuple[int, Rule]] = {}
        self._others: list[tuple[int, Rule]] = []
        self._words: set[str] = set()  # literal segments of patterns
        self._by_words: dict[tuple[str, ...], list[tuple[int, Rule]]] = {}
        self._renamed: dict[str, Renamed | None] = {}
        for index, rule in enumerate(rules):
            if not isinstance(rule.source, SimplePattern):
                self._others.append((index, rule))
                continue
            key = rule.source.only_key
            if key is not None:
                self._literal.setdefault(key, (index, rule))
                continue
            self._others.append((index, rule))
            self._words.update(text for _, text in rule.source.literals)

    def rename(self, key: str) -> Renamed | None:
        """Return the key's new name; None if no rule matches. Raises as `Rule.apply` does."""
        if key not in self._renamed:
            self._renamed[key] = self._rename(key)
        return self._renamed[key]

    def _rename(self, key: str) -> Renamed | None:
        segments = key.split(".")
        literal_index, literal = self._literal.get(key, (self._count, None))
        candidates = self._others
        if len(candidates) > 1:
            candidates = self._candidates(segments)
        for index, rule in candidates:
            if index > literal_index:
                break
            name = rule.apply_to(key, segments)
            if name is not None:
                return Renamed(rule, name)
        name = None if literal is None else literal.apply(key)
        return None if literal is None or name is None else Renamed(literal, name)

    def _candidates(self, segments: Sequence[str]) -> list[tuple[int, Rule]]:
        """Return the patterns that may match a key of these segments; the caller tries each."""
        words = tuple([segment if segment in self._words else "" for segment in segments])
        rules = self._by_words.get(words)
        if rules is None:
            rules = [(index, rule) for index, rule in self._others if _may_match(rule, words)]
            self._by_words[words] = rules
        return rules


@lru_cache(maxsize=1)
def rule_list(rules: tuple[Rule, ...]) -> RuleList:
    """Return the list of the rules. The last one is kept: rules are inferred, read back from their
    file, and tried on the same keys.
    """
    return RuleList(rules)


def _may_match(rule: Rule, segments: Sequence[str]) -> bool:
    """Return False if the rule matches no key with these literal segments."""
    source = rule.source
    return not isinstance(source, SimplePattern) or source.fits(segments)
