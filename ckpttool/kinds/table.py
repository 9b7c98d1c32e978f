"""The table of kinds: how each is recognized, and the sentence that names it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from ckpttool.core.checkpoint import Checkpoint, Kind, Section
from ckpttool.core.schema import TEXT, Members, record
from ckpttool.kinds import adapters, lists, modules, quantized

# What a section is, after its name: "is a LoRA adapter ..."; and what the row read in it.
Recognized = tuple[str, object]


class Row(NamedTuple):
    """A kind: `recognize` returns what a state dict is, or None if it is not of this kind.

    The text continues a sentence whose subject is the section, and says what loads it.
    """

    name: str
    recognize: Callable[[Checkpoint, Section], Recognized | None]


TABLE = (
    Row(modules.NAME, modules.recognize),
    Row(lists.NAME, lists.recognize),
    Row(adapters.NAME, adapters.recognize),
    Row(quantized.NAME, quantized.recognize),
)


KIND_MEMBERS: Members = {"name": TEXT, "section": TEXT, "text": TEXT}
KIND = record(Kind, KIND_MEMBERS)


def with_kinds(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with the kinds of its state dicts."""
    return replace(checkpoint, kinds=recognized(checkpoint))


def recognized(checkpoint: Checkpoint) -> tuple[Kind, ...]:
    kinds = []
    for section in checkpoint.state_dicts:
        for row in TABLE:
            found = row.recognize(checkpoint, section)
            if found is None:
                continue
            kinds.append(Kind(row.name, section.path, *found))
    return tuple(kinds)
