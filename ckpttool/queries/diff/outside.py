"""Entries outside of state dicts, and storages that are not understood: compared as the models are."""

from __future__ import annotations

from collections.abc import Iterable

from ckpttool.checkpoint import Checkpoint, ExtraEntry, TensorEntry, Unreached
from ckpttool.errors import CkptError
from ckpttool.evaluate.compare import content_of_storage
from ckpttool.queries.diff.keys import Values, compare_pair
from ckpttool.queries.diff.result import NOT_UNDERSTOOD, ONLY_LEFT, ONLY_RIGHT, Entry, only_left, only_right


def compare_outside(left: Checkpoint, right: Checkpoint, values: Values | None) -> tuple[Entry, ...]:
    """Entries outside of state dicts under one key on both sides, and all storages that are not understood."""
    entries = compare_loose(left, right, values)
    if left.format != right.format and "torchscript" in (left.format, right.format):
        return tuple(entries)  # the constants of its code: what is no TorchScript archive has no place for them
    return (*entries, *_storages(left.unreached, right.unreached))


def compare_loose(left: Checkpoint, right: Checkpoint, values: Values | None) -> list[Entry]:
    """Entries outside of state dicts under one key on both sides."""
    mine, theirs = loose(left), loose(right)
    return [compare_pair(mine[key], theirs[key], values) for key in mine if key in theirs]


def loose(checkpoint: Checkpoint) -> dict[str, TensorEntry | ExtraEntry]:
    """What stands outside of state dicts and optimizers, by the dotted way to it."""
    return {entry.key: entry for section in checkpoint.sections if section.kind == "other" for entry in section.entries}


def _storages(left: Iterable[Unreached], right: Iterable[Unreached]) -> list[Entry]:
    """Nothing but their bytes tells such storages apart, so these are compared always."""
    theirs: dict[bytes | None, list[Unreached]] = {}
    for storage in right:
        theirs.setdefault(_content(storage), []).append(storage)
    entries, alone = [], []
    for storage in left:
        content = _content(storage)
        same = theirs.get(content) if content is not None else None
        if same:
            entries.append(Entry("same", (storage.path,), (same.pop(0).path,)))
        else:
            alone.append(storage)
    entries += [only_left(storage.path, f"{NOT_UNDERSTOOD}: {ONLY_LEFT}") for storage in alone]
    left_over = [storage for storages in theirs.values() for storage in storages]
    return entries + [only_right(storage.path, f"{NOT_UNDERSTOOD}: {ONLY_RIGHT}") for storage in left_over]


def _content(storage: Unreached) -> bytes | None:
    try:
        return content_of_storage(storage.storage)
    except CkptError:
        return None
