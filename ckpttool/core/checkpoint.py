"""A checkpoint is an index of tensors and where their bytes are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import field, replace
from functools import wraps
from itertools import chain
from math import prod
from typing import Any, Literal, NamedTuple, TypeVar, Union

from ckpttool.core.dtypes import itemsize
from ckpttool.core.pickle_imports import Import
from ckpttool.core.strides import contiguous_stride, distance_to_last
from ckpttool.core.text import shell, title_of
from ckpttool.core.values import dataclass, public

IN_MEMORY = "memory"  # the format of an object in memory


@dataclass(frozen=True, slots=True)
class Span:
    """`length` contiguous bytes of the file `path`, from byte `offset` on."""

    path: str
    offset: int
    length: int


class _Weak:
    __slots__ = ("__weakref__",)


@dataclass(frozen=True, slots=True, eq=False)
class Lazy(_Weak):
    """`length` bytes that do not exist yet: `produce()` yields them, part by part, when they are
    written.

    A buffer among the parts is valid until the next part. `produce` may raise `CkptError`. `reads`:
    bytes that are read for them; `memory`: bytes that are held meanwhile, by default `length`.
    """

    length: int
    produce: Callable[[], Iterable[Part]]
    reads: int | None = None
    memory: int | None = None

    @property
    def held(self) -> int:
        """Bytes of memory that `produce` holds at most."""
        return self.length if self.memory is None else self.memory


Part = Union[bytes, memoryview, Span, Lazy]


def length_of(part: Part) -> int:
    return part.length if isinstance(part, (Span, Lazy)) else len(part)


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """The bytes behind one or more tensors. Tensors that share a storage hold the same `Storage`
    object.

    `origin` is the storage of a tensor that it is computed from: a writer can put the result in its
    place.
    """

    data: Span | Lazy
    origin: Storage | None = None

    @property
    def held(self) -> int:
        """Bytes of memory that its content needs while it is computed; a file is read in small
        parts.
        """
        return 0 if isinstance(self.data, Span) else self.data.held

    @property
    def nbytes(self) -> int:
        return self.data.length


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One named tensor: its geometry and its storage. Stride and offset count elements.

    Attributes:
        key: Its key in the state dict.
        dtype: Torch's name without ``torch.``.
        shape: Its sizes.
        stride: The distance of neighbors in each dimension.
        offset: The place of the first element in the storage.
        storage: The bytes; None if they are not one strided block. Such a tensor can be renamed and
            copied within its format, but not computed with or converted.
        layout: ``strided``; or the kind of a tensor that is not one block: ``sparse_coo``,
            ``quantized``, ``subclass``, ``meta``, ...
        packed_bytes: The bytes of a tensor without a storage.
        payload: The reader's own record of the entry, for the writer of the same format.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage: Storage | None
    layout: str = "strided"
    packed_bytes: int = 0
    payload: object = field(default=None, compare=False, repr=False)

    def under(self, key: str) -> TensorEntry:
        """Return the same tensor with another key. `replace` would take several times as long."""
        where = (self.offset, self.storage, self.layout, self.packed_bytes, self.payload)
        return TensorEntry(key, self.dtype, self.shape, self.stride, *where)

    @property
    def geometry(self) -> tuple[Any, ...]:
        """All fields but the key and the payload."""
        return (
            self.dtype,
            self.shape,
            self.stride,
            self.offset,
            self.storage,
            self.layout,
            self.packed_bytes,
        )

    @property
    def numel(self) -> int:
        """Elements of the tensor; 1 for a scalar."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return (
            self.packed_bytes if self.storage is None else prod(self.shape) * itemsize(self.dtype)
        )

    @property
    def end(self) -> int:
        """One past the last element of the storage that the tensor reaches; 0 for a tensor without
        elements.
        """
        if not self.numel:
            return 0
        return self.offset + 1 + distance_to_last(self.shape, self.stride)

    @property
    def is_contiguous(self) -> bool:
        """True if the elements are adjacent in row-major order, as in
        ``Tensor.is_contiguous()``.
        """
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride)):
            if size != 1 and stride != expected and self.numel:
                return False
            expected *= size
        return True

    @property
    def span(self) -> Span | None:
        """The bytes of the elements in row-major order, or None if they must be gathered or
        computed.
        """
        if (
            self.storage is None
            or not isinstance(self.storage.data, Span)
            or not self.is_contiguous
        ):
            return None
        data = self.storage.data
        return Span(data.path, data.offset + self.offset * itemsize(self.dtype), self.nbytes)

    @property
    def identity(self) -> object:
        """Equal for two entries if they are the same elements of the same storage (one tensor, two
        names).
        """
        if self.storage is None:
            return (id(self.payload),) if self.payload is not None else (self.key,)
        return (id(self.storage), self.offset, self.shape, self.stride, self.dtype)


