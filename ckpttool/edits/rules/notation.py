"""A tensor as a rules file writes it, key, shape and dtype: ``"layers.0.wq.weight [8, -1] bfloat16"``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Protocol

from ckpttool.dtypes import PLAIN
from ckpttool.edits.rules.patterns import matches
from ckpttool.values import dataclass
from ckpttool.words import shape_text

_TENSOR = re.compile(r"(\S(?:.*\S)?)\s+\[((?:\s*(?:-1|\d{1,15})\s*(?:,|(?=\])))*)\](?:\s+(\w+))?\s*")


class Tensor(Protocol):
    """What has a dtype and a shape."""

    @property
    def dtype(self) -> str:
        """As in ``bfloat16``."""

    @property
    def shape(self) -> tuple[int, ...]:
        """In elements."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A key or a pattern of keys, with the shape (-1 for any size) and the dtype where they are said."""

    key: str
    shape: tuple[int, ...] | None = None
    dtype: str | None = None

    def names(self, key: str, tensor: Tensor) -> bool:
        """Whether it is a tensor of this kind that stands under `key`."""
        return self.is_like(tensor) and matches(self.key, key)

    def is_like(self, tensor: Tensor) -> bool:
        """Whether the tensor has the shape and the dtype."""
        if self.dtype not in (None, tensor.dtype):
            return False
        if self.shape is None:
            return True
        return len(self.shape) == len(tensor.shape) and all(
            size in (-1, length) for size, length in zip(self.shape, tensor.shape)
        )


def shown(text: str) -> Shown | None:
    """The text as a tensor; None where it ends in no shape and dtype that could be one."""
    found = _TENSOR.fullmatch(text)
    if found is None or found[3] not in (None, *PLAIN):
        return None
    return Shown(found[1], tuple(int(size) for size in found[2].split(",") if size.strip()), found[3])


def condition(text: str) -> Shown:
    """The text as a pattern of keys, with a shape or without."""
    return shown(text) or Shown(text)


def holds(when: Sequence[Shown], unless: Sequence[Shown], state: Mapping[str, Tensor]) -> bool:
    """Whether each of `when` names a tensor of the state, and none of `unless` does."""

    def there(one: Shown) -> bool:
        return any(one.names(key, tensor) for key, tensor in state.items())

    return all(map(there, when)) and not any(map(there, unless))


def words(tensor: Tensor) -> str:
    """Shape and dtype: ``[4, 12] float32``."""
    return f"{shape_text(tensor.shape)} {tensor.dtype}"
