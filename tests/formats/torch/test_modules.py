"""Pickled modules have the keys of their `state_dict()` in every pickle protocol; malicious ones
are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpttool import CkptError, open_checkpoint
from ckpttool.containers import tree
from ckpttool.containers.pickle_read import Call, Global, PickledSet
from ckpttool.containers.tree import class_of, is_module, slots_of
from crafted_zip import GOOD, crafted, tensor_node


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.inner = nn.BatchNorm1d(2)
        self.register_buffer("kept", torch.ones(3))
        self.register_buffer("unsaved", torch.ones(3), persistent=False)
        self.register_module("gone", None)
        self.register_parameter("none", None)


class Slotted(Whole):
    __slots__ = ("note",)

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "note", 3)


@pytest.mark.parametrize("protocol", [1, 2, 4])
@pytest.mark.parametrize("kind", [Whole, Slotted])
def test_keys_match_the_state_dict(tmp_path: Path, kind: Any, protocol: int) -> None:
    if kind is Slotted and protocol < 2:
        pytest.skip("protocol 1 cannot pickle slots")
    model = kind()
    torch.save({"m": model}, tmp_path / "m.pt", pickle_protocol=protocol)
    checkpoint = open_checkpoint(str(tmp_path / "m.pt"))
    assert [entry.key for entry in checkpoint.section("m").tensors] == list(model.state_dict())
    assert [entry.key for entry in checkpoint.section("").tensors] == ["m.unsaved"]
    assert checkpoint.section("m").module_class == f"{__name__}.{kind.__name__}"


def test_a_module_from_before_non_persistent_buffers_is_read(tmp_path: Path) -> None:
    """Torch 1.4 had no such buffers."""
    model = nn.BatchNorm1d(2)
    del model.__dict__["_non_persistent_buffers_set"]
    torch.save(model, tmp_path / "m.pt")
    (section,) = open_checkpoint(str(tmp_path / "m.pt")).sections
    assert [entry.key for entry in section.tensors] == [
        "weight", "bias", "running_mean", "running_var", "num_batches_tracked"
    ]  # fmt: skip


def test_a_dict_of_attributes_is_not_a_module(tmp_path: Path) -> None:
    torch.save(dict(vars(nn.Linear(2, 2))), tmp_path / "m.pt")
    checkpoint = open_checkpoint(str(tmp_path / "m.pt"))
    assert [section.path for section in checkpoint.sections] == ["_parameters"]
    assert checkpoint.notes == ()


KIND = Global("own", "Kind")


def module(state: Any = None, *, func: Any = KIND, args: Any = (), **slots: Any) -> Call:
    node = Call(func, args, "NEWOBJ")
    node.state = (
        {"_parameters": {}, "_buffers": {}, "_modules": {}, **slots} if state is None else state
    )
    return node


def nested(depth: int) -> Call:
    node = module(_parameters={"w": tensor_node()})
    for _ in range(depth):
        node = module(_modules={"m": node})
    return node


@pytest.mark.parametrize(
    "node",
    [
        module(state=()),
        module(state=(3,)),
        module(state={"_parameters": {}, "_buffers": {}}),
        module(_modules=3),
        module().state,
        [],
        None,
    ],
)
def test_other_nodes_are_not_modules(node: Any) -> None:
    assert not is_module(node)


def test_attributes_inside_another_state_are_found() -> None:
    attributes = module(_parameters={"w": tensor_node()}).state
    assert [slot.steps for slot in slots_of(module(state=(attributes, {"note": 3})), ())] == [
        (("state", None), ("item", 0), ("item", "_parameters"), ("item", "w"))
    ]
    assert [slot.steps for slot in slots_of(Call(KIND, (3, attributes)), ())] == [
        (("arg", 1), ("item", "_parameters"), ("item", "w"))
    ]


@pytest.mark.parametrize(
    ("names", "saved"),
    [
        (PickledSet(["b", "p"]), False),
        (Call(Global("builtins", "set"), (["b", 3],)), False),
        (Call(Global("builtins", "set"), (("b",),)), False),
        (Call(Global("builtins", "set"), ()), True),
        (Call(Global("builtins", "set"), (["b"], ["b"])), True),
        (Call(Global("builtins", "set"), (3,)), True),
        (["b"], True),
        (None, True),
    ],
)
def test_non_persistent_buffers_are_recognized(names: Any, saved: bool) -> None:
    node = module(
        _parameters={"p": tensor_node()},
        _buffers={"b": tensor_node(), 3: tensor_node(), b"c": tensor_node()},
    )
    node.state["_non_persistent_buffers_set"] = names
    found = {slot.key: slot.is_persistent for slot in slots_of(node, ())}
    assert found == {"p": True, "b": saved, "c": True}


def test_the_class_is_found_in_older_protocols() -> None:
    older = Global("copy_reg", "_reconstructor")
    assert class_of(module()) == "own.Kind"
    assert (
        class_of(module(func=older, args=(KIND, Global("builtins", "object"), None))) == "own.Kind"
    )
    assert class_of(module(func=older)) == "copy_reg._reconstructor"


def test_too_many_nested_modules_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(list(slots_of(nested(200), ()))) == 1
    with pytest.raises(CkptError, match="too many others"):
        list(slots_of(nested(201), ()))
    monkeypatch.setattr(tree, "_MAX_MODULES", 7)
    twice = module(
        _modules={"x": (one := module(_modules={"a": module(), "b": module()})), "y": one}
    )
    assert list(slots_of(twice, ())) == []
    with pytest.raises(CkptError, match="too many others"):
        open_checkpoint(crafted(tmp_path, {"m": module(_modules={"z": twice})}, GOOD))
