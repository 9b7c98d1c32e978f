"""Keys that from_pretrained ignores. Oracle: the loading info of transformers, count by count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from command import Run

transformers = pytest.importorskip("transformers", minversion="5")
SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
POSITIONS = {"bert.embeddings.position_ids": torch.arange(512)[None]}
FREQUENCIES = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(2) for n in range(2)}
REAL = {"old_head.weight": torch.ones(2), "old_head.bias": torch.ones(2)}


def bert() -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, num_attention_heads=4))


def llama() -> Any:
    config = transformers.LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("real", [0, 1, 2])
@pytest.mark.parametrize(
    ("build", "ignored"), [(bert, POSITIONS), (llama, FREQUENCIES), (bert, {})]
)
def test_the_counts_are_those_of_from_pretrained(
    build: Any, ignored: dict[str, torch.Tensor], real: int, missing: int, run: Run, tmp_path: Path
) -> None:
    model, folder = build(), tmp_path / "F"
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    state = load_file(path)
    for key in [key for key in state if key.endswith("layernorm.weight") or "LayerNorm" in key][
        :missing
    ]:
        del state[key]
    save_file({**state, **ignored, **dict(list(REAL.items())[:real])}, path, {"format": "pt"})
    _, info = type(model).from_pretrained(folder, output_loading_info=True)
    done = run("diff", "--model", f"hf:{folder}", folder, "--format", "json")
    counted = {"missing": set(info["missing_keys"]), "unexpected": set(info["unexpected_keys"])}
    assert done.status == (1 if any(counted.values()) else 0)
    for status, keys in counted.items():
        side = "left" if status == "unexpected" else "right"
        found = [
            entry
            for entry in done.data["entries"]
            if entry["status"] == status and entry["code"] not in ("load-hook", "tied", "optional")
        ]
        assert {key for entry in found for key in entry[side]} == keys
    if counted["unexpected"] and not counted["missing"]:
        assert str(len(counted["unexpected"])) in run("diff", "--model", f"hf:{folder}", folder).out
