"""Objects in a file, against torch's safe loader: the same object is created, or it is unknown."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpttool
import python2
from ckpttool import CkptError
from ckpttool.core.checkpoint import Section, TensorEntry
from ckpttool.live.model import section_of
from ckpttool.tracing.safe_state_dict import Stored, needs_values, stored
from command import Run
from loading_zoo import Opaque, Packed, Undeclared, packed


class Comparable:
    __slots__ = ("__dict__", "level")
    level: int

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and (other.level, vars(other)) == (self.level, vars(self))

    def __hash__(self) -> int:
        return 0


class SlotsAndDict(Comparable):
    def __init__(self, **attributes: int) -> None:
        self.level = 3
        vars(self).update(attributes)


class SlotsOnly:
    __slots__ = ("level",)

    def __init__(self) -> None:
        self.level = 3

    def __eq__(self, other: object) -> bool:
        return type(other) is SlotsOnly and other.level == self.level

    def __hash__(self) -> int:
        return 0


class RefusesState:
    def __getstate__(self) -> dict[str, int]:
        return {"level": 1}

    def __setstate__(self, state: dict[str, int]) -> None:
        raise KeyError("depth")


class KeywordArguments:
    def __new__(cls, *, level: int) -> KeywordArguments:
        instance = super().__new__(cls)
        vars(instance)["level"] = level
        return instance

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, int]]:
        return (), {"level": 2}


class CustomList(list):
    pass


class PicklesAs:
    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


def set_state(target: OrderedDict[str, int], state: dict[str, int]) -> None:
    target.update(state)


class SafeName(SlotsAndDict):
    """Another class is declared safe under this name."""


SAFE: list[Any] = [
    (SlotsAndDict, f"{__name__}.SafeName"),
    SlotsAndDict,
    SlotsOnly,
    RefusesState,
    KeywordArguments,
    CustomList,
]


def bytes_of(number: int) -> torch.UntypedStorage:
    return torch.tensor([number], dtype=torch.uint8).untyped_storage()


def nested(depth: int) -> list[Any]:
    result: list[Any] = []
    for _ in range(depth):
        result = [result]
    return result


# An object and its pickle protocol.
VALUES: dict[str, tuple[Any, int]] = {
    "an OrderedDict": (OrderedDict(a=torch.ones(2), b=[1]), 2),
    "a Counter": (Counter("aab"), 2),
    "an old frozen set": (frozenset({1, 2}), 2),
    "a set": ({1, 2}, 4),
    "a frozen set": (frozenset({1, 2}), 4),
    "a dtype": (torch.bfloat16, 2),
    "a scheme": (torch.per_tensor_affine, 2),
    "a layout": (torch.strided, 2),
    "at the depth limit": (nested(200), 2),
    "too deep": (nested(202), 2),
    "a class": (nn.Linear, 2),
    "a built-in class": (int, 2),
    "a function": (len, 2),
    "a tensor class": (nn.Parameter, 2),
    "slots": (SlotsAndDict(), 2),
    "slots and attributes": (SlotsAndDict(depth=2), 2),
    "slots only": (SlotsOnly(), 2),
    "declared under another name": (SafeName(), 2),
    "a state that is refused": (RefusesState(), 2),
    "keyword arguments": (KeywordArguments(level=2), 4),
    "a list class": (CustomList([1]), 2),
    "wrong arguments": (PicklesAs(OrderedDict, (5,)), 2),
    "a setter": (PicklesAs(OrderedDict, (), {"a": 1}, None, None, set_state), 4),
    "a subclass": (packed(), 2),
    "a subclass with code": (packed(Undeclared), 2),
    "a storage": (
        torch.storage.TypedStorage(wrap_storage=bytes_of(7), dtype=torch.uint8, _internal=True),
        2,
    ),
    "an unhashable item": (PicklesAs(set, ([PicklesAs(list, ())],)), 2),
}
ONLY_HERE = (
    "an old frozen set",
    "a set",
    "a frozen set",
    "a tensor class",
    "a subclass",
)  # the safe loaders of some torch versions refuse them
ONLY_IN_TORCH = ("too deep",)  # created by torch but not here


def load_stored(path: Path) -> Stored:
    (section,) = ckpttool.open_checkpoint(str(path)).sections
    return stored(section, True)


def torch_safe_load(path: Path) -> Any:
    """Load with torch's safe loader; return None if it refuses the file."""
    try:
        return torch.load(path, weights_only=True)
    except Exception:
        return None


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.storage.TypedStorage):
        return (
            one.dtype == other.dtype
            and one._untyped_storage.tolist() == other._untyped_storage.tolist()
        )
    if isinstance(one, Packed):
        return torch.equal(one.values_, other.values_) and torch.equal(one.scale, other.scale)
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return (
            type(one) is type(other)
            and one.keys() == other.keys()
            and all(equal(one[k], other[k]) for k in one)
        )
    return bool(type(one) is type(other) and one == other)


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_objects_are_created_if_the_safe_loader_of_torch_creates_them(
    name: str, tmp_path: Path
) -> None:
    value, protocol = VALUES[name]
    path = tmp_path / "a.pt"
    torch.save({"w": torch.ones(2), "_extra_state": value}, path, pickle_protocol=protocol)
    with torch.serialization.safe_globals(SAFE):
        safe, result = torch_safe_load(path), load_stored(path)
    is_made = name in ONLY_HERE or (safe is not None and name not in ONLY_IN_TORCH)
    assert [problem.key for problem in result.unknown] == ([] if is_made else ["_extra_state"])
    if is_made:
        expected = safe or torch.load(path, weights_only=False)
        assert equal(result.state["_extra_state"], expected["_extra_state"])


