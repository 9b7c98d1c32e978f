"""The files that the ranks of one run saved, read as one checkpoint."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from math import prod
from typing import Any, TypeVar

from ckpttool.core.checkpoint import (
    Checkpoint,
    ExtraEntry,
    Lazy,
    Part,
    Section,
    Span,
    Storage,
    TensorEntry,
    in_row_major,
)
from ckpttool.core.dtypes import itemsize
from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.keys import dotted, is_flat
from ckpttool.core.text import shell, some
from ckpttool.evaluate.chunks import Box, across, assembled, concatenated
from ckpttool.evaluate.compare import elements, same_values
from ckpttool.formats.detect import sniff
from ckpttool.formats.ranks import sharded
from ckpttool.formats.ranks.sharded import ALL_RANKS, RankParts
from ckpttool.formats.torch import zip_file as torch_zip
from ckpttool.formats.torch.nodes import pairs_of
from ckpttool.formats.torch.tensors import MOST
from ckpttool.io.files import glob
from ckpttool.io.paths import join, name, parent

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
        if any(map(sharded.is_sharded, have)):
            return self._tried(_of_sharded, own, first)
        if any(map(sharded.is_dtensor, have)):
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
            self.hint = error.hint if isinstance(error, sharded.Unplaced) else self.hint
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
    if not all(entry is not None and sharded.is_sharded(entry) for entry in own):
        raise _unfit("a sharded tensor on some ranks, and not on all", key)
    found = [sharded.local_part(entry) for entry in own if entry is not None]
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
    if not all(entry is not None and sharded.is_dtensor(entry) for entry in own):
        raise _unfit("a DTensor on some ranks, and not on all", key)
    found = [sharded.local_box(entry) for entry in own if entry is not None]
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


NAME = "rank_files"  # in the table of formats
_RANK = re.compile(r"(rank[-_.]?)\d+", re.IGNORECASE)  # in a file's name
_MOST_MISSING = 20  # ranks that are listed: a hostile file may speak of millions


def one_rank(checkpoint: Checkpoint) -> tuple[str, ...]:
    """A sentence where the file holds one rank's part of its tensors; none where it does not."""
    if checkpoint.format == NAME:
        return ()
    entries = [entry for section in checkpoint.sections for entry in section.entries]
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

    merge = Merge()
    places = dict.fromkeys(section.path for rank in ranks for section in rank.sections)
    sections = tuple(merge.section(path, [_section(rank, path) for rank in ranks]) for path in places)
    merge.others(ranks)
    shown = [f"rank {rank} {os.path.basename(path)}" for rank, path in enumerate(ordered)]
    notes.append(f"the files of {len(ordered)} ranks: {some(shown, 8)}")
    if merge.problems:
        raise CkptError(
            f"the files of {pattern} are not the parts of one checkpoint", hint=merge.hint, problems=merge.problems
        )
    return Checkpoint(
        pattern,
        NAME,
        sum(rank.nbytes for rank in ranks),
        sections,
        others=ranks[0].others,
        objects=ranks[0].objects,
        container=ranks[0].container,
        notes=(*notes, *merge.notes),
        unreached=tuple(
            replace(found, path=f"rank {number}: {found.path}")
            for number, rank in enumerate(ranks)
            for found in rank.unreached
        ),
    )


def _read_file(path: str) -> Checkpoint:
    kind = sniff(path)
    if kind == "torch_legacy":
        new = shell("ckpttool", "remap", path, "-o", join(parent(path), f"zip.{name(path)}"))
        raise CkptError(
            f"{path} is in the format before torch 1.6, which files of ranks cannot have",
            hint=f"write each file again: {new}",
        )
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
            if sharded.is_sharded(entry):
                part = sharded.local_part(entry)
                return part.rank, part.world_size
            if sharded.is_dtensor(entry):
                return sharded.rank_and_world_size(entry)
    return None


def _is_part(entry: TensorEntry | ExtraEntry) -> bool:
    return entry.payload is not None and (sharded.is_sharded(entry) or sharded.is_dtensor(entry))


def _in_rank_order(pattern: str, said: Mapping[str, tuple[int, int] | None]) -> tuple[list[str], list[str]]:
    """The files from rank 0 on, and what is odd about their names."""
    numbers, told = _numbers(list(said)), {path: own[0] for path, own in said.items() if own is not None}
    ranks = told or numbers
    sizes = {own[1] for own in said.values() if own is not None} or {max(len(ranks), *ranks.values(), 0)}
    why = "other files do" if told else "nor does a number in its name"
    problems = [Problem(f"does not say its rank, {why}", path) for path in said if path not in ranks]
    if len(sizes) > 1:
        problems += [Problem(f"is of a run of {own[1]} ranks", path) for path, own in said.items() if own is not None]
    else:
        count = Counter(ranks.values())
        problems += [Problem(f"is rank {rank}, as another file is", p) for p, rank in ranks.items() if count[rank] > 1]
        missing = islice((rank for rank in range(sizes.pop()) if rank not in count), _MOST_MISSING)
        problems += [Problem("no file is of this rank", f"rank {rank}") for rank in missing]
    if problems:
        raise CkptError(f"{pattern} does not name the files of all ranks of one run", hint=ALL_RANKS, problems=problems)
    wrong = [path for path, rank in told.items() if numbers.get(path, rank) != rank]
    notes = [f"{path} was saved by rank {ranks[path]}, whatever its name says" for path in wrong]
    return sorted(ranks, key=lambda path: ranks[path]), notes


def _numbers(paths: Sequence[str]) -> dict[str, int]:
    """The number in each path that tells it from the others, of several the one that counts them. Empty if none."""
    digits = [[int(found) for found in re.findall(r"\d{1,9}", path)] for path in paths]
    alike = len({len(found) for found in digits}) == 1
    varying = {column for column in zip(*digits) if len(set(column)) > 1} if alike else set()
    counting = {column for column in varying if sorted(column) == list(range(len(paths)))}
    telling = varying if len(varying) == 1 else counting
    return dict(zip(paths, *telling)) if len(telling) == 1 else {}


def _section(rank: Checkpoint, path: str) -> Section | None:
    return next((section for section in rank.sections if section.path == path), None)
