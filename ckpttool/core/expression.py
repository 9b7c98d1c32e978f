"""Expressions: how one tensor is computed from others. A `Ref` names a tensor, an `Op` applies a
torch operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from math import isfinite
from typing import Any, Union, overload

from ckpttool.core.errors import Problem
from ckpttool.core.schema import JsonKind, Path, at
from ckpttool.core.strides import Shape
from ckpttool.core.values import dataclass


@dataclass(frozen=True, slots=True)
class Ref:
    """The tensor with the key."""

    key: str


@dataclass(frozen=True, slots=True)
class Special:
    """An argument that JSON has no literal for: `kind` is ``dtype``, ``layout``, ``memory_format``
    or ``device``.
    """

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class Op:
    """`op` is the operator's full name: ``aten.cat.default``, ``getitem``, or ``opaque`` (no
    operator).
    """

    op: str
    args: tuple["Argument", ...] = ()
    kwargs: tuple[tuple[str, "Argument"], ...] = field(default=())


Expression = Union[Ref, Op]
Argument = Union[Ref, Op, Special, None, bool, int, float, str, tuple["Argument", ...]]

CAST = "aten._to_copy.default"
# computed by code that cannot be written down as operators; args are the tensors that it read
OPAQUE = "opaque"
LOADED, SAVED = (
    "model.load",
    "model.save",
)  # a run of a model's own code; args are the name there, and the tensors that it read
BY_CODE = {LOADED: "load_state_dict", SAVED: "state_dict"}  # way -> the model's method
# operators and lists inside each other that are read from JSON; evaluation recurses as deep
MAX_DEPTH = 200
_SPECIAL_KINDS = ("dtype", "layout", "memory_format", "device", "complex")


def parts(expression: Argument) -> Iterator[Expression]:
    """Yield every tensor in the expression, operands first, with repeats."""
    if isinstance(expression, tuple):
        for item in expression:
            yield from parts(item)
    elif isinstance(expression, Op):
        yield from parts(expression.args)
        for _, value in expression.kwargs:
            yield from parts(value)
        yield expression
    elif isinstance(expression, Ref):
        yield expression


def refs(expression: Argument) -> Iterator[str]:
    """Return every key that the expression reads, in order, with repeats."""
    if isinstance(expression, Ref):  # as nearly all are
        return iter((expression.key,))
    return (part.key for part in parts(expression) if isinstance(part, Ref))


def without_cast(expression: Expression) -> Expression:
    """Return what a cast converts; other expressions as they are."""
    if not isinstance(expression, Op) or expression.op != CAST:
        return expression
    source = expression.args[0]
    return without_cast(source) if isinstance(source, (Ref, Op)) else expression


def cast_dtype(expression: Expression) -> str | None:
    """Return the dtype to which a tensor is cast; None if the expression is not the cast of a
    tensor.
    """
    if not isinstance(expression, Op) or expression.op != CAST:
        return None
    options = dict(expression.kwargs)
    dtype = options.pop("dtype", None)
    is_cast = isinstance(expression.args[0], Ref) and not options
    return dtype.name if is_cast and isinstance(dtype, Special) else None


def is_constant(expression: Argument) -> bool:
    return next(refs(expression), None) is None


def filled(shape: Shape, dtype: str, fill: float | bool) -> Op:
    """Return a tensor whose elements are one number."""
    return Op("aten.full.default", (shape, fill), (("dtype", Special("dtype", dtype)),))


def operators(expression: Argument) -> Iterator[str]:
    return (part.op for part in parts(expression) if isinstance(part, Op))


def is_opaque(expression: Argument) -> bool:
    """Return True if a part of the value was computed by code that cannot be recorded as
    operators.
    """
    return OPAQUE in operators(expression)


def by_code(way: str, name: str, source: Expression) -> Op:
    """Return the value `name` of a run of a model's own code, which reads the keys of `source`."""
    return Op(way, (name, *map(Ref, dict.fromkeys(refs(source)))))


def calls(expression: Argument) -> Iterator[Op]:
    """Yield every value in the expression that a run of a model's own code computes, in order."""
    if isinstance(expression, Op):
        if expression.op in BY_CODE:
            yield expression
            return
        yield from calls(expression.args)
        for _, value in expression.kwargs:
            yield from calls(value)
    elif isinstance(expression, tuple):
        for item in expression:
            yield from calls(item)


@overload
def substitute(expression: Expression, replace: Callable[[str], Expression]) -> Expression: ...


@overload
def substitute(expression: Argument, replace: Callable[[str], Argument]) -> Argument: ...


def substitute(expression: Argument, replace: Callable[[str], Argument]) -> Argument:
    """Return the expression with every `Ref(key)` replaced by `replace(key)`."""
    return _rebuilt(expression, lambda node: replace(node.key) if isinstance(node, Ref) else node)


def with_calls(expression: Expression, replace: Callable[[Op], Expression]) -> Expression:
    """Return the expression with `replace(call)` for every value that a model's own code
    computes.
    """

    def replaced(node: Expression) -> Expression:
        return replace(node) if isinstance(node, Op) and node.op in BY_CODE else node

    rebuilt = _rebuilt(expression, replaced)
    assert isinstance(rebuilt, (Ref, Op))
    return rebuilt


