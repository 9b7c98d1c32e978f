from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import optimizer_models as models
from ckpttool.core.checkpoint import ExtraEntry, Section
from ckpttool.core.errors import CkptError, Refused
from ckpttool.core.optimizer_state import FLAT, numbered, renamed
from ckpttool.formats.detect_folder import open_checkpoint
from ckpttool.formats.registry import format_for
from ckpttool.operands.checkpoint import open_operand
from ckpttool.optimizers.forms import class_of, read, same_options, write
from files import write_pieces
from optimizer_support import same, train
from torch_version import needs_torch


def section(path: Path, state: Any) -> Section:
    torch.save({"optimizer": state, "epoch": 1}, path)
    (result,) = open_checkpoint(str(path)).sections
    return result


CLASSES = {
    "Adam or AdamW": ["Adam", "AdamW"],
    **{name: [name] for name in ("SGD", "Adafactor", "Muon", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax")},
    **{name: [name] for name in ("Adadelta", "ASGD", "Rprop", "LBFGS", "SparseAdam")},
}


@pytest.mark.parametrize(("title", "name"), [(title, name) for title, names in CLASSES.items() for name in names])
def test_every_class_of_torch_is_recognised_by_its_groups(title: str, name: str, tmp_path: Path) -> None:
    if name == "Muon":
        needs_torch("2.9", "Muon")
    optimizer = getattr(torch.optim, name)(models.Matrices().parameters(), lr=0.1)
    torch.save({"optimizer": optimizer.state_dict(), "model": {"weight": torch.ones(1)}}, tmp_path / "o.pt")
    result = read(open_checkpoint(str(tmp_path / "o.pt")).section("optimizer"))
    assert class_of(result) == title


def test_reading_and_writing_preserves_an_optimizer(tmp_path: Path) -> None:
    _, optimizer = train(models.Net, models.decayed)
    state = optimizer.state_dict()
    path = tmp_path / "o.pt"
    result = section(path, state)
    source = open_checkpoint(str(path))
    again = write(read(result), result)
    assert [e.key for e in again.tensors] == [e.key for e in result.tensors]
    write_pieces(format_for("o.pt").layout(replace(source, sections=(again,))), tmp_path / "again.pt")
    assert same(torch.load(tmp_path / "again.pt"), {"optimizer": state, "epoch": 1})


def test_numbered_is_the_inverse_of_renamed(tmp_path: Path) -> None:
    _, optimizer = train(models.Net, models.decayed)
    state = read(section(tmp_path / "o.pt", optimizer.state_dict()))
    names = {param: f"layer.{param}" for param in state.params}
    assert numbered(renamed(state, names)) == state


def test_nested_state_is_flattened_as_torch_does(tmp_path: Path) -> None:
    state = {
        "state": {"a.b": {"step": 1, "shampoo": {"0": torch.ones(2)}}},
        "param_groups": [{"lr": 1, "params": ["a.b"]}],
    }
    result = section(tmp_path / "o.pt", state)
    flat = write(replace(read(result), form=FLAT), result)
    assert list(flat.mapping or ()) == ["state.a.b.step", "state.a.b.shampoo.0", "param_groups.a.b.lr"]
    assert read(flat).form == "flat"
    assert read(flat).state["a.b"].keys() == {"step", "shampoo"}


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({"state": {}, "param_groups": [{"lr": 1}]}, "has no list of ids or names @ param_groups.0.params"),
        ({"state": {}, "param_groups": [3]}, "has no list of ids or names @ param_groups.0.params"),
        ({"state": {}, "param_groups": [{"params": [[0]]}]}, "has no list of ids or names @ param_groups.0.params"),
        ({"state": {}, "param_groups": [{"params": [0, "a"]}]}, "some params are ids and some names @ param_groups"),
        ({"state": {}, "param_groups": [{"params": [0, 0]}]}, "is listed more than once in the param groups @ 0"),
        ({"state": {3: {}}, "param_groups": [{"params": [0]}]}, "no param group has this parameter @ state.3"),
        ({"state": {0: 3}, "param_groups": [{"params": [0]}]}, "is not a dict @ state.0"),
        ({"state": {"a": 3}, "param_groups": [{"params": ["a"]}]}, "is not a dict @ state.a"),
        ({"param_groups.a.lr": 1, "state.b.step": 1}, "no param_groups key names this parameter @ state.b.step"),
        ({"param_groups.lr": 1}, "names no parameter @ param_groups.lr"),
        (
            {"param_groups.a.lr": 1, "state.a.x": 1, "state.a.x.y": 2},
            "conflicts with another part of the state @ state.a.x.y",
        ),
        (
            {"param_groups.a.lr": 1, "state.a.x.y": 2, "state.a.x": 1},
            "conflicts with another part of the state @ state.a.x",
        ),
    ],
)
def test_an_invalid_optimizer_state_is_an_error(state: Any, problem: str, tmp_path: Path) -> None:
    torch.save({"optimizer": state, "model": {"weight": torch.ones(1)}}, tmp_path / "o.pt")
    with pytest.raises(CkptError) as raised:
        read(open_checkpoint(str(tmp_path / "o.pt")).section("optimizer"))
    assert raised.value.message == "optimizer is not an optimizer's state dict as torch writes it"
    assert problem in map(str, raised.value.problems)


