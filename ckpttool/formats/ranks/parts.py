"""What the ranks of one run hold of a tensor: the payload of an entry that was put together of their files."""

from __future__ import annotations

from ckpttool.checkpoint import TensorEntry
from ckpttool.values import dataclass

ALL_RANKS = "name the files of all ranks and no others, as in 'rank_*.pt'"  # a hint


@dataclass(frozen=True, slots=True, eq=False)
class RankParts:
    """The payload of an entry: what each rank holds under its key, by rank.

    `whole`: the parts together are the entry. Else it is the first of them, and they may be copies of one tensor or
    parts of one. `copies` are parts that must hold the same, since the mesh of a DTensor says that they are replicas.
    """

    parts: tuple[TensorEntry | None, ...]
    whole: bool
    copies: tuple[tuple[TensorEntry, ...], ...] = ()
    of_dtensors: bool = False


def parts_of(entry: TensorEntry) -> tuple[TensorEntry | None, ...]:
    """What each rank holds of the entry, by rank; an entry of a single file is all of it."""
    return entry.payload.parts if isinstance(entry.payload, RankParts) else (entry,)


def is_of_ranks(entry: TensorEntry) -> bool:
    """Whether the entry comes from the files of several ranks."""
    return isinstance(entry.payload, RankParts)


def is_whole(entry: TensorEntry) -> bool:
    """Whether the parts that ranks hold are the entry together."""
    return isinstance(entry.payload, RankParts) and entry.payload.whole


def is_of_dtensors(entry: TensorEntry) -> bool:
    """Whether the entry is made of the parts of a DTensor."""
    return isinstance(entry.payload, RankParts) and entry.payload.of_dtensors


def copies_of(entry: TensorEntry) -> tuple[tuple[TensorEntry, ...], ...]:
    """Groups of parts that must hold the same: replicas of one box of a DTensor."""
    return entry.payload.copies if isinstance(entry.payload, RankParts) else ()
