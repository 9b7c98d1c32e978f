"""Optimizers on the command line: output, written files and exit status."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import optimizer_models as models
from command import Run, main
from optimizer_support import same, save, train

MODEL = ("--model", "optimizer_models:Net")


@pytest.fixture
def ckpt(tmp_path: Path) -> str:
    return save(tmp_path / "train.pt", *train(models.Net, models.by_layer))


@pytest.mark.parametrize(
    ("make", "form"),
    [("adamw", "id"), ("decayed_named", "id"), ("adamw", "fqn"), ("adamw", "flat")],
)
def test_inspect_names_parameters_if_the_file_does(
    make: str, form: str, tmp_path: Path, run: Run
) -> None:
    """A file names its parameters in `param_names` or in its keys, but not if it has only ids."""
    model, optimizer = train(models.Net, getattr(models, make))
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
    state = (
        optimizer.state_dict()
        if form == "id"
        else get_optimizer_state_dict(model, optimizer, options=options)
    )
    torch.save({"optimizer": state}, tmp_path / "o.pt")
    (data,) = run("inspect", str(tmp_path / "o.pt"), "--format", "json").data["optimizers"]
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    has_names = form != "id" or make == "decayed_named"
    names = [
        [name_of[p] if has_names else None for p in group["params"]]
        for group in optimizer.param_groups
    ]
    assert (data["section"], data["form"]) == ("optimizer", form)
    assert [group["names"] for group in data["groups"]] == names
    shown = run("inspect", tmp_path / "o.pt")
    assert shown.status == 0
    assert ("Optimizer parameters, with their names in the file" in shown.out) == (
        make == "decayed_named"
    )


def test_remap_reports_the_conversion(ckpt: str, tmp_path: Path, run: Run) -> None:
    out = str(tmp_path / "out.pt")
    chosen = (*MODEL, "--optimizer", "optimizer_models:by_layer", "--optimizer-keys", "fqn")
    data = run("remap", ckpt, *chosen, "-o", out, "--verify", "--format", "json").data
    assert data["optimizer"] == {
        "from": "id",
        "to": "fqn",
        "params": 9,
        "sections": [
            {
                "section": "optimizer",
                "from": "id",
                "to": "fqn",
                "params": 9,
                "evidence": "optimizer",
                "new": [],
                "dropped": [],
            }
        ],
    }
    model, optimizer = train(models.Net, models.by_layer)
    written = torch.load(out)
    assert same(written["optimizer"], get_optimizer_state_dict(model, optimizer))
    assert same(written["model"], torch.load(ckpt)["model"])


def test_optimizer_section_is_written_to_a_separate_file(ckpt: str, tmp_path: Path) -> None:
    out = str(tmp_path / "out.pt")
    chosen = [
        *MODEL,
        "--optimizer",
        "optimizer_models:by_layer",
        "--to-optimizer",
        "optimizer_models:halves",
    ]
    assert main(["remap", f"{ckpt}::optimizer", *chosen, "-o", out]) == 0
    chosen = [*MODEL, "--optimizer", "optimizer_models:by_layer", "--optimizer-keys", "flat"]
    assert main(["remap", f"{ckpt}::optimizer", *chosen, "-o", out, "--force", "--verify"]) == 0
    assert "state.second.weight.exp_avg" in torch.load(out)


def test_optimizer_remap_with_dry_run_and_in_place(ckpt: str) -> None:
    chosen = [*MODEL, "--optimizer", "optimizer_models:by_layer", "--optimizer-keys", "fqn"]
    before = Path(ckpt).read_bytes()
    assert main(["remap", ckpt, *chosen, "--dry-run"]) == 0
    assert Path(ckpt).read_bytes() == before
    assert main(["remap", ckpt, *chosen, "--in-place"]) == 0
    assert "second.weight" in torch.load(ckpt)["optimizer"]["state"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--optimizer-keys", "names"], "no such form"),
        (["--optimizer", "optimizer_models:adamw"], "is called with a model"),
        ([*MODEL, "--optimizer", "optimizer_models:missing"], "has no attribute 'missing'"),
        ([*MODEL, "--optimizer", "optimizer_models"], "names no Python object"),
        ([*MODEL, "--optimizer", "optimizer_models:torch"], "is not a function but a module"),
        ([*MODEL, "--optimizer", "optimizer_models:Net"], "cannot be called with the model"),
        ([*MODEL, "--optimizer", "builtins:id"], "gives an int, not an optimizer"),
    ],
)
def test_invalid_optimizer_options_are_errors(
    args: list[str], message: str, ckpt: str, run: Run
) -> None:
    done = run("remap", ckpt, *args, "--dry-run")
    assert (done.status, message in done.err) == (2, True)


def test_optimizer_of_another_model_is_refused(tmp_path: Path, ckpt: str, run: Run) -> None:
    code = tmp_path / "own.py"
    code.write_text(
        "import torch\ndef make(model):\n    return torch.optim.SGD(torch.nn.Linear(2,"
        " 2).parameters(), 0.1)\n"
    )
    done = run("trace", MODEL[1], "--optimizer", f"{code}:make")
    assert (done.status, "2 parameters that the model has not" in done.err) == (2, True)


def test_trace_and_explain_show_optimizer_ids(run: Run, tmp_path: Path) -> None:
    optimizer = models.by_layer(models.Net())
    names = run(
        "trace", MODEL[1], "--optimizer", "optimizer_models:by_layer", "--format", "json"
    ).data
    assert [(one["id"], one["group"]) for one in names["optimizer"]] == [
        (id, group)
        for group, saved_group in enumerate(optimizer.state_dict()["param_groups"])
        for id in saved_group["params"]
    ]
    assert names["optimizer_class"] == "AdamW"
    data = run(
        "explain",
        "second.bias",
        *MODEL,
        "--optimizer",
        "optimizer_models:by_layer",
        "--format",
        "json",
    ).data
    assert (data["optimizer_id"], data["optimizer_group"]) == (1, 0)
    assert data["optimizer_state"] == ["state.1.step", "state.1.exp_avg", "state.1.exp_avg_sq"]
    shown = run("explain", "second.bias", *MODEL, "--optimizer", "optimizer_models:by_layer")
    assert shown.status == 0
    assert re.search(r"optimizer id +1 \(param group 0\)\n", shown.out)


def test_names_file_contains_the_optimizer_ids(ckpt: str, tmp_path: Path, run: Run) -> None:
    file, out = str(tmp_path / "names.json"), str(tmp_path / "out.pt")
    assert main(["trace", MODEL[1], "--optimizer", "optimizer_models:by_layer", "-o", file]) == 0
    assert main(["remap", ckpt, "--model", file, "--optimizer-keys", "fqn", "-o", out]) == 0
    model, optimizer = train(models.Net, models.by_layer)
    assert same(torch.load(out)["optimizer"], get_optimizer_state_dict(model, optimizer))
    done = run("explain", "head.weight", "--model", file, "--optimizer", "optimizer_models:adamw")
    assert (done.status, "--optimizer needs the model's code" in done.err) == (2, True)


def test_hyperparameters_that_loading_replaces_are_no_reason(tmp_path: Path, run: Run) -> None:
    """If only the model does not load, that is the reason, and not the learning rate of the
    file.
    """
    model, optimizer = train(models.Net, models.adamw)
    optimizer.param_groups[0]["lr"] = 0.123
    compiled: Any = torch.compile(model)
    torch.save(
        {"model": compiled.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "t.pt"
    )
    done = run("diff", tmp_path / "t.pt", *MODEL, "--optimizer", "optimizer_models:adamw")
    assert done.status == 1
    answer, reason, fix = done.out.splitlines()[:3]
    assert answer.endswith(
        " loads into optimizer_models:adamw, but the model in the file does not load as it is"
    )
    assert reason.startswith("reason: the model in this file does not load as it is")
    assert fix.startswith("fix: ckpttool remap")
    assert "lr" not in done.out.partition("Not counted as differences")[0]