def in_row_major(
    key: str, dtype: str, shape: tuple[int, ...], storage: Storage | None, payload: object = None
) -> TensorEntry:
    return TensorEntry(key, dtype, shape, contiguous_stride(shape), 0, storage, payload=payload)


class Described(NamedTuple):
    """The type of an object that is not a tensor, and its value in short; empty if unknown."""

    type: str = ""
    value: str = ""


class Payload:
    """A reader's own record of an entry, for the writer of the same format, and what its bytes
    alone do not tell.
    """

    __slots__ = ()
    # an entry that the values depend on: with another one the same bytes are another value
    meaning: str = ""

    def content(self) -> bytes | None:
        """Return the complete content, equal for equal content in any file; None if unknown. Reads
        the storages.
        """
        return None

    def resolved(self, entry: TensorEntry) -> TensorEntry:
        """Return the entry as a dense tensor if it is lazily conjugated or negated; else the entry
        itself.
        """
        return entry

    def lost(self, entry: TensorEntry) -> str:
        """Return a text about what a format of plain tensors would lose."""
        return ""

    def described(self) -> Described:
        """Return the type and the value of the object, without executing anything."""
        return Described()


@dataclass(frozen=True, slots=True)
class ExtraEntry:
    """An entry of a state dict that is not a tensor (``_extra_state``, a version number).

    It is copied completely.

    Attributes:
        key: Its key in the state dict.
        payload: The reader's own record of the entry, for the writer of the same format.
        value: The plain Python value (numbers, strings, lists, dicts); None for any other.
        tensors: The tensors inside it (a tuple of packed parameters, a nested dict), with keys
            relative to the entry.
    """

    key: str
    payload: object = field(default=None, compare=False, repr=False)
    value: object = field(default=None, compare=False)
    tensors: tuple[TensorEntry, ...] = field(default=(), compare=False)

    def under(self, key: str) -> ExtraEntry:
        """Return the same entry with another key."""
        return replace(self, key=key)

    def described(self) -> Described:
        """Return its type and value, as far as they are known without executing anything."""
        if isinstance(self.payload, Payload):
            return self.payload.described()
        return Described() if self.value is None else Described(type(self.value).__name__)

    def inside(self) -> tuple[TensorEntry, ...]:
        """Return the tensors inside it with complete keys: ``KEY.0``, ``KEY.weight``."""
        return tuple(entry.under(f"{self.key}.{entry.key}") for entry in self.tensors)


AnyEntry = Union[TensorEntry, ExtraEntry]
Entries = Mapping[str, AnyEntry]  # by key


@dataclass(frozen=True, slots=True)
class Unreached:
    """A storage that no tensor of the index has: its content is not understood.

    `path` is the dotted path of the reference to it, or the name of its record without a reference
    (`is_referred`).
    """

    path: str
    storage: Storage
    is_referred: bool = True

    def of(self, file: str) -> Unreached:
        """Return the same storage as one of `file`, a part of the checkpoint."""
        return replace(self, path=f"{file}: {self.path}")


KINDS = ("state_dict", "optimizer", "other")

Fact = TypeVar("Fact")


def once_per_section(find: Callable[[Section], Fact]) -> Callable[[Section], Fact]:
    """Decorate a function that finds a fact in a section: it runs once for each section, which
    keeps the answer. Nobody changes the answer.
    """
    name = f"{find.__module__}.{find.__qualname__}"

    @wraps(find)
    def look_up(section: Section) -> Fact:
        if name not in section.facts:
            section.facts[name] = find(section)
        fact: Fact = section.facts[name]
        return fact

    return look_up


