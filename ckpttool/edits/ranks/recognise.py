"""Whether a source is that of several ranks, and then the one checkpoint that it is."""

from __future__ import annotations

from collections.abc import Sequence

from ckpttool.checkpoint import Checkpoint
from ckpttool.edits.ranks.gather import Gathered, gather, needs_gathering, without_model
from ckpttool.errors import CkptError
from ckpttool.names import Names


def put_together(source: Checkpoint, names: Names | None, units: Sequence[str]) -> Gathered | None:
    """The source with flat parameters and parts of tensors made whole; None where it has none.

    Raises `CkptError` where that cannot be, or where `units` has nothing to say.
    """
    if not needs_gathering(source):
        if units:
            raise CkptError(f"{source.source} holds no flat parameters", hint="leave --units out")
        return None
    if names is None:
        if source.format == "rank_files":
            raise without_model(source)
        return None
    return gather(source, names, units)
