"""The files that the ranks of one run wrote, each its own, read as one checkpoint: a quoted glob names them.

A tensor that is cut over the ranks becomes one entry whose storage lies in several files. Of every other tensor all
ranks' entries are kept, since only the model's shapes tell a part of a tensor from a copy of it.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import prod
from typing import Any, TypeVar

from ckpttool.checkpoint import (
    Checkpoint,
    ExtraEntry,
    Lazy,
    Part,
    Section,
    Span,
    Storage,
    TensorEntry,
    contiguous_stride,
)
from ckpttool.dtypes import itemsize
from ckpttool.errors import CkptError, Problem
from ckpttool.evaluate.boxes import Box, assembled
from ckpttool.evaluate.compare import elements
from ckpttool.evaluate.parts import across, concatenated
from ckpttool.formats.ranks import dtensor, sharded_tensor
from ckpttool.formats.recognise_file import sniff
from ckpttool.formats.torch import zip_file as torch_zip
from ckpttool.formats.torch.mappings import pairs_of
from ckpttool.io.files import glob
from ckpttool.io.paths import name
from ckpttool.keys import is_flat
from ckpttool.words import some

NAME = "rank_files"  # in the table of formats
_COUNTER = re.compile(r"step|epoch|iter")  # in the name of what all ranks count alike
_ALL = "name the files of all ranks and no others, as in 'rank_*.pt'"
_RANK = re.compile(r"(rank[-_.]?)\d+", re.IGNORECASE)  # in a file's name
_MOST_MISSING = 20  # ranks that are listed: a hostile file may speak of millions
_ABSENT = object()
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class RankParts:
    """The payload of an entry: what each rank holds under its key, by rank.

    `whole`: the parts together are the entry. Else it is the first of them, and they may be copies of one tensor or
    parts of one. `copies` are parts that must hold the same, since the mesh of a DTensor says that they are replicas.
    """

    parts: tuple[TensorEntry | None, ...]
    whole: bool
    copies: tuple[tuple[TensorEntry, ...], ...] = ()
    of_dtensors: bool = False


def parts_of(entry: TensorEntry) -> tuple[TensorEntry | None, ...]:
    """What each rank holds of the entry, by rank; an entry of a single file is all of it."""
    return entry.payload.parts if isinstance(entry.payload, RankParts) else (entry,)


def is_of_ranks(entry: TensorEntry) -> bool:
    """Whether the entry comes from the files of several ranks."""
    return isinstance(entry.payload, RankParts)


def is_whole(entry: TensorEntry) -> bool:
    """Whether the parts that ranks hold are the entry together."""
    return isinstance(entry.payload, RankParts) and entry.payload.whole


def is_of_dtensors(entry: TensorEntry) -> bool:
    """Whether the entry is made of the parts of a DTensor."""
    return isinstance(entry.payload, RankParts) and entry.payload.of_dtensors


def copies_of(entry: TensorEntry) -> tuple[tuple[TensorEntry, ...], ...]:
    """Groups of parts that must hold the same: replicas of one box of a DTensor."""
    return entry.payload.copies if isinstance(entry.payload, RankParts) else ()


def one_rank(checkpoint: Checkpoint) -> tuple[str, ...]:
    """A sentence where the file holds one rank's part of its tensors; none where it does not."""
    if checkpoint.format == NAME:
        return ()
    entries = [entry for section in checkpoint.sections for entry in section.by_key().values()]
    if not any(is_flat(entry.key) or _is_part(entry) for entry in entries):
        return ()
    whole = checkpoint.source.partition("::")[0]
    files = _RANK.sub(r"\1*", whole) if _RANK.search(name(whole)) else "rank_*.pt"
    part = f"{checkpoint.source} is the part of one rank"
    alone = "" if any(map(_is_part, entries)) else ", unless one rank alone saved it"
    return (f"{part}{alone}: name the files of all ranks at once, as in '{files}'",)


