"""A saved optimizer against the one that is to load it, where only their names and groups are known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from ckpttool.core.checkpoint import Lazy, Section, Storage, TensorEntry
from ckpttool.core.errors import CkptError
from ckpttool.core.expression import Ref
from ckpttool.core.names import Names, OptimizerParam, RuntimeTensor, SerializedKey
from ckpttool.core.optimizer_state import FLAT, FQN, ID, PARAM_NAMES, OptimizerState, Param, ParamGroup
from ckpttool.diffing.optimizer import OptimizerFit, SavedOptimizer, compare_with_optimizer, in_model_order
from ckpttool.diffing.result import HARMLESS, Remedy
from ckpttool.optimizers.forms import write

OPTIONS = {"lr": 0.1, "betas": (0.9, 0.99)}


def model(*groups: str, frozen: str = "") -> Names:
    """Parameters of one letter, each of two elements, in these groups of an AdamW."""
    letters = sorted("".join(groups) + frozen)
    runtime = (RuntimeTensor(one, one, "parameter", True, one not in frozen, "float32", (2,), None) for one in letters)
    keys = (SerializedKey(one, "float32", (2,), Ref(one), None) for one in letters)
    places = [(one, index) for index, group in enumerate(groups) for one in group]
    params = (OptimizerParam(number, one, index, ("step", "exp_avg")) for number, (one, index) in enumerate(places))
    return Names(
        *("net.py:Net", "2.6", tuple(runtime), tuple(keys), ()),
        optimizer=tuple(params),
        optimizer_class="AdamW",
        optimizer_groups=tuple({**OPTIONS, "weight_decay": index} for index in range(len(groups))),
    )


def adam() -> dict[str, Any]:
    return {"step": 1, "exp_avg": TensorEntry("", "float32", (2,), (1,), 0, Storage(Lazy(8, lambda: [bytes(8)])))}


def saved(
    form: str,
    *groups: str,
    names: bool = False,
    stateless: str = "",
    own: Any = adam,
    more: Mapping[str, Any] | None = None,
) -> OptimizerState:
    """The same parameters, as ids where the form says so, each with a state of its own."""
    letters = "".join(groups)
    called: dict[str, Param] = {one: at if form == ID else one for at, one in enumerate(letters)}
    state: Mapping[Param, Any] = {called[one]: own() for one in letters if one not in stateless}
    made = (
        ParamGroup(
            tuple(called[one] for one in group),
            {**OPTIONS, "weight_decay": index, **(more or {}), **({PARAM_NAMES: list(group)} if names else {})},
        )
        for index, group in enumerate(groups)
    )
    return OptimizerState(form, tuple(made), state)


def compared(state: OptimizerState, names: Names, beside: Sequence[str] = (), verdict: Any = None) -> OptimizerFit:
    sections = (Section("model", "state_dict", tuple(keyed(keys))) for keys in beside)
    written = write(state, Section("optimizer", "optimizer", ()))
    return compare_with_optimizer(SavedOptimizer(written, tuple(sections)), names, verdict)


def keyed(keys: str) -> Iterable[TensorEntry]:
    return (TensorEntry(key, "float32", (2,), (1,), 0, Storage(Lazy(8, lambda: [bytes(8)]))) for key in keys)


def told(fit: OptimizerFit) -> list[tuple[str, str, str | None]]:
    return [(e.status, " ".join((*e.left, *e.right)), e.detail) for e in fit.entries if e.status not in HARMLESS]


@pytest.mark.parametrize("form", [ID, FQN, FLAT])
@pytest.mark.parametrize("groups", [("abc",), ("ca", "b")])
def test_the_same_optimizer_fits_in_every_form(form: str, groups: tuple[str, ...]) -> None:
    fit = compared(saved(form, *groups), model(*groups))
    assert (fit.fits, told(fit), fit.remedy) == (True, [], None)
    assert any("this answer assumes" in note for note in fit.notes) == (form == ID)


def test_keys_beside_it_bear_ids_out_or_speak_against_them() -> None:
    fit = compared(saved(ID, "abc"), model("abc"), ["abc"])
    assert fit.fits
    assert fit.notes == ("left: its ids are those of the optimizer: the file lists the model's keys in this order",)
    other = compared(saved(ID, "abc"), model("abc"), ["acb"])
    assert not other.fits
    assert [entry[0] for entry in told(other)] == ["order", "order"]
    assert other.remedy == Remedy("old_model", None, True)


def test_named_ids_in_another_order_would_reach_other_parameters() -> None:
    fit = compared(saved(ID, "abc", names=True), model("acb"))
    assert [(status, detail) for status, _, detail in told(fit)] == [
        ("order", "gets the state of c"),
        ("order", "gets the state of b"),
    ]
    assert (fit.fits, fit.remedy) == (False, Remedy("by_name", ID))
    assert compared(saved(ID, "abc", names=True, stateless="bc"), model("acb")).fits  # of no state nothing is lost
    assert not compared(saved(ID, "abc", names=True, stateless="b"), model("acb")).fits


def test_names_go_by_name_whatever_their_places() -> None:
    fit = compared(saved(FQN, "bca"), model("abc"))
    assert (fit.fits, told(fit)) == (True, [])
    assert ["Optimizer.load_state_dict loads by position" in note for note in fit.notes] == [True]
    flat = compared(saved(FLAT, "bca"), model("abc"))
    assert (flat.fits, flat.notes) == (True, ())


def test_names_without_state_are_missed_where_they_are_trained() -> None:
    """set_optimizer_state_dict asks for it; an optimizer that took no step at all has none."""
    names = model("ab", frozen="z")
    fit = compared(saved(FQN, "ab", stateless="b"), names)
    assert (fit.fits, told(fit)) == (False, [("missing", "state.b", None)])
    assert compared(saved(FQN, "ab", stateless="ab"), names).fits
    assert compared(saved(ID, "ab", stateless="b"), names).fits


def test_another_class_can_only_start_afresh() -> None:
    momentum = lambda: {"momentum_buffer": adam()["exp_avg"]}  # noqa: E731
    fit = compared(saved(ID, "ab", own=momentum), model("ab"))
    assert (fit.fits, fit.remedy) == (False, Remedy("drop_state"))
    keys = [key for status, key, _ in told(fit) if status == "missing"]
    assert keys == [f"state.{param}.{name}" for param in "ab" for name in ("step", "exp_avg")]
    assert any(
        "the state is from SGD, the optimizer is an optimizer that is not part of torch" in note for note in fit.notes
    )


def test_hyperparameters_are_listed_and_weigh_nothing() -> None:
    fit = compared(saved(ID, "ab", more={"lr": 0.5, "of.a.plugin": 1}), model("ab"))
    assert fit.fits
    assert told(fit) == [
        ("value", "param_groups.0.lr param_groups.0.lr", "0.5 instead of 0.1"),
        ("unexpected", "param_groups.0.of.a.plugin", None),
    ]


@pytest.mark.parametrize(("form", "way"), [(ID, Remedy("regroup")), (FQN, Remedy("by_name", FQN))])
def test_other_groups(form: str, way: Remedy) -> None:
    """Of ids that nothing names the model's own order is the likely one."""
    fit = compared(saved(form, "abc"), model("ac", "b"))
    assert not fit.fits
    assert ("missing", "param_groups.1", None) in told(fit)
    assert fit.remedy == way
    apart = compared(saved(form, "ab", "c"), model("abc"))
    assert (apart.fits, apart.remedy) == (
        False,
        Remedy("drop_state") if form == FQN else Remedy("old_model", None, False),
    )


