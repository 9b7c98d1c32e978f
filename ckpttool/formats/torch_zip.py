"""The format of torch.save since torch 1.6: a zip archive of ``NAME/data.pkl`` and a record for
each storage.

Reading indexes the tensors of the pickle without executing it. Writing changes the tree of the
pickle and moves the storages as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from io import BytesIO
from itertools import pairwise
from typing import Any

from ckpttool.containers.pickle_read import Origin, Pickle, check_size, loads, note_unreadable
from ckpttool.containers.tensors import Carried, Rebuilder, Storages, is_parameter
from ckpttool.containers.tree import Container, read_tree
from ckpttool.containers.write_tree import changed_records, changed_root, dumped, fresh_root, key_of
from ckpttool.containers.zip_read import (
    ALIGNMENT,
    STORED,
    Archive,
    Record,
    read_archive,
    read_record,
)
from ckpttool.containers.zip_write import NewRecord, edit_behind, layout_archive, with_new
from ckpttool.core.checkpoint import Checkpoint, Lazy, Span, Storage
from ckpttool.core.errors import CkptError
from ckpttool.core.limits import Memory, limits
from ckpttool.core.values import many_objects
from ckpttool.io.pieces import Edited, Pieces

_MAX_NOTE = 64  # bytes of the records that hold a word or a number
_LARGEST_ELEMENT = 16  # bytes, of complex128
_PICKLE = re.compile(r"[^/]*/data\.pkl")


# Reading


def read(path: str) -> Checkpoint:
    """Return the index of the file at `path`. Raises `CkptError` if it is corrupt or not as
    torch.save writes it.
    """
    return read_from(read_archive(path), path)


@many_objects()
def read_from(archive: Archive, source: str) -> Checkpoint:
    """Return the index of an archive that torch.save wrote; `source` is the user's name for it."""
    folder, pickle, storages = open_tree(archive)
    _look_into_others(archive, folder)
    return read_tree(
        source,
        "torch_zip",
        archive.length,
        pickle,
        storages,
        sizes_in(archive, folder),
        container=partial(Container, archive=archive, folder=folder),
    )


def sizes_in(archive: Archive, folder: str) -> dict[str, int]:
    """Return the bytes of every storage in the archive by its key."""
    sizes = {}
    for record in archive.records:
        key = key_of(record, folder)
        if key is not None:
            sizes[key] = record.nbytes
    return sizes


def open_tree(archive: Archive) -> tuple[str, Pickle, Storages]:
    """Return the folder of all records with its slash, the pickle, and the storages that its
    tensors refer to.

    Raises `CkptError` for an archive that torch.save did not write.
    """
    folder = folder_of(archive)
    if folder + "constants.pkl" in archive.by_name:
        raise _unfit(archive, "it is a TorchScript archive")
    check_byteorder(archive, folder)
    pickle = read_pickle(archive, folder + "data.pkl")
    memory = pickle.memory or Memory(archive.length)
    find = partial(find_storage, archive, folder)
    return folder, pickle, Storages(find, memory=memory, pickled=pickle.end)


def read_pickle(archive: Archive, name: str) -> Pickle:
    """Read the pickle in the record `name`. Raises `CkptError` if it is damaged, or other bytes
    follow it.
    """
    record = archive.by_name[name]
    origin = origin_of(archive, record)
    data = read_pickled(archive, record, origin)
    pickle = loads(data, origin=origin)
    if pickle.end != len(data):
        raise _unfit(archive, f"{len(data) - pickle.end} bytes follow the pickle in {name}")
    return pickle


def origin_of(archive: Archive, record: Record) -> Origin:
    span = archive.span(record)
    return Origin(archive.path, archive.length, record.name, span.offset, span.offset + span.length)


