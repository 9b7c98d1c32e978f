"""Read the files that the ranks of one run saved as one checkpoint."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from math import prod
from typing import Any

from ckpttool.containers.chunks import Chunk, assemble, cover_problem, row_major_data
from ckpttool.containers.nodes import pairs_of
from ckpttool.containers.rank_shards import (
    ALL_RANKS,
    DTENSOR,
    SHARDED_TENSOR,
    RankParts,
    Unsupported,
    local_shard,
    rank_and_world_size,
    shard_kind,
)
from ckpttool.containers.tensors import MOST
from ckpttool.containers.tree import Container
from ckpttool.core.checkpoint import (
    Checkpoint,
    ExtraEntry,
    Lazy,
    Part,
    Section,
    Storage,
    TensorEntry,
    in_row_major,
)
from ckpttool.core.dtypes import itemsize
from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.text import dotted, is_flat, shell, some
from ckpttool.evaluate.chunks import across, concatenated
from ckpttool.evaluate.compare import same_values
from ckpttool.formats import torch_zip
from ckpttool.formats.registry import recognise
from ckpttool.io.files import glob
from ckpttool.io.paths import join, name, parent

NAME = "rank_files"  # in the table of formats
MOST_MISSING = 20  # ranks that are listed: a hostile file may claim millions

# Words in the name of a number that must be equal on all ranks.
_COUNTERS = frozenset(
    ("step", "steps", "epoch", "epochs", "iter", "iters", "iteration", "iterations")
)
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")  # in snake_case or CamelCase
_ABSENT = object()


def read(pattern: str) -> Checkpoint:
    """Read the files matching `pattern` as one checkpoint.

    Raises `CkptError`, all problems at once, if a rank's file is missing or given twice, if the
    files come from runs with different numbers of ranks, or if torch.save did not write one of
    them.
    """
    paths = glob(pattern)
    if not paths:
        raise CkptError(
            f"no file matches {pattern}",
            hint="check the path; quote the pattern, so that the shell keeps it",
        )
    return assembled(pattern, {path: rank_file(path) for path in paths})


def rank_file(path: str) -> Checkpoint:
    """Read the file of one rank. Raises `CkptError` if torch.save did not write it."""
    kind = recognise(path).format.name
    if kind == "torch_legacy":
        new = shell("ckpttool", "remap", path, "-o", join(parent(path), f"zip.{name(path)}"))
        raise CkptError(
            f"{path} is in the format before torch 1.6, which files of ranks cannot have",
            hint=f"write each file again: {new}",
        )
    if kind != "torch_zip":
        raise CkptError(
            f"{path} was not written by torch.save, but a glob names the files that the ranks"
            " of one run saved",
            hint="name the one checkpoint that you want to read",
        )
    return torch_zip.read(path)


def assembled(pattern: str, files: Mapping[str, Checkpoint]) -> Checkpoint:
    """Return the files of all ranks, by their paths, as one checkpoint, which `pattern` names."""
    paths = list(files)
    # rank and number of ranks, if a tensor of the file is sharded
    saved_by = {path: saved_by_rank(file) for path, file in files.items()}
    if len(paths) == 1 and saved_by[paths[0]] is None:
        return replace(files[paths[0]], source=pattern)
    ordered, notes = _in_rank_order(pattern, saved_by)
    ranks = [files[path] for path in ordered]
    by_path = [{section.path: section for section in rank.sections} for rank in ranks]
    merge = _Merge()
    sections = tuple(
        merge.section(path, [sections.get(path) for sections in by_path])
        for path in dict.fromkeys(path for sections in by_path for path in sections)
    )
    merge.others(ranks)
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
        objects=ranks[0].objects,
        container=ranks[0].container,
        notes=(*notes, *merge.notes),
        unreached=tuple(
            own.of(f"rank {number}") for number, rank in enumerate(ranks) for own in rank.unreached
        ),
    )


# Ranks


def saved_by_rank(file: Checkpoint) -> tuple[int, int] | None:
    """Return the rank that saved the file, and the number of ranks; None if no tensor of it is
    sharded.
    """
    for section in file.sections:
        for entry in section.by_key().values():
            if shard_kind(entry):
                return rank_and_world_size(entry)
    return None


def _in_rank_order(
    pattern: str, saved_by: Mapping[str, tuple[int, int] | None]
) -> tuple[list[str], list[str]]:
    numbers = _numbers(list(saved_by))
    known = {path: found for path, found in saved_by.items() if found is not None}
    ranks = {path: rank for path, (rank, _) in known.items()} or numbers
    sizes = {size for _, size in known.values()} or {max(len(ranks), *ranks.values(), 0)}
    why = "other files do" if known else "nor does a number in its name"
    problems = [
        Problem(f"does not say its rank, {why}", path) for path in saved_by if path not in ranks
    ]
    if len(sizes) > 1:
        problems += [
            Problem(f"comes from a run of {size} ranks", path) for path, (_, size) in known.items()
        ]
    else:
        count = Counter(ranks.values())
        problems += [
            Problem(f"is rank {rank}, as another file is", p)
            for p, rank in ranks.items()
            if count[rank] > 1
        ]
        missing = islice((rank for rank in range(sizes.pop()) if rank not in count), MOST_MISSING)
        problems += [Problem("no file is of this rank", f"rank {rank}") for rank in missing]
    if problems:
        raise CkptError(
            f"{pattern} does not name the files of all ranks of one run",
            hint=ALL_RANKS,
            problems=problems,
        )
    notes = [
        f"rank {rank} saved {path}, although the number in its name is {numbers[path]}"
        for path, (rank, _) in known.items()
        if numbers.get(path, rank) != rank
    ]
    return sorted(ranks, key=lambda path: ranks[path]), notes


def _numbers(paths: Sequence[str]) -> dict[str, int]:
    """Return the number in which the paths differ, or of several the number that counts the paths;
    empty if none.
    """
    digits = [[int(number) for number in re.findall(r"\d{1,9}", path)] for path in paths]
    alike = len({len(numbers) for numbers in digits}) == 1
    varying = {column for column in zip(*digits) if len(set(column)) > 1} if alike else set()
    counting = {column for column in varying if sorted(column) == list(range(len(paths)))}
    telling = varying if len(varying) == 1 else counting
    return dict(zip(paths, *telling)) if len(telling) == 1 else {}


# Sections


class _Merge:
    """Merges the sections of all ranks, and collects problems."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.hint = ALL_RANKS

    def others(self, ranks: Sequence[Checkpoint]) -> None:
        """Check the other entries: rank 0's are kept, and the counters of steps must be equal."""
        values = []
        for rank in ranks:
            assert isinstance(rank.container, Container)
            pairs = pairs_of(rank.container.pickle.root) or {}
            values.append(
                {
                    k: v
                    for k, v in pairs.items()
                    if type(k) is str and type(v) in (bool, int, float, str)
                }
            )
        lost = dict.fromkeys(
            key for rank in ranks for key in rank.others if key not in ranks[0].others
        )
        self.notes += [f"not copied: {key}, which rank 0 does not have" for key in lost]
        for key in dict.fromkeys(key for plain in values for key in plain):
            if not _COUNTERS.isdisjoint(word.lower() for word in _WORD.findall(key)):
                self._is_same(key, [plain.get(key, _ABSENT) for plain in values])

    def _is_same(self, path: str, values: Sequence[Any]) -> bool:
        """Return True if all ranks that have the value have the same, or one of the same kind; else
        note a problem.
        """
        ranks: dict[str, int] = {}
        for rank, value in enumerate(values):
            if value is not _ABSENT:
                ranks.setdefault(_described(value), rank)
        if len(ranks) > 1:
            (one, first), (other, second), *_ = ranks.items()
            self.problems.append(
                Problem(f"is {one} on rank {first}, and {other} on rank {second}", path)
            )
        return len(ranks) == 1

    def section(self, path: str, sections: Sequence[Section | None]) -> Section:
        first = next(section for section in sections if section is not None)
        self._is_same(path, [_ABSENT if section is None else section.kind for section in sections])
        if first.mapping is not None:
            tensors: list[TensorEntry] = []
            mapping = self._value(
                [_ABSENT if s is None else s.mapping for s in sections], tensors, path
            )
            return replace(first, tensors=tuple(tensors), mapping=mapping)
        by_key = [{} if section is None else section.by_key() for section in sections]
        keys = dict.fromkeys(key for entries in by_key for key in entries)
        merged = [
            self._entry([entries.get(key) for entries in by_key], dotted(path, key)) for key in keys
        ]
        return replace(
            first,
            modules=self._modules(path, sections),
            tensors=tuple(entry for entry in merged if isinstance(entry, TensorEntry)),
            extras=tuple(entry for entry in merged if isinstance(entry, ExtraEntry)),
        )

    def _modules(
        self, path: str, sections: Sequence[Section | None]
    ) -> Mapping[str, object] | None:
        """Return the versions of modules (``_metadata``) of the first rank that has some."""
        by_rank = {
            rank: section.modules for rank, section in enumerate(sections) if section is not None
        }
        first = next((rank for rank, modules in by_rank.items() if modules is not None), None)
        modules = None if first is None else by_rank[first]
        other = [f"rank {rank}" for rank, others in by_rank.items() if others != modules]
        if other:
            self.notes.append(
                f"{dotted(path, '_metadata')} (module versions) differs or is missing on"
                f" {some(other, 8)}: "
                f"rank {first}'s is used"
            )
        return modules

    def _value(self, values: Sequence[Any], tensors: list[TensorEntry], path: str) -> Any:
        """Merge the values at `path` of an optimizer's state dict. Its tensors are added to
        `tensors`.
        """
        first = next(value for value in values if value is not _ABSENT)
        if not self._is_same(path, values):
            return first
        if isinstance(first, (TensorEntry, ExtraEntry)):
            entry = self._entry([None if value is _ABSENT else value for value in values], path)
            tensors.extend([entry] if isinstance(entry, TensorEntry) else [])
            return entry
        if isinstance(first, Mapping):
            maps = [{} if value is _ABSENT else value for value in values]
            return {
                key: self._value(
                    [one.get(key, _ABSENT) for one in maps], tensors, f"{path}.{key}".lstrip(".")
                )
                for key in dict.fromkeys(key for one in maps for key in one)
            }
        if isinstance(first, (list, tuple)):
            columns = [
                [v[at] if v is not _ABSENT else v for v in values] for at in range(len(first))
            ]
            return type(first)(
                self._value(column, tensors, f"{path}.{at}") for at, column in enumerate(columns)
            )
        return first

    def _entry(
        self, entries: Sequence[TensorEntry | ExtraEntry | None], path: str
    ) -> TensorEntry | ExtraEntry:
        present = [entry for entry in entries if entry is not None]
        first = present[0]
        try:
            kind = next(
                (kind for kind in (SHARDED_TENSOR, DTENSOR) if kind in map(shard_kind, present)),
                None,
            )
            if kind is not None:
                return _assembled(entries, first.key, kind)
            parts = [
                entry
                for entry in present
                if isinstance(entry, TensorEntry) and entry.storage is not None
            ]
            if len(parts) == len(present):
                by_rank = tuple(
                    entry if isinstance(entry, TensorEntry) else None for entry in entries
                )
                if is_flat(first.key):
                    return _end_to_end(by_rank, first.key)
                return replace(
                    parts[0], payload=RankParts(by_rank, whole=False, copies=(tuple(parts),))
                )
        except CkptError as error:
            self.hint = error.hint if isinstance(error, Unsupported) else self.hint
            self.problems += error.problems or [Problem(error.message, first.key)]
            return first
        # Objects, and tensors that are not dense: rank 0's, if all ranks have the same.
        if not all(same_values(first, entry) for entry in present[1:]):
            if any(isinstance(entry, TensorEntry) for entry in present):
                self.problems.append(
                    Problem("differs between the ranks, and has no parts to assemble", path)
                )
            else:
                self.notes.append(f"{path} differs between the ranks: rank 0's is used")
        return first


