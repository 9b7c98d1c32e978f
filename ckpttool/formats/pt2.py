"""Exported programs (``.pt2``) as torch 2.9 and later write them: a zip of the graph as JSON and raw weight storages.

Reader and writer of the weights. The graph is never deserialised: a program of operators that are not installed reads
and writes like any other. Layout: ``NAME/models/M.json``, ``NAME/data/weights/M_weights_config.json`` and
``weight_N`` (one record a storage), constants likewise; see torch/export/pt2_archive/_package.py.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from shlex import quote
from typing import Any

from ckpttool.checkpoint import Checkpoint, ExtraEntry, Lazy, Section, Span, Storage, TensorEntry
from ckpttool.dtypes import BY_PT2, itemsize
from ckpttool.errors import CkptError, Problem, Refused
from ckpttool.formats import json_text
from ckpttool.formats.zip_archive import STORED, Archive, Record, read_archive, read_record
from ckpttool.formats.zip_layout import NewRecord, layout_archive
from ckpttool.pieces import Piece

FORMAT = "pt2"
CONSTANTS = "constants"  # path of the section of constants; the state dict's is the root

_JSON_LIMIT = 1 << 30  # bytes of one JSON record
_LAYOUTS = {
    1: "sparse_coo",
    2: "sparse_csr",
    3: "sparse_csc",
    4: "sparse_bsr",
    5: "sparse_bsc",
    6: "mkldnn",
    7: "strided",
}


@dataclass(frozen=True, slots=True, eq=False)
class Payload:
    """What the config says of one tensor beyond its geometry: the record that holds it, and its role."""

    record: str
    is_param: bool
    requires_grad: bool


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """The file itself, `Checkpoint.container` of this format. `model` is the record of the graph, `sections` are the
    state dict and the constants as the file holds them."""

    archive: Archive
    model: str
    sections: tuple[Section, ...]


# Reading


def read(path: str, program: str | None = None) -> Checkpoint:
    """The index of the program `program` of the file (default: its only one), graph and tensors left alone.

    Section ``""`` is its state dict, section ``constants`` its constants. Raises `CkptError` for other files, for the
    layouts that torch wrote before 2.9, and where several programs are in the file and none is named.
    """
    archive = read_archive(path)
    root, name = _find_program(archive, program)
    _check_byte_order(archive, root)
    weights = Section("", "state_dict", *_payloads(archive, root, name, "weights"))
    constants = Section(CONSTANTS, "other", *_payloads(archive, root, name, "constants"))
    sections = (weights, constants) if constants.tensors or constants.extras else (weights,)
    container = Program(archive, f"{root}models/{name}.json", sections)
    return Checkpoint(path, FORMAT, archive.length, sections, container=container)


def _programs(archive: Archive) -> list[str]:
    root = _root(archive)
    found = (re.fullmatch(r"models/(.+)\.json", record.name.removeprefix(root)) for record in archive.records)
    return [match.group(1) for match in found if match]


def _find_program(archive: Archive, program: str | None) -> tuple[str, str]:
    """The folder that all records lie in (with its slash), and the program's name."""
    path, root, names = archive.path, _root(archive), _programs(archive)
    if "serialized_exported_program.json" in archive.by_name:
        raise _older(archive, "serialized_exported_program.json", "2.7")
    if not names:
        raise CkptError(f"{path} holds no exported program", hint="name a file that torch.export.save wrote")
    if program is None and len(names) > 1:
        raise CkptError(
            f"{path} holds {len(names)} programs: {', '.join(names)}",
            hint="save the one that is meant into a file of its own with torch.export.save",
        )
    name = names[0] if program is None else program
    if name not in names:
        raise CkptError(f"{path} holds no program {name}", hint=f"it holds {', '.join(names)}")
    if f"{root}data/weights/{name}.pt" in archive.by_name:
        raise _older(archive, f"{root}models/{name}.json", "2.8")
    return root, name


def _check_byte_order(archive: Archive, root: str) -> None:
    record = archive.by_name.get(f"{root}byteorder")
    if record is not None and read_record(archive, record, 64) != b"little":
        raise CkptError(
            f"{archive.path} was written on a big-endian machine, its weights are not as they lie in memory here",
            hint=_resave(archive.path),
        )


def _root(archive: Archive) -> str:
    first = archive.records[0].name if archive.records else ""
    return first[: first.find("/") + 1]


