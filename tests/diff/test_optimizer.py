from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import optimizer_models as models
from ckpttool import open_checkpoint
from ckpttool.diffing.optimizer_load import compare_with_optimizer
from ckpttool.diffing.result import HARMLESS, Entry
from ckpttool.diffing.saved_optimizers import SavedOptimizer, compare_optimizers
from ckpttool.evaluate.compare import difference
from command import Run
from optimizer_support import names_of, remapped, save, steps, train


def optimizer_alone(path: str) -> SavedOptimizer:
    """Open the optimizer of a file without the state_dict next to it."""
    return SavedOptimizer(open_checkpoint(path).section("optimizer"))


def optimizer_in_file(path: str) -> SavedOptimizer:
    source = open_checkpoint(path)
    return SavedOptimizer.of(source, source.section("optimizer"))


def saved(path: Path, model: type[torch.nn.Module], make, count: int = 1) -> SavedOptimizer:
    return optimizer_alone(save(path, *train(model, make, count)))


def differences(entries: tuple[Entry, ...]) -> list[tuple[str, str, str, str | None]]:
    return [
        (e.status, " ".join((*e.left, *e.right)), e.reason, e.detail)
        for e in entries
        if e.status not in HARMLESS
    ]


def test_equal_states_have_no_differences(tmp_path: Path) -> None:
    left = saved(tmp_path / "a.pt", models.Net, models.named)
    entries, notes, *_ = compare_optimizers(
        left, saved(tmp_path / "b.pt", models.Net, models.named)
    )
    assert not differences(entries)
    assert not notes
    keys = [key for entry in entries for key in entry.left]
    hyperparameters = len(models.named(models.Net()).param_groups[0]) - len(
        ["params", "param_names"]
    )
    assert len(keys) == len(set(keys)) == 9 + 3 * 9 + hyperparameters


@pytest.mark.parametrize("keys", ["fqn", "flat"])
def test_pytorch_124546_ids_and_names_of_the_same_state(keys: str, tmp_path: Path) -> None:
    names = names_of("Net")
    path = save(tmp_path / "id.pt", *train(models.Net, models.adamw))
    remapped(path, tmp_path / "named.pt", keys=keys, names=names)
    entries, notes, *_ = compare_optimizers(
        optimizer_in_file(path), optimizer_in_file(str(tmp_path / "named.pt")), names
    )
    assert [status for status, *_ in differences(entries)] == ["renamed"]
    assert differences(entries)[0][2].startswith("left identifies parameters by id")
    assert not notes


def test_equal_names_in_another_order_differ_in_position(tmp_path: Path) -> None:
    left = saved(tmp_path / "a.pt", models.Net, models.named)
    right = saved(
        tmp_path / "b.pt", models.Net, lambda m: torch.optim.AdamW(list(m.named_parameters()), 0.01)
    )
    entries, notes, *_ = compare_optimizers(left, right)
    assert {status for status, *_ in differences(entries)} == {"order"}
    assert len(differences(entries)) == 8  # the fifth of nine has the same position
    assert "number 0 in left, 8 in right" in str(differences(entries)[0])
    assert notes == ("compared by parameter name, only the positions differ",)


def test_ids_of_models_in_another_order_differ_if_keys_show_the_order(tmp_path: Path) -> None:
    left, right = (
        save(tmp_path / f"{m.__name__}.pt", *train(m, models.sgd, 1))
        for m in (models.Net, models.Reordered)
    )
    state = torch.load(left)
    torch.save({**torch.load(right), "optimizer": state["optimizer"]}, right)
    entries, *_ = compare_optimizers(optimizer_in_file(left), optimizer_in_file(right))
    assert {status for status, *_ in differences(entries)} == {"order"}
    assert not differences(compare_optimizers(optimizer_alone(left), optimizer_alone(right))[0])


def test_another_model_does_not_hide_a_different_order(tmp_path: Path) -> None:
    """Ids follow the order of --model, unless the keys of the file contradict it, as here."""
    left, right = (
        save(tmp_path / f"{m.__name__}.pt", *train(m, models.sgd, 1))
        for m in (models.Net, models.Reordered)
    )
    torch.save({**torch.load(right), "optimizer": torch.load(left)["optimizer"]}, right)
    files = {
        "Net": optimizer_in_file(left),
        "Reordered": optimizer_in_file(right),
        "alone": optimizer_alone(left),
    }
    for model in ("Net", "Reordered"):  # the state does not have the shapes of Reordered
        for one, other in permutations(files, 2):
            entries, *_ = compare_optimizers(files[one], files[other], names_of(model))
            is_other_order = model == "Reordered" or "Reordered" in (one, other)
            assert {status for status, *_ in differences(entries)} == (
                {"order"} if is_other_order else set()
            )
        for one in ("Net", "Reordered"):
            assert not differences(
                compare_optimizers(files[one], files[one], names_of(model)).entries
            )