def test_state_and_groups_of_the_wrong_type_are_an_error() -> None:
    with pytest.raises(CkptError) as raised:
        read(Section("o", "optimizer", (), mapping={"state": 3, "param_groups": 5}))
    assert [problem.key for problem in raised.value.problems] == ["state", "param_groups"]


def test_an_optimizer_at_the_root_is_named_root() -> None:
    with pytest.raises(CkptError) as raised:
        read(Section("", "optimizer", (), mapping={"state": {}, "param_groups": [{}]}))
    assert raised.value.message == "(root) is not an optimizer's state dict as torch writes it"


def test_an_optimizer_without_parameters_has_ids(tmp_path: Path) -> None:
    assert read(section(tmp_path / "o.pt", {"state": {}, "param_groups": [{"params": [], "lr": 1.0}]})).form == "id"


OPTIONS: dict[str, Any] = {
    "1": 1,
    "1.0": 1.0,
    "True": True,
    "None": None,
    "text": "1",
    "list": [1, 2.0],
    "tuple": (1, 2),
    "longer": [1, 2, 3],
    "nested": [[1], (2,)],
    "nested too": ([1], [2]),
    "tensor": torch.ones(2),
    "equal tensor": torch.ones(2),
    "other tensor": torch.zeros(2),
    "bytes": torch.ones(2).view(torch.int32),
    "dict": {"a": torch.ones(2), "b": {"c": 1}},
    "equal dict": {"b": {"c": 1}, "a": torch.ones(2)},
    "other dict": {"a": torch.ones(2), "b": {"c": 2}},
    "object": Namespace(x=1),
    "equal object": Namespace(x=1),
    "other object": Namespace(x=2),
}
EQUAL_OPTIONS = (
    {"1", "1.0"},
    {"list", "tuple"},
    {"nested", "nested too"},
    {"tensor", "equal tensor"},
    {"dict", "equal dict"},
    {"object", "equal object"},
)


def test_options_are_compared_by_value(tmp_path: Path) -> None:
    """Equal options are in one group of a flat state; True is not equal to 1."""
    mapping = {f"param_groups.{n.replace('.', '_')}.lr": v for n, v in OPTIONS.items()}
    torch.save({"optimizer": mapping}, tmp_path / "o.pt")
    (result,) = open_checkpoint(str(tmp_path / "o.pt")).sections
    groups = {frozenset(map(str, group.params)) for group in read(result).groups}
    grouped = set().union(*EQUAL_OPTIONS)
    singles = [{name} for name in OPTIONS if name not in grouped]
    assert groups == {frozenset(name.replace(".", "_") for name in names) for names in (*EQUAL_OPTIONS, *singles)}


def test_options_with_different_names_are_not_the_same() -> None:
    two_options, one_option = {"lr": 1, "eps": 2}, {"lr": 1}
    assert same_options(two_options, dict(two_options))
    assert not any(
        same_options(*pair)
        for pair in ((two_options, one_option), (one_option, two_options), (two_options, {**two_options, "eps": 3}))
    )


def test_a_parameter_without_state_has_no_flat_state_keys(tmp_path: Path) -> None:
    result = section(tmp_path / "o.pt", {"state": {"a": {}}, "param_groups": [{"params": ["a"], "lr": torch.ones(1)}]})
    assert list(write(replace(read(result), form=FLAT), result).mapping or ()) == ["param_groups.a.lr"]


