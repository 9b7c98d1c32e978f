"""A saved optimizer against the optimizer that loads it, if only names and groups are known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from ckpttool import CkptError, Names
from ckpttool.core.checkpoint import Lazy, Section, Storage, TensorEntry
from ckpttool.core.expression import Ref
from ckpttool.core.names import OptimizerParam, RuntimeTensor, SerializedKey
from ckpttool.core.optimizer_state import (
    FLAT,
    FQN,
    ID,
    PARAM_NAMES,
    OptimizerState,
    Param,
    ParamGroup,
)
from ckpttool.diffing.optimizer import in_model_order
from ckpttool.diffing.optimizer_load import OptimizerFit, compare_with_optimizer
from ckpttool.diffing.result import HARMLESS, Remedy
from ckpttool.diffing.saved_optimizers import SavedOptimizer
from ckpttool.optimizers.forms import write

OPTIONS = {"lr": 0.1, "betas": (0.9, 0.99)}


def model(*groups: str, frozen: str = "") -> Names:
    """Return the names of a model with one-letter parameters of two elements, in these groups of an
    AdamW.
    """
    letters = sorted("".join(groups) + frozen)
    runtime = (
        RuntimeTensor(one, one, "parameter", True, one not in frozen, "float32", (2,), None)
        for one in letters
    )
    keys = (SerializedKey(one, "float32", (2,), Ref(one), None) for one in letters)
    places = [(one, index) for index, group in enumerate(groups) for one in group]
    params = (
        OptimizerParam(number, one, index, ("step", "exp_avg"))
        for number, (one, index) in enumerate(places)
    )
    return Names(
        *("net.py:Net", "2.6", tuple(runtime), tuple(keys), ()),
        optimizer=tuple(params),
        optimizer_class="AdamW",
        optimizer_groups=tuple({**OPTIONS, "weight_decay": index} for index in range(len(groups))),
    )


def adam() -> dict[str, Any]:
    return {
        "step": 1,
        "exp_avg": TensorEntry("", "float32", (2,), (1,), 0, Storage(Lazy(8, lambda: [bytes(8)]))),
    }


def saved(
    form: str,
    *groups: str,
    names: bool = False,
    stateless: str = "",
    make_state: Any = adam,
    extra: Mapping[str, Any] | None = None,
) -> OptimizerState:
    """Return a state of the same parameters in this form, with a separate state for each."""
    letters = "".join(groups)
    param_of: dict[str, Param] = {one: at if form == ID else one for at, one in enumerate(letters)}
    state: Mapping[Param, Any] = {
        param_of[one]: make_state() for one in letters if one not in stateless
    }
    param_groups = (
        ParamGroup(
            tuple(param_of[one] for one in group),
            {
                **OPTIONS,
                "weight_decay": index,
                **(extra or {}),
                **({PARAM_NAMES: list(group)} if names else {}),
            },
        )
        for index, group in enumerate(groups)
    )
    return OptimizerState(form, tuple(param_groups), state)


def compare_saved(
    state: OptimizerState, names: Names, other_sections: Sequence[str] = (), verdict: Any = None
) -> OptimizerFit:
    sections = (Section("model", "state_dict", tuple(tensors(keys))) for keys in other_sections)
    written = write(state, Section("optimizer", "optimizer", ()))
    return compare_with_optimizer(SavedOptimizer(written, tuple(sections)), names, verdict)


def tensors(keys: str) -> Iterable[TensorEntry]:
    return (
        TensorEntry(key, "float32", (2,), (1,), 0, Storage(Lazy(8, lambda: [bytes(8)])))
        for key in keys
    )


def differences(fit: OptimizerFit) -> list[tuple[str, str, str | None]]:
    return [
        (e.status, " ".join((*e.left, *e.right)), e.detail)
        for e in fit.entries
        if e.status not in HARMLESS
    ]


@pytest.mark.parametrize("form", [ID, FQN, FLAT])
@pytest.mark.parametrize("groups", [("abc",), ("ca", "b")])
def test_the_same_optimizer_fits_in_every_form(form: str, groups: tuple[str, ...]) -> None:
    fit = compare_saved(saved(form, *groups), model(*groups))
    assert (fit.fits, differences(fit), fit.remedy) == (True, [], None)
    assert any("this answer assumes" in note for note in fit.notes) == (form == ID)


def test_keys_of_the_state_dict_confirm_or_contradict_ids() -> None:
    fit = compare_saved(saved(ID, "abc"), model("abc"), ["abc"])
    assert fit.fits
    assert fit.notes == (
        "left: its ids are read as those of the optimizer; the file lists the model's keys in this"
        " order",
    )
    other = compare_saved(saved(ID, "abc"), model("abc"), ["acb"])
    assert not other.fits
    assert [entry[0] for entry in differences(other)] == ["order", "order"]
    assert other.remedy == Remedy("old_model", None, True)


def test_named_ids_in_another_order_are_misassigned() -> None:
    fit = compare_saved(saved(ID, "abc", names=True), model("acb"))
    assert [(status, detail) for status, _, detail in differences(fit)] == [
        ("order", "gets the state of c"),
        ("order", "gets the state of b"),
    ]
    assert (fit.fits, fit.remedy) == (False, Remedy("by_name", ID))
    # no state can be misassigned
    assert compare_saved(saved(ID, "abc", names=True, stateless="bc"), model("acb")).fits
    assert not compare_saved(saved(ID, "abc", names=True, stateless="b"), model("acb")).fits


def test_states_with_names_are_loaded_by_name() -> None:
    fit = compare_saved(saved(FQN, "bca"), model("abc"))
    assert (fit.fits, differences(fit)) == (True, [])
    assert ["Optimizer.load_state_dict loads by position" in note for note in fit.notes] == [True]
    flat = compare_saved(saved(FLAT, "bca"), model("abc"))
    assert (flat.fits, flat.notes) == (True, ())


def test_missing_state_of_a_trained_parameter_is_reported() -> None:
    """set_optimizer_state_dict needs it, unless the optimizer has not taken a step."""
    names = model("ab", frozen="z")
    fit = compare_saved(saved(FQN, "ab", stateless="b"), names)
    assert (fit.fits, differences(fit)) == (False, [("missing", "state.b", None)])
    assert compare_saved(saved(FQN, "ab", stateless="ab"), names).fits
    assert compare_saved(saved(ID, "ab", stateless="b"), names).fits


def test_the_state_of_another_class_can_only_be_dropped() -> None:
    momentum = lambda: {"momentum_buffer": adam()["exp_avg"]}  # noqa: E731
    fit = compare_saved(saved(ID, "ab", make_state=momentum), model("ab"))
    assert (fit.fits, fit.remedy) == (False, Remedy("drop_state"))
    keys = [key for status, key, _ in differences(fit) if status == "missing"]
    assert keys == [f"state.{param}.{name}" for param in "ab" for name in ("step", "exp_avg")]
    assert any(
        "the state is from SGD, the optimizer is an optimizer that is not part of torch" in note
        for note in fit.notes
    )


def test_different_hyperparameters_are_listed_and_still_fit() -> None:
    fit = compare_saved(saved(ID, "ab", extra={"lr": 0.5, "of.a.plugin": 1}), model("ab"))
    assert fit.fits
    assert differences(fit) == [
        ("value", "param_groups.0.lr param_groups.0.lr", "0.5 instead of 0.1"),
        ("unexpected", "param_groups.0.of.a.plugin", None),
    ]


@pytest.mark.parametrize("form", [ID, FQN])
def test_other_groups_are_regrouped(form: str) -> None:
    """Ids without names are assumed to be in the order of the model."""
    fit = compare_saved(saved(form, "abc"), model("ac", "b"))
    assert not fit.fits
    assert ("missing", "param_groups.1", None) in differences(fit)
    assert fit.remedy == Remedy("regroup")
    split = compare_saved(saved(form, "ab", "c"), model("abc"))
    assert (split.fits, split.remedy) == (
        False,
        Remedy("regroup") if form == FQN else Remedy("old_model", None, False),
    )


def test_flat_states_with_other_parameters_or_groups_do_not_fit() -> None:
    """torch refuses both."""
    missing = compare_saved(saved(FLAT, "ab"), model("abc"))
    assert (missing.fits, ("missing", "param_groups.0.params.c", None) in differences(missing)) == (
        False,
        True,
    )
    split = compare_saved(saved(FLAT, "a", "b"), model("ab"))
    assert (split.fits, split.remedy) == (False, Remedy("drop_state"))


@pytest.mark.parametrize(
    ("form", "named", "groups"), [(FQN, False, False), (ID, True, None), (ID, False, False)]
)
def test_parameters_not_in_the_model_need_the_old_model(
    form: str, named: bool, groups: bool | None
) -> None:
    fit = compare_saved(saved(form, "x", "yzw", names=named), model("abc"))
    same = None if named or form == FQN else False
    assert (fit.fits, fit.remedy) == (False, Remedy("old_model", None, same))


def test_an_empty_state_fits() -> None:
    """An empty state counts as no state, and a parameter outside the optimizer needs none."""
    empty = saved(ID, "abc", names=True, make_state=dict)
    assert compare_saved(empty, model("acb")).fits
    names = model("abc")
    part = replace(names, optimizer=names.optimizer[:2])
    assert compare_saved(saved(FQN, "ab"), part).fits


def test_extra_and_missing_parameters_are_reported() -> None:
    extra = compare_saved(saved(FQN, "abcd"), model("abc", frozen="d"))
    assert (extra.fits, differences(extra)) == (
        False,
        [("unexpected", "param_groups.0.params.d", None)],
    )
    missing = compare_saved(saved(FQN, "ab"), model("abc"))
    assert ("missing", "param_groups.0.params.c", None) in differences(missing)
    assert (missing.fits, missing.remedy) == (False, Remedy("create_state", FQN))
    fewer = compare_saved(saved(ID, "ab"), model("abc"))
    assert fewer.notes == (
        "left was not saved by this optimizer: its groups have other sizes: "
        "2 parameters in the file, 3 in the optimizer @ param_groups.0",
    )


def torch_verdict(error: str | None = None, stepped: bool = True, **landed: int) -> Any:
    return type("Verdict", (), {"error": error, "stepped": stepped, "landed": landed})


def test_the_verdict_of_torch_overrides_positions() -> None:
    """torch may load by name in a hook, reject a state, or take a step with an unknown state."""
    swapped = saved(ID, "ba", names=True)
    assert not compare_saved(swapped, model("ab")).fits
    assert compare_saved(swapped, model("ab"), verdict=torch_verdict(a=1, b=0)).fits
    misassigned = compare_saved(
        saved(ID, "ab", names=True), model("ab"), verdict=torch_verdict(a=1, b=0)
    )
    assert [detail for *_, detail in differences(misassigned)] == [
        "gets the state of b",
        "gets the state of a",
    ]
    refused = compare_saved(
        saved(ID, "ab"), model("ab"), verdict=torch_verdict("ValueError: no", stepped=False)
    )
    assert (refused.fits, refused.remedy, refused.notes) == (
        False,
        Remedy("drop_state"),
        ("torch: ValueError: no",),
    )
    unknown_class = saved(ID, "ab", make_state=lambda: {"trace": 1})
    assert compare_saved(unknown_class, model("ab"), verdict=torch_verdict(a=0, b=1)).fits
    assert not compare_saved(unknown_class, model("ab"), verdict=torch_verdict(stepped=False)).fits


def test_keys_that_may_be_renamed_are_not_dropped() -> None:
    """A key not in the model may be a missing key under another name."""
    fit = compare_saved(saved(ID, "abcd"), model("abc"), ["abxy"])
    assert (fit.fits, fit.remedy) == (False, None)
    assert any(
        note.startswith("x is not in net.py:Net, and c is not in the file") for note in fit.notes
    )
    grown = compare_saved(saved(ID, "abcd"), model("abc"), ["abcx"])
    assert grown.remedy == Remedy("old_model", None, None, ("x",))


def test_groups_in_model_order_name_all_or_all_trained_parameters() -> None:
    names = Names(
        *(
            getattr(model("abc", frozen="z"), name)
            for name in ("model", "torch", "runtime", "serialized", "load")
        )
    )

    def section(*groups: str) -> Section:
        return write(saved(ID, *groups), Section("optimizer", "optimizer", ()))

    for letters in ("abcz", "abc"):  # all parameters, or only the trained ones
        result = in_model_order(names, section("wxyv"[: len(letters)]))
        assert [one.fqn for one in result.optimizer] == list(letters)
        assert result.optimizer_groups == ({**OPTIONS, "weight_decay": 0},)
    for groups, description in (
        (("ab",), "2 parameters in 1 param group"),
        (("ab", "c"), "3 parameters in 2 param groups"),
    ):
        with pytest.raises(
            CkptError, match=f"{description}: unclear which optimizer of net.py:Net"
        ):
            in_model_order(names, section(*groups))
