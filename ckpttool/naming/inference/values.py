"""What goes into an inference and what comes out of it, and keys of repeated layers as one group."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import field

from ckpttool.expression import Expression
from ckpttool.values import dataclass

NUMBER = "#"  # a generalised layer number in a template; no file's segment is mistaken for it, see `template`

SAME_NAME = "the same name"  # how evidence by names alone begins

Template = tuple[str, ...]
Digest = Callable[[Expression], "bytes | None"]  # of a value over one side's keys; None where it has none


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of one side: all that its index says of it."""

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
    """Tensors that could be each other in more than one way."""

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

    tensors: tuple[Tensor, ...]
    ordered: bool = True
    digest: Digest | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors whose names differ in layer numbers only: the numbers -> the tensor."""

    template: Template
    members: dict[tuple[str, ...], Tensor] = field(compare=False, hash=False)

    @property
    def first(self) -> Tensor:
        """One of the tensors."""
        return next(iter(self.members.values()))

    @property
    def signature(self) -> frozenset[tuple[object, ...]]:
        """Equal for groups that have tensors of the same shapes in the same layers. Any two floating-point dtypes are
        alike: checkpoints are cast.
        """
        return frozenset((at, is_floating(one.dtype), one.shape) for at, one in self.members.items())


def is_floating(dtype: str) -> bool:
    """Whether the dtype is one of floating-point numbers, by its name."""
    return "float" in dtype


def template(key: str, depth: int | None = None) -> tuple[Template, tuple[str, ...]]:
    """The key's segments with its first `depth` layer numbers (all, with None) generalised, and these numbers."""
    segments = key.split(".")
    numbers: list[str] = []
    for at, segment in enumerate(segments):
        if segment == NUMBER:
            segments[at] = "\\#"
        elif segment.isdecimal() and (depth is None or len(numbers) < depth):
            numbers.append(segment)
            segments[at] = NUMBER
    return tuple(segments), tuple(numbers)


def groups(tensors: Iterable[Tensor], depth: int | None = None) -> list[Group]:
    """The tensors that have `depth` layer numbers or more, grouped; with None all of them."""
    found: dict[Template, Group] = {}
    for tensor in tensors:
        shape, numbers = template(tensor.key, depth)
        if depth is None or len(numbers) == depth:
            found.setdefault(shape, Group(shape, {})).members[numbers] = tensor
    return list(found.values())
