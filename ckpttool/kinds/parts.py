"""Files of ranks without DTensors: each has a copy of every tensor, or a part (tensor-parallel)."""

from __future__ import annotations

import re

from ckpttool.containers.rank_shards import is_of_ranks, is_whole, parts_of
from ckpttool.core.checkpoint import Kind, Section
from ckpttool.core.strides import Shape
from ckpttool.core.text import plural

NAME = "tensor-parallel"
# weights that are several weights, one after the other: each rank has a part of each of them
_FUSED = re.compile(
    r"(.*[._])?(qkv|Wqkv|w?qkv_proj|query_key_value|linear_qkv|in_proj|c_attn|gate_up(_proj)?"
    r"|gate_and_up|fc1_gate|w13|wi_fused|kv|kv_proj|qk|qk_proj)([._].*)?"
)


def recognize(section: Section) -> Kind | None:
    ranks = 0
    for entry in section.tensors:
        if is_of_ranks(entry) and not is_whole(entry) and len(entry.shape) > 1:
            ranks = max(ranks, len(parts_of(entry)))
    if not ranks:
        return None
    text = (
        f"is {plural(ranks, 'rank file')}, each with a copy or a part of every tensor"
        " (tensor-parallel): --model joins the parts, because only its shapes show which it is, and"
        " along which dimension"
    )
    return Kind(NAME, section.path, text)


def is_fused(key: str) -> bool:
    """Return whether a weight of this name is usually several weights in one."""
    return _FUSED.fullmatch(key) is not None


def joined_dimension(shapes: list[Shape], whole: Shape) -> int | None:
    """Return the one dimension along which parts of these shapes have the `whole` shape; None if
    there is none, or more than one.
    """
    if set(map(len, shapes)) != {len(whole)}:
        return None
    dimensions = [dim for dim in range(len(whole)) if _joined(shapes, dim) == whole]
    return dimensions[0] if len(dimensions) == 1 else None


def joined_alike(shapes: list[Shape], others: list[Shape]) -> Shape | None:
    """Return the one shape that both lists of parts can have if they are joined; None if there is
    none, or more than one.
    """
    dimensions = range(min(map(len, shapes + others)))
    wholes = {_joined(shapes, dim) for dim in dimensions}
    wholes &= {_joined(others, dim) for dim in dimensions}
    wholes.discard(None)
    return wholes.pop() if len(wholes) == 1 else None


def _joined(shapes: list[Shape], dim: int) -> Shape | None:
    """Return the shape of parts that are joined along a dimension; None if they do not fit."""
    before, after = shapes[0][:dim], shapes[0][dim + 1 :]
    length = 0
    for shape in shapes:
        if shape[:dim] != before or shape[dim + 1 :] != after:
            return None
        length += shape[dim]
    return (*before, length, *after)