def test_flat_states_that_do_not_fit() -> None:
    """Other parameters, and one group of what had other hyperparameters: torch refuses both."""
    less = compared(saved(FLAT, "ab"), model("abc"))
    assert (less.fits, ("missing", "param_groups.0.params.c", None) in told(less)) == (False, True)
    apart = compared(saved(FLAT, "a", "b"), model("ab"))
    assert (apart.fits, apart.remedy) == (False, Remedy("drop_state"))


@pytest.mark.parametrize(("form", "named", "groups"), [(FQN, False, False), (ID, True, None), (ID, False, False)])
def test_who_saved_parameters_that_the_model_has_not(form: str, named: bool, groups: bool | None) -> None:
    fit = compared(saved(form, "x", "yzw", names=named), model("abc"))
    same = None if named or form == FQN else False
    assert (fit.fits, fit.remedy) == (False, Remedy("old_model", None, same))


def test_a_state_of_nothing_goes_nowhere() -> None:
    """An id with an empty state is one without; a trainable parameter that the optimizer has not needs none."""
    empty = saved(ID, "abc", names=True, own=dict)
    assert compared(empty, model("acb")).fits
    names = model("abc")
    part = replace(names, optimizer=names.optimizer[:2])
    assert compared(saved(FQN, "ab"), part).fits


