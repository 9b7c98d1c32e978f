"""Whether two attributes or options of live objects have the same value."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ckpttool.evaluate.torch_eval import same_bits
from ckpttool.live.model import SpecialTensor
from ckpttool.tracing.instances import layout_of
from ckpttool.tracing.memory import token


def same_value(left: Any, right: Any) -> bool:
    """Return True if two values are of one type and equal. Tensors and arrays are equal if their
    bytes are, so NaN equals itself; values that cannot be compared are different.
    """
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return _same_tensor(left, right)
    if isinstance(left, np.ndarray):
        return _same_array(left, right)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same_value, left, right))
    if isinstance(left, dict):
        has_same_keys = left.keys() == right.keys()
        return has_same_keys and all(same_value(left[key], right[key]) for key in left)
    if isinstance(left, float) and left != left:
        return bool(right != right)
    try:
        return bool(left == right)
    except Exception:  # the user's own class decides, and may raise anything
        return False


def _same_tensor(left: torch.Tensor, right: torch.Tensor) -> bool:
    if token(left) == token(right):
        return True
    if layout_of(left) == layout_of(right) == "strided":
        has_one_form = (left.dtype, left.shape) == (right.dtype, right.shape)
        return has_one_form and same_bits(left.cpu(), right.cpu())
    content = SpecialTensor(left).content()
    return content is not None and content == SpecialTensor(right).content()


def _same_array(left: Any, right: Any) -> bool:
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    if left.dtype.hasobject:
        return same_value(left.tolist(), right.tolist())
    return bool(left.tobytes() == right.tobytes())