def read_pickled(archive: Archive, record: Record, origin: Origin) -> bytes:
    """Return the bytes of a record that holds pickles. Raises `CkptError` if they exceed a limit or
    are damaged.
    """
    nbytes = max(record.size, record.nbytes)
    if nbytes > limits().pickle_bytes:
        raise CkptError(
            f"{archive.path}: record {record.name} has {nbytes:,} bytes:"
            f" {limits().named('pickle_bytes')}",
            hint="the file is damaged or hostile: download or save it again",
        )
    check_size(record.size, origin)
    return read_record(archive, record, nbytes)


_IMPORTING = b"ci\x82\x83\x84\x93"  # GLOBAL, INST, EXT1, EXT2, EXT4, STACK_GLOBAL
_WITH_LENGTH = b"X\x8c\x8dTUBC\x8e\x96\x8a\x8b"
_MOST_SCANNED = 1 << 20  # bytes: Python's scanner takes a microsecond for each opcode


def _may_import(data: bytes) -> bool:
    """Return False if no unpickler reaches an opcode that imports.

    All of them stop at a byte that is not an opcode, and at a length that goes beyond the end.
    """
    from pickletools import genops, opcodes

    if len(data) > _MOST_SCANNED:
        return True
    end, file = 0, BytesIO(data)  # the end of the last opcode
    try:
        for opcode, _, _ in genops(file):
            if ord(opcode.code) in _IMPORTING:
                return True
            end = file.tell()
    except ValueError:
        if end == len(data):
            return False
        codes = {ord(opcode.code) for opcode in opcodes}
        return data[end] in codes and data[end] not in _WITH_LENGTH
    return False


def _look_into_others(archive: Archive, folder: str) -> None:
    """Note the imports of other records that are pickles: ``torch.load(pickle_file=NAME)`` runs
    them.

    Python may go on where our reader stops, so a record that cannot be read may be a pickle.
    """
    for record in archive.records:
        name = record.name.removeprefix(folder).lower()  # as torch finds it
        if name in ("data.pkl", "byteorder") or (key_of(record, folder) or "").isdigit():
            continue
        origin, data = origin_of(archive, record), None
        try:
            data = read_pickled(archive, record, origin)
            loads(data, origin=origin)  # which collects the imports
        except CkptError as error:
            if data is None or _may_import(data):
                note_unreadable(origin, error)


def folder_of(archive: Archive, writer: str = "torch.save") -> str:
    """Return the folder of all records with its slash. Raises `CkptError` if there is none, or are
    two.
    """
    pickles = [name for name in archive.by_name if _PICKLE.fullmatch(name)]
    if len(pickles) != 1:
        raise _unfit(archive, f"{len(pickles)} records are called NAME/data.pkl, not one", writer)
    folder = pickles[0].removesuffix("data.pkl")
    outside = next((name for name in archive.by_name if not name.startswith(folder)), None)
    if outside is not None:
        raise _unfit(
            archive, f"{outside} is not in the folder {folder} of the other records", writer
        )
    return folder


def check_byteorder(archive: Archive, folder: str) -> None:
    """Raise `CkptError` if the record ``byteorder`` says that storages are not little-endian."""
    name = f"{folder}byteorder".lower()  # torch ignores case
    record = next((record for record in archive.records if record.name.lower() == name), None)
    if record is not None and read_record(archive, record, _MAX_NOTE) != b"little":
        raise CkptError(
            f"{archive.path}: its storages are not little-endian",
            hint="load and save it with torch on the machine where it is used",
        )


def find_storage(archive: Archive, folder: str, key: str, nbytes: int) -> Storage:
    """Return the storage `key`, which holds `nbytes` by its tensors. Raises `CkptError` if it does
    not.
    """
    record = archive.by_name.get(f"{folder}data/{key}")
    if record is None:
        raise _unfit(archive, f"storage {key} is missing")
    if record.method != STORED:
        raise CkptError(
            f"{archive.path}: storage {key} is compressed, so the file does not contain the bytes"
            " of its tensors",
            hint="store it again uncompressed: unzip it to a folder, then zip -0 -r OUT.pt FOLDER",
        )
    # a storage need not be a whole number of elements, of which the largest has 16 bytes
    if not 0 <= record.nbytes - nbytes < _LARGEST_ELEMENT:
        raise _unfit(archive, f"storage {key} is {record.nbytes} bytes, its tensors say {nbytes}")
    return Storage(archive.span(record))


