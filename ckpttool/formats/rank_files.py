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
    LocalShard,
    RankParts,
    Unsupported,
    local_shard,
    rank_and_world_size,
    shard_kind,
)
from ckpttool.containers.tensors import MOST
from ckpttool.containers.tree import Container
from ckpttool.core.checkpoint import (
    AnyEntry,
    Checkpoint,
    ExtraEntry,
    Lazy,
    Part,
    Section,
    Storage,
    TensorEntry,
    Unreached,
    in_row_major,
)
from ckpttool.core.dtypes import itemsize
from ckpttool.core.errors import CkptError, Problem, same_problem
from ckpttool.core.strides import Shape
from ckpttool.core.tables import present
from ckpttool.core.text import Info, dotted, is_flat, shell, some
from ckpttool.evaluate.chunks import across, concatenated
from ckpttool.evaluate.compare import same_values
from ckpttool.formats import torch_zip
from ckpttool.formats.registry import recognize
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


def assembled(pattern: str, files: Mapping[str, Checkpoint]) -> Checkpoint:
    """Return the files of all ranks, by their paths, as one checkpoint, which `pattern` names."""
    paths = list(files)
    saved_by = {path: saved_by_rank(file) for path, file in files.items()}
    if len(paths) == 1 and saved_by[paths[0]] is None:
        return replace(files[paths[0]], source=pattern)
    ordered, notes = _in_rank_order(pattern, saved_by)
    ranks = [files[path] for path in ordered]
    by_path: dict[str, list[Section | None]] = {}  # each section, of each rank
    for rank, checkpoint in enumerate(ranks):
        for section in checkpoint.sections:
            by_path.setdefault(section.path, [None] * len(ranks))[rank] = section
    merge = _Merge()
    merged = tuple(merge.section(path, sections) for path, sections in by_path.items())
    merge.others(ranks)
    unreached: list[Unreached] = []
    for rank, checkpoint in enumerate(ranks):
        unreached += [storage.of(f"rank {rank}") for storage in checkpoint.unreached]
    shown = [f"rank {rank} {os.path.basename(path)}" for rank, path in enumerate(ordered)]
    notes.append(Info(f"the files of {len(ordered)} ranks: {some(shown, 8)}", "reader"))
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
        merged,
        others=ranks[0].others,
        objects=ranks[0].objects,
        container=ranks[0].container,
        notes=(*notes, *merge.notes),
        unreached=tuple(unreached),
    )


def rank_file(path: str) -> Checkpoint:
    """Read the file of one rank. Raises `CkptError` if torch.save did not write it."""
    kind = recognize(path).format.name
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
    """Return the paths in the order of the ranks, and notes on names that say another rank."""
    numbers = _numbers(list(saved_by))
    ranks: dict[str, int] = {}
    world_sizes: dict[str, int] = {}
    for path, rank_and_size in saved_by.items():
        if rank_and_size is not None:
            ranks[path], world_sizes[path] = rank_and_size
    why = "but other files do" if ranks else "nor does a number in its name"
    ranks = ranks or numbers
    unknown = [path for path in saved_by if path not in ranks]
    problems = same_problem(f"does not say its rank, {why}", unknown)
    if len(set(world_sizes.values())) > 1:
        for path, size in world_sizes.items():
            problems.append(Problem(f"comes from a run of {size} ranks", path))
    else:
        # without a size that the files say, only ranks below the highest one can be missing
        world_size = 1 + max(ranks.values(), default=-1)
        problems += _rank_problems(ranks, next(iter(world_sizes.values()), world_size))
    if problems:
        raise CkptError(
            f"{pattern} does not name the files of all ranks of one run",
            hint=ALL_RANKS,
            problems=problems,
        )
    notes = []
    for path in world_sizes:
        number = numbers.get(path, ranks[path])
        if number != ranks[path]:
            text = f"rank {ranks[path]} saved {path}, although the number in its name is {number}"
            notes.append(text)
    return sorted(ranks, key=lambda path: ranks[path]), notes


