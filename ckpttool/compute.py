"""Evaluates expressions with torch, one output at a time. Imported only where a plan holds more than renames."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ckpttool.checkpoint import ExtraEntry, Lazy, Span, Storage, TensorEntry, contiguous_stride
from ckpttool.errors import CkptError, Refused
from ckpttool.execute import SpanReader
from ckpttool.expression import Argument, Expression, Op, Ref, Special

Load = Callable[[str], torch.Tensor]
_NAMESPACES = ("aten", "prims")


def entry_of(key: str, source: Expression, have: Mapping[str, TensorEntry | ExtraEntry]) -> TensorEntry:
    """The entry `key` whose value is `source`: dtype and shape are inferred now, its bytes computed when written."""
    result = evaluate(source, lambda name: _on_meta(_tensor(name, have)))
    shape, dtype = tuple(result.shape), str(result.dtype).removeprefix("torch.")
    nbytes = result.numel() * result.element_size()
    lazy = Lazy(nbytes, lambda: [to_bytes(evaluate(source, lambda name: load(_tensor(name, have))))])
    return TensorEntry(key, dtype, shape, contiguous_stride(shape), 0, Storage(lazy))


def evaluate(expression: Expression, load: Load) -> torch.Tensor:
    """The value of `expression`, with `load(key)` for its leaves; a part that occurs twice is computed once.

    Raises `Refused` where an operator does not fit its arguments, `CkptError` for an operator that is not allowed.
    """
    known: dict[int, Any] = {}

    def value(node: Argument) -> Any:
        if isinstance(node, (Ref, Op)):
            if id(node) not in known:
                known[id(node)] = load(node.key) if isinstance(node, Ref) else _apply(node, value)
            return known[id(node)]
        if isinstance(node, Special):
            return _special(node)
        return [value(item) for item in node] if isinstance(node, tuple) else node

    with torch.no_grad():
        result = value(expression)
    if not isinstance(result, torch.Tensor):
        raise CkptError(f"an expression gives a {type(result).__name__}, not a tensor", hint="check the plan")
    return result


def _apply(node: Op, value: Callable[[Argument], Any]) -> Any:
    args, kwargs = [value(arg) for arg in node.args], {name: value(arg) for name, arg in node.kwargs}
    try:
        return args[0][args[1]] if node.op == "getitem" else _operator(node.op)(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise Refused(
            f"{node.op} does not fit: {reason}", hint="the checkpoint's shapes or dtypes are not the model's"
        ) from error


def _operator(name: str) -> Any:
    """The functional torch operator of that name; a plan is data, so nothing that writes or calls out is allowed."""
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    if namespace in _NAMESPACES and packet.isidentifier() and not packet.startswith("__"):
        found = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload or "default", None)
        if isinstance(found, torch._ops.OpOverload) and not found._schema.is_mutable:
            return found
    raise CkptError(f"{name!r} is not an operator that a plan may hold", hint="allowed are functional aten operators")


def _special(node: Special) -> Any:
    if node.kind == "device":
        return torch.device("cpu")
    if node.kind == "complex":
        return complex(node.name)
    found = getattr(torch, node.name, None)
    if not isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
        raise CkptError(f"torch has no {node.kind} {node.name!r}", hint="the plan was made by another torch")
    return found


def load(entry: TensorEntry) -> torch.Tensor:
    """The entry as a tensor on the CPU, with the strides it has in the file. Reads only the bytes it spans."""
    assert entry.storage is not None
    dtype = getattr(torch, entry.dtype)
    if not entry.numel:
        return torch.empty(entry.shape, dtype=dtype)
    data = entry.storage.data
    if isinstance(data, Lazy):
        whole = bytearray().join(data.produce())
        return torch.frombuffer(whole, dtype=dtype).as_strided(entry.shape, entry.stride, entry.offset)
    count = 1 + sum((size - 1) * stride for size, stride in zip(entry.shape, entry.stride))
    size = dtype.itemsize
    read = _read(Span(data.path, data.offset + entry.offset * size, count * size))
    return torch.frombuffer(read, dtype=dtype).as_strided(entry.shape, entry.stride)


def arrange(old: Storage, values: Sequence[tuple[TensorEntry, TensorEntry]]) -> Storage:
    """A storage like `old`, in which each (place, value) pair's place holds that value; gaps keep their old bytes.

    Raises `Refused` when it is written, where two places overlap and want different values.
    """

    def produce() -> list[memoryview]:
        assert isinstance(old.data, Span)
        whole = torch.frombuffer(_read(old.data), dtype=torch.uint8)
        places = [(_view(whole, place), load(value), place.key) for place, value in values]
        for place, value, _ in places:
            place.copy_(value)
        for place, value, key in places:
            if to_bytes(place) != to_bytes(value):
                raise Refused(
                    f"{key} shares memory with another weight that gets another value", hint="nothing was written"
                )
        return [to_bytes(whole)]

    return Storage(Lazy(old.nbytes, produce))


def _view(whole: torch.Tensor, place: TensorEntry) -> torch.Tensor:
    typed = torch.empty(0, dtype=getattr(torch, place.dtype))
    return typed.set_(whole.untyped_storage(), place.offset, place.shape, place.stride)


def _read(span: Span) -> bytearray:
    reader = SpanReader()
    try:
        return bytearray().join(bytes(chunk) for chunk in reader.chunks(span))
    finally:
        reader.close()


def difference(left: torch.Tensor, right: torch.Tensor, rtol: float, atol: float) -> str | None:
    """How two tensors differ, in words; None where every element is within the tolerances (NaN equals NaN)."""
    wide = torch.complex128 if left.is_complex() else torch.float64
    a, b = left.to(wide), right.to(wide)
    equal = (a == b) | (a.isnan() & b.isnan())
    close = equal | torch.isclose(a, b, rtol=rtol, atol=atol)
    count = int((~close).sum())
    if count or not (rtol or atol):
        far = torch.where(equal, torch.zeros_like(a), a - b).abs().nan_to_num(nan=float("inf")).max().item()
        return f"{count:,} of {left.numel():,} elements differ, by {far:.3g} at most"
    return None


def to_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's elements in row-major order, without a copy where it is contiguous."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    nbytes = tensor.numel() * tensor.element_size()
    buffer = (ctypes.c_char * nbytes).from_address(tensor.data_ptr()) if nbytes else (ctypes.c_char * 0)()
    buffer._keep_alive = tensor  # type: ignore[attr-defined]  # the view is only as good as the tensor behind it
    return memoryview(buffer).cast("B")


def _on_meta(entry: TensorEntry) -> torch.Tensor:
    return torch.empty_strided(entry.shape, entry.stride, dtype=getattr(torch, entry.dtype), device="meta")


def _tensor(key: str, have: Mapping[str, TensorEntry | ExtraEntry]) -> TensorEntry:
    entry = have[key]
    if isinstance(entry, TensorEntry) and entry.storage is not None:
        return entry
    layout = entry.layout if isinstance(entry, TensorEntry) else "not a tensor"
    raise Refused(
        f"nothing can be computed from {key}: {layout}", hint="only dense tensors can be transformed or converted"
    )
