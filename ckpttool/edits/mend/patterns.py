"""Which keys go: the patterns that name these and no others, and the one way below which a model's keys stand."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

_MOST = 24  # --drop options on one command line


def drops(gone: Sequence[str], kept: Collection[str]) -> tuple[str, ...] | None:
    """Patterns that match all keys of `gone` and none of `kept`; None where it takes too many to be of use."""
    able = {text for key in gone for text in _matching(key)}
    spared = {text for key in kept for text in able & _matching(key)}
    reach: dict[str, list[str]] = {}
    for key in gone:
        for text in _matching(key):
            if text not in spared:
                reach.setdefault(text, []).append(key)
    found: list[str] = []
    rest = dict.fromkeys(gone)
    while rest:
        if len(found) == _MOST:
            return None
        first = next(iter(rest))
        count = {text: sum(key in rest for key in reach[text]) for text in _ways(first) if text in reach}
        found.append(max(count, key=lambda text: count[text]))
        for key in reach[found[-1]]:
            rest.pop(key, None)
    return tuple(found)


def _ways(key: str) -> Iterator[str]:
    """Patterns for the key, the plainest first: a module, a segment wherever it stands, the key alone."""
    parts = key.split(".")
    if not re.search(r"^re:|[\[\]*?{}]", key):
        yield from (".".join([*parts[:depth], "{rest*}"]) for depth in range(1, len(parts)))
        for depth, part in enumerate(parts):
            if not part.isdecimal() and depth:
                yield "{module*}." + part + (".{rest*}" if depth < len(parts) - 1 else "")
        yield key
    yield "re:" + re.escape(key)


def _matching(key: str) -> set[str]:
    """Of all that `_ways` writes for any key, what matches this one; `{rest*}` may stand for no segment at all."""
    parts = key.split(".")
    own = {".".join([*parts[:depth], "{rest*}"]) for depth in range(1, len(parts) + 1)}
    inside = {"{module*}." + part + ".{rest*}" for part in parts}
    plain = set() if key.startswith("re:") else {key}
    return {*own, *inside, *plain, "{module*}." + parts[-1], "re:" + re.escape(key)}


def common_way(keys: Collection[str], names: Collection[str]) -> str:
    """The dotted way below which most of the names stand among the keys; empty at the root, and where they do not."""
    count: Counter[str] = Counter()
    for key in keys:
        parts = key.split(".")
        count.update(".".join(parts[:d]) for d in range(len(parts)) if ".".join(parts[d:]) in names)
    (way, hits), *_ = count.most_common(1) or [("", 0)]
    return way if 2 * hits > len(names) else ""
