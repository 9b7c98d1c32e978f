"""One program of a ``.pt2`` file, as the readers of all layouts hand it over: tensors, and the home of each storage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from shlex import quote
from typing import Any

from ckpttool.checkpoint import Checkpoint, Comparable, Section, Storage, Unreached
from ckpttool.errors import CkptError
from ckpttool.evaluate.compare import content_of_storage
from ckpttool.formats.containers import json_text
from ckpttool.formats.containers.zip_archive import Archive, Record, read_archive, read_record
from ckpttool.formats.torch import zip_file as torch_zip
from ckpttool.formats.torch.tensors import Carried
from ckpttool.json_schema import Kind, check
from ckpttool.limits import limits
from ckpttool.values import dataclass

CONSTANTS = "constants"  # path of the section of constants; the state dict's is the root

_AGAIN = "copy it or export it again"


@dataclass(frozen=True, slots=True, eq=False)
class Payload:
    """What the file says of one tensor beyond its geometry: the record that holds it, and its role.

    `alone`: the record is a torch file of this tensor and nothing else, which another one can take the place of.
    `source` can tell the content of a tensor that is no strided block of bytes.
    """

    record: str
    is_param: bool
    requires_grad: bool
    alone: bool = False
    source: Comparable | None = None

    def content(self) -> bytes | None:
        """See `checkpoint.Comparable`."""
        return None if self.source is None else self.source.content()


@dataclass(frozen=True, slots=True, eq=False)
class RecordOf:
    """The payload of what a record of its own holds: a pickled tensor or object."""

    archive: Archive
    record: Record

    def content(self) -> bytes | None:
        """See `checkpoint.Comparable`. That of the object, where the record is a torch file; else that of the bytes."""
        try:
            inner = read_archive(self.archive.path, self.archive.base + self.record.data, self.record.nbytes)
            _, pickle, storages = torch_zip.open_tree(inner)
        except CkptError:
            return content_of_storage(Storage(self.archive.span(self.record)))
        return Carried(pickle.root, storages).content()


@dataclass(frozen=True, slots=True, eq=False)
class Inner:
    """A torch zip that is a record of the file; all its records but the storages are in `folder`."""

    archive: Archive
    folder: str


@dataclass(frozen=True, slots=True)
class Home:
    """Where something lies: it is the record itself, or the record `key` of the torch zip in it, less its folder."""

    record: str
    inner: Inner | None = None
    key: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """The file itself, `Checkpoint.container` of this format.

    `layout` says which torch wrote it, `model` is the record of the graph (empty for compiled code), `sections` are the
    state dict and the constants as the file holds them, `indexes` the record that names the entries of each,
    `unreached` storages that these do not refer to. `shared` are records that other programs use too, with these.
    `compiled` is True where the program is code that AOTInductor compiled.
    """

    archive: Archive
    name: str
    layout: str
    model: str
    sections: tuple[Section, ...]
    indexes: Sequence[str] = ()
    homes: Mapping[Storage, Home] = field(default_factory=dict)
    shared: Mapping[str, Sequence[str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    unreached: tuple[Unreached, ...] = ()

    @property
    def compiled(self) -> bool:
        """Whether it is an AOTInductor package: compiled code, and no graph."""
        return not self.model


def program_of(checkpoint: Checkpoint) -> Program | None:
    """The program that the checkpoint is; None for any other checkpoint."""
    return checkpoint.container if isinstance(checkpoint.container, Program) else None


def root_of(archive: Archive) -> str:
    """The folder that all records lie in, with its slash; empty where there is none."""
    first = archive.records[0].name if archive.records else ""
    return first[: first.find("/") + 1]


def read_json(archive: Archive, name: str, kind: Kind, writer: str) -> Any:
    """The JSON value of a record, which is of the kind: as `writer` writes it.

    Raises `CkptError`, every problem at its JSON path, where it is missing, damaged, no JSON, or something else.
    """
    if name not in archive.by_name:
        raise damaged(archive.path, f"its record {name} is missing")
    try:
        value = json_text.loads(read_record(archive, archive.by_name[name], limits().json_bytes).decode())
    except ValueError as error:
        raise damaged(archive.path, f"its record {name} is not valid JSON: {error}") from error
    check(kind, value, f"{archive.path} is not a program that can be read: {name} is not as {writer} writes it", _AGAIN)
    return value


def damaged(path: str, problem: str) -> CkptError:
    """The error for a program that contradicts itself."""
    return CkptError(f"{path} is not a program that can be read: {problem}", hint=_AGAIN)


def compressed(path: str, record: str) -> CkptError:
    """The error for a record whose bytes do not lie in the file as they are."""
    code = "import torch, sys; torch.export.save(torch.export.load(sys.argv[1]), sys.argv[2])"
    hint = f'load and save it again with torch: python -c "{code}" {quote(path)} OUT.pt2'
    return CkptError(f"{path} is compressed (record {record}), which torch never does", hint=hint)


def program_sections(weights: Section, constants: Section) -> tuple[Section, ...]:
    """The sections of a program; that of its constants is left out where it has none."""
    return (weights, constants) if constants.tensors or constants.extras else (weights,)
