"""The program on its new storages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckpttool.checkpoint import Span, Storage, TensorEntry
from ckpttool.formats.pt2.archive import replaceable


def replaced(entries: Sequence[TensorEntry], fitted: Mapping[str, TensorEntry]) -> tuple[TensorEntry, ...]:
    """The program's entries on their new storages, with the geometry that the program gave them.

    Storages of which no tensor has a new value are the old ones.
    """
    by_storage: defaultdict[Storage, list[TensorEntry]] = defaultdict(list)
    for entry in entries:
        if entry.storage is not None:
            by_storage[entry.storage].append(entry)
    fresh = {
        storage: _storage(storage, group, fitted)
        for storage, group in by_storage.items()
        if any(entry.key in fitted for entry in group)
    }
    return tuple(_moved(entry, fresh, fitted.get(entry.key)) for entry in entries)


def _moved(entry: TensorEntry, fresh: Mapping[Storage, Storage], new: TensorEntry | None) -> TensorEntry:
    if entry.storage is not None:
        return replace(entry, storage=fresh.get(entry.storage, entry.storage))
    return replace(entry, payload=new.payload) if new is not None and replaceable(entry, new) else entry


def _storage(old: Storage, entries: Sequence[TensorEntry], fitted: Mapping[str, TensorEntry]) -> Storage:
    """The storage for the new values of `entries`: moved as they are where they fill it, else put in their places."""
    first, new = entries[0], fitted.get(entries[0].key, entries[0])
    one_tensor = len({entry.identity for entry in entries}) == 1
    if (
        one_tensor
        and first.is_contiguous
        and first.nbytes == old.nbytes
        and new.is_contiguous
        and new.storage is not None
    ):
        return Storage(new.span) if isinstance(new.span, Span) else new.storage
    from ckpttool.evaluate import with_torch

    return with_torch.arrange(old, [(entry, fitted.get(entry.key, entry)) for entry in entries])
