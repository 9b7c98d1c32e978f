"""Tensor-parallel parts. Oracle: the tensors that were split, and torch's strict load."""

from __future__ import annotations

import shlex
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch

from command import Run, fixes_in

MODELS = """
from torch import nn
class Net(nn.Module):
    def __init__(self, qkv=False):
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)
        if qkv:
            self.qkv = nn.Linear(8, 24)
"""
# the dimension that is split; the others are copies
SPLIT = {
    "embed.weight": 1, "up.weight": 0, "up.bias": 0, "down.weight": 1, "qkv.weight": 0, "qkv.bias": 0
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "whole.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def net(**arguments: Any) -> Any:
    names: dict[str, Any] = {}
    exec(MODELS, names)
    return names["Net"](**arguments)


def split(model: Any, ranks: int, folder: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = model.state_dict()
    for rank in range(ranks):
        part = {
            key: value.chunk(ranks, SPLIT[key])[rank].clone() if key in SPLIT else value
            for key, value in state.items()
        }
        torch.save(part, folder / f"consolidated.{rank:02d}.pth")
    return state


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("out", ["whole.pt", "whole.safetensors"])
def test_parts_are_joined_as_the_shapes_of_the_model_show(
    folder: Path, run: Run, ranks: int, out: str
) -> None:
    state = split(net(), ranks, folder)
    sentence = f"is {ranks} rank files, each with a copy or a part of every tensor"
    assert sentence in run("inspect", "consolidated.*.pth").out
    done = run("diff", "consolidated.*.pth", "--model", "whole.py:Net", "--format", "json")
    assert done.status == 1
    assert [kind["name"] for kind in done.data["kinds"]] == ["tensor-parallel"]
    assert len(fixes_in(done.data)) == 1
    words = ("--model", "whole.py:Net", "-o", out, "--verify")
    assert run("convert", "consolidated.*.pth", *words).status == 0
    assert run("diff", out, "--model", "whole.py:Net").status == 0
    assert run("convert", out, "-o", "check.pt").status == (0 if out.endswith("s") else 1)
    read = torch.load("check.pt" if out.endswith("s") else out)
    assert sorted(read) == sorted(state)
    assert all(torch.equal(value, read[key]) for key, value in state.items())


def test_copies_are_not_said_to_be_parts(folder: Path, run: Run) -> None:
    for rank in range(2):
        torch.save(net().state_dict(), f"rank_{rank}.pt")
    done = run("inspect", "rank_*.pt")
    assert "each with a copy or a part of every tensor" in done.out
    assert "the files of 2 ranks: rank 0 rank_0.pt, rank 1 rank_1.pt" in done.out
    assert done.err == ""  # all of that is information


def test_parts_are_renamed_as_they_are_joined(folder: Path, run: Run) -> None:
    state = split(net(), 2, folder)
    rule = ("--rule", "up.{x*} => mlp.up.{x*}", "--model", "whole.py:Net")
    assert run("remap", "consolidated.*.pth", *rule, "-o", "o.pt", "--verify").status == 0
    read = torch.load("o.pt")
    for key, value in state.items():
        assert torch.equal(value, read[key.replace("up.", "mlp.up.")])


def test_several_weights_in_one_are_not_joined(folder: Path, run: Run) -> None:
    """Each rank has a part of q, of k and of v: joined, they would be q, k, v, q, k, v."""
    split(net(qkv=True), 2, folder)
    words = ("--model", "whole.py:Net(qkv=True)", "-o", "o.pt")
    done = run("convert", "consolidated.*.pth", *words)
    assert done.status == 1
    assert "qkv.weight" in done.err
    assert "qkv.bias" in done.err
    assert "up.weight" not in done.err
    assert "fsdp" not in done.err
    assert not (folder / "o.pt").exists()


def test_the_diff_says_that_tensors_are_split_between_ranks(folder: Path, run: Run) -> None:
    """Parts are no tensors of another shape, on either side, and are joined before anything
    else is looked at.
    """
    torch.save(split(net(), 2, folder), "whole.pt")
    for sides in (["consolidated.*.pth", "whole.pt"], ["whole.pt", "consolidated.*.pth"]):
        done = run("diff", *sides)
        assert done.status == 1
        assert done.out.startswith(f"{sides[0]} and {sides[1]} differ: 4 tensors split between")
        assert "up.weight: 2 parts [8, 8], together [16, 8]" in done.out
        assert "instead of" not in done.out
        assert "build the model" not in done.out
    assert "join the parts of all ranks" in done.out
    words = ("--model", "whole.py:Net")
    answer = run("diff", "consolidated.*.pth", *words).out.splitlines()[0]
    assert answer == "consolidated.*.pth has 4 tensors split between ranks"
    (command,) = fixes_in(run("diff", "consolidated.*.pth", *words, "--format", "json").data)
    assert run(*shlex.split(command)[1:]).status == 0
    out = shlex.split(command)[-1]
    assert not fnmatchcase(out, "consolidated.*.pth")
    assert run("diff", out, "whole.pt", "--values").status == 0


def test_parts_on_other_numbers_of_ranks(folder: Path, run: Run) -> None:
    split(net(), 4, folder)
    for path in folder.glob("consolidated.*"):
        path.rename(folder / path.name.replace("consolidated", "four"))
    split(net(), 2, folder)
    done = run("diff", "consolidated.*.pth", "four.*.pth")
    assert done.status == 1
    assert "differ: 4 tensors split between ranks" in done.out
    assert "up.weight: 2 parts [8, 8] and 4 parts [4, 8], together [16, 8]" in done.out
    assert "down.weight: 2 parts [8, 8] and 4 parts [8, 4], together [8, 16]" in done.out


def test_parts_along_another_dimension(folder: Path, run: Run) -> None:
    state = split(net(), 2, folder)
    for rank, rows in enumerate(state["down.weight"].chunk(2)):
        columns = torch.load(f"consolidated.{rank:02d}.pth")
        torch.save({**columns, "down.weight": rows.clone()}, f"rows.{rank:02d}.pth")
    done = run("diff", "consolidated.*.pth", "rows.*.pth")
    assert "differ: 1 tensor split between ranks" in done.out
    assert "down.weight: 2 parts [8, 8] and 2 parts [4, 16], together [8, 16]" in done.out


def test_parts_that_are_no_tensor_together_are_tensors_of_another_shape(
    folder: Path, run: Run
) -> None:
    split(net(), 2, folder)
    torch.save({**net().state_dict(), "up.weight": torch.ones(15, 8)}, "other.pt")
    done = run("diff", "consolidated.*.pth", "other.pt")
    assert "3 tensors split between ranks, 1 tensor of another shape" in done.out
    assert "up.weight: [8, 8] instead of [15, 8]" in done.out


def test_without_a_model_nothing_is_joined(folder: Path, run: Run) -> None:
    split(net(), 2, folder)
    for out in ("o.pt", "o.safetensors", "o.dcp"):
        assert run("convert", "consolidated.*.pth", "-o", out).status == 1
    done = run("inspect", folder)
    assert done.status == 2
    assert "tensor-parallel parts" in done.err
    assert "consolidated.*.pth" in done.err


def test_parts_that_fit_along_no_dimension_are_refused(folder: Path, run: Run) -> None:
    split(net(), 2, folder)
    state = torch.load("consolidated.01.pth")
    state["up.weight"] = state["up.weight"][:3, :5].clone()
    torch.save(state, "consolidated.01.pth")
    done = run("convert", "consolidated.*.pth", "--model", "whole.py:Net", "-o", "o.pt")
    assert done.status in (1, 2)
    assert "up.weight" in done.err


def test_copies_of_a_smaller_model_are_not_parts_of_a_larger_one(folder: Path, run: Run) -> None:
    """Each rank of DDP saved the same model, and two copies have the shapes of the larger one."""
    (folder / "wide.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "def build(width=8):\n"
        "    net = nn.Embedding(width, 3)\n"
        "    net.scale = nn.Parameter(torch.randn(width))\n"
        "    return net\n"
    )
    names: dict[str, Any] = {}
    exec((folder / "wide.py").read_text(), names)
    for rank in range(2):
        torch.manual_seed(0)
        torch.save(names["build"](4).state_dict(), f"rank_{rank}.pt")
    done = run("diff", "rank_*.pt", "--model", "wide.py:build", "--format", "json")
    assert done.status == 1
    assert {entry["code"] for entry in done.data["entries"]} == {"shape"}
    assert fixes_in(done.data) == []
    torch.save(names["build"](8).state_dict(), "wide.pt")
    done = run("diff", "rank_*.pt", "wide.pt", "--format", "json")
    assert {entry["code"] for entry in done.data["entries"]} == {"shape"}
    for command in ("fix", "convert"):
        done = run(command, "rank_*.pt", "--model", "wide.py:build", "-o", "out.pt")
        assert done.status == 1
        assert not (folder / "out.pt").exists()
    assert (
        run("convert", "rank_*.pt", "--model", "wide.py:build(width=4)", "-o", "out.pt").status == 0
    )