@public
@dataclass(frozen=True, slots=True)
class Section:
    """One state dict in a file.

    Attributes:
        path: The dotted path from the file's root; ``""`` is the root itself.
        kind: One of `KINDS`; ``other`` are tensors outside of all state dicts.
        tensors: The tensors, in file order.
        extras: The entries that are not tensors.
        modules: Module paths of the state dict's ``_metadata`` with their payloads (versions), in
            file order; None if it has none. torch ignores a path that is not a string, and it is
            copied.
        mapping: An optimizer's complete state dict: Python's own dicts, lists, tuples and scalars,
            with a `TensorEntry` for each of `tensors` and an `ExtraEntry` for any other object.
            None for other kinds.
        form: The form of a model's names that is recorded in the file (`formats.remarks`), because
            the names alone do not tell it.
        in_lightning: True if the section was picked from a Lightning checkpoint: a common prefix of
            its keys is the LightningModule's attribute.
        has_runtime_names: True if no state_dict hook made it, as in exported programs and pickled
            modules.
        packed_as: The object that the file has instead of a state dict: a pickled ``module``, a
            ``list`` of tensors, whose keys are their numbers, or a dict of NumPy ``arrays``.
        module_class: The class of the pickled module.
    """

    path: str
    kind: str
    tensors: tuple[TensorEntry, ...]
    extras: tuple[ExtraEntry, ...] = ()
    modules: Mapping[str, object] | None = None
    mapping: Mapping[Any, Any] | None = field(default=None, compare=False)
    form: str | None = None
    in_lightning: bool = field(default=False, compare=False)
    has_runtime_names: bool = field(default=False, compare=False)
    packed_as: Literal["", "module", "list", "arrays"] = ""
    module_class: str = ""
    # what `once_per_section` keeps
    facts: dict[str, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def is_list(self) -> bool:
        return self.packed_as == "list"

    @property
    def title(self) -> str:
        return title_of(self.path)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.all_tensors())

    def all_tensors(self) -> tuple[TensorEntry, ...]:
        """Return the tensors, then the tensors inside the extras."""
        inside = chain.from_iterable(extra.inside() for extra in self.extras)
        return (*self.tensors, *inside) if self.extras else self.tensors

    @property
    def entries(self) -> tuple[AnyEntry, ...]:
        return (*self.tensors, *self.extras) if self.extras else self.tensors

    @property
    def keys(self) -> list[str]:
        """Every key, tensors first; much faster than `by_key` for very many."""
        return list(self.by_key()) if self.extras else self.tensor_keys

    @property
    def tensor_keys(self) -> list[str]:
        """The keys of the tensors."""
        return [entry.key for entry in self.tensors]

    @once_per_section
    def by_key(self) -> Entries:
        """Return every entry by its key, tensors first."""
        return {entry.key: entry for entry in self.entries}

    @once_per_section
    def has_own_storages(self) -> bool:
        """Return whether no two tensors share a storage."""
        return len({id(entry.storage) for entry in self.tensors}) == len(self.tensors)

    @once_per_section
    def aliases(self) -> Mapping[str, str]:
        """Return the first key of the same tensor, for every other key of it."""
        if self.has_own_storages():
            return {}
        first: dict[object, str] = {}
        aliases: dict[str, str] = {}
        for entry in self.tensors:
            key = first.setdefault(entry.identity, entry.key)
            if key != entry.key:
                aliases[entry.key] = key
        return aliases


@dataclass(frozen=True, slots=True, eq=False)
class Readings:
    """Other readings of a file of nested dicts: only a model's names can tell which dict is one
    state dict.

    `dicts` are the keys of each dict that was not read as a state dict, by its dotted path;
    `sections` is the result. `again(paths)` reads the file with the dicts at these paths as state
    dicts.
    """

    dicts: Mapping[str, Sequence[str]]
    sections: tuple[Section, ...]
    again: Callable[[Collection[str]], Checkpoint]


@dataclass(frozen=True, slots=True)
class Kind:
    """The kind of a section that is more than a state dict of tensors under a model's names.

    `name` is the row of `kinds.table` that recognized it, `section` its path. `text` is a sentence
    without its subject, the section: "is a LoRA adapter ...". `facts` are what the row read in the
    section (the adapter, the quantized weights). `together` are keys that mean nothing without each
    other.
    """

    name: str
    section: str
    text: str
    facts: object = field(default=None, compare=False, repr=False)
    together: tuple[tuple[str, ...], ...] = field(default=(), compare=False, repr=False)

    def sentence(self, source: str) -> str:
        """Return the sentence for the section of `source`, a file or folder."""
        return f"{source}::{self.section} {self.text}" if self.section else f"{source} {self.text}"


