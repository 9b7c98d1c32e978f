"""Evidence in shapes: tensors that are stored transposed, and tensors that could be exchanged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import (
    Hashable,
    Iterable,
)

from ckpttool.naming.evidence import Outlined, SideTensors, Tensor
from ckpttool.naming.templates import NUMBER, Group, groups, keys_of
from ckpttool.naming.vocabulary import kind_of


def fit(left: Outlined, right: Outlined) -> bool:
    """Return whether the two have one shape, or one is a matrix with the other's shape
    transposed.
    """
    return left.shape == right.shape or (len(left.shape) == 2 and left.shape == right.shape[::-1])


def transposed(tensors: Iterable[Outlined]) -> frozenset[str]:
    """Return the weights that their biases show to be stored as (in, out); none if a bias shows the
    other order.

    A square weight is one of them if all other weights of modules with its module's name are.
    """
    tensors = list(tensors)
    outputs = {}  # key of the weight next to a bias -> the bias's length
    for tensor in tensors:
        if len(tensor.shape) == 1 and tensor.key.endswith(".bias"):
            outputs[f"{tensor.key[:-4]}weight"] = tensor.shape[0]
    if not outputs:
        return frozenset()
    oblong, square = set(), set()
    for tensor in tensors:
        out = outputs.get(tensor.key)
        if out is None or len(tensor.shape) != 2 or out not in tensor.shape:
            continue
        first, last = tensor.shape
        if first == last:
            square.add(tensor.key)
        elif last == out:
            oblong.add(tensor.key)
        else:
            return frozenset()
    modules = {key.split(".")[-2] for key in oblong}
    square = {key for key in square if key.split(".")[-2] in modules}
    return frozenset(oblong | square)


def straight(side: SideTensors, keys: frozenset[str]) -> SideTensors:
    """Return the side with the shapes of these tensors as (out, in)."""
    if not keys:
        return side
    tensors: list[Outlined] = []
    for tensor in side.tensors:
        if tensor.key in keys:
            tensors.append(Tensor(tensor.key, tensor.dtype, tensor.shape[::-1]))
        else:
            tensors.append(tensor)
    return SideTensors(tuple(tensors), side.ordered, side.digest)


def exchangeable(tensors: Iterable[Outlined]) -> tuple[tuple[str, ...], ...]:
    """Return keys of tensors that have one shape in the same layers, a tuple for each shape,
    without biases.

    Whole layers could be exchanged too, in every model: these are not reported.
    """
    by_shape: defaultdict[Hashable, list[Group]] = defaultdict(list)
    for group in groups(tensors):
        if kind_of(group.path) in ("weight", "") and group.first.shape:
            layer = group.path
            while layer and layer[-1] != NUMBER:
                layer = layer[:-1]
            by_shape[group.signature, layer].append(group)
    return tuple(keys_of(same) for same in by_shape.values() if len(same) > 1)
