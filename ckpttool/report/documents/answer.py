"""The first line of a diff: the answer in words, with the user's own names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ckpttool.core.text import listed, notes_with, number, plural
from ckpttool.diffing.causes import NOT_WEIGHTS, Code
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


# after the first line about a file with dangerous imports
RUNS_CODE = "; weights_only=False would run code in it"


class LikelyRenames(NamedTuple):
    """The inferred pairs of two names, and the keys of each side that they pair."""

    pairs: tuple[Pair, ...]
    left: frozenset[str]
    right: frozenset[str]

    @classmethod
    def of(cls, diff: Diff) -> LikelyRenames:
        """Return the likely renames of a diff."""
        pairs: list[Pair] = []
        left: set[str] = set()
        right: set[str] = set()
        for pair in diff.inferred.pairs if diff.inferred is not None else ():
            if pair.left != pair.right:
                pairs.append(pair)
                left.update(pair.left)
                right.update(pair.right)
        return cls(tuple(pairs), frozenset(left), frozenset(right))

    def explain(self, entry: Entry) -> bool:
        """Return True if they pair all keys of the entry, so that it is not a difference."""
        if entry.status not in ("unexpected", "missing", "shape", "alias"):
            return False
        return self.left.issuperset(entry.left) and self.right.issuperset(entry.right)


def answer(diff: Diff, counts: Mapping[str, int]) -> str:
    """Return the answer of a diff as one sentence, with the section that it is about if that is not
    the complete file. `counts` is the result of `counted`.
    """
    sentence = _identical(diff) if diff.identical else _with_accepted(diff, counts)
    if diff.section:
        sentence += f" (section {diff.section})"
    if diff.failing_ignores:
        unused = plural(diff.failing_ignores, "unused ignore entry")
        sentence = f"{unused} (--fail-on-unused); {sentence}"
    if diff.asks != "pair" and notes_with(diff.notes, "dangerous-import"):
        sentence += RUNS_CODE
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
    statuses = Counter[str]()
    for entry in diff.entries:
        if entry.status not in HARMLESS and not entry.has(*NOT_WEIGHTS):
            statuses[entry.status] += 1
    harmless = statuses.total()
    if diff.asks == "load":
        same = f"{left} loads into {right}"
    elif diff.asks == "optimizer":
        same = f"the optimizer state of {left} loads into {right}"
        if notes_with(diff.notes, "optimizer-order"):
            same += " by name, and not by position"
    elif harmless and diff.compared.get("values"):
        if set(statuses) == {"dtype"}:
            count = plural(harmless, "tensor")
            return f"{left} and {right} have the same values after a conversion of {count}"
        keys = plural(harmless, "key")
        return (
            f"{left} and {right} have the same weights; {keys} under another name, or computed by a"
            " hook"
        )
    else:
        models = "the models in " if diff.has_other_notes else ""
        same = f"{models}{left} and {right} have the same {_same_aspects(diff)}"
    return f"{same}; {plural(harmless, 'harmless difference')}" if harmless else same


def _same_aspects(diff: Diff) -> str:
    """Return what was compared of each tensor: ``keys, shapes and dtypes``."""
    aspects = ("keys", "shapes", "dtypes", "values")
    compared = [aspect for aspect in aspects if diff.compared.get(aspect)] or ["keys"]
    if compared[-1] == "values" and diff.scope:
        compared[-1] = f"values ({diff.scope})"
    return listed(compared)


# Something differs


def _with_accepted(diff: Diff, counts: Mapping[str, int]) -> str:
    """Return the differences, and how many of them are accepted."""
    sentence = _differences(diff, _without_same(counts))
    differing = list(filter(diff.is_difference, diff.entries))
    ignored = sum(entry.ignored is not None for entry in differing)
    if not diff.accepted and not diff.failing_ignores:
        return f"{sentence}; {number(ignored)} ignored" if ignored else sentence
    others = len(differing) - ignored
    reasons = []
    if ignored:
        reasons.append(f"{number(ignored)} ignored")
    if others:
        reasons.append(f"{number(others)} not in --fail-on")
    return f"{sentence}; accepted ({', '.join(reasons)})"


def _without_same(counts: Mapping[str, int]) -> dict[str, int]:
    return {status: count for status, count in counts.items() if status != "same"}


def _differences(diff: Diff, counts: dict[str, int]) -> str:
    left, right = diff.names
    if diff.asks == "load":
        return _not_loaded(diff, counts) if counts else f"{left} {diff.other_failure}"
    if diff.asks == "names":
        return _saved_otherwise(diff, counts) if counts else f"{right} {diff.other_failure}"
    phrases = _phrases(diff, counts)
    if diff.asks == "optimizer":
        if not counts:
            return f"the optimizer state of {left} {diff.other_failure}"
        return f"the optimizer state of {left} does not fit {right}: {', '.join(phrases)}"
    # the sections and entries next to the models, or why two files differ that have equal entries
    if diff.asks != "adapter" and diff.other_failure:
        phrases.append(diff.other_failure)
    if diff.asks == "drift":
        return f"{right} has changed since {left}: {', '.join(phrases)}"
    sentence = f"{left} and {right} differ"
    if diff.asks == "adapter":
        sentence = f"PEFT does not load {left} completely onto {right}"
    return f"{sentence}: {', '.join(phrases)}" if phrases else sentence


def counted(entries: Iterable[Entry], renames: LikelyRenames) -> dict[str, int]:
    """Return how many entries have each status; the two keys of a likely rename count as one, and
    tensors that ranks split, values that were not compared, and hyperparameters are counted apart.
    """
    counts = Counter({_LIKELY: len(renames.pairs)})
    for group in alike(entries):
        kind = _kind(group[0])
        counts[kind] += len(group)
        if kind == group[0].status:
            counts[kind] -= sum(map(renames.explain, group))
    return {kind: count for kind, count in counts.items() if count > 0}


def _kind(entry: Entry) -> str:
    """Return how the entry is counted: its status, or what else it is."""
    if entry.has(Code.SPLIT_LEFT, Code.SPLIT_RIGHT, Code.SPLIT_BOTH):
        return _SPLIT
    if entry.has(Code.UNREAD):
        return _UNREAD
    # the numbers of a quantized weight, whose values were not compared
    if entry.has(Code.QUANTIZED) and entry.status in ("dtype", "shape", "value"):
        return _QUANTIZED
    return _OPTION if entry.has(Code.OPTION) else entry.status


def summary(diff: Diff, counts: Mapping[str, int]) -> str:
    """Return how many entries are equal, and how many differ in which way."""
    phrases = _phrases(diff, _without_same(counts))
    same = counts.get("same", 0)
    if same:
        phrases.insert(0, f"{number(same)} same")
    return ", ".join(phrases)


def _phrases(diff: Diff, counts: dict[str, int]) -> list[str]:
    left, right = diff.names
    words = {"drift": _SINCE_NAMES_FILE, "optimizer": _OF_OPTIMIZER}.get(diff.asks, _COUNTED)
    phrases = []
    for status in dict.fromkeys((*words, *counts)):
        if status in counts:
            noun, rest = words.get(status, (status, ""))
            phrases.append(plural(counts[status], noun) + rest.format(left=left, right=right))
    return phrases


# Status -> noun, and the words after one of them and after several
_UNLOADED = {
    _LIKELY: ("key", "likely under another name", "likely under other names"),
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
    for status in _UNLOADED:
        if status in counts:
            is_first = not missing and not objects
            follows_keys = bool(missing) and not objects
            objects.append(_unloaded(diff, status, counts[status], is_first, follows_keys))
    if objects:
        clauses.append(f"has {listed(objects)}")
    if not clauses:
        return f"{left} {diff.other_failure or f'does not load into {right}'}"
    return f"{left} {' and '.join(clauses)}"


def _unloaded(diff: Diff, status: str, count: int, is_first: bool, follows_keys: bool) -> str:
    """Return ``4 keys of RIGHT under other names``. The first phrase of a sentence names the model;
    one that follows the missing keys need not say that it is about keys.
    """
    right = diff.names[1]
    noun, single, several = _UNLOADED[status]
    words = single if count == 1 else several
    if status == "unexpected":
        nouns = number(count) if follows_keys else plural(count, noun)
        return f"{nouns} {words.format(it=right if is_first else 'it')}"
    phrase = plural(count, noun)
    # every key of the model has another name
    if status == "renamed" and count == sum(bool(entry.right) for entry in diff.entries) > 1:
        phrase = f"all {phrase}"
    if is_first and noun == "key":
        phrase += f" of {right}"
    if words:
        phrase += f" {words}"
    if is_first and status in ("shape", "dtype"):
        phrase += f" than {right}"
    return phrase


def _saved_otherwise(diff: Diff, counts: dict[str, int]) -> str:
    """Return ``MODEL saves 19 of its 92 keys under other names than at runtime``."""
    keys = sum(bool(entry.left) for entry in diff.entries)
    clauses = []
    renamed = counts.get("renamed", 0)
    if renamed:
        names = "another name" if renamed == 1 else "other names"
        of_keys = f"{number(renamed)} of its {plural(keys, 'key')}"
        clauses.append(f"saves {of_keys} under {names} than at runtime")
    computed = counts.get("transformed", 0)
    if computed:
        clauses.append(f"computes {plural(computed, 'value')} when it saves")
    added = counts.get("unexpected", 0)
    if added:
        clauses.append(f"adds {plural(added, 'key')} that no tensor has")
    inside = counts.get("missing", 0)
    if inside:
        clauses.append(f"saves {plural(inside, 'tensor')} inside other entries")
    if diff.other_failure:
        clauses.append(diff.other_failure)
    return f"{diff.names[1]} {listed(clauses or ['does not save its tensors as they are'])}"