@public
@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The index of one checkpoint.

    Every storage of the file belongs to a tensor in `sections`, or is in `unreached`.

    Attributes:
        source: The operand that the user named.
        format: The name of the format in `formats.registry.TABLE`.
        nbytes: The size of the file.
        sections: The state dicts, optimizers and other tensors.
        others: Dotted paths of everything that belongs to no state dict (``epoch``, ``args``).
        imports: The classes and functions that the pickles of the complete file import, dangerous
            ones first, except torch's own and Python's containers.
        metadata: The ``__metadata__`` of safetensors.
        container: The reader's own view of the rest of the file, for the modules of its format
            (`containers.program.program_of` reads a program in it).
        notes: Oddities that the reader accepted, as sentences.
        unreached: Storages that no tensor has.
        other_files: Files of the folder that belong to the checkpoint and are not read
            (Megatron's ``common.pt``).
        readings: Another way to read the file, if there is one; it is about the `sections` that
            were read, and nothing else.
        objects: The values at `others`, and the objects around sections and tensors (without
            these). Each can be compared.
        kinds: The kinds of the sections, as `kinds.table` recognized them when it was opened.
        adapter_config: PEFT's description next to an adapter.
        files: The paths and URLs that were opened for the index, each as it was then
            (`io.sources.State`, `io.remote.Stat`).
    """

    source: str
    format: str
    nbytes: int
    sections: tuple[Section, ...]
    others: tuple[str, ...] = ()
    imports: tuple[Import, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    container: object = field(default=None, compare=False)
    notes: tuple[str, ...] = ()
    unreached: tuple[Unreached, ...] = ()
    other_files: tuple[str, ...] = ()
    readings: Readings | None = field(default=None, compare=False)
    objects: tuple[ExtraEntry, ...] = field(default=(), compare=False)
    kinds: tuple[Kind, ...] = field(default=(), compare=False)
    adapter_config: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    files: Mapping[str, object] = field(default_factory=dict, compare=False, repr=False)

    @property
    def globals(self) -> tuple[str, ...]:
        return tuple(sorted({imported.name for imported in self.imports}))

    @property
    def state_dicts(self) -> tuple[Section, ...]:
        return tuple(section for section in self.sections if section.kind == "state_dict")

    @property
    def optimizers(self) -> tuple[Section, ...]:
        return tuple(section for section in self.sections if section.kind == "optimizer")

    def read_as(self, paths: Iterable[str]) -> Checkpoint:
        """Return the same file with the dicts at `paths` read as state dicts; itself if nothing
        changes.
        """
        other = self.readings
        if other is None or other.sections is not self.sections:
            return self
        changed = [path for path in paths if path in other.dicts]
        if not changed:
            return self
        return replace(other.again(changed), imports=self.imports, files=self.files)

    def read_for(self, wanted: Iterable[tuple[str, str]]) -> Checkpoint:
        """Return the reading of the same file that has most of the `wanted` pairs of a section's
        path and a key.
        """
        missing = set(wanted).difference(self.entries())
        return self.read_as({path for path, _ in missing})

    def entries(self) -> dict[tuple[str, str], AnyEntry]:
        """Return every entry by its section's path and its key."""
        entries = {}
        for section in self.sections:
            for entry in section.entries:
                entries[section.path, entry.key] = entry
        return entries

    @classmethod
    def of(cls, *sections: Section) -> Checkpoint:
        """Return a checkpoint of these sections, which is not a file."""
        return cls("", IN_MEMORY, 0, sections)

    @property
    def in_memory(self) -> bool:
        """Whether it is an object in memory, and no file."""
        return self.format == IN_MEMORY

    def part(self, path: str) -> str:
        """Return how the user names the section at `path`; for an object in memory, the Python
        expression.
        """
        if self.in_memory:
            return "ckpt" + "".join(f"[{name!r}]" for name in path.split("."))
        return f"{self.source}::{path}"

    def kinds_of(self, section: Section) -> tuple[Kind, ...]:
        """Return what the section at this path was when the operand was opened."""
        return tuple(kind for kind in self.kinds if kind.section == section.path)

    @property
    def inspect_call(self) -> str:
        """The command, or for an object in memory the Python call, that lists what the checkpoint
        holds.
        """
        if self.in_memory:
            return "ckpttool.inspect(ckpt)"
        return shell("ckpttool", "inspect", self.source)

    def section(self, path: str) -> Section:
        """Return the section at `path`. Raises KeyError if there is none."""
        for section in self.sections:
            if section.path == path:
                return section
        raise KeyError(path)
