"""Why two names of one tensor differ, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache

from ckpttool.naming.wrappers.table import TABLE
from ckpttool.queries.diff.result import Entry
from ckpttool.words import plural

FLAT = "FSDP1's flat parameter: all parameters of its module end to end, in the files of all ranks"


_REORDERED = "the same wrappers in another order"


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


def segment_reason(left: str, right: str) -> str:
    """Why two names of one tensor differ, where wrappers' segments are all that differs."""
    a, b = left.split("."), right.split(".")
    return _segments_reason(_more(a, b), _more(b, a)) or ("" if left == right else _REORDERED)


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
        known, dots = set(shorter), {key.count(".") + 1 for key in shorter}
        for key in longer:
            if key.count(".") not in dots:
                continue
            parts = key.split(".")
            hits = {part for i, part in enumerate(parts) if ".".join(parts[:i] + parts[i + 1 :]) in known}
            if len(hits) == 1:
                found[side, hits.pop()] += 1
    return tuple(
        f"{plural(count, 'key')} of the {side} without a segment `{segment}` that the other side has: a state_dict "
        "hook may hide it (pass --model to know)"
        for (side, segment), count in found.items()
    )
