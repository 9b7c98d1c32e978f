"""Evaluate expressions with torch. Each operator is checked before it runs."""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ckpttool.core.checkpoint import (
    Entries,
    Lazy,
    Span,
    Storage,
    TensorEntry,
    in_row_major,
)
from ckpttool.core.dtypes import PLAIN
from ckpttool.core.errors import CkptError, Refused
from ckpttool.core.expression import Argument, Expression, Op, Ref, Special, parts, refs
from ckpttool.core.limits import limits
from ckpttool.core.text import a, first_line, human_bytes
from ckpttool.evaluate.ops import GETITEM, OPS, is_integer, nbytes_of, reason_not_allowed
from ckpttool.io.pieces import read_all, read_span

Load = Callable[[str], torch.Tensor]
# Is called with each operator that ran, its arguments and its result.
Watch = Callable[[Op, list[Any], Any], None]


class NeedsValues(Refused):
    """The shape of an operator's result depends on values, so it cannot run on tensors without
    data.
    """


class Held:
    """Count the bytes that are held while an expression is computed, each view as if it were a
    copy.
    """

    def __init__(self, leaves: Iterable[torch.Tensor]) -> None:
        self.most = max(limits().made_bytes, limits().made_times * sum(map(nbytes_of, leaves)))
        self.bytes = self.peak = 0

    def check(self, name: str, more: int) -> None:
        if self.bytes + more <= self.most:
            return
        limit = "made_bytes" if self.most == limits().made_bytes else "made_times"
        raise Refused(
            f"{name} makes {human_bytes(more)} where {human_bytes(self.most)} may be held:"
            f" {limits().named(limit, self.bytes + more)}",
            hint="a larger --max-memory allows it",
        )


def evaluate(
    expression: Expression, load: Load, held: Held | None = None, watch: Watch | None = None
) -> torch.Tensor:
    """Return the value of `expression`. `load(key)` is called once for each key; the result is on
    the same device.

    Raises `Refused` if an operator does not fit its arguments, `CkptError` for an operator that is
    not allowed.
    """
    leaves = {key: load(key) for key in dict.fromkeys(refs(expression))}
    device = next((leaf.device for leaf in leaves.values()), torch.device("cpu"))
    held = held or Held(leaves.values())
    results: dict[int, Any] = {}  # a part that occurs twice is computed once, and kept
    repeated = {node for node, count in Counter(map(id, parts(expression))).items() if count > 1}

    def value(node: Argument) -> Any:
        if isinstance(node, Ref):
            return leaves[node.key]
        if isinstance(node, Special):
            return _special(node, device)
        if isinstance(node, tuple):
            return [value(item) for item in node]
        if not isinstance(node, Op):
            return node
        if id(node) in results:
            return results[id(node)]
        before = held.bytes
        args = [value(arg) for arg in node.args]
        kwargs = {name: value(arg) for name, arg in node.kwargs}
        result = _apply(node.op, args, kwargs, device, held)
        if watch is not None:
            watch(node, [*args, *kwargs.values()], result)
        if id(node) in repeated:
            results[id(node)] = result
        else:
            held.bytes = before
        held.bytes += nbytes_of(result)
        held.peak = max(held.peak, held.bytes)
        return result

    try:
        with torch.no_grad():
            result = value(expression)
    finally:  # the closure refers to itself, and would keep these until the garbage is collected
        leaves.clear()
        results.clear()
    if not isinstance(result, torch.Tensor):
        raise CkptError(f"an expression gives {a(result)}, not a tensor", hint="check the plan")
    return result


