"""Exported programs (`.pt2`): reader and writer of their weights."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from shlex import quote

from ckpttool.containers.pickle_read import LEGACY_PICKLES, look_into, note_unreadable
from ckpttool.containers.program import Program, Role, StoragePlace, replaceable, root_of
from ckpttool.containers.tensors import Carried
from ckpttool.containers.zip_read import STORED, Archive, Record, read_archive, read_record
from ckpttool.containers.zip_write import NewRecord, layout_archive, with_new
from ckpttool.core.checkpoint import (
    AnyEntry,
    Checkpoint,
    Lazy,
    Section,
    Span,
    Storage,
    TensorEntry,
    Unreached,
)
from ckpttool.core.errors import CkptError, Problem, Refused, same_problem
from ckpttool.core.expression import Ref
from ckpttool.core.names import LoadedTensor, Names, RuntimeTensor, SerializedKey
from ckpttool.core.tables import by_key, positions
from ckpttool.core.text import dotted
from ckpttool.formats import pt2_program, torch_zip
from ckpttool.formats.pt2_program import FIELDS, RecordOf, compressed, read_graph
from ckpttool.io.pieces import Pieces, nbytes_of, read_span, stream


def under_old_names(old: Section, new: Section) -> tuple[Section, dict[str, str]]:
    """Return `new` with each entry of the program's section `old` under its old name, and the new
    name of each.

    An entry is recognized by its payload, whatever its name: two tensors that swap names are not
    two new values.
    """
    old_keys: dict[int, list[str]] = {}  # by the id of the payload
    for key, entry in old.by_key().items():
        old_keys.setdefault(id(entry.payload), []).append(key)

    def old_key(entry: AnyEntry) -> str:
        keys = old_keys.get(id(entry.payload), ())
        return keys[0] if len(keys) == 1 else entry.key

    names: dict[str, str] = {}
    for key, entry in new.by_key().items():
        if old_key(entry) != key:
            names[old_key(entry)] = key
    if not names:
        return new, names
    tensors = tuple(entry.under(old_key(entry)) for entry in new.tensors)
    extras = tuple(entry.under(old_key(entry)) for entry in new.extras)
    return replace(new, tensors=tensors, extras=extras), names


def renamed(
    program: Program, names: Sequence[Mapping[str, str]]
) -> tuple[dict[StoragePlace, bytes], list[Problem]]:
    """Return the records with the new names of each section, and the problems with these names."""
    all_names: dict[str, str] = {}
    for in_section in names:
        all_names.update(in_section)
    if not all_names:
        return {}, []
    if program.compiled:
        text = "compiled code calls its weights by the names that they have"
        return {}, same_problem(text, all_names)
    graph, problems = pt2_program.renamed_graph(program, all_names)
    changed = {StoragePlace(program.model): graph}
    for index, in_section in zip(program.indexes, names):
        if not in_section:
            continue
        if program.layout == pt2_program.SINCE_2_9:
            changed[StoragePlace(index)] = pt2_program.renamed_config(program, index, in_section)
        else:
            inner, pickle = pt2_program.renamed_until_2_8(program, index, in_section)
            changed[StoragePlace(index, inner, "data.pkl")] = pickle
    return changed, problems


FORMAT = "pt2"

_ONLY = "model"  # the name of the only program of a file that has no name for it
_Reader = Callable[[Archive, str, str], Program]
Data = bytes | Span | Lazy


# Reading


def read(path: str) -> Checkpoint:
    """Return the index of every program of the file, without reading graphs and tensors.

    Section ``""`` is a program's state dict, section ``constants`` its constants; if the file holds
    several programs they are ``NAME`` and ``NAME.constants``. Raises `CkptError` for other files.
    """
    archive = read_archive(path)
    programs = [_read(archive, name, reader) for name, reader in _programs(archive).items()]
    left = _unreached(archive, programs)
    _read_imports(archive, programs)
    if len(programs) == 1:
        return replace(_checkpoint(path, programs[0]), unreached=left)
    sections: list[Section] = []
    notes = [f"{len(programs)} programs: {', '.join(program.name for program in programs)}"]
    for program in programs:
        for section in program.sections:
            sections.append(replace(section, path=dotted(program.name, section.path)))
        notes += program.notes
    return Checkpoint(
        path, FORMAT, archive.length, tuple(sections), notes=tuple(notes), unreached=left
    )


def _unreached(archive: Archive, programs: Sequence[Program]) -> tuple[Unreached, ...]:
    """Return the storages of no tensor: inside the programs' torch zips, then records."""
    used: set[str] = set()
    unreached: list[Unreached] = []
    for program in programs:
        used.update(_records_of(program))
        unreached += program.unreached
    root = root_of(archive)
    folders = (f"{root}data/weights/", f"{root}data/constants/")
    for record in archive.records:
        holds_data = record.name.startswith(folders) and not record.name.endswith(".json")
        if holds_data and record.nbytes and record.name not in used:
            unreached.append(Unreached(record.name, Storage(archive.span(record)), False))
    return tuple(unreached)


