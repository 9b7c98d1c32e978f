"""Which keys go: the patterns that name these and no others, and the one way below which a model's keys stand."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from ckpttool.edits.rules.patterns import matches

_MOST = 24  # --drop options on one command line


def drops(gone: Sequence[str], kept: Collection[str]) -> tuple[str, ...] | None:
    """Patterns that match all keys of `gone` and none of `kept`; None where it takes too many to be of use."""
    found: list[str] = []
    rest = list(gone)
    while rest:
        if len(found) == _MOST:
            return None
        fitting = [text for text in _ways(rest[0]) if not any(matches(text, key) for key in kept)]
        reach = {text: [key for key in rest if matches(text, key)] for text in fitting}
        found.append(max(reach, key=lambda text: len(reach[text])))
        rest = [key for key in rest if key not in set(reach[found[-1]])]
    return tuple(found)


def _ways(key: str) -> Iterator[str]:
    """Patterns for the key, the plainest first: a module, a segment wherever it stands, the key alone."""
    parts = key.split(".")
    if not re.search(r"[\[\]*?{}]", key):
        yield from (".".join([*parts[:depth], "{rest*}"]) for depth in range(1, len(parts)))
        for depth, part in enumerate(parts):
            if not part.isdecimal() and depth:
                yield "{module*}." + part + (".{rest*}" if depth < len(parts) - 1 else "")
        yield key
    yield "re:" + re.escape(key)


def common_way(keys: Collection[str], names: Collection[str]) -> str:
    """The dotted way below which most of the names stand among the keys; empty at the root, and where they do not."""
    count: Counter[str] = Counter()
    for key in keys:
        parts = key.split(".")
        count.update(".".join(parts[:d]) for d in range(len(parts)) if ".".join(parts[d:]) in names)
    (way, hits), *_ = count.most_common(1) or [("", 0)]
    return way if 2 * hits > len(names) else ""
