"""Read a checkpoint with the names of a model."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ckpttool.core.checkpoint import Checkpoint, Section
from ckpttool.core.expression import Ref
from ckpttool.core.names import SERIALIZED
from ckpttool.evaluate.compare import same_values
from ckpttool.kinds.lists import with_names_of_lists
from ckpttool.kinds.table import with_kinds
from ckpttool.naming.convert import is_complete_model, read_keys
from ckpttool.naming.match import NameTables, match
from ckpttool.operands.checkpoint import saved_state_dicts, split
from ckpttool.operands.model import ModelOperand

Fit = tuple[int, int]


def as_read(model: ModelOperand, section: Section, source: str) -> ModelOperand:
    """Return `model` with the names that fit the section's keys: its own, or the names of
    from_pretrained.

    If both fit equally well, its own names are used; but not for ``hf:FOLDER``, and not for files
    next to a ``config.json`` if a name has different values in the two.
    """
    if not model.is_definition or model.pretrained:
        return model
    tables = model.tables
    path = split(source)[0]
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    has_config = os.path.isfile(os.path.join(folder, "config.json"))
    if not has_config and not model.is_folder and is_complete_model(tables, section):
        return model
    from ckpttool.tracing.pretrained import is_pretrained

    if not is_pretrained(model.definition()):
        return model
    pretrained = model.by_pretrained.tables
    # runtime names are no reason for a folder: from_pretrained ignores buffers that are not saved
    form = SERIALIZED if model.is_folder else None
    reading = read_keys(pretrained, section, form)
    pretrained_score, score = reading.match.score, read_keys(tables, section, form).match.score
    if pretrained_score > score:
        return model.by_pretrained
    if model.is_folder and untied_keys(tables, section):  # from_pretrained does not tie these
        return model.by_pretrained
    if pretrained_score < score or reading.form != SERIALIZED:
        return model
    saved = tables.saved
    differ = any(saved.get(key, source) != source for key, source in pretrained.saved.items())
    return model.by_pretrained if model.is_folder or (has_config and differ) else model


def untied_keys(tables: NameTables, section: Section) -> list[tuple[str, str]]:
    """Return pairs of keys that the model ties, and for which the section has different values."""
    entries = section.by_key()
    first: dict[str, str] = {}
    pairs = []
    for key, source in tables.saved.items():
        if isinstance(source, Ref) and key in entries:
            twin = first.setdefault(source.key, key)
            if twin != key and not same_values(entries[twin], entries[key]):
                pairs.append((twin, key))
    return pairs


def read_for_model(checkpoint: Checkpoint, model: ModelOperand | None) -> Checkpoint:
    """Return the checkpoint as the model's names show it: which dicts are state dicts, and how the
    tensors of lists are called.
    """
    if model is None:
        return checkpoint
    checkpoint = _with_dicts_of(model, checkpoint)
    if any(section.is_list for section in checkpoint.state_dicts):
        return with_names_of_lists(checkpoint, model.names(), saved_state_dicts(checkpoint))
    return checkpoint


def _with_dicts_of(model: ModelOperand, checkpoint: Checkpoint) -> Checkpoint:
    """Read each dict as a state dict if it has more of the model's keys than any dict inside or
    around it.

    A dict that has none of these keys stays as it was read.
    """
    if checkpoint.readings is None:
        return checkpoint
    tables = model.tables
    names = {*tables.serialized_names, *tables.runtime_names}
    fits: dict[str, Fit] = {}
    for path, keys in checkpoint.readings.dicts.items():
        if not names.isdisjoint(keys):
            fits[path] = _fit(tables, keys)
    if not fits:
        return checkpoint
    others = dict(fits)
    for section in checkpoint.state_dicts:
        others[section.path] = _fit(tables, list(section.by_key()))

    def is_best(path: str) -> bool:
        for other, fit in others.items():
            if (_is_inside(other, path) or _is_inside(path, other)) and fit >= fits[path]:
                return False
        return True

    chosen = list(filter(is_best, fits))
    return with_kinds(checkpoint.read_as(chosen)) if chosen else checkpoint


def _fit(tables: NameTables, keys: Sequence[str]) -> Fit:
    """Return how many of the keys the model loads, and how many are its runtime names."""
    serialized = match(keys, tables.serialized_names).names
    return len(serialized), len(match(keys, tables.runtime_names).names)


def _is_inside(path: str, outer: str) -> bool:
    return path != outer and (not outer or path.startswith(f"{outer}."))