def _records_of(program: Program) -> Iterator[str]:
    """Yield the names of the records that the program's tensors and objects are read from."""
    for home in program.homes.values():
        yield home.record
    yield from program.indexes
    for section in program.sections:
        for entry in section.entries:
            if isinstance(entry.payload, Role):
                yield entry.payload.record
            elif isinstance(entry.payload, RecordOf):
                yield entry.payload.record.name


def read_program(path: str, name: str | None = None) -> Checkpoint:
    """Return the index of the program `name` of the file (default: its only one).

    Raises `CkptError` if there is no such program, or there are several and `name` is None.
    """
    archive = read_archive(path)
    readers = _programs(archive)
    first = next(iter(readers))
    if name is None and len(readers) > 1:
        raise CkptError(
            f"{path} holds {len(readers)} programs: {', '.join(readers)}",
            hint=f"name one: --program {quote(first)}",
        )
    name = first if name is None else name
    if name not in readers:
        raise CkptError(f"{path} holds no program {name}", hint=f"it holds {', '.join(readers)}")
    program = _read(archive, name, readers[name])
    _read_imports(archive, [program])
    return _checkpoint(path, program)


# Torch finds a record in capitals too, and ``torch.load(pickle_file=NAME)`` reads any other.
_PICKLED = re.compile(
    r"((data/(weights|constants|sample_inputs)/|serialized_).+(?<!\.json)|.+\.(pkl|pickle))", re.I
)
# a plain pickle, which torch hands to Python's
_BARE = re.compile(r"data/constants/opaque_obj_.+", re.IGNORECASE)


def _read_imports(archive: Archive, programs: Sequence[Program]) -> None:
    """Read the imports of all records that torch unpickles or that are called pickles
    (`pickle_read.collected`).
    """
    root = root_of(archive)
    pickled = set(chain(*map(_pickled_records, programs)))
    for record in archive.records:
        name = record.name.removeprefix(root)
        is_pickled = record.name in pickled
        if record.nbytes and (is_pickled or _PICKLED.fullmatch(name)):
            try:
                _look_into_record(archive, record, name, is_pickled)
            except CkptError as error:
                note_unreadable(torch_zip.origin_of(archive, record), error)


def _pickled_records(program: Program) -> Iterator[str]:
    """Yield the names of the records that hold a pickled tensor."""
    for section in program.sections:
        for entry in section.all_tensors():
            if isinstance(entry.payload, Role) and entry.payload.alone:
                yield entry.payload.record


def _look_into_record(archive: Archive, record: Record, name: str, is_pickled: bool) -> None:
    """Note the imports of a record's pickles; `name` is its name without the archive's folder."""
    if _BARE.fullmatch(name):
        torch_zip.read_pickle(archive, record.name)
    elif record.method != STORED:
        raise compressed(archive.path, record.name)
    elif _is_zip(archive, record):
        inner = read_archive(archive.path, archive.base + record.data, record.nbytes)
        for inside in inner.by_name:
            if inside.lower().endswith(".pkl"):
                torch_zip.read_pickle(inner, inside)
    elif is_pickled or name.lower().endswith((".pt", ".pkl", ".pickle")):  # or torch's old format
        origin = torch_zip.origin_of(archive, record)
        look_into(torch_zip.read_pickled(archive, record, origin), origin, LEGACY_PICKLES)