def read(pattern: str) -> Checkpoint:
    """The one checkpoint that the files matching `pattern` are together.

    Raises `CkptError`, all problems at once, where a rank's file is missing or there twice, where the files are of runs
    with other numbers of ranks, or where one is no file of torch.save.
    """
    paths = glob(pattern)
    if not paths:
        raise CkptError(
            f"no file matches {pattern}", hint="check the path; quote the pattern, so that the shell keeps it"
        )
    files = {path: _read_file(path) for path in paths}
    said = {path: _said(file) for path, file in files.items()}
    if len(paths) == 1 and said[paths[0]] is None:
        return replace(files[paths[0]], source=pattern)
    ordered, notes = _in_rank_order(pattern, said)
    ranks = [files[path] for path in ordered]
    merge = _Merge()
    sections = tuple(merge.section(path, [_section(rank, path) for rank in ranks]) for path in _union(ranks))
    merge.counters(ranks)
    shown = [f"rank {rank} {os.path.basename(path)}" for rank, path in enumerate(ordered)]
    notes.append(f"the files of {len(ordered)} ranks: {some(shown, 8)}")
    if merge.problems:
        raise CkptError(
            f"the files of {pattern} are not the parts of one checkpoint",
            hint=merge.hint,
            problems=merge.problems,
        )
    return Checkpoint(
        pattern,
        NAME,
        sum(rank.nbytes for rank in ranks),
        sections,
        others=ranks[0].others,
        container=ranks[0].container,
        globals=tuple(sorted({name for rank in ranks for name in rank.globals})),
        notes=(*notes, *merge.notes),
        unreached=tuple(
            replace(found, path=f"rank {number}: {found.path}")
            for number, rank in enumerate(ranks)
            for found in rank.unreached
        ),
    )


def _read_file(path: str) -> Checkpoint:
    kind = sniff(path)
    if kind != "torch_zip":
        raise CkptError(
            f"{path} is no file of torch.save, and a glob names the files that the ranks of one run saved",
            hint="name the one checkpoint that is meant",
        )
    return torch_zip.read(path)


# Ranks


def _said(file: Checkpoint) -> tuple[int, int] | None:
    """Rank and number of ranks as the first sharded tensor of the file gives them; None where it holds none."""
    for section in file.sections:
        for entry in section.by_key().values():
            if sharded_tensor.is_sharded(entry):
                part = sharded_tensor.local_part(entry)
                return part.rank, part.world_size
            if dtensor.is_dtensor(entry):
                return dtensor.rank_and_world_size(entry)
    return None


def plain_values(file: Checkpoint) -> dict[str, object]:
    """Numbers and words that stand beside the state dicts at the top of a rank's file."""
    root = file.container.pickle.root if isinstance(file.container, torch_zip.Container) else None
    pairs = pairs_of(root) or {}
    return {key: value for key, value in pairs.items() if type(key) is str and type(value) in (bool, int, float, str)}


def _is_part(entry: TensorEntry | ExtraEntry) -> bool:
    return sharded_tensor.is_sharded(entry) or dtensor.is_dtensor(entry)


def _in_rank_order(pattern: str, said: Mapping[str, tuple[int, int] | None]) -> tuple[list[str], list[str]]:
    """The files from rank 0 on, and what is odd about their names."""
    numbers = _numbers(list(said))
    ranks = {path: numbers[path] if own is None else own[0] for path, own in said.items()}
    sizes = {own[1] for own in said.values() if own is not None} or {max(len(said), 1 + max(ranks.values()))}
    problems = []
    if len(sizes) > 1:
        problems += [Problem(f"is of a run of {own[1]} ranks", path) for path, own in said.items() if own is not None]
    else:
        count = Counter(ranks.values())
        problems += [Problem(f"is rank {rank}, as another file is", p) for p, rank in ranks.items() if count[rank] > 1]
        missing = islice((rank for rank in range(sizes.pop()) if rank not in count), _MOST_MISSING)
        problems += [Problem("no file is of this rank", f"rank {rank}") for rank in missing]
    if len({own is None for own in said.values()}) > 1:
        problems += [
            Problem("does not say its rank, other files do", path) for path, own in said.items() if own is None
        ]
    if problems:
        raise CkptError(f"{pattern} does not name the files of all ranks of one run", hint=_ALL, problems=problems)
    wrong = [path for path, own in said.items() if own is not None and numbers[path] != own[0]]
    notes = [f"{path} was saved by rank {ranks[path]}, whatever its name says" for path in wrong]
    return sorted(ranks, key=lambda path: ranks[path]), notes


