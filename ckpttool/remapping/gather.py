"""Assemble rank files into an ordinary checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from ckpttool.containers.chunks import Chunk, assemble, row_major_data
from ckpttool.containers.rank_shards import (
    ONE_STEP,
    RankParts,
    are_copies,
    is_of_ranks,
    is_whole,
    parts_of,
    ranks_agree,
)
from ckpttool.core.checkpoint import (
    Checkpoint,
    Lazy,
    Part,
    Section,
    Storage,
    TensorEntry,
    in_row_major,
)
from ckpttool.core.dtypes import itemsize
from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.core.expression import Expression, Op, Ref, refs, substitute
from ckpttool.core.names import RUNTIME, SERIALIZED, Names
from ckpttool.core.optimizer_state import rebuilt
from ckpttool.core.plan import Dropped
from ckpttool.core.tables import present, selected, without_tensors
from ckpttool.core.text import dotted, plural
from ckpttool.core.values import dataclass
from ckpttool.evaluate.chunks import across, concatenated
from ckpttool.kinds.parts import is_fused, joined_dimension
from ckpttool.naming.convert import Reading, read_keys
from ckpttool.naming.flat import (
    Slot,
    flat_params,
    flat_tensors,
    misfit,
    named_units,
    slots,
    unit_paths,
)
from ckpttool.naming.match import NameTables
from ckpttool.naming.wrappers import recognize, strip
from ckpttool.operands.checkpoint import model_section
from ckpttool.remapping.result import Remap

_DIFFERS = "differs between the ranks"


def not_of_one_step(key: str) -> Problem:
    """Return the problem of a tensor that every rank holds completely, with other values."""
    return Problem(_DIFFERS, key, "other-step")


# DTensors


def merge_replicas(source: Checkpoint) -> Checkpoint:
    """Return `source` with one tensor for all replicas of a DTensor, after comparing their values.

    Every rank has its own copy of an ordinary tensor next to DTensors. Buffers may differ between
    the ranks: rank 0's is used, with a note. Steps and other optimizer state may not. Raises
    `CkptError`, all problems at once, if copies differ: the files are of two steps.
    """
    if not any(map(_has_dtensors, source.sections)):
        return source
    problems: list[Problem] = []
    notes: list[str] = []
    merged: dict[int, TensorEntry] = {}

    def in_mapping(_: object, value: object) -> object:
        return merged.get(id(value), value)

    # a mapping may hold entries of other sections
    for section in source.sections:
        for entry in section.tensors:
            merged[id(entry)] = _merged(entry, section, problems, notes)
    sections = []
    for section in source.sections:
        tensors = tuple(merged[id(entry)] for entry in section.tensors)
        mapping = section.mapping and rebuilt(section.mapping, in_mapping)
        sections.append(replace(section, tensors=tensors, mapping=mapping))
    if problems:
        raise CkptError(
            f"the files of {source.source} are not of one step:"
            f" {plural(len(problems), 'difference')}",
            hint=ONE_STEP,
            problems=problems,
        )
    notes += [f"{key} is copied from rank 0" for key in source.others]
    # Rank 0's file, of which everything but tensors is kept, is a torch zip.
    return replace(
        source, format="torch_zip", sections=tuple(sections), notes=(*source.notes, *notes)
    )


def _has_dtensors(section: Section) -> bool:
    for entry in section.tensors:
        if isinstance(entry.payload, RankParts) and entry.payload.of_dtensors:
            return True
    return False


def _merged(
    entry: TensorEntry, section: Section, problems: list[Problem], notes: list[str]
) -> TensorEntry:
    key = dotted(section.path, entry.key)
    if is_whole(entry):
        if not ranks_agree(entry):
            problems.append(Problem("its replicas differ between the ranks", key))
        return replace(entry, payload=None)
    parts = parts_of(entry)
    held = present(parts)
    if len(held) < len(parts):
        problems.append(Problem("some ranks have it, and others do not", key))
    elif not ranks_agree(entry):
        if section.kind == "optimizer" or len({part.shape for part in held}) > 1:
            problems.append(not_of_one_step(key))
        else:
            notes.append(f"{key} {_DIFFERS}: rank 0's is used")
    return replace(entry, payload=held[0].payload)


# Flat parameters and slices


class Unit(NamedTuple):
    """A flat parameter of a checkpoint, and the slots of the model's parameters in it."""

    entry: TensorEntry
    slots: tuple[Slot, ...]

    @property
    def elements_per_rank(self) -> int:
        """The elements that each rank holds, with padding."""
        return -(-self.entry.numel // len(parts_of(self.entry)))


@dataclass(frozen=True, slots=True)
class _WholeStateDict:
    """A state dict with ordinary tensors only; `sources` are its keys as expressions over the keys
    of the files.

    `units` are the flat parameters that were split into parameters, by the path of the module.
    """

    section: Section
    sources: Mapping[str, Expression]
    units: Mapping[str, Unit]
    dropped: tuple[Dropped, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Gathered:
    """The assembled checkpoint, and its assembled state dicts by path. `units` belong to the first
    state dict.
    """

    checkpoint: Checkpoint
    sections: Mapping[str, _WholeStateDict]
    units: Mapping[str, Unit]
    notes: tuple[str, ...]

    def as_remap_of_files(self, outcome: Remap) -> Remap:
        """Return a remap of the assembled checkpoint as a remap of the files.

        Raises `Refused`, all problems at once, for tensors that differ between ranks and are
        unknown to the model.
        """
        remarks = _notes_on_unknown(outcome.result)
        outputs = []
        for output in outcome.plan.outputs:
            gathered = self.sections.get(output.section)
            if gathered is not None:
                source = substitute(output.source, gathered.sources.__getitem__)
                output = replace(output, source=source)
            outputs.append(output)
        dropped: list[Dropped] = []
        for gathered in self.sections.values():
            dropped += gathered.dropped
        dropped += outcome.plan.dropped
        plan = replace(outcome.plan, outputs=tuple(outputs), dropped=tuple(dropped))
        return replace(outcome, plan=plan, notes=(*self.notes, *outcome.notes, *remarks))


def _notes_on_unknown(result: Checkpoint) -> list[str]:
    """Return notes on tensors that differ between ranks and are not the model's. Raises `Refused`,
    all problems at once, if some are in a state dict.
    """
    unknown: list[Problem] = []
    notes: list[str] = []
    for section in result.sections:
        if section.kind == "optimizer":
            continue
        for entry in section.tensors:
            if ranks_agree(entry):
                continue
            key = dotted(section.path, entry.key)
            notes.append(f"{key} {_DIFFERS}: rank 0's is used")
            if section.kind == "state_dict":
                unknown.append(not_of_one_step(key))
    if unknown:
        are = "is" if len(unknown) == 1 else "are"
        raise Refused(
            f"{plural(len(unknown), 'tensor')} {are} not in the model: the ranks hold parts, or"
            " copies that differ",
            hint="convert the section of each model alone: PATTERN::SECTION",
            problems=unknown,
        )
    return notes


def gather_ranks(source: Checkpoint, names: Names | None, units: Sequence[str]) -> Gathered | None:
    """Return the source with flat parameters and parts of tensors assembled; None if it has none.

    Raises `CkptError` if that is impossible, or if `units` are given and the source has no flat
    parameters.
    """
    world_size = 0
    for section in source.sections:
        for entry in filter(is_of_ranks, section.tensors):
            world_size = max(world_size, len(parts_of(entry)))
    if not world_size and not any(map(_has_flat_keys, source.state_dicts)):
        if units:
            raise CkptError(f"{source.source} holds no flat parameters", hint="leave --from out")
        return None
    if names is not None:
        return gather(source, names, units)
    if not world_size:
        return None
    hint = "pass --model MODEL, the definition of the model before it was wrapped"
    flat = []
    for section in source.sections:
        for param in flat_params(section):
            unit = param.unit or "the root module"
            text = f"{param.numel:,} elements: the parameters of {unit}"
            flat.append(Problem(text, dotted(section.path, param.key)))
    if flat:
        raise Refused(
            f"{source.source} holds {plural(len(flat), 'flat parameter')}: each is all parameters"
            " of one module (a unit), laid end to end without their names and shapes",
            hint=hint,
            problems=flat,
        )
    raise Refused(
        f"{source.source} is {plural(world_size, 'rank file')}: only the model's shapes tell a"
        " part of a tensor from a copy of it",
        hint=hint,
    )


def _has_flat_keys(section: Section) -> bool:
    return bool(flat_tensors(section))


def gather(source: Checkpoint, names: Names, unit_patterns: Sequence[str] = ()) -> Gathered:
    """Return `source` with every state dict of the model as an ordinary one, with runtime names for
    flat parameters.

    `unit_patterns` name the modules that are units, as a check. Other state dicts that do not fit
    the model stay unchanged, and optimizers are left to `gather_optimizers`. Raises `Refused`, all
    problems at once, if the files do not fit the model, and `CkptError` if a parameter differs
    between ranks that hold it completely.
    """
    problems: list[Problem] = []
    first = _gather_section(model_section(source), names, unit_patterns, problems)
    if any(problem.kind == "other-step" for problem in problems):
        raise CkptError("the files are not of one step", hint=ONE_STEP, problems=problems)
    if first is None:
        hint = "is it the model, and the version of it, that was saved?"
        if _has_flat_keys(model_section(source)):
            hint = (
                f"--from 'fsdp-flat(units=[\"layers.*\"])' checks which modules are units; {hint}"
            )
        raise Refused(
            f"the files do not fit {names.model}: {plural(len(problems), 'problem')}",
            hint=hint,
            problems=problems,
        )
    sections, notes = {first.section.path: first}, [*first.notes]
    for section in source.state_dicts:
        if section.path in sections:
            continue
        if not flat_entries(section, names) and not any(map(is_of_ranks, section.tensors)):
            continue
        further = _gather_section(section, names, (), [])
        if further is None:
            notes.append(
                f"{section.title} does not fit {names.model}, and stays as the ranks hold it"
            )
        else:
            sections[section.path] = further
            notes += (f"{section.path}: {note}" for note in further.notes)
    whole = []
    for section in source.sections:
        gathered = sections.get(section.path)
        whole.append(section if gathered is None else gathered.section)
    return Gathered(replace(source, sections=tuple(whole)), sections, first.units, tuple(notes))


def flat_entries(section: Section, names: Names) -> list[TensorEntry]:
    """Return the flat parameters of a model's section. A parameter of the model with such a name is
    not one.
    """
    fqns = {tensor.fqn for tensor in names.runtime}
    flat = flat_tensors(section)
    return [entry for entry in flat if entry.key not in fqns]


def _gather_section(
    section: Section, names: Names, unit_patterns: Sequence[str], problems: list[Problem]
) -> _WholeStateDict | None:
    """Return the section with ordinary tensors; None if there are problems, which are added to
    `problems`.
    """
    tables, flat = NameTables(names), flat_entries(section, names)
    flat_keys = {entry.key for entry in flat}
    rest = without_tensors(section, flat_keys)
    reading = read_keys(tables, rest)
    paths = unit_paths(flat_keys, rest.by_key())
    if unit_patterns:
        problems += _unit_differences(names, unit_patterns, set(paths.values()))
    notes: list[str] = []
    is_tensor_parallel = any(map(_is_slice_of_matrix, rest.tensors))
    tensors: dict[str, TensorEntry] = {}
    runtime_names: dict[str, str] = {}
    for entry in rest.tensors:
        assembly = _assemble(entry, tables, reading, is_tensor_parallel)
        tensors[entry.key] = assembly.tensor
        if assembly.problem is not None:
            problems.append(assembly.problem)
        elif assembly.copies_differ:
            notes.append(f"{entry.key} {_DIFFERS}: rank 0's is used")
        runtime_names[entry.key] = _runtime_name(entry.key, tables, reading)
    names_in_files = set(runtime_names.values())
    unit_slots = slots(names, set(paths.values()), names_in_files)
    units = _units(flat, paths, unit_slots, problems)
    if problems:
        return None
    # Flat parameters become parameters under their runtime names, and then all keys have these.
    new_key = runtime_names if units else reading.match.names
    whole_tensors: list[TensorEntry] = []
    sources: dict[str, Expression] = {}
    for entry in rest.tensors:
        tensor, key = tensors[entry.key], new_key.get(entry.key, entry.key)
        whole_tensors.append(replace(tensor, key=key))
        sources[key] = _assembling(Ref(entry.key), entry.shape, tensor.shape)
    for extra in rest.extras:
        sources[extra.key] = Ref(extra.key)
    for unit in units.values():
        for parameter, source in _parameters_of(unit):
            whole_tensors.append(parameter)
            sources[parameter.key] = source
    dropped = []
    for entry in flat:
        if paths[entry.key] not in units:
            reason = "its parameters are in the files under their own names"
            dropped.append(Dropped(section.path, entry.key, reason))
    whole = replace(
        section,
        tensors=tuple(whole_tensors),
        form=RUNTIME if units else section.form,
        modules=_unwrapped_modules(section),
    )
    return _WholeStateDict(whole, sources, units, tuple(dropped), tuple(notes))


def _is_slice_of_matrix(entry: TensorEntry) -> bool:
    """Return True for a part of a tensor parallel model; FSDP cuts tensors into slices of one
    dimension.
    """
    return len(entry.shape) > 1 and is_of_ranks(entry) and not is_whole(entry)


def _runtime_name(key: str, tables: NameTables, reading: Reading) -> str:
    """Return the runtime FQN of a key; the key itself if it is not a tensor of the model."""
    name = reading.match.names.get(key)
    if name is None:
        return key
    return name if reading.form == RUNTIME else tables.fqn_of.get(name, name)


def _parameters_of(unit: Unit) -> Iterator[tuple[TensorEntry, Expression]]:
    """Yield the parameters of a flat parameter under each of their names. Each parameter has its
    own storage, which its names within the unit share.
    """
    for slot in unit.slots:
        parameter = cut_out(unit.entry, slot)
        part = Op("aten.slice.Tensor", (Ref(unit.entry.key), 0, slot.start, slot.end))
        for fqn in slot.fqns:
            yield replace(parameter, key=fqn), Op("aten.view.default", (part, slot.shape))


def _unwrapped_modules(section: Section) -> dict[Any, Any] | None:
    """Return the versions of modules without the paths of wrappers; of two that become one, the
    inner module's is kept.
    """
    if section.modules is None:
        return None
    paths = [path for path in section.modules if isinstance(path, str)]
    wrappers = recognize(filter(None, paths))
    modules = {}
    for path, payload in section.modules.items():
        modules[strip(path, wrappers) if isinstance(path, str) else path] = payload
    return modules


def _assembling(ref: Ref, part: tuple[int, ...], whole: tuple[int, ...]) -> Expression:
    """Return the whole tensor as an expression over what the ranks hold.

    `ref` refers to the parts of all ranks, and `part` is the shape of rank 0's part.

    w [2, 4] on each of 2 ranks  ─ cat 0 ─▶  w [4, 4]
    """
    if part == whole:
        return ref
    if len(part) == len(whole) > 1:
        (dimension,) = (dim for dim in range(len(whole)) if part[dim] != whole[dim])
        return Op("aten.cat.default", ((ref,), dimension))
    return Op("aten.view.default", (ref, whole))


class Assembly(NamedTuple):
    """What the ranks hold of a tensor as one tensor; with a `problem` it is not assembled.
    `copies_differ`: every rank has a complete copy, and they are not equal.
    """

    tensor: TensorEntry
    problem: Problem | None = None
    copies_differ: bool = False


def _assemble(
    entry: TensorEntry, tables: NameTables, reading: Reading, is_tensor_parallel: bool
) -> Assembly:
    """Assemble a tensor that is not in a flat parameter, with the shape that the model says.

    It is a problem if copies of a parameter differ.
    """
    name = reading.match.names.get(entry.key, "")
    shape = tables.shape_of(name, reading.form)
    if shape is None and not ranks_agree(entry):
        return Assembly(entry)  # a copy or a part: the model does not say
    assembly = assembled(entry, shape, "the model's", is_tensor_parallel)
    if not assembly.copies_differ:
        return assembly
    source = tables.saved.get(name) if reading.form == SERIALIZED else Ref(name)
    for fqn in refs(source or ()):
        tensor = tables.tensors.get(fqn)
        if tensor is not None and tensor.kind == "parameter":
            return assembly._replace(problem=not_of_one_step(entry.key))
    return assembly


def assembled(
    entry: TensorEntry, shape: tuple[int, ...] | None, whose: str, is_tensor_parallel: bool = False
) -> Assembly:
    """Return what the ranks hold as one tensor of `shape`, from copies or slices of it.

    It is a problem if they hold neither. The problem says `whose` shape it is.
    """
    if not is_of_ranks(entry):
        return Assembly(entry)
    if is_whole(entry):
        return Assembly(replace(entry, payload=None))
    parts = present(parts_of(entry))
    shapes = [part.shape for part in parts]
    if shape is None or set(shapes) == {shape}:
        return Assembly(parts[0], copies_differ=not ranks_agree(entry))
    if are_copies(entry):
        text = f"the ranks hold copies of {list(entry.shape)}, and {whose} shape is {list(shape)}"
        return Assembly(entry, Problem(text, entry.key))
    has_one_dtype = len({part.dtype for part in parts}) == 1
    dimension = joined_dimension(shapes, shape) if has_one_dtype else None
    if dimension is not None and is_tensor_parallel and is_fused(entry.key):
        text = f"several weights in one: joining along dimension {dimension} would mix them"
        return Assembly(entry, Problem(text, entry.key))
    if dimension is not None and len(shape) > 1:
        return Assembly(_along(entry.key, parts, shape, dimension))
    numel = prod(shape)
    are_slices = has_one_dtype and set(map(len, shapes)) == {1}
    if are_slices and held_elements(entry) == numel:
        storage = concatenated(across(parts, 0, numel))
        return Assembly(in_row_major(entry.key, parts[0].dtype, shape, storage))
    count = plural(held_elements(entry), "element")
    text = f"the ranks hold {count}, and {whose} shape is {list(shape)}"
    return Assembly(entry, Problem(text, entry.key))


def _along(
    key: str, parts: Sequence[TensorEntry], shape: tuple[int, ...], dimension: int
) -> TensorEntry:
    """Return the parts, joined along one dimension."""
    chunks: list[tuple[Chunk, TensorEntry]] = []
    offsets = [0] * len(shape)
    for part in parts:
        chunks.append((Chunk(tuple(offsets), part.shape), part))
        offsets[dimension] += part.shape[dimension]
    size = itemsize(parts[0].dtype)

    def produce() -> Iterator[Part]:
        return assemble(shape, size, [(chunk, row_major_data(part)) for chunk, part in chunks])

    storage = Storage(Lazy(prod(shape) * size, produce))
    return in_row_major(key, parts[0].dtype, shape, storage)


def held_elements(entry: TensorEntry) -> int:
    """Return the number of elements that all ranks together hold."""
    return sum(part.numel for part in parts_of(entry) if part is not None)


def cut_out(flat: TensorEntry, slot: Slot) -> TensorEntry:
    """Return the tensor in `slot` of the flat tensor that the ranks' parts are together."""
    parts = present(parts_of(flat))
    storage = concatenated(across(parts, slot.start, slot.numel))
    return in_row_major(slot.fqns[0], flat.dtype, slot.shape, storage)


def _units(
    flat: Sequence[TensorEntry],
    paths: Mapping[str, str],
    unit_slots: Mapping[str, tuple[Slot, ...]],
    problems: list[Problem],
) -> dict[str, Unit]:
    """Return the flat parameters to split, by the path of the module, in the order of
    `unit_slots`.
    """
    units: dict[str, Unit] = {}
    for entry in flat:
        path = paths[entry.key]
        reason: str | None = None
        if path not in unit_slots:
            reason = f"the model has no module {path} with parameters"
        elif path in units:
            other = units[path].entry.key
            reason = f"{other} is of the same module: which of them has which parameters is unknown"
        # without slots, the parameters are in the files under their own names: it is dropped
        elif unit_slots[path]:
            units[path] = Unit(entry, unit_slots[path])
            reason = _fault(units[path])
        if reason is not None:
            problems.append(Problem(reason, entry.key))
    return selected(units, unit_slots)


def _fault(unit: Unit) -> str | None:
    """Return why the flat parameter cannot be split into the slots; None if it can."""
    entry = unit.entry
    if entry.storage is None:
        return "is one rank's part: name the files of all ranks, as in 'rank_*.pt'"
    if len(entry.shape) != 1:
        return "is not one-dimensional"
    return misfit(unit.slots, entry.numel, len(parts_of(entry)), padded=True)


def _unit_differences(
    names: Names, unit_patterns: Sequence[str], paths: set[str]
) -> Iterator[Problem]:
    named, problems = named_units(names, unit_patterns)
    yield from problems
    full = {path for path, unit_slots in slots(names, named).items() if unit_slots}
    for path in sorted(full - paths - {""}):
        yield Problem("named in units, but the files have no flat parameter for it", path)
    for path in sorted(paths - set(named)):
        yield Problem("not named in units, but the files have a flat parameter for it", path)
