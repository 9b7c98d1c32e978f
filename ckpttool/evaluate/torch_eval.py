"""Evaluate expressions with torch: each operator is checked before it runs."""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ckpttool.core.checkpoint import ExtraEntry, Lazy, Span, Storage, TensorEntry, in_row_major
from ckpttool.core.dtypes import PLAIN
from ckpttool.core.errors import CkptError, Refused
from ckpttool.core.expression import Argument, Expression, Op, Ref, Special, parts, refs
from ckpttool.core.limits import limits
from ckpttool.core.text import a, first_line, human_bytes
from ckpttool.evaluate.ops import GETITEM, OPERATORS, is_integer, problem, sizes, unfit
from ckpttool.io.ranges import read_all, read_span

Load = Callable[[str], torch.Tensor]


class NeedsValues(Refused):
    """An operator whose result has a shape that depends on values cannot run on tensors without data."""


class Held:
    """Counts the bytes that are held while an expression is computed, each view as if it were a copy."""

    def __init__(self, leaves: Iterable[torch.Tensor]) -> None:
        self.most = max(limits().made_bytes, limits().made_times * sum(map(sizes, leaves)))
        self.bytes = 0
        self.peak = 0

    def check(self, name: str, more: int) -> None:
        """Raises `Refused` where there is no room for `more` bytes."""
        if self.bytes + more > self.most:
            raise Refused(
                f"{name} makes {human_bytes(more)} where {human_bytes(self.most)} may be held: "
                + limits().named("made_bytes" if self.most == limits().made_bytes else "made_times"),
                hint=f"--limit made_bytes={2 * (self.bytes + more)} allows it",
            )


def evaluate(expression: Expression, load: Load, held: Held | None = None) -> torch.Tensor:
    """The value of `expression`, with `load(key)` for its leaves, on their device; each is loaded once.

    `held` counts what it takes.

    Raises `Refused` where an operator does not fit its arguments, `CkptError` for an operator that is not allowed.
    """
    leaves = {key: load(key) for key in dict.fromkeys(refs(expression))}
    device = next((leaf.device for leaf in leaves.values()), torch.device("cpu"))
    held = held or Held(leaves.values())
    known: dict[int, Any] = {}  # a part that occurs twice is computed once, and kept
    repeated = {node for node, count in Counter(map(id, parts(expression))).items() if count > 1}

    def value(node: Argument) -> Any:
        if isinstance(node, Ref):
            return leaves[node.key]
        if isinstance(node, Op):
            return known[id(node)] if id(node) in known else computed(node)
        if isinstance(node, Special):
            return _special(node, device)
        return [value(item) for item in node] if isinstance(node, tuple) else node

    def computed(node: Op) -> Any:
        before = held.bytes
        arguments = [value(arg) for arg in node.args], {name: value(arg) for name, arg in node.kwargs}
        found = _apply(node.op, *arguments, device, held)
        if id(node) in repeated:
            known[id(node)] = found
        else:
            held.bytes = before
        held.bytes += sizes(found)
        held.peak = max(held.peak, held.bytes)
        return found

    try:
        with torch.no_grad():
            result = value(expression)
    finally:  # the two functions hold each other, and would hold these until the garbage is collected
        leaves.clear()
        known.clear()
    if not isinstance(result, torch.Tensor):
        raise CkptError(f"an expression gives {a(result)}, not a tensor", hint="check the plan")
    return result


def _apply(name: str, args: list[Any], kwargs: dict[str, Any], device: torch.device, held: Held) -> Any:
    """What the operator gives. Nothing of torch runs before the arguments are known to fit, and the result to."""
    said = problem(name)
    if said is not None:
        raise CkptError(said, hint="docs/safety.md lists the operators that may stand in a plan")
    if name == GETITEM:
        return _item(args, kwargs)
    run = _operator(name)
    given = _bound(name, run, args, kwargs)
    if any(arg.name == "device" for arg in run._schema.arguments):
        kwargs = {**kwargs, "device": device}  # constants have to be where the tensors are
    kwargs.pop("pin_memory", None)
    said = unfit(name, given)
    if said is not None:
        raise _unfit(name, said)
    call: Callable[..., Any] = _OWN.get(name, run)
    held.check(name, _size(name, call, args, kwargs, given))
    try:
        return call(*args, **kwargs)
    except Exception as error:  # whatever an operator raises, it says that its arguments do not fit
        values = isinstance(error, NotImplementedError) and device.type == "meta"
        raise _unfit(name, first_line(error), NeedsValues if values else Refused) from error


def _unfit(name: str, said: str, kind: type[Refused] = Refused) -> Refused:
    return kind(f"{name} does not fit: {said}", hint="the checkpoint's shapes or dtypes are not the model's")


