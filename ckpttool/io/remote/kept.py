"""What stores have said and sent, until a checkpoint is opened anew (`Kept.forget`), or there is no room for more."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field

from ckpttool.values import dataclass

_MAX_BLOCKS = 128
_MAX_AHEAD = 1 << 24  # bytes, of one file and of how all begin


@dataclass(frozen=True, slots=True)
class Stat:
    """What a store says of a URL: `size` in bytes, and by `version` a name and a value that change with the content."""

    folder: bool
    size: int | None
    version: tuple[str, str] = ("", "")

    def is_still(self, before: Stat) -> bool:
        """Whether the content can be the one that it was. Listings and single answers may tell different versions."""
        told = self.version == before.version or self.version[0] != before.version[0]
        return told and (self.folder, self.size) == (before.folder, before.size)


@dataclass(slots=True)
class Kept:
    """By URL what its store said (`stats`), what of its index is still to be checked (`assumed`), and what was sent.

    `blocks` by URL and number, the one used last at the end; `ahead`: ranges that were asked for ahead, their offsets
    and bytes, of which `heads` are bytes at the start of files. `runs`: the block that would follow the
    last request for some, and how many that asked for. `requests` and `fetched` (bytes) are counted.
    """

    stats: dict[str, Stat | None] = field(default_factory=dict)
    assumed: dict[str, list[Callable[[], None]]] = field(default_factory=dict)
    blocks: OrderedDict[tuple[str, int], bytes] = field(default_factory=OrderedDict)
    ahead: dict[str, tuple[list[int], list[bytes]]] = field(default_factory=dict)
    heads: dict[str, int] = field(default_factory=dict)
    runs: dict[str, tuple[int, int]] = field(default_factory=dict)
    requests: Counter[str] = field(default_factory=Counter)
    fetched: Counter[str] = field(default_factory=Counter)

    def forget(self, url: str) -> None:
        """Drops what is known of everything at, under and above the URL."""
        below = url.rstrip("/") + "/"

        def stays(other: str) -> bool:
            return not (other + "/").startswith(below) and not below.startswith(other.rstrip("/") + "/")

        self.stats = {other: found for other, found in self.stats.items() if stays(other)}
        self.assumed = {other: checks for other, checks in self.assumed.items() if stays(other)}
        self.blocks = OrderedDict((at, block) for at, block in self.blocks.items() if stays(at[0]))
        self.ahead = {other: found for other, found in self.ahead.items() if stays(other)}
        self.heads = {other: nbytes for other, nbytes in self.heads.items() if stays(other)}
        self.runs = {other: found for other, found in self.runs.items() if stays(other)}

    def range(self, url: str, start: int, end: int) -> bytes | None:
        """The bytes, where they were asked for ahead as one range."""
        starts, data = self.ahead.get(url, ([], []))
        at = bisect_right(starts, start) - 1
        if at < 0 or end > starts[at] + len(data[at]):
            return None
        return data[at][start - starts[at] : end - starts[at]]

    def keep_ranges(self, url: str, ranges: Mapping[int, bytes]) -> None:
        """Keeps ranges by their offsets; where there is no room the earlier ones go."""
        starts, data = self.ahead.get(url, ([], []))
        found = {**(dict(zip(starts, data)) if sum(map(len, data)) < _MAX_AHEAD else {}), **ranges}
        ordered = sorted(found)
        self.ahead[url] = ordered, [found[start] for start in ordered]

    def keep_heads(self, heads: Mapping[str, bytes]) -> None:
        """Keeps how these files begin; where there is no room, the first of all that are kept go."""
        for url, data in heads.items():
            self.keep_ranges(url, {0: data})
            self.heads[url] = len(data)
        while sum(self.heads.values()) > _MAX_AHEAD:
            first = next(iter(self.heads))
            del self.heads[first], self.ahead[first]

    def used(self, url: str, numbers: Iterable[int]) -> None:
        """Notes that these blocks were used; where there is no room, those go that were not for longest."""
        for number in numbers:
            self.blocks.move_to_end((url, number))
        while len(self.blocks) > _MAX_BLOCKS:
            self.blocks.popitem(last=False)


kept = Kept()