def _older(archive: Archive, model: str, versions: str) -> CkptError:
    """The error for a layout that torch wrote before 2.9; torch itself no longer loads schema versions below 8."""
    try:
        value = read_json(archive, model)
        version, schema = str(value["torch_version"]), value["schema_version"]["major"]
        hint = _resave(archive.path) if schema >= 8 else "export the model again with torch 2.9 or later"
    except (CkptError, KeyError, TypeError):
        version, hint = versions, "export the model again with torch 2.9 or later"
    return CkptError(
        f"{archive.path} is a program of torch {version}, in the layout that torch wrote up to {versions}; "
        "ckpttool reads what torch 2.9 and later write",
        hint=hint,
    )


def _resave(path: str) -> str:
    code = "import torch, sys; torch.export.save(torch.export.load(sys.argv[1]), sys.argv[2])"
    return f'load and save it again with torch 2.9 or later: python -c "{code}" {quote(path)} OUT.pt2'


def _payloads(
    archive: Archive, root: str, name: str, kind: str
) -> tuple[tuple[TensorEntry, ...], tuple[ExtraEntry, ...]]:
    """The tensors and the other objects that the config of `kind` (``weights`` or ``constants``) lists."""
    config = f"{root}data/{kind}/{name}_{kind}_config.json"
    value = read_json(archive, config)
    tensors: list[TensorEntry] = []
    objects: list[ExtraEntry] = []
    storages: dict[str, Storage] = {}
    try:
        for fqn, meta in value["config"].items():
            record = archive.by_name.get(f"{root}data/{kind}/{meta['path_name']}")
            if record is None:
                raise damaged(archive.path, f"the record {meta['path_name']} of {fqn} is missing")
            if meta["tensor_meta"] is None:
                objects.append(ExtraEntry(fqn, meta["path_name"]))
            else:
                tensors.append(_tensor(archive, record, fqn, meta, storages))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise damaged(archive.path, f"{config} is not as torch.export.save writes it: {error!r}") from error
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
    payload = Payload(record.name, meta["is_param"] is True, tensor["requires_grad"] is True)
    layout = "subclass" if meta["use_pickle"] else _LAYOUTS.get(tensor["layout"], "unknown")
    reach = _reach(shape, stride, offset) * itemsize(dtype)
    if layout == "strided" and reach and not record.nbytes:
        layout = "meta"  # exported with fake weights: no values were saved
    if layout != "strided":
        return TensorEntry(fqn, dtype, shape, stride, offset, None, layout, record.nbytes, payload)
    if reach > record.nbytes:
        raise damaged(archive.path, f"{fqn} needs {reach} bytes, its record {record.name} has {record.nbytes}")
    if record.method != STORED:
        raise CkptError(
            f"{archive.path} is compressed (record {record.name}), which torch never does", hint=_resave(archive.path)
        )
    # tensors without elements may share a record without sharing anything
    new = Storage(archive.span(record))
    storage = storages.setdefault(record.name, new) if reach else new
    return TensorEntry(fqn, dtype, shape, stride, offset, storage, payload=payload)