def _is_zip(archive: Archive, record: Record) -> bool:
    if record.nbytes <= 4:
        return False
    return bytes(read_span(replace(archive.span(record), length=4))) == b"PK\3\4"


def _programs(archive: Archive) -> dict[str, _Reader]:
    """Return the reader of each program by name, in the file's order. Raises `CkptError` if there
    is none.
    """
    root = root_of(archive)
    if pt2_program.GRAPH in archive.by_name:
        return {_ONLY: pt2_program.read_up_to_2_7}
    readers: dict[str, _Reader] = {}
    for record in archive.records:
        match = re.fullmatch(r"models/(.+)\.json", record.name.removeprefix(root))
        if match is not None:
            nested = f"{root}data/weights/{match[1]}.pt" in archive.by_name
            readers[match[1]] = pt2_program.read_2_8 if nested else pt2_program.read_since_2_9
    for name in pt2_program.compiled_models(archive, root):
        readers.setdefault(name, pt2_program.read_compiled)
    if not readers:
        raise CkptError(
            f"{archive.path} holds no exported program",
            hint="name a file that torch.export.save wrote",
        )
    return readers


def _read(archive: Archive, name: str, reader: _Reader) -> Program:
    root = root_of(archive)
    record = archive.by_name.get(f"{root}byteorder")
    if record is not None and read_record(archive, record, 64) != b"little":
        raise CkptError(
            f"{archive.path} was written on a big-endian machine: its weights are not"
            " little-endian",
            hint="export it again on the machine where it is used",
        )
    return reader(archive, root, name)


def _checkpoint(path: str, program: Program) -> Checkpoint:
    return Checkpoint(
        path,
        FORMAT,
        program.archive.length,
        program.sections,
        container=program,
        notes=program.notes,
    )


# Writing


def layout(checkpoint: Checkpoint) -> Pieces:
    """Return the program with the tensors of the checkpoint, as pieces; records that do not change
    are copied.

    Storages that are no longer the source's and names that changed are replaced. Raises `Refused`,
    with every problem, if the checkpoint is not that program's: other tensors, dtypes, shapes,
    strides, tied weights with two storages, or names that no module can have.
    """
    return layout_archive(*_changed_archive(checkpoint))


def _changed_archive(checkpoint: Checkpoint) -> tuple[Archive, Sequence[Record | NewRecord]]:
    program = checkpoint.container
    if not isinstance(program, Program):
        if checkpoint.format == FORMAT:
            raise Refused(
                f"{checkpoint.source} is of a file of several programs, which keep their names",
                hint="--program NAME gives one of them other values: "
                "ckpttool swap-weights PROGRAM.pt2 WEIGHTS --program NAME -o OUT.pt2",
            )
        raise Refused(
            "weights alone are not an exported program",
            hint="put them into a program: ckpttool swap-weights PROGRAM.pt2 WEIGHTS -o OUT.pt2",
        )
    changed, problems, unfit = _changed(program, checkpoint.sections)
    if unfit and not problems:
        raise Refused(
            f"{program.archive.path} cannot have these names",
            hint="torch makes a module of the program's tensors, modules and graphs: choose other"
            " names",
            problems=unfit,
        )
    if problems:
        raise Refused(
            f"these weights cannot be put into {program.archive.path}",
            hint="ckpttool swap-weights PROGRAM.pt2 WEIGHTS -o OUT.pt2 finds what belongs where",
            problems=[*problems, *unfit],
        )
    return program.archive, with_new(program.archive.records, changed)


def _changed(
    program: Program, sections: Sequence[Section]
) -> tuple[dict[str, Data], list[Problem], Sequence[Problem]]:
    """Return the new bytes of each record that changes, the problems with `sections`, and with
    their new names.
    """
    if [section.path for section in sections] != [section.path for section in program.sections]:
        text = "not the sections of the program"
        return {}, [Problem(text, section.title) for section in sections], []
    problems: list[Problem] = []
    pairs: list[tuple[TensorEntry, TensorEntry]] = []
    names: list[dict[str, str]] = []
    for old_section, new_section in zip(program.sections, sections):
        under_old, renames = under_old_names(old_section, new_section)
        names.append(renames)
        fitting, misfits = _paired(old_section, under_old)
        pairs += fitting
        problems += misfits
    by_home, untied = _by_home(program, pairs)
    alone: dict[str, Data] = {}  # new records of tensors that are pickled alone
    for old, new in pairs:
        role = old.payload
        if isinstance(role, Role) and isinstance(new.payload, Carried):
            file = torch_zip.of_tensor(new.payload, role.is_param, role.requires_grad)
            alone[role.record] = _lazy(file)
    records, unfit = renamed(program, names)
    stale = _stale(program, {*(home.record for home in by_home), *alone})
    changed = {**_by_record({**by_home, **records}), **alone}
    return changed, [*problems, *untied, *stale], unfit


