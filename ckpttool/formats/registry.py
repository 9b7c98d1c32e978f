"""The formats: the built-in ones, and formats that installed packages add."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import NamedTuple

from ckpttool.core.checkpoint import IN_MEMORY, Checkpoint
from ckpttool.core.errors import CkptError, Problem
from ckpttool.formats import folders, signatures
from ckpttool.formats.look import Look
from ckpttool.formats.protocol import Format, Holds

GROUP = "ckpttool.formats"  # of the entry points of packages that add formats

_HOLDS_TENSORS = Holds(metadata=True, subclass_parts=True)
_HOLDS_LIKE_TORCH_SAVE = Holds(objects=True, aliases=True, versions=True, order=True)


def _of_file(has_signature: Callable[[Look], bool]) -> Callable[[Look], str | None]:
    """Return the `matches` of a format whose files are read by their own path."""
    return lambda look: look.path if has_signature(look) else None


# in the order in which they are tried: the most certain first
TABLE = (
    Format(
        "safetensors",
        "safetensors",
        "ckpttool.formats.safetensors",
        matches=_of_file(signatures.is_safetensors),
        endings=(".safetensors",),
        holds=_HOLDS_TENSORS,
    ),
    Format(
        "torch_zip",
        "torch.save",
        "ckpttool.formats.torch_zip",
        matches=_of_file(signatures.is_torch_zip),
        endings=(".pt", ".pth", ".bin", ".ckpt"),
        holds=_HOLDS_LIKE_TORCH_SAVE,
        shards="sharded_bin",
    ),
    Format(
        "torch_legacy",
        "torch.save before torch 1.6",
        "ckpttool.formats.torch_legacy",
        matches=_of_file(signatures.is_torch_legacy),
        holds=_HOLDS_LIKE_TORCH_SAVE,
        succeeded_by="torch_zip",
    ),
    Format(
        "pickle",
        "pickle of NumPy arrays",
        "ckpttool.formats.pickled",
        matches=_of_file(signatures.is_pickle),
        holds=_HOLDS_LIKE_TORCH_SAVE,
        succeeded_by="torch_zip",
    ),
    Format(
        "torchscript",
        "TorchScript archive",
        "ckpttool.formats.torchscript",
        matches=_of_file(signatures.is_torchscript),
        holds=Holds(aliases=True, order=True, programs=True, code_storages=True),
    ),
    Format(
        "pt2",
        "exported program",
        "ckpttool.formats.pt2",
        matches=_of_file(signatures.is_program),
        endings=(".pt2",),
        holds=Holds(aliases=True, order=True, programs=True),
    ),
    Format(
        "sharded",
        "sharded safetensors",
        "ckpttool.formats.huggingface",
        matches=lambda look: look.path if signatures.is_index(look) else folders.shards_home(look),
        holds=_HOLDS_TENSORS,
        index=".safetensors.index.json",
        sharded=True,
    ),
    # its index is recognized by the row above, and its module reads both
    Format(
        "sharded_bin",
        "sharded torch.save files",
        "ckpttool.formats.huggingface",
        holds=Holds(aliases=True),
        index=".bin.index.json",
        sharded=True,
        shards="sharded_bin",
    ),
    Format(
        "rank_files",
        "torch.save files of the ranks of one run",
        "ckpttool.formats.rank_files",
        matches=lambda look: look.path if look.is_pattern else None,
        holds=Holds(aliases=True, rank_parts=True),
    ),
    Format(
        "dcp",
        "torch.distributed.checkpoint folder",
        "ckpttool.formats.dcp",
        matches=folders.dcp_home,
        endings=(".dcp",),
        holds=Holds(objects=True, aliases=True, form=False),
        index=".metadata",
    ),
    Format(
        "deepspeed",
        "DeepSpeed folder (ZeRO, universal)",
        "ckpttool.formats.deepspeed",
        matches=folders.deepspeed_step,
        holds=Holds(aliases=True),
    ),
    Format(
        "accelerate",
        "accelerate's folder of an FSDP run",
        "ckpttool.formats.accelerate",
        matches=folders.fsdp_home,
        holds=Holds(aliases=True),
    ),
    Format(
        "rank_folder",
        "folder of the ranks' files (verl, torch_checkpointing)",
        "ckpttool.formats.rank_folder",
        matches=folders.rank_folder,
        holds=Holds(aliases=True, rank_parts=True),
    ),
)
# not a file: nothing reads or writes it
MEMORY = Format(IN_MEMORY, "a checkpoint in memory", "", holds=_HOLDS_LIKE_TORCH_SAVE)
FORMATS = {row.name: row for row in (*TABLE, MEMORY)}


class Recognized(NamedTuple):
    """The format of a checkpoint, and the path to read it by."""

    format: Format
    path: str

    def read(self) -> Checkpoint:
        return self.format.read(self.path)


class Installed(NamedTuple):
    """The formats that installed packages add, and why some packages add none."""

    formats: tuple[Format, ...]
    problems: tuple[Problem, ...]


@cache
def installed() -> Installed:
    """Return the formats of installed packages. A package that fails is a problem, not an error:
    most files do not need it.
    """
    from importlib.metadata import entry_points  # as slow as a small command

    formats: dict[str, Format] = {}
    problems = []
    for entry in entry_points(group=GROUP):
        package = entry.value if entry.dist is None else entry.dist.name
        try:
            added = entry.load()
        except Exception as error:
            problems.append(Problem(f"{type(error).__name__}: {error}", package))
            continue
        if not isinstance(added, Format):
            problems.append(Problem(f"{entry.value} is not a ckpttool.plugin.Format", package))
        elif added.name in FORMATS or added.name in formats:
            problems.append(Problem(f"another format has the name {added.name}", package))
        else:
            formats[added.name] = replace(added, package=package)
    return Installed(tuple(formats.values()), tuple(problems))


def format_named(name: str) -> Format:
    """Return the format that a checkpoint has, by its name. Raises `CkptError` if there is none."""
    if name in FORMATS:
        return FORMATS[name]
    for row in installed().formats:
        if row.name == name:
            return row
    hint = "the package that read it must give the checkpoint the name of its format"
    raise CkptError(f"no format is called {name!r}", hint=hint)


def format_of(checkpoint: Checkpoint) -> Format:
    return format_named(checkpoint.format)


def is_program(checkpoint: Checkpoint) -> bool:
    """Return True if it keeps its own names, whatever weights it has."""
    return format_of(checkpoint).holds.programs


def recognize(path: str) -> Recognized:
    """Return the format of the file or folder at `path`, or of the only checkpoint in the folder.

    Raises `CkptError` if there is none (the error says what the file is instead, if its content
    shows it), if a folder holds several, and for a file of a format that cannot be read.
    """
    look = Look(path)
    match = _first(TABLE, look)
    if match is not None:
        return match
    inside = folders.file_inside(look) if look.is_folder else None
    if inside is not None:
        return recognize(inside)
    if signatures.is_damaged_safetensors(look):
        return Recognized(FORMATS["safetensors"], path)
    return _by_package(look)


def _first(formats: Iterable[Format], look: Look) -> Recognized | None:
    for row in formats:
        path = row.matches(look)
        if path is not None:
            return Recognized(row, path)
    return None


def _by_package(look: Look) -> Recognized:
    """Return the match of a format that a package adds. Raises `CkptError` if there is none; it
    names the packages that fail.
    """
    formats, problems = installed()
    failing = list(problems)
    for row in formats:
        try:
            match = _first([row], look)
        except CkptError:
            raise
        except Exception as error:
            failing.append(Problem(f"{type(error).__name__}: {error}", row.package))
            continue
        if match is not None:
            return match
    endings = tuple(chain(*(row.endings for row in formats)))
    inside = folders.file_inside(look, endings) if look.is_folder and endings else None
    if inside is not None:
        return recognize(inside)
    unknown = folders.nothing_inside(look) if look.is_folder else signatures.unknown(look)
    if failing:
        raise CkptError(
            f"{unknown.message}; packages that could know it fail",
            hint=f"install these packages again, or remove them; else {unknown.hint}",
            problems=[*unknown.problems, *failing],
        )
    raise unknown


def format_for(out: str) -> Format:
    """Return the format of the file `out`, which may be an index, by its ending. Raises `CkptError`
    if no format has it.
    """
    name = os.path.basename(out)
    endings: list[str] = []
    for row in _all_formats():
        is_index = row.folder and is_index_name(name) and name.endswith(row.index)
        if is_index or (not row.folder and _has_ending(out, row)):
            return row
        endings += (*row.endings, row.index) if row.index else row.endings
    hint = f"choose one of {' '.join(endings)}, or name a folder"
    raise CkptError(f"{out}: no format has the ending {os.path.splitext(out)[1]!r}", hint=hint)


def _has_ending(path: str, row: Format) -> bool:
    return path.lower().endswith(row.endings)


def _all_formats() -> Iterator[Format]:
    yield from TABLE
    yield from installed().formats  # which are looked for only then


def is_index_name(name: str) -> bool:
    """Return whether a file of this name is read first in the folder of a checkpoint."""
    return name == folders.DCP_METADATA or folders.INDEX.fullmatch(name) is not None


def folder_format(out: str) -> Format | None:
    """Return the format whose ending the folder `out` has."""
    return next((row for row in TABLE if row.folder and _has_ending(out, row)), None)


def program_format(path: str) -> Format | None:
    """Return the format of exported programs whose ending the path has."""
    return next((row for row in TABLE if row.holds.programs and _has_ending(path, row)), None)
