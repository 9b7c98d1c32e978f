"""A kind is one row of the table and one test: learned tokens of textual inversion."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from command import Run

# as diffusers' script, the web UI and SDXL trainers save them, and the number of vectors
FILES = {
    "learned_embeds.safetensors": ({"<cat-toy>": torch.ones(768)}, 1),
    "style.safetensors": ({"emb_params": torch.ones(8, 768)}, 8),
    "sdxl.safetensors": ({"clip_l": torch.ones(2, 768), "clip_g": torch.ones(2, 1280)}, 2),
}


@pytest.mark.parametrize("name", FILES)
def test_a_learned_token_is_recognized(name: str, run: Run, tmp_path: Path) -> None:
    state, vectors = FILES[name]
    save_file(state, tmp_path / name)
    (tmp_path / "net.py").write_text("from torch import nn\ndef build(): return nn.Linear(2, 2)\n")
    sentence = f"is a learned token of {vectors} vector"
    assert sentence in "\n".join(run("inspect", tmp_path / name).out.splitlines()[:4])
    done = run("diff", tmp_path / name, "--model", f"{tmp_path / 'net.py'}:build")
    assert done.status == 1
    assert sentence in "\n".join(done.out.splitlines()[:4])


def test_other_small_files_are_not_learned_tokens(run: Run, tmp_path: Path) -> None:
    for number, keys in enumerate((["weight"], ["clip_l", "weight"], ["<a>", "bias"])):
        save_file({key: torch.ones(3) for key in keys}, tmp_path / f"{number}.safetensors")
        assert "learned token" not in run("inspect", tmp_path / f"{number}.safetensors").out
