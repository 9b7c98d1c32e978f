"""Find the state dicts of a file, and those that hold one model: its weights, averages, or earlier weights.

The content of a file may be ambiguous: the names of a model, if one is given, decide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckpttool.core.checkpoint import Checkpoint, Section
from ckpttool.core.errors import CkptError
from ckpttool.core.names import Names
from ckpttool.naming import wrappers
from ckpttool.naming.convert import holds
from ckpttool.naming.match import NameTables, match
from ckpttool.operands.checkpoint import model_section
from ckpttool.operands.model import ModelOperand

Fit = tuple[int, int]
Likeness = Mapping[str, "tuple[int, ...] | None"]  # canonical name -> shape; None for other entries


def read_for_model(checkpoint: Checkpoint, model: ModelOperand | None) -> Checkpoint:
    """Read each dict as a state dict if it has more of the model's keys than any dict inside or around it.

    A dict that has none of these keys stays as it was read.
    """
    if model is None or checkpoint.readings is None:
        return checkpoint
    tables = NameTables(model.names())
    known = {*tables.serialized_names, *tables.runtime_names}
    unsure = {path: keys for path, keys in checkpoint.readings.dicts.items() if not known.isdisjoint(keys)}
    fits = {path: _fit(tables, keys) for path, keys in unsure.items()}
    state_dicts = checkpoint.state_dicts if unsure else ()
    others = fits | {section.path: _fit(tables, list(section.by_key())) for section in state_dicts}

    def is_best(path: str) -> bool:
        rivals = (fit for other, fit in others.items() if _is_inside(other, path) or _is_inside(path, other))
        return all(fits[path] > fit for fit in rivals)

    return checkpoint.read_as([path for path in unsure if is_best(path)])


def of_one_model(checkpoint: Checkpoint, named: str | None = None, names: Names | None = None) -> tuple[Section, ...]:
    """Return the sections that change together, the model's own first: all that hold the model, or those in `named`.

    `named` are dotted paths separated by commas; `names` are the model's, if it is known. Raise `CkptError` if a path
    is not a state dict, and without paths if the state dicts hold several models, or if the file has no state dict.
    """
    if named is not None:
        return _named(checkpoint, [path.strip() for path in named.split(",")])
    found = checkpoint.state_dicts
    more = same_model(checkpoint, found[0], names) if len(found) > 1 else ()
    try:
        first = model_section(checkpoint)
    except CkptError:
        if len(more) + 1 != len(found):
            raise
        return (found[0], *more)  # whichever it is, all of them are changed
    return (first, *same_model(checkpoint, first, names))


def same_model(checkpoint: Checkpoint, section: Section, names: Names | None = None) -> tuple[Section, ...]:
    """Return the other state dicts with the same names and shapes, with any wrappers around them.

    If the model's `names` are known, also return state dicts that hold the complete model in another form.
    """
    others = [other for other in checkpoint.state_dicts if other.path != section.path]
    if not others:
        return ()
    lightning, tables = wrappers.is_lightning(checkpoint), None if names is None else NameTables(names)
    own = _likeness(section, lightning)

    def same(other: Section) -> bool:
        return _likeness(other, lightning) == own or (tables is not None and holds(tables, _without_counters(other)))

    return tuple(other for other in others if own and same(other))


def left_as_they_are(checkpoint: Checkpoint, changed: Sequence[Section]) -> list[str]:
    """Return notes on state dicts that are not among the `changed` ones, but share half of the names with one."""
    lightning, paths = wrappers.is_lightning(checkpoint), [section.path for section in changed]
    others = [section for section in checkpoint.state_dicts if section.path not in paths]
    own = set(_likeness(changed[0], lightning)) if others else set()
    notes = []
    for other in others:
        names = set(_likeness(other, lightning))
        if 2 * len(names & own) < min(len(names), len(own)) or not names & own:
            continue
        both = ",".join((*paths, other.path))
        notes.append(
            f"{other.title} has {len(names & own)} of the {len(own)} names of "
            f"{changed[0].title} and stays as it is (--sections '{both}' takes it too)"
        )
    return notes


def _named(checkpoint: Checkpoint, paths: Sequence[str]) -> tuple[Section, ...]:
    have = {section.path: section for section in checkpoint.state_dicts}
    strange = [path for path in paths if path not in have]
    if strange:
        raise CkptError(
            f"{checkpoint.source} has no state dict {', '.join(map(repr, strange))}",
            hint=f"its state dicts are: {', '.join(section.title for section in have.values()) or 'none'}",
        )
    return tuple(have[path] for path in dict.fromkeys(paths))


def _without_counters(section: Section) -> Section:
    counters = wrappers.counters([entry.key for entry in section.tensors])
    return replace(section, tensors=tuple(entry for entry in section.tensors if entry.key not in counters))


def _likeness(section: Section, lightning: bool) -> Likeness:
    names = wrappers.canonical_keys(section.by_key(), lightning=lightning)
    shapes = {entry.key: entry.shape for entry in section.tensors}
    entries = _without_counters(section).by_key()
    return {name: shapes.get(key) for key, name in names.items() if key in entries}


def _fit(tables: NameTables, keys: Sequence[str]) -> Fit:
    """Return how many of the keys the model loads, and how many are its runtime names."""
    return len(match(keys, tables.serialized_names).names), len(match(keys, tables.runtime_names).names)


def _is_inside(path: str, outer: str) -> bool:
    return path != outer and (not outer or path.startswith(f"{outer}."))
