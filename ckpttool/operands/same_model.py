"""The state dicts of a file that hold one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckpttool.core.checkpoint import Checkpoint, Section
from ckpttool.core.errors import CkptError
from ckpttool.core.names import Names
from ckpttool.core.strides import Shape
from ckpttool.core.tables import by_path, shapes_of, without_tensors
from ckpttool.core.text import shell
from ckpttool.naming import wrappers
from ckpttool.naming.convert import is_complete_model
from ckpttool.naming.match import NameTables
from ckpttool.operands.checkpoint import model_section

Likeness = Mapping[str, "Shape | None"]  # canonical name -> shape; None for other entries


def of_one_model(
    checkpoint: Checkpoint, named: str | None = None, names: Names | None = None
) -> tuple[Section, ...]:
    """Return the sections that change together, the model's own first: all that hold the model, or
    those in `named`.

    `named` are dotted paths separated by commas; `names` are the model's, if it is known. Raise
    `CkptError` if a path is not a state dict, and without paths if the state dicts hold several
    models, or if the file has no state dict.
    """
    if named is not None:
        return _named(checkpoint, [path.strip() for path in named.split(",")])
    tables = None if names is None else NameTables(names)
    try:
        first = model_section(checkpoint, tables)
    except CkptError:
        if not checkpoint.state_dicts:
            raise
        first = checkpoint.state_dicts[0]
        is_model = tables is not None and is_complete_model(tables, first)
        sections = (first, *same_model(checkpoint, first, names if is_model else None))
        if len(sections) != len(checkpoint.state_dicts):
            raise
        return sections  # whichever it is, all of them are changed
    return (first, *same_model(checkpoint, first, names))


def same_model(
    checkpoint: Checkpoint, section: Section, names: Names | None = None
) -> tuple[Section, ...]:
    """Return the other state dicts with the same names and shapes, with any wrappers around them.

    If the model's `names` are known, also return state dicts that hold the complete model in
    another form. A list of tensors has no names: it changes only if the user names it.
    """
    others = []
    for other in checkpoint.state_dicts:
        if other.path != section.path and not other.is_list:
            others.append(other)
    if not others:
        return ()
    lightning = wrappers.is_lightning(checkpoint)
    tables = None if names is None else NameTables(names)
    likeness = _likeness(section, lightning)
    if not likeness:
        return ()

    def is_same(other: Section) -> bool:
        if _likeness(other, lightning) == likeness:
            return True
        return tables is not None and is_complete_model(tables, _without_counters(other))

    return tuple(filter(is_same, others))


def left_as_they_are(checkpoint: Checkpoint, changed: Sequence[Section]) -> list[str]:
    """Return notes on state dicts that are not among the `changed` ones, but share half of the
    names with one.
    """
    lightning, paths = wrappers.is_lightning(checkpoint), [section.path for section in changed]
    others = [section for section in checkpoint.state_dicts if section.path not in paths]
    if not others:
        return []
    changed_names = set(_likeness(changed[0], lightning))
    notes = []
    for other in others:
        names = set(_likeness(other, lightning))
        shared = len(names & changed_names)
        if not shared or 2 * shared < min(len(names), len(changed_names)):
            continue
        both = shell("remap", "--sections", ",".join((*paths, other.path)))
        notes.append(
            f"{other.title} has {shared} of the {len(changed_names)} names of "
            f"{changed[0].title} and stays as it is (`{both}` takes it too)"
        )
    return notes


def _named(checkpoint: Checkpoint, paths: Sequence[str]) -> tuple[Section, ...]:
    sections = by_path(checkpoint.state_dicts)
    unknown = [repr(path) for path in paths if path not in sections]
    if unknown:
        titles = ", ".join(section.title for section in sections.values()) or "none"
        raise CkptError(
            f"{checkpoint.source} has no state dict {', '.join(unknown)}",
            hint=f"its state dicts are: {titles}",
        )
    return tuple(sections[path] for path in dict.fromkeys(paths))


def _without_counters(section: Section) -> Section:
    counters = wrappers.counters(section.tensor_keys)
    return without_tensors(section, counters)


def _likeness(section: Section, lightning: bool) -> Likeness:
    names = wrappers.canonical_keys(section.by_key(), lightning=lightning)
    counted = _without_counters(section)
    shapes = shapes_of(counted.tensors)
    return {names[key]: shapes.get(key) for key in counted.by_key()}
