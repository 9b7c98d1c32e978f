"""Puts a checkpoint's weights into an exported program: which key feeds which FQN, and all that stands against it.

The program's graph and sample inputs are not looked at; only the storages of its weights are replaced, and those of its
constants where that is asked for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Union

from ckpttool import expression as ex
from ckpttool.checkpoint import Checkpoint, ExtraEntry, Section, Span, Storage, TensorEntry
from ckpttool.errors import Problem, Refused
from ckpttool.evaluate.compare import same_values
from ckpttool.expression import Expression, Op, Ref, Special
from ckpttool.formats.pt2.aotinductor import INSIDE, OUTSIDE
from ckpttool.formats.pt2.archive import replaceable
from ckpttool.formats.pt2.program import CONSTANTS, Program
from ckpttool.names import RUNTIME, Names
from ckpttool.naming.forms import over, read
from ckpttool.naming.match import Match, match
from ckpttool.naming.name_tables import Relation

Entries = Mapping[str, Union[TensorEntry, ExtraEntry]]


@dataclass(frozen=True, slots=True)
class Swap:
    """The program with its new weights. `sources`: FQN -> expression over the checkpoint's keys.

    `form` is the form that the checkpoint's keys were read in; `ignored` are its entries that no program holds.
    """

    program: Checkpoint
    sources: Mapping[str, Expression]
    form: str
    ignored: tuple[str, ...]

    @property
    def constants(self) -> tuple[str, ...]:
        """The program's constants that stay as they are."""
        return tuple(entry.key for entry in _constants(self.program) if entry.key not in self.sources)


@dataclass(frozen=True, slots=True)
class _Feed:
    """What is to feed each FQN, before anything is compared; `twins` are keys that must hold the same value."""

    sources: dict[str, Expression]
    form: str
    problems: list[Problem] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    twins: list[tuple[str, str]] = field(default_factory=list)


def swap(
    program: Checkpoint,
    weights: Section,
    names: Names | None = None,
    *,
    form: str | None = None,
    cast: bool = False,
    packed: bool = False,
    constants: bool = False,
) -> Swap:
    """`program` with every weight replaced by what `weights` holds for it, and with `constants` every constant that it
    holds too.

    Raises `Refused`, with all problems at once, where a weight is missing, left over, of another shape or dtype (`cast`
    allows another dtype), or where the names of one tensor got different values. `packed` also takes what is no dense
    tensor (quantized, sparse, subclasses): in memory such a weight is an object like any other.
    """
    target = _target(program)
    chosen = _chosen(program, weights) if constants else {}
    taken = {key for source in chosen.values() for key in ex.refs(source)}
    rest = replace(weights, tensors=tuple(entry for entry in weights.tensors if entry.key not in taken))
    feed = _feed_by_keys(target, rest) if names is None else _feed_by_model(target, rest, names, form)
    feed.sources.update(chosen)
    wanted = (*target.tensors, *(entry for entry in _constants(program) if entry.key in chosen))
    fitted, misfits = _fit_all(wanted, feed.sources, weights.by_key(), cast, packed)
    problems = [*feed.problems, *misfits]
    for section in program.sections:
        problems += _untied(section, fitted, weights, feed.twins if section is target else ())
    if problems:
        hint = _hint(program, names, problems)
        raise Refused(f"the weights do not fit the program: {len(problems)} problems", hint=hint, problems=problems)
    sections = tuple(replace(section, tensors=_replaced(section.tensors, fitted)) for section in program.sections)
    return Swap(replace(program, sections=sections), feed.sources, feed.form, tuple(feed.ignored))


def to_json(swapped: Swap, program: str, weights: str, output: str) -> dict[str, object]:
    """The `swap-weights` object of the contract."""
    container = swapped.program.container
    return {
        "schema": "ckpttool.swap/1",
        "program": program,
        "weights": weights,
        "output": output,
        "swapped": len(swapped.sources),
        "kept": [],
        "constants": list(swapped.constants),
        "layout": container.layout if isinstance(container, Program) else swapped.program.format,
        "from": swapped.form,
        "ignored": list(swapped.ignored),
    }


def _target(program: Checkpoint) -> Section:
    """The program's state dict. Raises `Refused` where the file holds none that could be replaced."""
    if not program.sections:
        raise Refused(f"{program.source} is compiled code that holds its weights itself", hint=OUTSIDE)
    return program.section("")


def _constants(program: Checkpoint) -> tuple[TensorEntry, ...]:
    return next((section.tensors for section in program.sections if section.path == CONSTANTS), ())


def _chosen(program: Checkpoint, weights: Section) -> dict[str, Expression]:
    """Constant -> its new value, for each constant of the program that one of the keys names."""
    constants = {entry.key: entry.key for entry in _constants(program)}
    names = {entry.key: entry.key for section in program.sections for entry in section.tensors}
    found = match([entry.key for entry in weights.tensors], names)
    chosen: dict[str, Expression] = {name: Ref(key) for key, name in found.names.items() if name in constants}
    for section in program.sections:
        if section.path == CONSTANTS:
            _share(chosen, constants | section.aliases())
    return chosen


