"""Lists of tensors in a file that belong to the model's parameters by position, as a moving average
keeps them.
"""

from __future__ import annotations

from collections.abc import Callable

from ckpttool.core.checkpoint import Checkpoint, Section
from ckpttool.core.expression import Ref
from ckpttool.core.names import Names
from ckpttool.core.strides import Shape
from ckpttool.core.text import Note, plural
from ckpttool.optimizers.parameters import Parameters
from ckpttool.optimizers.transform import sources_between
from ckpttool.remapping.result import Remap


def notes_on_lists(
    outcome: Remap, old: Names | None, new: Names | None, rename: Callable[[str], str] | None
) -> tuple[str, ...]:
    """Return a note on each list of the file that no longer fits the parameters after the remap,
    because they change.

    A list belongs to the parameters if it has their number and shapes. `old` are the names of the
    model that saved the file, `new` of the model that will load it, `rename` what rules call a
    name.
    """
    effect = outcome.narrowed or outcome.model
    if old is not None and new is not None:
        changes = not _keeps_order(old, new, rename or str)
    else:
        changes = effect is not None and not effect.keeps_places
    if not changes:
        return ()
    orders = [] if old is None else _orders_of(old)
    if effect is not None:
        orders.append(_shapes_of(effect.section))
    notes = []
    for path, shapes in _lists(outcome.result).items():
        if shapes in orders:
            text = (
                f"{path} is a list of {plural(len(shapes), 'tensor')} with the shapes of the"
                " parameters, in their old "
                "order: it does not follow them, and does not fit the new model"
            )
            notes.append(Note(text, "by-position"))
    return tuple(notes)


def _keeps_order(old: Names, new: Names, rename: Callable[[str], str]) -> bool:
    """Return whether the new model has the parameters of the old one, in the same order."""
    before, after = Parameters(old).shapes, Parameters(new).shapes
    if len(before) != len(after):
        return False
    sources = sources_between(old, new, {name: rename(name) for name in before})
    for old_name, new_name in zip(before, after):
        if sources.get(new_name) != Ref(old_name):
            return False
    return True


def _orders_of(names: Names) -> list[list[Shape | None]]:
    """Return the shapes of all parameters, and of the trainable ones, in the order of
    ``model.parameters()``.
    """
    parameters = Parameters(names)
    return [
        list(parameters.shapes.values()),
        [parameters.shapes[name] for name in parameters.trainable],
    ]


def _shapes_of(section: Section) -> list[Shape | None]:
    """Return the shapes of the model's tensors in the file, each once."""
    second = section.aliases()
    return [entry.shape for entry in section.tensors if entry.key not in second]


def _lists(checkpoint: Checkpoint) -> dict[str, list[Shape | None]]:
    """Return the shapes of the tensors in each list, by the list's path."""
    shapes: dict[str, list[Shape | None]] = {}
    items: dict[str, dict[Shape, Shape]] = {}
    for section in checkpoint.sections:
        if section.is_list:
            shapes[section.path] = [entry.shape for entry in section.tensors]
        if section.kind != "other":
            continue
        for entry in section.tensors:
            path, index = _place_in_list(entry.key)
            if index:
                items.setdefault(path, {})[index] = entry.shape
    for path, by_index in items.items():
        shapes[path] = [by_index[index] for index in sorted(by_index)]
    return shapes


def _place_in_list(key: str) -> tuple[str, tuple[int, ...]]:
    """Return the path of the list and the place in it: ``ema.0.3`` is at (0, 3) of ``ema``."""
    path = key.split(".")
    depth = len(path)
    while depth > 1 and path[depth - 1].isdecimal():
        depth -= 1
    return ".".join(path[:depth]), tuple(map(int, path[depth:]))
