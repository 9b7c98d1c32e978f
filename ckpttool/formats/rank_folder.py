"""Read a folder in which each rank saved each item to a separate file.

The checkpoint manager of verl saves ``model_world_size_2_rank_0.pt``, ``optim_...`` and
``extra_state_...``. torch_checkpointing saves ``model_0.pt``, ``optimizer_0.pt``, ``step_0.pt``,
and ``metadata.pkl`` if it can load the items into another number of ranks. Each item with the
tensors of a model or of an optimizer is a section; the files of other items are not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from shlex import quote

from ckpttool.containers.nodes import pairs_of
from ckpttool.containers.pickle_read import Origin, loads
from ckpttool.core.checkpoint import Checkpoint, Section, Unreached
from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.limits import limits
from ckpttool.core.text import dotted, plural
from ckpttool.formats.folders import RANKS_METADATA, RankItem, rank_items
from ckpttool.formats.look import Look
from ckpttool.formats.rank_files import MOST_MISSING, assembled, rank_file, saved_by_rank
from ckpttool.formats.registry import recognize
from ckpttool.io.files import is_file, opened
from ckpttool.io.paths import join

FORMAT = "rank_folder"
RANDOM_STATE = "extra_state"  # of verl: random numbers and the scheduler, of each rank its own
DAMAGED = "the file is damaged: download or copy it again"


def read(folder: str) -> Checkpoint:
    """Read the index of the items in the folder.

    Raises `CkptError` if a rank's file is missing, if nothing shows that the files come from the
    ranks of one run, or if an item holds more than state dicts.
    """
    items = rank_items(Look(folder))
    _check_one_run(folder, items)
    states: dict[str, Checkpoint] = {}
    other_files: list[str] = []
    for item in items:
        if item.name == RANDOM_STATE:
            other_files += item.files.values()
            continue
        paths = [join(folder, name) for name in item.files.values()]
        part = assembled(join(folder, item.pattern), {path: rank_file(path) for path in paths})
        if part.state_dicts or part.optimizers:
            states[item.name] = part
        else:
            other_files += item.files.values()
    _check_contents(folder, states)
    sections: list[Section] = []
    notes: list[str] = []
    unreached: list[Unreached] = []
    nbytes = 0
    for name, part in states.items():
        sections += [replace(section, path=dotted(name, section.path)) for section in part.sections]
        notes += part.notes
        unreached += [storage.of(name) for storage in part.unreached]
        nbytes += part.nbytes
    return Checkpoint(
        folder,
        FORMAT,
        nbytes,
        tuple(sections),
        notes=tuple(notes),
        unreached=tuple(unreached),
        other_files=tuple(other_files),
    )


def _check_one_run(folder: str, items: Sequence[RankItem]) -> None:
    """Raise `CkptError` if the files are not all files of the ranks of one run."""
    if len({item.name for item in items}) < len(items):
        raise _several(f"{folder} holds the files of several runs", folder, items)
    ranks = items[0].ranks or _ranks_in_metadata(folder)
    if ranks is None:
        first_files = [join(folder, item.files[0]) for item in items]
        if len(items[0].files) > 1 and not any(map(_is_sharded, first_files)):
            raise _several(f"{folder} holds several checkpoints", folder, items)
        return
    problems: list[Problem] = []
    for item in items:
        problems += _missing_files(item, ranks)
    if problems:
        raise CkptError(
            f"{folder} does not hold the files of all {ranks} ranks",
            hint="copy the missing files too",
            problems=problems,
        )


def _missing_files(item: RankItem, ranks: int) -> Iterator[Problem]:
    missing = (rank for rank in range(ranks) if rank not in item.files)
    for rank in islice(missing, MOST_MISSING):
        yield Problem("no such file", item.pattern.replace("*", str(rank)))
    for rank, name in item.files.items():
        if rank >= ranks:
            yield Problem(f"is of rank {rank}, and there were {ranks} ranks", name)


def _ranks_in_metadata(folder: str) -> int | None:
    """Return the number of ranks that saved the folder, as ``metadata.pkl`` says; None without
    one.
    """
    path = join(folder, RANKS_METADATA)
    if not is_file(path):
        return None
    with opened(path) as file:
        data = bytes(file.read(min(file.size, limits().pickle_bytes)))
        origin = Origin(path, file.size, end=len(data))
    pairs = pairs_of(loads(data, origin=origin).root) or {}
    ranks = pairs.get("world_size")
    if type(ranks) is not int or ranks < 1:
        raise CkptError(f"{path} does not say how many ranks there were", hint=DAMAGED)
    return ranks


def _is_sharded(path: str) -> bool:
    """Return whether a tensor of the file says which of several ranks saved it."""
    try:
        return saved_by_rank(recognize(path).read()) is not None
    except CkptError:
        return False


def _several(message: str, folder: str, items: Sequence[RankItem]) -> CkptError:
    item = next((item for item in items if "model" in item.name), items[0])
    first = next(iter(item.files.values()))
    single, pattern = quote(join(folder, first)), quote(join(folder, item.pattern))
    problems = [Problem(plural(len(item.files), "file"), item.pattern) for item in items]
    hint = f"name one of them: {single}; or the files of all ranks of one run: {pattern}"
    return CkptError(message, hint=hint, problems=problems)


def _check_contents(folder: str, parts: Mapping[str, Checkpoint]) -> None:
    """Raise `CkptError` if a file of an item with state holds anything else, which would be
    lost.
    """
    problems = []
    for part in parts.values():
        for path in part.others:
            problems.append(Problem("is not a part of a state dict", f"{part.source}::{path}"))
    if problems:
        names = " ".join(quote(part.source) for part in parts.values())
        raise CkptError(
            f"items in {folder} hold more than state dicts",
            hint=f"name the files of one item: {names}",
            problems=problems,
        )
