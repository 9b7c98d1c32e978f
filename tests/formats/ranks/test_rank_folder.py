"""Folders with a file for each item and rank: one checkpoint. Oracle: the tensors that were
sharded, and torch's own model and optimizer that load the result.

The names and contents of the files are those of verl's FSDP checkpoint manager and of
torch_checkpointing.
"""

from __future__ import annotations

import pickle
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from command import Run
from sharded_tensors import as_rank

MODEL = """
import torch
from torch import nn
def build():
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
def adamw(model):
    return torch.optim.AdamW(model.parameters())
"""
RANKS = 2
VERL = {"model": "model", "optimizer": "optim", "extra": "extra_state"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    return tmp_path


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    names: dict[str, Any] = {}
    exec(MODEL, names)
    torch.manual_seed(0)
    model = names["build"]()
    optimizer = names["adamw"](model)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def sharded(value: Any, rank: int) -> Any:
    """Return the state with a DTensor for each tensor, cut along dimension 0 as FSDP2 does."""
    if isinstance(value, dict):
        return type(value)((key, sharded(inner, rank)) for key, inner in value.items())
    if not isinstance(value, torch.Tensor) or not value.dim():
        return value
    mesh = init_device_mesh("cpu", (RANKS,))
    part = value.chunk(RANKS)[rank].clone()
    return DTensor.from_local(
        part, mesh, [Shard(0)], run_check=False, shape=value.shape, stride=value.stride()
    )


def save_verl(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for rank in range(RANKS):
        with as_rank(rank, RANKS):
            states = {
                "model": sharded(model.state_dict(), rank),
                "optim": sharded(optimizer.state_dict(), rank),
                "extra_state": {"lr_scheduler": {"step": 1}, "rng": {"cpu": torch.zeros(3) + rank}},
            }
            for item, state in states.items():
                torch.save(state, f"run/{item}_world_size_{RANKS}_rank_{rank}.pt")


def save_items(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, metadata: bool, ranks: int = RANKS
) -> None:
    for rank in range(ranks):
        with as_rank(rank, RANKS):
            weights, state = model.state_dict(), optimizer.state_dict()
            if ranks > 1:
                weights, state = sharded(weights, rank), sharded(state, rank)
            torch.save(weights, f"run/model_{rank}.pt")
            torch.save(state, f"run/optimizer_{rank}.pt")
            torch.save({"position": rank}, f"run/dataloader_{rank}.pt")
            torch.save(7, f"run/step_{rank}.pt")
    if metadata:
        content = {"metadata": {}, "world_size": ranks, "version": "2.0"}
        Path("run/metadata.pkl").write_bytes(pickle.dumps(content))


SAVERS = {
    "verl": save_verl,
    "torch_checkpointing": lambda *state: save_items(*state, metadata=False),
    "with-metadata": lambda *state: save_items(*state, metadata=True),
    "one-rank": lambda *state: save_items(*state, metadata=False, ranks=1),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("saver", SAVERS)
def test_a_folder_is_one_checkpoint_of_a_model_and_its_optimizer(
    folder: Path, run: Run, saver: str
) -> None:
    model, optimizer = trained()
    SAVERS[saver](model, optimizer)
    item = "optim" if saver == "verl" else "optimizer"
    done = run("inspect", "run")
    assert done.status == 0, done.err
    assert done.out.startswith("run holds a state dict of 6 tensors and an optimizer")
    done = run("diff", "--model", "model.py:build", "run")
    assert done.out.startswith("run loads into model.py:build (section model)")

    written = run("convert", "run", "-o", "all.pt")
    patterns = ("extra*", "step*", "dataloader*")
    others = [path.name for pattern in patterns for path in folder.glob(f"run/{pattern}")]
    assert written.status == 1
    assert all(name in written.err for name in others), written.err
    drops = [f"--drop={name}" for name in others]
    assert run("remap", "run", "-o", "all.pt", *drops).status == 0
    state = torch.load("all.pt", weights_only=True)
    assert_equal(state["model"], model.state_dict())
    other_model, other_optimizer = trained()
    other_model.load_state_dict(state["model"])
    other_optimizer.load_state_dict(state[item])
    assert_equal(slots(other_optimizer), slots(optimizer))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "words",
    [
        ("convert", "run"),
        ("convert", "run", "--dtype", "float16"),
        ("fix", "run", "--model", "model.py:build"),
        ("fix", "run", "--model", "model.py:build", "--optimizer", "model.py:adamw"),
        ("remap", "run", "--rule", "0.{x*} => first.{x*}"),
    ],
)
def test_one_printed_command_leaves_the_random_state_out(
    folder: Path, run: Run, words: tuple[str, ...]
) -> None:
    save_verl(*trained())
    done = run(*words, "-o", "all.pt")
    assert done.status == 1
    lines = done.err.partition("hint: to leave them out: ")[2].strip().split(" && ")
    for line in lines:
        assert run(*shlex.split(line)[1:]).status == 0, line
    dtype = torch.float16 if "--dtype" in words else torch.float32
    state = torch.load("all.pt")
    assert state.keys() == {"model", "optim"}
    assert {tensor.dtype for tensor in state["model"].values()} == {dtype}
    key = "first.weight" if "--rule" in words else "0.weight"
    assert key in state["model"]


def assert_equal(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> None:
    assert list(left) == list(right)
    for key, tensor in left.items():
        assert torch.equal(tensor, right[key]), key


def slots(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    tensors = {}
    for number, slots in optimizer.state_dict()["state"].items():
        for slot, value in slots.items():
            tensors[f"{number}.{slot}"] = value
    return tensors


@pytest.mark.parametrize("item", ["model", "optim"])
def test_copies_that_differ_between_ranks_are_not_the_same(
    folder: Path, run: Run, item: str
) -> None:
    """A tensor that every rank holds has one value in the model: which, no rank says."""
    model, optimizer = trained()
    for rank in range(RANKS):
        state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
        for name, content in state.items():
            torch.save(content, f"run/{name}_world_size_{RANKS}_rank_{rank}.pt")
    words: tuple[str, ...] = ("diff", "--model", "model.py:build", "run")
    words = words if item == "model" else (*words, "--optimizer", "model.py:adamw")
    assert run(*words).status == 0

    path = f"run/{item}_world_size_{RANKS}_rank_1.pt"
    content = torch.load(path)
    tensor = content["0.weight"] if item == "model" else content["state"][0]["exp_avg"]
    tensor += 1
    torch.save(content, path)
    done = run(*words)
    assert done.status == 1, done.out
    assert "different values on another rank" in done.out


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("saver", ["verl", "with-metadata"])
def test_a_missing_rank_is_named(folder: Path, run: Run, saver: str) -> None:
    SAVERS[saver](*trained())
    missing = next(path for path in sorted(folder.glob("run/model_*")) if "1.pt" in path.name)
    missing.unlink()
    done = run("inspect", "run")
    assert done.status == 2
    assert f"no such file @ {missing.name}" in done.err


@pytest.mark.filterwarnings("ignore")
def test_files_of_two_runs_are_not_mixed(folder: Path, run: Run) -> None:
    save_verl(*trained())
    torch.save({}, "run/model_world_size_1_rank_0.pt")
    done = run("inspect", "run")
    assert done.status == 2
    assert "run holds the files of several runs" in done.err
    assert "model_world_size_1_rank_*.pt" in done.err


def test_numbered_files_of_whole_models_are_not_ranks(folder: Path, run: Run) -> None:
    """Epochs 0 and 1 of a training have the same names."""
    model, optimizer = trained()
    for epoch in range(2):
        torch.save(model.state_dict(), f"run/model_{epoch}.pt")
        torch.save(optimizer.state_dict(), f"run/optimizer_{epoch}.pt")
    done = run("inspect", "run")
    assert done.status == 2
    assert "run holds several checkpoints" in done.err
    assert run("inspect", "run/model_0.pt").status == 0


@pytest.mark.parametrize("content", [{"world_size": "2"}, [1], {"world_size": -1}])
def test_metadata_without_ranks_is_damaged(folder: Path, run: Run, content: object) -> None:
    torch.save({"w": torch.ones(1)}, "run/model_0.pt")
    Path("run/metadata.pkl").write_bytes(pickle.dumps(content))
    done = run("inspect", "run")
    assert done.status == 2
    assert "run/metadata.pkl does not say how many ranks there were" in done.err


def test_metadata_is_never_executed(folder: Path, run: Run) -> None:
    torch.save({"w": torch.ones(1)}, "run/model_0.pt")
    Path("run/metadata.pkl").write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
    assert run("inspect", "run").status == 2
    assert not Path("ran").exists()
