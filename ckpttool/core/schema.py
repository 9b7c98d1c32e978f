"""Kinds of JSON values, declared once for validation, reading, writing and JSON Schema."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import chain, islice
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
class Kind:
    """A kind of JSON value.

    `problems(value, path)` says what is wrong with a value, and where in the file; nothing if it
    fits. `schema(closed)` is the kind as JSON Schema 2020-12; if it is closed, objects must not
    have other members. `title` is the value of the member ``schema`` of an object: its name and
    version.
    """

    problems: Callable[[Any, Path], _Problems]
    schema: Callable[[bool], dict[str, Any]]
    read: Callable[[Any], Any] = _itself
    write: Callable[[Any], Any] = _itself
    title: str = ""

    def fits(self, value: Any) -> bool:
        return next(iter(self.problems(value, None)), None) is None


Members = Mapping[str, Kind]
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


def plain(said: str, fits: Callable[[Any], bool], keywords: Mapping[str, Any]) -> Kind:
    """A value that is looked at as a whole; `said` are the words for it, `keywords` what JSON
    Schema says of it.
    """
    return Kind(
        lambda value, path: () if fits(value) else _is_not(value, said, path),
        lambda closed: dict(keywords),
    )


def nullable(kind: Kind) -> Kind:
    return Kind(
        lambda value, path: () if value is None else kind.problems(value, path),
        lambda closed: {"anyOf": [kind.schema(closed), {"type": "null"}]},
        lambda value: None if value is None else kind.read(value),
        lambda made: None if made is None else kind.write(made),
    )


def unless_empty(kind: Kind) -> Kind:
    """Return the kind; an empty value is written as null, or left out if it may be."""
    return replace(kind, write=lambda made: kind.write(made) or None)


def list_of(kind: Kind, unique: str = "") -> Kind:
    """A list of one kind. No two of its objects have the same value under `unique`."""

    def problems(value: Any, path: Path) -> _Problems:
        if not isinstance(value, list):
            return _is_not(value, "a list", path)
        found = chain.from_iterable(
            kind.problems(item, (path, number)) for number, item in enumerate(value)
        )
        return chain(found, repeated(value, path)) if unique else found

    def repeated(value: list[Any], path: Path) -> _Problems:
        names = [item.get(unique) if isinstance(item, dict) else None for item in value]
        counts = Counter(name for name in names if isinstance(name, (str, int)))
        for number, name in enumerate(names if len(counts) < len(names) else ()):
            if isinstance(name, (str, int)) and counts[name] > 1:
                yield Problem(
                    f"{_shown(name)} stands {counts[name]} times", at(((path, number), unique))
                )

    return Kind(
        problems,
        lambda closed: {"type": "array", "items": kind.schema(closed)},
        lambda value: tuple(map(kind.read, value)),
        lambda made: list(map(kind.write, made)),
    )


def items(*kinds: Kind) -> Kind:
    def problems(value: Any, path: Path) -> _Problems:
        if not isinstance(value, list) or len(value) != len(kinds):
            return _is_not(value, f"a list of {len(kinds)} items", path)
        return chain.from_iterable(
            kind.problems(item, (path, number))
            for number, (kind, item) in enumerate(zip(kinds, value))
        )

    def schema(closed: bool) -> dict[str, Any]:
        count = len(kinds)
        own = [kind.schema(closed) for kind in kinds]
        return {"type": "array", "prefixItems": own, "minItems": count, "maxItems": count}

    return Kind(problems, schema)


def map_of(kind: Kind) -> Kind:
    """An object whose members, whatever their names, are of one kind."""

    def problems(value: Any, path: Path) -> _Problems:
        if not isinstance(value, dict):
            return _is_not(value, "an object", path)
        return chain.from_iterable(
            kind.problems(member, (path, name)) for name, member in value.items()
        )

    return Kind(
        problems,
        lambda closed: {"type": "object", "additionalProperties": kind.schema(closed)},
        lambda value: {name: kind.read(member) for name, member in value.items()},
        lambda made: {name: kind.write(member) for name, member in made.items()},
    )


def object_of(needs: Members, may: Members | None = None) -> Kind:
    """An object with these members; those in `may` can be left out."""
    members = {**needs, **(may or {})}

    def problems(value: Any, path: Path) -> _Problems:
        if not isinstance(value, dict):
            return _is_not(value, "an object", path)
        return chain.from_iterable(
            kind.problems(value[name], (path, name)) if name in value else missing(name, path)
            for name, kind in members.items()
        )

    def missing(name: str, path: Path) -> _Problems:
        return (Problem("is missing", at((path, name))),) if name in needs else ()

    def schema(closed: bool) -> dict[str, Any]:
        own = {name: kind.schema(closed) for name, kind in members.items()}
        only = {"additionalProperties": False} if closed else {}
        return {"type": "object", "properties": own, "required": list(needs), **only}

    return Kind(problems, schema)


def row(needs: Members, may: Members | None = None) -> Kind:
    """Return the kind of an object that is written from a tuple of its members; `LEFT_OUT` omits
    one.
    """
    members = {**needs, **(may or {})}

    def write(made: Any) -> dict[str, Any]:
        found = zip(members.items(), made, strict=True)
        return {name: kind.write(one) for (name, kind), one in found if one is not LEFT_OUT}

    return replace(object_of(needs, may), write=write)


def record(
    of: Callable[..., Any],
    needs: Members,
    may: Members | None = None,
    called: Mapping[str, Source] | None = None,
    title: str = "",
    is_file: bool = False,
) -> Kind:
    """An object for a value of the class `of`: its members are the fields, or what `called` says of
    these.

    A member that is left out has the field's default. A member of `may` is not written if it is
    `LEFT_OUT`, or if it is None and its kind is not nullable. Only fields are read. With a `title`
    it says what it is, and the tool and version that wrote it, unless it `is_file`: a file that is
    kept, which another version must not change.
    """
    members = {**needs, **(may or {})}
    sources = {name: name for name in members} | dict(called or {})
    getters = {
        name: attrgetter(one) if isinstance(one, str) else one for name, one in sources.items()
    }
    nulls = {name for name, kind in members.items() if name in needs or kind.fits(None)}

    def read(value: Any) -> Any:
        return of(
            **{
                str(sources[name]): kind.read(value[name])
                for name, kind in members.items()
                if name in value
            }
        )

    def write(made: Any) -> dict[str, Any]:
        written = {}
        for name, kind in members.items():
            found = getters[name](made)
            found = found if found is None or found is LEFT_OUT else kind.write(found)
            if found is not LEFT_OUT and (found is not None or name in nulls):
                written[name] = found
        return written

    kind = replace(object_of(needs, may), read=read, write=write)
    return titled(title, kind, is_file) if title else kind


def titled(title: str, kind: Kind, is_file: bool = False) -> Kind:
    first = {
        "schema": one_of(title),
        **({} if is_file else {"tool": one_of("ckpttool"), "version": TEXT}),
    }

    def schema(closed: bool) -> dict[str, Any]:
        found = kind.schema(closed)
        members = {name: one.schema(closed) for name, one in first.items()}
        return {
            **found,
            "properties": {**members, **found["properties"]},
            "required": [*first, *found["required"]],
        }

    def write(made: Any) -> dict[str, Any]:
        values = {"schema": title}
        if not is_file:
            from ckpttool import __version__

            values |= {"tool": "ckpttool", "version": __version__}
        return {**values, **kind.write(made)}

    return replace(kind, schema=schema, write=write, title=title)


def either(one: Kind, other: Kind) -> Kind:
    return Kind(
        lambda value, path: () if other.fits(value) else one.problems(value, path),
        lambda closed: {"anyOf": [one.schema(closed), other.schema(closed)]},
    )


def one_of(*words: str) -> Kind:
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


def notes_as(code: str) -> Kind:
    """Return the kind of a list of notes; `code` is the code of sentences without a code."""

    return list_of(_note(code))


def _note(code: str) -> Kind:
    return replace(
        object_of({"code": TEXT, "text": TEXT}),
        read=lambda value: Note(value["text"], value["code"]),
        write=lambda note: {"code": code_of(note) or code, "text": str(note)},
    )


def notes_of_file(code: str) -> Kind:
    """Return the kind of a list of notes in a file that is read again: in older ones they are plain
    sentences.
    """
    note = _note(code)
    kind = either(note, TEXT)
    return list_of(
        replace(
            kind, write=note.write, read=lambda one: one if isinstance(one, str) else note.read(one)
        )
    )


def check(kind: Kind, value: Any, message: str, hint: str) -> None:
    """Raise `CkptError` with `message` and every problem at its JSON path if the value is not of
    the kind.
    """
    check_none(kind.problems(value, None), message, hint)


def check_titled(kind: Kind, value: Any, source: str, what: str, hint: str) -> None:
    """Raise `CkptError` if the file `source` is not `what`, in this version."""
    found = value.get("schema") if isinstance(value, dict) else None
    if found != kind.title:
        raise CkptError(
            f"{source} is not {what}: schema is {_shown(found)}, not {kind.title!r}", hint=hint
        )
    check(kind, value, f"{source} is not {what}", hint)


def check_none(problems: _Problems, message: str, hint: str) -> None:
    """Raise `CkptError` with these problems, or the first of very many, if there are any."""
    shown = list(islice(problems, _MOST + 1))
    more = (
        [Problem(f"more than {_MOST} problems: these are the first", "$")]
        if len(shown) > _MOST
        else []
    )
    if shown:
        raise CkptError(message, hint=hint, problems=[*shown[:_MOST], *more])


def _shown(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    words = {"None": "null", "True": "true", "False": "false"}
    return words.get(repr(value), f"{value!r:.60}")
