"""How many elements of a tensor do expressions read? A view reads the elements that it shows:
nothing reads the rows that a slice leaves out. An operator counts as reading all of its arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import gcd
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided

from ckpttool.core.errors import CkptError
from ckpttool.core.expression import CAST, Argument, Expression, Op, Ref, refs
from ckpttool.core.strides import Shape
from ckpttool.core.values import dataclass
from ckpttool.evaluate.torch_eval import evaluate

# Operators that read the elements at an index only. Their second argument is a list of indices, or
# a dimension and then an index.
_BY_LIST, _BY_DIMENSION = "aten.index.Tensor", "aten.index_select.default"
_MOST_MARKS = 1 << 28  # bytes of memory
_COPIES = ("aten.clone.default", CAST)


@dataclass(frozen=True, slots=True)
class _Region:
    """The elements of a row-major tensor that a view shows. An operator with indices picks some of
    them: `index` is its arguments, None for all.
    """

    offset: int
    shape: Shape
    stride: tuple[int, ...]
    index: tuple[Argument, ...] | None = None


def unread_elements(sources: Iterable[Expression], shapes: Mapping[str, Any]) -> dict[str, int]:
    """Return the tensors of which no source reads some elements, with the number of these.

    `shapes` are tensors without data, by their keys; keys that no source names are left out.
    """
    regions: dict[str, set[_Region]] = {}
    complete: set[str] = set()
    operations = []
    for source in sources:
        if isinstance(source, Ref):
            complete.add(source.key)
        else:
            operations.append(source)
    for source in operations:
        if complete.issuperset(refs(source)):
            continue
        try:
            of_source = _regions(source, shapes)
        except CkptError:  # what it reads may depend on values: perhaps it is everything
            complete.update(refs(source))
            continue
        for key, region in of_source:
            regions.setdefault(key, set()).add(region)
    unread = {}
    for key in regions.keys() - complete:
        count = _unread(regions[key], shapes[key].numel())
        if count:
            unread[key] = count
    return unread


def _regions(source: Expression, shapes: Mapping[str, Any]) -> list[tuple[str, _Region]]:
    """Return what the operators of an expression read of the tensors that it names."""
    # storage -> key and dtype of the tensor that it holds, which may be a copy in another dtype
    held: dict[int, tuple[str, torch.dtype]] = {}
    regions: list[tuple[str, _Region]] = []

    def leaf(key: str) -> torch.Tensor:
        tensor = torch.empty(shapes[key].shape, dtype=shapes[key].dtype, device="meta")
        held[_storage(tensor)] = key, tensor.dtype
        return tensor

    def read(tensor: torch.Tensor, index: tuple[Argument, ...] | None = None) -> None:
        if _storage(tensor) not in held:
            return
        key, dtype = held[_storage(tensor)]
        if tensor.dtype != dtype:  # seen as other numbers, which the strides count
            tensor = torch.empty(shapes[key].shape, device="meta")
        offset, shape = int(tensor.storage_offset()), tuple(tensor.shape)
        region = _Region(offset, shape, tuple(tensor.stride()), index)
        regions.append((key, region))

    def watch(node: Op, arguments: list[Any], result: Any) -> None:
        if node.op in _COPIES and _is_complete(arguments[0], held, shapes):
            key, _ = held[_storage(arguments[0])]
            held[_storage(result)] = key, result.dtype
            return
        index = None
        if node.op in (_BY_LIST, _BY_DIMENSION) and not any(refs(node.args[1:])):
            index = node.args[1:]
        results = set(map(_storage, _tensors(result)))
        for argument in _tensors(arguments):
            if _storage(argument) not in results:  # else a view, which reads nothing yet
                read(argument, index)

    read(evaluate(source, leaf, watch=watch))
    return regions


def _is_complete(
    tensor: torch.Tensor, held: Mapping[int, tuple[str, torch.dtype]], shapes: Mapping[str, Any]
) -> bool:
    """Return True if a view shows a complete tensor, its elements in row-major order."""
    if _storage(tensor) not in held:
        return False
    key, dtype = held[_storage(tensor)]
    is_complete = tensor.dtype == dtype and tensor.numel() == shapes[key].numel()
    return is_complete and tensor.is_contiguous()


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if not isinstance(value, (list, tuple)):
        return []
    tensors = []
    for item in value:
        tensors += _tensors(item)
    return tensors


def _unread(regions: Iterable[_Region], numel: int) -> int:
    """Return how many of `numel` elements are in no region.

    Runs of elements that all regions have together are marked as one. With too many marks, all
    elements are taken to be read.
    """
    run = numel
    for region in regions:
        run = gcd(run, *_steps(region))
    run = max(run, 1)
    if numel // run > _MOST_MARKS:
        return 0
    marks = np.zeros(numel // run, dtype=bool)
    for region in regions:
        _mark(region, marks, run)
    return run * int(np.count_nonzero(~marks))


def _steps(region: _Region) -> list[int]:
    """Return the numbers of elements of which a run of the region is a divisor."""
    if 0 in region.shape:
        return []
    if region.index is not None:
        return [1]
    steps, runs = [region.offset], 0
    for size, step in zip(region.shape, region.stride):
        if size == 1 or step == 0:
            continue
        steps.append(size if step == 1 else step)
        runs += step == 1
    return steps if runs == 1 else [1]  # windows that overlap have several


def _mark(region: _Region, marks: np.ndarray, run: int) -> None:
    """Mark the runs of a region, in which a dimension with stride 1 has fewer steps.

    x[2:4] of [6, 4]:  offset 8, shape [2, 4], stride [4, 1]  ──  runs of 4: 2, [2, 1], [1, 1]
    """
    shape, stride = [], []
    for size, step in zip(region.shape, region.stride):
        is_run = step == 1 and size > 1
        shape.append(size // run if is_run else size)
        stride.append(1 if is_run else step // run)
    if 0 in shape:
        return
    view = as_strided(marks[region.offset // run :], shape, stride)
    if region.index is None:
        view[...] = True
    else:
        view[_places(region.index, view.ndim)] = True


def _places(index: tuple[Argument, ...], dimensions: int) -> tuple[Any, ...]:
    """Return the arguments of an operator with indices as NumPy writes them."""
    if len(index) == 2:
        dim, numbers = index
        assert isinstance(dim, int)
        before = (slice(None),) * (dim % dimensions if dimensions else 0)
        return (*before, _values(numbers)) if dimensions else ()
    (indices,) = index
    assert isinstance(indices, tuple)
    return tuple(slice(None) if numbers is None else _values(numbers) for numbers in indices)


def _values(numbers: Argument) -> np.ndarray:
    assert isinstance(numbers, Op)
    no_tensors: dict[str, torch.Tensor] = {}
    return evaluate(numbers, no_tensors.__getitem__).numpy()
