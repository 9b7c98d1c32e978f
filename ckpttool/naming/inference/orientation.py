"""Which weights are stored as (in, out), as GPT-2's ``Conv1D`` and Flax do, and not as (out, in), as ``Linear``."""

from __future__ import annotations

from collections.abc import Iterable

from ckpttool.naming.inference.values import Outlined, Side, Tensor


def turned(tensors: Iterable[Outlined]) -> frozenset[str]:
    """The weights that the biases beside them show to be stored as (in, out); none where a bias shows the other order.

    A square weight, which no bias can tell, is taken for one where all others under its module's name are.
    """
    shapes = {tensor.key: tensor.shape for tensor in tensors}
    biases = {f"{key[:-4]}weight": shape[0] for key, shape in shapes.items() if len(shape) == 1 and key[-5:] == ".bias"}
    flat = {key: out for key, out in biases.items() if len(shapes.get(key, ())) == 2}
    found = {key for key, out in flat.items() if shapes[key][1] == out != shapes[key][0]}
    if any(shapes[key][0] == out != shapes[key][1] for key, out in flat.items()):
        return frozenset()
    names = {_own_name(key) for key in found}
    square = {key for key, out in flat.items() if shapes[key] == (out, out) and _own_name(key) in names}
    return frozenset(found | square)


def straight(side: Side, keys: frozenset[str]) -> Side:
    """The side with the shapes of these tensors as (out, in)."""
    if not keys:
        return side
    straight = (Tensor(one.key, one.dtype, one.shape[::-1]) if one.key in keys else one for one in side.tensors)
    return Side(tuple(straight), side.ordered, side.digest)


def _own_name(key: str) -> str:
    """The name of the module that holds the tensor, without the way to it."""
    return key.split(".")[-2]
