"""How each kind of rule is written: its fields, what these have to be, and the step that they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from functools import partial
from typing import Any

from ckpttool.dtypes import PLAIN
from ckpttool.edits.rules import sizes as named
from ckpttool.edits.rules.changes import Cast, Permute, Reshape, Transpose
from ckpttool.edits.rules.notation import condition
from ckpttool.edits.rules.parts import Parts, listed, numbered
from ckpttool.edits.rules.patterns import matches, parse
from ckpttool.edits.rules.steps import Constant, Convert, Drop, Join, Rename, Split, Step, Where
from ckpttool.errors import CkptError
from ckpttool.values import dataclass

Fields = Mapping[str, Any]
Kind = tuple[str, Callable[[Any], bool]]  # the words for what a value has to be, and whether it is that


@dataclass(frozen=True, slots=True)
class _Operation:
    """How one kind of rule is written: the kinds of its own value and of its other fields, and the step it makes."""

    kind: Kind
    build: Callable[[Where, Any, Fields], Step]
    needs: Mapping[str, Kind] = field(default_factory=dict)
    may: Mapping[str, Kind] = field(default_factory=dict)


def faults(table: Any) -> list[str]:
    """What is wrong with the fields of one rule."""
    if not isinstance(table, dict):
        return ["not a table"]
    operations = [name for name in table if name in _OPERATIONS]
    if len(operations) != 1:
        return [
            f"has to be one of {', '.join(_OPERATIONS)}" + (f", not {' and '.join(operations)}" if operations else "")
        ]
    name = operations[0]
    operation = _OPERATIONS[name]
    known = {name: operation.kind, **operation.needs, **operation.may, **_OF_ALL}
    found = [f"{name} takes no {other!r}" for other in table if other not in known]
    found += [f"{name} needs {other!r}" for other in operation.needs if other not in table]
    found += [f"{key!r} is not {known[key][0]}" for key in table if key in known and not known[key][1](table[key])]
    return found


def operation_of(table: Fields) -> str:
    """The name of what the rule does."""
    return next(name for name in table if name in _OPERATIONS)


def step_of(table: Fields, place: str, sizes: Mapping[str, int]) -> Step:
    """The step of a rule without `faults`; `sizes` are the values of names. Raises `CkptError` where it is none."""
    name = operation_of(table)
    when, unless = (tuple(map(condition, _list(table.get(field, [])))) for field in ("when", "unless"))
    where = Where(f"{place} ({name})", table.get("optional", False), when, unless)
    return _OPERATIONS[name].build(where, table[name], {key: _settled(table, key, sizes) for key in table})


def size_names(table: Fields) -> set[str]:
    """The named sizes that the rule is made of."""
    return {name for key in _SIZED if key in table for size in _list(table[key]) for name in named.names(size)}


def _settled(table: Fields, key: str, sizes: Mapping[str, int]) -> Any:
    """The value of a field with named sizes as numbers; those that a reshape finds in its tensor keep their names."""
    if key not in _SIZED:
        return table[key]
    found = [named.settled(size, sizes) for size in _list(table[key])]
    for before, size in zip(_list(table[key]), found):
        if isinstance(size, str) and "reshape" not in table:
            name = min(named.names(size))
            raise CkptError(f"{{{name}}} has no value: --size {name}=N gives it one", hint="")
        if isinstance(size, int) and size < 1 and before != size:
            raise CkptError(f"{before} is {size}: no size", hint="")
    return found if isinstance(table[key], list) else found[0]


# The kinds


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_text, value))


def _is_number(value: Any) -> bool:
    return type(value) is int  # a bool is none


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_number, value))


def _is_size(value: Any, least: int) -> bool:
    return named.is_expression(value) if isinstance(value, str) else _is_number(value) and value >= least


def _are_sizes(value: Any, least: int) -> bool:
    return isinstance(value, list) and all(_is_size(size, least) for size in value)


_TEXT: Kind = ("a string", _is_text)
_TEXTS: Kind = ("a string or a list of strings", lambda value: _is_text(value) or _are_texts(value))
_NUMBER: Kind = ("an integer", _is_number)
_FLAG: Kind = ("true or false", lambda value: isinstance(value, bool))
_FILL: Kind = (
    "a number, true or false",
    lambda value: isinstance(value, (bool, float)) or (_is_number(value) and -(2**63) <= value < 2**63),
)
_NAMES: Kind = (
    "a list of two strings or more, or one name with a variable that counts",
    lambda value: _is_text(value) or (_are_texts(value) and len(value) > 1),
)
_SIZE: Kind = ("a positive integer, or a named size", lambda value: _is_size(value, 1))
_SIZES: Kind = ("a list of positive integers", lambda value: _are_sizes(value, 1))
_TWO_DIMS: Kind = ("a list of two dimensions", lambda value: _are_numbers(value) and len(value) == 2)
_ORDER: Kind = (
    "each of the dimensions 0, 1, ... once",
    lambda value: _are_numbers(value) and sorted(value) == list(range(len(value))),
)
_SHAPE: Kind = ("a list of sizes, with one -1 at most", lambda value: _are_sizes(value, -1) and value.count(-1) <= 1)
_OWN_SHAPE: Kind = ("a list of sizes", lambda value: _are_sizes(value, 0))
_DTYPE: Kind = ("a dtype of torch, as in 'bfloat16'", lambda value: isinstance(value, str) and value in PLAIN)
_SOMEPLAIN: Kind = (
    "a dtype of torch, or a list of them",
    lambda value: all(isinstance(one, str) and one in PLAIN for one in _list(value)),
)


# The steps


def _rename(where: Where, texts: Any, _: Fields) -> Step:
    return Rename(where, tuple(map(parse, _list(texts))))


def _split(where: Where, whole: str, fields: Fields, *, stacked: bool = False) -> Step:
    return Split(where, _parts(whole, fields["into"], fields, stacked))


def _join(where: Where, names: Any, fields: Fields, *, stacked: bool = False) -> Step:
    return Join(where, _parts(fields["into"], names, fields, stacked))


def _parts(whole: str, names: Any, fields: Fields, stacked: bool) -> Parts:
    """Both directions of a split. Raises `CkptError` where it cannot be told into how many parts."""
    sizes, count = fields.get("sizes"), fields.get("parts")
    if isinstance(names, list):
        found = listed(whole, names)
        if sizes is not None and len(sizes) != len(names):
            raise CkptError(f"{len(sizes)} sizes for {len(names)} parts", hint="")
        if count is not None:
            raise CkptError("parts = counts what one name stands for, and these are listed", hint="")
        return Parts(whole, found, fields.get("dim", 0), None if sizes is None else tuple(sizes), stacked)
    if sizes is not None:
        raise CkptError("sizes are those of parts that are listed: numbered ones are equal", hint="")
    return Parts(whole, numbered(whole, names, count), fields.get("dim", 0), None, stacked)


def _transpose(where: Where, patterns: Any, fields: Fields) -> Step:
    first, second = fields.get("dims", (0, 1))
    return Convert(where, _patterns(patterns), Transpose((first, second)))


def _permute(where: Where, patterns: Any, fields: Fields) -> Step:
    dims, rows = fields["dims"], fields.get("rows")
    if rows is not None and len(rows) != len(dims):
        raise CkptError(f"{len(dims)} dims for {len(rows)} rows", hint="")
    return Convert(where, _patterns(patterns), Permute(tuple(dims), None if rows is None else tuple(rows)))


def _reshape(where: Where, patterns: Any, fields: Fields) -> Step:
    was = fields.get("from_shape")
    return Convert(where, _patterns(patterns), Reshape(tuple(fields["shape"]), None if was is None else tuple(was)))


def _cast(where: Where, patterns: Any, fields: Fields) -> Step:
    was = fields.get("from")
    return Convert(where, _patterns(patterns), Cast(fields["dtype"], None if was is None else _list(was)))


def _constant(where: Where, name: str, fields: Fields) -> Step:
    beside = fields.get("beside")
    rule = None if beside is None else parse(f"{beside} => {name}")
    if rule is None and ("{" in name or "=>" in name):
        raise CkptError(f"{name!r} is not a whole name: beside = says which tensors give its variables", hint="")
    shape = fields.get("shape")
    if rule is None and shape is None:
        raise CkptError("constant needs 'shape', or 'beside' for one that has it", hint="")
    return Constant(where, name, rule, fields["value"], fields.get("dtype"), None if shape is None else tuple(shape))


def _patterns(value: Any) -> tuple[str, ...]:
    """The patterns; each is tried, so that one that is no pattern is found before any checkpoint is looked at."""
    patterns = _list(value)
    for text in patterns:
        matches(text, "")
    return patterns


def _list(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list) else (value,)


_PARTS: Mapping[str, Kind] = {"dim": _NUMBER, "parts": _SIZE}
_OPERATIONS: Mapping[str, _Operation] = {
    "rename": _Operation(_TEXTS, _rename),
    "split": _Operation(_TEXT, _split, {"into": _NAMES}, {**_PARTS, "sizes": _SIZES}),
    "join": _Operation(_NAMES, _join, {"into": _TEXT}, {**_PARTS, "sizes": _SIZES}),
    "unstack": _Operation(_TEXT, partial(_split, stacked=True), {"into": _NAMES}, _PARTS),
    "stack": _Operation(_NAMES, partial(_join, stacked=True), {"into": _TEXT}, _PARTS),
    "transpose": _Operation(_TEXTS, _transpose, may={"dims": _TWO_DIMS}),
    "permute": _Operation(_TEXTS, _permute, {"dims": _ORDER}, {"rows": _SHAPE}),
    "reshape": _Operation(_TEXTS, _reshape, {"shape": _SHAPE}, {"from_shape": _SHAPE}),
    "cast": _Operation(_TEXTS, _cast, {"dtype": _DTYPE}, {"from": _SOMEPLAIN}),
    "constant": _Operation(_TEXT, _constant, {"value": _FILL}, {"dtype": _DTYPE, "shape": _OWN_SHAPE, "beside": _TEXT}),
    "drop": _Operation(_TEXTS, lambda where, patterns, _: Drop(where, _patterns(patterns))),
}
_OF_ALL: Mapping[str, Kind] = {"optional": _FLAG, "when": _TEXTS, "unless": _TEXTS}
_SIZED = ("sizes", "parts", "shape", "from_shape", "rows")
