"""Whether a source is that of several ranks, and then the one checkpoint that it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkptError
from ckpttool.keys import is_flat
from ckpttool.names import Names

if TYPE_CHECKING:
    from ckpttool.edits.ranks.gather import Gathered


def put_together(source: Checkpoint, names: Names | None, units: Sequence[str]) -> Gathered | None:
    """The source with flat parameters and parts of tensors made whole; None where it has none.

    Raises `CkptError` where that cannot be, or where `units` has nothing to say.
    """
    if not _needs_gathering(source):
        if units:
            raise CkptError(f"{source.source} holds no flat parameters", hint="leave --units out")
        return None
    from ckpttool.edits.ranks.gather import gather, without_model

    if names is None:
        if _is_of_ranks(source):
            raise without_model(source)
        return None
    return gather(source, names, units)


def _needs_gathering(source: Checkpoint) -> bool:
    """Whether the checkpoint is that of several ranks, or holds flat parameters."""
    return _is_of_ranks(source) or any(is_flat(e.key) for section in source.state_dicts for e in section.tensors)


def _is_of_ranks(source: Checkpoint) -> bool:
    entries = [entry for section in source.sections for entry in section.tensors]
    if not any(entry.payload is not None for entry in entries):
        return False
    from ckpttool.formats.ranks.parts import is_of_ranks  # with the formats of torch

    return any(map(is_of_ranks, entries))


def made_whole(source: Checkpoint) -> Checkpoint:
    """`source` with what ranks hold copies of as one: `replicas.without_replicas`, where there can be any."""
    if not _is_of_ranks(source):
        return source
    from ckpttool.edits.ranks.replicas import without_replicas

    return without_replicas(source)
