"""What goes into an inference and what comes out of it, and keys of repeated layers as one group."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from ckpttool.core.expression import Expression
from ckpttool.core.values import dataclass

NUMBER = "#"  # a generalised layer number in a template; no file's segment is mistaken for it, see `template`

SAME_NAME = "the same name"  # how evidence by names alone begins

Template = tuple[str, ...]
Digest = Callable[[Expression], "bytes | None"]  # of a value over one side's keys; None where it has none


class Outlined(Protocol):
    """All that an index says of a tensor; a `TensorEntry` is one."""

    @property
    def key(self) -> str:
        """Its name."""

    @property
    def dtype(self) -> str:
        """Torch's name without ``torch.``."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of one side by itself."""

    key: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """Tensors of the left that are likely those of the right. Several on one side are the parts of the other's one,
    end to end along dimension 0, in this order. `transposed` says of which side the tensors are stored transposed:
    ``left``, ``right``, or neither.
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
    """What was inferred. Every key stands in one pair at most, and in none of `ambiguous` where it stands in one."""

    pairs: tuple[Pair, ...] = ()
    ambiguous: tuple[Ambiguous, ...] = ()


@dataclass(frozen=True, slots=True)
class Side:
    """One side's tensors. `ordered`: the file keeps the order in which the model defines them."""

    tensors: Sequence[Outlined]
    ordered: bool = True
    digest: Digest | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Tensors whose names differ in layer numbers only, one at least. There may be one of these for each tensor.

    `path` is their name with all layer numbers generalised, `fixed` are the last of these numbers where all of the
    tensors have the same there, joined by dots. `many` are the tensors by their other numbers, joined by dots; None
    where they have none, so that there is nothing but the `first`.
    """

    path: Template
    fixed: str
    first: Outlined
    many: Mapping[str, Outlined] | None

    @property
    def members(self) -> Mapping[str, Outlined]:
        """The numbers in which they differ, joined by dots -> the tensor."""
        return {"": self.first} if self.many is None else self.many

    @property
    def template(self) -> Template:
        """Their name, with the numbers generalised in which they differ."""
        if not self.fixed:
            return self.path
        numbers, segments = self.fixed.split("."), list(self.path)
        for at in range(len(segments) - 1, -1, -1):
            if numbers and segments[at] == NUMBER:
                segments[at] = numbers.pop()
        return tuple(segments)

    @property
    def signature(self) -> Hashable:
        """Equal for groups that have tensors of the same shapes in the same layers. Any two floating-point dtypes are
        alike: checkpoints are cast.
        """
        if self.many is None:
            return likeness(self.first)
        found: dict[Hashable, list[str]] = {}
        for at, one in self.many.items():
            found.setdefault(likeness(one), []).append(at)
        return frozenset((like, frozenset(own)) for like, own in found.items())

    def at_depth(self, depth: int) -> Iterator[Group]:
        """The tensors with only the first `depth` of their numbers generalised; none where they have fewer."""
        count = self.path.count(NUMBER)
        if count == depth:
            yield self
        elif self.many is not None and not depth:
            yield from (Group(self.path, numbers, one, None) for numbers, one in self.many.items())
        elif self.many is not None and depth < count:
            found: dict[str, dict[str, Outlined]] = {}
            for at, one in self.many.items():
                numbers = at.split(".")
                found.setdefault(".".join(numbers[depth:]), {})[".".join(numbers[:depth])] = one
            yield from (_group(self.path, fixed, own) for fixed, own in found.items())

    def among(self, keys: Container[str]) -> Group | None:
        """Those of the tensors that have one of the keys; None where none has."""
        own = {at: one for at, one in self.members.items() if one.key in keys}
        if len(own) == len(self.members):
            return self
        return _group(self.path, self.fixed, own) if own else None


def likeness(tensor: Outlined) -> Hashable:
    """What tensors have in common that one could be the other, casts aside."""
    return "float" in tensor.dtype, tensor.shape


def template(key: str) -> tuple[Template, str]:
    """The key's segments with its layer numbers generalised, and these numbers, joined by dots."""
    segments = key.split(".")
    numbers = [segment for segment in segments if segment.isdecimal()]
    if NUMBER in key:  # a segment that reads like a generalised number is told from one
        segments = [f"\\{one}" if _reads_like_number(one) else one for one in segments]
    if not numbers:
        return tuple(segments), ""
    return tuple([NUMBER if one.isdecimal() else one for one in segments]), ".".join(numbers)


def shown(path: Template) -> str:
    """The template as a name, with ``{n}`` for layer numbers."""
    return ".".join("{n}" if one == NUMBER else one[1:] if _reads_like_number(one) else one for one in path)


def _reads_like_number(segment: str) -> bool:
    return segment.lstrip("\\") == NUMBER


def groups(tensors: Iterable[Outlined]) -> list[Group]:
    """The tensors, grouped with all of their layer numbers generalised; in the order of the first of each group."""
    found: dict[Template, dict[str, Outlined]] = {}
    for tensor in tensors:
        path, numbers = template(tensor.key)
        own = found.get(path)
        if own is None:
            own = found[path] = {}
        own[numbers] = tensor
    return [_group(path, "", own) for path, own in found.items()]


def _group(path: Template, fixed: str, members: dict[str, Outlined]) -> Group:
    first = next(iter(members.values()))
    return Group(path, fixed, first, None if members.keys() == {""} else members)
