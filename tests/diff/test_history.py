"""`history` of the checkpoints of a run, against `torch.load` of each step."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ckpttool
import schemas
from command import Run, notes_in


def network(width: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, width), nn.Linear(width, 3))


class Training:
    """A training run; each method named in `CHANGES` changes it before the next save."""

    def __init__(self) -> None:
        self.model: nn.Module = network()
        self.adamw()

    def adamw(self) -> None:
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters())

    def nothing(self) -> None:
        pass

    def half(self) -> None:
        self.model = self.model.bfloat16()
        self.adamw()

    def wider(self) -> None:
        self.model = network(5)
        self.adamw()

    def deeper(self) -> None:
        self.model = nn.Sequential(*self.model.children(), nn.Linear(3, 3).to(next(self.model.parameters()).dtype))
        self.adamw()

    def wrapped(self) -> None:
        self.model = nn.Sequential(self.model)
        self.adamw()

    def sgd(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def groups(self) -> None:
        ends = [[p for p in self.model.parameters() if (p.ndim > 1) is flat] for flat in (True, False)]
        self.optimizer = torch.optim.AdamW([{"params": params} for params in ends])

    def saved(self, path: Path) -> None:
        dtype = next(self.model.parameters()).dtype
        self.model(torch.ones(1, 3, dtype=dtype)).sum().backward()
        self.optimizer.step()
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.9
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, path)


CHANGES = ("nothing", "nothing", "half", "wider", "deeper", "wrapped", "sgd", "groups")


def signature(value: Any) -> Any:
    """Return the structure of a file's contents, without values."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape)
    if isinstance(value, dict):
        return {key: value[key] if key == "params" else signature(value[key]) for key in value}
    return [signature(one) for one in value] if isinstance(value, list) else None


@pytest.mark.parametrize("seed", range(6))
def test_a_step_has_changes_only_if_torch_loads_something_else(seed: int, tmp_path: Path, run: Run) -> None:
    draw, training = random.Random(seed), Training()
    signatures = []
    for number in range(7, 14):  # from one-digit to two-digit numbers
        getattr(training, draw.choice(CHANGES))()
        training.saved(tmp_path / f"step-{number}.pt")
        signatures.append(signature(torch.load(tmp_path / f"step-{number}.pt")))
    done = run("history", tmp_path, "--format", "json")
    assert schemas.check(done.data) == "history"
    steps = done.data["steps"]
    assert [step["source"] for step in steps] == [f"step-{number}.pt" for number in range(7, 14)]
    expected = [False, *(now != before for before, now in pairwise(signatures))]
    assert [bool(step["changes"]) for step in steps] == expected
    assert done.status == any(expected)
    for step, (before, now) in zip(steps[1:], pairwise(signatures)):
        in_model = [change for change in step["changes"] if change["section"] == "model"]
        common = set(before["model"]) & set(now["model"])
        dtypes = {key for key in common if before["model"][key][0] != now["model"][key][0]}
        shapes = {key for key in common if before["model"][key][1] != now["model"][key][1]}
        assert {key for c in in_model if c["status"] in ("dtype", "shape") for key in c["after"]} == dtypes | shapes
        assert {key for c in in_model for key in c["after"]} >= set(now["model"]) - common
        assert {key for c in in_model for key in c["before"]} >= set(before["model"]) - common


