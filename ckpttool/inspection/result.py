"""The contents of a checkpoint, and their JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from ckpttool.core.checkpoint import KINDS, Checkpoint, ExtraEntry, TensorEntry
from ckpttool.core.errors import CkptError
from ckpttool.core.optimizer_state import FORMS, OptimizerState, Param
from ckpttool.core.pickle_imports import VERDICTS, Import, note_on_dangerous
from ckpttool.core.schema import (
    COUNT,
    FLAG,
    LEFT_OUT,
    OBJECT,
    SHAPE,
    TEXT,
    TEXTS,
    Members,
    either,
    list_of,
    notes_as,
    nullable,
    one_of,
    plain,
    record,
    row,
)
from ckpttool.core.text import Note, dotted, is_flat, plural, some
from ckpttool.core.values import dataclass, public
from ckpttool.evaluate.compare import Statistics
from ckpttool.formats.registry import format_of
from ckpttool.formats.remarks import one_rank
from ckpttool.kinds.adapters import Adapter, adapter_in
from ckpttool.kinds.table import KIND
from ckpttool.naming.flat import flat_params


class InspectedTensor(NamedTuple):
    """A tensor with its first name if it is an alias, the entry that it is inside of, and its
    statistics.
    """

    section: str
    entry: TensorEntry
    alias_of: str | None
    inside: str | None
    stats: Statistics | None

    @property
    def name(self) -> str:
        """Its key below its section's path."""
        return dotted(self.section, self.entry.key)


@public
@dataclass(frozen=True, slots=True)
class Inspection:
    """A checkpoint, and what its names show.

    Attributes:
        checkpoint: The index of the file.
        wrappers: Section path -> the segments that wrappers added to its keys (``module``,
            ``_orig_mod``, ...).
        aliases: Section path -> the other names of tensors, each with the first name.
        statistics: Identity of each dense tensor -> the statistics of its values; None if values
            were not read.
    """

    checkpoint: Checkpoint
    wrappers: Mapping[str, tuple[str, ...]]
    aliases: Mapping[str, Mapping[str, str]]
    statistics: Mapping[object, Statistics] | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks of the reader, and what the values show."""
        checkpoint = self.checkpoint
        notes: list[str] = [*note_on_dangerous(checkpoint.imports), *checkpoint.notes]
        refusal = format_of(checkpoint).refusal(checkpoint)
        if refusal:
            notes.append(Note(refusal, "unreadable"))
        if self._may_be_of_one_rank():
            notes += one_rank(checkpoint)
        if self.statistics:
            notes += self._odd_values()
        return tuple(notes)

    def _may_be_of_one_rank(self) -> bool:
        """Return whether an entry is flat, or no plain tensor: only such entries are parts of
        ranks.
        """
        for section in self.checkpoint.sections:
            for entry in section.entries:
                if is_flat(entry.key) or isinstance(entry, ExtraEntry) or entry.layout != "strided":
                    return True
        return False

    def _odd_values(self) -> Iterator[str]:
        """Yield a note on the tensors with NaN, with infinite values, and with only zeros."""
        odd: dict[str, list[str]] = {"NaN": [], "infinite values": [], "only zeros": []}
        for tensor in self.tensors():
            stats = tensor.stats
            if stats is None:
                continue
            if stats.nan:
                odd["NaN"].append(tensor.name)
            if stats.inf:
                odd["infinite values"].append(tensor.name)
            if _has_only_zeros(stats):
                odd["only zeros"].append(tensor.name)
        for what, names in odd.items():
            if names:
                count = plural(len(names), "tensor")
                yield Note(f"{count} with {what}: {some(names)}", "odd-values")

    def tensors(self) -> Iterator[InspectedTensor]:
        """Yield every tensor, section by section, those inside of other entries last.

        Keys may repeat: a list `a` has a tensor ``a.0`` inside it, and there may also be a tensor
        of that name.
        """
        statistics = self.statistics or {}
        for section in self.checkpoint.sections:
            path, aliases = section.path, self.aliases[section.path]
            for entry in section.tensors:
                stats = statistics.get(entry.identity)
                yield InspectedTensor(path, entry, aliases.get(entry.key), None, stats)
            for extra in section.extras:
                for entry in extra.inside():
                    stats = statistics.get(entry.identity)
                    yield InspectedTensor(path, entry, None, extra.key, stats)

    def to_json(self) -> dict[str, Any]:
        """Return the `inspect` object of the contract."""
        return dict(INSPECT.write(self))

    @property
    def adapters(self) -> dict[str, Adapter]:
        """The adapters among the keys of state dicts, by section path."""
        adapters = {}
        for section in self.checkpoint.state_dicts:
            adapter = adapter_in(section)
            if adapter is not None:
                adapters[section.path] = adapter
        return adapters

    @property
    def optimizers(self) -> dict[str, OptimizerState]:
        """The optimizers that are in one of torch's forms, by section path."""
        from ckpttool.optimizers.forms import read

        states = {}
        for section in self.checkpoint.optimizers:
            with suppress(CkptError):
                states[section.path] = read(section)
        return states


def _has_only_zeros(stats: Statistics) -> bool:
    """Return whether all values are 0. A single 0 is not odd: it may be a counter."""
    is_zero = stats.minimum == stats.maximum == 0 and not stats.nan and not stats.inf
    return is_zero and stats.zeros != 1


