"""Which key of the checkpoint feeds which FQN of the program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from ckpttool import expression as ex
from ckpttool.checkpoint import Checkpoint, Section, TensorEntry
from ckpttool.errors import Problem
from ckpttool.expression import Expression, Ref
from ckpttool.formats.pt2.program import CONSTANTS
from ckpttool.names import RUNTIME, Names
from ckpttool.naming.forms import Reading, left_to_code, read, with_keys
from ckpttool.naming.match import Match, match
from ckpttool.naming.name_tables import NameTables
from ckpttool.naming.versions import check_versions
from ckpttool.naming.wrappers import chain
from ckpttool.naming.wrappers.table import strip
from ckpttool.plan import ModelRun, Output, Plan
from ckpttool.values import dataclass


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
    paths = chain.recognise(entry.key for section in program.sections[:1] for entry in section.tensors)
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
