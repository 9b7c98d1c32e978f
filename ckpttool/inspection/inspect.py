"""Describe what is in a checkpoint, from its index."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple

from ckpttool.core.checkpoint import KINDS, Checkpoint, ExtraEntry, Section, TensorEntry
from ckpttool.core.errors import CkptError
from ckpttool.core.optimizer_state import FORMS, OptimizerState, Param
from ckpttool.core.options import expand_options
from ckpttool.core.pickle_imports import VERDICTS, Import, dangerous, in_order
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
from ckpttool.core.text import Info, Note, dotted, is_flat, number, plural, some
from ckpttool.core.values import dataclass, public
from ckpttool.distributed.job import Question, answers
from ckpttool.evaluate.compare import Statistics, statistics
from ckpttool.formats.opening import unsafe_in_folder
from ckpttool.formats.registry import format_of
from ckpttool.formats.remarks import one_rank
from ckpttool.kinds.adapters import Adapter, adapter_of
from ckpttool.kinds.table import KIND
from ckpttool.naming.flat import flat_params
from ckpttool.naming.match import aliases
from ckpttool.naming.wrappers import infer, is_lightning, segments
from ckpttool.operands.checkpoint import Ckpt, open_checkpoint, split
from ckpttool.ruleset.patterns import names_entry


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

    `wrappers` are the segments that wrappers added to the keys of each section (``module``,
    ``_orig_mod``, ...), and `aliases` maps the second names of tensors to the first; both by
    section path. `statistics` are by the identity of each dense tensor; None if values were not
    read.
    """

    checkpoint: Checkpoint
    wrappers: Mapping[str, tuple[str, ...]]
    aliases: Mapping[str, Mapping[str, str]]
    statistics: Mapping[object, Statistics] | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks of the reader, and what the values show."""
        checkpoint = self.checkpoint
        notes: list[str] = []
        imports = list(dict.fromkeys(one.name for one in dangerous(checkpoint.imports)))
        if imports:
            count = plural(len(imports), "dangerous import")
            text = f"{count}, executed if it is loaded with weights_only=False: {some(imports)}"
            notes.append(Note(text, "dangerous-import"))
        notes += checkpoint.notes
        refusal = format_of(checkpoint).refusal(checkpoint)
        notes += [Note(refusal, "unreadable")] if refusal else []
        entries = [entry for section in checkpoint.sections for entry in section.entries]
        if any(
            is_flat(e.key) or isinstance(e, ExtraEntry) or e.layout != "strided" for e in entries
        ):
            notes += one_rank(checkpoint)
        return (*notes, *(self._odd_values() if self.statistics else ()))

    def _odd_values(self) -> Iterator[str]:
        with_stats = [(one.name, one.stats) for one in self.tensors() if one.stats]
        zeros = [
            # A single 0 is not odd: it may be a counter.
            (name, s.minimum == s.maximum == 0 and not s.nan and not s.inf and s.zeros != 1)
            for name, s in with_stats
        ]
        for what, hits in (
            ("NaN", [name for name, stats in with_stats if stats.nan]),
            ("infinite values", [name for name, stats in with_stats if stats.inf]),
            ("only zeros", [name for name, is_zero in zeros if is_zero]),
        ):
            if hits:
                yield Note(f"{plural(len(hits), 'tensor')} with {what}: {some(hits)}", "odd-values")

    def tensors(self) -> Iterator[InspectedTensor]:
        """Yield every tensor, section by section, those inside of other entries last.

        Keys may repeat: a list `a` has a tensor ``a.0`` inside it, and there may also be a tensor
        of that name.
        """
        known = self.statistics or {}
        for section in self.checkpoint.sections:
            path, aliases = section.path, self.aliases[section.path]
            for entry in section.tensors:
                yield InspectedTensor(
                    path, entry, aliases.get(entry.key), None, known.get(entry.identity)
                )
            for extra in section.extras:
                for entry in extra.inside():
                    yield InspectedTensor(path, entry, None, extra.key, known.get(entry.identity))

    def to_json(self) -> dict[str, Any]:
        """Return the `inspect` object of the contract."""
        return dict(INSPECT.write(self))

    @property
    def adapters(self) -> dict[str, Adapter]:
        """The adapters among the keys of state dicts, by section path."""
        adapters = (
            (section.path, adapter_of(section.keys)) for section in self.checkpoint.state_dicts
        )
        return {path: adapter for path, adapter in adapters if adapter is not None}

    @property
    def optimizers(self) -> dict[str, OptimizerState]:
        """The optimizers that are in one of torch's forms, by section path."""
        from ckpttool.optimizers.forms import read

        states = {}
        for section in self.checkpoint.optimizers:
            with suppress(CkptError):
                states[section.path] = read(section)
        return states


# The lists of the JSON, one tuple for each item


def _tensors(inspection: Inspection) -> Iterator[tuple[object, ...]]:
    for one in inspection.tensors():
        e, inside = one.entry, LEFT_OUT if one.inside is None else one.inside
        stats = LEFT_OUT if inspection.statistics is None else one.stats
        yield one.section, e.key, e.dtype, e.shape, e.nbytes, one.alias_of, inside, stats


