"""Flat parameters: which parameters one is made of, in which order."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from math import prod

from ckpttool.core.checkpoint import Section
from ckpttool.core.errors import Problem
from ckpttool.core.keys import is_flat
from ckpttool.core.names import Names
from ckpttool.core.values import dataclass
from ckpttool.naming.wrappers import recognise, strip


@dataclass(frozen=True, slots=True)
class FlatParam:
    """A flat parameter of a file: its key, the path of its unit (``""`` is the root), how many elements it holds."""

    key: str
    unit: str
    numel: int


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one parameter lies in its unit's flat parameter: `start` and `numel` count elements.

    `fqns` are its names within the unit, the first one first.
    """

    fqns: tuple[str, ...]
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return prod(self.shape)

    @property
    def end(self) -> int:
        """One past its last element in the flat parameter."""
        return self.start + self.numel


def unit_paths(flat: Iterable[str], others: Iterable[str] = ()) -> dict[str, str]:
    """Key of a flat parameter -> the path of its unit, without the segments of wrappers (``""`` is the root).

    `others` are the other keys of the same file: the evidence for wrappers is that of all keys.
    """
    above = {key: key.rpartition(".")[0] for key in flat}
    wrappers = recognise([*filter(None, above.values()), *others])
    return {key: strip(path, wrappers) for key, path in above.items()}


def flat_params(section: Section) -> tuple[FlatParam, ...]:
    """The flat parameters of a state dict, by what its keys are called."""
    if section.kind != "state_dict":
        return ()
    flat = [entry for entry in section.tensors if is_flat(entry.key)]
    if not flat:
        return ()
    paths = unit_paths([entry.key for entry in flat], [key for key in section.by_key() if not is_flat(key)])
    return tuple(FlatParam(entry.key, paths[entry.key], entry.numel) for entry in flat)


def module_paths(names: Names) -> list[str]:
    """The canonical paths of all modules that hold a parameter, themselves or below, parents first."""
    found: dict[str, None] = {"": None}
    for tensor in names.runtime:
        if tensor.kind == "parameter":
            segments = tensor.canonical.split(".")[:-1]
            found.update((".".join(segments[:depth]), None) for depth in range(1, len(segments) + 1))
    return list(found)


def named_units(names: Names, patterns: Iterable[str]) -> tuple[list[str], list[Problem]]:
    """The root and the modules that the patterns name (``layers.*``: ``*`` is within one segment), parents first.

    The problems are patterns that name no module.
    """
    paths, found, problems = module_paths(names), {""}, []
    for pattern in patterns:
        own = [path for path in paths if path and _names(pattern, path)]
        found.update(own)
        problems += [] if own else [Problem("names no module that has parameters", pattern)]
    return [path for path in paths if path in found], problems


def _names(pattern: str, path: str) -> bool:
    wanted, segments = pattern.split("."), path.split(".")
    return len(wanted) == len(segments) and all(map(fnmatchcase, segments, wanted))


def slots(names: Names, units: Collection[str], outside: Collection[str] = ()) -> dict[str, tuple[Slot, ...]]:
    """Unit -> the places of its parameters, units in ``model.parameters()`` order; one without parameters has none.

    The order is that of ``named_modules``, the parameters of each module as it registered them; one that the unit has
    under two names is there once. `outside` are FQNs that are in no flat parameter.
    """
    first = {t.fqn: t.alias_of or t.fqn for t in names.runtime}
    shapes = {t.fqn: t.shape for t in names.runtime}
    members: dict[str, dict[str, list[str]]] = {path: {} for path in module_paths(names) if path in units}
    for tensor in names.runtime:
        if tensor.kind == "parameter" and tensor.fqn not in outside:
            unit = _owner(tensor.canonical, members)
            if unit is not None:
                members[unit].setdefault(first[tensor.fqn], []).append(tensor.fqn)
    return {unit: _laid_out([tuple(fqns) for fqns in own.values()], shapes) for unit, own in members.items()}


def _owner(name: str, units: Collection[str]) -> str | None:
    """The innermost unit that the tensor of this name is below."""
    path = name
    while path:
        path = path.rpartition(".")[0]
        if path in units:
            return path
    return None


def _laid_out(members: Iterable[tuple[str, ...]], shapes: Mapping[str, tuple[int, ...] | None]) -> tuple[Slot, ...]:
    found: list[Slot] = []
    for fqns in members:
        found.append(Slot(fqns, shapes[fqns[0]] or (), found[-1].end if found else 0))
    return tuple(found)


def shard_sizes(numel: int, world_size: int) -> tuple[int, ...]:
    """How many elements of a flat parameter each rank holds, without padding: equal chunks, as many as are full."""
    chunk = -(-numel // world_size)
    return tuple(max(0, min(chunk, numel - rank * chunk)) for rank in range(world_size))


def misfit(own: tuple[Slot, ...], numel: int, world_size: int, padded: bool) -> str | None:
    """At which parameter a flat parameter of `numel` elements and the model's `own` part ways; None where they fit.

    `padded`: it may be longer by what makes it a multiple of the number of ranks.
    """
    total = own[-1].end if own else 0
    if numel == total or (padded and numel == -(-total // world_size) * world_size):
        return None
    for slot in own:
        if slot.end > numel:
            return (
                f"holds {numel:,} elements, and the model's parameters need {total:,}: {slot.fqns[0]} "
                f"{list(slot.shape)} would be elements {slot.start:,} to {slot.end:,}"
            )
    last = f"after its last parameter, {own[-1].fqns[0]} {list(own[-1].shape)}, " if own else ""
    return f"holds {numel:,} elements, and the model's parameters need {total:,}: {last}{numel - total:,} are left"
