"""Exported programs as torch 2.9 and later write them: every storage a record of its own, and their geometry in JSON.

``NAME/data/weights/M_weights_config.json`` and ``weight_N`` (one record a storage), constants likewise, tensor
subclasses pickled; see torch/export/pt2_archive/_package.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpttool.checkpoint import ExtraEntry, Section, Storage, TensorEntry
from ckpttool.dtypes import BY_PT2, itemsize
from ckpttool.formats.containers.zip_archive import STORED, Archive, Record
from ckpttool.formats.pt2.program import (
    CONSTANTS,
    Home,
    Payload,
    Program,
    RecordOf,
    compressed,
    damaged,
    program_sections,
    read_json,
)
from ckpttool.json_schema import COUNT, FLAG, TEXT, list_of, map_of, nullable, object_of

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
    """The program `name` of the file. Raises `CkptError` where its configs are not as torch.export.save writes them."""
    homes: dict[Storage, Home] = {}
    folders = [f"{root}data/{kind}/" for kind in ("weights", "constants")]
    configs = [f"{folder}{name}_{folder.split('/')[-2]}_config.json" for folder in folders]
    weights = Section("", "state_dict", *_payloads(archive, folders[0], configs[0], homes))
    constants = Section(CONSTANTS, "other", *_payloads(archive, folders[1], configs[1], homes))
    sections = program_sections(weights, constants)
    return Program(archive, name, LAYOUT, f"{root}models/{name}.json", sections, configs, homes)


def renamed(program: Program, index: str, names: Mapping[str, str]) -> bytes:
    """The config `index` of the program with its entries called by their new `names`."""
    value = read_json(program.archive, index, _CONFIG, "torch.export.save")
    value["config"] = {names.get(fqn, fqn): meta for fqn, meta in value["config"].items()}
    return json.dumps(value).encode()


def _payloads(
    archive: Archive, folder: str, config: str, homes: dict[Storage, Home]
) -> tuple[tuple[TensorEntry, ...], tuple[ExtraEntry, ...]]:
    """The tensors and the other objects that the config lists; their records lie in the folder."""
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
    shape, stride = _sizes(tensor["sizes"]), _sizes(tensor["strides"])
    (offset,) = _sizes([tensor["storage_offset"]])
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


def _sizes(values: Sequence[Mapping[str, int]]) -> tuple[int, ...]:
    """Sizes, strides or offsets."""
    return tuple(value["as_int"] for value in values)
