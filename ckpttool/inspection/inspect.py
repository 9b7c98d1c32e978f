"""Inspection: what is in one checkpoint, read off its index. The value behind `ckpttool inspect`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple

from ckpttool.core.checkpoint import KINDS, Checkpoint, ExtraEntry, Section, TensorEntry
from ckpttool.core.errors import CkptError
from ckpttool.core.keys import dotted, is_flat
from ckpttool.core.optimizer_state import FORMS, OptimizerState, Param
from ckpttool.core.options import expand_options, several
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
    nullable,
    one_of,
    plain,
    record,
    row,
)
from ckpttool.core.text import Info, number, plural, some
from ckpttool.core.values import dataclass, public
from ckpttool.distributed.job import Question, answers
from ckpttool.evaluate.compare import Statistics, statistics
from ckpttool.formats.detect_folder import dangerous_beside
from ckpttool.formats.registry import MEMORY
from ckpttool.naming.adapters import Adapter, adapter_of
from ckpttool.naming.call_variants import aliases
from ckpttool.naming.flat import flat_params
from ckpttool.naming.wrappers import infer, is_lightning, segments
from ckpttool.operands.checkpoint import Ckpt, open_checkpoint, split
from ckpttool.rules.patterns import names_entry


class Found(NamedTuple):
    """A tensor of a checkpoint, and what is known of it: its first name, the extra that it is inside of, its values."""

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
    """A checkpoint and what can be told from its names alone.

    `wrappers` are the segments that wrappers added to the keys of each section (``module``, ``_orig_mod``, ...), and
    `aliases` the keys of each section that name a tensor a second time, with its first name; both by section path.
    `statistics`, where they were asked for, are those of every dense tensor, by its identity.
    """

    checkpoint: Checkpoint
    wrappers: Mapping[str, tuple[str, ...]]
    aliases: Mapping[str, Mapping[str, str]]
    statistics: Mapping[object, Statistics] | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """What the reader found odd, and what the values show."""
        odd = _odd(list(self.tensors())) if self.statistics else ()
        own = self.checkpoint
        return (*_code(own), *own.notes, *_of_loading(own), *_of_one_rank(own), *odd)

    def tensors(self) -> Iterator[Found]:
        """Every tensor, section by section, those inside of extras behind the others.

        A key need not be the only one: a list `a` has a tensor ``a.0`` inside it, and beside it may stand one.
        """
        known = self.statistics or {}
        for section in self.checkpoint.sections:
            aliases = self.aliases[section.path]
            for entry in section.tensors:
                yield Found(section.path, entry, aliases.get(entry.key), None, known.get(entry.identity))
            for extra in section.extras:
                for entry in extra.inside():
                    yield Found(section.path, entry, None, extra.key, known.get(entry.identity))

    def to_json(self) -> dict[str, Any]:
        """The `inspect` object of the contract."""
        return dict(INSPECT.write(self))

    @property
    def adapters(self) -> dict[str, Adapter]:
        """The adapters among the keys of state dicts, by section path."""
        found = ((section.path, adapter_of(section.keys)) for section in self.checkpoint.state_dicts)
        return {path: adapter for path, adapter in found if adapter is not None}

    @property
    def optimizers(self) -> dict[str, OptimizerState]:
        """The optimizers that are in one of torch's forms, by section path."""
        found = ((section.path, _state(section)) for section in self.checkpoint.optimizers)
        return {path: state for path, state in found if state is not None}


# What stands in the lists of the JSON, member by member


def _sections(inspection: Inspection) -> Iterator[tuple[object, ...]]:
    for own in inspection.checkpoint.sections:
        yield own.path, own.kind, len(own.all_tensors()), own.nbytes, inspection.wrappers[own.path]


def _tensors(inspection: Inspection) -> Iterator[tuple[object, ...]]:
    for found in inspection.tensors():
        e, inside = found.entry, LEFT_OUT if found.inside is None else found.inside
        stats = LEFT_OUT if inspection.statistics is None else found.stats
        yield found.section, e.key, e.dtype, e.shape, e.nbytes, found.alias_of, inside, stats


