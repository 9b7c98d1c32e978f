"""The module tree of `inspect`: counts, dtypes and bytes add up, repeated layers share a line,
sorting by size.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from command import Run, notes_in


@pytest.fixture(autouse=True)
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    monkeypatch.chdir(tmp_path)
    layers = [
        nn.ModuleDict({"fc": nn.Linear(32, 32), "norm": nn.LayerNorm(32).half()}) for _ in range(4)
    ]
    net = nn.ModuleDict(
        {"head": nn.Linear(32, 4), "layers": nn.ModuleList(layers), "embed": nn.Embedding(100, 32)}
    )
    torch.save({"model": net.state_dict(), "optimizer": {"state": {}, "param_groups": []}}, "t.pt")
    return net


def rows(text: str) -> list[list[str]]:
    """Return the cells of the module table, each row preceded by its depth."""
    table = text.split("Modules\n")[1].split("\n\n")[0].splitlines()[1:]
    return [[str((len(line) - len(line.lstrip()) - 2) // 2), *line.split()] for line in table]


def test_modules_with_their_bytes(run: Run, net: nn.Module) -> None:
    done = run("inspect", "t.pt", "--depth", "2")
    found = rows(done.out)
    assert [(row[0], row[1], row[2]) for row in found] == [
        ("0", "model", "19"),
        ("1", "head", "2"),
        ("1", "layers", "16"),
        ("2", "{0-3}", "16"),
        ("1", "embed", "1"),
    ]
    nbytes = {name: sum(p.nbytes for p in child.parameters()) for name, child in net.items()}
    total = sum(nbytes.values())
    shares = {row[1]: row[-2] for row in found}
    assert {name: shares[name] for name in nbytes} == {
        name: f"{size / total:.1%}" for name, size in nbytes.items()
    }
    assert "float32, float16" in done.out
    assert "Tensors\n" not in done.out


def test_sort_by_bytes(run: Run) -> None:
    names = [row[1] for row in rows(run("inspect", "t.pt", "--depth", "1", "--sort", "bytes").out)]
    assert names == ["model", "layers", "embed", "head"]
    tensors = run("inspect", "t.pt", "--sort", "bytes").out.split("Tensors\n")[1].split()
    assert (
        tensors.index("layers.{0-3}.fc.weight")
        < tensors.index("embed.weight")
        < tensors.index("head.weight")
    )
    assert run("inspect", "t.pt", "--sort", "size").status == 2


def test_filter_limits_the_tree(run: Run) -> None:
    done = run("inspect", "t.pt", "--filter", "layers.{i}.norm.{leaf}", "--format", "json")
    assert {tensor["key"] for tensor in done.data["tensors"]} == {
        f"layers.{i}.norm.{leaf}" for i in range(4) for leaf in ("weight", "bias")
    }
    assert "only what 'layers.{i}.norm.{leaf}' names: 8 of 19 tensors" in notes_in(done.data)
    assert [
        row[1]
        for row in rows(run("inspect", "t.pt", "--filter", "model.head.*", "--depth", "3").out)
    ] == [
        "model",
        "head",
    ]
    done = run("inspect", "t.pt", "--filter", "nothing.*")
    assert (done.status, "names none of 19 tensors" in done.err) == (2, True)


def test_tied_tensors_are_counted_once(run: Run) -> None:
    weight = torch.ones(1000)
    torch.save({"a.w": weight, "b.w": weight}, "tied.pt")
    found = rows(run("inspect", "tied.pt", "--depth", "1").out)
    assert found[0][-2] == "100.0%"
    assert sum(float(row[-2].rstrip("%")) for row in found[1:] if "%" in row[-2]) == 100.0


def test_deep_name_does_not_recurse(run: Run) -> None:
    torch.save({".".join(["a"] * 5000): torch.ones(1)}, "deep.pt")
    assert run("inspect", "deep.pt", "--depth", "2").status == 0
