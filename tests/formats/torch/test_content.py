"""The digest of an object: equal where torch loads equal objects, however the file was written, and nowhere else."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttool.core.checkpoint import Payload
from ckpttool.formats.detect_folder import open_checkpoint
from ckpttool.formats.pickle_read import Call, Global, PickledSet
from ckpttool.formats.torch.nodes import content_of


class Own:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Other(Own):
    """Of the same attributes."""


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


class Items(list[Any]):
    """A list of one's own: it is made empty, then filled."""


class Pairs(dict[Any, Any]):
    """A dict of one's own."""


def filled(kind: Any, *parts: Any, **attributes: Any) -> Any:
    made = kind(*parts)
    made.__dict__.update(attributes)
    return made


NUMBERS = torch.arange(4.0)
VALUES: dict[str, Any] = {
    **{f"a scalar {value!r}": [value] for value in (1, 2, 1.0, True, None, "1", b"1", 2**70, -1, 0.0, -0.0, "")},
    **{f"a container {value!r}": value for value in ([1, 2], [2, 1], (1, 2), [[1], 2], [1, [2]], [], (), [1, 2, 2])},
    **{f"a set {value!r}": value for value in ({1, 2}, {1, 3}, frozenset((1, 2)), frozenset((1, 3)), {"a"})},
    **{f"a dict {value!r}": value for value in ({"a": 1}, {"b": 1}, {"a": 2}, {"a": 1, "b": 1}, {1: "a"}, {})},
    "an ordered dict": OrderedDict(a=1),
    "an ordered dict of attributes": filled(OrderedDict, {"a": 1}, note=1),
    "of others": filled(OrderedDict, {"a": 1}, note=2),
    "a default dict": defaultdict(list, a=1),
    "of another default": defaultdict(set, a=1),
    "a counter": Counter(a=1),
    "a queue": deque([1, 2]),
    "an object": Own(a=1),
    "of another class": Other(a=1),
    "of another value": Own(a=2),
    "of another name": Own(b=1),
    "of nothing": Own(),
    "of slots": Slotted(1),
    "of other slots": Slotted(2),
    "own items": Items([1, 2]),
    "own items otherwise": Items([2, 1]),
    "no items": Items([]),
    "own items and a name": filled(Items, [1, 2], name="x"),
    "own pairs": Pairs(a=1),
    "other pairs": Pairs(a=2),
    "other keys": Pairs(b=1),
    "no pairs": Pairs(),
    "a tensor": [NUMBERS],
    "other numbers": [NUMBERS + 1],
    "other shape": [NUMBERS.reshape(2, 2)],
    "other dtype": [NUMBERS.view(torch.int32).clone()],
    "half of it": [NUMBERS[:2]],
    "a storage": [NUMBERS.clone().untyped_storage()],
    "another storage": [(NUMBERS + 1).untyped_storage()],
    "a quantized tensor": [torch.quantize_per_tensor(NUMBERS, 0.5, 0, torch.qint8)],
    "of another scale": [torch.quantize_per_tensor(2 * NUMBERS, 1.0, 0, torch.qint8)],
    "a sparse tensor": [NUMBERS.to_sparse()],
    "sparse elsewhere": [NUMBERS.roll(1).to_sparse()],
    "a dtype": [torch.float32],
    "another": [torch.float16],
    "a class": [Own],
    "another class": [Other],
}


ENCODE = Global("_codecs", "encode")
SET, BYTES = (Global("__builtin__", kind) for kind in ("set", "bytes"))
# What protocol 2 would have made a set or bytes of, but for a word
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


def test_calls_that_are_almost_those_of_a_set_or_of_bytes() -> None:
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
    """The digests of every value: from files of other order, protocols and formats, all but the first with copies."""
    found: dict[str, list[bytes]] = {name: [] for name in VALUES}
    folder = tmp_path_factory.mktemp("contents")
    again = {name: copy.deepcopy(VALUES[name]) for name in reversed(VALUES)}
    for protocol, values in ((2, VALUES), (3, again), (4, again), (5, VALUES)):
        path = folder / f"{protocol}.pt"
        state = {f"{name}_extra_state": value for name, value in values.items()} | {"w": torch.ones(1)}
        torch.save(state, path, pickle_protocol=protocol, _use_new_zipfile_serialization=protocol != 5)
        for extra in open_checkpoint(str(path)).section("").extras:
            assert isinstance(extra.payload, Payload)
            content = extra.payload.content()
            assert content is not None, extra.key
            found[extra.key.removesuffix("_extra_state")].append(content)
    return found


def test_equal_objects_have_one_digest(contents: dict[str, list[bytes]]) -> None:
    assert [name for name, found in contents.items() if len(found) != 4 or len(set(found)) > 1] == []


def test_other_objects_have_others(contents: dict[str, list[bytes]]) -> None:
    pairs = combinations(contents.items(), 2)
    assert [(one, other) for (one, mine), (other, yours) in pairs if mine[0] == yours[0]] == []


def test_what_is_shared_is_not_told_from_what_is_there_twice(tmp_path: Path) -> None:
    once = [1, NUMBERS]
    torch.save({"w": NUMBERS, "a_extra_state": [once, once], "b_extra_state": [once, [1, NUMBERS.clone()]]},
               tmp_path / "shared.pt")  # fmt: skip
    one, other = (extra.payload for extra in open_checkpoint(str(tmp_path / "shared.pt")).section("").extras)
    assert isinstance(one, Payload)
    assert isinstance(other, Payload)
    assert one.content() == other.content() is not None


@pytest.mark.parametrize("deep", [150, 190, 210, 400])
def test_of_what_holds_itself_or_is_nested_too_deep_nothing_is_told(tmp_path: Path, deep: int) -> None:
    ring: list[Any] = [1]
    ring.append(ring)
    nested: list[Any] = []
    for _ in range(deep):
        nested = [nested]
    torch.save({"w": NUMBERS, "a_extra_state": ring, "b_extra_state": nested}, tmp_path / "deep.pt")
    one, other = (extra.payload for extra in open_checkpoint(str(tmp_path / "deep.pt")).section("").extras)
    assert isinstance(one, Payload)
    assert isinstance(other, Payload)
    assert one.content() is None
    assert (other.content() is None) == (deep > 200)
