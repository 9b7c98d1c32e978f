"""What differs between two namings or two checkpoints, and why: a value that the reports show.

Every key of each side stands in exactly one entry. Nothing is decided by the likeness of names: what no hook, wrapper
or alias explains is missing or unexpected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ckpttool.checkpoint import Section, TensorEntry
from ckpttool.formats.remarks import PLACEHOLDER, is_placeholder
from ckpttool.names import Hook, hook_json
from ckpttool.naming.alignment import pairs
from ckpttool.naming.call_variants import aliases
from ckpttool.naming.wrappers.table import TABLE

SCHEMA = "ckpttool.diff/1"
HARMLESS = frozenset({"same", "alias", "not_serialized", "extra_state"})
STATUSES = (
    *("same", "renamed", "transformed", "alias", "shape", "dtype", "value"),
    *("missing", "unexpected", "not_serialized", "extra_state"),
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One finding. `reason` is one sentence for all entries with the same cause; `detail` is this entry's own."""

    status: str
    left: tuple[str, ...]
    right: tuple[str, ...]
    reason: str = ""
    hook: Hook | None = None
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class Diff:
    """The answer of `diff`. `fix` are commands that can be pasted; `notes` are sentences about no single key."""

    left: str
    right: str
    identical: bool
    entries: tuple[Entry, ...]
    fix: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def summary(self) -> dict[str, int]:
        """Status -> number of entries, in the order of `STATUSES`, without zeros."""
        count = Counter(entry.status for entry in self.entries)
        return {status: count[status] for status in STATUSES if count[status]}

    def to_json(self) -> dict[str, Any]:
        """The `diff` object of the contract."""
        return {
            "schema": SCHEMA,
            "left": self.left,
            "right": self.right,
            "identical": self.identical,
            "summary": self.summary,
            "entries": [_entry_json(entry) for entry in self.entries],
            "fix": list(self.fix),
            "notes": list(self.notes),
        }


def _entry_json(entry: Entry) -> dict[str, Any]:
    found: dict[str, Any] = {
        "status": entry.status,
        "left": list(entry.left),
        "right": list(entry.right),
        "reason": entry.reason,
    }
    if entry.hook is not None:
        found["hook"] = hook_json(entry.hook)
    if entry.detail is not None:
        found["detail"] = entry.detail
    return found


def segment_change(old: str, new: str) -> str:
    """How a name became another, in words: ``hides the segment `layer` ``."""
    a, b = old.split("."), new.split(".")
    start = 0
    while start < min(len(a), len(b)) and a[start] == b[start]:
        start += 1
    end = 0
    while end < min(len(a), len(b)) - start and a[-1 - end] == b[-1 - end]:
        end += 1
    gone, come = ".".join(a[start : len(a) - end]), ".".join(b[start : len(b) - end])
    if gone and come:
        return f"turns `{gone}` into `{come}`"
    return f"hides the segment `{gone}`" if gone else f"adds the segment `{come}`"


Values = Callable[[TensorEntry, TensorEntry], "str | None"]


def compare(left: Section, right: Section, values: Values | None = None) -> tuple[Entry, ...]:
    """Two state dicts, key by key; `values` compares two tensors of one dtype and shape and says how they differ.

    Names that differ by wrappers' segments only are one tensor, where this can be read in one way.
    """
    have, want = left.by_key(), right.by_key()
    entries = [compare_pair(have[key], want[key], values) for key in have if key in want]
    mine, theirs = [key for key in have if key not in want], [key for key in want if key not in have]
    found = pairs(have, want)
    for key in mine:
        if key in found:
            entries.append(renamed(have[key], want[found[key]], segment_reason(key, found[key]), values))
    taken = set(found.values())
    entries += leftover("unexpected", left, [key for key in mine if key not in found], set(found))
    entries += leftover("missing", right, [key for key in theirs if key not in taken], taken)
    return tuple(entries)


def compare_pair(left: Any, right: Any, values: Values | None = None) -> Entry:
    """One tensor under one key on both sides."""
    names = (left.key,), (right.key,)
    if not isinstance(left, TensorEntry) or not isinstance(right, TensorEntry):
        if type(left) is type(right):
            return Entry("extra_state", *names, "no tensor: carried, not compared")
        return Entry("shape", *names, "a tensor on one side only")
    if left.shape != right.shape:
        reason = PLACEHOLDER if is_placeholder(left) else "another shape"
        return Entry("shape", *names, reason, None, f"{list(left.shape)} instead of {list(right.shape)}")
    if left.dtype != right.dtype:
        return Entry("dtype", *names, f"{left.dtype} instead of {right.dtype}")
    differs = None if values is None else values(left, right)
    return Entry("same", *names) if differs is None else Entry("value", *names, "other values", None, differs)


