"""Which keys go: the patterns that name these and no others, and the one way below which a model's keys stand."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property, partial
from itertools import chain

_MOST = 24  # --drop options on one command line


class Keys:
    """Keys, asked which of them a pattern names."""

    def __init__(self, keys: Collection[str]) -> None:
        self._keys = keys

    @cached_property
    def _ordered(self) -> list[str]:
        return sorted(self._keys)

    @cached_property
    def _segments(self) -> set[str]:
        return set(chain.from_iterable(key.split(".") for key in self._keys))

    @cached_property
    def _last(self) -> set[str]:
        return {key.rpartition(".")[2] for key in self._keys}

    def below(self, way: str) -> Iterator[str]:
        """``way.{rest*}``, where ``rest`` may be no segment at all."""
        if way in self._keys:
            yield way
        for at in range(bisect_left(self._ordered, f"{way}."), len(self._ordered)):
            if not self._ordered[at].startswith(f"{way}."):
                break
            yield self._ordered[at]

    def inside(self, segment: str) -> Iterator[str]:
        """``{module*}.segment.{rest*}``."""
        return (key for key in self._keys if segment in key.split(".")) if segment in self._segments else iter(())

    def ending(self, segment: str) -> Iterator[str]:
        """``{module*}.segment``."""
        return (key for key in self._keys if key.rpartition(".")[2] == segment) if segment in self._last else iter(())

    def exactly(self, key: str) -> Iterator[str]:
        """The key by itself."""
        return iter((key,) if key in self._keys else ())


Pattern = tuple[str, Callable[[Keys], Iterator[str]]]  # as it is written, and the keys that it names


def drops(gone: Sequence[str], kept: Collection[str]) -> tuple[str, ...] | None:
    """Patterns that match all keys of `gone` and none of `kept`; None where none do, or too many to be of use."""
    spared, all_gone = Keys(kept), Keys(dict.fromkeys(gone))
    found: list[str] = []
    rest = dict.fromkeys(gone)
    while rest:
        if len(found) == _MOST:
            return None
        reach: dict[str, list[str]] = {}
        for text, named in ways(next(iter(rest))):
            if next(named(spared), None) is None:
                reach[text] = [key for key in named(all_gone) if key in rest]
                if len(reach[text]) == len(rest):  # no other names more
                    break
        if not reach:  # what stays has the same name
            return None
        found.append(max(reach, key=lambda text: len(reach[text])))
        for key in reach[found[-1]]:
            del rest[key]
    return tuple(found)


def ways(key: str) -> Iterator[Pattern]:
    """Patterns for the key, the plainest first: a module, a segment wherever it stands, the key alone."""
    parts = key.split(".")
    if not re.search(r"^re:|[\[\]*?{}]", key):
        for depth in range(1, len(parts)):
            way = ".".join(parts[:depth])
            yield f"{way}.{{rest*}}", partial(Keys.below, way=way)
        for part in dict.fromkeys(parts[1:-1]):
            if not part.isdecimal():
                yield f"{{module*}}.{part}.{{rest*}}", partial(Keys.inside, segment=part)
        if len(parts) > 1 and not parts[-1].isdecimal():
            yield f"{{module*}}.{parts[-1]}", partial(Keys.ending, segment=parts[-1])
        yield key, partial(Keys.exactly, key=key)
    yield f"re:{re.escape(key)}", partial(Keys.exactly, key=key)


def common_way(keys: Collection[str], names: Collection[str]) -> str:
    """The dotted way below which most of the names stand among the keys; empty at the root, and where they do not."""
    count: Counter[str] = Counter()
    depths = {name.count(".") for name in names}
    for key in keys:
        at = 0
        for depth in range(key.count("."), -1, -1):  # of the rest of the key, from the whole of it on
            if depth in depths and key[at:] in names:
                count[key[: at - 1] if at else ""] += 1
            at = key.find(".", at) + 1
    (way, hits), *_ = count.most_common(1) or [("", 0)]
    return way if 2 * hits > len(names) else ""
