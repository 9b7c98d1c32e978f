"""One section of those of all ranks: a tensor that is cut over them becomes one entry that lies in several files."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, TypeVar

from ckpttool.checkpoint import Checkpoint, ExtraEntry, Lazy, Part, Section, Span, Storage, TensorEntry, in_row_major
from ckpttool.dtypes import itemsize
from ckpttool.errors import CkptError, Problem
from ckpttool.evaluate.boxes import Box, assembled
from ckpttool.evaluate.compare import elements, same_values
from ckpttool.evaluate.parts import across, concatenated
from ckpttool.formats.ranks import dtensor, sharded_tensor
from ckpttool.formats.ranks.parts import ALL_RANKS, RankParts
from ckpttool.formats.torch import zip_file as torch_zip
from ckpttool.formats.torch.mappings import pairs_of
from ckpttool.formats.torch.tensors import MOST
from ckpttool.keys import dotted, is_flat
from ckpttool.words import some

# What all ranks count alike: words in the name of a number.
_COUNTERS = frozenset(("step", "steps", "epoch", "epochs", "iter", "iters", "iteration", "iterations"))
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")  # of a name in snake_case or CamelCase
_ABSENT = object()
T = TypeVar("T")


class Merge:
    """Makes one section of those of all ranks, and gathers what stands against it."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.hint = ALL_RANKS

    def others(self, ranks: Sequence[Checkpoint]) -> None:
        """What stands beside the state dicts: rank 0's is carried; what counts steps has to be one."""
        alone = dict.fromkeys(key for rank in ranks for key in rank.others if key not in ranks[0].others)
        self.notes += [f"not carried: {key}, which rank 0 has not" for key in alone]
        said = [_plain_values(rank) for rank in ranks]
        for key in dict.fromkeys(key for own in said for key in own):
            if not _COUNTERS.isdisjoint(word.lower() for word in _WORD.findall(key)):
                self._is_one(key, [own.get(key, _ABSENT) for own in said])

    def _is_one(self, way: str, values: Sequence[Any]) -> bool:
        """Whether all ranks that have the value have the same, or the same kind of thing; else it is a problem."""
        ranks: dict[str, int] = {}
        for rank, value in enumerate(values):
            if value is not _ABSENT:
                ranks.setdefault(_told(value), rank)
        if len(ranks) > 1:
            (one, first), (other, second), *_ = ranks.items()
            self.problems.append(Problem(f"is {one} on rank {first}, and {other} on rank {second}", way))
        return len(ranks) == 1

    def section(self, path: str, own: Sequence[Section | None]) -> Section:
        """The section at `path`, of what the ranks have there; what does not fit is noted in `problems`."""
        first = next(section for section in own if section is not None)
        self._is_one(path, [_ABSENT if section is None else section.kind for section in own])
        if first.mapping is not None:
            found: list[TensorEntry] = []
            mapping = self._value([_ABSENT if s is None else s.mapping for s in own], found, path)
            return replace(first, tensors=tuple(found), mapping=mapping)
        by_key = [{} if section is None else section.by_key() for section in own]
        keys = dict.fromkeys(key for entries in by_key for key in entries)
        entries = [self._entry([entries.get(key) for entries in by_key], dotted(path, key)) for key in keys]
        return replace(
            first,
            modules=self._modules(path, own),
            tensors=tuple(entry for entry in entries if isinstance(entry, TensorEntry)),
            extras=tuple(entry for entry in entries if isinstance(entry, ExtraEntry)),
        )

    def _modules(self, path: str, own: Sequence[Section | None]) -> Mapping[str, object] | None:
        """The versions of modules (``_metadata``): those of the first rank that has some."""
        found = {rank: section.modules for rank, section in enumerate(own) if section is not None}
        first = next((rank for rank, modules in found.items() if modules is not None), None)
        taken = None if first is None else found[first]
        other = [f"rank {rank}" for rank, modules in found.items() if modules != taken]
        if other:
            where = dotted(path, "_metadata")
            self.notes.append(
                f"{where} (module versions) is another or none on {some(other, 8)}: rank {first}'s is taken"
            )
        return taken

    def _value(self, values: Sequence[Any], found: list[TensorEntry], way: str) -> Any:
        """The value at `way` of an optimizer's state dict, of those of all ranks; its tensors are added to `found`."""
        first = next(value for value in values if value is not _ABSENT)
        if not self._is_one(way, values):
            return first
        if isinstance(first, (TensorEntry, ExtraEntry)):
            entry = self._entry([None if value is _ABSENT else value for value in values], way)
            found.extend([entry] if isinstance(entry, TensorEntry) else [])
            return entry
        if isinstance(first, Mapping):
            maps = [{} if value is _ABSENT else value for value in values]
            keys = dict.fromkeys(key for own in maps for key in own)
            return {
                key: self._value([own.get(key, _ABSENT) for own in maps], found, f"{way}.{key}".lstrip("."))
                for key in keys
            }
        if isinstance(first, (list, tuple)):
            columns = [[v[at] if v is not _ABSENT else v for v in values] for at in range(len(first))]
            return type(first)(self._value(column, found, f"{way}.{at}") for at, column in enumerate(columns))
        return first

    def _entry(self, own: Sequence[TensorEntry | ExtraEntry | None], way: str) -> TensorEntry | ExtraEntry:
        have = [entry for entry in own if entry is not None]
        first = have[0]
        if any(map(sharded_tensor.is_sharded, have)):
            return self._tried(_of_sharded, own, first)
        if any(map(dtensor.is_dtensor, have)):
            return self._tried(_of_dtensors, own, first)
        parts = [entry for entry in have if isinstance(entry, TensorEntry) and entry.storage is not None]
        if len(parts) < len(have):
            return self._as_it_is(have, way)
        by_rank = tuple(entry if isinstance(entry, TensorEntry) else None for entry in own)
        if is_flat(first.key):
            return self._tried(_laid_end_to_end, by_rank, first)
        return replace(parts[0], payload=RankParts(by_rank, whole=False))

    def _as_it_is(self, have: Sequence[TensorEntry | ExtraEntry], way: str) -> TensorEntry | ExtraEntry:
        """What no parts can be put together of: the first rank's."""
        if not all(same_values(have[0], entry) for entry in have[1:]):
            if any(isinstance(entry, TensorEntry) for entry in have):
                self.problems.append(Problem("differs between the ranks, and no parts make it", way))
            else:
                self.notes.append(f"{way} differs between the ranks: rank 0's is taken")
        return have[0]

    def _tried(self, make: Callable[[Any], T], own: Any, first: T) -> T:
        try:
            return make(own)
        except CkptError as error:
            self.hint = error.hint if isinstance(error, dtensor.Unplaced) else self.hint
            self.problems += error.problems or [Problem(error.message, getattr(first, "key", ""))]
            return first