def _feed_by_keys(target: Section, weights: Section) -> _Feed:
    """Without a model: the keys must be the program's FQNs, but for segments that wrappers added."""
    aliases = target.aliases()
    found = match([entry.key for entry in weights.tensors], {e.key: e.key for e in target.tensors}, aliases)
    sources: dict[str, Expression] = {fqn: Ref(key) for key, fqn in found.names.items()}
    _share(sources, {entry.key: aliases.get(entry.key, entry.key) for entry in target.tensors})
    spare = _other_names(found, weights)
    problems = [problem for problem in _left_over(found) if problem.key not in spare]
    return _Feed(sources, RUNTIME, problems, [entry.key for entry in weights.extras], _variants(found))


def _other_names(found: Match, weights: Section) -> set[str]:
    """Keys that no name of the program is left for, of tensors that it gets by another of their keys."""
    used = {entry.identity for entry in weights.tensors if entry.key in found.names}
    unmatched = set(found.unmatched)
    return {entry.key for entry in weights.tensors if entry.key in unmatched and entry.identity in used}


def _feed_by_model(target: Section, weights: Section, names: Names, form: str | None) -> _Feed:
    """With the model: its names say what each FQN is of the checkpoint's keys, in whatever form these are."""
    relation = Relation(names)
    reading = read(relation, weights, form)
    keys = {name: key for key, name in reading.match.names.items()}
    values: dict[str, Expression]
    if reading.form == RUNTIME:
        values = {fqn: Ref(key) for fqn, key in keys.items() if fqn in relation.first}
    else:
        values = {fqn: over(source, keys) for fqn, source in relation.runtime_values(keys).items()}
    _share(values, relation.first)
    fqns = match([entry.key for entry in target.tensors], {t.fqn: t.canonical for t in names.runtime})
    feed = _Feed(
        {p: values[fqn] for p, fqn in fqns.names.items() if fqn in values}, reading.form, _left_over(reading.match)
    )
    feed.twins.extend(_variants(reading.match))
    feed.problems.extend(
        Problem("the model has no tensor of this name: is it another model?", p) for p in fqns.unmatched
    )
    used = {key for source in feed.sources.values() for key in ex.refs(source)}
    by_source = {
        source: keys[key] for key, source in reversed(relation.saved.items()) if key in keys and keys[key] in used
    }
    for name, key in keys.items():
        source = relation.saved.get(name) if reading.form != RUNTIME else None
        if key in used:
            continue
        if source is not None and source in by_source:
            feed.twins.append((key, by_source[source]))
        elif name in names.extra_state or (reading.form != RUNTIME and source is None) or isinstance(source, Op):
            feed.ignored.append(key)
        else:
            feed.problems.append(Problem("left over: the program has no such weight", key))
    return feed


def _share(values: dict[str, Expression], first: Mapping[str, str]) -> None:
    """Gives every name of a tensor the value that one of its names has, where it has none of its own."""
    known = {first[fqn]: source for fqn, source in reversed(values.items())}
    for fqn, root in first.items():
        if root in known:
            values.setdefault(fqn, known[root])


def _left_over(found: Match) -> list[Problem]:
    return [Problem("left over: the program has no such weight", key) for key in found.unmatched] + list(found.problems)


def _variants(found: Match) -> list[tuple[str, str]]:
    """Call variants of an unflattened program, each with the key that its name has the value from."""
    keys = {name: key for key, name in found.names.items()}
    return [(key, keys[name]) for key, name in found.variants.items()]


def _fit_all(
    wanted: Sequence[TensorEntry], sources: Mapping[str, Expression], have: Entries, cast: bool, packed: bool
) -> tuple[dict[str, TensorEntry], list[Problem]]:
    """The new value of each of the program's tensors that has one, and what is wrong with the others."""
    fitted: dict[str, TensorEntry] = {}
    problems: list[Problem] = []
    for entry in wanted:
        source = sources.get(entry.key)
        found = Problem("no weight for it", entry.key) if source is None else _fit(entry, source, have, cast, packed)
        if isinstance(found, Problem):
            problems.append(found)
        else:
            fitted[entry.key] = found
    return fitted, problems


def _fit(entry: TensorEntry, source: Expression, have: Entries, cast: bool, packed: bool) -> TensorEntry | Problem:
    """The new value of the program's `entry`, or why it cannot be that."""
    if ex.is_opaque(source):
        return Problem("a hook computes it by code that is no tensor operator", entry.key)
    if entry.storage is None and not packed:
        return _pickled(entry, source, have)
    try:
        found = _value(entry.key, source, have, packed)
    except Refused as error:
        return Problem(error.message, entry.key)
    if found.shape != entry.shape:
        return Problem(f"shape {list(found.shape)}, the program has {list(entry.shape)} ({_named(source)})", entry.key)
    if found.dtype == entry.dtype:
        return found
    if not cast:
        return Problem(f"dtype {found.dtype}, the program has {entry.dtype} ({_named(source)})", entry.key)
    return _value(entry.key, Op("aten._to_copy.default", (source,), (("dtype", Special("dtype", entry.dtype)),)), have)