def test_a_parameter_more_or_less() -> None:
    more = compared(saved(FQN, "abcd"), model("abc", frozen="d"))
    assert (more.fits, told(more)) == (False, [("unexpected", "param_groups.0.params.d", None)])
    less = compared(saved(FQN, "ab"), model("abc"))
    assert ("missing", "param_groups.0.params.c", None) in told(less)
    assert (less.fits, less.remedy) == (False, Remedy("regroup"))


def torch_says(error: str | None = None, stepped: bool = True, **landed: int) -> Any:
    return type("Verdict", (), {"error": error, "stepped": stepped, "landed": landed})


def test_what_torch_does_goes_before_what_places_say() -> None:
    """An optimizer whose own hooks load by name, a state that it does not take, one that it takes a step with."""
    swapped = saved(ID, "ba", names=True)
    assert not compared(swapped, model("ab")).fits
    assert compared(swapped, model("ab"), verdict=torch_says(a=1, b=0)).fits
    astray = compared(saved(ID, "ab", names=True), model("ab"), verdict=torch_says(a=1, b=0))
    assert [detail for *_, detail in told(astray)] == ["gets the state of b", "gets the state of a"]
    refused = compared(saved(ID, "ab"), model("ab"), verdict=torch_says("ValueError: no", stepped=False))
    assert (refused.fits, refused.remedy, refused.notes) == (False, Remedy("drop_state"), ("torch: ValueError: no",))
    odd = saved(ID, "ab", own=lambda: {"trace": 1})
    assert compared(odd, model("ab"), verdict=torch_says(a=0, b=1)).fits
    assert not compared(odd, model("ab"), verdict=torch_says(stepped=False)).fits


def test_a_tensor_under_another_name_is_no_parameter_to_be_dropped() -> None:
    """Keys that the model has not, where it has some that the file has not: these may be renamed."""
    fit = compared(saved(ID, "abcd"), model("abc"), ["abxy"])
    assert (fit.fits, fit.remedy) == (False, None)
    assert any(note.startswith("x is not in net.py:Net, and c is not in the file") for note in fit.notes)
    grown = compared(saved(ID, "abcd"), model("abc"), ["abcx"])
    assert grown.remedy == Remedy("old_model", None, None, ("x",))


def test_which_optimizer_of_a_model_is_meant() -> None:
    names = Names(
        *(getattr(model("abc", frozen="z"), name) for name in ("model", "torch", "runtime", "serialized", "load"))
    )

    def section(*groups: str) -> Section:
        return write(saved(ID, *groups), Section("optimizer", "optimizer", ()))

    for letters in ("abcz", "abc"):  # all, or those that are trained
        found = in_model_order(names, section("wxyv"[: len(letters)]))
        assert [one.fqn for one in found.optimizer] == list(letters)
        assert found.optimizer_groups == ({**OPTIONS, "weight_decay": 0},)
    for groups, words in ((("ab",), "2 parameters in 1 param group"), (("ab", "c"), "3 parameters in 2 param groups")):
        with pytest.raises(CkptError, match=f"{words}: unclear which optimizer of net.py:Net"):
            in_model_order(names, section(*groups))