def _paired(
    old: Section, new: Section
) -> tuple[list[tuple[TensorEntry, TensorEntry]], list[Problem]]:
    """Return the tensors of the program with their replacements, and the problems."""
    count = Counter(entry.key for entry in new.tensors)
    replacements = by_key(new.tensors)
    old_tensors = by_key(old.tensors)
    problems = [Problem("the name is there twice", key) for key in count if count[key] > 1]
    for key in count:
        if key not in old_tensors:
            problems.append(Problem("the program has no such tensor", key))
    problems += [Problem("missing", key) for key in old_tensors if key not in count]
    if old.extras != new.extras:
        problems.append(Problem("its objects that are not tensors cannot be changed", old.title))
    pairs = []
    for key, entry in old_tensors.items():
        replacement = replacements.get(key)
        if replacement is None:
            continue
        misfit = _misfit(entry, replacement)
        if misfit is None:
            pairs.append((entry, replacement))
        else:
            problems.append(Problem(misfit, key))
    return pairs, problems


def _misfit(old: TensorEntry, new: TensorEntry) -> str | None:
    """Return why `new` cannot replace `old`, apart from its storage."""
    if new.dtype != old.dtype:
        return f"dtype {new.dtype}, the program has {old.dtype}"
    if new.shape != old.shape:
        return f"shape {list(new.shape)}, the program has {list(old.shape)}"
    if new.stride != old.stride:
        return f"stride {list(new.stride)}, the program has {list(old.stride)}"
    if new.offset != old.offset:
        return f"offset {new.offset}, the program has {old.offset}"
    if old.storage is None:
        if new.payload is old.payload or replaceable(old, new):
            return None
        return f"a {old.layout} tensor in the program, which cannot be replaced"
    if new.storage is None:
        return f"a {new.layout} tensor, the program has a strided one"
    if new.payload is not old.payload:
        return (
            "computed by a remap, which gives a program other names and no other values:"
            " swap-weights does"
        )
    return None


def _by_home(
    program: Program, pairs: Sequence[tuple[TensorEntry, TensorEntry]]
) -> tuple[dict[StoragePlace, Span | Lazy], list[Problem]]:
    """Return the new bytes of each storage that changes. Tensors that share a storage must still
    share one.
    """
    first: dict[StoragePlace, tuple[str, Span | Lazy]] = {}
    changed: dict[StoragePlace, Span | Lazy] = {}
    problems: list[Problem] = []
    for old, new in pairs:
        if old.storage is None or new.storage is None or not old.numel:
            continue
        before, after = old.storage.data, new.storage.data
        home = program.homes[old.storage]
        key, data = first.setdefault(home, (old.key, after))
        if data != after:
            text = f"shares its storage with {key} in the program, but not here"
            problems.append(Problem(text, old.key))
        elif after.length != before.length:
            text = f"a storage of {after.length} bytes, the program's has {before.length}"
            problems.append(Problem(text, old.key))
        elif after != before:
            changed[home] = after
    return changed, problems


def _by_record(data: Mapping[StoragePlace, Data]) -> dict[str, Data]:
    """Return the new bytes of each record: its own, or a torch zip's with some of its records
    replaced.
    """
    records: dict[str, Data] = {}
    inside: defaultdict[str, dict[str, Data]] = defaultdict(dict)
    zips: dict[str, Archive] = {}
    for home, new in data.items():
        if home.inner is None:
            records[home.record] = new
        else:
            inside[home.record][home.key] = new
            zips[home.record] = home.inner
    for record, changed in inside.items():
        records[record] = _lazy(torch_zip.with_records(zips[record], changed))
    return records


