"""One tensor and its parts: the names of each side as the other's, for parts that are listed and for numbered ones."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from ckpttool.edits.rules.patterns import Rule, parse
from ckpttool.edits.rules.segments import VARIABLE
from ckpttool.errors import CkptError
from ckpttool.values import dataclass


class Part(NamedTuple):
    """Which part of which whole a key is; `text` is the pattern that names it."""

    number: int
    whole: str
    text: str


# The names of parts and of their whole are `Listed` or `Numbered`. `patterns` are the parts' names as they were
# written, `number` is how many there are (None where only a tensor tells it), `part` says which one a key is (None for
# none), `key` is that of a part (None where the whole is none that has parts).


@dataclass(frozen=True, slots=True)
class Listed:
    """Every part has its own name."""

    patterns: tuple[str, ...]
    to_part: tuple[Rule, ...]
    to_whole: tuple[Rule, ...]

    @property
    def number(self) -> int:
        """How many are listed."""
        return len(self.patterns)

    def part(self, key: str) -> Part | None:
        """The first of the list that the key is."""
        for number, rule in enumerate(self.to_whole):
            whole = rule.apply(key)
            if whole is not None:
                return Part(number, whole, self.patterns[number])
        return None

    def key(self, whole: str, number: int) -> str | None:
        """The name of that place in the list."""
        return self.to_part[number].apply(whole)


@dataclass(frozen=True, slots=True)
class Numbered:
    """One name for all parts: its variable `counter`, which the whole's name lacks, counts them from 0 on."""

    name: str
    whole: str
    counter: str
    to_whole: Rule
    to_number: Rule
    number: int | None

    @property
    def patterns(self) -> tuple[str, ...]:
        """The one name."""
        return (self.name,)

    def part(self, key: str) -> Part | None:
        """The part of the number that stands in the key; what is no number is no part."""
        number = self.to_number.apply(key) or ""
        return Part(int(number), str(self.to_whole.apply(key)), self.name) if _NUMBER.fullmatch(number) else None

    def key(self, whole: str, number: int) -> str | None:
        """The name with the number in the place of its variable."""
        return _numbered(self.whole, self.name, self.counter, number).apply(whole)


_NUMBER = re.compile(r"0|[1-9]\d{0,8}")  # as str(int) writes it: other spellings would not come back


@lru_cache(maxsize=1 << 16)
def _numbered(whole: str, name: str, counter: str, number: int) -> Rule:
    return parse(f"{whole} => {name.replace(f'{{{counter}}}', str(number))}")


@dataclass(frozen=True, slots=True)
class Parts:
    """A tensor and its parts along `dim`: end to end, of these `sizes` or of equal size, or `stacked`."""

    whole: str
    names: Listed | Numbered
    dim: int
    sizes: tuple[int, ...] | None = None
    stacked: bool = False

    def keys(self, whole: str, number: int) -> list[str]:
        """The names of this many parts of the tensor of that name, which is one that has parts."""
        return [str(self.names.key(whole, place)) for place in range(number)]

    def missing(self, whole: str, found: Collection[int]) -> Iterator[str]:
        """The names of the parts that are not among the numbers `found`, as far as these go or there have to be."""
        number = self.names.number or max(found) + 1
        return (str(self.names.key(whole, place)) for place in range(number) if place not in found)


def listed(whole: str, names: Sequence[str]) -> Listed:
    """The parts of a list, both ways. Raises `CkptError` where a name of one side could not be told from the other."""
    _no_arrows((whole, *names))
    if len(set(names)) < len(names):
        raise CkptError("two parts have the same name", hint="")
    texts = [f"{whole} => {name}" for name in names]
    return Listed(tuple(names), tuple(map(parse, texts)), tuple(parse(text, reverse=True) for text in texts))


def numbered(whole: str, name: str, number: int | None) -> Numbered:
    """The parts that one name with a variable stands for. Raises `CkptError` where no variable could count them."""
    _no_arrows((whole, name))
    own = {found for found in VARIABLE.findall(name) if found not in VARIABLE.findall(whole)}
    if len(own) != 1 or any(star for _, star in own):
        have = " and ".join(sorted(f"{{{found}{star}}}" for found, star in own)) or "none"
        raise CkptError(
            f"{name!r} needs one variable that {whole!r} lacks, as {{e}}, to count the parts: {have}", hint=""
        )
    ((counter, _),) = own
    _numbered(whole, name, counter, 0)
    back = parse(f"{name} => {whole}")
    return Numbered(name, whole, counter, back, parse(f"{name} => {{{counter}}}"), number)


def _no_arrows(texts: Sequence[str]) -> None:
    for text in texts:
        if "=>" in text:
            raise CkptError(f"{text!r} is not a name: => belongs into a rename", hint="")
