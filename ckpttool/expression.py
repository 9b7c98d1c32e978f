"""Expressions: how one tensor is computed from others. A `Ref` names a tensor, an `Op` applies a torch operator.

Expressions are data: they are saved as JSON (see CONTRACT in docs/) and evaluated only by `evaluate/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Union, overload

from ckpttool.errors import CkptError


@dataclass(frozen=True, slots=True)
class Ref:
    """The tensor that stands under `key`."""

    key: str


@dataclass(frozen=True, slots=True)
class Special:
    """An argument that JSON has no literal for: `kind` is ``dtype``, ``layout``, ``memory_format`` or ``device``."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class Op:
    """`op` is the operator's full name: ``aten.cat.default``, ``getitem``, or ``opaque`` (no operator)."""

    op: str
    args: tuple["Argument", ...] = ()
    kwargs: tuple[tuple[str, "Argument"], ...] = field(default=())


Expression = Union[Ref, Op]
Argument = Union[Ref, Op, Special, None, bool, int, float, str, tuple["Argument", ...]]

OPAQUE = "opaque"  # computed by code that cannot be written down as operators; args are the tensors that it read
MAX_DEPTH = 200  # operators and lists inside each other that are read from JSON; evaluation recurses as deep
_SPECIAL_KINDS = ("dtype", "layout", "memory_format", "device", "complex")


def refs(expression: Argument) -> Iterator[str]:
    """Every key the expression reads, in order of appearance, with repeats."""
    if isinstance(expression, Ref):
        yield expression.key
    elif isinstance(expression, Op):
        yield from refs(expression.args)
        for _, value in expression.kwargs:
            yield from refs(value)
    elif isinstance(expression, tuple):
        for item in expression:
            yield from refs(item)


def is_opaque(expression: Argument) -> bool:
    """True where some part of the value was computed by code that cannot be written down as operators."""
    if isinstance(expression, Op):
        return expression.op == OPAQUE or is_opaque(expression.args) or any(is_opaque(v) for _, v in expression.kwargs)
    return isinstance(expression, tuple) and any(is_opaque(item) for item in expression)


@overload
def substitute(expression: Expression, replace: Callable[[str], Expression]) -> Expression: ...


@overload
def substitute(expression: Argument, replace: Callable[[str], Argument]) -> Argument: ...


def substitute(expression: Argument, replace: Callable[[str], Argument]) -> Argument:
    """The expression with every `Ref(key)` replaced by `replace(key)`."""
    if isinstance(expression, Ref):
        return replace(expression.key)
    if isinstance(expression, Op):
        args = tuple(substitute(arg, replace) for arg in expression.args)
        return Op(expression.op, args, tuple((name, substitute(value, replace)) for name, value in expression.kwargs))
    if isinstance(expression, tuple):
        return tuple(substitute(item, replace) for item in expression)
    return expression


def to_json(expression: Argument) -> Any:
    """The JSON form of the contract: ``{"ref": KEY}`` or ``{"op": NAME, "args": [...], "kwargs": {...}}``."""
    if isinstance(expression, Ref):
        return {"ref": expression.key}
    if isinstance(expression, Op):
        return {
            "op": expression.op,
            "args": [to_json(arg) for arg in expression.args],
            "kwargs": {name: to_json(value) for name, value in expression.kwargs},
        }
    if isinstance(expression, Special):
        return {expression.kind: expression.name}
    if isinstance(expression, tuple):
        return [to_json(item) for item in expression]
    if isinstance(expression, float) and not isfinite(expression):  # inf and nan are no JSON numbers
        return {"float": repr(expression)}
    return expression


def from_json(value: Any, depth: int = 0) -> Argument:
    """Reads what `to_json` wrote. Raises `CkptError` on anything else, or if nested deeper than `MAX_DEPTH`."""
    if depth > MAX_DEPTH:
        raise CkptError(f"an expression is nested more than {MAX_DEPTH} deep", hint=_FORM)
    if isinstance(value, Mapping):
        return _object(value, depth)
    if isinstance(value, list):
        return tuple(from_json(item, depth + 1) for item in value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise _no_expression(value)


def _object(value: Mapping[str, Any], depth: int) -> Argument:
    if "op" in value:
        args, kwargs = value.get("args", []), value.get("kwargs", {})
        known = set(value) <= {"op", "args", "kwargs"} and isinstance(value["op"], str)
        if known and isinstance(args, list) and isinstance(kwargs, Mapping):
            items = tuple((str(name), from_json(item, depth + 1)) for name, item in kwargs.items())
            return Op(value["op"], tuple(from_json(arg, depth + 1) for arg in args), items)
    elif len(value) == 1:
        ((kind, name),) = value.items()
        if isinstance(name, str) and kind == "ref":
            return Ref(name)
        if isinstance(name, str) and kind in _SPECIAL_KINDS:
            return Special(kind, name)
        if name in ("inf", "-inf", "nan") and kind == "float":
            return float(name)
    raise _no_expression(value)


_FORM = 'an expression is {"ref": KEY} or {"op": "aten.cat.default", "args": [...], "kwargs": {...}}'


def _no_expression(value: Any) -> CkptError:
    return CkptError(f"not an expression: {str(value)[:80]!r}", hint=_FORM)
