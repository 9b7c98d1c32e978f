from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpttool
import optimizer_models as models
from ckpttool import CkptError, Refused, open_checkpoint
from ckpttool.core.checkpoint import ExtraEntry, Section
from ckpttool.core.optimizer_state import FLAT, ParamGroup, numbered, renamed
from ckpttool.formats.registry import format_for
from ckpttool.optimizers import forms
from ckpttool.optimizers.forms import read, write
from ckpttool.optimizers.options import same_options
from command import Run
from files import write_pieces
from optimizer_support import same, train


def section(path: Path, state: Any) -> Section:
    torch.save({"optimizer": state, "epoch": 1}, path)
    (result,) = open_checkpoint(str(path)).sections
    return result


def test_reading_and_writing_preserves_an_optimizer(tmp_path: Path) -> None:
    _, optimizer = train(models.Net, models.decayed)
    state = optimizer.state_dict()
    path = tmp_path / "o.pt"
    result = section(path, state)
    source = open_checkpoint(str(path))
    again = write(read(result), result)
    assert [e.key for e in again.tensors] == [e.key for e in result.tensors]
    write_pieces(
        format_for("o.pt").layout(replace(source, sections=(again,))), tmp_path / "again.pt"
    )
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
    assert list(flat.mapping or ()) == [
        "state.a.b.step",
        "state.a.b.shampoo.0",
        "param_groups.a.b.lr",
    ]
    assert read(flat).form == "flat"
    assert read(flat).state["a.b"].keys() == {"step", "shampoo"}


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        (
            {"state": {}, "param_groups": [{"lr": 1}]},
            "has no list of ids or names @ param_groups.0.params",
        ),
        ({"state": {}, "param_groups": [3]}, "has no list of ids or names @ param_groups.0.params"),
        (
            {"state": {}, "param_groups": [{"params": [[0]]}]},
            "has no list of ids or names @ param_groups.0.params",
        ),
        (
            {"state": {}, "param_groups": [{"params": [0, "a"]}]},
            "some params are ids and some names @ param_groups",
        ),
        (
            {"state": {}, "param_groups": [{"params": [0, 0]}]},
            "is listed more than once in the param groups @ 0",
        ),
        (
            {"state": {3: {}}, "param_groups": [{"params": [0]}]},
            "no param group has this parameter @ state.3",
        ),
        ({"state": {0: 3}, "param_groups": [{"params": [0]}]}, "is not a dict @ state.0"),
        ({"state": {"a": 3}, "param_groups": [{"params": ["a"]}]}, "is not a dict @ state.a"),
        (
            {"param_groups.a.lr": 1, "state.b.step": 1},
            "no param_groups key names this parameter @ state.b.step",
        ),
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


@pytest.mark.parametrize(
    ("path", "mapping", "title", "keys"),
    [
        ("o", {"state": 3, "param_groups": 5}, "o", ["state", "param_groups"]),
        ("", {"state": {}, "param_groups": [{}]}, "(root)", ["param_groups.0.params"]),
    ],
)
def test_an_invalid_optimizer_section_is_named(
    path: str, mapping: Any, title: str, keys: list[str]
) -> None:
    with pytest.raises(CkptError) as raised:
        read(Section(path, "optimizer", (), mapping=mapping))
    assert raised.value.message == f"{title} is not an optimizer's state dict as torch writes it"
    assert [problem.key for problem in raised.value.problems] == keys


def test_an_optimizer_without_parameters_has_ids(tmp_path: Path) -> None:
    assert (
        read(
            section(tmp_path / "o.pt", {"state": {}, "param_groups": [{"params": [], "lr": 1.0}]})
        ).form
        == "id"
    )


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
    assert groups == {
        frozenset(name.replace(".", "_") for name in names) for names in (*EQUAL_OPTIONS, *singles)
    }


def test_options_with_different_names_are_not_the_same() -> None:
    two_options, one_option = {"lr": 1, "eps": 2}, {"lr": 1}
    assert same_options(two_options, dict(two_options))
    assert not any(
        same_options(*pair)
        for pair in (
            (two_options, one_option),
            (one_option, two_options),
            (two_options, {**two_options, "eps": 3}),
        )
    )


def test_a_parameter_without_state_has_no_flat_state_keys(tmp_path: Path) -> None:
    result = section(
        tmp_path / "o.pt",
        {"state": {"a": {}}, "param_groups": [{"params": ["a"], "lr": torch.ones(1)}]},
    )
    assert list(write(replace(read(result), form=FLAT), result).mapping or ()) == [
        "param_groups.a.lr"
    ]


def test_objects_in_the_state_are_preserved(tmp_path: Path) -> None:
    result = section(
        tmp_path / "o.pt",
        {"state": {0: {"dtype": torch.float16}}, "param_groups": [{"params": [0]}]},
    )
    again = write(read(result), replace(result, tensors=()))
    assert again.tensors == ()
    assert again.mapping is not None
    assert isinstance(again.mapping["state"][0]["dtype"], ExtraEntry)


AB = [{"params": ["a"], "lr": 1}, {"params": ["a.b"], "lr": 2}]


