"""Digests of objects are equal if and only if torch loads equal objects, regardless of how the file
was written.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttool import open_checkpoint
from ckpttool.containers.nodes import content_of
from ckpttool.containers.pickle_read import Call, Global, PickledSet
from ckpttool.core.checkpoint import Payload


class Own:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Other(Own):
    """Another class with the same attributes."""


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


class Items(list[Any]):
    """A subclass of list: pickled empty, and then filled."""


class Pairs(dict[Any, Any]):
    """A subclass of dict."""


def filled(kind: Any, *parts: Any, **attributes: Any) -> Any:
    instance = kind(*parts)
    instance.__dict__.update(attributes)
    return instance


NUMBERS = torch.arange(4.0)
VALUES: dict[str, Any] = {
    **{
        f"a scalar {value!r}": [value]
        for value in (1, 2, 1.0, True, None, "1", b"1", 2**70, -1, 0.0, -0.0, "")
    },
    **{
        f"a container {value!r}": value
        for value in ([1, 2], [2, 1], (1, 2), [[1], 2], [1, [2]], [], (), [1, 2, 2])
    },
    **{
        f"a set {value!r}": value
        for value in ({1, 2}, {1, 3}, frozenset((1, 2)), frozenset((1, 3)), {"a"})
    },
    **{
        f"a dict {value!r}": value
        for value in ({"a": 1}, {"b": 1}, {"a": 2}, {"a": 1, "b": 1}, {1: "a"}, {})
    },
    "an ordered dict": OrderedDict(a=1),
    "an ordered dict with attributes": filled(OrderedDict, {"a": 1}, note=1),
    "an ordered dict with other attributes": filled(OrderedDict, {"a": 1}, note=2),
    "a default dict": defaultdict(list, a=1),
    "a default dict with another default": defaultdict(set, a=1),
    "a counter": Counter(a=1),
    "a queue": deque([1, 2]),
    "an object": Own(a=1),
    "an object of another class": Other(a=1),
    "an object with another value": Own(a=2),
    "an object with another attribute": Own(b=1),
    "an empty object": Own(),
    "an object with slots": Slotted(1),
    "an object with other slots": Slotted(2),
    "a list subclass": Items([1, 2]),
    "a list subclass in another order": Items([2, 1]),
    "an empty list subclass": Items([]),
    "a list subclass with a name": filled(Items, [1, 2], name="x"),
    "a dict subclass": Pairs(a=1),
    "a dict subclass with other values": Pairs(a=2),
    "a dict subclass with other keys": Pairs(b=1),
    "an empty dict subclass": Pairs(),
    "a tensor": [NUMBERS],
    "other numbers": [NUMBERS + 1],
    "other shape": [NUMBERS.reshape(2, 2)],
    "other dtype": [NUMBERS.view(torch.int32).clone()],
    "half of a tensor": [NUMBERS[:2]],
    "a storage": [NUMBERS.clone().untyped_storage()],
    "another storage": [(NUMBERS + 1).untyped_storage()],
    "a quantized tensor": [torch.quantize_per_tensor(NUMBERS, 0.5, 0, torch.qint8)],
    "a quantized tensor with another scale": [
        torch.quantize_per_tensor(2 * NUMBERS, 1.0, 0, torch.qint8)
    ],
    "a sparse tensor": [NUMBERS.to_sparse()],
    "a sparse tensor with other indices": [NUMBERS.roll(1).to_sparse()],
    "a dtype": [torch.float32],
    "another dtype": [torch.float16],
    "a class": [Own],
    "another class": [Other],
}


ENCODE = Global("_codecs", "encode")
SET, BYTES = (Global("__builtin__", kind) for kind in ("set", "bytes"))
# Protocol 2 writes calls for a set or bytes; these calls differ from them in one detail
ODD = [
    Call(SET, ()),
    Call(SET, ((1, 2),)),
    Call(SET, ([1, 2], 3)),
    Call(SET, ([1, 2],), "NEWOBJ"),
    Call(ENCODE, ("a",)),
    Call(ENCODE, ("a", "utf-8")),
    Call(ENCODE, ("a", "latin1", 3)),
    Call(ENCODE, (3, "latin1")),
    Call(ENCODE, ("\u0100", "latin1")),
    Call(BYTES, ("a",)),
    Call(Global("own", "set"), ([1, 2],)),
]


def test_calls_that_only_resemble_a_set_or_bytes_have_other_digests() -> None:
    nodes = [*ODD, PickledSet([1, 2]), b"a", b""]
    digests = [content_of(node, lambda node: None) for node in nodes]
    assert None not in digests
    assert len(set(digests)) == len(nodes)
    same = [Call(SET, ([2, 1],)), Call(ENCODE, ("a", "latin1")), Call(BYTES, ())]
    assert [content_of(node, lambda node: None) for node in same] == digests[-3:]
    highest = content_of(Call(ENCODE, ("\xff", "latin1")), lambda node: None)
    assert highest == content_of(b"\xff", lambda node: None)


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[bytes]]:
    """The digests of every value, from files with different orders, protocols and formats."""
    found: dict[str, list[bytes]] = {name: [] for name in VALUES}
    folder = tmp_path_factory.mktemp("contents")
    again = {name: copy.deepcopy(VALUES[name]) for name in reversed(VALUES)}
    for protocol, values in ((2, VALUES), (3, again), (4, again), (5, VALUES)):
        path = folder / f"{protocol}.pt"
        state = {f"{name}_extra_state": value for name, value in values.items()} | {
            "w": torch.ones(1)
        }
        torch.save(
            state, path, pickle_protocol=protocol, _use_new_zipfile_serialization=protocol != 5
        )
        for extra in open_checkpoint(str(path)).section("").extras:
            assert isinstance(extra.payload, Payload)
            content = extra.payload.content()
            assert content is not None, extra.key
            found[extra.key.removesuffix("_extra_state")].append(content)
    return found


def test_equal_objects_have_one_digest(contents: dict[str, list[bytes]]) -> None:
    assert [
        name for name, found in contents.items() if len(found) != 4 or len(set(found)) > 1
    ] == []


def test_different_objects_have_different_digests(contents: dict[str, list[bytes]]) -> None:
    pairs = combinations(contents.items(), 2)
    assert [(one, other) for (one, left), (other, right) in pairs if left[0] == right[0]] == []


def test_shared_and_repeated_objects_have_the_same_digest(tmp_path: Path) -> None:
    once = [1, NUMBERS]
    torch.save({"w": NUMBERS, "a_extra_state": [once, once], "b_extra_state": [once, [1, NUMBERS.clone()]]},
               tmp_path / "shared.pt")  # fmt: skip
    one, other = (
        extra.payload for extra in open_checkpoint(str(tmp_path / "shared.pt")).section("").extras
    )
    assert isinstance(one, Payload)
    assert isinstance(other, Payload)
    assert one.content() == other.content() is not None


@pytest.mark.parametrize("deep", [150, 190, 210, 400])
def test_cyclic_and_deeply_nested_objects_have_no_digest(tmp_path: Path, deep: int) -> None:
    ring: list[Any] = [1]
    ring.append(ring)
    nested: list[Any] = []
    for _ in range(deep):
        nested = [nested]
    torch.save({"w": NUMBERS, "a_extra_state": ring, "b_extra_state": nested}, tmp_path / "deep.pt")
    one, other = (
        extra.payload for extra in open_checkpoint(str(tmp_path / "deep.pt")).section("").extras
    )
    assert isinstance(one, Payload)
    assert isinstance(other, Payload)
    assert one.content() is None
    assert (other.content() is None) == (deep > 200)
