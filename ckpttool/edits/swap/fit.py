"""The new value of each weight, or why it cannot be that one; and the program on storages with the new values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Union

from ckpttool import expression as ex
from ckpttool.checkpoint import ExtraEntry, Storage, TensorEntry
from ckpttool.errors import Problem, Refused
from ckpttool.evaluate import without_torch
from ckpttool.evaluate.parts import in_own_storage
from ckpttool.expression import Expression, Op, Ref, Special
from ckpttool.formats.pt2.archive import replaceable

Entries = Mapping[str, Union[TensorEntry, ExtraEntry]]


def fit_all(
    wanted: Sequence[TensorEntry], sources: Mapping[str, Expression], have: Entries, cast: bool, packed: bool
) -> tuple[dict[str, TensorEntry], list[Problem]]:
    """The new value of each of the program's tensors that has one, and what is wrong with the others."""
    fitted: dict[str, TensorEntry] = {}
    problems: list[Problem] = []
    for entry in wanted:
        source = sources.get(entry.key)
        found = (
            Problem("no weight for it", entry.key, "missing")
            if source is None
            else _fit(entry, source, have, cast, packed)
        )
        if isinstance(found, Problem):
            problems.append(found)
        else:
            fitted[entry.key] = found
    return fitted, problems


def _fit(entry: TensorEntry, source: Expression, have: Entries, cast: bool, packed: bool) -> TensorEntry | Problem:
    """The new value of the program's `entry`, or why it cannot be that."""
    if ex.is_opaque(source):
        return Problem("a hook computes it by code that is no tensor operator", entry.key, "opaque")
    if entry.storage is None and not packed:
        return _pickled(entry, source, have)
    try:
        found = _value(entry.key, source, have, packed)
    except Refused as error:
        return Problem(error.message, entry.key)
    if found.shape != entry.shape:
        text = f"shape {list(found.shape)}, the program has {list(entry.shape)} ({_named(source)})"
        return Problem(text, entry.key, "shape")
    if found.dtype == entry.dtype:
        return found
    if not cast:
        text = f"dtype {found.dtype}, the program has {entry.dtype} ({_named(source)})"
        return Problem(text, entry.key, "dtype")
    return _value(entry.key, Op("aten._to_copy.default", (source,), (("dtype", Special("dtype", entry.dtype)),)), have)


def _pickled(entry: TensorEntry, source: Expression, have: Entries) -> TensorEntry | Problem:
    """The new value of a weight that is no strided tensor: one that is pickled as the same kind of tensor."""
    found = have[source.key] if isinstance(source, Ref) else None
    if not isinstance(found, TensorEntry) or not replaceable(entry, found):
        return Problem(
            f"{entry.layout}, and its new value is not pickled as such a tensor ({_named(source)})", entry.key
        )
    if (found.shape, found.dtype) != (entry.shape, entry.dtype):
        return Problem(
            f"{found.dtype} {list(found.shape)}, the program has {entry.dtype} {list(entry.shape)}", entry.key
        )
    return replace(found, key=entry.key)


def _value(fqn: str, source: Expression, have: Entries, packed: bool = False) -> TensorEntry:
    if isinstance(source, Ref):
        found = have[source.key]
        if isinstance(found, TensorEntry) and (packed or found.storage is not None):
            return replace(found, key=fqn)
        raise Refused(f"{source.key} is no dense tensor", hint="only dense tensors can be put into a program")
    moved = without_torch.entry_of(fqn, source, have)
    if moved is not None:
        return moved
    from ckpttool.evaluate import with_torch  # torch is loaded only if a value is computed

    return with_torch.entry_of(fqn, source, have)


def _named(source: Expression) -> str:
    return "from " + ", ".join(dict.fromkeys(ex.refs(source)))


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
    if one_tensor and first.is_contiguous and first.nbytes == old.nbytes and new.storage is not None:
        own = in_own_storage(new).storage  # of a view, its own elements only
        assert own is not None
        return own
    from ckpttool.evaluate import with_torch

    return with_torch.arrange(old, [(entry, fitted.get(entry.key, entry)) for entry in entries])