@pytest.fixture
def steady(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    training = Training()
    for number in range(9, 13):
        training.saved(Path(f"run/step-{number}.pt"))
    return [f"run/step-{number}.pt" for number in (9, 10, 11, 12)]


def test_steps_without_a_change_are_folded(steady: list[str], run: Run) -> None:
    done = run("history", *reversed(steady))
    assert done.status == 0
    assert "no changes in 4 steps" in done.out
    assert "run/step-10.pt ... run/step-12.pt (3 steps)  no change" in done.out
    assert run("history", "run", "--all").out.count("no change\n") == 3
    valued = run("history", "run", "--values")
    assert valued.status == 1
    assert "different `lr`" in valued.out
    assert run("history", "run", "--values", "--exit-zero").status == 0
    assert ckpttool.history("run").passes


def test_steps_without_numbers_keep_the_given_order(steady: list[str], run: Run) -> None:
    Path("run/step-9.pt").rename("run/first.pt")
    named = ["run/step-12.pt", "run/first.pt", "run/step-10.pt"]
    data = run("history", *named, "--format", "json").data
    assert [step["source"] for step in data["steps"]] == named


def test_an_unreadable_step_is_reported(steady: list[str], run: Run) -> None:
    Path(steady[2]).write_bytes(Path(steady[2]).read_bytes()[:900])
    done = run("history", "run")
    assert done.status == 1
    assert "no changes in 4 steps, 1 could not be read" in done.out
    last = run("history", "run", "--format", "json").data["steps"]
    assert [bool(step["error"]) for step in last] == [False, False, True, False]
    assert (last[3]["since"], last[3]["changes"]) == ("step-10.pt", [])
    for path in steady[:2]:
        Path(path).write_bytes(b"no checkpoint")
    done = run("history", "run")
    assert (done.status, "fewer than two can be read" in done.err) == (2, True)


def test_a_new_optimizer_class_and_a_new_section_are_one_change_each(steady: list[str], run: Run) -> None:
    training = Training()
    training.sgd()
    training.saved(Path("run/step-13.pt"))
    content = torch.load("run/step-13.pt")
    torch.save({**content, "ema": dict(content["model"]), "epoch": 3}, "run/step-14.pt")
    data = run("history", "run", "--format", "json").data["steps"]
    assert data[4]["changes"][0] == {
        "section": "optimizer",
        "status": "class",
        "before": ["Adam or AdamW"],
        "after": ["SGD"],
        "reason": "different optimizer class",
    }
    assert [(c["status"], c["after"]) for c in data[5]["changes"]] == [("section", ["ema"]), ("added", ["epoch"])]
    lines = [line for line in run("history", "run").out.splitlines() if "step-13" in line]
    assert len(lines) <= 4


def test_changes_of_format_sections_and_loose_tensors_are_reported(steady: list[str], run: Run) -> None:
    """Try another format, loose tensors, a state_dict at the root, and a custom optimizer."""
    content = torch.load(steady[-1])

    def last(value: Any, *arguments: str, **options: Any) -> list[tuple[str, str, list[str], list[str]]]:
        torch.save(value, "run/step-13.pt", **options)
        changes = run("history", "run", *arguments, "--format", "json").data["steps"][-1]["changes"]
        return [(c["section"], c["status"], c["before"], c["after"]) for c in changes]

    assert last(content, _use_new_zipfile_serialization=False) == [("", "format", ["torch_zip"], ["torch_legacy"])]
    assert last(content["model"])[:1] == [("", "section", [], ["(root)"])]
    custom_optimizer = {"state": {0: {"trace": torch.ones(2)}}, "param_groups": [{"params": [0, 1, 2, 3], "lr": 1}]}
    assert last({**content, "optimizer": custom_optimizer})[0] == (
        "optimizer",
        "class",
        ["Adam or AdamW"],
        ["an optimizer that is not part of torch"],
    )
    last({**content, "best": torch.ones(2)})
    Path("run/step-13.pt").rename("run/step-12.pt")
    for name in ("run/step-9.pt", "run/step-10.pt", "run/step-11.pt"):
        Path(name).unlink(missing_ok=True)
    assert not last({**content, "best": torch.zeros(2)})
    assert last({**content, "best": torch.zeros(2)}, "--values") == [("", "value", ["best"], ["best"])]
    assert last({**content, "best": torch.zeros(3)}) == [("", "shape", ["best"], ["best"])]


def test_manifests_can_be_steps(steady: list[str], run: Run) -> None:
    for number, path in enumerate(steady[:2]):
        assert run("inspect", path, "--manifest", f"m-{number}.json").status == 0
    named = ["m-0.json", "m-1.json", "m-1.json", steady[1]]
    result = run("history", *named, "--values", "--format", "json").data["steps"]
    assert [len(step["changes"]) > 0 for step in result] == [False, True, False, True]
    assert {change["section"] for change in result[1]["changes"]} == {"model", "optimizer"}
    assert result[3]["changes"][0]["status"] == "format"


def test_trainer_folders_are_steps(tmp_path: Path, run: Run) -> None:
    """Each folder has separate files for weights and optimizer; the last model is next to the folders."""
    model = network()
    for number in (500, 1000):
        folder = tmp_path / f"checkpoint-{number}"
        folder.mkdir()
        save_file(model.state_dict(), folder / "model.safetensors")
        optimizer = torch.optim.AdamW(model.parameters()) if number == 500 else torch.optim.SGD(model.parameters())
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")
        torch.save({"epoch": 1}, folder / "scheduler.pt")
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "logs").mkdir()
    done = run("history", tmp_path, "--format", "json")
    assert [step["source"] for step in done.data["steps"]] == ["checkpoint-500", "checkpoint-1000"]
    changes = done.data["steps"][1]["changes"]
    assert {change["section"] for change in changes} == {"optimizer.pt"}
    assert changes[0]["after"] == ["SGD"]
    assert "not compared (not steps): model.safetensors" in notes_in(done.data)
    Path(tmp_path / "checkpoint-500/optimizer.pt").unlink()
    (change,) = run("history", tmp_path, "--format", "json").data["steps"][1]["changes"]
    assert (change["status"], change["before"], change["after"]) == ("section", [], ["optimizer.pt"])
    (tmp_path / "checkpoint-1500").mkdir()
    save_file(model.state_dict(), tmp_path / "checkpoint-1500/model.safetensors")
    (change,) = run("history", tmp_path, "--format", "json").data["steps"][2]["changes"]
    assert (change["status"], change["before"], change["after"]) == ("section", ["optimizer.pt"], [])
    (tmp_path / "checkpoint-1500/model.safetensors").unlink()
    (tmp_path / "checkpoint-1500").rmdir()
    for name in ("checkpoint-500", "logs"):
        (tmp_path / name).rename(tmp_path / f".{name}")
    save_file(model.state_dict(), tmp_path / "model-2.safetensors")
    done = run("history", tmp_path, "--format", "json")
    assert [step["source"] for step in done.data["steps"]] == ["model-2.safetensors", "model.safetensors"]
    assert "not compared (not steps): checkpoint-1000" in notes_in(done.data)