def _pickled(entry: TensorEntry, source: Expression, have: Entries) -> TensorEntry | Problem:
    """The new value of a weight that is no strided tensor: one that is pickled as the same kind of tensor."""
    found = have[source.key] if isinstance(source, Ref) else None
    if not isinstance(found, TensorEntry) or not replaceable(entry, found):
        return Problem(
            f"{entry.layout}, and its new value is not pickled as such a tensor ({_named(source)})", entry.key
        )
    if (found.shape, found.dtype) != (entry.shape, entry.dtype):
        return Problem(
            f"{found.dtype} {list(found.shape)}, the program has {entry.dtype} {list(entry.shape)}", entry.key
        )
    return replace(found, key=entry.key)


def _value(fqn: str, source: Expression, have: Entries, packed: bool = False) -> TensorEntry:
    if isinstance(source, Ref):
        found = have[source.key]
        if isinstance(found, TensorEntry) and (packed or found.storage is not None):
            return replace(found, key=fqn)
        raise Refused(f"{source.key} is no dense tensor", hint="only dense tensors can be put into a program")
    from ckpttool.evaluate import with_torch as compute  # torch is loaded only where a value is computed

    return compute.entry_of(fqn, source, have)


def _untied(
    target: Section, fitted: Mapping[str, TensorEntry], weights: Section, twins: Sequence[tuple[str, str]]
) -> list[Problem]:
    """Names of one tensor that would get different values: the program's own ties, and those of the model."""
    have = weights.by_key()
    pairs = [(key, first, fitted.get(key), fitted.get(first)) for key, first in target.aliases().items()]
    tensors = {key: entry for key, entry in have.items() if isinstance(entry, TensorEntry)}
    pairs += [(key, twin, tensors.get(key), tensors.get(twin)) for key, twin in twins]
    return [
        Problem(f"tied to {first}, and its new value is another one", key)
        for key, first, left, right in pairs
        if left is not None and right is not None and not same_values(left, right)
    ]


def _replaced(entries: Sequence[TensorEntry], fitted: Mapping[str, TensorEntry]) -> tuple[TensorEntry, ...]:
    """The program's entries on their new storages, with the geometry that the program gave them.

    Storages of which no tensor has a new value are the old ones.
    """
    by_storage: defaultdict[Storage, list[TensorEntry]] = defaultdict(list)
    for entry in entries:
        if entry.storage is not None:
            by_storage[entry.storage].append(entry)
    fresh = {
        storage: _storage(storage, group, fitted)
        for storage, group in by_storage.items()
        if any(entry.key in fitted for entry in group)
    }
    return tuple(_moved(entry, fresh, fitted.get(entry.key)) for entry in entries)


def _moved(entry: TensorEntry, fresh: Mapping[Storage, Storage], new: TensorEntry | None) -> TensorEntry:
    if entry.storage is not None:
        return replace(entry, storage=fresh.get(entry.storage, entry.storage))
    return replace(entry, payload=new.payload) if new is not None and replaceable(entry, new) else entry


def _storage(old: Storage, entries: Sequence[TensorEntry], fitted: Mapping[str, TensorEntry]) -> Storage:
    """The storage for the new values of `entries`: moved as they are where they fill it, else put in their places."""
    first, new = entries[0], fitted.get(entries[0].key, entries[0])
    one_tensor = len({entry.identity for entry in entries}) == 1
    if (
        one_tensor
        and first.is_contiguous
        and first.nbytes == old.nbytes
        and new.is_contiguous
        and new.storage is not None
    ):
        return Storage(new.span) if isinstance(new.span, Span) else new.storage
    from ckpttool.evaluate import with_torch as compute

    return compute.arrange(old, [(entry, fitted.get(entry.key, entry)) for entry in entries])


def _named(source: Expression) -> str:
    return "from " + ", ".join(dict.fromkeys(ex.refs(source)))


def _hint(program: Checkpoint, names: Names | None, problems: Sequence[Problem]) -> str:
    text = " ".join(problem.problem for problem in problems)
    if {entry.key for entry in _constants(program)} & {problem.key for problem in problems}:
        return "some of them are constants of the program: --constants swaps these too"
    if isinstance(program.container, Program) and program.container.compiled and "left over" in text:
        return INSIDE
    if names is None and ("left over" in text or "no weight" in text):
        return (
            "state_dict hooks may rename keys when a model is saved: pass the model's definition, --model file.py:build"
        )
    if "dtype" in text and "shape" not in text and "left over" not in text and "no weight" not in text:
        return "--cast converts them to the program's dtypes"
    return "`ckpttool diff PROGRAM WEIGHTS` compares the two; the program may belong to another version of the model"