def _unfit(archive: Archive, message: str, writer: str = "torch.save") -> CkptError:
    return CkptError(
        f"{archive.path}: not as {writer} writes it: {message}",
        hint=f"the file is damaged, or written by another program: save it again with {writer}",
    )


# Writing


@many_objects()
def layout(checkpoint: Checkpoint) -> Pieces:
    """Return the bytes of the checkpoint's file: the file it was read from (its `container`) with
    the changes.

    Raises `Refused` for an entry that this format cannot hold, or cannot hold at its place.
    """
    container = checkpoint.container
    if not isinstance(container, Container):
        rebuilder = Rebuilder()
        return new_archive(fresh_root(checkpoint, rebuilder), 2, rebuilder)
    archive, folder = container.archive, container.folder
    if archive is None:
        root, rebuilder = _root_with_changes(checkpoint, container)
        return new_archive(root, container.pickle.protocol, rebuilder)
    changed = _records_with_changes(checkpoint, container, archive)
    if changed is None:
        return layout_archive(archive, archive.records)
    entries, keys = changed
    entries = _without_version(entries, folder, keys, entries)
    return layout_archive(archive, entries, _alignment(archive, folder))


def holds_unused_bytes(checkpoint: Checkpoint) -> bool:
    """Return whether the file that was read holds records that it no longer lists, as after an edit
    in place.
    """
    container = checkpoint.container
    return (
        isinstance(container, Container)
        and container.archive is not None
        and not container.archive.is_tight
    )


@many_objects()
def layout_in_place(checkpoint: Checkpoint) -> Edited | None:
    """Return the file that was read, followed by a new pickle and a new directory; the old ones
    stay, unused.

    None if it is not a torch zip, or storages are new; if nothing changes, the file itself. Raises
    as `layout`.
    """
    container = checkpoint.container
    if not isinstance(container, Container) or container.archive is None:
        return None
    archive = container.archive
    changed = _records_with_changes(checkpoint, container, archive, keep_numbers=True)
    if changed is None:
        return edit_behind(archive, archive.records)
    entries, keys = changed
    kept = [entry for entry in entries if isinstance(entry, Record)]
    kept.sort(key=lambda record: record.start)
    placed: list[Record | None] = [*kept[:1]]  # in the order of the file, None for other bytes
    for last, record in pairwise(kept):
        if last.end != record.start:
            placed.append(None)
        placed.append(record)
    entries = _without_version(entries, container.folder, keys, placed)
    return edit_behind(archive, entries, _alignment(archive, container.folder))


def _root_with_changes(checkpoint: Checkpoint, container: Container) -> tuple[Any, Rebuilder]:
    """Return the pickle's tree with the checkpoint's tensors, and the rebuilder that made its new
    nodes.
    """
    archive = container.archive
    taken = set() if archive is None else set(sizes_in(archive, container.folder))
    rebuilder = Rebuilder(taken=taken)
    # new nodes name a class by the node that the old ones have
    for global_node in reversed(container.pickle.globals):
        rebuilder.globals[str(global_node)] = global_node
    rebuilder.learn(container.tree.storages)
    return changed_root(checkpoint, container.pickle.root, container.tree, rebuilder), rebuilder


