"""OUT operands: the path and the format to write."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Any, get_args, get_type_hints

from ckpttool.core.checkpoint import Checkpoint, Span
from ckpttool.core.options import Optimizers, Option, OutputOptions
from ckpttool.core.text import Placeholder, shell, spelled
from ckpttool.core.values import dataclass
from ckpttool.formats.folders import checkpoint_files
from ckpttool.formats.protocol import Format
from ckpttool.formats.registry import (
    MEMORY,
    TABLE,
    folder_format,
    format_for,
    format_named,
    format_of,
    is_index_name,
    recognize,
)
from ckpttool.io.files import is_dir, size
from ckpttool.io.paths import is_url, join, parent
from ckpttool.io.paths import name as paths_name
from ckpttool.io.pieces import Files, Link, Piece, Pieces
from ckpttool.operands.checkpoint import is_folder, split

_PLAIN = (str, int, float, list, tuple, Mapping)  # values of options that a command line has too
_WRITABLE = tuple(chain.from_iterable(row.endings for row in TABLE))


# The options of a remap whose objects are the arguments of the `diff` that it fixes
FIX = {"to_model": "model", "to_optimizer": "optimizer"}


def command(
    verb: str, operands: tuple[str, ...], options: Any, called: Mapping[str, str] = {}
) -> str:
    """Return ``ckpttool VERB OPERANDS OPTIONS`` with the options that are not at their default,
    output options last.

    If an operand or the value of an option is an object in memory, return the Python call, in which
    such objects are called as the arguments are, or as `called` says.
    """
    late = {field.name for field in fields(OutputOptions)}
    chosen: dict[str, Any] = {}
    for field in sorted(fields(options), key=lambda field: field.name in late):
        value = getattr(options, field.name)
        if value != field.default:
            chosen[field.name] = value
    if MEMORY.title in operands or not all(map(_is_plain, chosen.values())):
        arguments = [_argument(operand) for operand in operands]
        arguments += [
            f"{name}={_literal(called.get(name, name), value)}" for name, value in chosen.items()
        ]
        return f"ckpttool.{verb.replace('-', '_')}({', '.join(arguments)})"
    words: list[str] = []
    hints = get_type_hints(type(options), include_extras=True)
    for name, value in chosen.items():
        (option,) = (part for part in get_args(hints[name]) if isinstance(part, Option))
        words += _words(option.flags[0], value)
    return shell("ckpttool", verb, *map(spelled, operands), *words)


def _argument(operand: str) -> str:
    """Return an operand as the argument of a Python call."""
    if operand == MEMORY.title:
        return "ckpt"
    return operand if isinstance(operand, Placeholder) else repr(spelled(operand))


def _words(flag: str, value: object) -> list[str]:
    """Return the words of one option; a flag with several values is repeated."""
    if value is True:
        return [flag]
    if isinstance(value, Optimizers):
        value = value.words
    words = []
    for part in value if isinstance(value, (list, tuple)) else (value,):
        text = json.dumps(dict(part)) if isinstance(part, Mapping) else part
        words += [flag, spelled(text) if isinstance(text, str) else str(text)]
    return words


def _is_plain(value: object) -> bool:
    """Return False for objects of the caller, which no text names."""
    if isinstance(value, Optimizers):
        return all(isinstance(optimizer, str) for optimizer in value.values())
    return isinstance(value, _PLAIN)


def _literal(name: str, value: object) -> str:
    """Return the value of a keyword; an object of the caller, and what only the user knows, as a
    name.
    """
    if isinstance(value, Placeholder):
        return value
    if not _is_plain(value):
        return name
    if isinstance(value, str):
        return repr(spelled(value))
    return repr(list(value) if isinstance(value, tuple) else value)


_PATTERN = re.compile(r"[*?\[]")


def outputs(source: str, word: str) -> Iterator[str]:
    """Yield unused names for an output next to the source, first in its format:
    ``train.serialized.pt``.
    """
    path = "checkpoint" if source == MEMORY.title else split(source)[0]
    folder = is_index_name(paths_name(path))
    if folder:
        path = parent(path)
    elif is_dir(path):
        folder = folder_format(path.rstrip("/")) is None
    path = path.rstrip("/")
    ending = "" if folder else Path(path).suffix
    first = ending if ending.lower() in _WRITABLE else ".pt"
    for chosen in dict.fromkeys(("/" if folder else first, ".pt")):
        out = free(path.removesuffix(ending), word, chosen)
        yield _outside(path, out, word, chosen)


def _outside(pattern: str, out: str, word: str, ending: str) -> str:
    """Return an unused name for an output that the pattern of the source does not match."""
    if not _PATTERN.search(pattern) or not fnmatchcase(out, pattern):
        return out
    folder = parent(out)
    for place in (folder, parent(folder)):
        other = free(join(place, "checkpoint"), word, ending)
        if not fnmatchcase(other, pattern):
            return other
    return out


def free(stem: str, word: str, ending: str) -> str:
    """Return ``stem.word.ending``, with a number if that exists, and without the characters of
    patterns.
    """
    plain_stem = re.sub(r"[*?\[\]{}]+", "", paths_name(stem)).strip("._-") or "checkpoint"
    folder = parent(stem)
    while _PATTERN.search(folder) and not is_url(folder) and not is_dir(folder):
        folder = parent(folder)  # a pattern of folders
    for count in range(1, 1000):
        number = "" if count == 1 else str(count)
        name = f"{plain_stem}.{word}{number}{ending}"
        path = name if folder == "." else join(folder, name)
        if is_url(stem) or not os.path.lexists(path.rstrip("/")):
            break
    return path


@dataclass(frozen=True, slots=True)
class Target:
    """The place to write a checkpoint. `folder` is None for a single file.

    `name` is the file in the folder that OUT names: the index, or the only file; empty for the
    usual one. The shards of a folder are made again with `max_shard_size` (bytes).
    """

    path: str
    format: Format
    folder: str | None = None
    name: str = ""
    max_shard_size: int | None = None

    def without_place(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        """Return the other files of the checkpoint's folder that the output has no place for."""
        alone = self.folder is None or not _is_folder(checkpoint)
        return checkpoint.other_files if alone else ()

    def lay_out(
        self, checkpoint: Checkpoint, companions: Mapping[str, str | bytes] | None = None
    ) -> Files:
        """Return the files to write by their names in the folder; the last one completes it.

        `companions` are other files for the folder: name -> path of the file to copy, or content.
        Raise `Refused` if the format cannot hold the checkpoint.
        """
        if self.folder is None:
            return {paths_name(self.path): self.format.layout(checkpoint)}
        files: dict[str, Pieces | Link] = {}
        for name, content in (companions or {}).items():
            if isinstance(content, str):
                files[name] = [Piece(Span(content, 0, size(content)))]
            else:
                files[name] = [Piece(content)]
        if not self.format.folder:
            return files | {self.name: self.format.layout(checkpoint)}
        shards = self.format.layout_files(checkpoint, self.name, self.max_shard_size)
        return files | dict(shards)

    @property
    def home(self) -> str:
        return parent(self.path) if self.folder is None else self.folder

    def present(self, files: Files | None = None) -> set[str]:
        """Return the files of a checkpoint that is in the folder already, except those in
        `files`.
        """
        assert self.folder is not None
        marker = self.name or self.format.index
        return checkpoint_files(self.folder, marker).difference(files or ())