def _rebuilt(expression: Argument, replace: Callable[[Expression], Argument]) -> Argument:
    """Return the expression with the parts that `replace` changes, which is called from the outside
    in.
    """
    if isinstance(expression, tuple):
        return tuple(_rebuilt(item, replace) for item in expression)
    if not isinstance(expression, (Ref, Op)):
        return expression
    replaced = replace(expression)
    if replaced is not expression or not isinstance(expression, Op):
        return replaced
    args = tuple(_rebuilt(arg, replace) for arg in expression.args)
    kwargs = tuple((name, _rebuilt(value, replace)) for name, value in expression.kwargs)
    return Op(expression.op, args, kwargs)


def to_json(expression: Argument) -> Any:
    """Return the JSON form: ``{"ref": KEY}`` or ``{"op": NAME, "args": [...], "kwargs":
    {...}}``.
    """
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
    if isinstance(expression, float) and not isfinite(expression):  # JSON has no inf and nan
        return {"float": repr(expression)}
    return expression


def _read(value: Any) -> Argument:
    if isinstance(value, list):
        return tuple(map(_read, value))
    if not isinstance(value, Mapping):
        return value  # type: ignore[no-any-return]
    if "op" in value:
        kwargs = tuple((name, _read(item)) for name, item in value.get("kwargs", {}).items())
        return Op(value["op"], tuple(map(_read, value.get("args", ()))), kwargs)
    ((kind, name),) = value.items()
    if kind == "ref":
        return Ref(name)
    return float(name) if kind == "float" else Special(kind, name)


def _leaf(kind: str, value: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {kind: value},
        "required": [kind],
        "additionalProperties": False,
    }


_ANY_ARGUMENT, _TEXT = {"$ref": "#/$defs/argument"}, {"type": "string"}
_OP = {
    "type": "object",
    "properties": {
        "op": _TEXT,
        "args": {"type": "array", "items": _ANY_ARGUMENT},
        "kwargs": {"type": "object", "additionalProperties": _ANY_ARGUMENT},
    },
    "required": ["op"],
    "additionalProperties": False,
}
# The ``$defs`` of a JSON Schema with expressions.
DEFINITIONS: dict[str, Any] = {
    "expression": {"anyOf": [_leaf("ref", _TEXT), _OP]},
    "argument": {
        "anyOf": [
            {"type": ["null", "boolean", "number", "string"]},
            {"type": "array", "items": _ANY_ARGUMENT},
            {"$ref": "#/$defs/expression"},
            _leaf("float", {"enum": ["inf", "-inf", "nan"]}),
            *(_leaf(kind, _TEXT) for kind in _SPECIAL_KINDS),
        ]
    },
}


def _problems(value: Any, path: Path, depth: int = 0) -> Iterator[Problem]:
    if depth > MAX_DEPTH:
        yield Problem(f"an expression is nested more than {MAX_DEPTH} deep", at(path))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _problems(item, (path, number), depth + 1)
    elif isinstance(value, dict):
        yield from _problems_of_object(value, path, depth)
    elif value is not None and not isinstance(value, (bool, int, float, str)):
        yield Problem("not an expression", at(path))


def _problems_of_object(value: dict[str, Any], path: Path, depth: int) -> Iterator[Problem]:
    if not _is_op(value):
        if not _is_leaf(value):
            yield Problem(f"not an expression: {str(value)[:80]}", at(path))
        return
    of_args, of_kwargs = (path, "args"), (path, "kwargs")
    for number, item in enumerate(value.get("args", [])):
        yield from _problems(item, (of_args, number), depth + 1)
    for name, item in value.get("kwargs", {}).items():
        yield from _problems(item, (of_kwargs, name), depth + 1)


def _is_op(value: dict[str, Any]) -> bool:
    """Return True if the object has the members of an operator."""
    has_lists = isinstance(value.get("args", []), list) and isinstance(
        value.get("kwargs", {}), dict
    )
    return (
        has_lists and isinstance(value.get("op"), str) and value.keys() <= {"op", "args", "kwargs"}
    )


def _is_leaf(value: dict[str, Any]) -> bool:
    """Return True for a reference, a special argument, or a float that JSON has no literal for."""
    if len(value) != 1:
        return False
    ((kind, name),) = value.items()
    if kind == "float":
        return name in ("inf", "-inf", "nan")
    return kind in ("ref", *_SPECIAL_KINDS) and isinstance(name, str)


def _problems_at_top(value: Any, path: Path) -> Iterator[Problem]:
    if isinstance(value, dict) and value.keys() & {"op", "ref"}:
        return _problems(value, path)
    return iter([Problem("not an expression", at(path))])


def _in_json(problems: Callable[[Any, Path], Iterator[Problem]], name: str) -> JsonKind:
    """Return the kind; its schema refers to a definition that the JSON Schema must have
    (`DEFINITIONS`).
    """
    return JsonKind(problems, lambda: {"$ref": f"#/$defs/{name}"}, _read, to_json)


ARGUMENT, EXPRESSION = _in_json(_problems, "argument"), _in_json(_problems_at_top, "expression")