def _rank_problems(ranks: Mapping[str, int], world_size: int) -> list[Problem]:
    """List the ranks of which there are several files, or none."""
    count = Counter(ranks.values())
    problems = []
    for path, rank in ranks.items():
        if count[rank] > 1:
            problems.append(Problem(f"is rank {rank}, as another file is", path))
    missing = (rank for rank in range(world_size) if rank not in count)
    for rank in islice(missing, MOST_MISSING):
        problems.append(Problem("no file is of this rank", f"rank {rank}"))
    return problems


def _numbers(paths: Sequence[str]) -> dict[str, int]:
    """Return the number in which the paths differ, or of several the number that counts the paths;
    empty if none::

        run2/rank_0.pt  run2/rank_1.pt      0 and 1: the 2 is in both paths
    """
    # a longer number counts as several numbers, which are compared like any others
    by_path = [list(map(int, re.findall(r"\d{1,9}", path))) for path in paths]
    if len(set(map(len, by_path))) != 1:
        return {}
    # the first number of each path, the second one, ...; two that are equal in all paths
    # (step0_rank0, step1_rank1) count as one
    columns = set(zip(*by_path))
    varying = [column for column in columns if len(set(column)) > 1]
    if len(varying) > 1:
        counted = list(range(len(paths)))
        varying = [column for column in varying if sorted(column) == counted]
    if len(varying) != 1:
        return {}
    return dict(zip(paths, varying[0]))


# Sections


