"""Files that a Lightning Trainer wrote, and the wrapper ``lightning``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from command import Run


def trainer_file(path: Path, *keys: str) -> Path:
    """Write a file as a Trainer does: the version is what shows it."""
    state = {key: torch.ones(2) for key in keys}
    torch.save({"pytorch-lightning_version": "2.4.0", "epoch": 1, "state_dict": state}, path)
    return path


@pytest.mark.parametrize(
    ("form", "prefix"), [("lightning", ""), ("ddp(lightning)", "module."), ("ddp", "module.")]
)
def test_module_with_several_attributes_is_wrapped_once(
    form: str, prefix: str, tmp_path: Path, run: Run
) -> None:
    keys = ["model.weight", "model.bias", "loss.scale"]
    file = trainer_file(tmp_path / "in.ckpt", *keys)
    assert run("remap", file, "--to", form, "-o", tmp_path / "o.ckpt").status == 0
    written = torch.load(tmp_path / "o.ckpt")["state_dict"]
    assert list(written) == [prefix + key for key in keys]


def test_plain_model_gets_the_attribute(tmp_path: Path, run: Run) -> None:
    torch.save({"weight": torch.ones(2), "loss.scale": torch.ones(2)}, tmp_path / "in.pt")
    done = run("remap", tmp_path / "in.pt", "--to", "lightning", "-o", tmp_path / "o.pt")
    assert done.status == 0
    assert list(torch.load(tmp_path / "o.pt")) == ["model.weight", "model.loss.scale"]


def test_attribute_that_all_keys_share_is_replaced(tmp_path: Path, run: Run) -> None:
    file = trainer_file(tmp_path / "in.ckpt", "net.weight", "net.bias")
    done = run("remap", file, "--to", "lightning", "-o", tmp_path / "o.ckpt")
    assert done.status == 0
    written = torch.load(tmp_path / "o.ckpt")["state_dict"]
    assert list(written) == ["model.weight", "model.bias"]
