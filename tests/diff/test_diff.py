"""Diffs: every key of each side is in exactly one entry, and status 0 means that a strict load
succeeds.
"""

from __future__ import annotations

import json
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckpttool
import hook_zoo
from ckpttool import CkptError
from command import Run, main, notes_in
from hook_zoo import ZOO
from zoo import FLAT, randomized, runtime_values, state_of, traced, zoo_model

torch.set_num_threads(1)
State = dict[str, Any]
MODELS = Path(hook_zoo.__file__)
# loading does not depend on module versions
NEEDS_CODE = {"unpacks_a_subclass"}  # names do not say how its tensors are loaded
UNVERSIONED = [name for name in FLAT if traced(name).versions is None]


def assert_each_key_once(entries: Iterable[Any], left: Iterable[str], right: Iterable[str]) -> None:
    entries = list(entries)
    assert Counter(key for entry in entries for key in entry.left) == Counter(list(left))
    assert Counter(key for entry in entries for key in entry.right) == Counter(list(right))


SEGMENTS = ["a", "b", "0", "layer", "module", "_orig_mod", "a@1", "weight"]
KEYS = st.lists(st.sampled_from(SEGMENTS), min_size=1, max_size=4).map(".".join)


SHARED = torch.ones(2)
VALUES: dict[str, Callable[[], Any]] = {
    "own": lambda: torch.ones(2),
    "shared": lambda: SHARED,
    "shape": lambda: torch.ones(1, 2),
    "dtype": lambda: torch.ones(2, dtype=torch.int64),
    "extra": lambda: 3,
}
# more tensors than objects, so that it is a state_dict
ALWAYS = {f"same.{number}": torch.ones(number + 3) for number in range(9)}
STATES = st.dictionaries(KEYS, st.sampled_from(sorted(VALUES)), max_size=8).map(
    lambda kinds: ALWAYS | {key: VALUES[kind]() for key, kind in kinds.items()}
)


@settings(max_examples=150)
@given(STATES, STATES)
def test_each_key_of_two_checkpoints_is_in_one_entry(left: State, right: State) -> None:
    files = {"model": left}, {"model": right}
    assert_each_key_once(ckpttool.diff(*files).entries, left, right)
    same = ckpttool.diff(*files[:1] * 2)
    assert same.identical
    assert {entry.status for entry in same.entries} <= {"same", "extra_state"}


@pytest.mark.parametrize(
    ("name", "same"),
    [("plain", True), ("buffers", True), ("drops_a_key", False), ("strip_layer", False)],
)
def test_a_model_alone_is_the_same_if_hooks_change_no_key(name: str, same: bool) -> None:
    """A non-persistent buffer is not a loss, but a parameter that a hook omits is."""
    assert bool(traced(name).not_serialized) is (name in ("buffers", "drops_a_key"))
    assert ckpttool.diff(model=traced(name)).identical is same


def forms(name: str, folder: Path) -> dict[str, State]:
    """Save checkpoints of the model as it saves them, with runtime names, and wrapped; return
    their contents by path.
    """
    saved = state_of(name)
    runtime = {k: v for k, v in runtime_values(randomized(zoo_model(name), 2)).items() if v.numel()}
    wrapped = {f"module.{key}": value for key, value in saved.items()}
    contents = {"saved": saved, "runtime": runtime, "wrapped": wrapped}
    for form, content in contents.items():
        torch.save(content, folder / f"{form}.pt")
    return {str(folder / f"{form}.pt"): content for form, content in contents.items()}


@pytest.mark.parametrize("name", sorted(ZOO))
def test_each_name_of_a_model_and_key_of_its_checkpoints_is_in_one_entry(
    tmp_path: Path, name: str
) -> None:
    names = traced(name)
    keys = {**dict.fromkeys(s.key for s in names.serialized), **dict.fromkeys(names.extra_state)}
    fqns = [tensor.fqn for tensor in names.runtime]
    assert_each_key_once(ckpttool.diff(model=names).entries, keys, fqns)
    if name not in UNVERSIONED or name in NEEDS_CODE:
        return
    files = forms(name, tmp_path)
    for left in files:
        assert_each_key_once(ckpttool.diff(left, model=names).entries, files[left], keys)
        for right in files:
            entries = ckpttool.diff(left, right, model=names).entries
            assert_each_key_once(entries, files[left], files[right])
    if names.roundtrips:
        saved, _, wrapped = files
        statuses = {entry.status for entry in ckpttool.diff(saved, wrapped, model=names).entries}
        assert statuses <= {"same", "renamed", "transformed", "alias", "extra_state"}


# diff --model M CKPT: status 0 if and only if torch loads it strictly and converts nothing

DAMAGES: dict[str, Callable[[dict[str, Any], str], object]] = {
    "none": lambda state, key: None,
    "dropped": lambda state, key: state.pop(key),
    "extra": lambda state, key: state.update({f"{key}.more": torch.zeros(1)}),
    "renamed": lambda state, key: state.update({f"module.{key}": state.pop(key)}),
    "reshaped": lambda state, key: state.update({key: torch.zeros(7, 1)}),
    "cast": lambda state, key: state.update({key: state[key].to(torch.complex128)}),
    "no metadata": lambda state, key: (
        vars(state).pop("_metadata", None) if hasattr(state, "_metadata") else None
    ),
    "a second copy": lambda state, key: state.update({key: state[key].clone()}),
    "not a tensor": lambda state, key: state.update({key: 3}),
}


