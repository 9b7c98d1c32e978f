"""From a torch operator call to an expression: canonical, functional, and the same value wherever it is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from ckpttool.expression import Argument, Expression, Op, Special
from ckpttool.tracing.recorder.memory import opaque

Value = Callable[[torch.Tensor], Expression]

# An operator that gives its first argument's value again, perhaps in other memory.
SAME = frozenset({"detach", "alias", "clone", "contiguous", "lift_fresh", "lift", "lift_fresh_copy", "_pin_memory",
                  "resolve_conj", "resolve_neg", "detach_copy", "alias_copy", "_lazy_clone"})  # fmt: skip
# A view whose success depends on strides; `reshape` gives the same value for any.
_RESHAPES = frozenset(
    {"view.default", "_unsafe_view.default", "_reshape_alias.default", "reshape.default", "view_copy.default"}
)
# Filled tensors: where the fill value stands among the arguments, or the value itself.
_FILLS: Mapping[str, Any] = {
    "zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1, "zero": 0,
}  # fmt: skip
_UNINITIALISED = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"})
_RANDOM_LIKE = frozenset({"rand_like", "randn_like", "randint_like"})  # they read a shape only
_FILL_ARGUMENT: Mapping[str, int] = {"full": 1, "full_like": 1, "new_full": 2, "fill": 1}
_PLACEMENT = frozenset({"device", "pin_memory", "layout", "non_blocking", "generator"})  # where, not what
_LITERAL_LIMIT = 4096  # elements; a constant made outside torch is written into the expression up to here


def call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, value: Value) -> Expression:
    """The value of ``func(*args, **kwargs)``; `out` is what it gave, for its shape and dtype."""
    name = str(func).partition(".")[2]
    base = name.partition(".")[0]
    if base in SAME or (base == "_to_copy" and out.dtype == args[0].dtype):
        return value(args[0])
    if base == "_to_copy":
        return cast(value(args[0]), out.dtype)
    if base in _UNINITIALISED:
        return opaque()
    if base in _FILLS:
        return full(tuple(out.shape), _FILLS[base], out.dtype)
    if base in _FILL_ARGUMENT:
        fill = args[_FILL_ARGUMENT[base]]
        if not isinstance(fill, torch.Tensor):
            return full(tuple(out.shape), fill, out.dtype)
        same = value(fill) if fill.dtype == out.dtype else cast(value(fill), out.dtype)
        return Op("aten.expand.default", (same, tuple(out.shape)))
    if base in _RANDOM_LIKE:
        return opaque()
    if torch.Tag.nondeterministic_seeded in func.tags:
        return opaque(*(value(arg) for arg in args if isinstance(arg, torch.Tensor)))
    if name in _RESHAPES:
        return Op("aten.reshape.default", (value(args[0]), tuple(out.shape)))
    if name == "slice.Tensor":
        return _slice(args, kwargs, value)
    if base == "as_strided":
        return opaque(value(args[0]))  # the caller derives it from the memory where it can
    return Op(
        str(func),
        tuple(argument(arg, value) for arg in args),
        tuple((key, argument(arg, value)) for key, arg in kwargs.items() if key not in _PLACEMENT),
    )


def argument(arg: Any, value: Value) -> Argument:
    """One argument of an operator as expression data; tensors through `value`."""
    if isinstance(arg, torch.Tensor):
        return value(arg)
    if isinstance(arg, (list, tuple)):
        return tuple(argument(item, value) for item in arg)
    for kind, cls in (("dtype", torch.dtype), ("layout", torch.layout), ("memory_format", torch.memory_format)):
        if isinstance(arg, cls):
            return Special(kind, str(arg).removeprefix("torch."))
    if isinstance(arg, complex):
        return Special("complex", repr(arg))
    return arg if isinstance(arg, (type(None), bool, int, float, str)) else opaque()


def cast(source: Expression, dtype: torch.dtype) -> Expression:
    """`source` converted to `dtype`."""
    return Op("aten._to_copy.default", (source,), (("dtype", _dtype(dtype)),))


def full(shape: tuple[int, ...], fill: Any, dtype: torch.dtype) -> Expression:
    """A tensor with one value throughout."""
    fill = Special("complex", repr(fill)) if isinstance(fill, complex) else fill
    return Op("aten.full.default", (shape, fill), (("dtype", _dtype(dtype)),))


def literal(tensor: torch.Tensor) -> Expression:
    """A constant's values, written out; opaque where they cannot be read or are too many."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if not plain or tensor.device.type == "meta" or tensor.is_quantized or tensor.numel() > _LITERAL_LIMIT:
        return opaque()
    shape, values = tuple(tensor.shape), tensor.detach().cpu().reshape(-1).tolist()
    if len(set(map(repr, values))) < 2:  # 0.0 and -0.0 are equal, and not the same
        return full(shape, values[0] if values else 0, tensor.dtype)
    kind = (("dtype", _dtype(tensor.dtype)),)
    items = tuple(
        Op("aten.scalar_tensor.default", (Special("complex", repr(v)) if isinstance(v, complex) else v,), kind)
        for v in values
    )
    stacked = Op("aten.stack.default", (items,))
    return stacked if len(shape) == 1 else Op("aten.reshape.default", (stacked, shape))


@cache
def functional(func: Any) -> Any:
    """The operator that computes what the in-place or ``out=`` operator `func` writes; None where torch has none."""
    namespace, _, rest = str(func).partition(".")
    base, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), base.removesuffix("_"), None)
    if packet is None:
        return None
    wanted = [str(arg.type) for arg in func._schema.arguments if not arg.is_out]
    names = [overload, overload.removesuffix("_out").removesuffix("out") or "default", "default", *packet.overloads()]
    for name in dict.fromkeys(names):
        found = getattr(packet, name, None) if name in packet.overloads() else None
        if found is None or found._schema.is_mutable:
            continue
        if [str(arg.type) for arg in found._schema.arguments] == wanted:
            return found
    return None


def _slice(args: Sequence[Any], kwargs: Mapping[str, Any], value: Value) -> Expression:
    names = dict(zip(("self", "dim", "start", "end", "step"), args)) | dict(kwargs)
    source = names["self"]
    dim = names.get("dim", 0) % max(source.dim(), 1)
    start, end, step = slice(names.get("start"), names.get("end"), names.get("step", 1)).indices(source.shape[dim])
    bounds = (dim, start, max(start, end)) + ((step,) if step != 1 else ())
    return Op("aten.slice.Tensor", (value(source), *bounds))


def _dtype(dtype: torch.dtype) -> Special:
    return Special("dtype", str(dtype).removeprefix("torch."))