def renamed(left: Any, right: Any, reason: str, values: Values | None = None, hook: Hook | None = None) -> Entry:
    """One tensor under two names; a difference in shape, dtype or values weighs more than that in names."""
    found = compare_pair(left, right, values)
    if found.status in ("same", "extra_state"):
        return Entry("renamed", found.left, found.right, reason, hook)
    return Entry(found.status, found.left, found.right, f"{found.reason}, and renamed: {reason}", hook, found.detail)


def segment_reason(left: str, right: str) -> str:
    """Why two names of one tensor differ, where wrappers' segments are all that differs."""
    a, b = left.split("."), right.split(".")
    return _segments_reason(_more(a, b), _more(b, a))


def _more(segments: Iterable[str], others: Sequence[str]) -> tuple[str, ...]:
    """The segments that are not among the others, or not as often."""
    rest, more = list(others), []
    for segment in segments:
        if segment in rest:
            rest.remove(segment)
        else:
            more.append(segment)
    return tuple(more)


@cache
def _segments_reason(left: tuple[str, ...], right: tuple[str, ...]) -> str:
    return "; ".join(f"{side} {_wrapped_in(more)}" for side, more in (("left", left), ("right", right)) if more)


def _wrapped_in(segments: Sequence[str]) -> str:
    """The wrappers that put the segments there: ``is wrapped in torch.compile (`_orig_mod`)``."""
    found: dict[str, list[str]] = {}
    for segment in segments:
        found.setdefault(_title(segment, segments), []).append(segment)
    prefix = found.pop("", [])
    titles = [f"{title} (`{'.'.join(dict.fromkeys(own))}`)" for title, own in found.items()]
    wrapped = ["is wrapped in " + " and ".join(titles)] if titles else []
    return " and ".join([*wrapped, *([f"has the prefix `{'.'.join(prefix)}`"] if prefix else [])])


def _title(segment: str, others: Sequence[str]) -> str:
    """Whose segment it is; empty for a common prefix that is no wrapper's."""
    if segment == "model" and "base_model" not in others:  # PEFT's only below its `base_model`
        return ""
    return " or ".join(row.title for row in TABLE if row.segment == segment)


def hidden_segments(entries: Iterable[Entry]) -> tuple[str, ...]:
    """Notes on keys that only one side has and that differ from one of the other side by one segment: likely a hook.

    Said as a hint and nothing more: without the model nobody knows.
    """
    entries = list(entries)
    missing = [entry.right[0] for entry in entries if entry.status == "missing"]
    unexpected = [entry.left[0] for entry in entries if entry.status == "unexpected"]
    found: Counter[tuple[str, str]] = Counter()
    for side, longer, shorter in (("left", missing, unexpected), ("right", unexpected, missing)):
        known = set(shorter)
        for key in longer:
            parts = key.split(".")
            hits = {part for i, part in enumerate(parts) if ".".join(parts[:i] + parts[i + 1 :]) in known}
            if len(hits) == 1:
                found[side, hits.pop()] += 1
    return tuple(
        f"{count} keys of the {side} lack a segment `{segment}` that the other side has: a state_dict hook may hide it "
        f"(pass --model to know)"
        for (side, segment), count in found.items()
    )


def leftover(status: str, section: Section, keys: Iterable[str], known: set[str]) -> list[Entry]:
    """Keys that only one side has; one that is a second name of a tensor that both have is an alias."""
    twice = aliases(section)
    names: dict[str, set[str]] = {}
    for key, first in twice.items():
        names.setdefault(first, {first}).add(key)
    entries = []
    for key in keys:
        others = names.get(twice.get(key, key), set()) & known
        side: tuple[tuple[str, ...], tuple[str, ...]] = ((key,), ()) if status == "unexpected" else ((), (key,))
        if others:
            entries.append(
                Entry("alias", *side, "a second name of a tensor that both sides have", None, f"same as {min(others)}")
            )
        else:
            where = "left" if status == "unexpected" else "right"
            entries.append(Entry(status, *side, f"only {where} has it"))
    return entries
