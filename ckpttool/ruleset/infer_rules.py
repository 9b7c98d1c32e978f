"""Infer few rules from many renames."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

from ckpttool.core.errors import CkptError
from ckpttool.core.text import NUMBER
from ckpttool.ruleset.patterns import InTurn, matches, parse, pattern_of

_VARIABLES = ("{n}", "{m}", "{k}", "{j}")  # the layer numbers, the outermost first
_MOST_KINDS = 400  # kinds of renames beyond which only layer numbers are generalised
_TOO_MANY = 4000  # kinds of renames beyond which every key gets a rule
_MOST_DROPS = 24  # --drop options on one command line
_SAMPLES = 2  # keys of each kind that a rule is tried on; all are checked at the end


class _Candidate(NamedTuple):
    """A rule, and the samples that it gives their right name, or another name."""

    text: str
    right: frozenset[str]
    wrong: frozenset[str]


def renames(wanted: Mapping[str, str], kept: Iterable[str]) -> tuple[str, ...]:
    """Return rules that give the keys of `wanted` their new names, and leave the `kept` keys alone.

    The first rule that matches renames a key. The last rule is inferred first: it explains most,
    and its errors are left to the rules before it.
    """
    names = {**{key: key for key in kept}, **wanted}
    samples = _samples(names)
    rules = _few(names, samples) if len(samples) <= _TOO_MANY * _SAMPLES else []
    if rules and _are_right(rules, names):
        return tuple(rules)
    return tuple(f"{key} => {name}" for key, name in names.items() if key != name)


def _few(names: Mapping[str, str], samples: Mapping[str, str]) -> list[str]:
    """Return rules that give the samples their names; too few if rules cannot express these."""
    todo = {key for key in samples if names[key] != key}
    done = samples.keys() - todo
    candidates = _candidates({key: names[key] for key in todo}, samples)
    rules: list[str] = []
    while todo:
        fitting = [one for one in candidates if one.right & todo and not one.wrong & done]
        if not fitting:  # a rule cannot express these names
            break
        best = max(
            fitting,
            key=lambda one: (
                len(one.right & todo) - len(one.wrong & todo),
                -len(one.text),
                one.text,
            ),
        )
        rules.insert(0, best.text)
        done |= best.right & todo
        todo -= best.right
    for rule in list(rules):
        others = [one for one in rules if one != rule]
        if _are_right(others, samples):
            rules = others
    return rules


def patterns(wanted: Sequence[str], others: Iterable[str]) -> tuple[str, ...]:
    """Return patterns that match the keys of `wanted` and none of the others."""
    # a pattern has no number: it matches all keys of a kind, or none
    kinds: dict[str, list[str]] = {}
    for key in wanted:
        kinds.setdefault(".".join(_with_variables(key.split("."))), []).append(key)
    spared = dict.fromkeys(".".join(_with_variables(key.split("."))) for key in others)
    if len(kinds) * (len(kinds) + len(spared)) > _MOST_KINDS**2:
        return tuple(wanted)
    texts: dict[str, None] = {}
    for kind in kinds:
        segments = kind.split(".")
        texts[kind] = None
        texts |= dict.fromkeys(
            ".".join([*segments[:end], "{x*}"]) for end in range(len(segments) - 1, 0, -1)
        )
        texts |= dict.fromkeys(
            ".".join(["{y*}", *segments[start:]]) for start in range(1, len(segments))
        )
    hits = {text: _matching(text, kinds) for text in texts if not _matching(text, spared)}
    rest, found = dict(kinds), list[str]()
    while rest:
        counts = {
            text: sum(len(rest.get(kind, ())) for kind in matched) for text, matched in hits.items()
        }
        best = max(counts, key=lambda text: (counts[text], "*" not in text, -len(text)), default="")
        if not counts.get(best):
            return (*found, *(key for keys in rest.values() for key in keys))
        found.append(best)
        for kind in hits[best]:
            rest.pop(kind, None)
    return tuple(found)


def drops(dropped: Sequence[str], kept: Collection[str]) -> tuple[str, ...] | None:
    """Return patterns that match all keys of `dropped` and none of `kept`; None if there are none,
    or too many.
    """
    # would be read as a pattern
    special = [key for key in dropped if re.search(r"^re:|[\[\]*?{}]", key)]
    plain = [key for key in dropped if key not in special]
    texts = (*patterns(plain, [*kept, *special]), *(f"re:{re.escape(key)}" for key in special))
    if len(texts) > _MOST_DROPS or any(matches(text, key) for text in texts for key in kept):
        return None
    return texts


def numbered(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names with variables for the layer numbers that all of them share."""
    split = [name.split(".") for name in names]
    numbers = zip(*([part for part in segments if part.isdecimal()] for segments in split))
    shared = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, numbers))
    return tuple([".".join(_with_variables(segments, shared)) for segments in split])


