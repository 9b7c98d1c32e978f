"""The first line of a diff: the answer in words, with the user's own names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import NamedTuple

from ckpttool.core.text import listed, number, plural
from ckpttool.diffing.causes import Code
from ckpttool.diffing.result import HARMLESS, Diff, Entry, alike
from ckpttool.naming.evidence import Pair

# counted like a status
_LIKELY, _SPLIT, _UNREAD, _QUANTIZED = "likely", "split", "unread", "quantized"
_OPTION = "option"

# Status -> noun and the words after it, in the order of the sentence. `plural` gets the noun.
_COUNTED: dict[str, tuple[str, str]] = {
    _LIKELY: ("likely rename", ""),
    "renamed": ("renamed key", ""),
    "transformed": ("computed value", ""),
    "order": ("parameter", " at another position"),
    "unexpected": ("key", " only in {left}"),
    "missing": ("key", " only in {right}"),
    _SPLIT: ("tensor", " split between ranks"),
    "shape": ("tensor", " of another shape"),
    "dtype": ("tensor", " of another dtype"),
    "value": ("tensor", " with other values"),
    _QUANTIZED: ("quantized weight", ""),
    _UNREAD: ("tensor", " with values that were not compared"),
    _OPTION: ("different hyperparameter", ""),
    "alias": ("second name", ""),
}
_SINCE_NAMES_FILE = {
    **_COUNTED,
    "renamed": ("changed name", ""),
    "order": ("optimizer id", " at another position"),
    "unexpected": ("removed key", ""),
    "missing": ("new key", ""),
}
_OF_OPTIMIZER = {
    **_COUNTED,
    "renamed": ("parameter", " in another group"),
    "unexpected": ("entry", " that it does not take"),
    "missing": ("entry", " missing"),
}


class LikelyRenames(NamedTuple):
    """The inferred pairs of two names, and the keys of each side that they pair."""

    pairs: tuple[Pair, ...]
    left: frozenset[str]
    right: frozenset[str]

    @classmethod
    def of(cls, diff: Diff) -> LikelyRenames:
        """Return the likely renames of a diff."""
        pairs = () if diff.inferred is None else diff.inferred.pairs
        pairs = tuple(pair for pair in pairs if pair.left != pair.right)
        left = chain.from_iterable(pair.left for pair in pairs)
        right = chain.from_iterable(pair.right for pair in pairs)
        return cls(pairs, frozenset(left), frozenset(right))

    def explain(self, entry: Entry) -> bool:
        """Return True if they pair all keys of the entry: with them it is no difference."""
        if entry.status not in ("unexpected", "missing", "shape"):
            return False
        return self.left.issuperset(entry.left) and self.right.issuperset(entry.right)


def answer(diff: Diff, counts: Mapping[str, int]) -> str:
    """Return the answer of a diff as one sentence, with the section that it is about if that is not
    the complete file. `counts` is the result of `counted`.
    """
    if diff.identical:
        sentence = _identical(diff)
    else:
        accepted = True if diff.failing_ignores else diff.accepted
        sentence = _with_accepted(diff, counts, accepted=accepted)
    if diff.section:
        sentence += f" (section {diff.section})"
    if diff.failing_ignores:
        unused = plural(diff.failing_ignores, "unused ignore entry")
        sentence = f"{unused} (--fail-on-unused); {sentence}"
    return sentence


# Nothing that counts differs


def _identical(diff: Diff) -> str:
    left, right = diff.names
    if diff.asks == "names":
        return f"{right} saves its tensors under their runtime names"
    if diff.asks == "drift":
        return f"{right} has the names in {left}"
    if diff.asks == "adapter":
        return f"PEFT loads {left} onto {right}"
    harmless = sum(
        entry.status not in HARMLESS and not entry.has(Code.COUNTER) for entry in diff.entries
    )
    if diff.asks != "pair":
        subject = left if diff.asks == "load" else f"the optimizer state of {left}"
        loads = f"{subject} loads into {right}"
        return f"{loads}; {plural(harmless, 'harmless difference')}" if harmless else loads
    if harmless and diff.compared.get("values"):
        statuses = {entry.status for entry in diff.entries} - HARMLESS
        if statuses == {"dtype"}:
            count = plural(harmless, "tensor")
            return f"{left} and {right} have the same values after a conversion of {count}"
        same = f"{left} and {right} have the same weights"
        return f"{same}; {plural(harmless, 'key')} under another name, or computed by a hook"
    subject = f"the models in {left} and {right}" if diff.has_other_notes else f"{left} and {right}"
    same = f"{subject} have the same {_same_aspects(diff)}"
    return f"{same}; {plural(harmless, 'harmless difference')}" if harmless else same


def _same_aspects(diff: Diff) -> str:
    """Return what was compared of each tensor: ``keys, shapes and dtypes``."""
    aspects = ("keys", "shapes", "dtypes", "values")
    compared = [aspect for aspect in aspects if diff.compared.get(aspect)] or ["keys"]
    if compared[-1] == "values" and diff.scope:
        compared[-1] = f"values ({diff.scope})"
    return listed(compared)


# Something differs


def _with_accepted(diff: Diff, counts: Mapping[str, int], *, accepted: bool | None) -> str:
    """Return the differences, and how many of them are accepted."""
    sentence = _differences(diff, {key: counts[key] for key in counts if key != "same"})
    if accepted is None and all(entry.ignored is None for entry in diff.entries):
        return sentence
    differing = [entry for entry in diff.entries if diff.is_difference(entry)]
    ignored = sum(entry.ignored is not None for entry in differing)
    others = len(differing) - ignored
    if accepted:
        parts = [f"{number(ignored)} ignored"] if ignored else []
        parts += [f"{number(others)} not in --fail-on"] if others else []
        return f"{sentence}; accepted ({', '.join(parts)})"
    return f"{sentence}; {number(ignored)} ignored" if ignored else sentence


def _differences(diff: Diff, counts: dict[str, int]) -> str:
    left, right = diff.names
    if diff.asks == "load":
        return _not_loaded(diff, counts) if counts else f"{left} {diff.other_failure}"
    if diff.asks == "names":
        return _saved_otherwise(diff, counts) if counts else f"{right} {diff.other_failure}"
    phrases = _phrases(diff, counts)
    # the sections and entries next to the models, or why two files differ that have equal entries
    if diff.asks in ("pair", "drift") and diff.other_failure:
        phrases.append(diff.other_failure)
    details = ", ".join(phrases)
    if diff.asks == "drift":
        return f"{right} has changed since {left}: {details}"
    if diff.asks == "adapter":
        fails = f"PEFT does not load {left} completely onto {right}"
        return f"{fails}: {details}" if details else fails
    if diff.asks == "optimizer":
        subject = f"the optimizer state of {left}"
        if not counts:
            return f"{subject} {diff.other_failure}"
        return f"{subject} does not fit {right}: {details}"
    differ = f"{left} and {right} differ"
    return f"{differ}: {details}" if details else differ


def counted(entries: Iterable[Entry], renames: LikelyRenames) -> dict[str, int]:
    """Return how many entries have each status; the two keys of a likely rename count as one, and
    tensors that ranks split, values that were not compared, and hyperparameters are counted apart.
    """
    counts = Counter[str]()
    for group in alike(entries):
        if group[0].has(Code.SPLIT_LEFT, Code.SPLIT_RIGHT, Code.SPLIT_BOTH):
            counts[_SPLIT] += len(group)
        elif _is_quantized(group[0]):
            counts[_QUANTIZED] += len(group)
        elif group[0].has(Code.UNREAD):
            counts[_UNREAD] += len(group)
        elif group[0].has(Code.OPTION):
            counts[_OPTION] += len(group)
        else:
            counts[group[0].status] += len(group) - sum(map(renames.explain, group))
    counts = +counts
    return {_LIKELY: len(renames.pairs), **counts} if renames.pairs else dict(counts)


def _is_quantized(entry: Entry) -> bool:
    """Return True for the numbers of a quantized weight, whose values were not compared."""
    is_pair = bool(entry.left and entry.right) and entry.status in ("dtype", "shape", "value")
    return is_pair and entry.has(Code.QUANTIZED) and not entry.has(Code.UNREAD)


def summary(diff: Diff, counts: Mapping[str, int]) -> str:
    """Return how many entries are equal, and how many differ in which way."""
    same = counts.get("same", 0)
    phrases = _phrases(diff, {key: counts[key] for key in counts if key != "same"})
    return ", ".join([f"{number(same)} same", *phrases] if same else phrases)


def _phrases(diff: Diff, counts: dict[str, int]) -> list[str]:
    left, right = diff.names
    words = {"drift": _SINCE_NAMES_FILE, "optimizer": _OF_OPTIMIZER}.get(diff.asks, _COUNTED)
    phrases = []
    for status in dict.fromkeys((*words, *counts)):
        if counts.get(status):
            noun, rest = words.get(status, (status, ""))
            phrases.append(plural(counts[status], noun) + rest.format(left=left, right=right))
    return phrases


# Status -> noun, and the words after one of them and after several
_UNLOADED = {
    "renamed": ("key", "under another name", "under other names"),
    "transformed": ("value", "in another form", "in another form"),
    "unexpected": ("key", "that {it} does not know", "that {it} does not know"),
    _SPLIT: ("tensor", "split between ranks", "split between ranks"),
    "shape": ("tensor", "of another shape", "of another shape"),
    "dtype": ("tensor", "of another dtype", "of another dtype"),
    "value": ("tensor", "whose value loading loses", "whose values loading loses"),
    _QUANTIZED: ("quantized weight", "", ""),
    _UNREAD: ("tensor", "whose values were not compared", "whose values were not compared"),
}


def _not_loaded(diff: Diff, counts: dict[str, int]) -> str:
    """Return ``LEFT lacks 4 keys of RIGHT and has 2 that it does not know``."""
    left, right = diff.names
    clauses = []
    missing = counts.get("missing", 0)
    if missing:
        clauses.append(f"lacks {plural(missing, 'key')} of {right}")
    objects: list[str] = []
    for status, (noun, single, several) in _UNLOADED.items():
        count = counts.get(status, 0)
        if not count:
            continue
        is_first = not clauses and not objects
        words = (single if count == 1 else several).format(it=right if is_first else "it")
        is_named = is_first and status != "unexpected"
        of = f" of {right}" if is_named and noun == "key" else ""
        than = f" than {right}" if is_named and status in ("shape", "dtype") else ""
        total = _all_of(diff, status, count)
        # the noun of the clause before it
        follows = bool(clauses) and not objects and status == "unexpected"
        counted_nouns = number(count) if follows else plural(count, noun)
        objects.append(f"{total}{counted_nouns}{of} {words}{than}".rstrip())
    if objects:
        clauses.append(f"has {listed(objects)}")
    if not clauses:
        return f"{left} {diff.other_failure or f'does not load into {right}'}"
    return f"{left} {' and '.join(clauses)}"


def _all_of(diff: Diff, status: str, count: int) -> str:
    """Return ``all`` if every key of the model has another name."""
    expected = sum(bool(entry.right) for entry in diff.entries)
    return "all " if status == "renamed" and count == expected > 1 else ""


def _saved_otherwise(diff: Diff, counts: dict[str, int]) -> str:
    """Return ``MODEL saves 19 of its 92 keys under other names than at runtime``."""
    keys = sum(bool(entry.left) for entry in diff.entries)
    clauses = []
    renamed, computed = counts.get("renamed", 0), counts.get("transformed", 0)
    if renamed:
        names = "another name" if renamed == 1 else "other names"
        clauses.append(
            f"saves {number(renamed)} of its {plural(keys, 'key')} under {names} than at runtime"
        )
    if computed:
        clauses.append(f"computes {plural(computed, 'value')} when it saves")
    added, inside = counts.get("unexpected", 0), counts.get("missing", 0)
    if added:
        clauses.append(f"adds {plural(added, 'key')} that no tensor has")
    if inside:
        clauses.append(f"saves {plural(inside, 'tensor')} inside other entries")
    if diff.other_failure:
        clauses.append(diff.other_failure)
    return f"{diff.names[1]} {listed(clauses or ['does not save its tensors as they are'])}"
