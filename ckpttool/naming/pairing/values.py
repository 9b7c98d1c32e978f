"""The input and output of an inference, and groups of tensors that differ in layer numbers only."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Union

from ckpttool.core.checkpoint import TensorEntry
from ckpttool.core.expression import Expression
from ckpttool.core.values import dataclass

NUMBER = "#"  # any layer number in a template; `template` escapes segments of a key that read like it
SAME_NAME = "the same name"  # the start of evidence by names alone

Template = tuple[str, ...]
Digest = Callable[[Expression], "bytes | None"]  # of a value over one side's keys; None if it has none


@dataclass(frozen=True, slots=True)
class Tensor:
    """The outline of a tensor, without an index."""

    key: str
    dtype: str
    shape: tuple[int, ...]


Outlined = Union[Tensor, TensorEntry]


@dataclass(frozen=True, slots=True)
class Pair:
    """A tensor of the left that is likely one of the right. Several tensors on one side are the parts of the tensor on
    the other side, end to end along dimension 0, in this order. `transposed` is the side whose tensors are stored
    transposed: ``left``, ``right``, or neither.
    """

    left: tuple[str, ...]
    right: tuple[str, ...]
    evidence: str
    transposed: str = ""


@dataclass(frozen=True, slots=True)
class Ambiguous:
    """Tensors that no evidence pairs: several could match, or only the shapes agree."""

    left: tuple[str, ...]
    right: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Inference:
    """Pairs, and ambiguous tensors. A key is in one pair at most, and if so, in none of `ambiguous`."""

    pairs: tuple[Pair, ...] = ()
    ambiguous: tuple[Ambiguous, ...] = ()


@dataclass(frozen=True, slots=True)
class Side:
    """One side's tensors. `ordered`: they are in the order in which the model defines them."""

    tensors: Sequence[Outlined]
    ordered: bool = True
    digest: Digest | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Tensors whose names differ in layer numbers only. There may be as many groups as tensors.

    `path` is their name with `NUMBER` for all layer numbers. `fixed` are the last numbers, joined by dots, if they are
    the same for all tensors. `many` maps the other numbers to tensors; None if there are none, but only the `first`.
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
        numbers, segments = self.fixed.split(".") if self.fixed else [], list(self.path)
        for at in range(len(segments) - 1, -1, -1):
            if numbers and segments[at] == NUMBER:
                segments[at] = numbers.pop()
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
        """Yield groups of the tensors that differ in the first `depth` numbers only."""
        count = self.path.count(NUMBER)
        if count == depth:
            yield self
        elif self.many is not None and not depth:
            yield from (Group(self.path, numbers, tensor, None) for numbers, tensor in self.many.items())
        elif self.many is not None and depth < count:
            groups: dict[str, dict[str, Outlined]] = {}
            for joined, tensor in self.many.items():
                numbers = joined.split(".")
                groups.setdefault(".".join(numbers[depth:]), {})[".".join(numbers[:depth])] = tensor
            yield from (_group(self.path, fixed, members) for fixed, members in groups.items())

    def among(self, keys: Container[str]) -> Group | None:
        """Return the group of those tensors that have one of the keys, or None."""
        members = {numbers: tensor for numbers, tensor in self.members.items() if tensor.key in keys}
        if len(members) == len(self.members):
            return self
        return _group(self.path, self.fixed, members) if members else None


def _group(path: Template, fixed: str, members: dict[str, Outlined]) -> Group:
    return Group(path, fixed, next(iter(members.values())), None if members.keys() == {""} else members)


def _outline(tensor: Outlined) -> Hashable:
    return "float" in tensor.dtype, tensor.shape


def groups(tensors: Iterable[Outlined]) -> list[Group]:
    """Group the tensors by their names without any layer number, in the order of each group's first tensor."""
    members: dict[Template, dict[str, Outlined]] = {}
    for tensor in tensors:
        path, numbers = template(tensor.key)
        members.setdefault(path, {})[numbers] = tensor
    return [_group(path, "", group) for path, group in members.items()]


def template(key: str) -> tuple[Template, str]:
    """Return the key's segments with `NUMBER` for layer numbers, and these numbers, joined by dots."""
    segments = key.split(".")
    numbers = [segment for segment in segments if segment.isdecimal()]
    if NUMBER in key:
        segments = [f"\\{one}" if one.lstrip("\\") == NUMBER else one for one in segments]
    if not numbers:
        return tuple(segments), ""
    return tuple([NUMBER if one.isdecimal() else one for one in segments]), ".".join(numbers)


def shown(path: Template) -> str:
    """Return the template as a name, with ``{n}`` for layer numbers."""
    return ".".join("{n}" if one == NUMBER else one[1:] if one.lstrip("\\") == NUMBER else one for one in path)
