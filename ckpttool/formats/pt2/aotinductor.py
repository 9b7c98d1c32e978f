"""AOTInductor packages: compiled code, and its weights next to it if it was packaged that way.

``NAME/data/aotinductor/M/weights_config.json`` lists for each weight its record ``NAME/data/weights/weight_N`` (a torch
zip of one tensor, perhaps with several weights in it) and its geometry there; models share records.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from ckpttool.core.checkpoint import Section, Storage, TensorEntry
from ckpttool.core.dtypes import itemsize
from ckpttool.core.limits import limits
from ckpttool.core.schema import COUNT, SHAPE, TEXT, items, map_of
from ckpttool.formats.pt2.layouts import open_record, payload_of
from ckpttool.formats.pt2.program import CONSTANTS, Home, Program, damaged, program_sections, read_json
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
    """Return the names of the compiled models in the file."""
    start = root + FOLDER
    inside = [r.name.removeprefix(start) for r in archive.records if r.name.startswith(start)]
    return list(dict.fromkeys(name.partition("/")[0] for name in inside if "/" in name))


def read(archive: Archive, root: str, name: str) -> Program:
    """Read the compiled model `name`; it has no sections if its weights are inside the code."""
    files = [r.name for r in archive.records if r.name.startswith(f"{root}{FOLDER}{name}/")]
    config = f"{root}{FOLDER}{name}/{_CONFIG}"
    if config not in files:
        inside = "compiled into its shared library, or left out of the package"
        if any(file.endswith((".blob", "_weights.bin")) for file in files):
            inside = "one block of bytes without names"
        return Program(archive, name, LAYOUT, "", (), notes=(f"the weights of {name} are {inside}: {OUTSIDE}",))
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
    """Return whether the compiler writes a tensor of this shape into the code, where it cannot be replaced."""
    return len(entry.shape) <= 1 and entry.numel <= MOST_INLINED


def _lifted(archive: Archive, files: list[str]) -> set[str]:
    """Return the constants of the model's code, which are not weights, by the C++ source in the package."""
    found: set[str] = set()
    for file in files:
        if file.endswith(".cpp") and archive.by_name[file].nbytes <= limits().json_bytes:
            text = read_record(archive, archive.by_name[file], limits().json_bytes).decode(errors="replace")
            kinds = {match[1]: match[2] for match in _KIND.finditer(text)}
            names = {match[1]: match[2] for match in _FQN.finditer(text)}
            found.update(name for number, name in names.items() if kinds.get(number) in _CONSTANTS)
    return found


def _entries(archive: Archive, root: str, config: str) -> tuple[tuple[TensorEntry, ...], dict[Storage, Home]]:
    """Return the weights: each is ``tensor.as_strided(sizes, strides, offset)`` of the one tensor in its record."""
    entries: list[TensorEntry] = []
    homes: dict[Storage, Home] = {}
    complete: dict[str, TensorEntry] = {}
    try:
        for fqn, (file, sizes, strides, offset) in read_json(archive, config, _WEIGHTS, "torch").items():
            record = f"{root}data/weights/{file}"
            if record not in complete:
                pickle, storages, inner = open_record(archive, record)
                if not is_tensor(pickle.root):
                    raise damaged(archive.path, f"its record {record} is not a tensor")
                tensor = entry_of(record, pickle.root, storages)
                complete[record] = replace(tensor, payload=payload_of(record, tensor))
                homes.update((storage, Home(record, inner, f"data/{key}")) for key, storage in storages.found.items())
            if len(sizes) != len(strides):
                raise ValueError(f"{fqn} has {len(sizes)} sizes and {len(strides)} strides")
            view = replace(complete[record], key=fqn, shape=tuple(sizes), stride=tuple(strides), offset=offset)
            reach = view.end * itemsize(view.dtype)
            if view.storage is None or reach > view.storage.nbytes:
                raise ValueError(f"{fqn} needs {reach} bytes of a strided tensor, which its record does not have")
            entries.append(view)
    except ValueError as error:
        raise damaged(archive.path, f"{config} is not as torch writes it: {error}") from error
    return tuple(entries), homes


def _shared(archive: Archive, root: str, name: str) -> Mapping[str, list[str]]:
    """Return for each record the other models whose weights are in it."""
    found: dict[str, list[str]] = {}
    for other in models(archive, root):
        config = f"{root}{FOLDER}{other}/{_CONFIG}"
        if other == name or config not in archive.by_name:
            continue
        for file in {entry[0] for entry in read_json(archive, config, _WEIGHTS, "torch").values()}:
            found.setdefault(f"{root}data/weights/{file}", []).append(other)
    return found
