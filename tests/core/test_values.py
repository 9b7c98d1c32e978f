"""The `dataclass` replacement behaves like `dataclasses.dataclass`."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from functools import cached_property
from typing import Any

import pytest

from ckpttool.core.values import dataclass, public


def _fields(make: Any) -> Any:
    @make(frozen=True, slots=True)
    class Value:
        name: str
        parts: tuple[int, ...] = ()
        about: dict[str, int] = dataclasses.field(default_factory=dict, compare=False)
        secret: int = dataclasses.field(default=0, repr=False, compare=False)

    return Value


REPLACEMENT, STANDARD = _fields(dataclass), _fields(dataclasses.dataclass)
ARGUMENTS = [("a",), ("a", ()), ("a", (1,)), ("b", (1,)), ("a", (), {"x": 1}), ("a", (), {}, 3)]


@pytest.mark.parametrize("one", ARGUMENTS)
def test_equality_hash_and_repr(one: tuple[Any, ...]) -> None:
    for other in ARGUMENTS:
        assert (REPLACEMENT(*one) == REPLACEMENT(*other)) is (STANDARD(*one) == STANDARD(*other))
        assert (hash(REPLACEMENT(*one)) == hash(REPLACEMENT(*other))) is (
            hash(STANDARD(*one)) == hash(STANDARD(*other))
        )
    assert REPLACEMENT(*one) != STANDARD(*one)
    assert REPLACEMENT(*one) != one
    assert repr(REPLACEMENT(*one)) == repr(STANDARD(*one))


def test_fields() -> None:
    assert [field.name for field in dataclasses.fields(REPLACEMENT)] == [
        "name",
        "parts",
        "about",
        "secret",
    ]
    assert dataclasses.replace(REPLACEMENT("a"), parts=(2,)) == REPLACEMENT("a", (2,))
    assert dataclasses.asdict(REPLACEMENT("a")) == dataclasses.asdict(STANDARD("a"))
    assert REPLACEMENT.__slots__ == ("name", "parts", "about", "secret")
    assert REPLACEMENT.__match_args__ == STANDARD.__match_args__
    assert REPLACEMENT("a").about is not REPLACEMENT("a").about


@dataclass(frozen=True)
class Base:  # at module level, since it is pickled
    name: str

    @cached_property
    def long(self) -> int:
        return len(self.name)


@dataclass(frozen=True)
class Derived(Base):
    number: int = 0


@dataclass(frozen=True, kw_only=True)
class Options:
    depth: int = 0
    name: str


@dataclass(slots=True)
class Tally:
    count: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    name: str


@dataclass(frozen=True, slots=True)
class Nothing:
    """Has no fields."""


def test_options_of_the_decorator() -> None:
    assert Derived("a", 1) == Derived("a", 1) != Derived("a", 2)
    assert Derived("a") != Base("a")
    assert Derived("abc").long == 3
    assert (
        pickle.loads(pickle.dumps(Derived("a", 1)))
        == copy.deepcopy(Derived("a", 1))
        == Derived("a", 1)
    )
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


def test_short_repr_shows_small_values() -> None:
    @public
    @dataclass(frozen=True)
    class Counts:
        name: str
        small: int
        large: int
        parts: tuple[int, ...]

    values = "small=3, large=<int>, parts=<2>)"
    name = "a" * 50
    assert repr(Counts(name, 3, 1 << 200, (1, 2))) == f"Counts(name='{name}', {values}"
    assert repr(Counts("a" * 500, 3, 1 << 200, (1, 2))) == f"Counts(name=<500 characters>, {values}"


def test_custom_methods_are_kept() -> None:
    @dataclass(frozen=True, slots=True)
    class Held:
        parts: list[int]

        def __hash__(self) -> int:
            return len(self.parts)

    assert hash(Held([1, 2])) == 2
    assert Held([1]) == Held([1]) != Held([2])

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
