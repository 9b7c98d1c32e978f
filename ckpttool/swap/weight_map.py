"""Map checkpoint keys to program FQNs, and check each new value."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Union

from ckpttool.core import expression as ex
from ckpttool.core.checkpoint import Checkpoint, ExtraEntry, Section, Storage, TensorEntry
from ckpttool.core.errors import Problem, Refused
from ckpttool.core.expression import Expression, Op, Ref, Special
from ckpttool.core.names import RUNTIME, Names
from ckpttool.core.plan import ModelRun, Output, Plan
from ckpttool.core.values import dataclass
from ckpttool.evaluate.apply import entry_of
from ckpttool.evaluate.chunks import in_own_storage
from ckpttool.formats.pt2.archive import replaceable
from ckpttool.formats.pt2.program import CONSTANTS
from ckpttool.naming import wrappers
from ckpttool.naming.convert import Reading, check_versions, left_to_code, read, with_keys
from ckpttool.naming.match import Match, NameTables, match
from ckpttool.naming.wrappers import strip


@dataclass(frozen=True, slots=True)
class Feed:
    """What is to feed each FQN, before anything is compared.

    `twins` are keys that must hold the same value, `runs` those of the model's own code that compute a part. `remade`
    are constants of the program, buffers that no checkpoint has, with what the model's loading makes of them.
    """

    sources: dict[str, Expression]
    form: str
    problems: list[Problem] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    twins: list[tuple[str, str]] = field(default_factory=list)
    runs: tuple[ModelRun, ...] = ()
    remade: dict[str, Expression] = field(default_factory=dict)


def constants_of(program: Checkpoint) -> tuple[TensorEntry, ...]:
    """The constants of an exported program, which are not in its state dict; empty for other checkpoints."""
    return next((section.tensors for section in program.sections if section.path == CONSTANTS), ())


def canonical_names(program: Checkpoint) -> dict[str, str]:
    """FQN or constant -> its name without the wrappers that were around the model that was exported."""
    paths = wrappers.recognise(entry.key for section in program.sections[:1] for entry in section.tensors)
    return {entry.key: strip(entry.key, paths) for section in program.sections for entry in section.tensors}


def chosen_constants(program: Checkpoint, weights: Section) -> dict[str, Expression]:
    """Constant -> its new value, for each constant of the program that one of the keys names."""
    constants = {entry.key: entry.key for entry in constants_of(program)}
    found = match([entry.key for entry in weights.tensors], canonical_names(program))
    chosen: dict[str, Expression] = {name: Ref(key) for key, name in found.names.items() if name in constants}
    for section in program.sections:
        if section.path == CONSTANTS:
            _share(chosen, constants | section.aliases())
    return chosen


def feed_by_keys(target: Section, weights: Section, names: Mapping[str, str]) -> Feed:
    """Without a model: the keys must be the program's FQNs, but for wrappers' segments on either side.

    `names` are the canonical ones of the program's tensors.
    """
    aliases = target.aliases()
    own = {entry.key: names[entry.key] for entry in target.tensors}
    found = match([entry.key for entry in weights.tensors], own, aliases)
    sources: dict[str, Expression] = {fqn: Ref(key) for key, fqn in found.names.items()}
    _share(sources, {entry.key: aliases.get(entry.key, entry.key) for entry in target.tensors})
    spare = _other_names(found, weights)
    problems = [problem for problem in _left_over(found) if problem.key not in spare]
    return Feed(sources, RUNTIME, problems, [entry.key for entry in weights.extras], _variants(found))


def _other_names(found: Match, weights: Section) -> set[str]:
    """Keys that no name of the program is left for, of tensors that it gets by another of their keys."""
    used = {entry.identity for entry in weights.tensors if entry.key in found.names}
    unmatched = set(found.unmatched)
    return {entry.key for entry in weights.tensors if entry.key in unmatched and entry.identity in used}


def feed_by_model(
    target: Section,
    constants: Mapping[str, str],
    weights: Section,
    names: Names,
    form: str | None,
    kwargs: Mapping[str, object] | None = None,
) -> Feed:
    """With the model: its names say what each FQN is of the checkpoint's keys, in whatever form these are.

    `constants` are those of the program, each with its canonical name. Where the model's code can be run, `kwargs` are
    what it is built with.
    """
    tables = NameTables(names)
    reading = read(tables, weights, form)
    if reading.form != RUNTIME:
        check_versions(names, weights, reading)
    keys = {name: key for key, name in reading.match.names.items()}
    values: dict[str, Expression]
    if reading.form == RUNTIME:
        values = {fqn: Ref(key) for fqn, key in keys.items() if fqn in tables.first}
    else:
        values = {fqn: with_keys(source, keys) for fqn, source in tables.runtime_values(keys).items()}
    plan = Plan(tuple(Output(weights.path, fqn, source) for fqn, source in values.items()))
    if kwargs is not None:
        plan = left_to_code(plan, tables, weights, reading, kwargs)
        values = {output.key: output.source for output in plan.outputs}
    _share(values, tables.first)
    fqns = match([entry.key for entry in target.tensors], {t.fqn: t.canonical for t in names.runtime})
    fed = {p: values[fqn] for p, fqn in fqns.names.items() if fqn in values}
    feed = Feed(fed, reading.form, _left_over(reading.match), runs=plan.runs, remade=_remade(constants, names, values))
    feed.twins.extend(_variants(reading.match))
    feed.problems.extend(
        Problem("the model has no tensor of this name: is it another model?", p) for p in fqns.unmatched
    )
    _account(feed, tables, reading, keys)
    return feed


def _account(feed: Feed, tables: NameTables, reading: Reading, keys: dict[str, str]) -> None:
    """Says of each key (by its name) that feeds nothing why that is so, or that it should not be."""
    used = {key for source in feed.sources.values() for key in ex.refs(source)}
    meant: Mapping[str, Expression | None] = tables.saved
    if reading.form == RUNTIME:
        meant = {fqn: Ref(first) for fqn, first in tables.first.items()}
    by_source = {meant.get(name): key for name, key in reversed(keys.items()) if key in used}
    for name, key in keys.items():
        source = meant.get(name)
        if key in used:
            continue
        if source is not None and source in by_source:
            feed.twins.append((key, by_source[source]))
        elif isinstance(source, Ref):
            feed.problems.append(Problem("left over: the program has no such weight", key, "left_over"))
        else:
            feed.ignored.append(key)


def _remade(constants: Mapping[str, str], names: Names, values: Mapping[str, Expression]) -> dict[str, Expression]:
    """Constant -> what the model's loading makes of it, where that depends on the checkpoint."""
    unsaved = {t.fqn: t.canonical for t in names.runtime if not t.persistent and t.fqn in values}
    fqns = {canonical: fqn for fqn, canonical in unsaved.items()}
    found = {constant: values[fqns[name]] for constant, name in constants.items() if name in fqns}
    return {constant: source for constant, source in found.items() if not ex.is_constant(source)}


