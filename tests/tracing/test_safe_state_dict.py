"""The objects of a file against torch's own safe loader: the same object, or an unknown one."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import python2
from ckpttool.core.checkpoint import Section, TensorEntry
from ckpttool.core.errors import CkptError
from ckpttool.live.model import section_of
from ckpttool.operands.checkpoint import open_operand
from ckpttool.tracing.safe_state_dict import Stored, needs_values, stored
from command import Run
from loading_zoo import Opaque, Packed, Undeclared, packed


class Made:
    """Two of them with the same attributes are equal."""

    __slots__ = ("__dict__", "level")
    level: int

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and (other.level, vars(other)) == (self.level, vars(self))

    def __hash__(self) -> int:
        return 0


class Slotted(Made):
    """Whose state is two dicts."""

    def __init__(self, **attributes: int) -> None:
        self.level = 3
        vars(self).update(attributes)


class Bare:
    """Has slots and no other attributes."""

    __slots__ = ("level",)

    def __init__(self) -> None:
        self.level = 3

    def __eq__(self, other: object) -> bool:
        return type(other) is Bare and other.level == self.level

    def __hash__(self) -> int:
        return 0


class Careful:
    """Which looks at its state."""

    def __getstate__(self) -> dict[str, int]:
        return {"level": 1}

    def __setstate__(self, state: dict[str, int]) -> None:
        raise KeyError("depth")


class Named:
    """Which is made with arguments that have names."""

    def __new__(cls, *, level: int) -> Named:
        made = super().__new__(cls)
        vars(made)["level"] = level
        return made

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, int]]:
        return (), {"level": 2}


class Longer(list):
    """A list of a user's class."""


class By:
    """An object whose pickle calls what it is given."""

    def __init__(self, *how: Any) -> None:
        self.how = how

    def __reduce__(self) -> Any:
        return self.how


def put(made: OrderedDict[str, int], state: dict[str, int]) -> None:
    """How a pickle sets the state."""
    made.update(state)


class Other(Slotted):
    """Under whose name another class is declared safe."""


SAFE: list[Any] = [(Slotted, f"{__name__}.Other"), Slotted, Bare, Careful, Named, Longer]


def bytes_of(number: int) -> torch.UntypedStorage:
    return torch.tensor([number], dtype=torch.uint8).untyped_storage()


def nested(depth: int) -> list[Any]:
    made: list[Any] = []
    for _ in range(depth):
        made = [made]
    return made


# An object, and the pickle's protocol.
VALUES: dict[str, tuple[Any, int]] = {
    "ordered": (OrderedDict(a=torch.ones(2), b=[1]), 2),
    "counted": (Counter("aab"), 2),
    "frozen": (frozenset({1, 2}), 2),
    "a set": ({1, 2}, 4),
    "a frozen set": (frozenset({1, 2}), 4),
    "a dtype": (torch.bfloat16, 2),
    "a scheme": (torch.per_tensor_affine, 2),
    "a layout": (torch.strided, 2),
    "shallow": (nested(200), 2),
    "deep": (nested(202), 2),
    "a class": (nn.Linear, 2),
    "a class of Python": (int, 2),
    "a function": (len, 2),
    "a class of tensors": (nn.Parameter, 2),
    "slots": (Slotted(), 2),
    "slots and attributes": (Slotted(depth=2), 2),
    "slots alone": (Bare(), 2),
    "declared under a name": (Other(), 2),
    "a state that is refused": (Careful(), 2),
    "names": (Named(level=2), 4),
    "a list of its own": (Longer([1]), 2),
    "wrong arguments": (By(OrderedDict, (5,)), 2),
    "a setter": (By(OrderedDict, (), {"a": 1}, None, None, put), 4),
    "a subclass": (packed(), 2),
    "a subclass with code": (packed(Undeclared), 2),
    "a storage": (torch.storage.TypedStorage(wrap_storage=bytes_of(7), dtype=torch.uint8, _internal=True), 2),
    "an unhashable item": (By(set, ([By(list, ())],)), 2),
}
ALSO = (
    "frozen",
    "a set",
    "a frozen set",
    "a class of tensors",
    "a subclass",
)  # made here, and not by every torch's safe loader
NOT = ("deep",)  # the other way round


def made(path: Path) -> Stored:
    (section,) = open_operand(str(path)).sections
    return stored(section, True)