@pytest.mark.parametrize(
    ("state", "groups", "problem"),
    [
        (
            {},
            [{"params": ["a"], "lr": torch.ones(1)}, {"params": [], "lr": 2}],
            "a param group without parameters @ param_groups",
        ),
        (
            {"a": {"dirs": [torch.ones(1)]}},
            [{"params": ["a"], "lr": torch.ones(1)}],
            "a list in the state",
        ),
        (
            {"a": {"empty": {}}},
            [{"params": ["a"], "lr": torch.ones(1)}],
            "an empty dict in the state",
        ),
        # torch would read the key as the state `m` of the parameter `a.b`
        ({"a": {"b.m": torch.ones(1)}, "a.b": {"c": torch.zeros(1)}}, AB, "@ state.a.b.m"),
        ({"a": {"b.c": torch.ones(1)}, "a.b": {"c": torch.zeros(1)}}, AB, "@ state.a.b.c"),
        (
            {"a": {"m": torch.ones(1)}, "a.b": {"c": torch.zeros(1)}},
            [{"params": ["a"], "b.lr": 1}, AB[1]],
            "@ param_groups.a.b.lr",
        ),
    ],
)
def test_state_without_flat_keys_or_with_ambiguous_ones_is_refused(
    state: Any, groups: Any, problem: str, tmp_path: Path
) -> None:
    result = section(tmp_path / "o.pt", {"state": state, "param_groups": groups})
    with pytest.raises(Refused) as refused:
        write(replace(read(result), form=FLAT), result)
    assert [one for one in map(str, refused.value.problems) if problem in one]


def test_state_in_other_dicts_is_read_unless_they_have_attributes(tmp_path: Path) -> None:
    _, optimizer = train(models.Net, models.adamw)
    assert len(read(section(tmp_path / "o.pt", OrderedDict(optimizer.state_dict()))).params) == 9
    groups = [{"params": [0]}]
    plain = defaultdict(dict, {0: {"step": torch.ones(())}})
    assert read(
        section(tmp_path / "o.pt", {"state": plain, "param_groups": groups})
    ).state.keys() == {0}
    noted: Any = OrderedDict(plain)
    noted.note = 1
    with pytest.raises(CkptError) as raised:
        read(section(tmp_path / "o.pt", {"state": noted, "param_groups": groups}))
    assert "is not a dict @ state" in map(str, raised.value.problems)


def test_dropped_state_is_not_in_the_file_of_an_extracted_optimizer(tmp_path: Path) -> None:
    from command import main

    _, optimizer = train(models.Net, models.adamw)
    section(
        tmp_path / "o.pt",
        {**optimizer.state_dict(), "scaler": {"scale": torch.ones(3), "growth": torch.ones(5)}},
    )
    out = tmp_path / "out.pt"
    assert (
        main(
            [
                "remap",
                f"{tmp_path}/o.pt::optimizer",
                "--drop",
                "scaler.scale",
                "-o",
                str(out),
                "--verify",
            ]
        )
        == 0
    )
    assert torch.load(out)["scaler"].keys() == {"growth"}
    assert ckpttool.open_checkpoint(str(out)).sections[0].kind == "optimizer"


def test_an_exponentially_shared_pickle_is_refused(tmp_path: Path) -> None:
    node: Any = [1]
    for _ in range(60):
        node = [node, node]
    state = {
        "state": {0: {"bomb": node, "step": torch.ones(())}},
        "param_groups": [{"params": [0]}],
    }
    result = section(tmp_path / "o.pt", state)
    assert result.mapping is None
    with pytest.raises(CkptError, match="cannot be read"):
        read(result)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a", "b"], ("a", "b")),
        (("a", "b"), ("a", "b")),
        (["a"], None),
        (["a", "b", "c"], None),
        (["a", 1], None),
        ("ab", None),
        (None, None),
    ],
)
def test_param_names_must_be_one_string_per_parameter(
    names: object, expected: object, tmp_path: Path, run: Run
) -> None:
    assert ParamGroup((0, 1), {"param_names": names}).param_names == expected
    moments = {"exp_avg": torch.ones(2)}
    optimizer = {
        "state": {0: moments, 1: moments},
        "param_groups": [{"params": [0, 1], "param_names": names}],
    }
    torch.save({"optimizer": optimizer}, tmp_path / "in.pt")
    (section,) = open_checkpoint(str(tmp_path / "in.pt")).optimizers
    assert forms.read(section).groups[0].param_names == expected
    done = run("remap", tmp_path / "in.pt", "--optimizer-keys", "fqn", "-o", tmp_path / "out.pt")
    assert done.status == (1 if expected is None else 0), done.err


@pytest.mark.parametrize("groups", [3, {"params": [1]}, [1, {"a": torch.ones(1)}], None])
def test_entry_next_to_unrelated_param_groups_can_be_dropped(
    groups: Any, tmp_path: Path, run: Run
) -> None:
    scaler = {"scale": torch.ones(2), "growth": torch.ones(()), "param_groups": groups}
    state = {
        "state": {0: {"step": torch.ones(())}},
        "param_groups": [{"params": [0]}],
        "scaler": scaler,
    }
    torch.save({"model": {"w": torch.ones(2)}, "optimizer": state}, tmp_path / "in.pt")
    done = run(
        "remap", tmp_path / "in.pt", "--drop", "optimizer.scaler.scale", "-o", tmp_path / "out.pt"
    )
    assert done.status == 0, done.err
    scaler = torch.load(tmp_path / "out.pt")["optimizer"]["scaler"]
    assert list(scaler) == ["growth", "param_groups"]
    assert str(scaler["param_groups"]) == str(groups)


def test_containers_that_a_file_shares_are_compared_once() -> None:
    class Counted(list[Any]):
        read = 0

        def __iter__(self) -> Any:
            Counted.read += 1
            return super().__iter__()

    def shared(number: int) -> dict[str, Any]:
        value = Counted([number])
        for _ in range(20):
            value = Counted([value, value])
        return {"betas": value}

    assert same_options(shared(1), shared(1))
    assert Counted.read <= 2 * 21
    assert not same_options(shared(1), shared(2))