def _described(value: Any) -> str:
    """Return a plain value as text, and only the kind of any other value."""
    if isinstance(value, TensorEntry):
        return "a tensor"
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    if type(value) is int and abs(value) >= MOST:
        return hex(value)  # Python writes it whatever its length
    return {dict: "a dict", ExtraEntry: "an object"}.get(type(value)) or repr(value)


def _assembled(
    entries: Sequence[TensorEntry | ExtraEntry | None], key: str, kind: str
) -> TensorEntry:
    sharded = [entry for entry in entries if entry is not None and shard_kind(entry) == kind]
    if len(sharded) < len(entries):
        raise _misfit(f"a {kind} on some ranks, and not on all", key)
    shards = [local_shard(entry) for entry in sharded]
    if len({(shard.shape, shard.dtype, shard.layout) for shard in shards}) > 1:
        raise _misfit("its shape, dtype or placements differ between the ranks", key)
    shape, dtype = shards[0].shape, shards[0].dtype
    copies: dict[Chunk, list[TensorEntry]] = {}
    for shard in shards:
        if shard.chunk is not None and shard.local is not None and shard.local.numel:
            copies.setdefault(shard.chunk, []).append(shard.local)
    problem = cover_problem(shape, copies)
    if problem is not None:
        raise _misfit(problem, key)
    # What reads the parts of a flat parameter takes them to be in the order of the ranks.
    if kind == SHARDED_TENSOR and list(copies) != sorted(copies, key=lambda chunk: chunk.offsets):
        raise _misfit("its chunks are not in the order of the ranks", key)
    parts = RankParts(
        tuple(shard.local for shard in shards),
        whole=True,
        copies=tuple(map(tuple, copies.values())),
        of_dtensors=kind == DTENSOR,
    )
    spans = [local[0].span for local in copies.values()]
    if len(spans) == 1 and spans[0] is not None:
        return in_row_major(key, dtype, shape, Storage(spans[0]), payload=parts)

    def produce() -> Iterator[Part]:
        data = [(chunk, row_major_data(local[0])) for chunk, local in copies.items()]
        return assemble(shape, itemsize(dtype), data)

    storage = Storage(Lazy(prod(shape) * itemsize(dtype), produce))
    return in_row_major(key, dtype, shape, storage, payload=parts)


def _end_to_end(parts: tuple[TensorEntry | None, ...], key: str) -> TensorEntry:
    """Concatenate a flat parameter of which every rank holds a plain tensor."""
    present = [part for part in parts if part is not None]
    dtype, numel = present[0].dtype, sum(part.numel for part in present)
    if any(len(part.shape) != 1 or part.dtype != dtype for part in present):
        raise _misfit(
            "it has the name of a flat parameter, but is not one-dimensional or not of one dtype",
            key,
        )
    storage = concatenated(across(present, 0, numel))
    return in_row_major(key, dtype, (numel,), storage, payload=RankParts(parts, whole=True))


def _misfit(message: str, key: str) -> CkptError:
    return CkptError(message, hint=ALL_RANKS, problems=[Problem(message, key)])