def safely(path: Path) -> Any:
    """What torch's safe loader gives; None where it refuses."""
    try:
        return torch.load(path, weights_only=True)
    except Exception:
        return None


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.storage.TypedStorage):
        return one.dtype == other.dtype and one._untyped_storage.tolist() == other._untyped_storage.tolist()
    if isinstance(one, Packed):
        return torch.equal(one.values_, other.values_) and torch.equal(one.scale, other.scale)
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return type(one) is type(other) and one.keys() == other.keys() and all(alike(one[k], other[k]) for k in one)
    return bool(type(one) is type(other) and one == other)


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_objects_are_created_if_torchs_safe_loader_creates_them(name: str, tmp_path: Path) -> None:
    value, protocol = VALUES[name]
    path = tmp_path / "a.pt"
    torch.save({"w": torch.ones(2), "_extra_state": value}, path, pickle_protocol=protocol)
    with torch.serialization.safe_globals(SAFE):
        safe, found = safely(path), made(path)
    is_made = name in ALSO or (safe is not None and name not in NOT)
    assert [problem.key for problem in found.unknown] == ([] if is_made else ["_extra_state"])
    if is_made:
        wanted = safe or torch.load(path, weights_only=False)
        assert alike(found.state["_extra_state"], wanted["_extra_state"])


def test_a_string_of_python_2_is_unknown(tmp_path: Path) -> None:
    state = OrderedDict({"w": torch.ones(2), "_extra_state": "caf\xe9"})
    (problem,) = made(Path(python2.save(state, tmp_path / "a.pt"))).unknown
    assert (problem.key, problem.problem) == ("_extra_state", "a string of Python 2")


def test_a_tensor_has_the_geometry_of_its_entry(tmp_path: Path) -> None:
    """Also where it was read of a file as another one; what has no block of values, or a dtype of no torch, is not."""
    path = tmp_path / "a.pt"
    torch.save({"w": torch.arange(4.0)}, path)
    (section,) = open_operand(str(path)).sections
    (entry,) = section.tensors
    turned = replace(entry, shape=(2, 2), stride=(1, 2))
    found = stored(Section("", "state_dict", (turned,)), True)
    assert torch.equal(found.state["w"], torch.arange(4.0).reshape(2, 2).t())
    sparse = TensorEntry("w", "float32", (2,), (1,), 0, None, "sparse_coo")
    of_sparse = Section("", "state_dict", (entry, sparse))
    assert (needs_values(section), needs_values(of_sparse)) == (False, True)
    (problem,) = stored(of_sparse, True).unknown
    assert "sparse_coo" in problem.problem
    with pytest.raises(CkptError, match="no dtype 'float3'"):
        stored(Section("", "state_dict", (replace(entry, dtype="float3", payload=None),)), True)


def test_extra_state_has_values_on_meta_too(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"w": torch.ones(2), "a._extra_state": torch.ones(2), "b": [torch.ones(2)]}, path)
    (section,) = open_operand(str(path)).sections
    state = stored(section, False).state
    assert [one.device.type for one in (state["w"], state["a._extra_state"], state["b"][0])] == ["meta", "cpu", "cpu"]
    assert torch.equal(state["b"][0], torch.ones(2))


def test_objects_in_memory_are_passed_on() -> None:
    given = {"a._extra_state": 3, "b._extra_state": Opaque(), "w": torch.ones(2)}
    found = stored(section_of(given), True)
    assert found.unknown == ()
    assert (found.state["a._extra_state"], found.state["b._extra_state"]) == (3, given["b._extra_state"])


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


METADATA = {
    "none": None,
    "a list": [1],
    "a number": OrderedDict({"": 5, "1": 5}),
    "a none": OrderedDict({"1": None}),
    "a text": OrderedDict({"1": {"version": "x"}}),
    "an ordered one": OrderedDict({"1": OrderedDict(version=1)}),
    "a plain one": OrderedDict({"1": {"version": 1}}),
    "a new one": OrderedDict({"1": OrderedDict(version=2)}),
}


@pytest.mark.parametrize("name", METADATA)
@pytest.mark.parametrize("without", [(), ("1.num_batches_tracked",)])
def test_versions_are_passed_on(name: str, without: tuple[str, ...], run: Run, tmp_path: Path) -> None:
    """Batch norm asks for its version, and fails if that is not a number in a dict; version 1 had no counter."""
    state: Any = OrderedDict((key, value) for key, value in normed().state_dict().items() if key not in without)
    state._metadata = METADATA[name]
    torch.save(state, tmp_path / "a.pt")
    try:
        normed().load_state_dict(torch.load(tmp_path / "a.pt"), strict=True)
        loads = True
    except (RuntimeError, AttributeError, TypeError):
        loads = False
    assert (run("diff", "--model", f"{__file__}:normed", tmp_path / "a.pt").status == 0) == loads
