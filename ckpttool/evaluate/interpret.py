"""The value of an expression: torch's operators from a closed list, each checked before it runs.

Expressions come from files that anybody may have written: no operator outside of `operators` is run, none with other
arguments than its own, and none whose result is larger than what may be held.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ckpttool.dtypes import PLAIN
from ckpttool.errors import CkptError, Refused
from ckpttool.evaluate.operators import GETITEM, OPERATORS, is_integer, problem, sizes, unfit
from ckpttool.expression import Argument, Expression, Op, Ref, Special, parts, refs
from ckpttool.limits import limits
from ckpttool.words import a, first_line, human_bytes

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