def test_a_python_2_string_is_unknown(tmp_path: Path) -> None:
    state = OrderedDict({"w": torch.ones(2), "_extra_state": "caf\xe9"})
    (problem,) = load_stored(Path(python2.save(state, tmp_path / "a.pt"))).unknown
    assert (problem.key, problem.problem) == ("_extra_state", "a string of Python 2")


def test_a_tensor_has_the_geometry_of_its_entry(tmp_path: Path) -> None:
    """The entry decides, not the pickled tensor; sparse entries are unknown, and unknown dtypes are
    an error.
    """
    path = tmp_path / "a.pt"
    torch.save({"w": torch.arange(4.0)}, path)
    (section,) = ckpttool.open_checkpoint(str(path)).sections
    (entry,) = section.tensors
    transposed = replace(entry, shape=(2, 2), stride=(1, 2))
    result = stored(Section("", "state_dict", (transposed,)), True)
    assert torch.equal(result.state["w"], torch.arange(4.0).reshape(2, 2).t())
    sparse = TensorEntry("w", "float32", (2,), (1,), 0, None, "sparse_coo")
    with_sparse = Section("", "state_dict", (entry, sparse))
    assert (needs_values(section), needs_values(with_sparse)) == (False, True)
    (problem,) = stored(with_sparse, True).unknown
    assert "sparse_coo" in problem.problem
    with pytest.raises(CkptError, match="no dtype 'float3'"):
        stored(Section("", "state_dict", (replace(entry, dtype="float3", payload=None),)), True)


def test_extra_state_has_values_even_if_tensors_are_on_meta(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"w": torch.ones(2), "a._extra_state": torch.ones(2), "b": [torch.ones(2)]}, path)
    (section,) = ckpttool.open_checkpoint(str(path)).sections
    state = stored(section, False).state
    assert [one.device.type for one in (state["w"], state["a._extra_state"], state["b"][0])] == [
        "meta",
        "cpu",
        "cpu",
    ]
    assert torch.equal(state["b"][0], torch.ones(2))


def test_objects_in_memory_are_passed_on() -> None:
    state = {"a._extra_state": 3, "b._extra_state": Opaque(), "w": torch.ones(2)}
    result = stored(section_of(state), True)
    assert result.unknown == ()
    assert (result.state["a._extra_state"], result.state["b._extra_state"]) == (
        3,
        state["b._extra_state"],
    )


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


METADATA = {
    "none": None,
    "a list": [1],
    "a number": OrderedDict({"": 5, "1": 5}),
    "a none for a module": OrderedDict({"1": None}),
    "a string": OrderedDict({"1": {"version": "x"}}),
    "an OrderedDict": OrderedDict({"1": OrderedDict(version=1)}),
    "a dict": OrderedDict({"1": {"version": 1}}),
    "the current version": OrderedDict({"1": OrderedDict(version=2)}),
}


@pytest.mark.parametrize("name", METADATA)
@pytest.mark.parametrize("removed", [(), ("1.num_batches_tracked",)])
def test_module_versions_are_passed_on(
    name: str, removed: tuple[str, ...], run: Run, tmp_path: Path
) -> None:
    """Batch norm needs a version that is a number in a dict; version 1 had no counter."""
    state: Any = OrderedDict(
        (key, value) for key, value in with_batch_norm().state_dict().items() if key not in removed
    )
    state._metadata = METADATA[name]
    torch.save(state, tmp_path / "a.pt")
    try:
        with_batch_norm().load_state_dict(torch.load(tmp_path / "a.pt"), strict=True)
        loads = True
    except (RuntimeError, AttributeError, TypeError):
        loads = False
    assert (
        run("diff", "--model", f"{__file__}:with_batch_norm", tmp_path / "a.pt").status == 0
    ) == loads
