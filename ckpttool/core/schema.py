"""Kinds of JSON values, declared once for validation, reading, writing and JSON Schema."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import islice
from operator import attrgetter
from typing import Any, Union

from ckpttool.core.dtypes import BY_NAME
from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.text import Note, code_of
from ckpttool.core.values import dataclass

LEFT_OUT = object()  # instead of the value of a member that is not written
_MOST = 100  # problems that are listed
_PLAIN = re.compile(r"[A-Za-z_]\w*")


def _itself(value: Any) -> Any:
    return value


# The path of an object or list, and the name or number of what is in it; None: the root.
Path = Union[tuple[Any, Union[str, int]], None]
_Problems = Iterable[Problem]


@dataclass(frozen=True, slots=True)
class JsonKind:
    """A kind of JSON value.

    `problems(value, path)` says what is wrong with a value, and where in the file; nothing if it
    fits. `schema()` is the kind as JSON Schema 2020-12. `title` is the value of the member
    ``schema`` of an object: its name and version.
    """

    problems: Callable[[Any, Path], _Problems]
    schema: Callable[[], dict[str, Any]]
    read: Callable[[Any], Any] = _itself
    write: Callable[[Any], Any] = _itself
    title: str = ""

    def fits(self, value: Any) -> bool:
        return next(iter(self.problems(value, None)), None) is None


Members = Mapping[str, JsonKind]
# of a member: the field, also of a field (``a.b``), or what says it
Source = Union[str, Callable[[Any], Any]]


def at(path: Path) -> str:
    """Return the path as text: ``$.runtime[0].shape``."""
    if path is None:
        return "$"
    above, step = path
    if isinstance(step, int):
        return f"{at(above)}[{step}]"
    return f"{at(above)}.{step}" if _PLAIN.fullmatch(step) else f"{at(above)}[{step!r:.100}]"


def _is_not(value: Any, said: str, path: Path) -> _Problems:
    return (Problem(f"{_shown(value)} is not {said}", at(path)),)


def plain(said: str, fits: Callable[[Any], bool], keywords: Mapping[str, Any]) -> JsonKind:
    """A value that is looked at as a whole; `said` are the words for it, `keywords` what JSON
    Schema says of it.
    """
    return JsonKind(
        lambda value, path: () if fits(value) else _is_not(value, said, path),
        lambda: dict(keywords),
    )


def nullable(kind: JsonKind) -> JsonKind:
    return JsonKind(
        lambda value, path: () if value is None else kind.problems(value, path),
        lambda: {"anyOf": [kind.schema(), {"type": "null"}]},
        lambda value: None if value is None else kind.read(value),
        lambda value: None if value is None else kind.write(value),
    )


def unless_empty(kind: JsonKind) -> JsonKind:
    """Return the kind; an empty value is written as null, or left out if it may be."""
    return replace(kind, write=lambda value: kind.write(value) or None)


def list_of(kind: JsonKind, unique: str = "") -> JsonKind:
    """A list of one kind. No two of its objects have the same value under `unique`."""

    def problems(value: Any, path: Path) -> _Problems:
        if not isinstance(value, list):
            yield from _is_not(value, "a list", path)
            return
        problems_of = kind.problems
        for number, item in enumerate(value):
            yield from problems_of(item, (path, number))
        if unique:
            yield from _repeated(value, unique, path)

    return JsonKind(
        problems,
        lambda: {"type": "array", "items": kind.schema()},
        lambda value: tuple(map(kind.read, value)),
        lambda items: list(map(kind.write, items)),
    )


def _repeated(objects: list[Any], member: str, path: Path) -> _Problems:
    """Yield a problem for each object whose `member` has the value of another one's."""
    values: list[Any] = []
    for value in objects:
        name = value.get(member) if isinstance(value, dict) else None
        values.append(name if isinstance(name, (str, int)) else None)
    counts = Counter(values)
    if len(counts) == len(values):
        return
    for number, name in enumerate(values):
        if name is not None and counts[name] > 1:
            text = f"{_shown(name)} stands {counts[name]} times"
            yield Problem(text, at(((path, number), member)))