def _apply(
    name: str, args: list[Any], kwargs: dict[str, Any], device: torch.device, held: Held
) -> Any:
    """Apply an operator, once its arguments are known to fit and its result to have room."""
    reason = reason_not_allowed(name)
    if reason is not None:
        raise CkptError(reason, hint="docs/safety.md lists the operators that a plan may hold")
    if name == GETITEM:
        return _item(args, kwargs)
    _, packet, overload = name.split(".")
    operator = getattr(getattr(torch.ops.aten, packet, None), overload, None)
    if not isinstance(operator, torch._ops.OpOverload):
        raise CkptError(
            f"this torch has no operator {name}", hint="the plan was made by another torch"
        )
    given = _bind(name, operator, args, kwargs)
    if any(arg.name == "device" for arg in operator._schema.arguments):
        kwargs = {**kwargs, "device": device}  # constants must be on the device of the tensors
    kwargs.pop("pin_memory", None)
    reason = OPS[name].check(given)
    if reason is not None:
        raise _unfit(name, reason)
    call: Callable[..., Any] = _ON_ELEMENTS.get(name, operator)
    held.check(name, _result_bytes(name, call, args, kwargs, given))
    try:
        return call(*args, **kwargs)
    except Exception as error:  # any error of an operator means that its arguments do not fit
        needs_values = isinstance(error, NotImplementedError) and device.type == "meta"
        kind = NeedsValues if needs_values else Refused
        raise _unfit(name, first_line(error), kind) from error


def _item(args: list[Any], kwargs: dict[str, Any]) -> Any:
    is_unknown = len(args) != 2 or kwargs
    tensors, index = (None, None) if is_unknown else args
    if not isinstance(tensors, (list, tuple)) or type(index) is not int:
        raise _unfit(GETITEM, "it takes one of several tensors, by its number")
    if not 0 <= index < len(tensors):
        raise _unfit(GETITEM, f"tensor {index} of {len(tensors)} does not exist")
    return tensors[index]


def _unfit(name: str, reason: str, kind: type[Refused] = Refused) -> Refused:
    return kind(
        f"{name} does not fit: {reason}",
        hint="the checkpoint's shapes or dtypes are not the model's",
    )


def _result_bytes(
    name: str, call: Any, args: list[Any], kwargs: dict[str, Any], given: Mapping[str, Any]
) -> int:
    """Run the operator on tensors without data; if its result depends on values, use the bound in
    its row.
    """
    meta_kwargs = {key: _without_data(arg) for key, arg in kwargs.items()}
    if "device" in kwargs:
        meta_kwargs["device"] = "meta"
    try:
        return nbytes_of(call(*map(_without_data, args), **meta_kwargs))
    except Exception as error:
        most_bytes = OPS[name].most_bytes
        if most_bytes is not None and isinstance(error, NotImplementedError):
            return most_bytes(given)
        raise _unfit(name, first_line(error)) from error


def _without_data(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        return torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device="meta")
    if isinstance(arg, list):
        return list(map(_without_data, arg))
    return arg


