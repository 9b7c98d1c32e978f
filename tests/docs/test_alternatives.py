"""What the alternatives to ckpttool lose, and the result of ckpttool."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

import ckpttool
from files import tensor_bytes
from torch_version import needs_torch

State = dict[str, torch.Tensor]


class Block(nn.Module):
    """A module whose child has the name of a wrapper's segment."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.module(x)


def build() -> nn.Module:
    return nn.Sequential(Block(), nn.Linear(4, 2))


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> State:
    """Save a model wrapped in DDP as ddp.pt, and return its state_dict without the wrapper."""
    monkeypatch.chdir(tmp_path)
    state = build().state_dict()
    torch.save({f"module.{key}": value for key, value in state.items()}, "ddp.pt")
    return state


def same(left: State, right: State) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def check_remap(source: str, state: State, out: str = "plain.safetensors") -> None:
    ckpttool.remap(source, out, model=build, to="serialized")
    assert same(load_file(out), state)
    assert ckpttool.diff(out, model=build).identical


def test_strict_false_loads_nothing(state: State) -> None:
    fresh = build()
    before = {key: value.clone() for key, value in fresh.state_dict().items()}
    fresh.load_state_dict(torch.load("ddp.pt"), strict=False)
    assert same(fresh.state_dict(), before)
    assert not ckpttool.diff("ddp.pt", model=build).identical
    check_remap("ddp.pt", state)


def test_replace_also_changes_names_of_the_model(state: State) -> None:
    replaced = {key.replace("module.", ""): value for key, value in torch.load("ddp.pt").items()}
    assert set(replaced) != set(state)


def test_format_utils_keep_the_names(state: State) -> None:
    torch_save_to_dcp("ddp.pt", "ddp-dcp")
    dcp_to_torch_save("ddp-dcp", "back.pt")
    assert set(torch.load("back.pt")) == set(torch.load("ddp.pt"))
    check_remap("ddp-dcp", state)


def test_merge_weights_unties_weights_and_fails_with_an_optimizer(state: State) -> None:
    merge = pytest.importorskip("accelerate.utils").merge_fsdp_weights
    tied = {"0.weight": torch.ones(8, 4)}
    tied["1.weight"] = tied["0.weight"]
    optimizer = torch.optim.AdamW(build().parameters())
    dcp.save({"model": torch.load("ddp.pt")}, checkpoint_id="fsdp")
    dcp.save({"model": state, "optimizer": optimizer.state_dict()}, checkpoint_id="both")
    dcp.save({"model": tied}, checkpoint_id="tied")
    for folder in ("fsdp", "tied"):
        merge(folder, f"{folder}-merged")
    assert set(load_file("fsdp-merged/model.safetensors")) == set(torch.load("ddp.pt"))
    assert len(load_file("tied-merged/model.safetensors")) == 2
    with pytest.raises(ValueError, match=r"expected torch\.Tensor"):
        merge("both", "both-merged")
    check_remap("fsdp", state)
    ckpttool.remap("both::model", "both.safetensors")
    assert same(load_file("both.safetensors"), state)


def test_consolidate_drops_keys_that_are_not_listed(state: State) -> None:
    needs_torch("2.8", "HuggingFaceStorageWriter")
    from torch.distributed.checkpoint import HuggingFaceStorageWriter
    from torch.distributed.checkpoint._consolidate_hf_safetensors import (
        consolidate_safetensors_files,
    )

    shards = HuggingFaceStorageWriter(path="shards", save_distributed=True)
    dcp.save(torch.load("ddp.pt"), storage_writer=shards)
    listed = [key for key in torch.load("ddp.pt") if key != "module.1.bias"]
    os.makedirs("consolidated")
    consolidate_safetensors_files("shards", "consolidated", dict.fromkeys(listed, 1))
    assert set(load_file("consolidated/model-00001-of-00001.safetensors")) == set(listed)
    os.makedirs("complete")
    consolidate_safetensors_files("shards", "complete", dict.fromkeys(torch.load("ddp.pt"), 1))
    ckpttool.convert("shards", "ours.safetensors")
    expected = tensor_bytes(Path("complete/model-00001-of-00001.safetensors"))
    assert tensor_bytes(Path("ours.safetensors")) == expected
    check_remap("shards", state)
    lost = ckpttool.diff("consolidated", "plain.safetensors")
    assert [entry.right for entry in lost.entries if entry.status == "missing"] == [("1.bias",)]


def test_from_pretrained_leaves_random_values(state: State) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: Any = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 16, "n_positions": 8}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    model.save_pretrained("gpt2")
    weights = {f"module.{key}": value for key, value in load_file("gpt2/model.safetensors").items()}
    save_file(weights, "gpt2/model.safetensors", metadata={"format": "pt"})
    key = "transformer.wte.weight"
    assert not torch.equal(
        GPT2LMHeadModel.from_pretrained("gpt2").state_dict()[key], model.state_dict()[key]
    )
    assert not ckpttool.diff("gpt2", model="hf:gpt2").identical
    ckpttool.remap("gpt2", "plain", rule=["module.{x*} => {x*}"])
    loaded = Path("plain/config.json")
    loaded.write_bytes(Path("gpt2/config.json").read_bytes())
    assert same(GPT2LMHeadModel.from_pretrained("plain").state_dict(), model.state_dict())