def items(*kinds: JsonKind) -> JsonKind:
    def problems(value: Any, path: Path) -> _Problems:
        if not isinstance(value, list) or len(value) != len(kinds):
            yield from _is_not(value, f"a list of {len(kinds)} items", path)
            return
        for number, (kind, item) in enumerate(zip(kinds, value)):
            yield from kind.problems(item, (path, number))

    def schema() -> dict[str, Any]:
        count = len(kinds)
        schemas = [kind.schema() for kind in kinds]
        return {"type": "array", "prefixItems": schemas, "minItems": count, "maxItems": count}

    return JsonKind(problems, schema)


def map_of(kind: JsonKind) -> JsonKind:
    """An object whose members, whatever their names, are of one kind."""

    def problems(value: Any, path: Path) -> _Problems:
        if not isinstance(value, dict):
            yield from _is_not(value, "an object", path)
            return
        problems_of = kind.problems
        for name, member in value.items():
            yield from problems_of(member, (path, name))

    return JsonKind(
        problems,
        lambda: {"type": "object", "additionalProperties": kind.schema()},
        lambda value: {name: kind.read(member) for name, member in value.items()},
        lambda members: {name: kind.write(member) for name, member in members.items()},
    )


def object_of(needs: Members, may: Members | None = None) -> JsonKind:
    """An object with these members; those in `may` can be left out."""
    members = {**needs, **(may or {})}

    def problems(value: Any, path: Path) -> _Problems:
        if not isinstance(value, dict):
            yield from _is_not(value, "an object", path)
            return
        for name, kind in members.items():
            if name in value:
                yield from kind.problems(value[name], (path, name))
            elif name in needs:
                yield Problem("is missing", at((path, name)))

    def schema() -> dict[str, Any]:
        properties = {name: kind.schema() for name, kind in members.items()}
        return {"type": "object", "properties": properties, "required": list(needs)}

    return JsonKind(problems, schema)


def row(needs: Members, may: Members | None = None) -> JsonKind:
    """Return the kind of an object that is written from a tuple of its members; `LEFT_OUT` omits
    one.
    """
    members = {**needs, **(may or {})}

    def write(values: Any) -> dict[str, Any]:
        written = {}
        for (name, kind), value in zip(members.items(), values, strict=True):
            if value is not LEFT_OUT:
                written[name] = kind.write(value)
        return written

    return replace(object_of(needs, may), write=write)


def record(
    of: Callable[..., Any],
    needs: Members,
    may: Members | None = None,
    called: Mapping[str, Source] | None = None,
    title: str = "",
    is_file: bool = False,
) -> JsonKind:
    """An object for a value of the class `of`: its members are the fields, or what `called` says of
    these.

    A member that is left out has the field's default. A member of `may` is not written if it is
    `LEFT_OUT`, or if it is None and its kind is not nullable. Only fields are read. With a `title`
    it says what it is, and the tool and version that wrote it, unless it `is_file`: a file that is
    kept, which another version must not change.
    """
    members = {**needs, **(may or {})}
    sources = {name: name for name in members} | dict(called or {})
    getters: dict[str, Callable[[Any], Any]] = {}
    for name, source in sources.items():
        getters[name] = attrgetter(source) if isinstance(source, str) else source
    nulls = {name for name, kind in members.items() if name in needs or kind.fits(None)}

    def read(value: Any) -> Any:
        present = {}
        for name, kind in members.items():
            if name in value:
                present[str(sources[name])] = kind.read(value[name])
        return of(**present)

    def write(instance: Any) -> dict[str, Any]:
        written = {}
        for name, kind in members.items():
            value = getters[name](instance)
            if value is not None and value is not LEFT_OUT:
                value = kind.write(value)
            if value is not LEFT_OUT and (value is not None or name in nulls):
                written[name] = value
        return written

    kind = replace(object_of(needs, may), read=read, write=write)
    return titled(title, kind, is_file) if title else kind


