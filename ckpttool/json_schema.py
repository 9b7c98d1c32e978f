"""What a JSON value has to be, said once as data: every fault of a file is found, each with its place in the file.

A `Kind` answers twice: `fits` quickly, for files of 100,000 tensors, and `problems` in words, only where it does not.
Members that a kind does not name are let through: a later version may have added them. What fits is `read` to the value
that it stands for, and what that value is in JSON `write` says.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

from ckpttool.dtypes import BY_NAME
from ckpttool.errors import CkptError, Problem

_MOST = 100  # problems that are listed
_PLAIN = re.compile(r"[A-Za-z_]\w*")


class AnyKind(Protocol):
    """What a value may have to be."""

    def fits(self, value: Any, /) -> bool:
        """Whether the value is that."""

    def problems(self, value: Any, path: str) -> Iterator[Problem]:
        """What is wrong with the value at `path`, in words."""

    def schema(self, closed: bool) -> dict[str, Any]:
        """The same as JSON Schema 2020-12; where it is `closed`, objects have no other members than those it names."""

    def read(self, value: Any, /) -> Any:
        """What a value that `fits` stands for."""

    def write(self, made: Any, /) -> Any:
        """The JSON of what `read` gives."""


def _itself(value: Any) -> Any:
    return value


class _AsItIs:
    """What stands for itself."""

    __slots__ = ()

    def read(self, value: Any) -> Any:
        """The value."""
        return value

    def write(self, made: Any) -> Any:
        """The value."""
        return made


@dataclass(frozen=True, slots=True)
class Kind:
    """A value that is looked at as a whole; `said` are the words for it, `keywords` what JSON Schema says of it."""

    said: str
    fits: Callable[[Any], bool]
    keywords: Mapping[str, Any] = field(default_factory=dict)
    read: Callable[[Any], Any] = _itself
    write: Callable[[Any], Any] = _itself

    def schema(self, closed: bool) -> dict[str, Any]:
        """The same as JSON Schema."""
        return dict(self.keywords) or {"description": self.said}

    def problems(self, value: Any, path: str) -> Iterator[Problem]:
        """What is wrong with the value at `path`."""
        if not self.fits(value):
            yield Problem(f"{_shown(value)} is not {self.said}", path)


@dataclass(frozen=True, slots=True)
class Nullable:
    """The kind, or null."""

    kind: AnyKind

    def read(self, value: Any) -> Any:
        """None, or what it stands for."""
        return None if value is None else self.kind.read(value)

    def write(self, made: Any) -> Any:
        """The JSON of that."""
        return None if made is None else self.kind.write(made)

    def fits(self, value: Any) -> bool:
        """Whether the value is that."""
        return value is None or self.kind.fits(value)

    def schema(self, closed: bool) -> dict[str, Any]:
        """The same as JSON Schema."""
        return {"anyOf": [self.kind.schema(closed), {"type": "null"}]}

    def problems(self, value: Any, path: str) -> Iterator[Problem]:
        """What is wrong with the value at `path`."""
        if value is not None:
            yield from self.kind.problems(value, path)


@dataclass(frozen=True, slots=True)
class ListOf:
    """A list of one kind. No two of its objects have the same value under `unique`."""

    kind: AnyKind
    unique: str = ""

    def read(self, value: Any) -> tuple[Any, ...]:
        """What each item stands for."""
        return tuple(map(self.kind.read, value))

    def write(self, made: Any) -> list[Any]:
        """The JSON of these."""
        return list(map(self.kind.write, made))

    def fits(self, value: Any) -> bool:
        """Whether the value is that."""
        if not isinstance(value, list) or not all(map(self.kind.fits, value)):
            return False
        return not self.unique or len({item[self.unique] for item in value}) == len(value)

    def schema(self, closed: bool) -> dict[str, Any]:
        """The same as JSON Schema."""
        return {"type": "array", "items": self.kind.schema(closed)}

    def problems(self, value: Any, path: str) -> Iterator[Problem]:
        """What is wrong with the value at `path`, item by item."""
        if not isinstance(value, list):
            yield Problem(f"{_shown(value)} is not a list", path)
            return
        for number, item in enumerate(value):
            if not self.kind.fits(item):
                yield from self.kind.problems(item, f"{path}[{number}]")
        if self.unique:
            yield from self._repeats(value, path)

    def _repeats(self, items: list[Any], path: str) -> Iterator[Problem]:
        named = [(number, item[self.unique]) for number, item in enumerate(items) if self.kind.fits(item)]
        counts = Counter(name for _, name in named)
        for number, name in named:
            if counts[name] > 1:
                yield Problem(f"{_shown(name)} stands {counts[name]} times", f"{path}[{number}].{self.unique}")


@dataclass(frozen=True, slots=True)
class Items(_AsItIs):
    """A list of as many items as there are kinds, each of its own."""

    kinds: tuple[AnyKind, ...]

    def fits(self, value: Any) -> bool:
        """Whether the value is that."""
        alike = isinstance(value, list) and len(value) == len(self.kinds)
        return alike and all(kind.fits(item) for kind, item in zip(self.kinds, value))

    def schema(self, closed: bool) -> dict[str, Any]:
        """The same as JSON Schema."""
        kinds = [kind.schema(closed) for kind in self.kinds]
        return {"type": "array", "prefixItems": kinds, "minItems": len(kinds), "maxItems": len(kinds)}

    def problems(self, value: Any, path: str) -> Iterator[Problem]:
        """What is wrong with the value at `path`, item by item."""
        if not isinstance(value, list) or len(value) != len(self.kinds):
            yield Problem(f"{_shown(value)} is not a list of {len(self.kinds)} items", path)
            return
        for number, (kind, item) in enumerate(zip(self.kinds, value)):
            yield from kind.problems(item, f"{path}[{number}]")


@dataclass(frozen=True, slots=True)
class MapOf:
    """An object whose members, whatever their names, are of one kind."""

    kind: AnyKind

    def read(self, value: Any) -> dict[str, Any]:
        """What each member stands for."""
        return {name: self.kind.read(member) for name, member in value.items()}

    def write(self, made: Any) -> dict[str, Any]:
        """The JSON of these."""
        return {name: self.kind.write(member) for name, member in made.items()}

    def fits(self, value: Any) -> bool:
        """Whether the value is that."""
        return isinstance(value, dict) and all(map(self.kind.fits, value.values()))

    def schema(self, closed: bool) -> dict[str, Any]:
        """The same as JSON Schema."""
        return {"type": "object", "additionalProperties": self.kind.schema(closed)}

    def problems(self, value: Any, path: str) -> Iterator[Problem]:
        """What is wrong with the value at `path`, member by member."""
        if not isinstance(value, dict):
            yield Problem(f"{_shown(value)} is not an object", path)
            return
        for name, member in value.items():
            if not self.kind.fits(member):
                yield from self.kind.problems(member, _under(path, name))


@dataclass(frozen=True, slots=True)
class ObjectOf(_AsItIs):
    """An object with these members; those in `may` can be left out."""

    needs: Mapping[str, AnyKind]
    may: Mapping[str, AnyKind] = field(default_factory=dict)
    members: Mapping[str, AnyKind] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "members", {**self.needs, **self.may})

    def fits(self, value: Any) -> bool:
        """Whether the value is that."""
        return (
            isinstance(value, dict)
            and all(name in value and kind.fits(value[name]) for name, kind in self.needs.items())
            and all(name not in value or kind.fits(value[name]) for name, kind in self.may.items())
        )

    def schema(self, closed: bool) -> dict[str, Any]:
        """The same as JSON Schema."""
        members = {name: kind.schema(closed) for name, kind in self.members.items()}
        only = {"additionalProperties": False} if closed else {}
        return {"type": "object", "properties": members, "required": list(self.needs), **only}

    def problems(self, value: Any, path: str) -> Iterator[Problem]:
        """What is wrong with the value at `path`, member by member."""
        if not isinstance(value, dict):
            yield Problem(f"{_shown(value)} is not an object", path)
            return
        for name, kind in self.members.items():
            if name in value:
                yield from kind.problems(value[name], _under(path, name))
            elif name in self.needs:
                yield Problem("is missing", _under(path, name))


@dataclass(frozen=True, slots=True)
class Record(ObjectOf):
    """An object that stands for a value of the class `of`: its members are the fields, unless they are `called` so."""

    of: Callable[..., Any] = dict
    called: Mapping[str, str] = field(default_factory=dict)  # member -> field

    def read(self, value: Any) -> Any:
        """The value; a field of a member that is left out has its default."""
        found = ((name, kind) for name, kind in self.members.items() if name in value)
        return self.of(**{self.called.get(name, name): kind.read(value[name]) for name, kind in found})

    def write(self, made: Any) -> dict[str, Any]:
        """All members."""
        called = self.called
        return {name: kind.write(getattr(made, called.get(name, name))) for name, kind in self.members.items()}


@dataclass(frozen=True, slots=True)
class Either(_AsItIs):
    """A value of one of two kinds."""

    one: AnyKind
    other: AnyKind

    def fits(self, value: Any) -> bool:
        """Whether the value is that."""
        return self.one.fits(value) or self.other.fits(value)

    def schema(self, closed: bool) -> dict[str, Any]:
        """The same as JSON Schema."""
        return {"anyOf": [self.one.schema(closed), self.other.schema(closed)]}

    def problems(self, value: Any, path: str) -> Iterator[Problem]:
        """What is wrong with the value at `path`, were it of the first kind."""
        if not self.fits(value):
            yield from self.one.problems(value, path)


TEXT = Kind("a string", lambda value: isinstance(value, str), {"type": "string"})
TEXTS = ListOf(TEXT)
FLAG = Kind("true or false", lambda value: isinstance(value, bool), {"type": "boolean"})
COUNT = Kind(
    "an integer from 0 on",
    lambda value: type(value) is int and 0 <= value < 1 << 63,
    {"type": "integer", "minimum": 0, "maximum": (1 << 63) - 1},
)
SHAPE = ListOf(COUNT)
DTYPE = Kind(
    "a dtype that ckpttool knows",
    lambda value: isinstance(value, str) and value in BY_NAME,
    {"enum": sorted(BY_NAME)},
)
OBJECT = Kind("an object", lambda value: isinstance(value, dict), {"type": "object"}, dict, dict)


def one_of(*words: str) -> Kind:
    """One of these strings."""
    said = " or ".join(map(repr, words))
    return Kind(said, lambda value: isinstance(value, str) and value in words, {"enum": list(words)})


def check(kind: AnyKind, value: Any, message: str, hint: str) -> None:
    """Raises `CkptError` with `message` and every problem at its JSON path where the value is not of the kind."""
    if not kind.fits(value):
        raise faults(kind.problems(value, "$"), message, hint)


def check_schema(value: Any, schema: str, source: str, what: str, hint: str) -> None:
    """Raises `CkptError` where the file `source` does not say that it is `what`, in this version."""
    found = value.get("schema") if isinstance(value, dict) else None
    if found != schema:
        raise CkptError(f"{source} is not {what}: schema is {_shown(found)}, not {schema!r}", hint=hint)


def faults(problems: Iterator[Problem], message: str, hint: str) -> CkptError:
    """The error that lists these problems, or the first of very many."""
    shown = list(islice(problems, _MOST + 1))
    more = [Problem(f"more than {_MOST} problems: these are the first", "$")] if len(shown) > _MOST else []
    return CkptError(message, hint=hint, problems=[*shown[:_MOST], *more])


def _under(path: str, name: str) -> str:
    return f"{path}.{name}" if _PLAIN.fullmatch(name) else f"{path}[{name!r:.100}]"


def _shown(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    words = {"None": "null", "True": "true", "False": "false"}
    return words.get(repr(value), f"{value!r:.60}")