def _records_with_changes(
    checkpoint: Checkpoint, container: Container, archive: Archive, *, keep_numbers: bool = False
) -> tuple[list[Record | NewRecord], dict[str, None]] | None:
    """Return the records of the archive with the checkpoint's tensors, and their keys in the
    pickle's order.

    None if nothing changes.
    """
    root, rebuilder = _root_with_changes(checkpoint, container)
    if root is container.pickle.root and checkpoint.unreached == container.tree.unreached:
        return None
    orphans = []
    for unreached in checkpoint.unreached:
        if not unreached.is_referred:
            orphans.append(unreached.path.removeprefix("data/"))
    folder, protocol = container.folder, container.pickle.protocol
    return changed_records(
        archive, folder, root, protocol, rebuilder, orphans, keep_numbers=keep_numbers
    )


def _without_version(
    entries: list[Record | NewRecord],
    folder: str,
    keys: dict[str, None],
    placed: Sequence[Record | NewRecord | None],
) -> list[Record | NewRecord]:
    """Return the entries, without ``.format_version`` if a reader that trusts it would compute
    wrong places.

    From version 1 on torch computes the place of a storage from those read before it, if they are
    read in file order and the first one is called 0 (`calculate_storage_offsets`, and always when
    it loads to the meta device). `placed` are the records in the order of the file, None for bytes
    of no record.
    """
    storages: dict[int, str] = {}  # place among the records -> key
    for place, entry in enumerate(placed):
        key = None if entry is None else key_of(entry, folder)
        if key is not None:
            storages[place] = key
    in_a_row = not storages or max(storages) - min(storages) == len(storages) - 1
    if in_a_row and [*storages.values()] == [*keys] and next(iter(keys), "0") == "0":
        return entries
    return [entry for entry in entries if entry.name != folder + ".format_version"]


def _alignment(archive: Archive, folder: str) -> int:
    record = archive.by_name.get(folder + ".storage_alignment")
    text = read_record(archive, record, _MAX_NOTE) if record is not None else b""
    return int(text) if text.isdigit() and 0 < int(text) <= 1 << 16 else ALIGNMENT


_FOLDER = "archive/"  # torch.save names it after the file, or "archive" without a name


def new_archive(root: Any, protocol: int, rebuilder: Rebuilder) -> Pieces:
    """Return the pieces of a new file, with the records and the order of today's ``torch.save``.

    Its serialization id, a random number in torch, is made from `root`: the same content gives the
    same bytes.
    """
    data, keys = dumped(root, protocol)
    import hashlib  # loads OpenSSL

    serialization_id = int.from_bytes(hashlib.sha256(data).digest(), "little") % 10**40
    notes = {
        ".format_version": b"1",
        ".storage_alignment": b"%d" % ALIGNMENT,
        "byteorder": b"little",
    }
    entries: list[Record | NewRecord] = [
        NewRecord(_FOLDER + "data.pkl", data),
        *(NewRecord(_FOLDER + name, note) for name, note in notes.items()),
        *(NewRecord(f"{_FOLDER}data/{key}", rebuilder.storages[key].data) for key in keys),
        NewRecord(_FOLDER + "version", b"3\n"),
        NewRecord(_FOLDER + ".data/serialization_id", b"%040d" % serialization_id),
    ]
    return layout_archive(None, _without_version(entries, _FOLDER, keys, entries))


def with_records(archive: Archive, data: Mapping[str, bytes | Span | Lazy]) -> Pieces:
    """Return the file with other bytes in some records, by their names in its folder; storages keep
    their sizes.
    """
    folder = folder_of(archive)
    new = {}
    for name, piece in data.items():
        new[folder + name] = piece
    return layout_archive(archive, with_new(archive.records, new), _alignment(archive, folder))


def of_tensor(carried: Carried, is_param: bool, requires_grad: bool) -> Pieces:
    """Return a new file of one tensor of another file, as its node rebuilds it; a Parameter if
    `is_param`.
    """
    rebuilder = Rebuilder()
    root = rebuilder.transplant(carried)
    if is_param and not is_parameter(root):
        root = rebuilder.parameter(root, requires_grad)
    return new_archive(root, 2, rebuilder)