def loads(name: str, state: dict[str, torch.Tensor]) -> bool:
    model = zoo_model(name)
    converted: list[bool] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.aten.copy_.default and isinstance(
                args[1], torch.Tensor
            ):  # the source may also be a number
                converted.append(args[0].dtype != args[1].dtype)
            return func(*args, **(kwargs or {}))

    try:
        with Watch(), warnings.catch_warnings():
            # torch warns once of complex numbers that a hook casts: it loads them
            warnings.simplefilter("ignore")
            model.load_state_dict(deepcopy(state), strict=True)
    except Exception:
        return False
    return not any(converted)


def test_nothing_to_compare_is_an_error(tmp_path: Path, run: Run) -> None:
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    model, optimizer_options = f"{__file__}:linear", ("--optimizer", f"{__file__}:sgd")
    for name, value in {
        "w.pt": layer.state_dict(),
        "o.pt": optimizer.state_dict(),
        "two.pt": {
            "model": layer.state_dict(),
            "a": optimizer.state_dict(),
            "b": optimizer.state_dict(),
        },
    }.items():
        torch.save(value, tmp_path / name)
    w, o, two = (str(tmp_path / name) for name in ("w.pt", "o.pt", "two.pt"))
    for arguments, message in (
        ((w, o), "holds no state dict"),
        ((o, w), "holds no state dict"),
        (("--model", model, "--whole"), "--whole compares two checkpoints"),
        (("--model", model, w, "--whole"), "--whole compares two checkpoints"),
        (("--model", model, "--values"), "--values compares two checkpoints"),
        (("--model", model, w, "--values"), "--values compares two checkpoints"),
        (("--model", model, *optimizer_options, w), "has no optimizer"),
        (("--model", model, *optimizer_options, two), "has several optimizers: a, b"),
    ):
        done = run("diff", *arguments)
        assert (done.status, message in done.err) == (2, True), arguments
    assert f"pick one: {two}::a" in run("diff", "--model", model, *optimizer_options, two).err
    assert run("diff", "--model", model, *optimizer_options, f"{two}::a").status == 0
    with pytest.raises(CkptError, match="nothing to compare"):
        ckpttool.diff(None, w, model=model)
    torch.save(
        {key: value + 0.5 for key, value in layer.state_dict().items()}, tmp_path / "near.pt"
    )
    for tolerance, status in (None, 0), ("--atol=0.6", 0), ("--atol=0.4", 1), ("--rtol=1e-9", 1):
        assert run("diff", w, tmp_path / "near.pt", *filter(None, [tolerance])).status == status


def linear() -> torch.nn.Module:
    return torch.nn.Linear(2, 2)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


@pytest.mark.parametrize("other", ["float16", "float8_e5m2", "int64", "complex64", "bool"])
def test_ignore_dtype_compares_values_as_torch_converts_them(
    other: str, tmp_path: Path, run: Run
) -> None:
    w = torch.tensor([0.0, 1.25, -3.0, 1e4])
    torch.save({"w": w, "v": w}, tmp_path / "left.pt")
    result = w.to(getattr(torch, other))
    for name, value in ("same", result), ("another", torch.cat([result[:3], result[:1]])):
        torch.save({"w": value, "v": w}, tmp_path / f"{name}.pt")
        pair = ("diff", tmp_path / "left.pt", tmp_path / f"{name}.pt")
        assert [
            run(*pair).status,
            run(*pair, "--ignore-dtype").status,
            run(*pair, "--values").status,
        ] == [1, 0, 1]
        done = run(*pair, "--ignore-dtype", "--values", "--format", "json")
        assert done.status == (name == "another")
        found = {
            (entry["status"], *entry["left"])
            for entry in done.data["entries"]
            if entry["left"] == ["w"]
        }
        assert found == {("dtype" if name == "same" else "value", "w")}


def test_objects_are_not_counted_as_tensors(tmp_path: Path, run: Run) -> None:
    one, zero = torch.ones(2), torch.zeros(2)
    same = {f"k.{name}": one for name in "xyz"}
    left = {**same, "k.w": one, "k.a": one, "k.b": (one, 1), "k.d": (one, 1)}
    right = {**same, "k.w": zero, "k.a": (one, 1), "k.b": (zero, 1), "k.d": (one, 2)}
    for name, state in ("a.pt", left), ("b.pt", right):
        torch.save(state, tmp_path / name)
    done = run("diff", tmp_path / "a.pt", tmp_path / "b.pt", "--values", "--format", "json")
    counted = [note for note in notes_in(done.data) if "which no rename fixes" in note]
    assert [note.partition(" with")[0] for note in counted] == ["1 tensor", "3 objects"]


