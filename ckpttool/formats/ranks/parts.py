"""What the ranks of one run hold of a tensor: the payload of an entry that was put together of their files."""

from __future__ import annotations

from collections.abc import Sequence

from ckpttool.checkpoint import TensorEntry
from ckpttool.evaluate.compare import same_values
from ckpttool.values import dataclass

ALL_RANKS = "name the files of all ranks and no others, as in 'rank_*.pt'"  # a hint
OF_ONE_STEP = "name the files that the ranks of one run saved at one step, and no others"  # another


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


def copies_of(entry: TensorEntry) -> list[tuple[TensorEntry, TensorEntry]]:
    """Pairs of what ranks hold that must be the same: replicas of one box of a DTensor, or one tensor on every rank."""
    if not isinstance(entry.payload, RankParts):
        return []
    parts = tuple(part for part in entry.payload.parts if part is not None)
    groups = entry.payload.copies if entry.payload.whole else (parts,)
    return [(group[0], copy) for group in groups for copy in group[1:]]


def is_held_alike(entry: TensorEntry) -> bool:
    """Whether all ranks that have a copy of the entry, or of a part of it, have the same."""
    return all(same_values(one, other) for one, other in copies_of(entry))


def is_of_ranks(entry: TensorEntry) -> bool:
    """Whether the entry comes from the files of several ranks."""
    return isinstance(entry.payload, RankParts)


def is_whole(entry: TensorEntry) -> bool:
    """Whether the parts that ranks hold are the entry together."""
    return isinstance(entry.payload, RankParts) and entry.payload.whole


def is_of_dtensors(entry: TensorEntry) -> bool:
    """Whether the entry is made of the parts of a DTensor."""
    return isinstance(entry.payload, RankParts) and entry.payload.of_dtensors


def must_be_alike(left: TensorEntry, right: TensorEntry) -> Sequence[tuple[TensorEntry | None, TensorEntry | None]]:
    """What else has to be alike where the two are compared: what each rank holds, and the copies of one box.

    Of what may be parts or copies, and is held by as many ranks on both sides, rank by rank; else all on one side.
    """
    if type(left.payload) is not RankParts and type(right.payload) is not RankParts:
        return ()  # as most are, of which there may be very many
    ranks = [entry.payload for entry in (left, right) if isinstance(entry.payload, RankParts)]
    if [(one.whole, len(one.parts)) for one in ranks] == [(False, len(ranks[0].parts))] * 2:
        return [pair for pair in zip(*(one.parts for one in ranks)) if pair != (None, None)]
    return [*copies_of(left), *copies_of(right)]
