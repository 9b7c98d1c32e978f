"""Optimizers on the command line: output, written files and exit status."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import optimizer_models as models
from ckpttool.cli.app import main
from command import fixes_in, notes_in
from optimizer_support import same, save, train

MODEL = ("--model", "optimizer_models:Net")


def run_json(capsys: pytest.CaptureFixture[str], *args: str) -> dict:
    main([*args, "--format", "json"])
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def ckpt(tmp_path: Path) -> str:
    return save(tmp_path / "train.pt", *train(models.Net, models.by_layer))


@pytest.mark.parametrize(
    ("make", "form"), [("adamw", "id"), ("decayed_named", "id"), ("adamw", "fqn"), ("adamw", "flat")]
)
def test_inspect_names_parameters_if_the_file_does(
    make: str, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file names its parameters in `param_names` or in its keys, but not if it has only ids."""
    model, optimizer = train(models.Net, getattr(models, make))
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
    state = optimizer.state_dict() if form == "id" else get_optimizer_state_dict(model, optimizer, options=options)
    torch.save({"optimizer": state}, tmp_path / "o.pt")
    (data,) = run_json(capsys, "inspect", str(tmp_path / "o.pt"))["optimizers"]
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    has_names = form != "id" or make == "decayed_named"
    names = [[name_of[p] if has_names else None for p in group["params"]] for group in optimizer.param_groups]
    assert (data["section"], data["form"]) == ("optimizer", form)
    assert [group["names"] for group in data["groups"]] == names
    assert main(["inspect", str(tmp_path / "o.pt")]) == 0
    text = capsys.readouterr().out
    assert ("Optimizer parameters, with their names in the file" in text) == (make == "decayed_named")


def test_remap_reports_the_conversion(ckpt: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out.pt")
    chosen = (*MODEL, "--optimizer", "optimizer_models:by_layer", "--optimizer-keys", "fqn")
    data = run_json(capsys, "remap", ckpt, *chosen, "-o", out, "--verify")
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


def test_ambiguous_ids_are_refused(ckpt: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.pt"
    assert main(["remap", ckpt, *MODEL, "--optimizer-keys", "fqn", "-o", str(out)]) == 1
    assert "its ids cannot be told apart\nhint: pass --optimizer" in capsys.readouterr().err
    assert not out.exists()


def test_optimizer_section_is_written_to_a_separate_file(ckpt: str, tmp_path: Path) -> None:
    out = str(tmp_path / "out.pt")
    chosen = [*MODEL, "--optimizer", "optimizer_models:by_layer", "--to-optimizer", "optimizer_models:halves"]
    assert main(["remap", f"{ckpt}::optimizer", *chosen, "-o", out]) == 1  # the groups' learning rates differ
    chosen = [*MODEL, "--optimizer", "optimizer_models:by_layer", "--optimizer-keys", "flat"]
    assert main(["remap", f"{ckpt}::optimizer", *chosen, "-o", out, "--verify"]) == 0
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
    args: list[str], message: str, ckpt: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["remap", ckpt, *args, "--dry-run"]) == 2
    assert message in capsys.readouterr().err


def test_optimizer_of_another_model_is_refused(tmp_path: Path, ckpt: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = tmp_path / "own.py"
    code.write_text(
        "import torch\ndef make(model):\n    return torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), 0.1)\n"
    )
    assert main(["trace", MODEL[1], "--optimizer", f"{code}:make"]) == 2
    assert "2 parameters that the model has not" in capsys.readouterr().err


def test_trace_and_explain_show_optimizer_ids(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    optimizer = models.by_layer(models.Net())
    names = run_json(capsys, "trace", MODEL[1], "--optimizer", "optimizer_models:by_layer")
    assert [(one["id"], one["group"]) for one in names["optimizer"]] == [
        (id, group)
        for group, saved_group in enumerate(optimizer.state_dict()["param_groups"])
        for id in saved_group["params"]
    ]
    assert names["optimizer_class"] == "AdamW"
    data = run_json(capsys, "explain", "second.bias", *MODEL, "--optimizer", "optimizer_models:by_layer")
    assert (data["optimizer_id"], data["optimizer_group"]) == (1, 0)
    assert data["optimizer_state"] == ["state.1.step", "state.1.exp_avg", "state.1.exp_avg_sq"]
    assert main(["explain", "second.bias", *MODEL, "--optimizer", "optimizer_models:by_layer"]) == 0
    assert re.search(r"optimizer id +1 \(param group 0\)\n", capsys.readouterr().out)


def test_names_file_contains_the_optimizer_ids(ckpt: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = str(tmp_path / "names.json"), str(tmp_path / "out.pt")
    assert main(["trace", MODEL[1], "--optimizer", "optimizer_models:by_layer", "-o", file]) == 0
    assert main(["remap", ckpt, "--model", file, "--optimizer-keys", "fqn", "-o", out]) == 0
    model, optimizer = train(models.Net, models.by_layer)
    assert same(torch.load(out)["optimizer"], get_optimizer_state_dict(model, optimizer))
    capsys.readouterr()
    assert main(["explain", "head.weight", "--model", file, "--optimizer", "optimizer_models:adamw"]) == 2
    assert "--optimizer needs the model's code" in capsys.readouterr().err


def test_diff_suggests_a_working_fix(ckpt: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out.pt")
    chosen = [*MODEL, "--optimizer", "optimizer_models:by_layer"]
    main(["remap", ckpt, *chosen, "--optimizer-keys", "fqn", "-o", out])
    capsys.readouterr()
    data = run_json(capsys, "diff", f"{ckpt}::optimizer", f"{out}::optimizer", *chosen)
    fixed = str(tmp_path / "train.fqn.pt")
    assert fixes_in(data) == [f"ckpttool remap {ckpt} {' '.join(chosen)} --optimizer-keys fqn -o {fixed}"]
    assert main(fixes_in(data)[0].split()[1:]) == 0
    assert main(["diff", f"{fixed}::optimizer", f"{out}::optimizer", "--values"]) == 0


def test_diff_against_another_optimizer(ckpt: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", *MODEL, "--optimizer", "optimizer_models:by_layer", ckpt]) == 0
    capsys.readouterr()
    data = run_json(capsys, "diff", *MODEL, "--optimizer", "optimizer_models:adamw", ckpt)
    assert not data["identical"]
    assert fixes_in(data)[0].endswith(f"--to-optimizer optimizer_models:adamw -o {ckpt.replace('.pt', '.mapped.pt')}")


def test_diff_of_files_suggests_a_diff_of_their_optimizers(
    ckpt: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = save(tmp_path / "other.pt", *train(models.Net, models.sgd))
    data = run_json(capsys, "diff", ckpt, other)
    assert any(note.endswith(f"(ckpttool diff {ckpt}::optimizer {other}::optimizer)") for note in notes_in(data))


def test_saved_plan_renames_the_optimizer_like_its_rule(tmp_path: Path) -> None:
    path = save(tmp_path / "train.pt", *train(models.Net, models.named))
    named, plan, ruled, planned = (str(tmp_path / name) for name in ("n.pt", "plan.json", "ruled.pt", "planned.pt"))
    assert main(["remap", path, "--optimizer-keys", "fqn", "-o", named]) == 0
    assert main(["remap", named, "--rule", "head.{x} => out.{x}", "--save-plan", plan, "-o", ruled]) == 0
    assert main(["remap", named, "--rules", plan, "-o", planned]) == 0
    expected, actual = (torch.load(one)["optimizer"] for one in (ruled, planned))
    assert same(expected, actual)
    assert any(str(name).startswith("out.") for name in actual["state"])