def test_a_group_without_parameters_cannot_be_flattened(tmp_path: Path) -> None:
    groups = [{"params": ["a"], "lr": torch.ones(1)}, {"params": [], "lr": 2}]
    result = section(tmp_path / "o.pt", {"state": {}, "param_groups": groups})
    with pytest.raises(Refused) as refused:
        write(replace(read(result), form=FLAT), result)
    assert list(map(str, refused.value.problems)) == ["a param group without parameters @ param_groups"]


def test_objects_in_the_state_are_preserved(tmp_path: Path) -> None:
    result = section(tmp_path / "o.pt", {"state": {0: {"dtype": torch.float16}}, "param_groups": [{"params": [0]}]})
    again = write(read(result), replace(result, tensors=()))
    assert again.tensors == ()
    assert again.mapping is not None
    assert isinstance(again.mapping["state"][0]["dtype"], ExtraEntry)


@pytest.mark.parametrize(
    ("state", "problem"),
    [({"dirs": [torch.ones(1)]}, "a list in the state"), ({"empty": {}}, "an empty dict in the state")],
)
def test_lists_and_empty_dicts_cannot_be_flattened(state: Any, problem: str, tmp_path: Path) -> None:
    result = section(
        tmp_path / "o.pt", {"state": {"a": state}, "param_groups": [{"params": ["a"], "lr": torch.ones(1)}]}
    )
    with pytest.raises(Refused) as refused:
        write(replace(read(result), form=FLAT), result)
    assert problem in str(refused.value.problems[0])


@pytest.mark.parametrize(
    ("name", "option", "key"),
    [
        ("b.m", "lr", "state.a.b.m"),  # torch would read it as the state `m` of the parameter `a.b`
        ("b.c", "lr", "state.a.b.c"),
        ("m", "b.lr", "param_groups.a.b.lr"),
    ],
)
def test_ambiguous_flat_keys_are_refused(name: str, option: str, key: str, tmp_path: Path) -> None:
    state = {"a": {name: torch.ones(1)}, "a.b": {"c": torch.zeros(1)}}
    groups = [{"params": ["a"], option: 1}, {"params": ["a.b"], "lr": 2}]
    result = section(tmp_path / "o.pt", {"state": state, "param_groups": groups})
    with pytest.raises(Refused) as refused:
        write(replace(read(result), form=FLAT), result)
    assert key in [problem.key for problem in refused.value.problems]


def test_an_optimizer_in_an_ordered_dict_is_read(tmp_path: Path) -> None:
    _, optimizer = train(models.Net, models.adamw)
    result = section(tmp_path / "o.pt", OrderedDict(optimizer.state_dict()))
    assert len(read(result).params) == 9


def test_state_in_a_defaultdict_is_read(tmp_path: Path) -> None:
    state = defaultdict(dict, {0: {"step": torch.ones(())}})
    result = section(tmp_path / "o.pt", {"state": state, "param_groups": [{"params": [0]}]})
    assert read(result).state.keys() == {0}


def test_state_in_a_dict_with_attributes_is_refused(tmp_path: Path) -> None:
    state: Any = OrderedDict({0: {"step": torch.ones(())}})
    state.note = 1
    result = section(tmp_path / "o.pt", {"state": state, "param_groups": [{"params": [0]}]})
    with pytest.raises(CkptError) as raised:
        read(result)
    assert "is not a dict @ state" in map(str, raised.value.problems)


def test_dropped_state_is_not_in_the_file_of_an_extracted_optimizer(tmp_path: Path) -> None:
    from ckpttool.cli.app import main

    _, optimizer = train(models.Net, models.adamw)
    section(tmp_path / "o.pt", {**optimizer.state_dict(), "scaler": {"scale": torch.ones(3), "growth": torch.ones(5)}})
    out = tmp_path / "out.pt"
    assert main(["remap", f"{tmp_path}/o.pt::optimizer", "--drop", "scaler.scale", "-o", str(out), "--verify"]) == 0
    assert torch.load(out)["scaler"].keys() == {"growth"}
    assert open_operand(str(out)).sections[0].kind == "optimizer"


def test_an_exponentially_shared_pickle_is_refused(tmp_path: Path) -> None:
    node: Any = [1]
    for _ in range(60):
        node = [node, node]
    state = {"state": {0: {"bomb": node, "step": torch.ones(())}}, "param_groups": [{"params": [0]}]}
    result = section(tmp_path / "o.pt", state)
    assert result.mapping is None
    with pytest.raises(CkptError, match="no access"):
        read(result)
