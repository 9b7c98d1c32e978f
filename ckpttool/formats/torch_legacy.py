"""Read the format of torch.save before torch 1.6: five pickles, then the bytes of each storage.

It is read to the same tree as a torch zip, and written as one. See `_legacy_save` in
torch/serialization.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from itertools import repeat
from typing import Any, NamedTuple

from ckpttool.containers.nodes import children, walk
from ckpttool.containers.pickle_read import Global, Origin, Persistent, Pickle, loads
from ckpttool.containers.tensors import Carried, Storages, is_tensor
from ckpttool.containers.tree import Container, read_tree
from ckpttool.core import dtypes
from ckpttool.core.checkpoint import Checkpoint, Span, Storage
from ckpttool.core.errors import CkptError
from ckpttool.core.limits import Memory, limits
from ckpttool.core.values import dataclass, many_objects
from ckpttool.formats.signatures import LEGACY_START
from ckpttool.io.files import Source, defer_check, opened
from ckpttool.io.paths import is_url

FORMAT = "torch_legacy"  # in the table of formats
_UNREADABLE = (
    "torch.load raises for this file: a storage has no dtype, as for float8 and other new dtypes"
    " in the format "
    "before torch 1.6; `ckpttool remap` writes a file that it loads"
)
_PROTOCOL = 1001  # of the format, the second pickle
# bytes; nothing says how long the pickles are, so more is read as long as they are cut off
_FIRST_READ = 1 << 17
_NUMEL = 8  # bytes before each storage's own: how many elements it has


@many_objects()
def read(path: str) -> Checkpoint:
    """Return the index of the file at `path`. Raises `CkptError` if it is corrupt or not as
    torch.save writes it.
    """
    with opened(path) as file:
        nbytes = file.size
        pickles = _read_pickles(path, file, nbytes)
        spans, end = _find_storages(path, file, pickles, nbytes)
    tree, references = pickles.tree, pickles.references
    storages = Storages(
        lambda key, size: _storage(path, spans, key, size),
        memory=tree.memory or Memory(nbytes),
        pickled=pickles.end,
        untyped=references.untyped,
    )
    for key, size in references.sizes.items():
        storages.get(key, size)  # of bare storages too: the writer needs them all
    _shift_views(path, tree.root, references.views)
    notes: tuple[str, ...] = ()
    if end < nbytes:
        notes = (f"{nbytes - end:,} bytes follow the last storage: not read",)
    sizes = {key: span.length for key, span in spans.items()}
    return read_tree(path, FORMAT, nbytes, tree, storages, sizes, notes=notes)


def refusal(checkpoint: Checkpoint) -> str:
    """Return why torch.load raises for the file, empty if it does not: in this format it asks every
    storage for its dtype.

    torch.save writes storages without one all the same, for each dtype newer than bfloat16 (float8,
    uint16, complex32).
    """
    return _UNREADABLE if _has_untyped_storages(checkpoint) else ""


def _has_untyped_storages(checkpoint: Checkpoint) -> bool:
    if isinstance(checkpoint.container, Container):
        return checkpoint.container.tree.storages.untyped
    # a picked section
    for section in checkpoint.sections:
        for entry in section.all_tensors():
            if isinstance(entry.payload, Carried) and entry.payload.storages.untyped:
                return True
    return False


# The pickles


@dataclass(slots=True, eq=False)
class _References:
    """Turns the pickle's persistent ids into a torch zip's, whose storages have numbers as names.

    `keys` maps a storage's key in the file to its number; `widths` and `sizes` are the bytes of one
    element and of the storage, by number. `views` are the references to a part of a storage
    (written before torch 0.4): the offset of its first element in the storage, by the reference's
    id.
    """

    keys: dict[Any, str] = field(default_factory=dict)
    widths: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    views: dict[int, int] = field(default_factory=dict)
    kept: list[Persistent] = field(default_factory=list)  # so that the ids in `views` stay theirs
    untyped: bool = False  # a storage has no dtype

    def __call__(self, persistent_id: Any) -> Any:
        # a class with its source text, which torch compares and does not need
        if persistent_id[0] == "module":
            return persistent_id[1]
        word, kind, key, location, numel, view = persistent_id
        is_known = word == "storage" and type(kind) is Global
        if not is_known or type(key) not in (str, int) or type(numel) is not int:
            raise ValueError("a storage reference")
        row = dtypes.BY_STORAGE.get(kind.name)
        if numel < 0 or (row is None and kind.name != "UntypedStorage"):
            raise ValueError(f"a storage of {numel} elements, {kind}")
        self.untyped |= row is None
        number = self.keys.setdefault(key, str(len(self.keys)))
        width = row.itemsize if row else 1
        self.widths.setdefault(number, width)
        self.sizes[number] = max(self.sizes.get(number, 0), numel * width)
        reference = Persistent((word, kind, number, location, numel))
        if view is not None:
            _, start, _ = view
            if type(start) is not int or start < 0:
                raise ValueError(f"a view that begins at {start!r}")
            self.views[id(reference)] = start
            self.kept.append(reference)
        return reference


class _Pickles(NamedTuple):
    """The pickles of a file: the tree of its contents, the keys of its storages in file order, and
    their end.
    """

    tree: Pickle
    references: _References
    keys: list[Any]
    end: int


def _read_pickles(path: str, file: Source, nbytes: int) -> _Pickles:
    length = _FIRST_READ
    while True:
        file.seek(0)
        data = file.read(min(length, limits().pickle_bytes))
        try:
            return _parse(path, data, nbytes)
        except CkptError:
            if len(data) < length:
                raise
        length *= 2


def _parse(path: str, data: bytes, nbytes: int) -> _Pickles:
    magic = LEGACY_START.match(data)
    if magic is None:
        raise _unfit(path, "it does not begin with the magic number")
    origin = Origin(path, nbytes)
    protocol = loads(data, magic.end(), origin=origin)
    if protocol.root != _PROTOCOL:
        raise _unfit(path, f"the version of the format is {protocol.root!r}, not {_PROTOCOL}")
    system = loads(data, protocol.end, origin=origin)
    references = _References()
    tree = loads(data, system.end, references, origin)
    keys = loads(data, tree.end, origin=origin)
    if type(keys.root) is not list or not {str, int}.issuperset(map(type, keys.root)):
        raise _unfit(path, "the list of its storages is not a list of keys")
    return _Pickles(tree, references, keys.root, keys.end)


def _shift_views(path: str, root: Any, views: Mapping[int, int]) -> None:
    """Make tensors on a view of a storage tensors on the storage itself, further behind its first
    element.
    """
    if not views:
        return
    shifted = set[int]()  # ids of the arguments of these tensors
    for node in walk([root]):
        inside = children(node)
        if is_tensor(node) and node.args and id(node.args[0]) in views:
            reference, *rest = node.args
            if not rest or type(rest[0]) is not int:
                raise _unfit(path, f"the arguments of {node.func}")
            rest[0] += views[id(reference)]
            node.args = (reference, *rest)
            shifted.add(id(node.args))
        elif id(node) in shifted:
            inside = node[1:]
        if not views.keys().isdisjoint(map(id, inside)):
            raise _unfit(path, "a part of a storage is outside of every tensor")


# The storages


def _find_storages(
    path: str, file: Source, pickles: _Pickles, nbytes: int
) -> tuple[dict[str, Span], int]:
    """Return the place of each storage's bytes by number, and the end of the last one.

    Of a remote file they are where they belong if the storages are as long as the pickle says: the
    numbers of elements in front of them, a request each, are read with the data.
    """
    references = pickles.references
    expected: dict[str, Span] = {}
    end = pickles.end
    for key in pickles.keys:
        number = references.keys.get(key)
        if number is None or number in expected:
            raise _unfit(path, f"storage {key} is listed twice, or belongs to nothing")
        expected[number] = Span(path, end + _NUMEL, references.sizes[number])
        end += _NUMEL + references.sizes[number]

    def read() -> tuple[dict[str, Span], int]:
        spans: dict[str, Span] = {}
        at = pickles.end
        starts = (span.offset - _NUMEL for span in expected.values())
        file.prefetch(zip(starts, repeat(_NUMEL)))
        for key, number in zip(pickles.keys, expected):
            numel = int.from_bytes(file.read_at(at, _NUMEL), "little", signed=True)
            spans[number] = Span(path, at + _NUMEL, numel * references.widths[number])
            at += _NUMEL + spans[number].length
            if numel < 0 or at > nbytes:
                raise CkptError(
                    f"{path} is truncated: storage {key} ends at byte {at:,}, the file at"
                    f" {nbytes:,}",
                    hint="download or copy it again",
                )
        return spans, at

    def check() -> None:
        if read() != (expected, end):
            raise _unfit(path, "its storages are not as long as its pickle says")

    if not is_url(path) or end != nbytes:
        return read()
    defer_check(path, check)
    return expected, end


def _storage(path: str, spans: Mapping[str, Span], number: str, nbytes: int) -> Storage:
    span = spans.get(number)
    if span is None:
        raise _unfit(path, f"storage {number} is missing")
    if nbytes > span.length:
        raise _unfit(path, f"storage {number} is {span.length} bytes, its tensors say {nbytes}")
    return Storage(span)


def _unfit(path: str, message: str) -> CkptError:
    return CkptError(
        f"{path}: not as torch.save wrote it before torch 1.6: {message}",
        hint="the file is damaged, or written by another program: save it again with torch.save",
    )
