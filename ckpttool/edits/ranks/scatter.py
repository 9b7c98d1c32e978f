"""An ordinary checkpoint becomes the files that the ranks of an FSDP1 run load."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Protocol

from ckpttool.checkpoint import Checkpoint, Section
from ckpttool.edits.ranks.cut_flat import FlatCut
from ckpttool.edits.ranks.cut_rows import RowCut
from ckpttool.edits.remap.optimizer import OptimizerRequest, remap_optimizers
from ckpttool.errors import CkptError
from ckpttool.names import FSDP_FLAT, Names
from ckpttool.optimizer_state import FQN

_MOST_RANKS = 65_536


class Cut(Protocol):
    """A way to cut sections into those of the ranks, from rank 0 on.

    `Refused`, all problems at once, for what cannot be cut.
    """

    def model(self, section: Section) -> list[Section]:
        """Of the model, in its serialized keys."""

    def optimizer(self, section: Section) -> list[Section]:
        """Of an optimizer whose parameters are named by their FQNs."""


def scatter(
    source: Checkpoint, models: Collection[str], form: str, names: Names, units: Sequence[str], world_size: int
) -> list[Checkpoint]:
    """The checkpoint of each rank, from rank 0 on, in `form`; other state dicts than the `models` are whole in each.

    The sections at these paths have the model's serialized keys. `units` name the modules with flat parameters of their
    own (``layers.*``); the root always has one. Raises `Refused`, all problems at once, for what FSDP1 cannot shard.
    """
    if not 2 <= world_size <= _MOST_RANKS:
        raise CkptError(
            f"--world-size {world_size}: FSDP1 shards over two ranks or more, and {_MOST_RANKS:,} files are the most",
            hint="for one process write an ordinary checkpoint: --to serialized",
        )
    cut: Cut = FlatCut.of(names, units, world_size) if form == FSDP_FLAT else RowCut(names, world_size)
    named = remap_optimizers(source, OptimizerRequest(keys=FQN, names=names))[0] if source.optimizers else source
    columns = [
        cut.model(own) if own.path in models else cut.optimizer(own) if own.kind == "optimizer" else [own] * world_size
        for own in named.sections
    ]
    return [replace(source, sections=tuple(rank), container=None) for rank in zip(*columns)]