def _numbers(paths: Sequence[str]) -> dict[str, int]:
    """The number in each file's name that tells it from the others; its place in the list where there is none."""
    digits = [[int(found) for found in re.findall(r"\d{1,9}", os.path.basename(path))] for path in paths]
    lengths = {len(found) for found in digits}
    if len(lengths) == 1 and len(paths) > 1:
        varying = [column for column in zip(*digits) if len(set(column)) > 1]
        if len(varying) == 1:
            return dict(zip(paths, varying[0]))
    return {path: own[-1] if len(paths) == 1 and own else at for at, (path, own) in enumerate(zip(paths, digits))}


# One checkpoint of many


def _union(ranks: Sequence[Checkpoint]) -> list[str]:
    return list(dict.fromkeys(section.path for rank in ranks for section in rank.sections))


def _section(rank: Checkpoint, path: str) -> Section | None:
    return next((section for section in rank.sections if section.path == path), None)


class _Merge:
    """Makes one section of those of all ranks, and gathers what stands against it."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.hint = _ALL

    def counters(self, ranks: Sequence[Checkpoint]) -> None:
        """What counts steps beside the state dicts says whether the files are of one step."""
        said = [plain_values(rank) for rank in ranks]
        for key in said[0]:
            values = [own[key] for own in said if key in own]
            if _COUNTER.search(key.lower()) and not all(type(v) is type(values[0]) and v == values[0] for v in values):
                self._differs(key, values)

    def _differs(self, key: str, values: Sequence[object]) -> None:
        rank = next(at for at, value in enumerate(values) if value != values[0])
        self.problems.append(Problem(f"is {values[0]!r} on rank 0, and {values[rank]!r} on rank {rank}", key))

    def section(self, path: str, own: Sequence[Section | None]) -> Section:
        first = next(section for section in own if section is not None)
        if first.kind == "optimizer" and first.mapping is not None:
            found: list[TensorEntry] = []
            mapping = self._value([_ABSENT if s is None else s.mapping for s in own], found, path)
            return replace(first, tensors=tuple(found), mapping=mapping)
        by_key = [{} if section is None else section.by_key() for section in own]
        keys = dict.fromkeys(key for entries in by_key for key in entries)
        entries = [self._entry([entries.get(key) for entries in by_key]) for key in keys]
        return replace(
            first,
            tensors=tuple(entry for entry in entries if isinstance(entry, TensorEntry)),
            extras=tuple(entry for entry in entries if isinstance(entry, ExtraEntry)),
        )

    def _value(self, values: Sequence[Any], found: list[TensorEntry], way: str) -> Any:
        """The value at `way` of an optimizer's state dict, of those of all ranks; its tensors are added to `found`."""
        have = [value for value in values if value is not _ABSENT]
        first = have[0]
        if type(first) in (bool, int, float, str) and any(v != first for v in have):
            self._differs(way, have)
        if isinstance(first, TensorEntry):
            entry = self._entry([value if isinstance(value, TensorEntry) else None for value in values])
            found.extend([entry] if isinstance(entry, TensorEntry) else [])
            return entry
        if isinstance(first, Mapping):
            maps = [value if isinstance(value, Mapping) else {} for value in values]
            keys = dict.fromkeys(key for own in maps for key in own)
            return {
                key: self._value([own.get(key, _ABSENT) for own in maps], found, f"{way}.{key}".lstrip("."))
                for key in keys
            }
        if isinstance(first, (list, tuple)) and all(type(v) is type(first) and len(v) == len(first) for v in have):
            columns = [[v[at] if v is not _ABSENT else v for v in values] for at in range(len(first))]
            return type(first)(self._value(column, found, f"{way}.{at}") for at, column in enumerate(columns))
        return first

    def _entry(self, own: Sequence[TensorEntry | ExtraEntry | None]) -> TensorEntry | ExtraEntry:
        first = next(entry for entry in own if entry is not None)
        if any(entry is not None and sharded_tensor.is_sharded(entry) for entry in own):
            return self._tried(_of_sharded, own, first)
        if any(entry is not None and dtensor.is_dtensor(entry) for entry in own):
            return self._tried(_of_dtensors, own, first)
        parts = tuple(entry if isinstance(entry, TensorEntry) else None for entry in own)
        if not isinstance(first, TensorEntry) or any(part is not None and part.storage is None for part in parts):
            return first
        if is_flat(first.key):
            return self._tried(_laid_end_to_end, parts, first)
        return replace(first, payload=RankParts(parts, whole=False))

    def _tried(self, make: Callable[[Any], T], own: Any, first: T) -> T:
        try:
            return make(own)
        except CkptError as error:
            self.hint = error.hint if isinstance(error, dtensor.Unplaced) else self.hint
            self.problems += error.problems or [Problem(error.message, getattr(first, "key", ""))]
            return first


