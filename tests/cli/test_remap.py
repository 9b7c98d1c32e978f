"""Exit statuses, errors and output of remap, diff and swap-weights; a failed command writes
nothing.
"""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest
import torch

import hook_zoo
from command import Run
from hook_zoo import ZOO

torch.set_num_threads(1)
MODEL = f"{Path(hook_zoo.__file__)}:strip_layer"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.pt"
    torch.save(ZOO["strip_layer"]().state_dict(), path)
    (tmp_path / "other.pt").write_bytes(b"")
    (tmp_path / "list.json").write_text("[]")
    return path


ERRORS: dict[str, tuple[int, str, str]] = {
    # exit status, command line (in the folder of the checkpoint), text in the error line
    "no output": (2, "remap model.pt", "no output"),
    "an unknown form": (2, "remap model.pt -o o.pt --model M --to ddpp", "no such form"),
    "a form without a model": (2, "remap model.pt -o o.pt --to runtime", "needs the model's names"),
    "two outputs": (2, "remap model.pt -o o.pt --in-place", "exclude"),
    "in place of a section": (2, "remap model.pt::model --in-place", "one section"),
    "reverse without rules": (2, "remap model.pt -o o.pt --reverse", "--reverse"),
    "an unknown ending": (2, "remap model.pt -o o.xyz", "ending"),
    "an output that exists": (2, "remap model.pt -o other.pt", "exists"),
    "the source as output": (2, "remap model.pt -o model.pt --force", "source itself"),
    "a missing folder": (2, "remap model.pt -o gone/o.pt", "no such folder"),
    "a missing file": (2, "remap gone.pt -o o.pt", "gone.pt"),
    "an empty file": (2, "remap other.pt -o o.pt", "other.pt"),
    "a missing section": (2, "remap model.pt::ema -o o.pt", "no section 'ema'"),
    "a bad rule": (2, "remap model.pt -o o.pt --rule a", "not a rule"),
    "an unused rule": (1, "remap model.pt -o o.pt --rule a=>b", "do not fit"),
    "a rule that collides": (1, "remap model.pt -o o.pt --rule {x}.weight=>w --rule weight=>w", "do not fit"),
    "an unused drop": (1, "remap model.pt -o o.pt --drop a", "match nothing"),
    "a missing rules file": (2, "remap model.pt -o o.pt --rules gone.json", "cannot read"
    " gone.json: No such file"),
    "a missing model file": (2, "remap model.pt -o o.pt --model gone.py:build", "gone.py"),
    "a missing attribute": (2, "remap model.pt -o o.pt --model zoo.py:nothing", "nothing"),
    "arguments that are not literals": (2, "remap model.pt -o o.pt --model zoo.py:net(n=f())", "no"
    " arguments that can"),
    "arguments without names": (2, "remap model.pt -o o.pt --model zoo.py:net(2)", "no arguments"
    " that can be read"),
    "an invalid names file": (2, "remap model.pt -o o.pt --model list.json --to runtime", "not a"
    " names file"),
    "another model": (1, "remap model.pt -o o.pt --model T --to runtime", "0 of 4 keys"),
    "nothing to diff": (2, "diff", "nothing to compare"),
    "three to diff": (2, "diff model.pt model.pt model.pt", "diff compares two checkpoints"),
    "an invalid program": (2, "swap-weights model.pt model.pt -o o.pt2", "not an exported program"),
    "a swap without output": (2, "swap-weights model.pt model.pt", "no output"),
}  # fmt: skip


def test_names_file_next_to_a_checkpoint_is_suggested_as_its_model(
    tmp_path: Path, model: Path, run: Run
) -> None:
    names = tmp_path / "names.json"
    assert run("trace", MODEL, "-o", names).status == 0
    refused = run("diff", names, model)
    assert refused.status == 2
    command = shlex.split(refused.err.partition("hint: ")[2])
    assert run(*command[1:]).status == run("diff", model, "--model", MODEL).status


@pytest.mark.parametrize("name", ERRORS)
def test_error_has_a_message_and_a_hint(
    tmp_path: Path, model: Path, run: Run, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    expected, line, text = ERRORS[name]
    zoo = Path(hook_zoo.__file__)
    (tmp_path / "zoo.py").write_bytes(zoo.read_bytes())
    monkeypatch.chdir(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    status, out, err = run(
        *[{"M": MODEL, "T": f"{zoo}:tied"}.get(word, word) for word in line.split(" ")]
    )
    lines = err.splitlines()
    assert status == expected, err
    assert out == ""
    assert text in lines[0]
    assert lines[0].startswith("error: ")
    assert lines[-1].startswith("hint: ")
    assert all(line.startswith("  ") for line in lines[1:-1])
    assert "Traceback" not in err
    assert "internal error" not in err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


@pytest.mark.parametrize(
    "line",
    [
        "remap new.pt --like like.pt -o like.pt",
        "remap new.pt --like like.pt::model -o like.pt",
        "remap new.pt --like sharded/model.safetensors.index.json -o"
        " sharded/model-00001-of-00002.safetensors",
        "remap new.pt --like sharded -o sharded/",
        "remap new.pt --rules rules.pt -o rules.pt",
        "swap-weights other.pt2 new.pt --model program.pt2 -o program.pt2",
        "swap-weights other.pt2 new.pt -o new.pt2",
    ],
)
def test_input_of_the_command_is_not_overwritten(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    linear = torch.nn.Linear(2, 2)
    torch.save(linear.state_dict(), "new.pt")
    torch.save({"model": linear.state_dict(), "step": 1}, "like.pt")
    assert run("convert", "new.pt", "-o", "sharded/", "--max-shard-size", "20B").status == 0
    assert run("remap", "new.pt", "-o", "x.safetensors").status == 0
    Path("rules.pt").write_text('[[rule]]\nrename = "bias => b"\n')
    for name in ("program.pt2", "other.pt2"):
        torch.export.save(torch.export.export(linear, (torch.ones(1, 2),)), name)
    Path("new.pt2").symlink_to("new.pt")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    status, _, err = run(*line.split(" "), "--force")
    assert status == 2
    assert "source" in err or "is read by this command" in err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_dry_run_shows_the_plan_and_writes_nothing(tmp_path: Path, model: Path, run: Run) -> None:
    before = sorted(os.listdir(tmp_path))
    status, out, _ = run(
        "remap", model, "--model", MODEL, "--to", "runtime", "--dry-run", "--format", "json"
    )
    done = json.loads(out)
    assert (status, done["renamed"], done["unchanged"], done["output"]) == (0, 2, 2, "")
    assert {o["from"]["ref"]: o["key"] for o in done["plan"]["outputs"]}["weight"] == "layer.weight"
    assert sorted(os.listdir(tmp_path)) == before


def test_both_models_take_arguments(tmp_path: Path, run: Run) -> None:
    (tmp_path / "m.py").write_text(
        "from torch import nn\n\ndef build(name, bias=True):\n"
        "    return nn.ModuleDict({name: nn.Linear(2, 2, bias=bias)})\n"
    )
    model, source, out = f"{tmp_path}/m.py:build", tmp_path / "a.pt", tmp_path / "b.safetensors"
    torch.save({"one.weight": torch.ones(2, 2)}, source)
    options = ["--model", f"{model}(name='one', bias=False)", "--to-model", f"{model}(name='one')"]
    done = run("remap", source, *options, "-o", out, "--partial")
    assert done.status == 0, done.err
    assert "one.bias" in done.err