def _share(values: dict[str, Expression], first: Mapping[str, str]) -> None:
    """Gives every name of a tensor the value that one of its names has, where it has none of its own."""
    known = {first[fqn]: source for fqn, source in reversed(values.items())}
    for fqn, root in first.items():
        if root in known:
            values.setdefault(fqn, known[root])


def _left_over(found: Match) -> list[Problem]:
    return [Problem("left over: the program has no such weight", key, "left_over") for key in found.unmatched] + list(
        found.problems
    )


def _variants(found: Match) -> list[tuple[str, str]]:
    """Call variants of an unflattened program, each with the key that its name has the value from."""
    keys = {name: key for key, name in found.names.items()}
    return [(key, keys[name]) for key, name in found.variants.items()]


Entries = Mapping[str, Union[TensorEntry, ExtraEntry]]


def fit_all(
    wanted: Sequence[TensorEntry], sources: Mapping[str, Expression], have: Entries, cast: bool, packed: bool
) -> tuple[dict[str, TensorEntry], list[Problem]]:
    """The new value of each of the program's tensors that has one, and what is wrong with the others."""
    fitted: dict[str, TensorEntry] = {}
    problems: list[Problem] = []
    for entry in wanted:
        source = sources.get(entry.key)
        found = (
            Problem("no weight for it", entry.key, "missing")
            if source is None
            else _fit(entry, source, have, cast, packed)
        )
        if isinstance(found, Problem):
            problems.append(found)
        else:
            fitted[entry.key] = found
    return fitted, problems


def _fit(entry: TensorEntry, source: Expression, have: Entries, cast: bool, packed: bool) -> TensorEntry | Problem:
    """The new value of the program's `entry`, or why it cannot be that."""
    if ex.is_opaque(source):
        return Problem("a hook computes it by code that is no tensor operator", entry.key, "opaque")
    if entry.storage is None and not packed:
        return _pickled(entry, source, have)
    try:
        found = _value(entry.key, source, have, packed)
    except Refused as error:
        return Problem(error.message, entry.key)
    if found.shape != entry.shape:
        text = f"shape {list(found.shape)}, the program has {list(entry.shape)} ({_named(source)})"
        return Problem(text, entry.key, "shape")
    if found.dtype == entry.dtype:
        return found
    if not cast:
        text = f"dtype {found.dtype}, the program has {entry.dtype} ({_named(source)})"
        return Problem(text, entry.key, "dtype")
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
    return entry_of(fqn, source, have)


def _named(source: Expression) -> str:
    return "from " + ", ".join(dict.fromkeys(ex.refs(source)))


def replaced(entries: Sequence[TensorEntry], fitted: Mapping[str, TensorEntry]) -> tuple[TensorEntry, ...]:
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
    if one_tensor and first.is_contiguous and first.nbytes == old.nbytes and new.storage is not None:
        own = in_own_storage(new).storage  # of a view, its own elements only
        assert own is not None
        return own
    from ckpttool.evaluate import torch_eval

    return torch_eval.arrange(old, [(entry, fitted.get(entry.key, entry)) for entry in entries])