def _item(args: list[Any], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 2 or not isinstance(args[0], (list, tuple)) or type(args[1]) is not int:
        raise _unfit(GETITEM, "it takes one of several tensors, by its number")
    if not 0 <= args[1] < len(args[0]):
        raise _unfit(GETITEM, f"there is no tensor {args[1]} of {len(args[0])}")
    return args[0][args[1]]


def _size(name: str, call: Any, args: list[Any], kwargs: dict[str, Any], given: Mapping[str, Any]) -> int:
    """Bytes of what the operator gives: torch says it of tensors without data, or the list where values tell."""
    without = {**kwargs, "device": "meta"} if "device" in kwargs else kwargs
    try:
        return sizes(call(*map(_without_data, args), **{key: _without_data(arg) for key, arg in without.items()}))
    except Exception as error:
        most = OPERATORS[name].most
        if most is not None and isinstance(error, NotImplementedError):
            return most(given)
        raise _unfit(name, first_line(error)) from error


def _without_data(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        return torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device="meta")
    return [_without_data(item) for item in arg] if isinstance(arg, list) else arg


def _bound(name: str, run: torch._ops.OpOverload, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by their names, what is left out with its default. Raises `Refused` for those of another type."""
    schema = {arg.name: arg for arg in run._schema.arguments}
    positions = [arg for arg in schema.values() if not arg.kwarg_only]
    given = dict(zip((arg.name for arg in positions), args)) | kwargs
    if len(args) > len(positions) or len(given) < len(args) + len(kwargs) or not given.keys() <= schema.keys():
        raise _unfit(name, "too many arguments, or unknown ones")
    for arg in schema.values():
        if arg.name not in given and not arg.has_default_value():
            raise _unfit(name, f"it needs {arg.name}")
        if arg.name in given and not _is_a(str(arg.real_type), given[arg.name]):
            raise _unfit(name, f"{arg.name} is not a {arg.real_type}")
    return {arg.name: arg.default_value for arg in schema.values() if arg.has_default_value()} | given


def _is_a(kind: str, value: Any) -> bool:
    """Whether the value is of that type of torch's schemas. Numbers do for tensors, as in torch."""
    inner = _INSIDE.fullmatch(kind)
    if inner is not None and inner[1] == "Optional":
        return value is None or _is_a(inner[2], value)
    if inner is not None:
        return isinstance(value, list) and all(_is_a(inner[2], item) for item in value)
    return _TYPES[kind](value)


_INSIDE = re.compile(r"(Optional|List)\[(.*)\]")


def _is_number(value: Any) -> bool:
    return is_integer(value) or isinstance(value, (bool, float, complex))


def _is_plain(value: Any) -> bool:
    return str(value).removeprefix("torch.") in PLAIN


_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "Tensor": lambda value: isinstance(value, torch.Tensor) or _is_number(value),
    "int": is_integer,
    "SymInt": is_integer,
    "float": lambda value: isinstance(value, float) or is_integer(value),
    "number": _is_number,
    "bool": lambda value: isinstance(value, bool),
    "str": lambda value: isinstance(value, str),
    "ScalarType": _is_plain,
    "Layout": lambda value: value == torch.strided,
    "MemoryFormat": lambda value: isinstance(value, torch.memory_format),
    "Device": lambda value: isinstance(value, torch.device),
}


def _operator(name: str) -> torch._ops.OpOverload:
    """The torch operator of that name, which is one of the list."""
    _, packet, overload = name.split(".")
    found = getattr(getattr(torch.ops.aten, packet, None), overload, None)
    if not isinstance(found, torch._ops.OpOverload):
        raise CkptError(f"this torch has no operator {name}", hint="the plan was made by another torch")
    return found


def _strided(tensor: torch.Tensor, size: Any, stride: Any, storage_offset: int | None = None) -> torch.Tensor:
    """`as_strided` over the tensor's elements in row-major order, wherever they lie."""
    row_major = tensor.contiguous()
    return row_major.as_strided(size, stride, row_major.storage_offset() + (storage_offset or 0))


def _strided_scatter(
    tensor: torch.Tensor, src: torch.Tensor, size: Any, stride: Any, storage_offset: int | None = None
) -> torch.Tensor:
    """`as_strided_scatter` over the tensor's elements in row-major order."""
    changed = tensor.clone(memory_format=torch.contiguous_format)
    changed.as_strided(size, stride, storage_offset or 0).copy_(src)
    return changed


# Operators whose arguments count elements of a storage: here of the tensor, which a file may keep in another order.
_OWN: Mapping[str, Callable[..., torch.Tensor]] = {
    "aten.as_strided.default": _strided,
    "aten.as_strided_scatter.default": _strided_scatter,
}


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