def test_different_values_in_other_dtypes_are_reported_outside_dense_tensors(
    tmp_path: Path, run: Run
) -> None:
    """Sparse tensors, extra state, and tensors outside the state_dict are compared too."""
    for name, w in ("a.pt", torch.ones(2)), ("b.pt", 2 * torch.ones(2).half()):
        model = {"w": w.to_sparse(), "v": torch.ones(1), "x._extra_state": {"scale": w}}
        torch.save({"model": model, "best": w, "last": w / w}, tmp_path / name)
    pair = ("diff", tmp_path / "a.pt", tmp_path / "b.pt", "--ignore-dtype")
    assert run(*pair).status == 0
    done = run(*pair, "--values", "--format", "json")
    assert done.status == 1
    assert {entry["left"][0] for entry in done.data["entries"] if entry["status"] == "value"} == {
        *("w", "x._extra_state", "best")
    }


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_status_0_means_that_torch_loads_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data: Any
) -> None:
    name = data.draw(st.sampled_from(sorted(set(FLAT) - {"sparse_buffer"})))
    state = deepcopy(state_of(name))
    for _ in range(data.draw(st.integers(0, 2))):
        tensors = [key for key, value in state.items() if isinstance(value, torch.Tensor)]
        if tensors:
            DAMAGES[data.draw(st.sampled_from(sorted(DAMAGES)))](
                state, data.draw(st.sampled_from(tensors))
            )
    tensors = [key for key, value in state.items() if isinstance(value, torch.Tensor)]
    torch.save(state, tmp_path / "model.pt")
    if not tensors and not hasattr(state, "_metadata"):
        return  # it looks like any other dict
    status = main(
        ["diff", "--model", f"{MODELS}:{name}", str(tmp_path / "model.pt"), "--format", "json"]
    )
    out, err = capsys.readouterr()
    assert status == (0 if loads(name, state) else 1), err
    assert json.loads(out)["identical"] == (status == 0)


def test_json_has_the_spread_of_value_differences(tmp_path: Path, run: Run) -> None:
    left = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    right = left + torch.tensor([0.0, 0.25, 0.375, 3.0, -2.0, float("nan")])
    for name, values in (("left", left), ("right", right)):
        same = torch.arange(6.0).reshape(2, 3).t()
        torch.save(
            {"w": values, "same": same if name == "left" else same.contiguous()},
            tmp_path / f"{name}.pt",
        )
    entries = run(
        "diff", tmp_path / "left.pt", tmp_path / "right.pt", "--values", "--format", "json"
    ).data["entries"]
    spread = {entry["left"][0]: entry.get("spread") for entry in entries}
    expected = Counter(
        math.frexp(d)[1] - 1 for d in (left - right).abs().tolist() if d and not math.isnan(d)
    )
    assert spread["same"] is None
    numbers = {
        bucket["exponent"]: bucket["elements"]
        for bucket in spread["w"]
        if bucket["exponent"] < 1023
    }
    assert numbers == dict(expected) == {-2: 2, 1: 2}
    assert [bucket["elements"] for bucket in spread["w"] if bucket["exponent"] >= 1023] == [1]


@pytest.mark.parametrize("lost", [(), ("bias",)])
@pytest.mark.parametrize("more", [(), ("--fail-on", "unexpected")])
def test_a_conversion_at_load_is_noted_if_no_key_shows_it(
    run: Run, tmp_path: Path, lost: tuple[str, ...], more: tuple[str, ...]
) -> None:
    state = zoo_model("casts_to_half").state_dict()
    torch.save({key: value for key, value in state.items() if key not in lost}, tmp_path / "a.pt")
    arguments = ("diff", "--model", f"{MODELS}:casts_to_half", tmp_path / "a.pt", *more)
    result = run(*arguments, "--format", "json")
    note = notes_in(result.data)[0]
    assert (
        result.status,
        note.startswith("loading converts"),
        "weight (float16 to float32)" in note,
    ) == (
        1,
        True,
        True,
    )
    assert [one["status"] for one in result.data["entries"] if one["status"] != "same"] == [
        "missing"
    ] * len(lost)
    assert lost or "casts_to_half, which converts its dtypes\n" in run(*arguments).out
    allowed = run(*arguments, "--ignore-dtype", "--format", "json")
    assert (allowed.status, notes_in(allowed.data)) == (
        int(bool(lost) and not more),
        notes_in(result.data)[1:],
    )


def test_a_conversion_at_load_is_not_noted_if_a_key_shows_it(run: Run, tmp_path: Path) -> None:
    torch.save(
        {key: value.half() for key, value in zoo_model("joins_experts").state_dict().items()},
        tmp_path / "a.pt",
    )
    arguments = (
        "diff",
        "--model",
        f"{MODELS}:joins_experts",
        tmp_path / "a.pt",
        "--format",
        "json",
    )
    result = run(*arguments)
    assert (result.status, [one["status"] for one in result.data["entries"]]) == (1, ["dtype"])
    assert not any(note.startswith("loading converts") for note in notes_in(result.data))
    assert run(*arguments, "--fail-on", "unexpected").status == 0
