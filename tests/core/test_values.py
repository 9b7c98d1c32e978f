"""Values behave as the dataclasses that they are for mypy."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from functools import cached_property
from typing import Any

import pytest

from ckpttool.core.values import dataclass


def _fields(make: Any) -> Any:
    """A class of two fields and some that are not compared, made by the one way or the other."""

    @make(frozen=True, slots=True)
    class Value:
        name: str
        parts: tuple[int, ...] = ()
        about: dict[str, int] = dataclasses.field(default_factory=dict, compare=False)
        secret: int = dataclasses.field(default=0, repr=False, compare=False)

    return Value


OURS, THEIRS = _fields(dataclass), _fields(dataclasses.dataclass)
ARGUMENTS = [("a",), ("a", ()), ("a", (1,)), ("b", (1,)), ("a", (), {"x": 1}), ("a", (), {}, 3)]


@pytest.mark.parametrize("one", ARGUMENTS)
@pytest.mark.parametrize("other", ARGUMENTS)
def test_what_is_equal(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    assert (OURS(*one) == OURS(*other)) is (THEIRS(*one) == THEIRS(*other))
    assert (hash(OURS(*one)) == hash(OURS(*other))) is (hash(THEIRS(*one)) == hash(THEIRS(*other)))
    assert OURS(*one) != THEIRS(*one)
    assert OURS(*one) != one


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_how_it_is_shown(arguments: tuple[Any, ...]) -> None:
    assert repr(OURS(*arguments)) == repr(THEIRS(*arguments))


def test_its_fields() -> None:
    assert [field.name for field in dataclasses.fields(OURS)] == ["name", "parts", "about", "secret"]
    assert dataclasses.replace(OURS("a"), parts=(2,)) == OURS("a", (2,))
    assert dataclasses.asdict(OURS("a")) == dataclasses.asdict(THEIRS("a"))
    assert OURS.__slots__ == ("name", "parts", "about", "secret")
    assert OURS.__match_args__ == THEIRS.__match_args__
    assert OURS("a").about is not OURS("a").about


@dataclass(frozen=True)
class Base:
    """What is sent to other ranks lies at the top of its module."""

    name: str

    @cached_property
    def long(self) -> int:
        """The characters of the name."""
        return len(self.name)


@dataclass(frozen=True)
class Derived(Base):
    """One more field, without which it compares as its base does not."""

    number: int = 0


@dataclass(frozen=True, kw_only=True)
class Options:
    """Given by name alone."""

    depth: int = 0
    name: str


@dataclass(slots=True)
class Tally:
    """What counts, and has no hash."""

    count: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """Equal to itself alone."""

    name: str


@dataclass(frozen=True, slots=True)
class Nothing:
    """No field at all."""


def test_kinds_of_values() -> None:
    assert Derived("a", 1) == Derived("a", 1) != Derived("a", 2)
    assert Derived("a") != Base("a")
    assert Derived("abc").long == 3
    assert pickle.loads(pickle.dumps(Derived("a", 1))) == copy.deepcopy(Derived("a", 1)) == Derived("a", 1)
    assert Options(name="n") == Options(name="n", depth=0)
    with pytest.raises(TypeError):
        Options("n")  # type: ignore[call-arg, arg-type]
    assert Tally() == Tally(0) != Tally(1)
    with pytest.raises(TypeError):
        hash(Tally())
    node = Node("a")
    assert node == node != Node("a")
    assert len({node, node, Node("a")}) == 2
    assert Nothing() == Nothing()
    assert hash(Nothing()) == hash(Nothing())


def test_a_hash_of_its_own() -> None:
    @dataclass(frozen=True, slots=True)
    class Held:
        parts: list[int]

        def __hash__(self) -> int:
            return len(self.parts)

    assert hash(Held([1, 2])) == 2
    assert Held([1]) == Held([1]) != Held([2])


def test_what_a_class_says_itself_is_kept() -> None:
    @dataclass(frozen=True, slots=True)
    class Loud:
        name: str

        def __repr__(self) -> str:
            return self.name.upper()

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Loud) and other.name.lower() == self.name.lower()

        def __hash__(self) -> int:
            return hash(self.name.lower())

    assert repr(Loud("a")) == "A"
    assert len({Loud("a"), Loud("A")}) == 1
