"""Infer few rules from many renames."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from ckpttool.core.errors import CkptError
from ckpttool.core.keys import NUMBER
from ckpttool.core.values import dataclass
from ckpttool.rules.patterns import InTurn, parse, pattern_of, ways

_VARIABLES = ("{n}", "{m}", "{k}", "{j}")  # the layer numbers, the outermost first
_MOST_KINDS = 400  # kinds of renames beyond which only layer numbers are generalised
_TOO_MANY = 4000  # kinds of renames beyond which every key is named by itself
_SAMPLES = 2  # keys of each kind that a rule is tried on; all are checked at the end


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A rule, and what it makes of every sample: its right name, another name, or nothing."""

    text: str
    right: frozenset[str]
    wrong: frozenset[str]


def renames(wanted: Mapping[str, str], kept: Iterable[str]) -> tuple[str, ...]:
    """Rules, of which the first that matches renames a key, that give the keys of `wanted` their new names and leave
    those that are `kept` alone.

    The last rule is found first: the one that explains most, whatever it gets wrong is left to rules before it.
    """
    names = {**{key: key for key in kept}, **wanted}
    samples = _samples(names)
    if len(samples) > _TOO_MANY * _SAMPLES:
        return _each(names)
    todo = {key for key in samples if names[key] != key}
    done = samples.keys() - todo
    candidates = _candidates({key: names[key] for key in todo}, samples)
    rules: list[str] = []
    while todo:
        fitting = [one for one in candidates if one.right & todo and not one.wrong & done]
        if not fitting:  # names that a rule cannot say
            break
        best = max(fitting, key=lambda one: (len(one.right & todo) - len(one.wrong & todo), -len(one.text), one.text))
        rules.insert(0, best.text)
        done |= best.right & todo
        todo -= best.right
    return _checked(_without_idle(rules, samples), names)


def patterns(wanted: Sequence[str], others: Iterable[str]) -> tuple[str, ...]:
    """Patterns that name the keys of `wanted` and none of the others."""
    kinds: dict[str, list[str]] = {}  # a pattern has no number of its own: it names all keys of a kind, or none
    for key in wanted:
        kinds.setdefault(".".join(_numbered(key.split("."))), []).append(key)
    spared = dict.fromkeys(".".join(_numbered(key.split("."))) for key in others)
    if len(kinds) * (len(kinds) + len(spared)) > _MOST_KINDS**2:
        return tuple(wanted)
    texts = dict.fromkeys(text for kind in kinds for text in _shortened(kind.split(".")))
    hits = {text: _named(text, kinds) for text in texts if not _named(text, spared)}
    rest, found = dict(kinds), list[str]()
    while rest:
        count = {text: sum(len(rest.get(kind, ())) for kind in own) for text, own in hits.items()}
        best = max(count, key=lambda text: (count[text], -len(text)), default="")
        if not count.get(best):
            return (*found, *(key for keys in rest.values() for key in keys))
        found.append(best)
        for kind in hits[best]:
            rest.pop(kind, None)
    return tuple(found)


def numbered(names: Sequence[str]) -> tuple[str, ...]:
    """The names with the layer numbers that all of them have in common as variables."""
    split = [name.split(".") for name in names]
    numbers = [[part for part in segments if part.isdecimal()] for segments in split]
    shared = 0
    for alike in zip(*numbers):
        if len(set(alike)) > 1:
            break
        shared += 1
    return tuple([".".join(_numbered(segments, shared)) for segments in split])


def _numbered(segments: Sequence[str], count: int = len(_VARIABLES)) -> list[str]:
    variables = iter(_VARIABLES[:count])
    return [next(variables, part) if part.isdecimal() else part for part in segments]


def _named(text: str, keys: Iterable[str]) -> list[str]:
    pattern = pattern_of(text.split("."))
    return [key for key in keys if any(True for _ in ways(pattern, key.split(".")))]


def _shortened(segments: Sequence[str]) -> Iterator[str]:
    for end in range(len(segments), 0, -1):
        yield ".".join([*segments[:end], *(["{x*}"] if end < len(segments) else [])])
    for start in range(1, len(segments)):
        yield ".".join(["{y*}", *segments[start:]])


def _samples(names: Mapping[str, str]) -> dict[str, str]:
    """A few keys of each kind: those that differ in layer numbers only."""
    first: dict[tuple[str, ...], list[str]] = {}
    last: dict[tuple[str, ...], str] = {}
    for key, name in names.items():
        kind = _kind(key, name)
        last[kind] = key
        own = first.setdefault(kind, [])
        if len(own) < _SAMPLES - 1:
            own.append(key)
    return {key: names[key] for kind, keys in first.items() for key in (*keys, last[kind])}


def _kind(key: str, name: str) -> tuple[str, ...]:
    """Equal for renames of which `numbered` makes one."""
    own, new = NUMBER.split(key), NUMBER.split(name)
    if own[1::2] != new[1::2]:
        return numbered((key, name))
    return (*own[::2], "=>", *new[::2])  # what stands around the numbers


def _candidates(wanted: Mapping[str, str], samples: Mapping[str, str]) -> list[_Candidate]:
    texts: dict[str, None] = {}
    short = len(wanted) <= _MOST_KINDS * _SAMPLES
    for key, name in wanted.items():
        for old, new in dict.fromkeys((numbered((key, name)), (key, name))):
            texts |= dict.fromkeys(_texts(old.split("."), new.split(".")) if short else (f"{old} => {new}",))
    return [made for text in texts if (made := _tried(text, samples)) is not None]


def _texts(old: Sequence[str], new: Sequence[str]) -> Iterator[str]:
    """The rename, and all that is more general: what stands alike at both ends taken for any segments."""
    tail = _common(old[::-1], new[::-1])
    head = min(_common(old, new), len(old) - 1)
    for after in range(tail + 1):
        for before in range(min(head, len(old) - after, len(new) - after) + 1):
            yield " => ".join(
                ".".join(
                    [*(["{y*}"] if before else []), *name[before : len(name) - after], *(["{x*}"] if after else [])]
                )
                for name in (old, new)
            )


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def _tried(text: str, samples: Mapping[str, str]) -> _Candidate | None:
    try:
        apply = parse(text).apply
        made = {key: apply(key) for key in samples}
    except CkptError:  # matches in two ways, or leaves nothing of a key
        return None
    right = frozenset(key for key, name in made.items() if name == samples[key])
    return _Candidate(text, right, frozenset(key for key, name in made.items() if name is not None) - right)


def _without_idle(rules: Sequence[str], samples: Mapping[str, str]) -> list[str]:
    """The rules without those that the others can do without."""
    kept = list(rules)
    for rule in rules:
        rest = [one for one in kept if one != rule]
        if _right(rest, samples):
            kept = rest
    return kept


def _checked(rules: Sequence[str], names: Mapping[str, str]) -> tuple[str, ...]:
    """The rules, or where they fail for a key that was no sample, every rename by itself."""
    if _right(rules, names):
        return tuple(rules)
    return _each(names)


def _each(names: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(f"{key} => {name}" for key, name in names.items() if key != name)


def _right(rules: Sequence[str], names: Mapping[str, str]) -> bool:
    first = InTurn([parse(rule) for rule in rules]).first
    try:
        return all((first(key)[1] or key) == name for key, name in names.items())
    except CkptError:
        return False