def _of_sharded(own: Sequence[TensorEntry | ExtraEntry | None]) -> TensorEntry:
    key = next(entry.key for entry in own if entry is not None)
    if not all(entry is not None and sharded_tensor.is_sharded(entry) for entry in own):
        raise _unfit("a sharded tensor on some ranks, and not on all", key)
    found = [sharded_tensor.local_part(entry) for entry in own if entry is not None]
    if len({(part.shape, part.dtype) for part in found}) > 1:
        raise _unfit("has another shape or dtype on other ranks", key)
    shape, at = found[0].shape, 0
    for part in found:
        if part.local is not None and part.offset != at:
            raise _unfit("is not cut along its first dimension, rank by rank", key)
        at += 0 if part.local is None else part.local.numel
    if at != prod(shape):
        raise _unfit(f"its parts hold {at:,} of {prod(shape):,} elements", key)
    return _whole(key, shape, tuple(part.local for part in found))


def _of_dtensors(own: Sequence[TensorEntry | ExtraEntry | None]) -> TensorEntry:
    key = next(entry.key for entry in own if entry is not None)
    if not all(entry is not None and dtensor.is_dtensor(entry) for entry in own):
        raise _unfit("a DTensor on some ranks, and not on all", key)
    found = [dtensor.local_box(entry) for entry in own if entry is not None]
    shape, dtype = found[0].shape, found[0].dtype
    if len({(box.shape, box.dtype, box.layout) for box in found}) > 1:
        raise _unfit("has another shape, dtype, mesh or placement on other ranks", key)
    by_corner: defaultdict[tuple[int, ...], list[TensorEntry]] = defaultdict(list)
    for box in found:
        if box.local.numel:
            by_corner[box.offsets].append(box.local)
    held = sum(copies[0].numel for copies in by_corner.values())
    if held != prod(shape):
        raise _unfit(f"its parts hold {held:,} of {prod(shape):,} elements", key)
    copies = tuple(tuple(group) for group in by_corner.values() if len(group) > 1)
    parts = RankParts(tuple(box.local for box in found), whole=True, copies=copies, of_dtensors=True)
    boxes = {corner: group[0] for corner, group in by_corner.items()}
    return TensorEntry(key, dtype, shape, contiguous_stride(shape), 0, _in_boxes(shape, dtype, boxes), payload=parts)


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
    return _whole(have[0].key, (sum(part.numel for part in have),), tuple(parts))


def _whole(key: str, shape: tuple[int, ...], parts: tuple[TensorEntry | None, ...]) -> TensorEntry:
    """The entry of `shape` that the parts are when they are laid end to end."""
    have = [part for part in parts if part is not None]
    if not all(part.is_contiguous for part in have):
        raise _unfit("a part of it is a strided view", key)
    dtype = have[0].dtype if have else "float32"
    storage = concatenated(across(have, 0, prod(shape)))
    return TensorEntry(key, dtype, shape, contiguous_stride(shape), 0, storage, payload=RankParts(parts, whole=True))


def _unfit(message: str, key: str) -> CkptError:
    return CkptError(message, hint=_ALL, problems=[Problem(message, key)])