def target_for(out: str, source: Checkpoint, max_shard_size: int | None = None) -> Target:
    """Return the target that `out` names for `source`.

    OUT is a folder if it ends with a slash, if the folder exists, if it is the name of an index or
    of DCP's ``.metadata``, if it ends in ``.dcp`` (DCP again), or if the source is a folder and OUT
    has no ending. A folder gets the source's format if that one fills folders, else sharded
    safetensors; with `max_shard_size` (bytes) a single file of a folder is sharded too. Raise
    `CkptError` for an ending that no format has.
    """
    name = paths_name(out)
    if is_index_name(name):
        return Target(out, format_for(out), parent(out), name, max_shard_size)
    of_folder = folder_format(out.rstrip("/"))
    if of_folder is not None:
        return Target(out, of_folder, out, "", max_shard_size)
    from_folder = _is_folder(source)
    row = format_of(source)
    if not (out.endswith("/") or is_dir(out) or (from_folder and not Path(out).suffix)):
        return Target(out, format_for(out), max_shard_size=max_shard_size)
    if row.folder:
        return Target(out, row, out, "", max_shard_size)
    if from_folder and max_shard_size is None:
        path = recognize(source.source).path
        if not is_dir(path):  # one file in a folder, and no folder that is only read
            return Target(out, row, out, paths_name(path))
    shards = format_named(row.shards if from_folder else "sharded")
    return Target(out, shards, out, "", max_shard_size)


def _is_folder(checkpoint: Checkpoint) -> bool:
    return is_folder(checkpoint.source)


def same_folder(left: str, right: str) -> bool:
    if is_url(left):
        return left.rstrip("/") == right.rstrip("/")
    return os.path.exists(right) and os.path.samefile(left, right)
