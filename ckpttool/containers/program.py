"""An exported program as a file holds it: where its weights are, and which of them can be
replaced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field

from ckpttool.containers.tensors import Carried
from ckpttool.containers.zip_read import Archive
from ckpttool.core.checkpoint import Checkpoint, Payload, Section, Storage, TensorEntry, Unreached
from ckpttool.core.values import dataclass

CONSTANTS = "constants"  # path of the section of constants; the state dict's is the root

OUTSIDE = (
    "compile it again with its weights outside: torch._inductor.aoti_compile_and_package(program,"
    " package_path=..., "
    "inductor_configs={'aot_inductor.package_constants_in_so': False, "
    "'aot_inductor.package_constants_on_disk_format': 'pickle_weights'})"
)
INSIDE = (
    "small weights (up to 8 elements in one dimension) are in the compiled code itself: compile it"
    " again for new ones. "
    "Leave out what it does not use, such as BatchNorm's num_batches_tracked: ckpttool remap NEW"
    " --drop KEY -o OUT"
)

MOST_INLINED = 8  # elements


@dataclass(frozen=True, slots=True, eq=False)
class Role(Payload):
    """The payload of one tensor: the record that holds it, and its role in the program.

    `alone`: the record is a torch file of this tensor and nothing else, and can be replaced.
    `source` has the content of a packed tensor.
    """

    record: str
    is_param: bool
    requires_grad: bool
    alone: bool = False
    source: Payload | None = None

    def content(self) -> bytes | None:
        return None if self.source is None else self.source.content()


@dataclass(frozen=True, slots=True)
class StoragePlace:
    """A place in the file: a record, or the record `key` (without its folder) of the torch zip
    `inner` in it.
    """

    record: str
    inner: Archive | None = None
    key: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """The file itself, `Checkpoint.container` of this format.

    `layout` says which torch wrote it, `model` is the record of the graph (empty for compiled
    code), `sections` are the state dict and the constants as the file holds them, `indexes` the
    record that names the entries of each, `unreached` storages that these do not refer to. `shared`
    are records that other programs use too, with these. `compiled` is True where the program is
    code that AOTInductor compiled.
    """

    archive: Archive
    name: str
    layout: str
    model: str
    sections: tuple[Section, ...]
    indexes: Sequence[str] = ()
    homes: Mapping[Storage, StoragePlace] = field(default_factory=dict)
    shared: Mapping[str, Sequence[str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    unreached: tuple[Unreached, ...] = ()

    @property
    def compiled(self) -> bool:
        """Whether it is an AOTInductor package: compiled code, and no graph."""
        return not self.model


def program_of(checkpoint: Checkpoint) -> Program | None:
    return checkpoint.container if isinstance(checkpoint.container, Program) else None


def root_of(archive: Archive) -> str:
    """Return the folder of all records, with its slash; empty if there is none."""
    first = archive.records[0].name if archive.records else ""
    return first[: first.find("/") + 1]


def is_inlined(entry: TensorEntry) -> bool:
    """Return whether the compiler writes a tensor of this shape into the code; it cannot be
    replaced there.
    """
    return len(entry.shape) <= 1 and entry.numel <= MOST_INLINED


def replaceable(old: TensorEntry, new: TensorEntry) -> bool:
    """Return whether `old` is packed in a separate pickle, and `new` is pickled as the same kind of
    tensor.
    """
    alone = isinstance(old.payload, Role) and old.payload.alone
    return alone and isinstance(new.payload, Carried) and new.layout == old.layout
