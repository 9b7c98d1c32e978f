"""Exported programs as torch wrote them before 2.9: the state dict is a torch zip in the zip, the constants another.

Up to torch 2.7 the records are ``serialized_state_dict.pt`` and ``serialized_constants.pt`` (at first these were
called ``.json``), in 2.8 ``NAME/data/weights/M.pt`` and ``NAME/data/constants/M.pt``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpttool.checkpoint import ExtraEntry, Section, Storage, TensorEntry, Unreached
from ckpttool.formats.containers.pickle_tree import Call, Pickle
from ckpttool.formats.containers.zip_archive import STORED, Archive, read_archive
from ckpttool.formats.pt2.program import CONSTANTS, Home, Inner, Payload, Program, compressed, damaged, program_sections
from ckpttool.formats.torch import zip_file as torch_zip
from ckpttool.formats.torch.mappings import pairs_of
from ckpttool.formats.torch.rebuild import is_parameter
from ckpttool.formats.torch.records import dumped
from ckpttool.formats.torch.tensors import Carried, Storages, entry_of, is_tensor
from ckpttool.formats.torch.tree import extra_of

GRAPH = "serialized_exported_program.json"  # of torch up to 2.7
UP_TO_2_7, IN_2_8 = "torch<=2.7", "torch 2.8"


def read_up_to_2_7(archive: Archive, root: str, name: str) -> Program:
    """The only program of the file. Raises `CkptError` where its state dict or its constants cannot be read."""
    stems = [f"{root}serialized_{what}" for what in ("state_dict", "constants")]
    records = [f"{stem}.json" if f"{stem}.json" in archive.by_name else f"{stem}.pt" for stem in stems]
    return _read(archive, name, UP_TO_2_7, root + GRAPH, records)


def read_2_8(archive: Archive, root: str, name: str) -> Program:
    """The program `name` of the file. Raises `CkptError` where its state dict or its constants cannot be read."""
    records = [f"{root}data/{kind}/{name}.pt" for kind in ("weights", "constants")]
    return _read(archive, name, IN_2_8, f"{root}models/{name}.json", records)


def _read(archive: Archive, name: str, layout: str, model: str, records: list[str]) -> Program:
    homes: dict[Storage, Home] = {}
    left: list[Unreached] = []
    weights = Section("", "state_dict", *_entries(archive, records[0], homes, left))
    empty: tuple[tuple[TensorEntry, ...], tuple[ExtraEntry, ...]] = ((), ())
    present = records[1] in archive.by_name  # torch 2.1 wrote no constants
    constants = Section(CONSTANTS, "other", *(_entries(archive, records[1], homes, left) if present else empty))
    sections = program_sections(weights, constants)
    return Program(archive, name, layout, model, sections, records, homes, unreached=tuple(left))


def renamed(program: Program, index: str, names: Mapping[str, str]) -> tuple[Inner, bytes]:
    """The torch zip `index` of the program, and its pickle with the entries called by their new `names`."""
    pickle, _, inner = open_record(program.archive, index)
    pairs = {names.get(key, key): node for key, node in (pairs_of(pickle.root) or {}).items()}
    if type(pickle.root) is Call:
        pickle.root.pairs = pairs
    return inner, dumped(pickle.root if type(pickle.root) is Call else pairs, pickle.protocol)[0]


def _entries(
    archive: Archive, record: str, homes: dict[Storage, Home], left: list[Unreached]
) -> tuple[tuple[TensorEntry, ...], tuple[ExtraEntry, ...]]:
    """The tensors and the other objects of the dict that the record holds."""
    pickle, storages, inner = open_record(archive, record)
    pairs = pairs_of(pickle.root)
    if pairs is None or not all(type(key) is str for key in pairs):
        raise damaged(archive.path, f"its record {record} is no state dict")
    tensors = tuple(_tensor(key, node, storages, record) for key, node in pairs.items() if is_tensor(node))
    objects = tuple(extra_of(key, node, storages) for key, node in pairs.items() if not is_tensor(node))
    for found in torch_zip.unreached_in(inner.archive, inner.folder, pickle.root, storages):
        left.append(replace(found, path=f"{record}: {found.path}"))
    homes.update((storage, Home(record, inner, f"data/{key}")) for key, storage in storages.found.items())
    return tensors, objects


def _tensor(key: str, node: Any, storages: Storages, record: str) -> TensorEntry:
    """The entry of a tensor's node; its payload says whether the node makes a Parameter."""
    entry = entry_of(key, node, storages)
    return replace(entry, payload=payload_of(record, entry))


def payload_of(record: str, entry: TensorEntry) -> Payload:
    """What the file says of the tensor's role."""
    assert isinstance(entry.payload, Carried)
    node = entry.payload.node
    return Payload(record, is_parameter(node), is_parameter(node) and node.args[1] is True, source=entry.payload)


def open_record(archive: Archive, name: str) -> tuple[Pickle, Storages, Inner]:
    """The torch zip in the record `name`: its pickle, its storages, and the archive that it is."""
    record = archive.by_name.get(name)
    if record is None:
        raise damaged(archive.path, f"its record {name} is missing")
    if record.method != STORED:
        raise compressed(archive.path, name)
    inner = read_archive(archive.path, archive.base + record.data, record.nbytes)
    folder, pickle, storages = torch_zip.open_tree(inner)
    return pickle, storages, Inner(inner, folder)