def _told(value: Any) -> str:
    """What a value is, in words; of what has to be looked into only its kind."""
    if isinstance(value, TensorEntry):
        return "a tensor"
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    if type(value) is int and abs(value) >= MOST:
        return hex(value)  # which Python writes however long it is
    return {dict: "a dict", ExtraEntry: "an object"}.get(type(value)) or repr(value)


def _plain_values(file: Checkpoint) -> dict[str, object]:
    """Numbers and words that stand beside the state dicts at the top of a rank's file."""
    assert isinstance(file.container, torch_zip.Container)
    pairs = pairs_of(file.container.pickle.root) or {}
    return {key: value for key, value in pairs.items() if type(key) is str and type(value) in (bool, int, float, str)}


def _of_sharded(own: Sequence[TensorEntry | ExtraEntry | None]) -> TensorEntry:
    key = next(entry.key for entry in own if entry is not None)
    if not all(entry is not None and sharded_tensor.is_sharded(entry) for entry in own):
        raise _unfit("a sharded tensor on some ranks, and not on all", key)
    found = [sharded_tensor.local_part(entry) for entry in own if entry is not None]
    kinds = {(part.shape, part.dtype) for part in found}
    if len(kinds) > 1:
        raise _unfit("has another shape or dtype on other ranks", key)
    [(shape, dtype)], at = kinds, 0
    for part in found:
        if part.local is not None and part.offset != at:
            raise _unfit("is not cut along its first dimension, rank by rank", key)
        at += 0 if part.local is None else part.local.numel
    if at != prod(shape):
        raise _unfit(f"its parts hold {at:,} of {prod(shape):,} elements", key)
    return _whole(key, dtype, shape, tuple(part.local for part in found))


