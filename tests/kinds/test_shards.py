"""Folders whose index and shards disagree. Oracle: from_pretrained, and what it reports."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from command import Run

transformers = pytest.importorskip("transformers", minversion="5")
INDEX = "model.safetensors.index.json"
NORM = "model.norm.weight"


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(5)
    folder = tmp_path_factory.mktemp("shards") / "model"
    llama().save_pretrained(folder, max_shard_size="5KB")
    return folder


def weight_map(folder: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return found


def write_map(folder: Path, names: dict[str, str]) -> None:
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps({**index, "weight_map": names}))


def phantom(folder: Path) -> None:
    names = weight_map(folder)
    write_map(folder, {**names, "model.phantom.weight": names[NORM]})


def unlisted(folder: Path) -> None:
    write_map(folder, {key: name for key, name in weight_map(folder).items() if key != NORM})


def overlay(folder: Path) -> None:
    """Put a second value of a tensor into the first shard and into the last one."""
    names = weight_map(folder)
    for shard, value in ((min(names.values()), 3.0), (max(names.values()), 4.0)):
        state = load_file(folder / shard)
        save_file({**state, NORM: torch.full((16,), value)}, folder / shard, {"format": "pt"})


def without_index(folder: Path) -> None:
    (folder / INDEX).unlink()


def stray(folder: Path) -> None:
    state = {key: value + 1 for key, value in llama().state_dict().items() if key != NORM}
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def another_file(folder: Path) -> None:
    save_file({NORM: torch.zeros(16)}, folder / "delta.safetensors", {"format": "pt"})


def missing_shard(folder: Path) -> None:
    (folder / min(weight_map(folder).values())).unlink()


def truncated_shard(folder: Path) -> None:
    path = folder / min(weight_map(folder).values())
    os.truncate(path, path.stat().st_size - 8)


CHANGES: list[Callable[[Path], None]] = [
    phantom, unlisted, overlay, stray, another_file, without_index, missing_shard, truncated_shard,
]  # fmt: skip


def oracle(folder: Path) -> Any:
    """Return the loaded model, or None, and whether the file has exactly its keys."""
    try:
        model, info = transformers.LlamaForCausalLM.from_pretrained(
            folder, output_loading_info=True
        )
    except Exception:
        return None, False
    return model, not (info["missing_keys"] or info["unexpected_keys"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_transformers_reads_is_read(
    saved: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(saved, "F")
    change(Path("F"))
    model, fits = oracle(Path("F"))
    done = run("diff", "--model", "hf:F", "F")
    if change in (missing_shard, truncated_shard):
        assert (model, done.status) == (None, 2)
        return
    assert done.status == (0 if fits else 1), done.said
    assert model is None or NORM in done.said[1] or change in (another_file, phantom)
    if change is another_file:
        assert "not delta.safetensors" in done.said[1]

    assert run("convert", "F", "-o", "whole.safetensors").status == 0
    read = load_file("whole.safetensors")
    if model is not None:
        state = model.state_dict()
        assert all(torch.equal(state[key], value) for key, value in read.items())
        assert change is stray or read.keys() == state.keys()
    if change in (phantom, unlisted, overlay, without_index):
        assert run("convert", "F", "-o", "G/").status == 0
        again, fits = oracle(Path("G"))
        assert fits
        assert set(weight_map(Path("G"))) == set(again.state_dict())
        assert all(torch.equal(again.state_dict()[key], value) for key, value in read.items())
        assert run("diff", "--model", "hf:G", "G").status == 0
