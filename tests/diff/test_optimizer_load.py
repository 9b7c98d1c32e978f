"""A saved optimizer against the optimizer that loads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpttool
from ckpttool import CkptError, Diff
from names_files import names_file, ref, runtime, serialized
from saved_optimizers import OPTIONS, differences, saved

Json = dict[str, Any]
Way = tuple[str, str | None, bool | None, tuple[str, ...]]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def model(*groups: str, frozen: str = "", outside: str = "") -> str:
    """Return the names file of a model with one-letter parameters of two elements, in these groups
    of an AdamW.
    """
    letters = sorted("".join(groups) + frozen + outside)
    params: list[Json] = []
    for number, group in enumerate(groups):
        for fqn in group:
            state = ["step", "exp_avg"]
            params.append({"id": len(params), "fqn": fqn, "group": number, "state": state})
    tensors = [runtime(one) for one in letters]
    for tensor in tensors:
        tensor["trainable"] = tensor["fqn"] not in frozen
    return names_file(
        Path("names.json"),
        tensors,
        [serialized(one, ref(one)) for one in letters],
        {one: ref(one) for one in letters},
        model="net.py:Net",
        optimizer=params,
        optimizer_class="AdamW" if groups else None,
        optimizer_groups=[{**OPTIONS, "weight_decay": at} for at in range(len(groups))],
    )


def compare(state: Json, names: str, *keys: str) -> Diff:
    """Compare an optimizer of a file that also has a state dict with each of the `keys`."""
    sections = {f"model{at}": {key: torch.ones(2) for key in of} for at, of in enumerate(keys)}
    torch.save({**sections, "optimizer": state}, "run.pt")
    return ckpttool.diff("run.pt::optimizer", model=names)


def remedy(diff: Diff) -> Way | None:
    one = diff.remedy
    return None if one is None else (one.way, one.form, one.same_groups, one.foreign_keys)


def way(name: str, form: str | None = None, same_groups: bool | None = None) -> Way:
    return name, form, same_groups, ()


@pytest.mark.parametrize("form", ["id", "fqn", "flat"])
@pytest.mark.parametrize("groups", [("abc",), ("ca", "b")])
def test_the_same_optimizer_fits_in_every_form(form: str, groups: tuple[str, ...]) -> None:
    diff = compare(saved(form, *groups), model(*groups))
    assert (diff.identical, differences(diff), remedy(diff)) == (True, [], None)
    assert any("this answer assumes" in note for note in diff.notes) == (form == "id")


def test_keys_of_the_state_dict_confirm_or_contradict_ids() -> None:
    diff = compare(saved("id", "abc"), model("abc"), "abc")
    assert diff.identical
    assert diff.notes[0] == (
        "left: its ids are read as the ids of the optimizer; the file lists the model's keys in this"
        " order"
    )
    other = compare(saved("id", "abc"), model("abc"), "acb")
    assert not other.identical
    assert [status for status, *_ in differences(other)] == ["order", "order"]
    assert remedy(other) == way("old_model", same_groups=True)


def test_named_ids_in_another_order_are_misassigned() -> None:
    diff = compare(saved("id", "abc", names=True), model("acb"))
    assert [(entry.status, entry.detail) for entry in diff.entries if entry.detail] == [
        ("order", "gets the state of c"),
        ("order", "gets the state of b"),
    ]
    assert (diff.identical, remedy(diff)) == (False, way("by_name", "id"))
    # no state can be misassigned
    assert compare(saved("id", "abc", names=True, stateless="bc"), model("acb")).identical
    assert not compare(saved("id", "abc", names=True, stateless="b"), model("acb")).identical


def test_states_with_names_are_loaded_by_name() -> None:
    diff = compare(saved("fqn", "bca"), model("abc"))
    assert (diff.identical, differences(diff)) == (True, [])
    assert ["Optimizer.load_state_dict loads by position" in note for note in diff.notes] == [True]
    flat = compare(saved("flat", "bca"), model("abc"))
    assert (flat.identical, flat.notes) == (True, ())


def test_missing_state_of_a_trained_parameter_is_reported() -> None:
    """set_optimizer_state_dict needs it, unless the optimizer has not taken a step."""
    names = model("ab", frozen="z")
    diff = compare(saved("fqn", "ab", stateless="b"), names)
    assert [(status, keys) for status, keys, _ in differences(diff)] == [("missing", "state.b")]
    assert compare(saved("fqn", "ab", stateless="ab"), names).identical
    assert compare(saved("id", "ab", stateless="b"), names).identical


def test_the_state_of_another_class_can_only_be_dropped() -> None:
    sgd = saved("id", "ab", make_state=lambda: {"momentum_buffer": torch.zeros(2)})
    diff = compare(sgd, model("ab"))
    assert (diff.identical, remedy(diff)) == (False, way("drop_state"))
    keys = [keys for _, keys, _ in differences(diff, ["missing"])]
    assert keys == [f"state.{param}.{name}" for param in "ab" for name in ("step", "exp_avg")]
    assert any(
        "the state is from SGD, the optimizer is an optimizer that is not part of torch" in note
        for note in diff.notes
    )


def test_different_hyperparameters_are_listed_and_still_fit() -> None:
    state = saved("id", "ab")
    state["param_groups"][0] |= {"lr": 0.5, "of.a.plugin": 1}
    diff = compare(state, model("ab"))
    assert diff.identical
    assert [entry[:2] for entry in differences(diff)] == [
        ("value", "param_groups.0.lr param_groups.0.lr"),
        ("unexpected", "param_groups.0.of.a.plugin"),
    ]
    assert differences(diff)[0][2].endswith("0.5 instead of 0.1")


@pytest.mark.parametrize("form", ["id", "fqn"])
def test_other_groups_are_regrouped(form: str) -> None:
    """Ids without names are assumed to be in the order of the model."""
    diff = compare(saved(form, "abc"), model("ac", "b"))
    assert not diff.identical
    assert "param_groups.1" in [keys for _, keys, _ in differences(diff, ["missing"])]
    assert remedy(diff) == way("regroup")
    split = compare(saved(form, "ab", "c"), model("abc"))
    regrouped = way("regroup") if form == "fqn" else way("old_model", same_groups=False)
    assert (split.identical, remedy(split)) == (False, regrouped)


def test_flat_states_with_other_parameters_or_groups_do_not_fit() -> None:
    """torch refuses both."""
    missing = compare(saved("flat", "ab"), model("abc"))
    keys = [keys for _, keys, _ in differences(missing, ["missing"])]
    assert (missing.identical, "param_groups.0.params.c" in keys) == (False, True)
    split = compare(saved("flat", "a", "b"), model("ab"))
    assert (split.identical, remedy(split)) == (False, way("drop_state"))


@pytest.mark.parametrize(
    ("form", "named", "same_groups"),
    [("fqn", False, None), ("id", True, None), ("id", False, False)],
)
def test_parameters_not_in_the_model_need_the_old_model(
    form: str, named: bool, same_groups: bool | None
) -> None:
    diff = compare(saved(form, "x", "yzw", names=named), model("abc"))
    expected = way("old_model", same_groups=same_groups)
    assert (diff.identical, remedy(diff)) == (False, expected)


def test_an_empty_state_counts_as_no_state() -> None:
    empty = saved("id", "abc", names=True, make_state=dict)
    assert compare(empty, model("acb")).identical


def test_a_parameter_outside_the_optimizer_needs_no_state() -> None:
    assert compare(saved("fqn", "ab"), model("ab", outside="c")).identical


def test_extra_and_missing_parameters_are_reported() -> None:
    extra = compare(saved("fqn", "abcd"), model("abc", frozen="d"))
    assert [(status, keys) for status, keys, _ in differences(extra)] == [
        ("unexpected", "param_groups.0.params.d")
    ]
    missing = compare(saved("fqn", "ab"), model("abc"))
    keys = [keys for _, keys, _ in differences(missing, ["missing"])]
    assert "param_groups.0.params.c" in keys
    assert (missing.identical, remedy(missing)) == (False, way("create_state", "fqn"))
    fewer = compare(saved("id", "ab"), model("abc"))
    assert fewer.notes[0] == (
        "left was not saved by this optimizer: its groups have other sizes: "
        "2 parameters in the file, 3 in the optimizer @ param_groups.0"
    )


def test_keys_that_may_be_renamed_are_not_dropped() -> None:
    """A key not in the model may be a missing key under another name."""
    diff = compare(saved("id", "abcd"), model("abc"), "abxy")
    assert (diff.identical, remedy(diff)) == (False, None)
    assert any(
        note.startswith("x is not in net.py:Net, and c is not in the file") for note in diff.notes
    )
    grown = compare(saved("id", "abcd"), model("abc"), "abcx")
    assert remedy(grown) == ("old_model", None, None, ("x",))


@pytest.mark.parametrize("letters", ["abcz", "abc"])
def test_an_optimizer_without_code_has_all_or_all_trained_parameters(letters: str) -> None:
    diff = compare(saved("id", letters), model(frozen="z", outside="abc"))
    named = [entry.right for entry in diff.entries if ".params." in " ".join(entry.right)]
    assert named == [(f"param_groups.0.params.{one}",) for one in letters]
    assert not differences(diff)


@pytest.mark.parametrize(
    ("groups", "description"),
    [(("ab",), "2 parameters in 1 param group"), (("ab", "c"), "3 parameters in 2 param groups")],
)
def test_an_optimizer_without_code_and_with_other_groups_is_unclear(
    groups: tuple[str, ...], description: str
) -> None:
    message = f"{description}: unclear which optimizer of net.py:Net"
    with pytest.raises(CkptError, match=message):
        compare(saved("id", *groups), model(frozen="z", outside="abc"))


# What torch does with the state decides


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.a * self.b


class Traced(torch.optim.SGD):
    """It keeps a tensor under a name of its own, and needs it."""

    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            if self.state[param]:
                self.state[param]["trace"].add_(1)
            else:
                self.state[param]["trace"] = torch.zeros(2)


class Forgiving(Traced):
    """It creates the tensor again if it is lacking."""

    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            self.state[param].setdefault("trace", torch.zeros(2))
        super().step()


def adamw(hook: Callable[[Any, Any], Any]) -> Callable[[nn.Module], torch.optim.Optimizer]:
    def make(module: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(module.named_parameters())
        optimizer.register_load_state_dict_pre_hook(hook)
        return optimizer

    return make


def by_name(optimizer: Any, state: Any) -> Any:
    group, wanted = state["param_groups"][0], optimizer.param_groups[0]["param_names"]
    order = [group["param_names"].index(name) for name in wanted]
    numbers = {at: state["state"][number] for at, number in enumerate(order)}
    return {"state": numbers, "param_groups": [{**group, "param_names": wanted}]}


def exchange(optimizer: Any, state: Any) -> Any:
    return {**state, "state": {0: state["state"][1], 1: state["state"][0]}}


def refuse(optimizer: Any, state: Any) -> Any:
    raise ValueError("no")


def from_code(make: Callable[[nn.Module], torch.optim.Optimizer], letters: str) -> Diff:
    net = Net()
    optimizer = make(net)
    net(torch.ones(2)).sum().backward()
    optimizer.step()
    state: Any = optimizer.state_dict()
    if letters == "ba":
        state["param_groups"][0]["param_names"] = ["b", "a"]
    torch.save({"optimizer": state}, "run.pt")
    return ckpttool.diff("run.pt::optimizer", model=Net, optimizer=make)


def as_it_is(optimizer: Any, state: Any) -> Any:
    return state


def test_a_hook_that_loads_by_name_fits() -> None:
    assert not from_code(adamw(as_it_is), "ba").identical
    assert from_code(adamw(by_name), "ba").identical


def test_a_hook_that_exchanges_state_does_not_fit() -> None:
    diff = from_code(adamw(exchange), "ab")
    assert [entry.detail for entry in diff.entries if entry.status == "order"] == [
        "gets the state of b",
        "gets the state of a",
    ]


def test_state_that_torch_refuses_is_dropped() -> None:
    diff = from_code(adamw(refuse), "ab")
    assert (diff.identical, remedy(diff)) == (False, way("drop_state"))
    assert "torch: no" in diff.notes


@pytest.mark.parametrize(
    ("kind", "name", "fits"),
    [(Traced, "trace", True), (Traced, "other", False), (Forgiving, "other", True)],
)
def test_state_of_an_unknown_class_fits_if_torch_takes_a_step_with_it(
    kind: type[torch.optim.SGD], name: str, fits: bool
) -> None:
    state = saved("id", "ab", make_state=lambda: {name: torch.zeros(2)})
    torch.save({"optimizer": state}, "run.pt")
    diff = ckpttool.diff(
        "run.pt::optimizer", model=Net, optimizer=lambda net: kind(net.parameters(), lr=0.1)
    )
    assert diff.identical == fits
