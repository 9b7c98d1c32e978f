"""Groups of tensors whose names differ in layer numbers only."""

from __future__ import annotations

from collections.abc import (
    Container,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
)
from functools import lru_cache

from ckpttool.core.text import split_at_numbers
from ckpttool.core.values import dataclass
from ckpttool.naming.evidence import Outlined

# any layer number in a template; `template` escapes segments of a key that read like it
NUMBER = "#"

Template = tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Tensors whose names differ in layer numbers only. There may be as many groups as tensors.

    `path` is their name with `NUMBER` for all layer numbers. `fixed` are the last numbers, joined
    by dots, if they are the same for all tensors. `many` maps the other numbers to tensors; None if
    there are none, but only the `first`.
    """

    path: Template
    fixed: str
    first: Outlined
    many: Mapping[str, Outlined] | None

    @property
    def members(self) -> Mapping[str, Outlined]:
        """The tensors by the numbers in which they differ, joined by dots."""
        return {"": self.first} if self.many is None else self.many

    @property
    def template(self) -> Template:
        """Their name, with `NUMBER` for the numbers in which they differ."""
        if not self.fixed:
            return self.path
        numbers = self.fixed.split(".")
        segments = list(self.path)
        for index in range(len(segments) - 1, -1, -1):
            if numbers and segments[index] == NUMBER:
                segments[index] = numbers.pop()
        return tuple(segments)

    @property
    def signature(self) -> Hashable:
        """A value that is equal for groups with tensors of the same shapes in the same layers.

        All floating-point dtypes count as the same: checkpoints are cast.
        """
        if self.many is None:
            return _outline(self.first)
        layers: dict[Hashable, list[str]] = {}
        for numbers, tensor in self.many.items():
            layers.setdefault(_outline(tensor), []).append(numbers)
        return frozenset((outline, frozenset(numbers)) for outline, numbers in layers.items())

    def at_depth(self, depth: int) -> Iterator[Group]:
        """Yield groups of the tensors that differ in the first `depth` numbers only.

        Of ``layers.#.experts.#.w``, depth 1 has a group for each expert: its tensors in all layers.
        """
        count = self.path.count(NUMBER)
        if count == depth:
            yield self
        if self.many is None or depth >= count:
            return
        if depth == 0:
            for numbers, tensor in self.many.items():
                yield Group(self.path, numbers, tensor, None)
            return
        members_by_fixed: dict[str, dict[str, Outlined]] = {}
        for joined, tensor in self.many.items():
            split = joined.split(".")
            varying, fixed = ".".join(split[:depth]), ".".join(split[depth:])
            members = members_by_fixed.setdefault(fixed, {})
            members[varying] = tensor
        for fixed, members in members_by_fixed.items():
            yield _group(self.path, fixed, members)

    def among(self, keys: Container[str]) -> Group | None:
        """Return the group of those tensors that have one of the keys, or None."""
        members = {
            numbers: tensor for numbers, tensor in self.members.items() if tensor.key in keys
        }
        if len(members) == len(self.members):
            return self
        return _group(self.path, self.fixed, members) if members else None


def _group(path: Template, fixed: str, members: dict[str, Outlined]) -> Group:
    first = next(iter(members.values()))
    return Group(path, fixed, first, None if members.keys() == {""} else members)


def _outline(tensor: Outlined) -> Hashable:
    return "float" in tensor.dtype, tensor.shape


def groups(tensors: Iterable[Outlined]) -> list[Group]:
    """Group the tensors by their names without any layer number, in the order of each group's first
    tensor.
    """
    members: dict[Template, dict[str, Outlined]] = {}
    for tensor in tensors:
        path, numbers = template(tensor.key)
        members.setdefault(path, {})[numbers] = tensor
    return [_group(path, "", group) for path, group in members.items()]


def template(key: str) -> tuple[Template, str]:
    """Return the key's segments with `NUMBER` for layer numbers, and these numbers, joined by
    dots.
    """
    if NUMBER in key:
        key = ".".join(map(_escaped, key.split(".")))
    texts = split_at_numbers(key)
    name = f".{NUMBER}".join(texts[::2])
    return _segments(name[1:]), ".".join(texts[1::2])


@lru_cache(maxsize=1 << 16)  # most keys have the segments of another
def _segments(text: str) -> Template:
    return tuple(text.split("."))


def shown(path: Template) -> str:
    """Return the template as a name, with ``{n}`` for layer numbers."""
    return ".".join(map(_shown_segment, path))


def _escaped(segment: str) -> str:
    return f"\\{segment}" if segment.lstrip("\\") == NUMBER else segment


def _shown_segment(segment: str) -> str:
    if segment == NUMBER:
        return "{n}"
    return segment[1:] if segment.lstrip("\\") == NUMBER else segment


def keys_of(several: Iterable[Group]) -> tuple[str, ...]:
    """Return the keys of all tensors of the groups."""
    keys: list[str] = []
    for group in several:
        keys += [tensor.key for tensor in group.members.values()]
    return tuple(keys)


def number_places(path: Template) -> list[int]:
    return [index for index, segment in enumerate(path) if segment == NUMBER]