def _lazy(pieces: Pieces) -> Lazy:
    return Lazy(nbytes_of(pieces), partial(stream, pieces))


def _stale(program: Program, records: Collection[str]) -> list[Problem]:
    """List everything else in the file that would keep the old weights, or get new ones too, if
    `records` change.
    """
    if not records:
        return []
    root = root_of(program.archive)
    problems = []
    for record in records:
        if record in program.shared:
            models = ", ".join(program.shared[record])
            problems.append(Problem(f"the weights of {models} too", record))
    has_graphs = any(name.startswith(f"{root}models/") for name in program.archive.by_name)
    if program.compiled and has_graphs:
        text = "the exported program in the file holds the old weights too"
        problems.append(Problem(text, f"{root}models"))
    if not program.compiled and pt2_program.compiled_models(program.archive, root):
        text = "compiled code in the file (AOTInductor) holds the old weights too"
        problems.append(Problem(text, "data/aotinductor"))
    return problems


_KINDS = {"parameter": "parameter", "buffer": "buffer", "tensor_constant": "constant"}
_RANKS = positions(_KINDS.values())


def names(path: str, program: str | None = None) -> Names:
    """Return all names of the program's parameters and buffers; constants that were lifted out of
    its code have none.

    `program` names one of several in the file. Raises `CkptError` if there is no such program, or
    its graph has no signature that can be read.
    """
    checkpoint = read_program(path, program)
    assert isinstance(checkpoint.container, Program)
    model = read_graph(checkpoint.container)
    graph: dict[str, str] = {}  # FQN -> kind
    for spec in model["graph_module"]["signature"]["input_specs"]:
        for kind in spec.keys() & _KINDS.keys():
            graph[spec[kind][FIELDS[kind]]] = _KINDS[kind]
    tensors = [tensor for tensor in _runtime(checkpoint, graph) if tensor.kind != "constant"]
    first: dict[str, str] = {}  # of the names of each tensor
    for tensor in tensors:
        first[tensor.fqn] = tensor.first_name
    serialized = []
    for entry in checkpoint.section("").tensors:
        source = Ref(first[entry.key])
        serialized.append(SerializedKey(entry.key, entry.dtype, entry.shape, source, None))
    load = []
    not_serialized = []
    for tensor in tensors:
        load.append(LoadedTensor(tensor.fqn, Ref(tensor.fqn) if tensor.persistent else None))
        if not tensor.persistent:
            not_serialized.append(tensor.fqn)
    return Names(
        model=path,
        torch=model["torch_version"],
        runtime=tuple(tensors),
        serialized=tuple(serialized),
        load=tuple(load),
        not_serialized=tuple(not_serialized),
    )


def _runtime(checkpoint: Checkpoint, graph: dict[str, str]) -> list[RuntimeTensor]:
    """List parameters, then buffers, then constants, each in the order of the graph's inputs;
    `graph`: FQN -> kind.
    """
    order = positions(graph)
    rows = []
    for section in checkpoint.sections:
        is_saved = section.path == ""
        for entry in section.tensors:
            rows.append((_kind_of(entry, is_saved, graph.get(entry.key)), is_saved, entry))
    rows.sort(key=lambda row: (_RANKS[row[0]], order.get(row[2].key, len(order))))
    first: dict[object, str] = {}
    tensors: list[RuntimeTensor] = []
    for kind, is_saved, entry in rows:
        fqn, payload = entry.key, entry.payload
        trainable = kind == "parameter" and isinstance(payload, Role) and payload.requires_grad
        root = first.setdefault(entry.identity, fqn)
        alias_of = None if root == fqn else root
        tensors.append(
            RuntimeTensor(fqn, fqn, kind, is_saved, trainable, entry.dtype, entry.shape, alias_of)
        )
    return tensors


def _kind_of(entry: TensorEntry, is_saved: bool, kind: str | None) -> str:
    """Return the kind of a tensor; the graph's `kind` is None for a tied name and for a tensor of a
    module that is never called.
    """
    # a saved tensor is not a constant
    if kind is not None and not (is_saved and kind == "constant"):
        return kind
    if isinstance(entry.payload, Role) and entry.payload.is_param:
        return "parameter"
    return "buffer" if is_saved else "constant"