def _of_dtensors(own: Sequence[TensorEntry | ExtraEntry | None]) -> TensorEntry:
    key = next(entry.key for entry in own if entry is not None)
    if not all(entry is not None and dtensor.is_dtensor(entry) for entry in own):
        raise _unfit("a DTensor on some ranks, and not on all", key)
    found = [dtensor.local_box(entry) for entry in own if entry is not None]
    kinds = {(box.shape, box.dtype, box.layout) for box in found}
    if len(kinds) > 1:
        raise _unfit("has another shape, dtype, mesh or placement on other ranks", key)
    [(shape, dtype, _)] = kinds
    by_corner: defaultdict[tuple[int, ...], list[TensorEntry]] = defaultdict(list)
    for box in found:
        if box.local.numel:
            by_corner[box.offsets].append(box.local)
    held = sum(copies[0].numel for copies in by_corner.values())
    if held != prod(shape):
        raise _unfit(f"its parts hold {held:,} of {prod(shape):,} elements", key)
    copies = tuple(map(tuple, by_corner.values()))
    parts = RankParts(tuple(box.local for box in found), whole=True, copies=copies, of_dtensors=True)
    boxes = {corner: group[0] for corner, group in by_corner.items()}
    return in_row_major(key, dtype, shape, _in_boxes(shape, dtype, boxes), payload=parts)


def _in_boxes(shape: tuple[int, ...], dtype: str, boxes: Mapping[tuple[int, ...], TensorEntry]) -> Storage:
    """The storage of a tensor that the boxes cover, by their corners; a span of a file where it lies in one piece."""
    spans = [entry.span for entry in boxes.values()]
    if len(spans) == 1 and spans[0] is not None:
        return Storage(spans[0])

    def produce() -> Iterator[Part]:
        parts = [Box(corner, entry.shape, _data(entry)) for corner, entry in boxes.items()]
        return assembled(shape, itemsize(dtype), parts)

    return Storage(Lazy(prod(shape) * itemsize(dtype), produce))


def _data(entry: TensorEntry) -> Span | bytes:
    """The entry's elements in row-major order; bytes where they are a strided view."""
    return entry.span if entry.span is not None else b"".join(map(bytes, elements(entry)))


def _laid_end_to_end(parts: Sequence[TensorEntry | None]) -> TensorEntry:
    """A flat parameter of which every rank holds a plain tensor."""
    have = [part for part in parts if part is not None]
    if any(len(part.shape) != 1 or part.dtype != have[0].dtype for part in have):
        raise _unfit("is called a flat parameter, and is not one-dimensional or not of one dtype", have[0].key)
    return _whole(have[0].key, have[0].dtype, (sum(part.numel for part in have),), tuple(parts))


def _whole(key: str, dtype: str, shape: tuple[int, ...], parts: tuple[TensorEntry | None, ...]) -> TensorEntry:
    """The entry of `shape` that the parts are when they are laid end to end."""
    have = [part for part in parts if part is not None]
    if not all(part.is_contiguous for part in have):
        raise _unfit("a part of it is a strided view", key)
    storage = concatenated(across(have, 0, prod(shape)))
    return in_row_major(key, dtype, shape, storage, payload=RankParts(parts, whole=True))


def _unfit(message: str, key: str) -> CkptError:
    return CkptError(message, hint=ALL_RANKS, problems=[Problem(message, key)])
