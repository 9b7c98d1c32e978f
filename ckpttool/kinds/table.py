"""The table of kinds: how each is recognized, and the sentence that names it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ckpttool.core.checkpoint import Checkpoint, Kind, Section
from ckpttool.core.schema import TEXT, Members, record
from ckpttool.kinds import adapters, arrays, embeddings, lists, modules, parts, quantized

# A row of the table: returns what a state dict is, or None if it is not of this kind.
Row = Callable[[Section], "Kind | None"]

TABLE: tuple[Row, ...] = (
    modules.recognize,
    lists.recognize,
    arrays.recognize,
    adapters.recognize,
    quantized.recognize,
    parts.recognize,
    embeddings.recognize,
)


KIND_MEMBERS: Members = {"name": TEXT, "section": TEXT, "text": TEXT}
KIND = record(Kind, KIND_MEMBERS)


def with_kinds(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with the kinds of its state dicts."""
    return replace(checkpoint, kinds=recognized(checkpoint))


def recognized(checkpoint: Checkpoint) -> tuple[Kind, ...]:
    """Return the kinds of the state dicts, in the order of the sections and of the table."""
    kinds = []
    for section in checkpoint.state_dicts:
        for recognize in TABLE:
            kind = recognize(section)
            if kind is not None:
                kinds.append(kind)
    return tuple(kinds)
