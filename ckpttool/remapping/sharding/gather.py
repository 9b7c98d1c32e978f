"""Assemble rank files into an ordinary checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from ckpttool.core.checkpoint import Checkpoint, Section, TensorEntry, in_row_major
from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.core.expression import Expression, Op, Ref, refs, substitute
from ckpttool.core.keys import dotted, is_flat
from ckpttool.core.names import RUNTIME, SERIALIZED, Names
from ckpttool.core.optimizer_state import rebuilt
from ckpttool.core.plan import Dropped
from ckpttool.core.text import plural
from ckpttool.core.values import dataclass
from ckpttool.evaluate.chunks import across, concatenated
from ckpttool.formats.ranks.shards import ONE_STEP, RankParts, is_of_ranks, is_whole, parts_of, ranks_agree
from ckpttool.naming.convert import Reading, read
from ckpttool.naming.flat import Slot, flat_params, misfit, named_units, slots, unit_paths
from ckpttool.naming.match import NameTables
from ckpttool.naming.wrappers import recognise, strip
from ckpttool.operands.checkpoint import model_section
from ckpttool.remapping.plan import Remap

DIFFERS = "differs between the ranks"  # a problem of a tensor that every rank holds completely

# DTensors


def merge_replicas(source: Checkpoint) -> Checkpoint:
    """Return `source` with one tensor for all replicas of a DTensor, after comparing their values.

    Every rank has its own copy of an ordinary tensor next to DTensors. Buffers may differ between the ranks: rank 0's
    is used, with a note. Steps and other optimizer state may not. Raises `CkptError`, all problems at once, if copies
    differ: the files are of two steps.
    """
    entries = (entry for section in source.sections for entry in section.tensors)
    if not any(isinstance(entry.payload, RankParts) and entry.payload.of_dtensors for entry in entries):
        return source
    problems: list[Problem] = []
    notes: list[str] = []
    merged = {id(e): _merged(e, section, problems, notes) for section in source.sections for e in section.tensors}
    sections = []
    for section in source.sections:
        tensors = tuple(merged[id(entry)] for entry in section.tensors)
        mapping = section.mapping and rebuilt(section.mapping, lambda _, value: merged.get(id(value), value))
        sections.append(replace(section, tensors=tensors, mapping=mapping))
    if problems:
        raise CkptError(
            f"the files of {source.source} are not of one step: {plural(len(problems), 'difference')}",
            hint=ONE_STEP,
            problems=problems,
        )
    notes += [f"{key} is copied from rank 0" for key in source.others]
    # Rank 0's file, of which everything but tensors is kept, is a torch zip.
    return replace(source, format="torch_zip", sections=tuple(sections), notes=(*source.notes, *notes))


def _merged(entry: TensorEntry, section: Section, problems: list[Problem], notes: list[str]) -> TensorEntry:
    key = dotted(section.path, entry.key)
    if is_whole(entry):
        if not ranks_agree(entry):
            problems.append(Problem("its replicas differ between the ranks", key))
        return replace(entry, payload=None)
    parts = parts_of(entry)
    present = [part for part in parts if part is not None]
    if len(present) < len(parts):
        problems.append(Problem("some ranks have it, and others do not", key))
    elif not ranks_agree(entry):
        if section.kind == "optimizer" or len({part.shape for part in present}) > 1:
            problems.append(Problem(DIFFERS, key))
        else:
            notes.append(f"{key} {DIFFERS}: rank 0's is used")
    return replace(entry, payload=present[0].payload)


# Flat parameters and slices


@dataclass(frozen=True, slots=True)
class Unit:
    """A flat parameter of a checkpoint: its key and entry, and the slots of the model's parameters in it."""

    key: str
    entry: TensorEntry
    slots: tuple[Slot, ...]

    @property
    def parts(self) -> tuple[TensorEntry | None, ...]:
        """Return what each rank holds of it."""
        return parts_of(self.entry)


