"""The files that the ranks of one run wrote, each its own, read as one checkpoint: a quoted glob names them.

A tensor that is cut over the ranks becomes one entry whose storage lies in several files. Of every other tensor all
ranks' entries are kept, since only the model's shapes tell a part of a tensor from a copy of it.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice

from ckpttool.checkpoint import Checkpoint, ExtraEntry, Section, TensorEntry
from ckpttool.errors import CkptError, Problem
from ckpttool.formats.ranks import dtensor, sharded_tensor
from ckpttool.formats.ranks.parts import ALL_RANKS
from ckpttool.formats.recognise_file import sniff
from ckpttool.formats.torch import zip_file as torch_zip
from ckpttool.io.files import glob
from ckpttool.io.paths import name
from ckpttool.keys import is_flat
from ckpttool.words import some

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
    from ckpttool.formats.ranks.merge import Merge  # a diff of two files needs none of it

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


def _is_part(entry: TensorEntry | ExtraEntry) -> bool:
    return entry.payload is not None and (sharded_tensor.is_sharded(entry) or dtensor.is_dtensor(entry))


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
