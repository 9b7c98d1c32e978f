"""Rules in a TOML file: read and checked whole, and reversed, as the steps of `steps.py`. See docs/rules.md."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from ckpttool.dtypes import PLAIN
from ckpttool.edits.rules.changes import Cast, Permute, Reshape, Transpose
from ckpttool.edits.rules.patterns import Rule, matches, parse
from ckpttool.edits.rules.steps import Convert, Drop, Join, Parts, Rename, Split, Step
from ckpttool.errors import CkptError, Problem
from ckpttool.io.files import opened
from ckpttool.limits import limits
from ckpttool.words import plural

_TOML = "tomllib" if sys.version_info >= (3, 11) else "tomli"  # imported where a file is read
Fields = Mapping[str, Any]
Kind = tuple[str, Callable[[Any], bool]]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_text, value))


def _is_number(value: Any) -> bool:
    return type(value) is int  # a bool is none


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_number, value))


_TEXT: Kind = ("a string", _is_text)
_TEXTS: Kind = ("a string or a list of strings", lambda value: _is_text(value) or _are_texts(value))
_SEVERAL: Kind = ("a list of two strings or more", lambda value: _are_texts(value) and len(value) > 1)
_NUMBER: Kind = ("an integer", _is_number)
_SIZES: Kind = ("a list of positive integers", lambda value: _are_numbers(value) and bool(value) and min(value) > 0)
_TWO_DIMS: Kind = ("a list of two dimensions", lambda value: _are_numbers(value) and len(value) == 2)
_ORDER: Kind = (
    "each of the dimensions 0, 1, ... once",
    lambda value: _are_numbers(value) and bool(value) and sorted(value) == list(range(len(value))),
)
_SHAPE: Kind = (
    "a list of sizes, with one -1 at most",
    lambda value: _are_numbers(value) and all(size >= -1 for size in value) and value.count(-1) <= 1,
)
_DTYPE: Kind = ("a dtype of torch, as in 'bfloat16'", lambda value: isinstance(value, str) and value in PLAIN)
_SOMEPLAIN: Kind = (
    "a dtype of torch, or a list of them",
    lambda value: bool(value) and all(isinstance(one, str) and one in PLAIN for one in _list(value)),
)


@dataclass(frozen=True, slots=True)
class _Operation:
    """How one kind of rule is written: the kinds of its own value and of its other fields, and the step it makes."""

    kind: Kind
    build: Callable[[str, Any, Fields], Step]
    needs: Mapping[str, Kind] = field(default_factory=dict)
    may: Mapping[str, Kind] = field(default_factory=dict)


def read(path: str, *, reverse: bool = False, rules: Sequence[Rule] = ()) -> tuple[Step, ...]:
    """The steps of the file at `path`, the last one first and each reversed with `reverse`.

    `rules` are those of the command line, in the same direction: they come after the file, so before it in reverse.
    Raises `CkptError`, all problems at once, where the file is none or a rule has no reverse.
    """
    steps = _steps(_content(_read(path), path), path)
    own: tuple[Step, ...] = (Rename("--rule", tuple(rules)),) if rules else ()
    return (*own, *_reversed(steps, path)) if reverse else (*steps, *own)


def steps_of(text: str, path: str) -> tuple[Step, ...]:
    """The steps of a file's text; `path` is what errors call it. Raises `CkptError` as `read` does."""
    return _steps(_content(text.encode(), path), path)


def _read(path: str) -> bytes:
    """At most one byte more than a file of rules may have."""
    with opened(path, pipes=True) as file:
        return file.read(limits().rules_bytes + 1)


def _content(data: bytes, path: str) -> Mapping[str, Any]:
    try:
        if len(data) > limits().rules_bytes:
            raise ValueError(f"it is too long: {limits().named('rules_bytes')}")
        text = data.decode("utf-8-sig")
        _check_dots(text)
        content: dict[str, Any] = import_module(_TOML).loads(text)
    except (ValueError, RecursionError) as error:
        raise CkptError(f"{path} is not TOML: {error}", hint="a rule begins with [[rule]]; see docs/rules.md") from None
    return content


def _check_dots(text: str) -> None:
    """Raises ValueError for dotted names that are too long: reading them takes time of the order of their cube."""
    for number, line in enumerate(_STRINGS.sub("", text).splitlines(), 1):
        if line.count(".") > limits().rules_dots:
            raise ValueError(f"too many dots at line {number}: {limits().named('rules_dots')}")


_STRINGS = re.compile(r"\"(?:[^\"\\\n]|\\.)*\"|'[^'\n]*'")


def _steps(content: Mapping[str, Any], path: str) -> tuple[Step, ...]:
    tables = content.get("rule")
    others = [name for name in content if name != "rule"]
    if others or not isinstance(tables, list) or not tables:
        raise CkptError(
            f"{path} is no list of rules{': ' if others else ''}{', '.join(others)}",
            hint="each rule is a table that begins with [[rule]], and nothing stands outside of them",
        )
    steps: list[Step] = []
    problems: list[Problem] = []
    for number, table in enumerate(tables, 1):
        faults = _faults(table)
        problems += [Problem(fault, f"rule {number}") for fault in faults]
        try:
            steps += [] if faults else [_step(number, table)]
        except CkptError as error:
            problems.append(Problem(error.message, f"rule {number}"))
    if problems:
        raise CkptError(
            f"{path}: {plural(len(problems), 'mistake')} in the rules",
            hint="docs/rules.md says how each kind of rule is written",
            problems=problems,
        )
    return tuple(steps)


