"""What `inspect` says of a training run: its JSON, and its text."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from command import Run


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def train() -> Path:
    """Save a training run with tied weights, layers, sparse state, extra state and an object."""
    layers = {f"module.layers.{index}.w": torch.ones(12, 6) for index in range(8)}
    embedding = torch.ones(12, 6)
    weights: dict[str, Any] = {"module.embed.weight": embedding, **layers}
    weights |= {"module.scale": torch.ones(()), "module.head.weight": embedding}
    weights["module.fp8._extra_state"] = Namespace()
    sparse = torch.tensor([0.0, 1.0, 1.0, 0.0]).to_sparse()
    optimizer = {"state": {0: {"g": sparse}}, "param_groups": [{"params": [0]}]}
    torch.save({"model": weights, "optimizer": optimizer, "epoch": 3}, "train.pt")
    return Path("train.pt")


def test_json_report_follows_the_contract(train: Path, run: Run) -> None:
    data = run("inspect", train, "--format", "json").data
    assert data["tensors"][0] == {
        "section": "model",
        "key": "module.embed.weight",
        "dtype": "float32",
        "shape": [12, 6],
        "bytes": 288,
        "alias_of": None,
    }
    assert [(t["key"], t["alias_of"]) for t in data["tensors"] if t["alias_of"]] == [
        ("module.head.weight", "module.embed.weight")
    ]
    assert data["tensors"][-1]["bytes"] == 24
    del data["tensors"], data["version"]
    assert data.pop("globals") == [one["name"] for one in data["imports"]]
    (imported,) = data.pop("imports")
    assert imported.pop("offset") > 0
    assert imported == {
        "name": "argparse.Namespace",
        "verdict": "unknown",
        "file": "train.pt",
        "member": "train/data.pkl",
        "calls": ["argparse.Namespace()"],
        "called": 1,
    }
    model = {"path": "model", "kind": "state_dict", "tensors": 11, "bytes": 2884}
    optimizer = {"path": "optimizer", "kind": "optimizer", "tensors": 1, "bytes": 24}
    assert data == {
        "tool": "ckpttool",
        "schema": "ckpttool.inspect/1",
        "source": "train.pt",
        "format": "torch_zip",
        "bytes": train.stat().st_size,
        "sections": [{**model, "wrappers": ["module"]}, {**optimizer, "wrappers": []}],
        "extras": [{"section": "model", "key": "module.fp8._extra_state"}],
        "others": ["epoch"],
        "metadata": {},
        "flat_parameters": [],
        "adapters": [],
        "optimizers": [
            {"section": "optimizer", "form": "id", "groups": [{"params": [0], "names": [None]}]}
        ],
        "notes": [],
        "unreached": [],
        "kinds": [],
    }


TEXT = """\
train.pt holds a state dict of 11 tensors, an optimizer and 2 non-tensor entries: torch.save

Sections
  section    kind        tensors      size  wrappers
  model      state_dict       11   2.8 KiB  module
  optimizer  optimizer         1  24 bytes

Dtypes
  dtype    tensors  elements     size
  float32       12       725  2.8 KiB

Tensors
  section    tensors  key                    dtype    shape                size
  model            1  module.embed.weight    float32  [12, 6]         288 bytes
  model            8  module.layers.{0-7}.w  float32  [12, 6]           2.2 KiB
  model            1  module.scale           float32  []                4 bytes
  model            1  module.head.weight     float32  [12, 6]         288 bytes
  optimizer        1  state.0.g              float32  [4] sparse_coo   24 bytes

Aliases (second names of a tensor)
  key                       same tensor as
  model.module.head.weight  model.module.embed.weight

Non-tensor entries (copied unchanged)
  key                            type                value
  model.module.fp8._extra_state  argparse.Namespace
  epoch                          int                 3

Pickle imports (never executed)
  name                verdict  where                     called
  argparse.Namespace  unknown  train/data.pkl, byte N  argparse.Namespace()
"""


def test_text_report_lists_sections_and_tensors(train: Path, run: Run) -> None:
    done = run("inspect", train)
    assert done.status == 0
    assert (
        re.sub("torch.save, .*", "torch.save", re.sub("byte [0-9]+ ", "byte N ", done.out)) == TEXT
    )


def test_all_lists_every_tensor(train: Path, run: Run) -> None:
    shown = run("inspect", train, "--all").out
    tensors = run("inspect", train, "--format", "json").data["tensors"]
    assert len(tensors) == 12
    assert all(f"  {tensor['key']} " in shown for tensor in tensors)
    assert "{" not in shown


def test_long_lists_are_cut_without_all(run: Run) -> None:
    odd = {f"w{index:02}": torch.ones(index + 1) for index in range(73)}
    save_file(odd, "a.safetensors", {"k": "v"})
    shown = run("inspect", "a.safetensors").out
    assert "  ... 33 more (--all)\n" in shown
    assert shown.endswith("Metadata\n  key  value\n  k    v\n")
    assert [name for name in odd if f" {name} " in shown] == list(odd)[:40]
    complete = run("inspect", "a.safetensors", "--all").out
    assert "more" not in complete
    assert [name for name in odd if f" {name} " in complete] == list(odd)


def test_long_text_is_cut_with_the_number_of_hidden_characters(run: Run) -> None:
    long = {"at": "x" * 200, "beyond": "x" * 202, "by one": "x" * 201}
    save_file({}, "a.safetensors", long)
    lines = run("inspect", "a.safetensors").out.splitlines()
    ends = {line.partition("  ")[2].split("  ")[0]: line.partition("x ")[2] for line in lines[-3:]}
    assert ends == {
        "at": "",
        "beyond": "... 2 more characters (--all)",
        "by one": "... 1 more character (--all)",
    }
    assert "x" * 202 in run("inspect", "a.safetensors", "--all").out


def test_empty_checkpoint_has_a_text_report(run: Run) -> None:
    torch.save({}, "a.pt")
    assert run("inspect", "a.pt").out.startswith("a.pt holds nothing: torch.save, ")


def test_nan_and_infinity_are_highlighted(run: Run) -> None:
    odd = torch.tensor([1.0, float("nan"), float("inf"), float("-inf")])
    torch.save({"odd": odd, "even": torch.ones(2)}, "a.pt")
    shown = run("inspect", "a.pt", "--stats", "--format", "html").out
    for name, role, counts in (("odd", "bad", (1, 2)), ("even", "number", (0, 0))):
        cells = (
            f'<td class="{role}" data-title="{t}">{n}</td>' for t, n in zip(("NaN", "inf"), counts)
        )
        assert re.search(f">{name}<.*{''.join(cells)}", shown)
