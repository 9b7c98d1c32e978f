"""The layouts of `.pt2` files: torch 2.9 and later, and the earlier ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpttool.core.checkpoint import ExtraEntry, Section, Storage, TensorEntry, Unreached
from ckpttool.core.dtypes import BY_PT2, itemsize
from ckpttool.core.schema import COUNT, FLAG, TEXT, list_of, map_of, nullable, object_of
from ckpttool.formats.pickle_read import Call, Pickle
from ckpttool.formats.pt2.program import (
    CONSTANTS,
    Home,
    Inner,
    Payload,
    Program,
    RecordOf,
    compressed,
    damaged,
    program_sections,
    read_json,
)
from ckpttool.formats.torch import zip_file as torch_zip
from ckpttool.formats.torch.nodes import pairs_of
from ckpttool.formats.torch.tensors import Carried, Storages, entry_of, is_parameter, is_tensor
from ckpttool.formats.torch.tree import extra_of
from ckpttool.formats.torch.write_tree import dumped
from ckpttool.formats.zip_read import STORED, Archive, Record, read_archive

LAYOUT = "torch>=2.9"

_LAYOUTS = dict(
    enumerate(("sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "mkldnn", "strided"), start=1)
)


_SIZE = object_of({"as_int": COUNT})  # a weight has no symbolic sizes
_TENSOR = object_of(
    {
        "dtype": COUNT,
        "sizes": list_of(_SIZE),
        "strides": list_of(_SIZE),
        "storage_offset": _SIZE,
        "layout": COUNT,
        "requires_grad": FLAG,
    }
)
_PAYLOAD = object_of({"path_name": TEXT, "is_param": FLAG, "use_pickle": FLAG, "tensor_meta": nullable(_TENSOR)})
_CONFIG = object_of({"config": map_of(_PAYLOAD)})


def read(archive: Archive, root: str, name: str) -> Program:
    """Read the program `name`. Raises `CkptError` if its configs are not as torch.export.save writes them."""
    homes: dict[Storage, Home] = {}
    folders = [f"{root}data/{kind}/" for kind in ("weights", "constants")]
    configs = [f"{folder}{name}_{folder.split('/')[-2]}_config.json" for folder in folders]
    weights = Section("", "state_dict", *_payloads(archive, folders[0], configs[0], homes))
    constants = Section(CONSTANTS, "other", *_payloads(archive, folders[1], configs[1], homes))
    sections = program_sections(weights, constants)
    return Program(archive, name, LAYOUT, f"{root}models/{name}.json", sections, configs, homes)


def renamed(program: Program, index: str, names: Mapping[str, str]) -> bytes:
    """Return the config `index` of the program with new `names` for its entries."""
    value = read_json(program.archive, index, _CONFIG, "torch.export.save")
    value["config"] = {names.get(fqn, fqn): meta for fqn, meta in value["config"].items()}
    return json.dumps(value).encode()


def _payloads(
    archive: Archive, folder: str, config: str, homes: dict[Storage, Home]
) -> tuple[tuple[TensorEntry, ...], tuple[ExtraEntry, ...]]:
    """Return the tensors and the other objects that the config lists; their records are in the folder."""
    value = read_json(archive, config, _CONFIG, "torch.export.save")
    tensors: list[TensorEntry] = []
    objects: list[ExtraEntry] = []
    storages: dict[str, Storage] = {}
    try:
        for fqn, meta in value["config"].items():
            record = archive.by_name.get(f"{folder}{meta['path_name']}")
            if record is None:
                raise damaged(archive.path, f"the record {meta['path_name']} of {fqn} is missing")
            if meta["tensor_meta"] is None:
                objects.append(ExtraEntry(fqn, RecordOf(archive, record)))
            else:
                tensors.append(_tensor(archive, record, fqn, meta, storages))
    except ValueError as error:
        raise damaged(archive.path, f"{config} is not as torch.export.save writes it: {error}") from error
    homes.update((storage, Home(record)) for record, storage in storages.items())
    return tuple(tensors), tuple(objects)


def _tensor(
    archive: Archive, record: Record, fqn: str, meta: Mapping[str, Any], storages: dict[str, Storage]
) -> TensorEntry:
    tensor = meta["tensor_meta"]
    if tensor["dtype"] not in BY_PT2:
        raise damaged(archive.path, f"{fqn} has the dtype number {tensor['dtype']!r}, which ckpttool does not know")
    dtype = BY_PT2[tensor["dtype"]].name
    shape, stride = (tuple(size["as_int"] for size in tensor[which]) for which in ("sizes", "strides"))
    offset = tensor["storage_offset"]["as_int"]
    if len(shape) != len(stride):
        raise ValueError(f"{fqn} has {len(shape)} sizes and {len(stride)} strides")
    pickled = meta["use_pickle"]
    source = RecordOf(archive, record) if pickled else None
    payload = Payload(record.name, meta["is_param"], tensor["requires_grad"], pickled, source)
    layout = "subclass" if pickled else _LAYOUTS.get(tensor["layout"], "unknown")
    entry = TensorEntry(fqn, dtype, shape, stride, offset, None, layout, record.nbytes, payload)
    reach = entry.end * itemsize(dtype)
    if layout == "strided" and reach and not record.nbytes:
        return replace(entry, layout="meta")  # exported with fake weights: no values were saved
    if layout != "strided":
        return entry
    if reach > record.nbytes:
        raise damaged(archive.path, f"{fqn} needs {reach} bytes, its record {record.name} has {record.nbytes}")
    if record.method != STORED:
        raise compressed(archive.path, record.name)
    # tensors without elements may share a record without sharing anything
    new = Storage(archive.span(record))
    storage = storages.setdefault(record.name, new) if reach else new
    return replace(entry, storage=storage, packed_bytes=0)


GRAPH = "serialized_exported_program.json"  # of torch up to 2.7
UP_TO_2_7, IN_2_8 = "torch<=2.7", "torch 2.8"


def read_up_to_2_7(archive: Archive, root: str, name: str) -> Program:
    """Read the only program of the file. Raises `CkptError` if its state dict or its constants cannot be read."""
    stems = [f"{root}serialized_{what}" for what in ("state_dict", "constants")]
    records = [f"{stem}.json" if f"{stem}.json" in archive.by_name else f"{stem}.pt" for stem in stems]
    return _read(archive, name, UP_TO_2_7, root + GRAPH, records)


def read_2_8(archive: Archive, root: str, name: str) -> Program:
    """Read the program `name`. Raises `CkptError` if its state dict or its constants cannot be read."""
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


def renamed_until_2_8(program: Program, index: str, names: Mapping[str, str]) -> tuple[Inner, bytes]:
    """Return the torch zip `index` of the program, and its pickle with new `names` for the entries."""
    pickle, _, inner = open_record(program.archive, index)
    pairs = {names.get(key, key): node for key, node in (pairs_of(pickle.root) or {}).items()}
    if type(pickle.root) is Call:
        pickle.root.pairs = pairs
    return inner, dumped(pickle.root if type(pickle.root) is Call else pairs, pickle.protocol)[0]


def _entries(
    archive: Archive, record: str, homes: dict[Storage, Home], left: list[Unreached]
) -> tuple[tuple[TensorEntry, ...], tuple[ExtraEntry, ...]]:
    """Return the tensors and the other objects of the dict in the record."""
    pickle, storages, inner = open_record(archive, record)
    pairs = pairs_of(pickle.root)
    if pairs is None or not all(type(key) is str for key in pairs):
        raise damaged(archive.path, f"its record {record} is not a state dict")
    entries = [entry_of(key, node, storages) for key, node in pairs.items() if is_tensor(node)]
    tensors = tuple(replace(entry, payload=payload_of(record, entry)) for entry in entries)
    objects = tuple(extra_of(key, node, storages) for key, node in pairs.items() if not is_tensor(node))
    for found in torch_zip.unreached_in(inner.archive, inner.folder, pickle.root, storages):
        left.append(replace(found, path=f"{record}: {found.path}"))
    homes.update((storage, Home(record, inner, f"data/{key}")) for key, storage in storages.found.items())
    return tensors, objects


def payload_of(record: str, entry: TensorEntry) -> Payload:
    """Return the role of a tensor: its node says whether it is a Parameter."""
    assert isinstance(entry.payload, Carried)
    node = entry.payload.node
    return Payload(record, is_parameter(node), is_parameter(node) and node.args[1] is True, source=entry.payload)


def open_record(archive: Archive, name: str) -> tuple[Pickle, Storages, Inner]:
    """Open the torch zip in the record `name`: return its pickle, its storages, and its archive."""
    record = archive.by_name.get(name)
    if record is None:
        raise damaged(archive.path, f"its record {name} is missing")
    if record.method != STORED:
        raise compressed(archive.path, name)
    inner = read_archive(archive.path, archive.base + record.data, record.nbytes)
    folder, pickle, storages = torch_zip.open_tree(inner)
    return pickle, storages, Inner(inner, folder)