def _faults(table: Any) -> list[str]:
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
    known = {name: operation.kind, **operation.needs, **operation.may}
    faults = [f"{name} takes no {other!r}" for other in table if other not in known]
    faults += [f"{name} needs {other!r}" for other in operation.needs if other not in table]
    faults += [f"{key!r} is not {known[key][0]}" for key in table if key in known and not known[key][1](table[key])]
    return faults


def _step(number: int, table: Fields) -> Step:
    name = next(name for name in table if name in _OPERATIONS)
    return _OPERATIONS[name].build(f"rule {number} ({name})", table[name], table)


def _reversed(steps: Sequence[Step], path: str) -> tuple[Step, ...]:
    found: list[Step] = []
    problems: list[Problem] = []
    for step in reversed(steps):
        try:
            found.append(_back(step))
        except CkptError as error:
            problems.append(Problem(error.message, step.where))
    if problems:
        raise CkptError(
            f"{path} cannot be reversed: {plural(len(problems), 'rule')}",
            hint="take these rules out, or write a file with the way back",
            problems=problems[::-1],
        )
    return tuple(found)


def _back(step: Step) -> Step:
    """The step that undoes this one. Raises `CkptError` where there is none."""
    match step:
        case Rename(where, rules):
            return Rename(where, tuple(parse(rule.text, reverse=True) for rule in rules))
        case Split(where, parts):
            return Join(where, parts)
        case Join(where, parts):
            return Split(where, parts)
        case Convert(where, patterns, change) if (back := change.reversed()) is not None:
            return Convert(where, patterns, back)
        case Convert(_, patterns, Reshape()):
            raise CkptError(f"{', '.join(patterns)}: from_shape = [...] says what shape it had", hint="")
    raise CkptError(f"{', '.join(step.patterns)}: what is lost does not come back", hint="")


def _rename(where: str, texts: Any, _: Fields) -> Step:
    return Rename(where, tuple(parse(text) for text in _list(texts)))


def _split(where: str, whole: str, fields: Fields) -> Step:
    return Split(where, _parts(whole, fields["into"], fields))


def _join(where: str, names: Sequence[str], fields: Fields) -> Step:
    return Join(where, _parts(fields["into"], names, fields))


def _parts(whole: str, names: Sequence[str], fields: Fields) -> Parts:
    """Both directions of a split. Raises `CkptError` where a name of one side could not be told from the other."""
    for text in (whole, *names):
        if "=>" in text:
            raise CkptError(f"{text!r} is not a name: => belongs into a rename", hint="")
    if len(set(names)) < len(names):
        raise CkptError("two parts have the same name", hint="")
    sizes = fields.get("sizes")
    if sizes is not None and len(sizes) != len(names):
        raise CkptError(f"{len(sizes)} sizes for {len(names)} parts", hint="")
    texts = [f"{whole} => {name}" for name in names]
    back = tuple(parse(text, reverse=True) for text in texts)
    to_part = tuple(parse(text) for text in texts)
    return Parts(whole, tuple(names), to_part, back, fields.get("dim", 0), None if sizes is None else tuple(sizes))


def _transpose(where: str, patterns: Any, fields: Fields) -> Step:
    first, second = fields.get("dims", (0, 1))
    return Convert(where, _patterns(patterns), Transpose((first, second)))


def _permute(where: str, patterns: Any, fields: Fields) -> Step:
    return Convert(where, _patterns(patterns), Permute(tuple(fields["dims"])))


def _reshape(where: str, patterns: Any, fields: Fields) -> Step:
    was = fields.get("from_shape")
    return Convert(where, _patterns(patterns), Reshape(tuple(fields["shape"]), None if was is None else tuple(was)))


def _cast(where: str, patterns: Any, fields: Fields) -> Step:
    was = fields.get("from")
    return Convert(where, _patterns(patterns), Cast(fields["dtype"], None if was is None else _list(was)))


def _drop(where: str, patterns: Any, _: Fields) -> Step:
    return Drop(where, _patterns(patterns))


def _patterns(value: Any) -> tuple[str, ...]:
    """The patterns; each is tried, so that one that is no pattern is found before any checkpoint is looked at."""
    patterns = _list(value)
    for text in patterns:
        matches(text, "")
    return patterns


def _list(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list) else (value,)


_PARTS: Mapping[str, Kind] = {"dim": _NUMBER, "sizes": _SIZES}
_OPERATIONS: Mapping[str, _Operation] = {
    "rename": _Operation(_TEXTS, _rename),
    "split": _Operation(_TEXT, _split, {"into": _SEVERAL}, _PARTS),
    "join": _Operation(_SEVERAL, _join, {"into": _TEXT}, _PARTS),
    "transpose": _Operation(_TEXTS, _transpose, may={"dims": _TWO_DIMS}),
    "permute": _Operation(_TEXTS, _permute, {"dims": _ORDER}),
    "reshape": _Operation(_TEXTS, _reshape, {"shape": _SHAPE}, {"from_shape": _SHAPE}),
    "cast": _Operation(_TEXTS, _cast, {"dtype": _DTYPE}, {"from": _SOMEPLAIN}),
    "drop": _Operation(_TEXTS, _drop),
}
