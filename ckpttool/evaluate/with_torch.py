"""Evaluates expressions with torch, one output at a time. Imported only where a plan holds more than renames."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ckpttool.checkpoint import ExtraEntry, Lazy, Span, Storage, TensorEntry, contiguous_stride
from ckpttool.errors import CkptError, Refused
from ckpttool.expression import Argument, Expression, Op, Ref, Special, refs
from ckpttool.io.ranges import read_span
from ckpttool.words import a

Load = Callable[[str], torch.Tensor]
_NAMESPACES = ("aten", "prims")


def entry_of(key: str, source: Expression, have: Mapping[str, TensorEntry | ExtraEntry]) -> TensorEntry:
    """The entry `key` whose value is `source`: a view where it is one, else bytes that are computed when written.

    Dtype and shape are inferred now. Raises `Refused` where an operator does not fit its arguments.
    """
    read = {name: _tensor(name, have) for name in refs(source)}
    leaves = {name: _on_meta(entry) for name, entry in read.items()}

    def compute() -> torch.Tensor:
        return evaluate(source, lambda name: load(read[name]))

    try:
        result = evaluate(source, leaves.__getitem__)
    except NeedsValues:
        result = compute()
    shape, dtype = tuple(result.shape), str(result.dtype).removeprefix("torch.")
    for name, leaf in leaves.items():
        at = _offset(result, leaf, read[name])
        if at is not None:
            return TensorEntry(key, dtype, shape, result.stride(), at, read[name].storage)
    lazy = Lazy(result.numel() * result.element_size(), lambda: [to_bytes(compute())])
    return TensorEntry(key, dtype, shape, contiguous_stride(shape), 0, Storage(lazy))


def _offset(result: torch.Tensor, leaf: torch.Tensor, entry: TensorEntry) -> int | None:
    """The offset of `result` in the entry's storage, in elements; None where it is no view of `leaf`."""
    if result.layout != torch.strided or result.is_conj() or result.is_neg():
        return None
    if not result.numel() or result.untyped_storage()._cdata != leaf.untyped_storage()._cdata:
        return None
    size = result.element_size()
    at, rest = divmod(entry.offset * leaf.element_size() + int(result.storage_offset()) * size, size)
    return at if not rest else None


class NeedsValues(Refused):
    """An operator whose result has a shape that depends on values cannot run on tensors without data."""


def evaluate(expression: Expression, load: Load) -> torch.Tensor:
    """The value of `expression`, with `load(key)` for its leaves, on their device; each is loaded once.

    Raises `Refused` where an operator does not fit its arguments, `CkptError` for an operator that is not allowed.
    """
    leaves = {key: load(key) for key in dict.fromkeys(refs(expression))}
    device = next((leaf.device for leaf in leaves.values()), torch.device("cpu"))
    known: dict[int, Any] = {}  # a part that occurs twice is computed once

    def value(node: Argument) -> Any:
        if isinstance(node, Ref):
            return leaves[node.key]
        if isinstance(node, Op):
            if id(node) not in known:
                arguments = [value(arg) for arg in node.args], {name: value(arg) for name, arg in node.kwargs}
                known[id(node)] = _apply(node.op, *arguments, device)
            return known[id(node)]
        if isinstance(node, Special):
            return _special(node, device)
        return [value(item) for item in node] if isinstance(node, tuple) else node

    with torch.no_grad():
        result = value(expression)
    if not isinstance(result, torch.Tensor):
        raise CkptError(f"an expression gives {a(result)}, not a tensor", hint="check the plan")
    return result


def _apply(name: str, args: list[Any], kwargs: dict[str, Any], device: torch.device) -> Any:
    run = operator.getitem if name == "getitem" else _operator(name)
    if isinstance(run, torch._ops.OpOverload) and any(arg.name == "device" for arg in run._schema.arguments):
        kwargs.setdefault("device", device)  # constants have to be where the tensors are
    try:
        return run(*args, **kwargs)
    except Exception as error:  # whatever an operator raises, it says that its arguments do not fit
        values = isinstance(error, NotImplementedError) and device.type == "meta"
        raise (NeedsValues if values else Refused)(
            f"{name} does not fit: {(str(error).splitlines() or [type(error).__name__])[0]}",
            hint="the checkpoint's shapes or dtypes are not the model's",
        ) from error


def _operator(name: str) -> Any:
    """The torch operator of that name. Raises `CkptError` for all that is not a function of tensors and numbers.

    A plan is data that somebody else may have written, and ``aten`` has operators that write files (``save``,
    ``from_file``) or to their arguments.
    """
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    if namespace in _NAMESPACES and packet.isidentifier() and not packet.startswith("__"):
        found = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload or "default", None)
        if isinstance(found, torch._ops.OpOverload) and _is_function(found):
            return found
    raise CkptError(f"{name!r} is not an operator that a plan may hold", hint="allowed are functional aten operators")


def _is_function(found: torch._ops.OpOverload) -> bool:
    schema = found._schema
    return (
        not schema.is_mutable
        and bool(schema.returns)
        and torch.Tag.nondeterministic_seeded not in found.tags
        and all(str(returned.type) in ("Tensor", "List[Tensor]") for returned in schema.returns)
        and not any(arg.name == "filename" for arg in schema.arguments)
    )


def _special(node: Special, device: torch.device) -> Any:
    if node.kind == "device":
        return device
    found = _complex(node.name) if node.kind == "complex" else getattr(torch, node.name, None)
    if not isinstance(found, (torch.dtype, torch.layout, torch.memory_format, complex)):
        raise CkptError(f"torch has no {node.kind} {node.name!r}", hint="the plan was made by another torch")
    return found


def _complex(text: str) -> complex | None:
    try:
        return complex(text)
    except ValueError:
        return None


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
        whole = bytearray().join(data.produce())
        return torch.frombuffer(whole, dtype=dtype).as_strided(entry.shape, entry.stride, entry.offset)
    count = 1 + sum((size - 1) * stride for size, stride in zip(entry.shape, entry.stride))
    size = dtype.itemsize
    read = read_span(Span(data.path, data.offset + entry.offset * size, count * size))
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
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def difference(left: torch.Tensor, right: torch.Tensor, rtol: float, atol: float) -> str | None:
    """How two tensors differ, in words; None where every element is within the tolerances (NaN equals NaN).

    With both tolerances 0 they are known to differ in some byte.
    """
    wide = torch.complex128 if left.is_complex() else torch.float64
    a, b = left.to(wide), right.to(wide)
    equal = (a == b) | (a.isnan() & b.isnan())
    if not (left.is_floating_point() or left.is_complex()):  # float64 has no room for all of int64
        equal &= (_bits(left) == _bits(right)).reshape(*left.shape, left.element_size()).all(-1)
    close = equal | torch.isclose(a, b, rtol=rtol, atol=atol) if rtol or atol else equal
    count = int((~close).sum())
    if count:
        far = torch.where(equal, torch.zeros_like(a), a - b).abs().nan_to_num(nan=float("inf")).max().item()
        distance = f", by {far:.3g} at most" if far else ""
        return f"{count:,} of {left.numel():,} elements differ{distance}"
    return None if rtol or atol else "the values are equal, their bytes are not (-0.0, or another kind of NaN)"


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
