"""The records of a changed torch file: its pickle, and its storages numbered as torch.save numbers them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from ckpttool.formats.containers.pickle_tree import Persistent, Pickle, dumps
from ckpttool.formats.containers.zip_archive import Archive, Record
from ckpttool.formats.containers.zip_layout import NewRecord
from ckpttool.formats.torch.rebuild import Rebuilder, renumbered
from ckpttool.formats.torch.tensors import malformed, storage_key

Entries = list["Record | NewRecord"]


def dumped(root: Any, protocol: int) -> tuple[bytes, dict[str, None]]:
    """The pickle, and the keys of the storages in the order in which its reader meets them."""
    references: list[Persistent] = []
    data = dumps(Pickle(root, protocol), references)
    return data, dict.fromkeys(storage_key(reference) for reference in references)


def changed_records(
    archive: Archive,
    folder: str,
    root: Any,
    protocol: int,
    rebuilder: Rebuilder,
    orphans: Sequence[str] = (),
    *,
    keep_numbers: bool = False,
) -> tuple[Entries, dict[str, None]]:
    """The records of `archive` with another pickle, and the keys of its storages in the order of that pickle.

    A way there and back gives the same file: where storages are new, or would not stand in the order of their numbers
    as they did, all are numbered again (with `keep_numbers` only where some are new). `orphans` are the keys of
    storages that no pickle refers to and that stay.
    """
    data, keys = dumped(root, protocol)
    missing = [key for key in keys if key not in rebuilder.taken]
    if missing:
        raise malformed(f"storage {missing[0]} is missing")
    old = [key for record in archive.records if (key := key_of(record, folder)) is not None]
    in_order = list(keys) == _first_numbers(len(keys))
    if set(keys) <= set(old) and (keep_numbers or in_order or old != _first_numbers(len(old))):
        return _kept(archive, folder, data, {*keys, *orphans}), keys
    whole = [*keys, *orphans]
    numbers = dict(zip(whole, _first_numbers(len(whole))))
    data, _ = dumped(renumbered(root, numbers), protocol)
    entries = _kept(archive, folder, data, ())
    at = _place_of_storages(archive, entries, folder)
    entries[at:at] = [_moved(archive, folder, key, number, rebuilder) for key, number in numbers.items()]
    return entries, dict.fromkeys(numbers[key] for key in keys)


def key_of(record: Record | NewRecord, folder: str) -> str | None:
    """The key of the storage that a record holds; None for any other record."""
    prefix = folder + "data/"
    return record.name.removeprefix(prefix) if record.name.startswith(prefix) else None


def _first_numbers(count: int) -> list[str]:
    return [str(number) for number in range(count)]


def _kept(archive: Archive, folder: str, data: bytes, keys: Collection[str]) -> Entries:
    """The records with another pickle, and without the storages that are not among `keys`."""
    entries: Entries = []
    for record in archive.records:
        key = key_of(record, folder)
        if record.name == folder + "data.pkl":
            entries.append(NewRecord(record.name, data))
        elif key is None or key in keys:
            entries.append(record)
    return entries


def _moved(archive: Archive, folder: str, key: str, number: str, rebuilder: Rebuilder) -> Record | NewRecord:
    """The record of the storage `key` under its new number."""
    record = archive.by_name.get(f"{folder}data/{key}")
    if record is not None and key == number:
        return record
    name = f"{folder}data/{number}"
    if record is None:
        return NewRecord(name, rebuilder.storages[key].data)
    return NewRecord(name, archive.span(record), record.crc)


def _place_of_storages(archive: Archive, entries: Sequence[Record | NewRecord], folder: str) -> int:
    """Where the storages stood: behind the record before them; in front of ``version`` if there were none."""
    names = [record.name for record in archive.records]
    first = next((at for at, record in enumerate(archive.records) if key_of(record, folder) is not None), None)
    if first is None:
        first = names.index(folder + "version") if folder + "version" in names else len(names)
    before = set(names[:first])
    return sum(entry.name in before for entry in entries)