def _bind(
    name: str, operator: torch._ops.OpOverload, args: list[Any], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments by name, with defaults. Raises `Refused` for arguments of another
    type.
    """
    schema = operator._schema.arguments
    positions = [arg.name for arg in schema if not arg.kwarg_only]
    given = {**dict(zip(positions, args)), **kwargs}
    is_unknown = not given.keys() <= {arg.name for arg in schema}
    if is_unknown or len(args) > len(positions) or len(given) < len(args) + len(kwargs):
        raise _unfit(name, "too many arguments, or unknown ones")
    bound: dict[str, Any] = {}
    for arg in schema:
        if arg.has_default_value():
            bound[arg.name] = arg.default_value
        elif arg.name not in given:
            raise _unfit(name, f"it needs {arg.name}")
        if arg.name in given:
            bound[arg.name] = given[arg.name]
            if not _has_type(str(arg.real_type), given[arg.name]):
                raise _unfit(name, f"{arg.name} is not a {arg.real_type}")
    return bound


def _has_type(kind: str, value: Any) -> bool:
    """Return whether the value has that type of torch's schemas. Numbers are accepted for tensors,
    as in torch.
    """
    inner = re.fullmatch(r"(Optional|List)\[(.*)\]", kind)
    if inner is None:
        return _TYPES[kind](value)
    if inner[1] == "Optional":
        return value is None or _has_type(inner[2], value)
    return isinstance(value, list) and all(_has_type(inner[2], item) for item in value)


def _is_number(value: Any) -> bool:
    return is_integer(value) or isinstance(value, (bool, float, complex))


_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "Tensor": lambda value: isinstance(value, torch.Tensor) or _is_number(value),
    "int": is_integer,
    "SymInt": is_integer,
    "float": lambda value: isinstance(value, float) or is_integer(value),
    "number": _is_number,
    "bool": lambda value: isinstance(value, bool),
    "str": lambda value: isinstance(value, str),
    "ScalarType": lambda value: str(value).removeprefix("torch.") in PLAIN,
    "Layout": lambda value: value == torch.strided,
    "MemoryFormat": lambda value: isinstance(value, torch.memory_format),
    "Device": lambda value: isinstance(value, torch.device),
}


def _as_strided(
    tensor: torch.Tensor, size: Any, stride: Any, storage_offset: int | None = None
) -> torch.Tensor:
    row_major = tensor.contiguous()
    return row_major.as_strided(size, stride, row_major.storage_offset() + (storage_offset or 0))


def _as_strided_scatter(
    tensor: torch.Tensor,
    src: torch.Tensor,
    size: Any,
    stride: Any,
    storage_offset: int | None = None,
) -> torch.Tensor:
    changed = tensor.clone(memory_format=torch.contiguous_format)
    changed.as_strided(size, stride, storage_offset or 0).copy_(src)
    return changed


# Operators that count elements of a storage. Here they count the tensor's elements in row-major
# order: a file may store them in another order.
_ON_ELEMENTS: Mapping[str, Callable[..., torch.Tensor]] = {
    "aten.as_strided.default": _as_strided,
    "aten.as_strided_scatter.default": _as_strided_scatter,
}


def _special(node: Special, device: torch.device) -> Any:
    if node.kind == "device":
        return device
    value = getattr(torch, node.name, None)
    if node.kind == "complex":
        try:
            value = complex(node.name)
        except ValueError:
            value = None
    if not isinstance(value, (torch.dtype, torch.layout, torch.memory_format, complex)):
        raise CkptError(
            f"torch has no {node.kind} {node.name!r}", hint="the plan was made by another torch"
        )
    return value


def entry_of(key: str, source: Expression, entries: Entries) -> TensorEntry:
    """Return the entry `key` with the value of `source`: a view if it is one, else bytes computed
    when written.

    Dtype and shape are inferred now. Raises `Refused` if an operator does not fit its arguments.
    """
    read: dict[str, TensorEntry] = {}
    leaves: dict[str, torch.Tensor] = {}
    for name in dict.fromkeys(refs(source)):
        entry = entries[name]
        if not isinstance(entry, TensorEntry) or entry.storage is None:
            layout = entry.layout if isinstance(entry, TensorEntry) else "not a tensor"
            hint = "only dense tensors can be transformed or converted"
            raise Refused(f"nothing can be computed from {name}: {layout}", hint=hint)
        read[name] = entry
        dtype = _dtype(entry.dtype)
        leaves[name] = torch.empty_strided(entry.shape, entry.stride, dtype=dtype, device="meta")
    held = Held(leaves.values())

    def compute() -> torch.Tensor:
        return evaluate(source, lambda name: load(read[name]))

    try:
        result = evaluate(source, leaves.__getitem__, held)
    except NeedsValues:
        result = compute()
    if result.numel() and not result.is_conj() and not result.is_neg():
        for name, leaf in leaves.items():
            view = _view_of(read[name], leaf, result)
            if view is not None:
                return view.under(key)
    reads = sum(entry.nbytes for entry in read.values())
    storages = [entry.storage for entry in read.values() if entry.storage is not None]
    held_by_source = max((storage.held for storage in storages), default=0)
    nbytes = result.numel() * result.element_size()
    copied = 0 if result.is_contiguous() else nbytes
    memory = reads + held.peak + copied + held_by_source
    lazy = Lazy(nbytes, lambda: [to_bytes(compute())], reads=reads, memory=memory)
    storage = Storage(lazy, storages[0] if storages else None)
    return in_row_major(key, _dtype_name(result), tuple(result.shape), storage)


def _view_of(entry: TensorEntry, leaf: torch.Tensor, result: torch.Tensor) -> TensorEntry | None:
    """Return the result as a view of the entry, whose tensor is `leaf`; None if it is not one."""
    if result.untyped_storage()._cdata != leaf.untyped_storage()._cdata:
        return None
    size = result.element_size()
    start = entry.offset * leaf.element_size() + int(result.storage_offset()) * size
    if start % size:
        return None
    shape, stride = tuple(result.shape), result.stride()
    return TensorEntry(entry.key, _dtype_name(result), shape, stride, start // size, entry.storage)


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CkptError(f"this torch has no dtype {name!r}", hint="use a newer torch")
    return dtype


def load(entry: TensorEntry) -> torch.Tensor:
    """Return the entry as a tensor on the CPU with its strides in the file. Reads only the bytes
    that it spans.
    """
    assert entry.storage is not None
    dtype, data = _dtype(entry.dtype), entry.storage.data
    if not entry.numel:
        return torch.empty(entry.shape, dtype=dtype)
    if isinstance(data, Lazy):
        whole = torch.frombuffer(read_all(data), dtype=dtype)
        return whole.as_strided(entry.shape, entry.stride, entry.offset)
    start = data.offset + entry.offset * dtype.itemsize
    nbytes = (entry.end - entry.offset) * dtype.itemsize
    part = torch.frombuffer(read_span(Span(data.path, start, nbytes)), dtype=dtype)
    return part.as_strided(entry.shape, entry.stride)


def storage_of(storage: Storage) -> torch.UntypedStorage:
    """Return the complete storage in memory."""
    data = storage.data
    buffer = read_all(data) if isinstance(data, Lazy) else read_span(data)
    if not buffer:
        return torch.empty(0, dtype=torch.uint8).untyped_storage()
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def arrange(old: Storage, values: Sequence[tuple[TensorEntry, TensorEntry]]) -> Storage:
    """Return a storage like `old` in which the place of each (place, value) pair holds that value.

    Writing it raises `Refused` if elements at one place in memory get different values.
    """

    def produce() -> list[memoryview]:
        assert isinstance(old.data, Span)
        storage = torch.frombuffer(read_span(old.data), dtype=torch.uint8)
        pairs = []
        for place, new in values:
            view = torch.empty(0, dtype=_dtype(place.dtype))
            view.set_(storage.untyped_storage(), place.offset, place.shape, place.stride)
            pairs.append((view, load(new), place.key))
        for view, value, _ in pairs:
            _fill_once(view, value)
        for view, value, key in pairs:
            if not same_bits(view, value):
                message = f"{key} shares memory with another weight that gets another value"
                if 0 in view.stride():
                    message = f"{key} repeats elements in memory, and its new values differ there"
                raise Refused(message, hint="nothing was written")
        return [to_bytes(storage)]

    return Storage(Lazy(old.nbytes, produce))


def _fill_once(view: torch.Tensor, value: torch.Tensor) -> None:
    """Copy the value into the view; of an expanded dimension, whose elements are one in memory, the
    first.
    """
    for dim, (size, step) in enumerate(zip(view.shape, view.stride())):
        if size > 1 and step == 0:
            view, value = view.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    view.copy_(value)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors of one dtype and shape have the same bytes (NaN equals itself, 0.0
    is not -0.0).
    """

    def bits(tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
        # a single element may have the stride 0
        return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)

    return torch.equal(bits(left), bits(right))


def to_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the tensor's elements in row-major order, without a copy if it is contiguous."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    array = ctypes.c_char * (tensor.numel() * tensor.element_size())
    buffer = array.from_address(tensor.data_ptr()) if tensor.numel() else array()
    buffer._keep_alive = tensor  # type: ignore[attr-defined]  # the memory belongs to the tensor
    return memoryview(buffer).cast("B")
