"""AOTInductor packages: compiled code, and its weights beside it where it was packaged so.

``NAME/data/aotinductor/M/weights_config.json`` says of each weight its record ``NAME/data/weights/weight_N`` (a torch
zip of one tensor, perhaps with several weights in it) and its geometry there; models share records.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpttool.core.checkpoint import Section, Storage, TensorEntry
from ckpttool.core.dtypes import itemsize
from ckpttool.core.limits import limits
from ckpttool.core.schema import COUNT, SHAPE, TEXT, items, map_of
from ckpttool.formats.pt2.layouts import open_record, payload_of
from ckpttool.formats.pt2.program import CONSTANTS, Home, Payload, Program, damaged, program_sections, read_json
from ckpttool.formats.torch.tensors import entry_of, is_tensor
from ckpttool.formats.zip_read import Archive, read_record

FOLDER = "data/aotinductor/"
LAYOUT = "AOTInductor"
OUTSIDE = (
    "compile it again with its weights outside: torch._inductor.aoti_compile_and_package(program, package_path=..., "
    "inductor_configs={'aot_inductor.package_constants_in_so': False, "
    "'aot_inductor.package_constants_on_disk_format': 'pickle_weights'})"
)
INSIDE = (
    "small weights (up to 8 elements in one dimension) are in the compiled code itself: compile it again for new ones"
)

MOST_INLINED = 8  # elements

_CONFIG = "weights_config.json"
_KIND = re.compile(r"constants_info_\[(\d+)\]\.type = [^;\n]*ConstantType::(\w+)\)")
_FQN = re.compile(r'constants_info_\[(\d+)\]\.original_fqn = "([^"\n]*)"')
_CONSTANTS = ("TensorConstant", "FoldedConstant")
_WEIGHTS = map_of(items(TEXT, SHAPE, SHAPE, COUNT))  # the record, sizes, strides, offset


def models(archive: Archive, root: str) -> list[str]:
    """The names of the compiled models in the file."""
    start = root + FOLDER
    inside = [r.name.removeprefix(start) for r in archive.records if r.name.startswith(start)]
    return list(dict.fromkeys(name.partition("/")[0] for name in inside if "/" in name))


def read(archive: Archive, root: str, name: str) -> Program:
    """The compiled model `name` of the file; without sections where its weights are inside the code."""
    files = [r.name for r in archive.records if r.name.startswith(f"{root}{FOLDER}{name}/")]
    config = f"{root}{FOLDER}{name}/{_CONFIG}"
    if config not in files:
        return Program(archive, name, LAYOUT, "", (), notes=(_without(files, name),))
    entries, homes = _entries(archive, root, config)
    lifted = _lifted(archive, files)
    weights = Section("", "state_dict", tuple(entry for entry in entries if entry.key not in lifted))
    constants = Section(CONSTANTS, "other", tuple(entry for entry in entries if entry.key in lifted))
    note = (
        f"{name} is compiled code: weights that it does not use are not in the file, and small ones "
        "(up to 8 elements in one dimension) are in the code itself"
    )
    sections = program_sections(weights, constants)
    return Program(archive, name, LAYOUT, "", sections, (), homes, _shared(archive, root, name), (note,))


def is_inlined(entry: TensorEntry) -> bool:
    """Whether the compiler writes a tensor of this shape into the code, where no swap reaches it."""
    return len(entry.shape) <= 1 and entry.numel <= MOST_INLINED


def _lifted(archive: Archive, files: list[str]) -> set[str]:
    """The tensors that stood in the model's code, and are no weights: what the package has of its source says so."""
    found: set[str] = set()
    for file in files:
        if file.endswith(".cpp") and archive.by_name[file].nbytes <= limits().json_bytes:
            text = read_record(archive, archive.by_name[file], limits().json_bytes).decode(errors="replace")
            kinds = {match[1]: match[2] for match in _KIND.finditer(text)}
            names = {match[1]: match[2] for match in _FQN.finditer(text)}
            found.update(name for number, name in names.items() if kinds.get(number) in _CONSTANTS)
    return found


def _without(files: list[str], name: str) -> str:
    if any(file.endswith((".blob", "_weights.bin")) for file in files):
        return f"the weights of {name} are one block of bytes without names: {OUTSIDE}"
    return f"the weights of {name} are compiled into its shared library, or left out of the package: {OUTSIDE}"


def _entries(archive: Archive, root: str, config: str) -> tuple[tuple[TensorEntry, ...], dict[Storage, Home]]:
    found: list[TensorEntry] = []
    homes: dict[Storage, Home] = {}
    complete: dict[str, tuple[TensorEntry, Payload]] = {}
    try:
        for fqn, (file, *geometry) in read_json(archive, config, _WEIGHTS, "torch").items():
            record = f"{root}data/weights/{file}"
            if record not in complete:
                complete[record] = _complete(archive, record, homes)
            whole, payload = complete[record]
            found.append(_view(fqn, whole, geometry, payload))
    except ValueError as error:
        raise damaged(archive.path, f"{config} is not as torch writes it: {error}") from error
    return tuple(found), homes


def _complete(archive: Archive, record: str, homes: dict[Storage, Home]) -> tuple[TensorEntry, Payload]:
    """The tensor that the record holds."""
    pickle, storages, inner = open_record(archive, record)
    if not is_tensor(pickle.root):
        raise damaged(archive.path, f"its record {record} is no tensor")
    whole = entry_of(record, pickle.root, storages)
    homes.update((storage, Home(record, inner, f"data/{key}")) for key, storage in storages.found.items())
    return whole, payload_of(record, whole)


def _view(fqn: str, whole: TensorEntry, geometry: list[Any], payload: Payload) -> TensorEntry:
    """The weight as ``whole.as_strided(*geometry)``."""
    shape, stride, offset = tuple(geometry[0]), tuple(geometry[1]), geometry[2]
    if len(shape) != len(stride):
        raise ValueError(f"{fqn} has {len(shape)} sizes and {len(stride)} strides")
    view = replace(whole, key=fqn, shape=shape, stride=stride, offset=offset, payload=payload)
    reach = view.end * itemsize(whole.dtype)
    if view.storage is None or reach > view.storage.nbytes:
        raise ValueError(f"{fqn} needs {reach} bytes of a strided tensor, which its record has not")
    return view


def _shared(archive: Archive, root: str, name: str) -> Mapping[str, list[str]]:
    """Record -> the other models whose weights are in it."""
    found: dict[str, list[str]] = {}
    for other in models(archive, root):
        config = f"{root}{FOLDER}{other}/{_CONFIG}"
        if other == name or config not in archive.by_name:
            continue
        for file in {entry[0] for entry in read_json(archive, config, _WEIGHTS, "torch").values()}:
            found.setdefault(f"{root}data/weights/{file}", []).append(other)
    return found