def _with_variables(segments: Sequence[str], count: int = len(_VARIABLES)) -> list[str]:
    variables = iter(_VARIABLES[:count])
    return [next(variables, part) if part.isdecimal() else part for part in segments]


def _matching(text: str, keys: Iterable[str]) -> list[str]:
    pattern = pattern_of(text.split("."))
    return [key for key in keys if any(True for _ in pattern.ways(key.split(".")))]


def _samples(names: Mapping[str, str]) -> dict[str, str]:
    """Return a few keys of each kind: keys that differ in layer numbers only."""
    first: dict[tuple[str, ...], list[str]] = {}
    last: dict[tuple[str, ...], str] = {}
    for key, name in names.items():
        old, new = NUMBER.split(key), NUMBER.split(name)
        # `numbered` makes one rename of a kind; with the same numbers this is faster
        kind = numbered((key, name)) if old[1::2] != new[1::2] else (*old[::2], "=>", *new[::2])
        last[kind] = key
        keys = first.setdefault(kind, [])
        if len(keys) < _SAMPLES - 1:
            keys.append(key)
    return {key: names[key] for kind, keys in first.items() for key in (*keys, last[kind])}


def _candidates(wanted: Mapping[str, str], samples: Mapping[str, str]) -> list[_Candidate]:
    """Return the rules that could explain the renames of `wanted`, each tried on every sample."""
    texts: dict[str, None] = {}
    is_small = len(wanted) <= _MOST_KINDS * _SAMPLES
    for key, name in wanted.items():
        for old, new in dict.fromkeys((numbered((key, name)), (key, name))):
            texts |= dict.fromkeys(
                _generalised(old.split("."), new.split(".")) if is_small else (f"{old} => {new}",)
            )
    candidates = []
    for text in texts:
        try:
            apply = parse(text).apply
            results = {key: apply(key) for key in samples}
        except CkptError:  # it matches in two ways, or leaves nothing of a key
            continue
        right = frozenset(key for key, name in results.items() if name == samples[key])
        wrong = frozenset(key for key, name in results.items() if name is not None) - right
        candidates.append(_Candidate(text, right, wrong))
    return candidates


def _generalised(old: Sequence[str], new: Sequence[str]) -> Iterator[str]:
    """Yield the rename, and more general ones: a variable for segments that both names share at an
    end.
    """

    def shared(one: Sequence[str], other: Sequence[str]) -> int:
        return next(
            (at for at, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other))
        )

    head = min(shared(old, new), len(old) - 1)
    for after in range(shared(old[::-1], new[::-1]) + 1):
        for before in range(min(head, len(old) - after, len(new) - after) + 1):
            start, end = ["{y*}"] if before else [], ["{x*}"] if after else []
            yield " => ".join(
                ".".join([*start, *name[before : len(name) - after], *end]) for name in (old, new)
            )


def _are_right(rules: Sequence[str], names: Mapping[str, str]) -> bool:
    first = InTurn([parse(rule) for rule in rules]).first
    try:
        return all((first(key)[1] or key) == name for key, name in names.items())
    except CkptError:
        return False