@dataclass(frozen=True, slots=True)
class _Gathered:
    """A state dict with ordinary tensors only; `sources` are its keys as expressions over the keys of the files.

    `units` are the flat parameters that were split into parameters, by the path of the module.
    """

    section: Section
    sources: Mapping[str, Expression]
    units: Mapping[str, Unit]
    dropped: tuple[Dropped, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Gathered:
    """The assembled checkpoint, and its assembled state dicts by path. `units` belong to the first state dict."""

    checkpoint: Checkpoint
    sections: Mapping[str, _Gathered]
    units: Mapping[str, Unit]
    notes: tuple[str, ...]

    def before(self, done: Remap) -> Remap:
        """Return a remap of the assembled checkpoint as a remap of the files.

        Raises `Refused`, all problems at once, for tensors that differ between ranks and are unknown to the model.
        """
        differing = [
            (section, entry)
            for section in done.result.sections
            if section.kind != "optimizer"
            for entry in section.tensors
            if not ranks_agree(entry)
        ]
        unknown = [dotted(section.path, entry.key) for section, entry in differing if section.kind == "state_dict"]
        if unknown:
            raise Refused(
                f"{plural(len(unknown), 'tensor')} not in the model: the ranks hold parts, or copies that differ",
                hint="convert the section of each model alone: PATTERN::SECTION",
                problems=[Problem(DIFFERS, key) for key in unknown],
            )
        remarks = [f"{dotted(s.path, entry.key)} {DIFFERS}: rank 0's is used" for s, entry in differing]
        outputs = tuple(
            replace(o, source=substitute(o.source, self.sections[o.section].sources.__getitem__))
            if o.section in self.sections
            else o
            for o in done.plan.outputs
        )
        dropped = (dropped for section in self.sections.values() for dropped in section.dropped)
        plan = replace(done.plan, outputs=outputs, dropped=(*dropped, *done.plan.dropped))
        return replace(done, plan=plan, notes=(*self.notes, *done.notes, *remarks))


def gather_ranks(source: Checkpoint, names: Names | None, units: Sequence[str]) -> Gathered | None:
    """Return the source with flat parameters and parts of tensors assembled; None if it has none.

    Raises `CkptError` if that is impossible, or if `units` are given and the source has no flat parameters.
    """
    of_ranks = any(is_of_ranks(entry) for section in source.sections for entry in section.tensors)
    if not of_ranks and not any(is_flat(entry.key) for section in source.state_dicts for entry in section.tensors):
        if units:
            raise CkptError(f"{source.source} holds no flat parameters", hint="leave --units out")
        return None
    if names is not None:
        return gather(source, names, units)
    if not of_ranks:
        return None
    flat = [(section.path, param) for section in source.sections for param in flat_params(section)]
    hint = "pass --model MODEL, the definition of the model before it was wrapped"
    if flat:
        raise Refused(
            f"{source.source} holds {plural(len(flat), 'flat parameter')}: each is all parameters of one module (a "
            "unit), laid end to end without their names and shapes",
            hint=hint,
            problems=[
                Problem(
                    f"{param.numel:,} elements: the parameters of {param.unit or 'the root module'}",
                    dotted(path, param.key),
                )
                for path, param in flat
            ],
        )
    world_size = max(len(parts_of(entry)) for section in source.sections for entry in section.tensors)
    raise Refused(
        f"{source.source} is {plural(world_size, 'rank file')}: only the model's shapes tell a part of a "
        "tensor from a copy of it",
        hint=hint,
    )


def gather(source: Checkpoint, names: Names, patterns: Sequence[str] = ()) -> Gathered:
    """Return `source` with every state dict of the model as an ordinary one, with runtime names for flat parameters.

    `patterns` name the modules that are units, as a check. Other state dicts that do not fit the model stay unchanged,
    and optimizers are left to `gather_optimizers`. Raises `Refused`, all problems at once, if the files do not fit the
    model, and `CkptError` if a parameter differs between ranks that hold it completely.
    """
    problems: list[Problem] = []
    first = _gather_section(model_section(source), names, patterns, problems)
    if any(problem.problem == DIFFERS for problem in problems):
        raise CkptError("the files are not of one step", hint=ONE_STEP, problems=problems)
    if problems:
        raise Refused(
            f"the files do not fit {names.model}: {plural(len(problems), 'problem')}",
            hint="--units 'layers.*' checks which modules are units; "
            "is it the model, and the version of it, that was saved?",
            problems=problems,
        )
    sections, notes = {first.section.path: first}, [*first.notes]
    for section in source.state_dicts:
        in_parts = flat_entries(section, names) or any(map(is_of_ranks, section.tensors))
        if section.path in sections or not in_parts:
            continue
        unfit: list[Problem] = []
        further = _gather_section(section, names, (), unfit)
        if unfit:
            notes.append(f"{section.title} does not fit {names.model}, and stays as the ranks hold it")
        else:
            sections[section.path] = further
            notes += (f"{section.path}: {note}" for note in further.notes)
    made = tuple(sections[s.path].section if s.path in sections else s for s in source.sections)
    return Gathered(replace(source, sections=made), sections, first.units, tuple(notes))


def flat_entries(section: Section, names: Names) -> list[TensorEntry]:
    """Return the flat parameters of a model's section. A parameter of the model with such a name is not one."""
    own = {tensor.fqn for tensor in names.runtime}
    return [entry for entry in section.tensors if is_flat(entry.key) and entry.key not in own]


def _gather_section(section: Section, names: Names, patterns: Sequence[str], problems: list[Problem]) -> _Gathered:
    tables, flat = NameTables(names), flat_entries(section, names)
    flat_keys = {entry.key for entry in flat}
    rest = replace(section, tensors=tuple(entry for entry in section.tensors if entry.key not in flat_keys))
    reading = read(tables, rest)
    name_of = reading.match.names

    def runtime_key(key: str) -> str:
        name = name_of.get(key)
        return key if name is None else name if reading.form == RUNTIME else tables.fqn_of.get(name, name)

    paths = unit_paths(flat_keys, rest.by_key())
    if patterns:
        problems += _unit_differences(names, patterns, set(paths.values()))
    notes: list[str] = []
    tensors = {entry.key: _from_ranks(entry, tables, reading, problems, notes) for entry in rest.tensors}
    present = {runtime_key(entry.key) for entry in rest.tensors}
    units = _units(flat, paths, slots(names, set(paths.values()), present), problems)
    if problems:
        return _Gathered(section, {}, {}, (), ())
    # Flat parameters become parameters under their runtime names, and then all keys have these.
    new_key = {key: runtime_key(key) if units else name_of.get(key) or key for key in tensors}
    made = [replace(tensors[entry.key], key=new_key[entry.key]) for entry in rest.tensors]
    sources: dict[str, Expression] = {}
    for entry in rest.tensors:
        shape, ref = tensors[entry.key].shape, Ref(entry.key)
        sources[new_key[entry.key]] = ref if shape == entry.shape else Op("aten.view.default", (ref, shape))
    sources.update((entry.key, Ref(entry.key)) for entry in rest.extras)
    for unit in units.values():
        for slot in unit.slots:
            # Each parameter has its own storage, which its names within the unit share.
            parameter = cut_out(unit.entry.dtype, unit.parts, slot)
            part = Op("aten.slice.Tensor", (Ref(unit.key), 0, slot.start, slot.end))
            for fqn in slot.fqns:
                made.append(replace(parameter, key=fqn))
                sources[fqn] = Op("aten.view.default", (part, slot.shape))
    reason = "its parameters are in the files under their own names"
    dropped = tuple(Dropped(section.path, entry.key, reason) for entry in flat if paths[entry.key] not in units)
    modules = section.modules
    if modules is not None:  # without the paths of wrappers; of two that become one, the inner module's is kept
        wrappers = recognise(path for path in modules if path and isinstance(path, str))
        modules = {strip(path, wrappers) if isinstance(path, str) else path: own for path, own in modules.items()}
    form = RUNTIME if units else section.form
    whole = replace(section, tensors=tuple(made), form=form, modules=modules)
    return _Gathered(whole, sources, units, dropped, tuple(notes))


def _from_ranks(
    entry: TensorEntry, tables: NameTables, reading: Reading, problems: list[Problem], notes: list[str]
) -> TensorEntry:
    """Assemble a tensor that is not in a flat parameter, with the shape that the model says."""
    serialized = reading.form == SERIALIZED
    likeness = tables.serialized_likeness if serialized else tables.runtime_likeness
    name = reading.match.names.get(entry.key, "")
    shape = likeness.get(name, ("", None))[1]
    if shape is None and not ranks_agree(entry):
        return entry  # a copy or a part: the model does not say
    whole = resolved(entry, shape)
    if whole is None:
        held = sum(part.numel for part in parts_of(entry) if part is not None)
        problems.append(
            Problem(f"the ranks hold {held:,} elements of it, and the model's is {list(shape or ())}", entry.key)
        )
        return entry
    if is_a_copy(whole, entry) and not ranks_agree(entry):
        source = tables.saved.get(name) if serialized else Ref(name)
        read_by_it = [tables.tensors.get(fqn) for fqn in refs(source or ())]
        if any(tensor is not None and tensor.kind == "parameter" for tensor in read_by_it):
            problems.append(Problem(DIFFERS, entry.key))
        else:
            notes.append(f"{entry.key} {DIFFERS}: rank 0's is used")
    return whole


def resolved(entry: TensorEntry, shape: tuple[int, ...] | None) -> TensorEntry | None:
    """Return what the ranks hold as one tensor of `shape`: copies of it, or slices of it. None if it is neither."""
    if not is_of_ranks(entry):
        return entry
    if is_whole(entry):
        return replace(entry, payload=None)
    parts = [part for part in parts_of(entry) if part is not None]
    if shape is None or all(part.shape == shape for part in parts):
        return parts[0]
    slices = all(len(part.shape) == 1 and part.dtype == parts[0].dtype for part in parts)
    if not slices or sum(part.numel for part in parts) != prod(shape):
        return None
    storage = concatenated(across(parts, 0, prod(shape)))
    return in_row_major(entry.key, parts[0].dtype, shape, storage)


def is_a_copy(whole: TensorEntry, entry: TensorEntry) -> bool:
    """Return True if `whole`, the result of `resolved`, is one rank's tensor."""
    return any(part is not None and part.storage is whole.storage for part in parts_of(entry))


def cut_out(dtype: str, parts: Sequence[TensorEntry | None], slot: Slot) -> TensorEntry:
    """Return the tensor in `slot` of the flat tensor that the parts are together."""
    storage = concatenated(across((part for part in parts if part is not None), slot.start, slot.numel))
    return in_row_major(slot.fqns[0], dtype, slot.shape, storage)


def _units(
    flat: Sequence[TensorEntry],
    paths: Mapping[str, str],
    unit_slots: Mapping[str, tuple[Slot, ...]],
    problems: list[Problem],
) -> dict[str, Unit]:
    """Return the flat parameters to split, by the path of the module, in the order of `unit_slots`."""
    units: dict[str, Unit] = {}
    for entry in flat:
        path = paths[entry.key]
        if path not in unit_slots:
            problems.append(Problem(f"the model has no module {path} with parameters", entry.key))
        elif path in units:
            problems.append(
                Problem(f"{units[path].key} is of the same module: which parameters are in which?", entry.key)
            )
        elif unit_slots[path]:
            unit = units[path] = Unit(entry.key, entry, unit_slots[path])
            if entry.storage is None:
                reason: str | None = "is one rank's part: name the files of all ranks, as in 'rank_*.pt'"
            elif len(entry.shape) != 1:
                reason = "is not one-dimensional"
            else:
                reason = misfit(unit.slots, entry.numel, len(unit.parts), padded=True)
            problems += [] if reason is None else [Problem(reason, entry.key)]
    return {path: units[path] for path in unit_slots if path in units}


def _unit_differences(names: Names, patterns: Sequence[str], paths: set[str]) -> Iterator[Problem]:
    """Compare the units of the files with the modules that the patterns name."""
    named, problems = named_units(names, patterns)
    yield from problems
    full = {path for path, own in slots(names, named).items() if own}
    for path in sorted(full - paths - {""}):
        yield Problem("--units names it, and the files have no flat parameter of it", path)
    for path in sorted(paths - set(named)):
        yield Problem("the files have a flat parameter of it, and --units does not name it", path)
