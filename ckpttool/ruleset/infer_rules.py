"""Infer few rules from many renames."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from ckpttool.core.errors import CkptError
from ckpttool.core.text import split_at_numbers
from ckpttool.ruleset.patterns import matches, parse, pattern_of, rule_list

_VARIABLES = ("{n}", "{m}", "{k}", "{j}")  # the layer numbers, the outermost first
_MOST_KINDS = 400  # kinds of renames beyond which only layer numbers are generalized
_TOO_MANY = 4000  # kinds of renames beyond which every key gets a rule
_MOST_DROPS = 24  # --drop options on one command line
_SAMPLES = 2  # keys of each kind that a rule is tried on; all are checked at the end


class _Candidate(NamedTuple):
    """A rule, and the samples that it gives their right name, or another name."""

    text: str
    right: set[str]
    wrong: set[str]


def renames(new_names: Mapping[str, str], kept: Iterable[str]) -> dict[str, list[str]]:
    """Return rules that give the keys of `new_names` these names, and leave the `kept` keys alone;
    each with the keys that it matches.

    The first rule that matches renames a key. The last rule is inferred first: it explains most,
    and its errors are left to the rules before it.
    """
    names = {key: key for key in kept}
    names.update(new_names)
    samples = _samples(names)
    rules = _few(names, samples) if len(samples) <= _TOO_MANY * _SAMPLES else []
    keys_of_rules = _keys_of_rules(rules, names) if rules else None
    if keys_of_rules is None:
        keys_of_rules = {}
        for key, name in new_names.items():
            if key != name:
                keys_of_rules[f"{key} => {name}"] = [key]
    return keys_of_rules


def _few(names: Mapping[str, str], samples: Mapping[str, str]) -> list[str]:
    """Return rules that give the samples their names; too few if rules cannot express these."""
    unnamed = {key for key in samples if names[key] != key}
    named = samples.keys() - unnamed
    candidates = _candidates({key: names[key] for key in unnamed}, samples)
    rules: list[str] = []

    def rank(rule: _Candidate) -> tuple[int, int, str]:
        gain = len(rule.right & unnamed) - len(rule.wrong & unnamed)
        return gain, -len(rule.text), rule.text

    def fits(rule: _Candidate) -> bool:
        return bool(rule.right & unnamed) and not rule.wrong & named

    while unnamed:
        fitting = list(filter(fits, candidates))
        if not fitting:  # a rule cannot express these names
            break
        best = max(fitting, key=rank)
        rules.insert(0, best.text)
        named |= best.right & unnamed
        unnamed -= best.right
    for text in list(rules):
        others = [other for other in rules if other != text]
        if _keys_of_rules(others, samples) is not None:
            rules = others
    return rules


def patterns(keys: Sequence[str], others: Iterable[str]) -> tuple[str, ...]:
    """Return patterns that match all of the keys and none of the others."""
    # a pattern has no number: it matches all keys of a kind, or none
    kinds: dict[str, list[str]] = {}
    for key in keys:
        kinds.setdefault(_kind(key), []).append(key)
    spared = dict.fromkeys(map(_kind, others))
    if len(kinds) * (len(kinds) + len(spared)) > _MOST_KINDS**2:
        return tuple(keys)
    hits: dict[str, list[str]] = {}
    for text in dict.fromkeys(chain.from_iterable(map(_more_general, kinds))):
        if not _matching(text, spared):
            hits[text] = _matching(text, kinds)
    chosen: list[str] = []
    while kinds:
        counts: dict[str, int] = {}
        for text, matched in hits.items():
            counts[text] = sum(len(kinds.get(kind, ())) for kind in matched)
        best = max(counts, key=lambda text: (counts[text], "*" not in text, -len(text)), default="")
        if not counts.get(best):
            return (*chosen, *chain.from_iterable(kinds.values()))
        chosen.append(best)
        for kind in hits[best]:
            kinds.pop(kind, None)
    return tuple(chosen)


def _kind(key: str) -> str:
    """Return the key with variables for its layer numbers."""
    return ".".join(_with_variables(key.split(".")))


def _more_general(kind: str) -> Iterator[str]:
    """Yield patterns that match keys of the kind, itself first: without segments at the end, and
    without segments at the start.
    """
    yield kind
    segments = kind.split(".")
    for end in range(len(segments) - 1, 0, -1):
        yield ".".join([*segments[:end], "{x*}"])
    for start in range(1, len(segments)):
        yield ".".join(["{y*}", *segments[start:]])


def drops(dropped: Sequence[str], kept: Collection[str]) -> tuple[str, ...] | None:
    """Return patterns that match all keys of `dropped` and none of `kept`; None if there are none,
    or too many.
    """
    plain: list[str] = []
    special: list[str] = []  # keys that would be read as patterns
    for key in dropped:
        keys = special if re.search(r"^re:|[\[\]*?{}]", key) else plain
        keys.append(key)
    literal = [f"re:{re.escape(key)}" for key in special]
    texts = (*patterns(plain, [*kept, *special]), *literal)
    if len(texts) > _MOST_DROPS:
        return None
    for text in texts:
        if any(matches(text, key) for key in kept):
            return None
    return texts


def numbered(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names with variables for the layer numbers that all of them share."""
    split = [name.split(".") for name in names]
    numbers = [list(filter(str.isdecimal, segments)) for segments in split]
    shared = 0
    for same_place in zip(*numbers):
        if len(set(same_place)) > 1:
            break
        shared += 1
    return tuple([".".join(_with_variables(segments, shared)) for segments in split])


