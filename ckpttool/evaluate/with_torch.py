"""Tensors and their bytes by torch: entries that are computed when they are written, values that are compared."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import torch

from ckpttool.checkpoint import ExtraEntry, Lazy, Span, Storage, TensorEntry, in_row_major
from ckpttool.errors import CkptError, Refused
from ckpttool.evaluate.interpret import Held, NeedsValues, evaluate
from ckpttool.expression import Expression, refs
from ckpttool.io.ranges import read_all, read_span


def entry_of(key: str, source: Expression, have: Mapping[str, TensorEntry | ExtraEntry]) -> TensorEntry:
    """The entry `key` whose value is `source`: a view where it is one, else bytes that are computed when written.

    Dtype and shape are inferred now. Raises `Refused` where an operator does not fit its arguments.
    """
    read = {name: _tensor(name, have) for name in refs(source)}
    leaves = {name: _on_meta(entry) for name, entry in read.items()}

    held = Held(leaves.values())

    def compute() -> torch.Tensor:
        return evaluate(source, lambda name: load(read[name]))

    try:
        result = evaluate(source, leaves.__getitem__, held)
    except NeedsValues:
        result = compute()
    shape, dtype = tuple(result.shape), str(result.dtype).removeprefix("torch.")
    for name, leaf in leaves.items():
        at = _offset(result, leaf, read[name])
        if at is not None:
            return TensorEntry(key, dtype, shape, result.stride(), at, read[name].storage)
    reads, nbytes = sum(entry.nbytes for entry in read.values()), result.numel() * result.element_size()
    copied = 0 if result.is_contiguous() else nbytes
    memory = (
        reads + held.peak + copied + max((entry.storage.held for entry in read.values() if entry.storage), default=0)
    )
    lazy = Lazy(nbytes, lambda: [to_bytes(compute())], reads=reads, memory=memory)
    return in_row_major(key, dtype, shape, Storage(lazy))


def _offset(result: torch.Tensor, leaf: torch.Tensor, entry: TensorEntry) -> int | None:
    """The offset of `result` in the entry's storage, in elements; None where it is no view of `leaf`."""
    if result.is_conj() or result.is_neg() or not result.numel():
        return None
    if result.untyped_storage()._cdata != leaf.untyped_storage()._cdata:
        return None
    size = result.element_size()
    at, rest = divmod(entry.offset * leaf.element_size() + int(result.storage_offset()) * size, size)
    return at if not rest else None


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CkptError(f"this torch has no dtype {name!r}", hint="use a newer torch")
    return found


def load(entry: TensorEntry) -> torch.Tensor:
    """The entry as a tensor on the CPU, with the strides it has in the file. Reads only the bytes it spans."""
    assert entry.storage is not None
    dtype = _dtype(entry.dtype)
    if not entry.numel:
        return torch.empty(entry.shape, dtype=dtype)
    data = entry.storage.data
    if isinstance(data, Lazy):
        whole = read_all(data)
        return torch.frombuffer(whole, dtype=dtype).as_strided(entry.shape, entry.stride, entry.offset)
    size = dtype.itemsize
    read = read_span(Span(data.path, data.offset + entry.offset * size, (entry.end - entry.offset) * size))
    return torch.frombuffer(read, dtype=dtype).as_strided(entry.shape, entry.stride)


def arrange(old: Storage, values: Sequence[tuple[TensorEntry, TensorEntry]]) -> Storage:
    """A storage like `old`, in which each (place, value) pair's place holds that value; gaps keep their old bytes.

    Raises `Refused` when it is written, where two places overlap and want different values.
    """

    def produce() -> list[memoryview]:
        assert isinstance(old.data, Span)
        whole = torch.frombuffer(read_span(old.data), dtype=torch.uint8)
        places = [(_view(whole, place), load(value), place.key) for place, value in values]
        for place, value, _ in places:
            place.copy_(value)
        for place, value, key in places:
            if not same_bits(place, value):
                raise Refused(
                    f"{key} shares memory with another weight that gets another value", hint="nothing was written"
                )
        return [to_bytes(whole)]

    return Storage(Lazy(old.nbytes, produce))


def _view(whole: torch.Tensor, place: TensorEntry) -> torch.Tensor:
    typed = torch.empty(0, dtype=_dtype(place.dtype))
    return typed.set_(whole.untyped_storage(), place.offset, place.shape, place.stride)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and shape have the same bytes (NaN equals itself, 0.0 is not -0.0)."""
    return torch.equal(_bits(left), _bits(right))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)  # a single element may have the stride 0


def difference(left: torch.Tensor, right: torch.Tensor, rtol: float, atol: float) -> str | None:
    """How two tensors differ, in words; None where every element is within the tolerances (NaN equals NaN).

    With both tolerances 0 they are known to differ in some byte.
    """
    wide = torch.complex128 if left.is_complex() else torch.float64
    a, b = left.to(wide), right.to(wide)
    equal = (a == b) | (a.isnan() & b.isnan())
    if not (left.is_floating_point() or left.is_complex()):  # float64 has no room for all of int64
        equal &= (_bits(left) == _bits(right)).reshape(*left.shape, left.element_size()).all(-1)
    apart = _distance(left, right) if left.dtype in (torch.int64, torch.uint64) else (a - b).abs()
    close = equal | (apart.isfinite() & (apart <= atol + (rtol * b).abs())) if rtol or atol else equal
    count = int((~close).sum())
    if count:
        infinite = float("inf")
        far = torch.where(equal, 0.0, apart).nan_to_num(nan=infinite, posinf=infinite).max().item()
        distance = f", by {far:.3g} at most" if far else ""
        return f"{count:,} of {left.numel():,} elements differ{distance}"
    return None if rtol or atol else "the values are equal, their bytes are not (-0.0, or another kind of NaN)"


def _distance(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """How far numbers of 64 bits are apart: float64 has no room for all of them, but for that (modulo 2^64)."""
    x, y = (t.contiguous().view(torch.int64) ^ (0 if t.dtype == torch.int64 else -(1 << 63)) for t in (left, right))
    found = torch.where(x > y, x - y, y - x)
    return found.double() + (found < 0) * 2.0**64


def to_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's elements in row-major order, without a copy where it is contiguous."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    nbytes = tensor.numel() * tensor.element_size()
    buffer = (ctypes.c_char * nbytes).from_address(tensor.data_ptr()) if nbytes else (ctypes.c_char * 0)()
    buffer._keep_alive = tensor  # type: ignore[attr-defined]  # the view is only as good as the tensor behind it
    return memoryview(buffer).cast("B")


def _on_meta(entry: TensorEntry) -> torch.Tensor:
    return torch.empty_strided(entry.shape, entry.stride, dtype=_dtype(entry.dtype), device="meta")


def _tensor(key: str, have: Mapping[str, TensorEntry | ExtraEntry]) -> TensorEntry:
    entry = have[key]
    if isinstance(entry, TensorEntry) and entry.storage is not None:
        return entry
    layout = entry.layout if isinstance(entry, TensorEntry) else "not a tensor"
    raise Refused(
        f"nothing can be computed from {key}: {layout}", hint="only dense tensors can be transformed or converted"
    )