def test_distributed_checkpoints_are_steps(tmp_path: Path, run: Run) -> None:
    import torch.distributed.checkpoint as dcp

    for number in (8, 9, 10):
        state = network(3 if number < 10 else 4).state_dict()
        dcp.save({"model": state}, checkpoint_id=tmp_path / f"step-{number}")
    data = run("history", tmp_path, "--format", "json").data["steps"]
    assert [(step["source"], len(step["changes"])) for step in data] == [("step-8", 0), ("step-9", 0), ("step-10", 3)]
    assert {change["status"] for change in data[2]["changes"]} == {"shape"}
    assert run("history", tmp_path / "step-8").status == 2


def test_a_new_prefix_is_suggested(steady: list[str], run: Run) -> None:
    content = torch.load(steady[-1])
    prefixes = {"0": "encoder", "1": "decoder"}
    content["model"] = {prefixes[key[0]] + key[1:]: value for key, value in content["model"].items()}
    torch.save(content, "run/step-13.pt")
    done = run("history", "run", "--format", "json")
    last = done.data["steps"][-1]
    assert {change["status"] for change in last["changes"] if change["section"] == "model"} == {"dropped", "added"}
    assert {tuple(pair["before"] + pair["after"]) for pair in last["suggested"]} <= {
        (f"{old}.{name}", f"{new}.{name}") for old, new in prefixes.items() for name in ("weight", "bias")
    }
    assert last["suggested"]
    assert "renamed?" in run("history", "run").out


@pytest.mark.parametrize(
    "line", [["run", "--suggest", "r.toml"], ["run/step-9.pt"], ["run", "--fail-on", "missing"], ["empty"]]
)
def test_wrong_usage_is_an_error(steady: list[str], run: Run, line: list[str]) -> None:
    Path("empty").mkdir()
    assert run("history", *line).status == 2


def test_a_section_that_changes_its_kind_is_reported(tmp_path: Path, run: Run) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number, more in enumerate((model.state_dict(), optimizer.state_dict())):
        torch.save({"model": model.state_dict(), "more": more}, tmp_path / f"step-{number}.pt")
    done = run("history", tmp_path, "--format", "json")
    (change,) = done.data["steps"][1]["changes"]
    assert (done.status, change["section"], change["status"]) == (1, "more", "section")
    assert (change["before"], change["after"]) == (["state_dict"], ["optimizer"])


def test_a_lost_alias_outside_state_dicts_is_a_change(tmp_path: Path, run: Run) -> None:
    mean = torch.arange(4.0)
    first, second = str(tmp_path / "step-1.pt"), str(tmp_path / "step-2.pt")
    torch.save({"model": {"w": torch.ones(2)}, "mean": mean, "copy": mean}, first)
    torch.save({"model": {"w": torch.ones(2)}, "mean": mean}, second)
    assert run("history", first, second).status == 1
    assert run("history", first, first).status == 0