def test_values_are_compared_only_if_requested(tmp_path: Path) -> None:
    model, optimizer = train(models.Net, models.named, 1)
    left = optimizer_alone(save(tmp_path / "a.pt", model, optimizer))
    optimizer.param_groups[0]["lr"] = 0.5
    steps(model, optimizer, 1, 1)
    right = optimizer_alone(save(tmp_path / "b.pt", model, optimizer))
    without = differences(compare_optimizers(left, right)[0])
    assert without == [
        (
            "value",
            "param_groups.0.lr param_groups.0.lr",
            "different hyperparameter",
            "0.01 instead of 0.5",
        )
    ]
    entries, *_ = compare_optimizers(left, right, values=lambda a, b: difference(a, b, 0.0, 0.0))
    assert ("value", "state.head.weight.step state.head.weight.step") in [
        entry[:2] for entry in differences(entries)
    ]


def test_unknown_hyperparameters_are_reported_and_do_not_matter(tmp_path: Path) -> None:
    def scheduled(model: torch.nn.Module) -> torch.optim.Optimizer:
        optimizer = models.named(model)
        optimizer.param_groups[0].update({"lr": 0.5, "warmup": 3, "of.a.plugin": [1.0]})
        return optimizer

    left = saved(tmp_path / "a.pt", models.Net, scheduled)
    fit = compare_with_optimizer(left, names_of("Net", "named"))
    assert [entry[:2] for entry in differences(fit.entries)] == [
        ("value", "param_groups.0.lr param_groups.0.lr"),
        *(("unexpected", f"param_groups.0.{name}") for name in ("warmup", "of.a.plugin")),
    ]
    assert fit.fits
    fresh = models.named(models.Net())
    fresh.load_state_dict(torch.load(tmp_path / "a.pt")["optimizer"])
    assert fresh.param_groups[0]["of.a.plugin"] == [1.0]


def test_pytorch_7499_the_state_of_another_optimizer_is_reported(tmp_path: Path) -> None:
    """torch loads the state, and fails at the first step."""
    other = models.Net()
    optimizer = models.adamw(other)
    optimizer.load_state_dict(models.sgd(models.Net()).state_dict())
    with pytest.raises(KeyError, match="betas"):
        steps(other, optimizer, 0, 1)
    model, sgd = train(models.Net, models.sgd, 1)
    entries, *_, classes, _ = compare_optimizers(
        optimizer_in_file(save(tmp_path / "sgd.pt", model, sgd)),
        optimizer_in_file(save(tmp_path / "adamw.pt", *train(models.Net, models.adamw, 1))),
        names_of("Net"),
    )
    assert classes == ("SGD", "Adam or AdamW")
    result = differences(entries)
    assert (
        "missing",
        "param_groups.0.betas",
        "`betas` is not in the param groups of left",
        None,
    ) in result
    assert (
        "unexpected",
        "state.head.weight.momentum_buffer",
        "no `momentum_buffer` in the state of right",
        None,
    ) in result


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
    names = names_of("Net", "by_layer")
    left = saved(tmp_path / "a.pt", models.Net, models.named)
    result = differences(compare_with_optimizer(left, names).entries)
    assert ("missing", "param_groups.1", "left does not have this param group", None) in result
    moved = {tuple(key.split()) for status, key, *_ in result if status == "renamed"}
    rest = [name for name, _ in models.Net().named_parameters() if not name.startswith("second")]
    assert moved == {
        (f"param_groups.0.params.{name}", f"param_groups.1.params.{name}") for name in rest
    }


def test_missing_parameters_are_reported_with_their_group(tmp_path: Path) -> None:
    """torch: loaded state dict contains a parameter group that doesn't match the size of
    optimizer's group.
    """
    left = saved(
        tmp_path / "a.pt",
        models.Shrunk,
        lambda m: torch.optim.AdamW(list(m.named_parameters()), 0.01),
    )
    fit = compare_with_optimizer(left, names_of("Net", "adamw"))
    assert differences(fit.entries) == [
        (
            "missing",
            f"param_groups.0.params.second.{n}",
            "parameter missing from left; in param group 0 of right",
            None,
        )
        for n in ("weight", "bias")
    ]
    assert not fit.fits
    assert not fit.notes


def test_ids_without_names_are_compared_with_the_model(tmp_path: Path) -> None:
    left = saved(tmp_path / "a.pt", models.Shrunk, models.adamw)
    fit = compare_with_optimizer(left, names_of("Net", "adamw"))
    assert [entry[:2] for entry in differences(fit.entries)] == [
        *(
            ("order", f"param_groups.0.params.{index} param_groups.0.params.{index}")
            for index in range(7)
        ),
        ("missing", "param_groups.0.params.7"),
        ("missing", "param_groups.0.params.8"),
    ]
    assert fit.notes == (
        "left was not saved by this optimizer: its groups have other sizes: "
        "7 parameters in the file, 9 in the optimizer @ param_groups.0",
    )


def test_two_files_without_names_are_compared_by_id(tmp_path: Path) -> None:
    left = saved(tmp_path / "a.pt", models.Net, models.adamw)
    entries, *_, by_id = compare_optimizers(
        left, saved(tmp_path / "b.pt", models.Net, models.backwards)
    )
    assert (
        "shape",
        "state.0.exp_avg state.0.exp_avg",
        "different shape",
        "[4, 3] instead of [2, 4]",
    ) in differences(entries)
    assert by_id


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
    saved = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(saved.parameters())
    saved(torch.ones(1, 2)).sum().backward()
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
    state = optimizer.state_dict() if form == "ids" else get_optimizer_state_dict(saved, optimizer)
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
