"""The order of a model's keys in a file: it is evidence for the ids of an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product
from typing import NamedTuple

from ckpttool.core import expression as ex
from ckpttool.core.checkpoint import Section
from ckpttool.core.errors import Problem
from ckpttool.core.expression import Expression, Ref
from ckpttool.core.names import SERIALIZED, Names
from ckpttool.core.tables import positions, shapes_of
from ckpttool.core.values import dataclass
from ckpttool.naming.convert import read_keys
from ckpttool.naming.match import NameTables
from ckpttool.naming.wrappers import canonical_keys
from ckpttool.optimizers.parameters import Parameters


class KeyOrder(NamedTuple):
    """The order of a model's keys in a file, next to the order that the model has.

    `is_shown` is False if the file does not show an order. `moved` has a problem for each parameter
    that is in another position.
    """

    is_shown: bool
    moved: tuple[Problem, ...] = ()

    @property
    def is_confirmed(self) -> bool:
        return self.is_shown and not self.moved


def compare_key_order(
    sections: Iterable[Section], names: Names, params: Collection[str]
) -> KeyOrder:
    """Compare the order of the canonical names `params` in a file's state dicts with the model's.

    `sections` are state dicts whose keys are in the order of ``state_dict()``. One in another order
    than the model outweighs all others. One that lacks parameters does not confirm the order, and
    does not count next to a complete one: it is of another model.
    """
    tables, canonical = NameTables(names), Parameters(names).canonical
    complete: list[tuple[list[str], list[str]]] = []
    partial: list[tuple[list[str], list[str]]] = []
    for section in _of_this_model(sections, tables):
        reading = read_keys(tables, section)
        sources: Mapping[str, Expression | None] = tables.saved
        if reading.form != SERIALIZED:
            sources = {fqn: Ref(fqn) for fqn in tables.tensors}
        file_keys = [reading.match.names.get(key, "") for key in section.tensor_keys]
        file = [name for name in _params_of(file_keys, sources, canonical) if name in params]
        common = set(file)
        model = [name for name in _params_of(sources, sources, canonical) if name in common]
        is_complete = bool(params) and len(file) == len(params)
        (complete if is_complete else partial).append((file, model))
    for file, model in complete or partial:
        if file != model:
            problems = []
            for name, other in zip(model, file):
                if name != other:
                    problems.append(Problem(f"the file's model has {other} instead", name))
            return KeyOrder(True, tuple(problems))
    return KeyOrder(bool(complete))


def _params_of(
    keys: Iterable[str], sources: Mapping[str, Expression | None], canonical: Mapping[str, str]
) -> list[str]:
    """Return the canonical names of the parameters that the keys are computed from, in the order of
    the keys.
    """
    order: dict[str, None] = {}
    for key in keys:
        source = sources.get(key)
        if source is None:
            continue
        for fqn in ex.refs(source):
            if fqn in canonical:
                order[canonical[fqn]] = None
    return list(order)


Rename = Callable[[str], str]


def _of_this_model(sections: Iterable[Section], tables: NameTables) -> list[Section]:
    """Return the state dicts; without those of other models, whose tensors have some of the names
    in other shapes, if one fits.
    """
    fitting: list[Section] = []
    other: list[Section] = []
    for section in sections:
        (fitting if has_names_of(section, tables) else other).append(section)
    return fitting or other


def has_names_of(section: Section, tables: NameTables) -> bool:
    """Return whether the section has names of the model, and each in the model's shape."""
    reading = read_keys(tables, section)
    likeness = tables.runtime_likeness
    if reading.form == SERIALIZED:
        likeness = tables.serialized_likeness
    names = reading.match.names
    for entry in section.tensors:
        shape = likeness.get(names.get(entry.key, ""), ("", None))[1]
        if shape is not None and shape != entry.shape:
            return False
    return bool(names)


def sorted_like_model(section: Section, names: Names, rename: Rename | None = None) -> Section:
    """Return the state dict with its keys in the order of the model's ``state_dict()``, other keys
    last.

    `rename` returns the new name for each of the model's names, if they were renamed.
    """
    place = positions(keys_in_model_order(section, names, rename))
    tensors = sorted(section.tensors, key=lambda entry: place.get(entry.key, len(place)))
    return replace(section, tensors=tuple(tensors))


def keys_in_model_order(section: Section, names: Names, rename: Rename | None = None) -> list[str]:
    """Return the keys of the state dict that the model has, in the order of its ``state_dict()``.

    `rename` returns the new name for each of the model's names, if they were renamed. Then nothing
    reads the keys as names of the model: the form that has more of them is theirs.
    """
    tables = NameTables(names)
    serialized, runtime = list(tables.serialized_names), list(tables.runtime_names)
    if rename is None:
        reading = read_keys(tables, section)
        name_of = reading.match.names
        order = serialized if reading.form == SERIALIZED else runtime
    else:
        name_of = canonical_keys(section.keys)
        section_names = set(name_of.values())
        serialized, runtime = list(map(rename, serialized)), list(map(rename, runtime))
        count = len(section_names.intersection(serialized))
        order = serialized if count >= len(section_names.intersection(runtime)) else runtime
    place = positions(order)
    keys = [key for key in section.keys if name_of.get(key) in place]
    return sorted(keys, key=lambda key: place[name_of[key]])


def same_key_order(left: Iterable[Section], right: Iterable[Section]) -> bool | None:
    """Return whether two files list the keys of their models in the same order; None without common
    keys. If a file has several models, the state dicts that have the most in common are compared.
    """
    pairs = []
    for left_section, right_section in product(left, right):
        pair = _SectionPair(left_section, right_section)
        if len(pair.common) > 1:
            pairs.append(pair)
    same = None
    for pair in _closest([pair for pair in pairs if pair.has_same_shapes] or pairs):
        left_order = [key for key in pair.left.tensor_keys if key in pair.common]
        if left_order != [key for key in pair.right.tensor_keys if key in pair.common]:
            return False
        same = True
    return same


@dataclass(frozen=True)
class _SectionPair:
    """A state dict of each of two files."""

    left: Section
    right: Section

    @cached_property
    def common(self) -> frozenset[str]:
        return frozenset(self.left.tensor_keys).intersection(self.right.tensor_keys)

    @property
    def has_same_shapes(self) -> bool:
        left, right = shapes_of(self.left.tensors), shapes_of(self.right.tensors)
        return all(left[key] == right[key] for key in self.common)


def _closest(pairs: Sequence[_SectionPair]) -> list[_SectionPair]:
    """Return the pairs of state dicts neither of which has more in common with another one."""
    most: dict[int, int] = {}  # by the id of a state dict
    for pair in pairs:
        for section in (pair.left, pair.right):
            most[id(section)] = max(len(pair.common), most.get(id(section), 0))
    closest = []
    for pair in pairs:
        if len(pair.common) == most[id(pair.left)] == most[id(pair.right)]:
            closest.append(pair)
    return closest
