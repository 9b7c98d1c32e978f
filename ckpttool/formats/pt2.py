"""Exported programs (`.pt2`): reader and writer of their weights."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from shlex import quote

from ckpttool.containers.pickle_read import LEGACY_PICKLES, look_into, unreadable
from ckpttool.containers.program import Home, Program, Role, replaceable, root_of
from ckpttool.containers.tensors import Carried
from ckpttool.containers.zip_read import STORED, Archive, Record, read_archive, read_record
from ckpttool.containers.zip_write import NewRecord, layout_archive
from ckpttool.core.checkpoint import (
    Checkpoint,
    Lazy,
    Section,
    Span,
    Storage,
    TensorEntry,
    Unreached,
)
from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.core.expression import Ref
from ckpttool.core.names import LoadedTensor, Names, RuntimeTensor, SerializedKey
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
    payloads = [(id(entry.payload), key) for key, entry in old.by_key().items()]
    count = Counter(payload for payload, _ in payloads)
    was = {payload: key for payload, key in payloads if count[payload] == 1}
    names = {was.get(id(entry.payload), key): key for key, entry in new.by_key().items()}
    tensors = tuple(entry.under(was.get(id(entry.payload), entry.key)) for entry in new.tensors)
    extras = tuple(entry.under(was.get(id(entry.payload), entry.key)) for entry in new.extras)
    names = {before: now for before, now in names.items() if before != now}
    return (replace(new, tensors=tensors, extras=extras) if names else new), names


def renamed(
    program: Program, names: Sequence[Mapping[str, str]]
) -> tuple[dict[Home, bytes], list[Problem]]:
    """Return the records with the new names of each section, and the problems with these names."""
    every = {key: name for own in names for key, name in own.items()}
    if not every:
        return {}, []
    if program.compiled:
        return {}, [
            Problem("compiled code calls its weights by the names that they have", key)
            for key in every
        ]
    text, problems = pt2_program.renamed_graph(program, every)
    changed = {Home(program.model): text}
    for index, own in zip(program.indexes, names):
        if own and program.layout == pt2_program.SINCE_2_9:
            changed[Home(index)] = pt2_program.renamed_config(program, index, own)
        elif own:
            inner, pickle = pt2_program.renamed_until_2_8(program, index, own)
            changed[Home(index, inner, "data.pkl")] = pickle
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
    sections = tuple(
        replace(s, path=dotted(program.name, s.path))
        for program in programs
        for s in program.sections
    )
    notes = [note for program in programs for note in program.notes]
    notes.insert(0, f"{len(programs)} programs: {', '.join(program.name for program in programs)}")
    return Checkpoint(path, FORMAT, archive.length, sections, notes=tuple(notes), unreached=left)


def _unreached(archive: Archive, programs: Sequence[Program]) -> tuple[Unreached, ...]:
    used = {home.record for program in programs for home in program.homes.values()}
    used.update(record for program in programs for record in program.indexes)
    for entry in (
        entry for p in programs for section in p.sections for entry in section.by_key().values()
    ):
        if isinstance(entry.payload, Role):
            used.add(entry.payload.record)
        elif isinstance(entry.payload, RecordOf):
            used.add(entry.payload.record.name)
    root = root_of(archive)
    kept = (f"{root}data/weights/", f"{root}data/constants/")
    left = [r for r in archive.records if r.name.startswith(kept) and not r.name.endswith(".json")]
    own = [
        Unreached(r.name, Storage(archive.span(r)), False)
        for r in left
        if r.name not in used and r.nbytes
    ]
    return (*(found for program in programs for found in program.unreached), *own)


def read_program(path: str, name: str | None = None) -> Checkpoint:
    """Return the index of the program `name` of the file (default: its only one).

    Raises `CkptError` if there is no such program, or there are several and `name` is None.
    """
    archive = read_archive(path)
    found = _programs(archive)
    if name is None and len(found) > 1:
        raise CkptError(
            f"{path} holds {len(found)} programs: {', '.join(found)}",
            hint=f"name one: --program {quote(next(iter(found)))}",
        )
    name = next(iter(found)) if name is None else name
    if name not in found:
        raise CkptError(f"{path} holds no program {name}", hint=f"it holds {', '.join(found)}")
    program = _read(archive, name, found[name])
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
    entries = (
        entry
        for program in programs
        for section in program.sections
        for entry in section.all_tensors()
    )
    pickled = {
        entry.payload.record
        for entry in entries
        if isinstance(entry.payload, Role) and entry.payload.alone
    }
    for record in archive.records:
        name = record.name.removeprefix(root)
        if (record.name not in pickled and not _PICKLED.fullmatch(name)) or not record.nbytes:
            continue
        origin = torch_zip.origin_of(archive, record)
        try:
            if _BARE.fullmatch(name):
                torch_zip.read_pickle(archive, record.name)
            elif record.method != STORED:
                raise compressed(archive.path, record.name)
            elif (
                record.nbytes > 4
                and bytes(read_span(replace(archive.span(record), length=4))) == b"PK\3\4"
            ):
                inner = read_archive(archive.path, archive.base + record.data, record.nbytes)
                for own in inner.records:
                    if own.name.lower().endswith(".pkl"):
                        torch_zip.read_pickle(inner, own.name)
            # or torch's old format
            elif record.name in pickled or name.lower().endswith((".pt", ".pkl", ".pickle")):
                look_into(torch_zip.read_pickled(archive, record, origin), origin, LEGACY_PICKLES)
        except CkptError as error:
            unreadable(origin, error)


def _programs(archive: Archive) -> dict[str, _Reader]:
    """Return the reader of each program by name, in the file's order. Raises `CkptError` if there
    is none.
    """
    root = root_of(archive)
    if pt2_program.GRAPH in archive.by_name:
        return {_ONLY: pt2_program.read_up_to_2_7}
    found: dict[str, _Reader] = {}
    for record in archive.records:
        match = re.fullmatch(r"models/(.+)\.json", record.name.removeprefix(root))
        if match is not None:
            nested = f"{root}data/weights/{match[1]}.pt" in archive.by_name
            found[match[1]] = pt2_program.read_2_8 if nested else pt2_program.read_since_2_9
    for name in pt2_program.compiled_models(archive, root):
        found.setdefault(name, pt2_program.read_compiled)
    if not found:
        raise CkptError(
            f"{archive.path} holds no exported program",
            hint="name a file that torch.export.save wrote",
        )
    return found


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
    records = program.archive.records
    return program.archive, [
        NewRecord(r.name, changed[r.name]) if r.name in changed else r for r in records
    ]


def _changed(
    program: Program, sections: Sequence[Section]
) -> tuple[dict[str, Data], list[Problem], Sequence[Problem]]:
    """Return the new bytes of each record that changes, the problems with `sections`, and with
    their new names.
    """
    if [section.path for section in sections] != [section.path for section in program.sections]:
        return (
            {},
            [Problem("not the sections of the program", section.title) for section in sections],
            [],
        )
    problems: list[Problem] = []
    pairs: list[tuple[TensorEntry, TensorEntry]] = []
    names: list[dict[str, str]] = []
    for old_section, new_section in zip(program.sections, sections):
        under_old, renames = under_old_names(old_section, new_section)
        names.append(renames)
        fitting, misfits = _paired(old_section, under_old)
        pairs += fitting
        problems += misfits
    data, untied = _by_home(program, pairs)
    alone: dict[str, Data] = {}  # new records of tensors that are pickled alone
    for old, new in pairs:
        role = old.payload
        if isinstance(role, Role) and isinstance(new.payload, Carried):
            alone[role.record] = _lazy(
                torch_zip.of_tensor(new.payload, role.is_param, role.requires_grad)
            )
    records, unfit = renamed(program, names)
    stale = _stale(program, {*(home.record for home in data), *alone})
    return _by_record({**data, **records}) | alone, [*problems, *untied, *stale], unfit


def _paired(
    old: Section, new: Section
) -> tuple[list[tuple[TensorEntry, TensorEntry]], list[Problem]]:
    count = Counter(entry.key for entry in new.tensors)
    replacements = {entry.key: entry for entry in new.tensors}
    known = {entry.key for entry in old.tensors}
    problems = [Problem("the name is there twice", key) for key, n in count.items() if n > 1]
    problems += [
        Problem("the program has no such tensor", key) for key in replacements if key not in known
    ]
    problems += [
        Problem("missing", entry.key) for entry in old.tensors if entry.key not in replacements
    ]
    if old.extras != new.extras:
        problems.append(Problem("its objects that are not tensors cannot be changed", old.title))
    pairs = []
    for entry in old.tensors:
        if entry.key in replacements:
            misfit = _misfit(entry, replacements[entry.key])
            if misfit is None:
                pairs.append((entry, replacements[entry.key]))
            else:
                problems.append(Problem(misfit, entry.key))
    return pairs, problems


def _misfit(old: TensorEntry, new: TensorEntry) -> str | None:
    """Return why `new` cannot replace `old`, apart from its storage."""
    for what in ("dtype", "shape", "stride", "offset"):
        values = [
            list(v) if isinstance(v, tuple) else v for v in (getattr(new, what), getattr(old, what))
        ]
        if values[0] != values[1]:
            return f"{what} {values[0]}, the program has {values[1]}"
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
) -> tuple[dict[Home, Span | Lazy], list[Problem]]:
    """Return the new bytes of each storage that changes. Tensors that share a storage must still
    share one.
    """
    first: dict[Home, tuple[str, Span | Lazy]] = {}
    changed: dict[Home, Span | Lazy] = {}
    problems: list[Problem] = []
    for old, new in pairs:
        if old.storage is None or new.storage is None or not old.numel:
            continue
        was, now, home = old.storage.data, new.storage.data, program.homes[old.storage]
        key, data = first.setdefault(home, (old.key, now))
        if data != now:
            problems.append(
                Problem(f"shares its storage with {key} in the program, but not here", old.key)
            )
        elif now.length != was.length:
            problems.append(
                Problem(f"a storage of {now.length} bytes, the program's has {was.length}", old.key)
            )
        elif now != was:
            changed[home] = now
    return changed, problems


def _by_record(data: Mapping[Home, Data]) -> dict[str, Data]:
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
    problems = [
        Problem(f"the weights of {', '.join(program.shared[record])} too", record)
        for record in records
        if record in program.shared
    ]
    if program.compiled and any(
        r.name.startswith(f"{root}models/") for r in program.archive.records
    ):
        problems.append(
            Problem("the exported program in the file holds the old weights too", f"{root}models")
        )
    if not program.compiled and pt2_program.compiled_models(program.archive, root):
        problems.append(
            Problem(
                "compiled code in the file (AOTInductor) holds the old weights too",
                "data/aotinductor",
            )
        )
    return problems


_KINDS = {"parameter": "parameter", "buffer": "buffer", "tensor_constant": "constant"}
_RANKS = {kind: rank for rank, kind in enumerate(_KINDS.values())}


def names(path: str, program: str | None = None) -> Names:
    """Return all names of the program's parameters and buffers; constants that were lifted out of
    its code have none.

    `program` names one of several in the file. Raises `CkptError` if there is no such program, or
    its graph has no signature that can be read.
    """
    checkpoint = read_program(path, program)
    assert isinstance(checkpoint.container, Program)
    model = read_graph(checkpoint.container)
    specs = model["graph_module"]["signature"]["input_specs"]
    graph = {
        spec[kind][FIELDS[kind]]: _KINDS[kind]
        for spec in specs
        for kind in spec.keys() & _KINDS.keys()
    }
    tensors = [tensor for tensor in _runtime(checkpoint, graph) if tensor.kind != "constant"]
    first = {tensor.fqn: tensor.alias_of or tensor.fqn for tensor in tensors}
    return Names(
        model=path,
        torch=model["torch_version"],
        runtime=tuple(tensors),
        serialized=tuple(
            SerializedKey(entry.key, entry.dtype, entry.shape, Ref(first[entry.key]), None)
            for entry in checkpoint.section("").tensors
        ),
        load=tuple(LoadedTensor(t.fqn, Ref(t.fqn) if t.persistent else None) for t in tensors),
        not_serialized=tuple(t.fqn for t in tensors if not t.persistent),
    )


def _runtime(checkpoint: Checkpoint, graph: dict[str, str]) -> list[RuntimeTensor]:
    """List parameters, then buffers, then constants, each in the order of the graph's inputs;
    `graph`: FQN -> kind.
    """

    def kind_of(entry: TensorEntry, is_saved: bool) -> str:
        # None: a tensor of a module that is never called, or a tied name
        kind = graph.get(entry.key)
        # a saved tensor is not a constant
        if kind is not None and not (is_saved and kind == "constant"):
            return kind
        if isinstance(entry.payload, Role) and entry.payload.is_param:
            return "parameter"
        return "buffer" if is_saved else "constant"

    order = {fqn: position for position, fqn in enumerate(graph)}
    entries = [
        (entry, section.path == "") for section in checkpoint.sections for entry in section.tensors
    ]
    rows = [(kind_of(entry, is_saved), is_saved, entry) for entry, is_saved in entries]
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
