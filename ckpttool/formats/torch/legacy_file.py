"""The format of torch.save before torch 1.6, still written by choice: five pickles, then the bytes of each storage.

Read to the same tree as a torch zip, and written as either. See `_legacy_save` in torch/serialization.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from functools import partial
from typing import Any, NamedTuple

from ckpttool.core import dtypes
from ckpttool.core.checkpoint import Checkpoint, Span, Storage
from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.core.keys import dotted
from ckpttool.core.limits import Memory, limits
from ckpttool.core.values import dataclass, many_objects
from ckpttool.formats.detect import LEGACY_START
from ckpttool.formats.pickle_read import Call, Global, Origin, Persistent, Pickle, loads
from ckpttool.formats.pickle_write import dumps
from ckpttool.formats.torch.tensors import (
    HOLDS,
    Carried,
    Rebuilder,
    Storages,
    is_tensor,
    typed_storage,
    with_references,
)
from ckpttool.formats.torch.tree import Tree, read_tree, unreached, ways
from ckpttool.formats.torch.zip_file import Container, tree_to_write
from ckpttool.io.files import Source, assume, opened
from ckpttool.io.paths import is_url
from ckpttool.io.pieces import Piece, Pieces

FORMAT = "torch_legacy"  # in the table of formats
UNREADABLE = (
    "torch.load raises for this file: a storage has no dtype, as those of float8 and of other new dtypes in the format "
    "before torch 1.6; `ckpttool remap` writes a file that it loads"
)
_MAGIC = 0x1950A86A20F9469CFC6C  # the first pickle
_PROTOCOL = 1001  # of the format, the second pickle
_TYPE_SIZES = {"short": 2, "int": 4, "long": 4}
_SYSTEM = {"protocol_version": _PROTOCOL, "little_endian": True, "type_sizes": _TYPE_SIZES}  # the third one
_FIRST_READ = 1 << 17  # bytes; nothing says how long the pickles are, so more is read as long as they are cut off
_NUMEL = 8  # bytes before each storage's own: how many elements it has


@many_objects()
def read(path: str) -> Checkpoint:
    """The index of the file at `path`. Raises `CkptError` on what is truncated, corrupt or not as torch.save writes."""
    with opened(path) as file:
        nbytes = file.size
        pickles = _read_pickles(path, file, nbytes)
        found, end = _find_storages(path, file, pickles, nbytes)
    memory = pickles.tree.memory or Memory(nbytes)
    storages = Storages(lambda key, size: _storage(path, found, key, size), memory=memory, pickled=pickles.end)
    storages.untyped = pickles.references.untyped
    for key, size in pickles.references.sizes.items():
        storages.get(key, size)  # those of bare storages too: the writer needs them all
    _shift_views(path, pickles.tree.root, pickles.references.views)
    behind = (f"{nbytes - end:,} bytes follow the last storage: not read",) if end < nbytes else ()

    def made(tree: Tree) -> Checkpoint:
        tree.unreached = unreached(pickles.tree.root, storages, found, storages.found.__getitem__)
        return Checkpoint(
            source=path,
            format=FORMAT,
            nbytes=nbytes,
            sections=tuple(place.section for place in tree.places.values()),
            others=tuple(tree.others),
            container=Container(None, "", pickles.tree, tree),
            notes=(*tree.notes, *behind),
            unreached=tree.unreached,
        )

    return read_tree(pickles.tree.root, storages, made)


def refused_by_torch(checkpoint: Checkpoint) -> bool:
    """Return whether torch.load raises for the file: in this format it asks every storage for its dtype.

    torch.save writes storages without one all the same, for each dtype newer than bfloat16 (float8, uint16, complex32).
    """
    if checkpoint.format != FORMAT:
        return False
    if isinstance(checkpoint.container, Container):
        return checkpoint.container.tree.storages.untyped
    tensors = (entry.payload for section in checkpoint.sections for entry in section.all_tensors())
    return any(isinstance(payload, Carried) and payload.storages.untyped for payload in tensors)  # a picked section


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
    untyped: bool = False  # a storage has no dtype

    def __call__(self, found: Any) -> Any:
        if found[0] == "module":  # a class with its source text, which torch compares and does not need
            return found[1]
        word, kind, key, location, numel, view = found
        if word != "storage" or type(kind) is not Global or type(key) not in (str, int) or type(numel) is not int:
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
        if is_tensor(node) and node.args and id(node.args[0]) in views:
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


_Found = tuple[dict[str, Span], int]


def _find_storages(path: str, file: Source, pickles: _Pickles, nbytes: int) -> _Found:
    """Number -> where the storage's bytes lie, and where the last one ends."""
    assumed = _as_pickled(path, pickles)
    if assumed is None or assumed[1] != nbytes:
        return _read_storages(path, file, pickles, nbytes)
    assume(path, partial(_check, path, file, pickles, assumed))
    return assumed


