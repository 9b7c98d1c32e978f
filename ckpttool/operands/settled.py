"""Which dicts of a file are state dicts, asked again with a model's names: its content alone may not tell."""

from __future__ import annotations

from collections.abc import Sequence

from ckpttool.checkpoint import Checkpoint
from ckpttool.naming.match import match
from ckpttool.naming.name_tables import NameTables
from ckpttool.operands.model import ModelOperand

Fit = tuple[int, int]


def settled(checkpoint: Checkpoint, model: ModelOperand | None) -> Checkpoint:
    """`checkpoint` with every dict read as a state dict that has more of the model's keys than any inside or around it.

    A dict that has none of them stays what the reader took it for.
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


def _fit(tables: NameTables, keys: Sequence[str]) -> Fit:
    """How many of the keys are those that the model loads, then how many are its runtime names."""
    return len(match(keys, tables.serialized_names).names), len(match(keys, tables.runtime_names).names)


def _is_inside(path: str, outer: str) -> bool:
    return path != outer and (not outer or path.startswith(f"{outer}."))