def _counters(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the counters of steps at the root of a rank's file."""
    assert isinstance(checkpoint.container, Container)
    counters: dict[str, Any] = {}
    for key, value in (pairs_of(checkpoint.container.pickle.root) or {}).items():
        if type(key) is not str or type(value) not in (bool, int, float, str):
            continue
        if not _COUNTERS.isdisjoint(map(str.lower, _WORD.findall(key))):
            counters[key] = value
    return counters


class _Merge:
    """Merges the sections of all ranks, and collects problems."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.hint = ALL_RANKS

    def others(self, ranks: Sequence[Checkpoint]) -> None:
        """Check the other entries: rank 0's are kept, and the counters of steps must be equal."""
        lost: dict[str, None] = {}
        by_key: dict[str, list[Any]] = {}  # each counter, of each rank
        for rank, checkpoint in enumerate(ranks):
            lost.update(dict.fromkeys(checkpoint.others))
            for key, value in _counters(checkpoint).items():
                by_key.setdefault(key, [_ABSENT] * len(ranks))[rank] = value
        for key in ranks[0].others:
            lost.pop(key, None)
        self.notes += [f"not copied: {key}, which rank 0 does not have" for key in lost]
        for key, values in by_key.items():
            self._require_same(key, values)

    def _require_same(self, path: str, values: Sequence[Any]) -> None:
        difference = _first_difference(values)
        if difference is not None:
            self.problems.append(Problem(difference, path))

    def section(self, path: str, sections: Sequence[Section | None]) -> Section:
        """Return the section at the path, of which each rank has a part, or None."""
        by_rank = {rank: section for rank, section in enumerate(sections) if section is not None}
        first = next(iter(by_rank.values()))
        kinds: list[Any] = [_ABSENT] * len(sections)
        mappings: list[Any] = list(kinds)
        by_key: dict[str, list[AnyEntry | None]] = {}  # each entry, of each rank
        for rank, section in by_rank.items():
            kinds[rank] = section.kind
            mappings[rank] = section.mapping
            for key, entry in section.by_key().items():
                by_key.setdefault(key, [None] * len(sections))[rank] = entry
        self._require_same(path, kinds)
        if first.mapping is not None:
            tensors: list[TensorEntry] = []
            mapping = self._value(mappings, tensors, path)
            return replace(first, tensors=tuple(tensors), mapping=mapping)
        merged = [self._entry(entries, dotted(path, key)) for key, entries in by_key.items()]
        return replace(
            first,
            modules=self._modules(path, by_rank),
            tensors=tuple(entry for entry in merged if isinstance(entry, TensorEntry)),
            extras=tuple(entry for entry in merged if isinstance(entry, ExtraEntry)),
        )

    def _modules(self, path: str, sections: Mapping[int, Section]) -> Mapping[str, object] | None:
        """Return the versions of modules (``_metadata``) of the first rank that has some."""
        by_rank = {rank: section.modules for rank, section in sections.items()}
        first = next((rank for rank in by_rank if by_rank[rank] is not None), None)
        if first is None:
            return None
        other = []
        for rank, modules in by_rank.items():
            if modules != by_rank[first]:
                other.append(f"rank {rank}")
        if other:
            self.notes.append(
                f"{dotted(path, '_metadata')} (module versions) differs or is missing on"
                f" {some(other, 8)}: rank {first}'s is used"
            )
        return by_rank[first]

    def _value(self, values: Sequence[Any], tensors: list[TensorEntry], path: str) -> Any:
        """Merge the values at `path` of an optimizer's state dict. Its tensors are added to
        `tensors`.
        """
        first = next(value for value in values if value is not _ABSENT)
        difference = _first_difference(values)
        if difference is not None:
            self.problems.append(Problem(difference, path))
            return first
        if isinstance(first, (TensorEntry, ExtraEntry)):
            by_rank = []
            for value in values:
                by_rank.append(None if value is _ABSENT else value)
            entry = self._entry(by_rank, path)
            if isinstance(entry, TensorEntry):
                tensors.append(entry)
            return entry
        if not isinstance(first, (Mapping, list, tuple)):
            return first
        inside: dict[Any, list[Any]] = {}
        for rank, value in enumerate(values):
            if value is _ABSENT:
                continue
            pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
            for key, part in pairs:
                inside.setdefault(key, [_ABSENT] * len(values))[rank] = part
        merged: dict[Any, Any] = {}
        for key, by_rank in inside.items():
            merged[key] = self._value(by_rank, tensors, f"{path}.{key}".lstrip("."))
        return merged if isinstance(first, Mapping) else type(first)(merged.values())

    def _entry(self, entries: Sequence[AnyEntry | None], path: str) -> AnyEntry:
        """Return the entry of which each rank has a part or a copy, or None."""
        held = [entry for entry in entries if entry is not None]
        first = held[0]
        try:
            tensor = _assembled(entries, held)
        except CkptError as error:
            if isinstance(error, Unsupported):
                self.hint = error.hint
            self.problems += error.problems or [Problem(error.message, first.key)]
            return first
        if tensor is not None:
            return tensor
        # Objects, and tensors that are not dense: rank 0's, if all ranks have the same.
        if all(same_values(first, entry) for entry in held[1:]):
            return first
        if any(isinstance(entry, TensorEntry) for entry in held):
            text = "differs between the ranks, and has no parts to assemble"
            self.problems.append(Problem(text, path))
        else:
            self.notes.append(f"{path} differs between the ranks: rank 0's is used")
        return first


def _first_difference(values: Sequence[Any]) -> str | None:
    """Return how the values of two ranks differ; None if all ranks that have the value have the
    same, or one of the same kind.
    """
    ranks: dict[str, int] = {}
    for rank, value in enumerate(values):
        if value is not _ABSENT:
            ranks.setdefault(_described(value), rank)
    if len(ranks) <= 1:
        return None
    (value, rank), (other, other_rank), *_ = ranks.items()
    return f"is {value} on rank {rank}, and {other} on rank {other_rank}"


def _described(value: Any) -> str:
    """Return a plain value as text, and only the kind of any other value."""
    if isinstance(value, TensorEntry):
        return "a tensor"
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    if type(value) is int and abs(value) >= MOST:
        return hex(value)  # Python writes it whatever its length
    return {dict: "a dict", ExtraEntry: "an object"}.get(type(value)) or repr(value)


def _assembled(entries: Sequence[AnyEntry | None], held: Sequence[AnyEntry]) -> TensorEntry | None:
    """Return the tensor of the ranks' parts; None if they are objects or not dense.

    `held` are the entries of the ranks that have one. Plain tensors become the first rank's, with
    all of them as its payload: only a model tells copies from parts. Raises `CkptError` for parts
    that do not fit.
    """
    key = held[0].key
    kinds = set(map(shard_kind, held))
    for kind in (SHARDED_TENSOR, DTENSOR):
        if kind in kinds:
            return _of_shards(entries, key, kind)
    parts = []
    for entry in held:
        if isinstance(entry, ExtraEntry) or entry.storage is None:
            return None
        parts.append(entry)
    by_rank = []
    for rank_entry in entries:
        by_rank.append(rank_entry if isinstance(rank_entry, TensorEntry) else None)
    if is_flat(key):
        return _end_to_end(tuple(by_rank), key)
    payload = RankParts(tuple(by_rank), whole=False, copies=(tuple(parts),))
    return replace(parts[0], payload=payload)


def _complete_tensor(shard: LocalShard) -> tuple[object, ...]:
    """Return what the shards of a tensor say about the complete tensor."""
    return shard.shape, shard.dtype, shard.layout


def _of_shards(entries: Sequence[AnyEntry | None], key: str, kind: str) -> TensorEntry:
    """Return the tensor whose shards, of this kind, are on all ranks. Raises `CkptError` if they do
    not fit together.
    """
    sharded = []
    for entry in entries:
        if entry is None or shard_kind(entry) != kind:
            raise _misfit(f"a {kind} on some ranks, and not on all", key)
        sharded.append(entry)
    shards = list(map(local_shard, sharded))
    if len(set(map(_complete_tensor, shards))) > 1:
        raise _misfit("its shape, dtype or placements differ between the ranks", key)
    shape, dtype = shards[0].shape, shards[0].dtype
    copies: dict[Chunk, list[TensorEntry]] = {}
    for shard in shards:
        if shard.chunk is not None and shard.local is not None and shard.local.numel:
            copies.setdefault(shard.chunk, []).append(shard.local)
    problem = cover_problem(shape, copies)
    if problem is not None:
        raise _misfit(problem, key)
    # Readers of flat parameters expect their parts in the order of the ranks.
    offsets = [chunk.offsets for chunk in copies]
    if kind == SHARDED_TENSOR and offsets != sorted(offsets):
        raise _misfit("its chunks are not in the order of the ranks", key)
    parts = RankParts(
        tuple(shard.local for shard in shards),
        whole=True,
        copies=tuple(map(tuple, copies.values())),
        of_dtensors=kind == DTENSOR,
    )
    first_copies = {chunk: equal[0] for chunk, equal in copies.items()}
    storage = _storage_of(shape, itemsize(dtype), first_copies)
    return in_row_major(key, dtype, shape, storage, payload=parts)


def _storage_of(shape: Shape, size: int, chunks: Mapping[Chunk, TensorEntry]) -> Storage:
    """Return the storage of the tensor: its only chunk's, or assembled when it is read."""

    def produce() -> Iterator[Part]:
        data = []
        for chunk, local in chunks.items():
            data.append((chunk, row_major_data(local)))
        return assemble(shape, size, data)

    spans = [local.span for local in chunks.values()]
    if len(spans) == 1 and spans[0] is not None:
        return Storage(spans[0])
    return Storage(Lazy(prod(shape) * size, produce))


def _end_to_end(parts: tuple[TensorEntry | None, ...], key: str) -> TensorEntry:
    """Concatenate a flat parameter of which every rank holds a plain tensor."""
    flat = present(parts)
    dtype = flat[0].dtype
    for part in flat:
        if len(part.shape) != 1 or part.dtype != dtype:
            raise _misfit(
                "it has the name of a flat parameter, but is not one-dimensional or not of one"
                " dtype",
                key,
            )
    numel = sum(part.numel for part in flat)
    storage = concatenated(across(flat, 0, numel))
    return in_row_major(key, dtype, (numel,), storage, payload=RankParts(parts, whole=True))


def _misfit(message: str, key: str) -> CkptError:
    return CkptError(message, hint=ALL_RANKS, problems=[Problem(message, key)])