def _optimizers(inspection: Inspection) -> Iterator[tuple[object, ...]]:
    for path, state in inspection.optimizers.items():
        names = names_in_file(state)
        yield (
            path,
            state.form,
            [(group.params, [*map(names.get, group.params)]) for group in state.groups],
        )


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
_PLACE: Members = {"section": TEXT, "key": TEXT}
_SECTION = row(
    {"path": TEXT, "kind": one_of(*KINDS), "tensors": COUNT, "bytes": COUNT, "wrappers": TEXTS}
)
_TENSOR = row(
    {**_PLACE, "dtype": TEXT, "shape": SHAPE, "bytes": COUNT, "alias_of": nullable(TEXT)},
    {"inside": TEXT, "stats": nullable(_STATISTICS)},
)
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
_ADAPTER = row({"section": TEXT, "kinds": TEXTS, "modules": TEXTS, "tensors": COUNT, "alone": FLAG})
_GROUP = row({"params": list_of(either(TEXT, _NUMBER)), "names": list_of(nullable(TEXT))})
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
        "extras": list_of(row(_PLACE)),
        "others": TEXTS,
        "flat_parameters": list_of(row({**_PLACE, "unit": TEXT, "elements": COUNT})),
        "adapters": list_of(_ADAPTER),
        "optimizers": list_of(
            row({"section": TEXT, "form": one_of(*FORMS), "groups": list_of(_GROUP)})
        ),
        "metadata": OBJECT,
        "notes": notes_as("reader"),
        "unreached": list_of(row({"path": TEXT, "bytes": COUNT, "referred": FLAG})),
        "kinds": list_of(KIND),
    },
    called={
        **{
            name: f"checkpoint.{name}"
            for name in ("source", "format", "globals", "imports", "others", "metadata", "kinds")
        },
        "bytes": "checkpoint.nbytes",
        "sections": lambda all: (
            (one.path, one.kind, len(one.all_tensors()), one.nbytes, all.wrappers[one.path])
            for one in all.checkpoint.sections
        ),
        "tensors": _tensors,
        "extras": lambda all: (
            (one.path, extra.key) for one in all.checkpoint.sections for extra in one.extras
        ),
        "flat_parameters": lambda all: (
            (one.path, flat.key, flat.unit, flat.numel)
            for one in all.checkpoint.sections
            for flat in flat_params(one)
        ),
        "adapters": lambda all: (
            (path, one.kinds, one.modules, sum(map(len, one.modules.values())), one.alone)
            for path, one in all.adapters.items()
        ),
        "optimizers": _optimizers,
        "unreached": lambda all: (
            (one.path, one.storage.nbytes, one.is_referred) for one in all.checkpoint.unreached
        ),
    },
    title="ckpttool.inspect/1",
)


def names_in_file(state: OptimizerState) -> dict[Param, str]:
    """Return the names of an optimizer's parameters in the file: in its keys, or in ``param_names``
    of its groups.
    """
    return {
        param: name
        for group in state.groups
        for param, name in zip(group.params, group.param_names or group.params)
        if isinstance(name, str)
    }


@expand_options()
def inspect(ckpt: Ckpt, *, stats: bool = False, filter: str | None = None) -> Inspection:
    """Return what is in a checkpoint: sections, keys, dtypes, shapes, aliases, wrappers; with
    `stats` its values.

    `filter` is a pattern, like `drop` of `remap`, that names the tensors to look at; a note says
    how many there are in all. `stats` reads every dense tensor, in chunks. Raises `CkptError` if
    something cannot be read.
    """
    checkpoint = open_checkpoint(ckpt)
    if isinstance(ckpt, str) and split(ckpt)[1] is None:
        others = unsafe_in_folder(ckpt)
        checkpoint = replace(checkpoint, imports=in_order((*checkpoint.imports, *others)))
    if filter is not None:
        checkpoint = _filtered(checkpoint, filter)
    lightning = is_lightning(checkpoint)
    wrappers = {
        section.path: tuple(segments(infer(section.keys, lightning=lightning).paths))
        if section.kind == "state_dict"
        else ()
        for section in checkpoint.sections
    }
    second_names = {section.path: aliases(section) for section in checkpoint.sections}
    if not stats:
        return Inspection(checkpoint, wrappers, second_names)

    def read(entry: TensorEntry) -> dict[str, Any]:
        return asdict(statistics(entry))

    # By identity: a tensor with several names is read once.
    dense = (
        entry for section in checkpoint.sections for entry in section.all_tensors() if entry.storage
    )
    questions = {
        entry.identity: Question(entry.key, entry.nbytes, partial(read, entry)) for entry in dense
    }
    values = answers(f"reading the values of {checkpoint.source}", questions)
    return Inspection(
        checkpoint, wrappers, second_names, {at: Statistics(**one) for at, one in values.items()}
    )


def _filtered(checkpoint: Checkpoint, pattern: str) -> Checkpoint:
    """Return the checkpoint with the entries that match the pattern, and with matching tensors
    inside other entries.
    """

    def kept(section: Section) -> Section:
        extras = []
        for extra in section.extras:
            inside = zip(extra.tensors, extra.inside())
            tensors = tuple(
                tensor for tensor, entry in inside if names_entry(pattern, section.path, entry.key)
            )
            if names_entry(pattern, section.path, extra.key):
                extras.append(extra)
            elif tensors:
                extras.append(replace(extra, tensors=tensors))
        named = tuple(
            entry for entry in section.tensors if names_entry(pattern, section.path, entry.key)
        )
        return replace(section, tensors=named, extras=tuple(extras))

    sections = tuple(kept(section) for section in checkpoint.sections)
    total, count = (
        sum(len(one.all_tensors()) for one in each) for each in (checkpoint.sections, sections)
    )
    if not count:
        hint = f"`{checkpoint.inspect_call}` lists what is there"
        raise CkptError(f"{pattern!r} names none of {plural(total, 'tensor')}", hint=hint)
    note = Info(
        f"only what {pattern!r} names: {number(count)} of {plural(total, 'tensor')}", "filter"
    )
    return replace(checkpoint, sections=sections, notes=(*checkpoint.notes, note))
