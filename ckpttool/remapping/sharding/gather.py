"""Assemble rank files into an ordinary checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ckpttool.core.checkpoint import Checkpoint, Section, TensorEntry, in_row_major
from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.core.expression import Expression, Op, Ref, refs, substitute
from ckpttool.core.keys import dotted, is_flat
from ckpttool.core.names import RUNTIME, SERIALIZED, Names
from ckpttool.core.plan import Dropped
from ckpttool.core.text import plural
from ckpttool.core.values import dataclass
from ckpttool.evaluate.chunks import across, concatenated
from ckpttool.formats.ranks.sharded import OF_ONE_STEP, is_held_alike, is_of_dtensors, is_of_ranks, is_whole, parts_of
from ckpttool.naming.convert import read
from ckpttool.naming.flat import Slot, flat_params, misfit, named_units, slots, unit_paths
from ckpttool.naming.match import NameTables
from ckpttool.naming.wrappers import recognise, strip
from ckpttool.operands.checkpoint import model_section
from ckpttool.remapping.plan import Remap

_CARRIES = "torch_zip"  # rank 0's file, of which all that is no tensor is kept


def without_replicas(source: Checkpoint) -> Checkpoint:
    """`source` with every tensor that the ranks hold copies of as one, where DTensors tell that these are copies.

    The copies are read and compared. What an ordinary tensor is beside DTensors, every rank has: a buffer may differ
    (rank 0's is taken, and a note says so), a step or another part of an optimizer's state may not. Raises `CkptError`,
    all problems at once, where copies differ: the files are of two steps.
    """
    entries = [entry for section in source.sections for entry in section.tensors]
    if not any(map(is_of_dtensors, entries)):
        return source
    work = _ReplicasWork()
    sections = tuple(work.section(section) for section in source.sections)
    if work.problems:
        raise CkptError(
            f"the files of {source.source} are not of one step: {plural(len(work.problems), 'difference')}",
            hint=OF_ONE_STEP,
            problems=work.problems,
        )
    notes = [f"{key} is carried as rank 0 has it" for key in source.others]
    return replace(source, format=_CARRIES, sections=sections, notes=(*source.notes, *work.notes, *notes))


class _ReplicasWork:
    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.notes: list[str] = []

    def section(self, section: Section) -> Section:
        where = f"{section.path}." if section.path else ""
        made = {id(entry): self._one(entry, section.kind, where) for entry in section.tensors}
        tensors = tuple(made[id(entry)] for entry in section.tensors)
        return replace(section, tensors=tensors, mapping=_with(section.mapping, made))

    def _one(self, entry: TensorEntry, kind: str, where: str) -> TensorEntry:
        if is_whole(entry):
            if not is_held_alike(entry):
                self.problems.append(Problem("its replicas differ between the ranks", where + entry.key))
            return replace(entry, payload=None)
        parts = parts_of(entry)
        have = [part for part in parts if part is not None]
        if len(have) < len(parts):
            self.problems.append(Problem("some ranks have it, and others do not", where + entry.key))
        elif not is_held_alike(entry):
            if kind == "optimizer" or len({part.shape for part in have}) > 1:
                self.problems.append(Problem("differs between the ranks", where + entry.key))
            else:
                self.notes.append(f"{where}{entry.key} differs between the ranks: rank 0's is taken")
        return replace(entry, payload=have[0].payload)


def _with(value: Any, made: Mapping[int, TensorEntry]) -> Any:
    """The optimizer's state dict with other entries, by the ids of those that it has."""
    if isinstance(value, TensorEntry):
        return made.get(id(value), value)
    if isinstance(value, Mapping):
        return {key: _with(item, made) for key, item in value.items()}
    return type(value)(_with(item, made) for item in value) if type(value) in (list, tuple) else value


DIFFERS = "differs between the ranks"  # what every rank has whole
_UNITS = "--units 'layers.*' checks which modules are units; is it the model, and the version of it, that was saved?"


@dataclass(frozen=True, slots=True)
class Unit:
    """A flat parameter of a checkpoint: its key and entry, and the places of the model's parameters in it."""

    key: str
    entry: TensorEntry
    slots: tuple[Slot, ...]

    @property
    def parts(self) -> tuple[TensorEntry | None, ...]:
        """What each rank holds of it, by rank."""
        return parts_of(self.entry)


@dataclass(frozen=True, slots=True)
class Whole:
    """A state dict with ordinary tensors only; `sources` are its keys as expressions over those of the files.

    `units` are the flat parameters that were taken apart, by the path of the unit, in ``model.parameters()`` order;
    `problems` where files and model do not fit.
    """

    section: Section
    sources: Mapping[str, Expression]
    units: Mapping[str, Unit]
    dropped: tuple[Dropped, ...]
    notes: tuple[str, ...]
    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class Gathered:
    """`checkpoint` has the model's state dicts whole; `sections` are these by path, `units` those of the first."""

    checkpoint: Checkpoint
    sections: Mapping[str, Whole]
    units: Mapping[str, Unit]
    notes: tuple[str, ...]

    def before(self, done: Remap) -> Remap:
        """What was `done` to the gathered checkpoint, as done to the files it was gathered from.

        Raises `Refused`, all problems at once, for what ranks hold in their own ways and no model says how.
        """
        remarks = _remarks(done.result)
        outputs = tuple(
            replace(o, source=substitute(o.source, self.sections[o.section].sources.__getitem__))
            if o.section in self.sections
            else o
            for o in done.plan.outputs
        )
        dropped = (gone for whole in self.sections.values() for gone in whole.dropped)
        plan = replace(done.plan, outputs=outputs, dropped=(*dropped, *done.plan.dropped))
        return replace(done, plan=plan, notes=(*self.notes, *done.notes, *remarks))


def flat_entries(section: Section, names: Names) -> list[TensorEntry]:
    """The flat parameters among the tensors of a model's section; what the model itself calls so is none."""
    own = {t.fqn for t in names.runtime}
    return [entry for entry in section.tensors if is_flat(entry.key) and entry.key not in own]


def without_model(source: Checkpoint) -> Refused:
    """The refusal to put rank files together without knowing the parameters."""
    flat = [(section.path, found) for section in source.sections for found in flat_params(section)]
    if not flat:
        return Refused(
            f"{source.source} is {plural(_world_size(source), 'rank file')}: only the model's shapes tell a part of a "
            "tensor from a copy of it",
            hint="pass --model MODEL, the definition of the model before it was wrapped",
        )
    return Refused(
        f"{source.source} holds {plural(len(flat), 'flat parameter')}: each is all parameters of one module (a unit), "
        "laid end to end without their names and shapes",
        hint="pass --model MODEL, the definition of the model before it was wrapped",
        problems=[
            Problem(f"{one.numel:,} elements: the parameters of {one.unit or 'the root module'}", dotted(path, one.key))
            for path, one in flat
        ],
    )


def _world_size(source: Checkpoint) -> int:
    entries = (entry for section in source.sections for entry in section.tensors)
    return max((len(parts_of(entry)) for entry in entries), default=1)


def gather(source: Checkpoint, names: Names, patterns: Sequence[str] = ()) -> Gathered:
    """`source` with every state dict of the model as an ordinary one, in runtime names where it held flat parameters.

    `patterns` name the modules that are units, to be checked. State dicts beside the model's that do not fit it stay
    as they are, and optimizers are left to `gather_optimizer`. Raises `Refused`, all problems at once, where the files
    and the model do not fit, and `CkptError` where a parameter differs that every rank has whole.
    """
    first = _whole(model_section(source), names, patterns)
    if any(problem.problem == DIFFERS for problem in first.problems):
        raise CkptError("the files are not of one step", hint=OF_ONE_STEP, problems=first.problems)
    if first.problems:
        raise Refused(
            f"the files do not fit {names.model}: {plural(len(first.problems), 'problem')}",
            hint=_UNITS,
            problems=first.problems,
        )
    sections, notes = {first.section.path: first}, [*first.notes]
    for section in source.state_dicts:
        if section.path not in sections and _is_in_parts(section, names):
            further = _whole(section, names)
            if further.problems:
                notes.append(f"{section.title} does not fit {names.model}, and stays as the ranks hold it")
            else:
                sections[section.path] = further
                notes += (f"{section.path}: {note}" for note in further.notes)
    made = tuple(sections[s.path].section if s.path in sections else s for s in source.sections)
    return Gathered(replace(source, sections=made), sections, first.units, tuple(notes))


def _remarks(made: Checkpoint) -> list[str]:
    """What is rank 0's outside of state dicts. Raises `Refused` for what is in one, and no model says what it is."""
    entries = ((section, e) for section in made.sections if section.kind != "optimizer" for e in section.tensors)
    other = [(s, e) for s, e in entries if not is_held_alike(e)]
    unknown = [dotted(section.path, entry.key) for section, entry in other if section.kind == "state_dict"]
    if unknown:
        raise Refused(
            f"{plural(len(unknown), 'tensor')} of no place in the model: the ranks hold parts, or copies that differ",
            hint="convert the section of each model alone: PATTERN::SECTION",
            problems=[Problem(DIFFERS, key) for key in unknown],
        )
    return [f"{dotted(section.path, entry.key)} {DIFFERS}: rank 0's is taken" for section, entry in other]


def _is_in_parts(section: Section, names: Names) -> bool:
    return bool(flat_entries(section, names)) or any(map(is_of_ranks, section.tensors))


def _whole(section: Section, names: Names, patterns: Sequence[str] = ()) -> Whole:
    tables, flat = NameTables(names), flat_entries(section, names)
    keys = {entry.key for entry in flat}
    rest = replace(section, tensors=tuple(entry for entry in section.tensors if entry.key not in keys))
    work = _Work(tables, rest)
    paths = unit_paths(keys, rest.by_key())
    problems = _other_units(names, patterns, set(paths.values())) if patterns else []
    units = _units(flat, paths, slots(names, set(paths.values()), work.fqns), work.problems)
    problems += work.problems
    if problems:
        return Whole(section, {}, {}, (), (), tuple(problems))
    made = [work.ordinary(entry, bool(units)) for entry in rest.tensors]
    made += [entry for unit in units.values() for entry in taken_apart(unit)]
    reason = "its parameters stand in the files under their own names"
    dropped = [Dropped(section.path, e.key, reason) for e in flat if paths[e.key] not in units]
    sources = {work.key(entry.key, bool(units)): work.expression(entry) for entry in rest.tensors}
    sources.update((entry.key, Ref(entry.key)) for entry in rest.extras)
    sources.update((fqn, _cut_out(unit, slot)) for unit in units.values() for slot in unit.slots for fqn in slot.fqns)
    form = RUNTIME if units else section.form
    done = replace(section, tensors=tuple(made), form=form, modules=_modules(section))
    return Whole(done, sources, units, tuple(dropped), tuple(work.notes), ())


class _Work:
    """The tensors that stand under names of their own: copies, and slices that are put together."""

    def __init__(self, tables: NameTables, rest: Section) -> None:
        self.tables = tables
        self.reading = read(tables, rest)
        serialized = self.reading.form == SERIALIZED
        self.likeness = tables.serialized_likeness if serialized else tables.runtime_likeness
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.resolved = {entry.key: self._resolved(entry) for entry in rest.tensors}
        self.fqns = {self.key(entry.key, True) for entry in rest.tensors}

    def _resolved(self, entry: TensorEntry) -> TensorEntry:
        shape = self.likeness.get(self.reading.match.names.get(entry.key, ""), ("", None))[1]
        if shape is None and not is_held_alike(entry):
            return entry  # a copy or a part: the model does not say it
        found = resolved(entry, shape)
        if found is None:
            held = sum(part.numel for part in parts_of(entry) if part is not None)
            self.problems.append(
                Problem(f"the ranks hold {held:,} elements of it, and the model's is {list(shape or ())}", entry.key)
            )
            return entry
        if is_a_copy(found, entry) and not is_held_alike(entry):
            if self._is_parameter(entry.key):
                self.problems.append(Problem(DIFFERS, entry.key))
            else:
                self.notes.append(f"{entry.key} {DIFFERS}: rank 0's is taken")
        return found

    def _is_parameter(self, key: str) -> bool:
        name = self.reading.match.names.get(key, "")
        source = self.tables.saved.get(name) if self.reading.form == SERIALIZED else Ref(name)
        tensors = [self.tables.tensors.get(fqn) for fqn in refs(source or ())]
        return any(tensor is not None and tensor.kind == "parameter" for tensor in tensors)

    def key(self, key: str, runtime: bool) -> str:
        """The key that the entry gets; with `runtime` that of the model's runtime names."""
        name = self.reading.match.names.get(key)
        if not runtime or name is None or self.reading.form == RUNTIME:
            return name or key
        return self.tables.fqn_of.get(name, name)

    def ordinary(self, entry: TensorEntry, runtime: bool) -> TensorEntry:
        return replace(self.resolved[entry.key], key=self.key(entry.key, runtime))

    def expression(self, entry: TensorEntry) -> Expression:
        shape = self.resolved[entry.key].shape
        return Ref(entry.key) if shape == entry.shape else Op("aten.view.default", (Ref(entry.key), shape))


def resolved(entry: TensorEntry, shape: tuple[int, ...] | None) -> TensorEntry | None:
    """What the ranks hold as one tensor of `shape`: a copy of it each, or slices of it. None where it is neither."""
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


def is_a_copy(found: TensorEntry, entry: TensorEntry) -> bool:
    """Whether `found`, to which the entry was resolved, is what one rank holds of it."""
    return any(part is not None and part.storage is found.storage for part in parts_of(entry))


# Flat parameters


def _units(
    flat: Sequence[TensorEntry],
    paths: Mapping[str, str],
    places: Mapping[str, tuple[Slot, ...]],
    problems: list[Problem],
) -> dict[str, Unit]:
    """The flat parameters that have to be taken apart, by unit, in the order of `places`."""
    found: dict[str, Unit] = {}
    for entry in flat:
        path = paths[entry.key]
        if path not in places:
            problems.append(Problem(f"the model has no module {path} with parameters", entry.key))
        elif path in found:
            problems.append(
                Problem(f"{found[path].key} is of the same module, and which parameters are in which?", entry.key)
            )
        elif places[path]:
            found[path] = Unit(entry.key, entry, places[path])
            reason = _unfit(found[path])
            problems += [] if reason is None else [Problem(reason, entry.key)]
    return {path: found[path] for path in places if path in found}


def _unfit(unit: Unit) -> str | None:
    if unit.entry.storage is None:
        return "is one rank's part: name the files of all ranks, as in 'rank_*.pt'"
    if len(unit.entry.shape) != 1:
        return "is not one-dimensional"
    return misfit(unit.slots, unit.entry.numel, len(unit.parts), padded=True)


def taken_apart(unit: Unit) -> Iterator[TensorEntry]:
    """The parameters of a unit, each with a storage of its own; its names within the unit share it."""
    for slot in unit.slots:
        entry = cut_out(unit.entry.dtype, unit.parts, slot)
        yield from (replace(entry, key=fqn) for fqn in slot.fqns)


def cut_out(dtype: str, parts: Sequence[TensorEntry | None], slot: Slot) -> TensorEntry:
    """The tensor in `slot` of the flat tensor that the parts are together."""
    storage = concatenated(across((part for part in parts if part is not None), slot.start, slot.numel))
    return in_row_major(slot.fqns[0], dtype, slot.shape, storage)


def _cut_out(unit: Unit, slot: Slot) -> Expression:
    return Op("aten.view.default", (Op("aten.slice.Tensor", (Ref(unit.key), 0, slot.start, slot.end)), slot.shape))


def _other_units(names: Names, patterns: Sequence[str], have: set[str]) -> list[Problem]:
    """How the units of the files are others than the patterns say."""
    wanted, problems = named_units(names, patterns)
    full = {path for path, own in slots(names, wanted).items() if own}
    problems += [
        Problem("--units names it, and the files have no flat parameter of it", p) for p in sorted(full - have - {""})
    ]
    return problems + [
        Problem("the files have a flat parameter of it, and --units does not name it", p)
        for p in sorted(have - set(wanted))
    ]


def _modules(section: Section) -> Mapping[str, object] | None:
    """``_metadata`` without the paths of wrappers; where two are one then, the inner module's stays."""
    if section.modules is None:
        return None
    wrappers = recognise(path for path in section.modules if path and isinstance(path, str))
    return {
        strip(path, wrappers) if isinstance(path, str) else path: payload for path, payload in section.modules.items()
    }


def put_together(source: Checkpoint, names: Names | None, units: Sequence[str]) -> Gathered | None:
    """The source with flat parameters and parts of tensors made whole; None where it has none.

    Raises `CkptError` where that cannot be, or where `units` has nothing to say.
    """
    if not _needs_gathering(source):
        if units:
            raise CkptError(f"{source.source} holds no flat parameters", hint="leave --units out")
        return None

    if names is None:
        if _is_of_ranks(source):
            raise without_model(source)
        return None
    return gather(source, names, units)


def _needs_gathering(source: Checkpoint) -> bool:
    """Whether the checkpoint is that of several ranks, or holds flat parameters."""
    return _is_of_ranks(source) or any(is_flat(e.key) for section in source.state_dicts for e in section.tensors)


def _is_of_ranks(source: Checkpoint) -> bool:
    entries = [entry for section in source.sections for entry in section.tensors]
    if not any(entry.payload is not None for entry in entries):
        return False

    return any(map(is_of_ranks, entries))


def made_whole(source: Checkpoint) -> Checkpoint:
    """`source` with what ranks hold copies of as one: `replicas.without_replicas`, where there can be any."""
    if not _is_of_ranks(source):
        return source

    return without_replicas(source)