def _sizes(values: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """Sizes, strides or offsets; a weight has no symbolic ones."""
    found = tuple(value["as_int"] for value in values)
    if not all(type(size) is int and 0 <= size < 2**63 for size in found):
        raise ValueError(f"not sizes: {found}")
    return found


def _reach(shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> int:
    """How many elements of the storage lie before the end of the tensor's last element; 0 for no elements."""
    if 0 in shape:
        return 0
    return offset + 1 + sum((size - 1) * step for size, step in zip(shape, stride))


def read_json(archive: Archive, name: str) -> Any:
    """The JSON value of a record. Raises `CkptError` where it is missing, damaged or no JSON."""
    if name not in archive.by_name:
        raise damaged(archive.path, f"its record {name} is missing")
    try:
        return json_text.loads(read_record(archive, archive.by_name[name], _JSON_LIMIT).decode())
    except ValueError as error:
        raise damaged(archive.path, f"its record {name} is not valid JSON: {error}") from error


def damaged(path: str, problem: str) -> CkptError:
    """The error for a program that contradicts itself."""
    return CkptError(f"{path} is not a program that can be read: {problem}", hint="copy it or export it again")


# Writing


def layout(checkpoint: Checkpoint) -> list[Piece]:
    """The program with the weights of the checkpoint, as pieces; all records but the weights' are copied as they are.

    A weight's record is replaced where its storage is no longer the source's. Raises `Refused`, with every problem,
    where the checkpoint is not that program's: other FQNs, dtypes, shapes, strides, or tied weights with two storages.
    """
    program = checkpoint.container
    if not isinstance(program, Program):
        raise Refused(
            "weights alone are no exported program",
            hint="put them into a program: ckpttool swap-weights PROGRAM.pt2 WEIGHTS -o OUT.pt2",
        )
    data, problems = _replaced(program, checkpoint.sections)
    if problems:
        raise Refused(
            f"these weights cannot be put into {program.archive.path}",
            hint="ckpttool swap-weights PROGRAM.pt2 WEIGHTS -o OUT.pt2 finds what belongs where",
            problems=problems,
        )
    records = [NewRecord(r.name, data[r.name]) if r.name in data else r for r in program.archive.records]
    return layout_archive(program.archive, records)


def _replaced(program: Program, sections: Sequence[Section]) -> tuple[dict[str, Span | Lazy], list[Problem]]:
    """The new bytes of each weight record that changes, and everything in which `sections` do not fit the program."""
    if [section.path for section in sections] != [section.path for section in program.sections]:
        return {}, [Problem("not the sections of the program", section.path or "(root)") for section in sections]
    problems: list[Problem] = []
    weights: list[tuple[TensorEntry, TensorEntry]] = []
    for old_section, new_section in zip(program.sections, sections):
        pairs, found = _paired(old_section, new_section)
        problems += found
        if old_section.path == "":
            weights = pairs
        else:
            problems += [
                Problem("a constant of the graph, which cannot be replaced", old.key)
                for old, new in pairs
                if _data(old) != _data(new)
            ]
    data, found = _by_record(weights)
    if data and _has_compiled_code(program.archive):
        found.append(Problem("compiled code in the file (AOTInductor) holds the old weights too", "data/aotinductor"))
    return data, problems + found


def _paired(old: Section, new: Section) -> tuple[list[tuple[TensorEntry, TensorEntry]], list[Problem]]:
    """Each of the program's tensors with the one that is to take its place, and what does not fit."""
    have = {entry.key: entry for entry in new.tensors}
    known = {entry.key for entry in old.tensors}
    problems = [Problem("stands twice", key) for key, n in Counter(e.key for e in new.tensors).items() if n > 1]
    problems += [Problem("the program has no such tensor", key) for key in have if key not in known]
    problems += [Problem("missing", entry.key) for entry in old.tensors if entry.key not in have]
    if old.extras != new.extras:
        problems.append(Problem("its objects that are no tensors cannot be changed", old.path or "(root)"))
    pairs = [(entry, have[entry.key]) for entry in old.tensors if entry.key in have]
    misfits = [(entry, _misfit(entry, other)) for entry, other in pairs]
    problems += [Problem(problem, entry.key) for entry, problem in misfits if problem]
    return [pair for pair, (_, problem) in zip(pairs, misfits) if not problem], problems


def _misfit(old: TensorEntry, new: TensorEntry) -> str | None:
    """Why `new` cannot take the place of `old`, its storage left aside."""
    for what in ("dtype", "shape", "stride", "offset"):
        ours, theirs = getattr(new, what), getattr(old, what)
        if ours != theirs:
            return f"{what} {_shown(ours)}, the program has {_shown(theirs)}"
    if old.storage is None and new.payload is not old.payload:
        return f"a {old.layout} tensor in the program, which cannot be replaced"
    if old.storage is not None and new.storage is None:
        return f"a {new.layout} tensor, the program has a strided one"
    return None


def _shown(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _by_record(weights: Sequence[tuple[TensorEntry, TensorEntry]]) -> tuple[dict[str, Span | Lazy], list[Problem]]:
    """Record -> its new bytes, where they are not the old ones. Tensors of one record must share one storage."""
    first: dict[str, tuple[str, Span | Lazy]] = {}
    changed: dict[str, Span | Lazy] = {}
    problems: list[Problem] = []
    for old, new in weights:
        was, now = _data(old), _data(new)
        if was is None or now is None or not old.numel or not isinstance(old.payload, Payload):
            continue
        record = old.payload.record
        key, data = first.setdefault(record, (old.key, now))
        if data != now:
            problems.append(Problem(f"shares its storage with {key} in the program, but not here", old.key))
        elif now.length != was.length:
            problems.append(Problem(f"a storage of {now.length} bytes, the program's has {was.length}", old.key))
        elif now != was:
            changed[record] = now
    return changed, problems


def _data(entry: TensorEntry) -> Span | Lazy | None:
    return None if entry.storage is None else entry.storage.data


def _has_compiled_code(archive: Archive) -> bool:
    return any(record.name.startswith(f"{_root(archive)}data/aotinductor/") for record in archive.records)