def _with_variables(segments: Sequence[str], count: int = len(_VARIABLES)) -> list[str]:
    variables = iter(_VARIABLES[:count])
    result = []
    for segment in segments:
        result.append(next(variables, segment) if segment.isdecimal() else segment)
    return result


def _matching(text: str, keys: Iterable[str]) -> list[str]:
    pattern = pattern_of(text.split("."))
    return [key for key in keys if next(iter(pattern.ways(key.split("."))), None) is not None]


def _samples(names: Mapping[str, str]) -> dict[str, str]:
    """Return a few keys of each kind: keys that differ in layer numbers only."""
    first: dict[tuple[str, ...], list[str]] = {}
    last: dict[tuple[str, ...], str] = {}
    for key, name in names.items():
        old, new = split_at_numbers(key), split_at_numbers(name)
        if old[1::2] == new[1::2]:  # as `numbered` tells kinds apart, but faster
            kind = (*old[::2], "=>", *new[::2])
        else:
            kind = numbered((key, name))
        last[kind] = key
        keys = first.setdefault(kind, [])
        if len(keys) < _SAMPLES - 1:
            keys.append(key)
    samples = {}
    for kind, keys in first.items():
        for key in (*keys, last[kind]):
            samples[key] = names[key]
    return samples


def _candidates(new_names: Mapping[str, str], samples: Mapping[str, str]) -> list[_Candidate]:
    """Return the rules that could explain these renames, each tried on every sample."""
    texts: dict[str, None] = {}
    is_small = len(new_names) <= _MOST_KINDS * _SAMPLES
    for key, name in new_names.items():
        for old, new in dict.fromkeys((numbered((key, name)), (key, name))):
            if is_small:
                texts.update(dict.fromkeys(_generalized(old.split("."), new.split("."))))
            else:
                texts[f"{old} => {new}"] = None
    candidates = []
    for text in texts:
        right, wrong = set[str](), set[str]()
        try:
            apply = parse(text).apply
            for key, name in samples.items():
                new_name = apply(key)
                if new_name is not None:
                    names = right if new_name == name else wrong
                    names.add(key)
        except CkptError:  # it matches in two ways, or leaves nothing of a key
            continue
        candidates.append(_Candidate(text, right, wrong))
    return candidates


def _generalized(old: Sequence[str], new: Sequence[str]) -> Iterator[str]:
    """Yield the rename, and more general ones: a variable for segments that both names share at an
    end.

    net.a.w => net.b.w,  {y*}.a.w => {y*}.b.w,  net.a.{x*} => net.b.{x*},  {y*}.a.{x*} => ...
    """
    head = min(_count_shared(old, new), len(old) - 1)
    for after in range(_count_shared(old[::-1], new[::-1]) + 1):
        most = min(head, len(old) - after, len(new) - after)
        for before in range(most + 1):
            yield f"{_with_ends(old, before, after)} => {_with_ends(new, before, after)}"


def _with_ends(segments: Sequence[str], before: int, after: int) -> str:
    """Return the key with variables for its first and its last segments: so many `before` and
    `after`.
    """
    start = ["{y*}"] if before else []
    end = ["{x*}"] if after else []
    return ".".join([*start, *segments[before : len(segments) - after], *end])


def _count_shared(left: Sequence[str], right: Sequence[str]) -> int:
    """Return how many segments the two have in common at their start."""
    count = 0
    for a, b in zip(left, right):
        if a != b:
            break
        count += 1
    return count


def _keys_of_rules(rules: Sequence[str], names: Mapping[str, str]) -> dict[str, list[str]] | None:
    """Return the keys that each rule matches; None if a key gets another name than it should."""
    keys_of_rules: dict[str, list[str]] = {rule: [] for rule in rules}
    compiled = rule_list(tuple(map(parse, rules)))
    try:
        for key, name in names.items():
            renamed = compiled.rename(key)
            if renamed is None and key == name:
                continue
            if renamed is None or renamed.name != name:
                return None
            keys_of_rules[renamed.rule.text].append(key)
    except CkptError:
        return None
    return keys_of_rules