# The lists of the JSON: the members of an item, and below them the items, one tuple for each

Rows = Iterator[tuple[object, ...]]
_PLACE: Members = {"section": TEXT, "key": TEXT}
_SECTION = row(
    {"path": TEXT, "kind": one_of(*KINDS), "tensors": COUNT, "bytes": COUNT, "wrappers": TEXTS}
)


def _sections(inspection: Inspection) -> Rows:
    for section in inspection.checkpoint.sections:
        path, count = section.path, len(section.all_tensors())
        yield path, section.kind, count, section.nbytes, inspection.wrappers[path]


_NUMBER = plain("a number", lambda value: isinstance(value, (int, float)), {"type": "number"})
_STATISTICS = record(
    Statistics,
    {
        **dict.fromkeys(("min", "max", "mean"), nullable(_NUMBER)),
        **dict.fromkeys(("zeros", "nan", "inf"), nullable(COUNT)),
        "sha256": TEXT,
    },
    called={"min": "minimum", "max": "maximum"},
)
_TENSOR = row(
    {**_PLACE, "dtype": TEXT, "shape": SHAPE, "bytes": COUNT, "alias_of": nullable(TEXT)},
    {"inside": TEXT, "stats": nullable(_STATISTICS)},
)


def _tensors(inspection: Inspection) -> Rows:
    for tensor in inspection.tensors():
        entry = tensor.entry
        inside = LEFT_OUT if tensor.inside is None else tensor.inside
        stats = LEFT_OUT if inspection.statistics is None else tensor.stats
        outline = entry.key, entry.dtype, entry.shape, entry.nbytes
        yield tensor.section, *outline, tensor.alias_of, inside, stats


_EXTRA = row(_PLACE)


def _extras(inspection: Inspection) -> Rows:
    for section in inspection.checkpoint.sections:
        for extra in section.extras:
            yield section.path, extra.key


_FLAT_PARAMETER = row({**_PLACE, "unit": TEXT, "elements": COUNT})


def _flat_parameters(inspection: Inspection) -> Rows:
    for section in inspection.checkpoint.sections:
        for flat in flat_params(section):
            yield section.path, flat.key, flat.unit, flat.numel


_ADAPTER = row({"section": TEXT, "kinds": TEXTS, "modules": TEXTS, "tensors": COUNT, "alone": FLAG})


def _adapters(inspection: Inspection) -> Rows:
    for path, adapter in inspection.adapters.items():
        count = sum(map(len, adapter.modules.values()))
        yield path, adapter.kinds, adapter.modules, count, adapter.alone


_GROUP = row({"params": list_of(either(TEXT, _NUMBER)), "names": list_of(nullable(TEXT))})
_OPTIMIZER = row({"section": TEXT, "form": one_of(*FORMS), "groups": list_of(_GROUP)})


def _optimizers(inspection: Inspection) -> Rows:
    for path, state in inspection.optimizers.items():
        names = names_in_file(state)
        groups = [(group.params, [*map(names.get, group.params)]) for group in state.groups]
        yield path, state.form, groups


_UNREACHED = row({"path": TEXT, "bytes": COUNT, "referred": FLAG})


def _unreached(inspection: Inspection) -> Rows:
    for storage in inspection.checkpoint.unreached:
        yield storage.path, storage.storage.nbytes, storage.is_referred


_IMPORT = record(
    Import,
    {
        "name": TEXT,
        "verdict": one_of(*VERDICTS),
        "file": TEXT,
        "member": TEXT,
        "offset": COUNT,
        "calls": TEXTS,
        "called": COUNT,
    },
)
INSPECT = record(
    Inspection,
    {
        "source": TEXT,
        "format": TEXT,
        "bytes": COUNT,
        "sections": list_of(_SECTION),
        "tensors": list_of(_TENSOR),
        "globals": TEXTS,
        "imports": list_of(_IMPORT),
        "extras": list_of(_EXTRA),
        "others": TEXTS,
        "flat_parameters": list_of(_FLAT_PARAMETER),
        "adapters": list_of(_ADAPTER),
        "optimizers": list_of(_OPTIMIZER),
        "metadata": OBJECT,
        "notes": notes_as("reader"),
        "unreached": list_of(_UNREACHED),
        "kinds": list_of(KIND),
    },
    called={
        **{
            name: f"checkpoint.{name}"
            for name in ("source", "format", "globals", "imports", "others", "metadata", "kinds")
        },
        "bytes": "checkpoint.nbytes",
        "sections": _sections,
        "tensors": _tensors,
        "extras": _extras,
        "flat_parameters": _flat_parameters,
        "adapters": _adapters,
        "optimizers": _optimizers,
        "unreached": _unreached,
    },
    title="ckpttool.inspect/1",
)


def names_in_file(state: OptimizerState) -> dict[Param, str]:
    """Return the names of an optimizer's parameters in the file: in its keys, or in ``param_names``
    of its groups, also if only some groups have names.
    """
    names = {}
    for group in state.groups:
        for param, name in zip(group.params, group.param_names or group.params):
            if isinstance(name, str):
                names[param] = name
    return names
