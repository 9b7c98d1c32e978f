"""The user's rules: ``FROM => TO`` patterns over dotted keys, and the renames that they make of a set of keys.

`{x}` stands for exactly one dotted segment, `{x*}` for any number of segments, all else is literal; after ``re:`` both
sides are a Python regular expression (full match) and its replacement.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ckpttool.errors import CkptError, Problem, Refused

_VARIABLE = re.compile(r"\{([A-Za-z_]\w*)(\*?)\}")
_SYNTAX = "a rule is 'FROM => TO', as in 'layers.{i}.layer.{rest*} => layers.{i}.{rest*}' or 're:(.*)_old => \\1'"


class Renaming(Protocol):
    """What gives some keys a new name."""

    def apply(self, key: str) -> str | None:
        """The key's new name, or None where it keeps its own."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule, compiled. `lazy` differs from `greedy` in how much a `{x*}` takes, which shows an ambiguous match."""

    text: str
    greedy: re.Pattern[str]
    lazy: re.Pattern[str]
    template: str | tuple[str, ...]  # a regular expression's replacement, or the segments of TO

    def apply(self, key: str) -> str | None:
        """The key's new name, or None where the rule does not match.

        Raises `Refused` where it matches in two ways, or leaves nothing of the key.
        """
        name = self._expand(key, self.template) if isinstance(self.template, str) else self._fill(key, self.template)
        if name == "":
            raise Refused(
                f"the rule {self.text!r} leaves nothing of a key",
                hint="let TO keep a segment at least",
                problems=[Problem("would have no name", key)],
            )
        return name

    def _fill(self, key: str, template: tuple[str, ...]) -> str | None:
        found, other = self.greedy.fullmatch(key + "."), self.lazy.fullmatch(key + ".")
        if found is None or other is None:
            return None
        if found.groupdict() != other.groupdict():
            raise Refused(
                f"the rule {self.text!r} matches a key in more than one way",
                hint="name more of the segments literally, or write the rule as a regular expression (re:…)",
                problems=[Problem("ambiguous match", key)],
            )
        return "".join(_fill(segment, found.groupdict()) for segment in template)[:-1]

    def _expand(self, key: str, template: str) -> str | None:
        found = self.greedy.fullmatch(key)
        try:
            return None if found is None else found.expand(template)
        except (re.error, IndexError) as error:
            raise CkptError(f"not a replacement: {self.text!r}: {error}", hint=_SYNTAX) from None


def parse(text: str, *, reverse: bool = False) -> Rule:
    """Compiles ``FROM => TO`` (``TO => FROM`` with `reverse`). Raises `CkptError` on bad syntax."""
    left, arrow, right = text.partition("=>")
    left, right = left.strip(), right.strip()
    if not arrow or not left or not right:
        raise CkptError(f"not a rule: {text!r}", hint=_SYNTAX)
    if left.startswith("re:"):
        if reverse:
            raise CkptError(f"a regular expression has no reverse: {text!r}", hint="write the reverse rule itself")
        return _parse_regex(text, left[3:].strip(), right)
    if reverse:
        left, right = right, left
    kinds = set(_names(left)) | set(_names(right))
    both = sorted(name for name in kinds if name + "*" in kinds)
    if both:
        raise CkptError(f"the rule {text!r} uses {{{both[0]}}} and {{{both[0]}*}}: name them differently", hint=_SYNTAX)
    unbound = set(_names(right)) - set(_names(left))
    if unbound:
        raise CkptError(f"the rule {text!r} uses {{{min(unbound)}}}, which the other side does not bind", hint=_SYNTAX)
    return Rule(text, pattern(left), pattern(left, lazy=True), tuple(segment + "." for segment in _segments(right)))


def _parse_regex(text: str, left: str, right: str) -> Rule:
    try:
        compiled = re.compile(left)
    except re.error as error:
        raise CkptError(f"not a regular expression: {text!r}: {error}", hint=_SYNTAX) from None
    return Rule(text, compiled, compiled, right)


def pattern(text: str, *, lazy: bool = False) -> re.Pattern[str]:
    """The regular expression of one side, to be matched against the key with a dot added at its end."""
    seen: set[str] = set()
    parts = []
    for segment in _segments(text):
        variable = _VARIABLE.fullmatch(segment)
        if variable is None:
            parts.append(re.escape(segment) + r"\.")
            continue
        name, star = variable.groups()
        if name in seen:
            parts.append(f"(?P={name})" + ("" if star else r"\."))
        elif star:
            parts.append(rf"(?P<{name}>(?:[^.]*\.)*{'?' if lazy else ''})")
        else:
            parts.append(rf"(?P<{name}>[^.]*)\.")
        seen.add(name)
    return re.compile("".join(parts), re.DOTALL)


def matches(text: str, key: str) -> bool:
    """Whether `text` names `key`: a rule's FROM, a regular expression after ``re:``, or a shell pattern with ``*``."""
    if text.startswith("re:"):
        try:
            return re.fullmatch(text[3:], key) is not None
        except re.error as error:
            raise CkptError(f"not a regular expression: {text!r}: {error}", hint=_SYNTAX) from None
    if _VARIABLE.search(text):
        return pattern(text).fullmatch(key + ".") is not None
    return text == key or fnmatch.fnmatchcase(key, text)


def rename(keys: Iterable[str], rules: Sequence[Rule]) -> dict[str, str]:
    """Every key with its new name: the first rule that matches it renames it, a key that none matches keeps its name.

    Raises `Refused` where a rule matches no key at all, since a rule that does nothing is a mistake in the rule.
    """
    used: set[str] = set()
    renamed: dict[str, str] = {}
    for key in keys:
        renamed[key] = key
        for rule in rules:
            name = rule.apply(key)
            if name is not None:
                used.add(rule.text)
                renamed[key] = name
                break
    idle = [rule.text for rule in rules if rule.text not in used]
    if idle:
        raise Refused(
            f"{len(idle)} of {len(rules)} rules match no key",
            hint="`ckpttool inspect CKPT` lists the keys; an earlier rule may have taken them",
            problems=[Problem("matches no key", text) for text in idle],
        )
    return renamed


def _segments(text: str) -> list[str]:
    segments = text.split(".")
    for segment in segments:
        if _VARIABLE.search(segment) and not _VARIABLE.fullmatch(segment):
            raise CkptError(
                f"{segment!r}: a variable stands for whole segments between dots",
                hint="for a part of a segment write a regular expression: 're:layer(\\d+)\\.(.*) => layers.\\1.\\2'",
            )
    return segments


def _names(text: str) -> list[str]:
    return [name + star for name, star in _VARIABLE.findall(text)]


def _fill(segment: str, values: dict[str, str]) -> str:
    variable = _VARIABLE.fullmatch(segment[:-1])
    if variable is None:
        return segment
    return values[variable[1]] if variable[2] else values[variable[1]] + "."
