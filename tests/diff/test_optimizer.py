"""Differences between the optimizers of two files, and between a file and the code's optimizer."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import ckpttool
import optimizer_models as models
from ckpttool import Diff
from command import HARMLESS, Run
from optimizer_support import Make, names_of, remapped, save, steps, train

Difference = tuple[str, str, str, str | None]


def saved(path: Path, model: type[nn.Module], make: Make, count: int = 1) -> str:
    """Save a model and its optimizer after some steps; return the file."""
    return save(path, *train(model, make, count))


def saved_alone(path: Path, model: type[nn.Module], make: Make, count: int = 1) -> str:
    """Save an optimizer without its model; return the file."""
    _, optimizer = train(model, make, count)
    torch.save({"optimizer": optimizer.state_dict()}, path)
    return str(path)


def diff_optimizers(left: str, right: str, **options: Any) -> Diff:
    return ckpttool.diff(f"{left}::optimizer", f"{right}::optimizer", **options)


def diff_with_code(path: str, model: str, optimizer: str) -> Diff:
    return ckpttool.diff(
        f"{path}::optimizer",
        model=f"optimizer_models:{model}",
        optimizer=f"optimizer_models:{optimizer}",
    )


def differences(diff: Diff) -> list[Difference]:
    return [
        (entry.status, " ".join((*entry.left, *entry.right)), entry.reason, entry.detail)
        for entry in diff.entries
        if entry.status not in HARMLESS
    ]


def statuses(diff: Diff) -> set[str]:
    return {status for status, *_ in differences(diff)}


def test_equal_states_have_no_differences(tmp_path: Path) -> None:
    left = saved(tmp_path / "a.pt", models.Net, models.named)
    diff = diff_optimizers(left, saved(tmp_path / "b.pt", models.Net, models.named))
    assert diff.identical
    assert not differences(diff)
    assert not diff.notes
    keys = [key for entry in diff.entries for key in entry.left]
    group = torch.load(left)["optimizer"]["param_groups"][0]
    hyperparameters = len(group) - len(["params", "param_names"])
    assert len(keys) == len(set(keys)) == 9 + 3 * 9 + hyperparameters


@pytest.mark.parametrize("keys", ["fqn", "flat"])
def test_pytorch_124546_ids_and_names_of_the_same_state(keys: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "id.pt", models.Net, models.adamw, 3)
    remapped(path, tmp_path / "named.pt", keys=keys, names=names_of("Net"))
    diff = diff_optimizers(path, str(tmp_path / "named.pt"), model="optimizer_models:Net")
    ((status, _, reason, _),) = differences(diff)
    assert status == "renamed"
    assert reason.startswith("left identifies parameters by id")
    assert not diff.notes


def in_order_of_names(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(model.named_parameters()), 0.01)


def test_equal_names_in_another_order_differ_in_position(tmp_path: Path) -> None:
    left = saved(tmp_path / "a.pt", models.Net, models.named)
    diff = diff_optimizers(left, saved(tmp_path / "b.pt", models.Net, in_order_of_names))
    assert statuses(diff) == {"order"}
    assert len(differences(diff)) == 8  # the fifth of nine has the same position
    assert "position 0 -> 8" in str(differences(diff)[0])
    assert diff.notes[0] == "compared by parameter name, only the positions differ"


def saved_in_two_orders(folder: Path) -> tuple[str, str]:
    """Save two models with the same optimizer state, whose keys are in different orders."""
    left = saved(folder / "Net.pt", models.Net, models.sgd)
    right = saved(folder / "Reordered.pt", models.Reordered, models.sgd)
    torch.save({**torch.load(right), "optimizer": torch.load(left)["optimizer"]}, right)
    return left, right


def without_model(path: str) -> str:
    out = path.replace(".pt", "-alone.pt")
    torch.save({"optimizer": torch.load(path)["optimizer"]}, out)
    return out


def test_ids_of_models_in_another_order_differ_if_keys_show_the_order(tmp_path: Path) -> None:
    left, right = saved_in_two_orders(tmp_path)
    assert statuses(diff_optimizers(left, right)) == {"order"}
    assert not differences(diff_optimizers(without_model(left), without_model(right)))


def test_another_model_does_not_hide_a_different_order(tmp_path: Path) -> None:
    """Ids follow the order of --model, unless the keys of the file contradict it, as here."""
    left, right = saved_in_two_orders(tmp_path)
    files = {"Net": left, "Reordered": right, "alone": without_model(left)}
    for model in ("Net", "Reordered"):  # the state does not have the shapes of Reordered
        operand = f"optimizer_models:{model}"
        for one, other in permutations(files, 2):
            diff = diff_optimizers(files[one], files[other], model=operand)
            is_other_order = model == "Reordered" or "Reordered" in (one, other)
            assert statuses(diff) == ({"order"} if is_other_order else set())
        for one in ("Net", "Reordered"):
            assert not differences(diff_optimizers(files[one], files[one], model=operand))


def test_values_are_compared_only_if_requested(tmp_path: Path) -> None:
    model, optimizer = train(models.Net, models.named, 1)
    left = save(tmp_path / "a.pt", model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.5
    steps(model, optimizer, 1, 1)
    right = save(tmp_path / "b.pt", model, optimizer)
    rate = ("value", "param_groups.0.lr param_groups.0.lr")
    assert differences(diff_optimizers(left, right)) == [
        (*rate, "different hyperparameter", "0.01 instead of 0.5")
    ]
    entries = [entry[:2] for entry in differences(diff_optimizers(left, right, values=True))]
    assert ("value", "state.head.weight.step state.head.weight.step") in entries


def test_unknown_hyperparameters_are_reported_and_do_not_matter(tmp_path: Path) -> None:
    def scheduled(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = models.named(model)
        optimizer.param_groups[0].update({"lr": 0.5, "warmup": 3, "of.a.plugin": [1.0]})
        return optimizer

    left = saved(tmp_path / "a.pt", models.Net, scheduled)
    diff = diff_with_code(left, "Net", "named")
    assert [entry[:2] for entry in differences(diff)] == [
        ("value", "param_groups.0.lr param_groups.0.lr"),
        *(("unexpected", f"param_groups.0.{name}") for name in ("warmup", "of.a.plugin")),
    ]
    assert diff.identical
    fresh = models.named(models.Net())
    fresh.load_state_dict(torch.load(left)["optimizer"])
    assert fresh.param_groups[0]["of.a.plugin"] == [1.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_learning_rate_may_be_a_tensor_of_the_number(tmp_path: Path, dtype: torch.dtype) -> None:
    for name, value in ("number.pt", 0.1), ("tensor.pt", torch.tensor(0.1, dtype=dtype)):
        optimizer = torch.optim.SGD(models.Net().parameters(), lr=0.1)
        optimizer.param_groups[0]["lr"] = value
        torch.save({"optimizer": optimizer.state_dict()}, tmp_path / name)
    diff = diff_optimizers(str(tmp_path / "number.pt"), str(tmp_path / "tensor.pt"))
    assert differences(diff) == []
    optimizer.param_groups[0]["lr"] = torch.tensor(0.11, dtype=dtype)
    torch.save({"optimizer": optimizer.state_dict()}, tmp_path / "tensor.pt")
    diff = diff_optimizers(str(tmp_path / "number.pt"), str(tmp_path / "tensor.pt"))
    assert statuses(diff) == {"value"}


def test_a_hyperparameter_that_is_nan_is_equal_to_itself(tmp_path: Path) -> None:
    for name, betas in ("a.pt", (0.9, float("nan"))), ("b.pt", (0.9, float("nan"))):
        optimizer = torch.optim.SGD(models.Net().parameters(), lr=0.1)
        optimizer.param_groups[0].update({"lr": float("nan"), "betas": betas})
        torch.save({"optimizer": optimizer.state_dict()}, tmp_path / name)
    diff = diff_optimizers(str(tmp_path / "a.pt"), str(tmp_path / "b.pt"))
    assert differences(diff) == []


def test_the_order_of_a_fresh_optimizer_is_not_said_to_be_confirmed(tmp_path: Path) -> None:
    orders = (models.Net, "keys in this order"), (models.Reordered, "keys in another order")
    for model, order in orders:
        path = saved(tmp_path / "run.pt", model, models.adamw, 0)
        diff = diff_with_code(path, "Net", "adamw")
        assert diff.identical
        assert order in diff.notes[0]


def test_pytorch_7499_the_state_of_another_optimizer_is_reported(tmp_path: Path) -> None:
    """torch loads the state, and fails at the first step."""
    other = models.Net()
    optimizer = models.adamw(other)
    optimizer.load_state_dict(models.sgd(models.Net()).state_dict())
    with pytest.raises(KeyError, match="betas"):
        steps(other, optimizer, 0, 1)
    left = saved(tmp_path / "sgd.pt", models.Net, models.sgd)
    right = saved(tmp_path / "adamw.pt", models.Net, models.adamw)
    diff = diff_optimizers(left, right, model="optimizer_models:Net")
    assert diff.notes == (
        "left is the state of SGD, right of Adam or AdamW: neither loads the other's",
    )
    assert {
        ("missing", "param_groups.0.betas", "`betas` is not in the param groups of left", None),
        (
            "unexpected",
            "state.head.weight.momentum_buffer",
            "no `momentum_buffer` in the state of right",
            None,
        ),
    } <= set(differences(diff))


def test_an_optimizer_that_is_not_compared_is_noted(tmp_path: Path, run: Run) -> None:
    """The model loads, but torch would assign the moments to the wrong parameters."""
    layers = {name: torch.nn.Linear(2, 2) for name in ("b", "a")}
    model = torch.nn.ModuleDict(layers)
    torch.save(
        {"net": model.state_dict(), "train.adam": models.adamw(model).state_dict()},
        tmp_path / "a.pt",
    )
    source = (
        "from torch import nn\ndef build(): return nn.ModuleDict({name: nn.Linear(2, 2) for"
        " name in 'ab'})\n"
    )
    (tmp_path / "net.py").write_text(source)
    done = run("diff", "--model", f"{tmp_path / 'net.py'}:build", tmp_path / "a.pt")
    assert done.status == 0
    assert (
        "another order, which decides whose state torch loads: train.adam is not compared"
        in done.out
    )


def test_parameters_in_another_group_are_reported(tmp_path: Path) -> None:
    left = saved(tmp_path / "a.pt", models.Net, models.named)
    result = differences(diff_with_code(left, "Net", "by_layer"))
    assert ("missing", "param_groups.1", "left does not have this param group", None) in result
    moved = {tuple(key.split()) for status, key, *_ in result if status == "renamed"}
    rest = [name for name, _ in models.Net().named_parameters() if not name.startswith("second")]
    assert moved == {
        (f"param_groups.0.params.{name}", f"param_groups.1.params.{name}") for name in rest
    }


def test_missing_parameters_are_reported_with_their_group(tmp_path: Path) -> None:
    left = saved(tmp_path / "a.pt", models.Shrunk, in_order_of_names)
    diff = diff_with_code(left, "Net", "adamw")
    assert differences(diff) == [
        (
            "missing",
            f"param_groups.0.params.second.{name}",
            "parameter missing from left; in param group 0 of right",
            None,
        )
        for name in ("weight", "bias")
    ]
    assert not diff.identical
    assert diff.notes == (
        "torch: loaded state dict contains a parameter group that doesn't match the size of"
        " optimizer's group",
    )


def test_ids_without_names_are_compared_with_the_model(tmp_path: Path) -> None:
    left = saved_alone(tmp_path / "a.pt", models.Shrunk, models.adamw)
    diff = diff_with_code(left, "Net", "adamw")
    assert [entry[:2] for entry in differences(diff)] == [
        *(("order", " ".join([f"param_groups.0.params.{index}"] * 2)) for index in range(7)),
        ("missing", "param_groups.0.params.7"),
        ("missing", "param_groups.0.params.8"),
    ]
    assert diff.notes[0] == (
        "left was not saved by this optimizer: its groups have other sizes: "
        "7 parameters in the file, 9 in the optimizer @ param_groups.0"
    )


def test_two_files_without_names_are_compared_by_id(tmp_path: Path) -> None:
    left = saved_alone(tmp_path / "a.pt", models.Net, models.adamw)
    right = saved_alone(tmp_path / "b.pt", models.Net, models.backwards)
    diff = diff_optimizers(left, right)
    key = "state.0.exp_avg"
    assert ("shape", f"{key} {key}", "different shape", "[4, 3] instead of [2, 4]") in differences(
        diff
    )
    assert diff.notes[0].startswith("parameters are compared by id")


@pytest.mark.parametrize("form", ["ids", "names"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_state_that_torch_converts_is_listed(
    dtype: str, form: str, tmp_path: Path, run: Run
) -> None:
    """`Optimizer.load_state_dict` gives the state the dtype of the parameter, except step
    counters.
    """
    (tmp_path / "net.py").write_text(
        f"import torch\ndef build(): return torch.nn.Linear(2, 2, dtype=torch.{dtype})\n"
        "def adamw(model): return torch.optim.AdamW(model.parameters())\n"
    )
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    net = nn.Linear(2, 2, dtype=getattr(torch, dtype))
    resumed = torch.optim.AdamW(net.parameters())
    resumed.load_state_dict(optimizer.state_dict())
    converted = [
        f"{fqn}.{name}"
        for fqn, parameter in net.named_parameters()
        for name, value in resumed.state[parameter].items()
        if value.dtype != torch.float32
    ]
    assert len(converted) == (0 if dtype == "float32" else 4)
    state = optimizer.state_dict() if form == "ids" else get_optimizer_state_dict(layer, optimizer)
    torch.save({"model": net.state_dict(), "optimizer": state}, tmp_path / "a.pt")
    options = (
        "--model",
        f"{tmp_path / 'net.py'}:build",
        "--optimizer",
        f"{tmp_path / 'net.py'}:adamw",
    )
    done = run("diff", tmp_path / "a.pt", *options, "--format", "json")
    notes = [note["text"] for note in json.loads(done.out)["notes"] if note["code"] == "converts"]
    assert (done.status, len(notes)) == (0, bool(converted))
    assert all(name in notes[0] for name in converted)