def _extras(inspection: Inspection) -> Iterator[tuple[object, ...]]:
    return ((own.path, extra.key) for own in inspection.checkpoint.sections for extra in own.extras)


def _flat_parameters(inspection: Inspection) -> Iterator[tuple[object, ...]]:
    for own in inspection.checkpoint.sections:
        yield from ((own.path, flat.key, flat.unit, flat.numel) for flat in flat_params(own))


def _adapters(inspection: Inspection) -> Iterator[tuple[object, ...]]:
    for path, own in inspection.adapters.items():
        yield path, own.kinds, own.modules, sum(map(len, own.modules.values())), own.alone


def _optimizers(inspection: Inspection) -> Iterator[tuple[object, ...]]:
    for path, state in inspection.optimizers.items():
        names = names_in_file(state)
        yield path, state.form, [(group.params, [*map(names.get, group.params)]) for group in state.groups]


def _unreached(inspection: Inspection) -> Iterator[tuple[object, ...]]:
    return ((left.path, left.storage.nbytes, left.is_referred) for left in inspection.checkpoint.unreached)


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
_SECTION = row({"path": TEXT, "kind": one_of(*KINDS), "tensors": COUNT, "bytes": COUNT, "wrappers": TEXTS})
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
        "optimizers": list_of(row({"section": TEXT, "form": one_of(*FORMS), "groups": list_of(_GROUP)})),
        "metadata": OBJECT,
        "notes": TEXTS,
        "unreached": list_of(row({"path": TEXT, "bytes": COUNT, "referred": FLAG})),
    },
    called={
        **{name: f"checkpoint.{name}" for name in ("source", "format", "globals", "imports", "others", "metadata")},
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
    """What the file itself calls an optimizer's parameters: in its keys, or in the ``param_names`` of its groups."""
    return {
        param: name
        for group in state.groups
        for param, name in zip(group.params, group.param_names or group.params)
        if isinstance(name, str)
    }


def _state(section: Section) -> OptimizerState | None:
    from ckpttool.optimizers.forms import read

    try:
        return read(section)
    except CkptError:
        return None


@expand_options()
def inspect(ckpt: Ckpt, *, stats: bool = False, filter: str | None = None) -> Inspection:
    """Return what is in a checkpoint: sections, keys, dtypes, shapes, aliases, wrappers; with `stats` its values.

    `filter` is a pattern, like `drop` of `remap`, that names the tensors to look at; a note says how many there are
    in all. `stats` reads every dense tensor, in chunks. Raises `CkptError` if something cannot be read.
    """
    checkpoint = open_checkpoint(ckpt)
    if isinstance(ckpt, str):
        beside = dangerous_beside(ckpt)
        checkpoint = replace(checkpoint, imports=in_order((*checkpoint.imports, *beside)))
    if filter is not None:
        checkpoint = _filtered(checkpoint, filter)
    return Inspection(
        checkpoint,
        {section.path: _wrappers(section, is_lightning(checkpoint)) for section in checkpoint.sections},
        {section.path: aliases(section) for section in checkpoint.sections},
        _all_statistics(checkpoint) if stats else None,
    )


def _filtered(checkpoint: Checkpoint, pattern: str) -> Checkpoint:
    """Return the checkpoint with the entries that the pattern names, and of other objects the tensors that it names."""

    def kept(section: Section) -> Section:
        extras = []
        for extra in section.extras:
            inside = zip(extra.tensors, extra.inside())
            tensors = tuple(tensor for tensor, entry in inside if names_entry(pattern, section.path, entry.key))
            if names_entry(pattern, section.path, extra.key):
                extras.append(extra)
            elif tensors:
                extras.append(replace(extra, tensors=tensors))
        named = tuple(entry for entry in section.tensors if names_entry(pattern, section.path, entry.key))
        return replace(section, tensors=named, extras=tuple(extras))

    sections = tuple(kept(section) for section in checkpoint.sections)
    total, count = (sum(len(one.all_tensors()) for one in each) for each in (checkpoint.sections, sections))
    if not count:
        hint = f"`{checkpoint.inspect_call}` lists what is there"
        raise CkptError(f"{pattern!r} names none of {plural(total, 'tensor')}", hint=hint)
    note = Info(f"only what {pattern!r} names: {number(count)} of {plural(total, 'tensor')}")
    return replace(checkpoint, sections=sections, notes=(*checkpoint.notes, note))


@expand_options()
def manifest(ckpt: Ckpt, *, leave_out: str | Collection[str] = ()) -> dict[str, Any]:
    """Return a digest of every file and every tensor of a checkpoint, as the JSON of an in-toto statement.

    `diff` with `values` compares a checkpoint with it. Files of a folder in `leave_out` are not listed. An object in
    memory has no files, so its statement has no subject. Raises `CkptError` if something cannot be read.
    """
    from ckpttool.formats.manifest import statement

    checkpoint = open_checkpoint(ckpt)
    path, section = split(checkpoint.source)
    if section is not None:
        raise CkptError("a manifest is of whole files", hint=f"leave ::{section} out")
    return statement(checkpoint, None if checkpoint.format == MEMORY.name else path, several(leave_out) or ())


def _all_statistics(checkpoint: Checkpoint) -> dict[object, Statistics]:
    """Those of every dense tensor, by its identity: what has several names is read once."""
    title = f"reading the values of {checkpoint.source}"
    dense = (entry for section in checkpoint.sections for entry in section.all_tensors() if entry.storage)
    asked = {entry.identity: Question(entry.key, entry.nbytes, partial(_asked, entry)) for entry in dense}
    return {identity: Statistics(**found) for identity, found in answers(title, asked).items()}


def _asked(entry: TensorEntry) -> dict[str, Any]:
    return asdict(statistics(entry))


def _is_zero(own: Statistics) -> bool:
    """Whether all of several elements are 0; a counter at its start is nothing odd."""
    return own.minimum == own.maximum == 0 and not own.nan and not own.inf and own.zeros != 1


def _of_loading(checkpoint: Checkpoint) -> tuple[str, ...]:
    if checkpoint.format != "torch_legacy":
        return ()
    from ckpttool.formats.torch.legacy_file import UNREADABLE, refused_by_torch

    return (UNREADABLE,) if refused_by_torch(checkpoint) else ()


def _of_one_rank(checkpoint: Checkpoint) -> tuple[str, ...]:
    entries = [entry for section in checkpoint.sections for entry in section.entries]
    if not any(is_flat(entry.key) or isinstance(entry, ExtraEntry) or entry.layout != "strided" for entry in entries):
        return ()
    from ckpttool.formats.ranks.files import one_rank

    return one_rank(checkpoint)


def _code(checkpoint: Checkpoint) -> tuple[str, ...]:
    """What runs when the checkpoint is loaded by something that executes its pickles."""
    names = list(dict.fromkeys(one.name for one in dangerous(checkpoint.imports)))
    if not names:
        return ()
    return (f"{plural(len(names), 'dangerous import')}, run when it is loaded with weights_only=False: {some(names)}",)


def _odd(found: Sequence[Found]) -> Iterator[str]:
    """Sentences on values that are rarely meant."""
    for what, hits in (
        ("NaN", [one.name for one in found if one.stats and one.stats.nan]),
        ("infinite values", [one.name for one in found if one.stats and one.stats.inf]),
        ("nothing but zeros", [one.name for one in found if one.stats and _is_zero(one.stats)]),
    ):
        if hits:
            yield f"{plural(len(hits), 'tensor')} with {what}: {some(hits)}"


def _wrappers(section: Section, lightning: bool) -> tuple[str, ...]:
    if section.kind != "state_dict":
        return ()
    return tuple(segments(infer(section.keys, lightning=lightning).paths))
