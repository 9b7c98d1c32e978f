"""The format of torch.save before torch 1.6, still written by choice: five pickles, then the bytes of each storage.

Read to the same tree as a torch zip and written as one. See `_legacy_save` in torch/serialization.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckpttool import dtypes
from ckpttool.checkpoint import Checkpoint, Span, Storage
from ckpttool.errors import CkptError
from ckpttool.formats.containers.many_objects import many_objects
from ckpttool.formats.containers.pickle_tree import Global, Persistent, Pickle, loads
from ckpttool.formats.recognise_file import LEGACY_START
from ckpttool.formats.torch.tensors import HOLDS, Storages, is_tensor
from ckpttool.formats.torch.tree import find_sections
from ckpttool.formats.torch.unreached import unreached
from ckpttool.formats.torch.zip_file import Container, foreign
from ckpttool.io.files import Source, opened
from ckpttool.limits import limits

_PROTOCOL = 1001  # of the format, the second pickle
_FIRST_READ = 1 << 20  # bytes; nothing says how long the pickles are, so more is read as long as they are cut off
_NUMEL = 8  # bytes before each storage's own: how many elements it has


@many_objects()
def read(path: str) -> Checkpoint:
    """The index of the file at `path`. Raises `CkptError` on what is truncated, corrupt or not as torch.save writes."""
    with opened(path) as file:
        nbytes = file.size
        pickles = _read_pickles(path, file, nbytes)
        found, end = _find_storages(path, file, pickles, nbytes)
    storages = Storages(lambda key, size: _storage(path, found, key, size))
    for key, size in pickles.references.sizes.items():
        storages.get(key, size)  # those of bare storages too: the writer needs them all
    _shift_views(path, pickles.tree.root, pickles.references.views)
    tree = find_sections(pickles.tree.root, storages)
    tree.unreached = unreached(pickles.tree.root, storages, found, storages.found.__getitem__)
    return Checkpoint(
        source=path,
        format="torch_legacy",
        nbytes=nbytes,
        sections=tuple(place.section for place in tree.places.values()),
        others=tuple(tree.others),
        globals=foreign(pickles.tree.globals),
        container=Container(None, "", pickles.tree, tree),
        notes=(*tree.notes, *((f"{nbytes - end:,} bytes follow the last storage: not read",) if end < nbytes else ())),
        unreached=tree.unreached,
    )


# The pickles


@dataclass(slots=True, eq=False)
class _References:
    """Turns the pickle's persistent ids into those of a torch zip, where storages have numbers for names.

    `keys` leads from a storage's key in the file to its number; `widths` and `sizes` are the bytes of its elements and
    of all of it, by number. `views` are the references that mean a part of their storage: how many elements it begins
    behind the storage's first (written before torch 0.4), by the reference's id.
    """

    keys: dict[Any, str] = field(default_factory=dict)
    widths: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    views: dict[int, int] = field(default_factory=dict)
    kept: list[Persistent] = field(default_factory=list)  # so that the ids in `views` stay theirs

    def __call__(self, found: Any) -> Any:
        if found[0] == "module":  # a class with its source text, which torch compares and does not need
            return found[1]
        word, kind, key, location, numel, view = found
        if word != "storage" or type(kind) is not Global or type(key) not in (str, int) or type(numel) is not int:
            raise ValueError("a storage reference")
        row = dtypes.BY_STORAGE.get(kind.name)
        if numel < 0 or (row is None and kind.name != "UntypedStorage"):
            raise ValueError(f"a storage of {numel} elements, {kind}")
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
    """The pickles of a file: the tree of its contents, the keys of its storages in file order, and where they end."""

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
            return _parse(path, data)
        except CkptError:
            if len(data) < length or length >= limits().pickle_bytes:
                raise
        length *= 8


def _parse(path: str, data: bytes) -> _Pickles:
    magic = LEGACY_START.match(data)
    if magic is None:
        raise _unfit(path, "it does not begin with the magic number")
    protocol = loads(data, start=magic.end())
    if protocol.root != _PROTOCOL:
        raise _unfit(path, f"the version of the format is {protocol.root!r}, not {_PROTOCOL}")
    system = loads(data, start=protocol.end)
    references = _References()
    tree = loads(data, start=system.end, persistent=references)
    keys = loads(data, start=tree.end)
    if type(keys.root) is not list or not all(type(key) in (str, int) for key in keys.root):
        raise _unfit(path, "the list of its storages is none")
    return _Pickles(tree, references, keys.root, keys.end)


def _shift_views(path: str, root: Any, views: Mapping[int, int]) -> None:
    """Makes tensors on a view of a storage tensors on the storage itself, further behind its first element."""
    if not views:
        return
    todo, seen, whole = [root], set[int](), set(views)
    while todo:
        node = todo.pop()
        if type(node) not in HOLDS or id(node) in seen:
            continue
        seen.add(id(node))
        if is_tensor(node) and type(node.args) is tuple and id(node.args[0]) in views:
            if len(node.args) < 2 or type(node.args[1]) is not int:
                raise _unfit(path, f"the arguments of {node.func}")
            reference, offset, *rest = node.args
            node.args = (reference, offset + views[id(reference)], *rest)
            todo.extend(rest)
            whole.discard(id(reference))
        elif id(node) in views:
            raise _unfit(path, "a part of a storage stands outside of every tensor")
        else:
            todo.extend(HOLDS[type(node)](node))


# The storages


def _find_storages(path: str, file: Source, pickles: _Pickles, nbytes: int) -> tuple[dict[str, Span], int]:
    """Number -> where the storage's bytes lie, and where the last one ends."""
    found: dict[str, Span] = {}
    at = pickles.end
    file.prefetch(_expected(pickles))
    for key in pickles.keys:
        number = pickles.references.keys.get(key)
        if number is None or number in found:
            raise _unfit(path, f"storage {key} is listed twice, or belongs to nothing")
        numel = int.from_bytes(file.read_at(at, _NUMEL), "little", signed=True)
        length = numel * pickles.references.widths[number]
        if numel < 0 or at + _NUMEL + length > nbytes:
            raise CkptError(
                f"{path} is truncated: storage {key} ends at byte {at + _NUMEL + length:,}, the file at {nbytes:,}",
                hint="download or copy it again",
            )
        found[number] = Span(path, at + _NUMEL, length)
        at += _NUMEL + length
    return found, at


def _expected(pickles: _Pickles) -> Iterator[tuple[int, int]]:
    """Where the numbers of elements stand, if the storages are as long as the pickle says."""
    at = pickles.end
    for key in pickles.keys:
        yield at, _NUMEL
        at += _NUMEL + pickles.references.sizes.get(pickles.references.keys.get(key, ""), 0)


def _storage(path: str, found: Mapping[str, Span], number: str, nbytes: int) -> Storage:
    span = found.get(number)
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