def titled(title: str, kind: JsonKind, is_file: bool = False) -> JsonKind:
    """Return the kind of an object with the `title`, and who wrote it, before its members."""
    first = {"schema": one_of(title)}
    if not is_file:
        first |= {"tool": one_of("ckpttool"), "version": TEXT}

    def schema() -> dict[str, Any]:
        untitled = kind.schema()
        members = {name: member.schema() for name, member in first.items()}
        return {
            **untitled,
            "properties": {**members, **untitled["properties"]},
            "required": [*first, *untitled["required"]],
        }

    def write(instance: Any) -> dict[str, Any]:
        values = {"schema": title}
        if not is_file:
            from ckpttool import __version__

            values |= {"tool": "ckpttool", "version": __version__}
        return {**values, **kind.write(instance)}

    return replace(kind, schema=schema, write=write, title=title)


def either(first: JsonKind, second: JsonKind) -> JsonKind:
    """Return the kind of values that fit one of the two; the problems come from the first."""
    return JsonKind(
        lambda value, path: () if second.fits(value) else first.problems(value, path),
        lambda: {"anyOf": [first.schema(), second.schema()]},
    )


def one_of(*words: str) -> JsonKind:
    said = " or ".join(map(repr, words))
    return plain(
        said, lambda value: isinstance(value, str) and value in words, {"enum": list(words)}
    )


TEXT = plain("a string", lambda value: isinstance(value, str), {"type": "string"})
TEXTS = list_of(TEXT)
FLAG = plain("true or false", lambda value: isinstance(value, bool), {"type": "boolean"})
COUNT = plain(
    "an integer from 0 on",
    lambda value: type(value) is int and 0 <= value < 1 << 63,
    {"type": "integer", "minimum": 0, "maximum": (1 << 63) - 1},
)
SHAPE = list_of(COUNT)
DTYPE = plain(
    "a dtype that ckpttool knows",
    lambda value: isinstance(value, str) and value in BY_NAME,
    {"enum": sorted(BY_NAME)},
)
OBJECT = replace(
    plain("an object", lambda value: isinstance(value, dict), {"type": "object"}),
    read=dict,
    write=dict,
)
PROBLEM = record(Problem, {"problem": TEXT, "key": TEXT, "code": TEXT}, called={"code": "kind"})
ERROR = titled(
    "ckpttool.error/1",
    row({"status": COUNT, "code": TEXT, "error": TEXT, "problems": list_of(PROBLEM), "hint": TEXT}),
)


def notes_as(code: str) -> JsonKind:
    """Return the kind of a list of notes; `code` is the code of sentences without a code."""

    return list_of(_note(code))


def _note(code: str) -> JsonKind:
    return replace(
        object_of({"code": TEXT, "text": TEXT}),
        read=lambda value: Note(value["text"], value["code"]),
        write=lambda note: {"code": code_of(note) or code, "text": str(note)},
    )


def notes_of_file(code: str) -> JsonKind:
    """Return the kind of a list of notes in a file that is read again: in older ones they are plain
    sentences.
    """
    note = _note(code)

    def read(value: Any) -> Any:
        return value if isinstance(value, str) else note.read(value)

    return list_of(replace(either(note, TEXT), read=read, write=note.write))


def check(kind: JsonKind, value: Any, message: str, hint: str) -> None:
    """Raise `CkptError` with `message` and every problem at its JSON path if the value is not of
    the kind.
    """
    check_none(kind.problems(value, None), message, hint)


def check_titled(kind: JsonKind, value: Any, source: str, what: str, hint: str) -> None:
    """Raise `CkptError` if the file `source` is not `what`, in this version."""
    title = value.get("schema") if isinstance(value, dict) else None
    if title != kind.title:
        raise CkptError(
            f"{source} is not {what}: schema is {_shown(title)}, not {kind.title!r}", hint=hint
        )
    check(kind, value, f"{source} is not {what}", hint)


def check_none(problems: _Problems, message: str, hint: str) -> None:
    """Raise `CkptError` with these problems, or the first of very many, if there are any."""
    shown = list(islice(problems, _MOST + 1))
    if len(shown) > _MOST:
        shown[_MOST] = Problem(f"more than {_MOST} problems: these are the first", "$")
    if shown:
        raise CkptError(message, hint=hint, problems=shown)


def _shown(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    words = {"None": "null", "True": "true", "False": "false"}
    return words.get(repr(value), f"{value!r:.60}")
