"""What infers renames: the tensors of two sides, and the pairs that are likely the same."""

from __future__ import annotations

from collections.abc import (
    Callable,
    Sequence,
)
from typing import Union

from ckpttool.core.checkpoint import TensorEntry
from ckpttool.core.expression import Expression
from ckpttool.core.strides import Shape
from ckpttool.core.text import Info
from ckpttool.core.values import dataclass

SAME_NAME = Info("the same name", "same-name")  # evidence by names alone has this code
# of a value over one side's keys; None if it has none
Digest = Callable[[Expression], "bytes | None"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """The outline of a tensor, without an index."""

    key: str
    dtype: str
    shape: Shape


Outlined = Union[Tensor, TensorEntry]


@dataclass(frozen=True, slots=True)
class Pair:
    """A tensor of the left that is likely one of the right. Several tensors on one side are the
    parts of the tensor on the other side, end to end along dimension 0, in this order. `transposed`
    is the side whose tensors are stored transposed: ``left``, ``right``, or neither.
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
    """Pairs, and ambiguous tensors. A key is in one pair at most, and if so, in none of
    `ambiguous`.
    """

    pairs: tuple[Pair, ...] = ()
    ambiguous: tuple[Ambiguous, ...] = ()


@dataclass(frozen=True, slots=True)
class SideTensors:
    """One side's tensors. `ordered`: they are in the order in which the model defines them."""

    tensors: Sequence[Outlined]
    ordered: bool = True
    digest: Digest | None = None
