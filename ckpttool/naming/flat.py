"""Flat parameters: which parameters one holds, in which order."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from math import prod

from ckpttool.core.checkpoint import Section, TensorEntry
from ckpttool.core.errors import Problem
from ckpttool.core.names import Names
from ckpttool.core.strides import Shape
from ckpttool.core.text import is_flat
from ckpttool.core.values import dataclass
from ckpttool.naming.wrappers import recognize, strip


@dataclass(frozen=True, slots=True)
class FlatParam:
    """A flat parameter of a file: its key, the path of its unit (``""`` is the root), and its
    number of elements.
    """

    key: str
    unit: str
    numel: int


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one parameter in its unit's flat parameter, from element `start` on.

    `fqns` are its names within the unit, the first one first.
    """

    fqns: tuple[str, ...]
    shape: Shape
    start: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def end(self) -> int:
        """One past its last element in the flat parameter."""
        return self.start + self.numel


def unit_paths(flat: Iterable[str], others: Iterable[str] = ()) -> dict[str, str]:
    """Return key of a flat parameter -> path of its unit, without wrapper segments (``""`` is the
    root).

    `others` are the other keys of the file: all keys together show the wrappers.
    """
    above = {key: key.rpartition(".")[0] for key in flat}
    paths = [path for path in above.values() if path]
    wrappers = recognize([*paths, *others])
    return {key: strip(path, wrappers) for key, path in above.items()}


def flat_tensors(section: Section) -> list[TensorEntry]:
    """Return the tensors under names of flat parameters."""
    return [entry for entry in section.tensors if is_flat(entry.key)]


def flat_params(section: Section) -> tuple[FlatParam, ...]:
    """Return the flat parameters of a state dict, by the names of its keys."""
    if section.kind != "state_dict":
        return ()
    flat = flat_tensors(section)
    if not flat:
        return ()
    others = [key for key in section.by_key() if not is_flat(key)]
    paths = unit_paths([entry.key for entry in flat], others)
    return tuple(FlatParam(entry.key, paths[entry.key], entry.numel) for entry in flat)


def _module_paths(names: Names) -> list[str]:
    """Return the canonical paths of all modules with parameters in them or below, parents first."""
    paths: dict[str, None] = {"": None}
    for tensor in names.runtime:
        if tensor.kind == "parameter":
            segments = tensor.canonical.split(".")
            for depth in range(1, len(segments)):
                paths[".".join(segments[:depth])] = None
    return list(paths)


def named_units(names: Names, patterns: Iterable[str]) -> tuple[list[str], list[Problem]]:
    """Return the root and the modules that the patterns match (``*`` within one segment), parents
    first.

    The problems are patterns that match no module.
    """
    paths, units, problems = _module_paths(names), {""}, []
    for pattern in patterns:
        matched = [path for path in filter(None, paths) if _is_match(pattern, path)]
        units.update(matched)
        if not matched:
            problems.append(Problem("names no module that has parameters", pattern))
    return [path for path in paths if path in units], problems


def _is_match(pattern: str, path: str) -> bool:
    expected, segments = pattern.split("."), path.split(".")
    return len(expected) == len(segments) and all(map(fnmatchcase, segments, expected))


def slots(
    names: Names, units: Collection[str], outside: Collection[str] = ()
) -> dict[str, tuple[Slot, ...]]:
    """Return unit -> the places of its parameters, units in ``model.parameters()`` order; perhaps
    without parameters.

    Modules are in the order of ``named_modules``, parameters in the order of registration; a
    parameter with two names in the unit is there once. `outside` are FQNs that are in no flat
    parameter.

    unit      slots: start, end
    (root)    embed.weight [8, 4]: 0, 32    head.bias [8]: 32, 40
    layers.0  weight [4, 4]: 0, 16          bias [4]: 16, 20
    """
    shapes = {t.fqn: t.shape for t in names.runtime}
    members: dict[str, dict[str, list[str]]] = {
        path: {} for path in _module_paths(names) if path in units
    }
    for tensor in names.runtime:
        if tensor.kind != "parameter" or tensor.fqn in outside:
            continue
        path = tensor.canonical
        while path:
            path = path.rpartition(".")[0]
            if path in members:  # the innermost unit
                members[path].setdefault(tensor.first_name, []).append(tensor.fqn)
                break
    result: dict[str, tuple[Slot, ...]] = {}
    for unit, params in members.items():
        places: list[Slot] = []
        start = 0
        for fqns in params.values():
            places.append(Slot(tuple(fqns), shapes[fqns[0]] or (), start))
            start = places[-1].end
        result[unit] = tuple(places)
    return result


def misfit(expected: tuple[Slot, ...], numel: int, world_size: int, padded: bool) -> str | None:
    """Return where a flat parameter of `numel` elements differs from the model's slots; None if it
    fits.

    `padded`: it may be padded to a multiple of the number of ranks.
    """
    total = expected[-1].end if expected else 0
    with_padding = -(-total // world_size) * world_size
    if numel == total or (padded and numel == with_padding):
        return None
    start = f"holds {numel:,} elements, and the model's parameters need {total:,}"
    name = ""
    for slot in expected:
        name = f"{slot.fqns[0]} {list(slot.shape)}"
        if slot.end > numel:
            return f"{start}: {name} would be elements {slot.start:,} to {slot.end:,}"
    if not name:
        return f"{start}: {numel:,} are left"
    return f"{start}: after its last parameter, {name}, {numel - total:,} are left"