def _as_pickled(path: str, pickles: _Pickles) -> _Found | None:
    """`_find_storages` of a remote file, if the storages are as long as the pickle says: nothing is read."""
    found: dict[str, Span] = {}
    at = pickles.end
    for key in pickles.keys:
        number = pickles.references.keys.get(key, "")
        if not is_url(path) or number in found or number not in pickles.references.sizes:
            return None
        found[number] = Span(path, at + _NUMEL, pickles.references.sizes[number])
        at += _NUMEL + found[number].length
    return found, at


def _check(path: str, file: Source, pickles: _Pickles, assumed: _Found) -> None:
    """Raises `CkptError` where the storages are not as long as the pickle says."""
    if _read_storages(path, file, pickles, assumed[1]) != assumed:
        raise _unfit(path, "its storages are not as long as its pickle says")


def _read_storages(path: str, file: Source, pickles: _Pickles, nbytes: int) -> _Found:
    """`_find_storages`, by the numbers of elements that stand before the storages."""
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


# Writing


@many_objects()
def layout(checkpoint: Checkpoint) -> Pieces:
    """The bytes of the checkpoint's file, storages moved as they are.

    Raises `Refused`, all problems at once, for storages that torch would not load from this format: untyped ones, among
    them those of dtypes that came later, and those that tensors of several dtypes look at; and for what needs values to
    be made, as torch reads all storages at last.
    """
    root, protocol, rebuilder = tree_to_write(checkpoint)
    references: list[Persistent] = []
    dumps(Pickle(root, protocol), references)
    _know_all(checkpoint, references, rebuilder)
    widths, problems = _widths(checkpoint, references, rebuilder)
    problems += [
        Problem("torch would make it of values that come after it", path) for path in ways(root, _early).values()
    ]
    if problems:
        raise Refused(
            "not every tensor fits into the format of torch.save before torch 1.6",
            hint="write a torch zip: leave --torch-format out",
            problems=problems,
        )
    numels = {key: rebuilder.storages[key].nbytes // width for key, width in widths.items()}

    def older(reference: Persistent) -> Persistent:
        return Persistent((*reference.id[:4], numels[reference.id[2]], None))  # no view of another storage

    parts = (_MAGIC, _PROTOCOL, _SYSTEM, with_references(root, older), list(numels))
    pieces = [Piece(b"".join(dumps(Pickle(part, protocol)) for part in parts))]
    for key, numel in numels.items():
        pieces += [Piece(numel.to_bytes(_NUMEL, "little")), Piece(rebuilder.storages[key].data)]
    return pieces


_EARLY = {
    Global("torch._utils", "_rebuild_nested_tensor"),
    Global("torch", "ScriptObject"),
    Global("torch._C", "Generator"),
}


def _early(node: Any) -> int | None:
    """The id of a node that reads the values of its tensors when it is made; None for any other."""
    return id(node) if type(node) is Call and type(node.func) is Global and node.func in _EARLY else None


def _know_all(checkpoint: Checkpoint, references: Sequence[Persistent], rebuilder: Rebuilder) -> None:
    """Looks up the storages that no tensor is made of."""
    if not isinstance(checkpoint.container, Container):
        return
    storages = checkpoint.container.tree.storages
    for reference in references:
        if reference.id[2] not in rebuilder.storages:
            rebuilder.adopt(typed_storage(reference, storages)[1], reference.id[2])


def _widths(
    checkpoint: Checkpoint, references: Sequence[Persistent], rebuilder: Rebuilder
) -> tuple[dict[str, int], list[Problem]]:
    """The bytes of an element of each storage by its key, in the order of the pickle; and those that have none."""
    kinds: defaultdict[str, set[str]] = defaultdict(set)
    for _, kind, key, *_ in (reference.id for reference in references):
        kinds[key].add(kind.name)
    rows = {key: [dtypes.BY_STORAGE.get(name) for name in names] for key, names in kinds.items()}
    widths = {key: row.itemsize for key, (row, *more) in rows.items() if row is not None and not more}
    widths = {key: width for key, width in widths.items() if rebuilder.storages[key].nbytes % width == 0}
    names = {
        id(entry.storage): dotted(section.path, entry.key)
        for section in reversed(checkpoint.sections)
        for entry in reversed(section.all_tensors())
    }
    unfit = [key for key in rows if key not in widths]
    keys = [names.get(id(rebuilder.storages[key]), f"storage {key}") for key in unfit]
    return widths, [Problem("its storage is not of one dtype that was known then", key) for key in keys]
