"""CKPT and CKPT::SECTION give the same keys in remap, diff and inspect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from command import Run

PLAIN = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).state_dict()


def under(prefix: str) -> dict[str, torch.Tensor]:
    return {prefix + key: value for key, value in PLAIN.items()}


# File -> its content and its model section.
FILES: dict[str, tuple[dict[str, Any], str]] = {
    "lightning.ckpt": (
        {
            "epoch": 1,
            "pytorch-lightning_version": "2.5.0",
            "state_dict": under("net."),
            "optimizer_states": [],
        },
        "state_dict",
    ),
    "lightning_compiled.ckpt": (
        {
            "pytorch-lightning_version": "2.5.0",
            "state_dict": under("model._orig_mod."),
            "loops": {},
        },
        "state_dict",
    ),
    "lightning_averaged.ckpt": (
        {"pytorch-lightning_version": "2.5.0", "state_dict": under("net."), "ema": under("net.")},
        "state_dict",
    ),
    "lightning_only.ckpt": (
        {"pytorch-lightning_version": "2.5.0", "state_dict": under("net.")},
        "state_dict",
    ),
    "not_lightning.ckpt": ({"epoch": 1, "state_dict": under("net.")}, "state_dict"),
    "train.pt": ({"model": under("module._orig_mod."), "epoch": 1, "args": {"lr": 0.1}}, "model"),
    "plain.pt": (dict(PLAIN), ""),
    "ddp.pt": (under("module."), ""),
    "dcp": ({"model": under("module."), "epoch": 1}, "model"),
    "lightning.dcp": (
        {"pytorch-lightning_version": "2.5.0", "state_dict": under("net.")},
        "state_dict",
    ),
    "accelerate": (under("module."), "model"),
}


def write(name: str, folder: Path) -> tuple[str, str]:
    content, section = FILES[name]
    path = folder / name
    if name == "accelerate":
        dcp.save({"model": content}, checkpoint_id=str(path / "pytorch_model_fsdp_0"))
        optimizer = torch.optim.SGD(nn.Linear(2, 3).parameters())
        path.mkdir(exist_ok=True)
        torch.save(optimizer.state_dict(), path / "optimizer.bin")
    elif name.endswith("dcp"):
        dcp.save(content, checkpoint_id=str(path))
    else:
        torch.save(content, path)
    return str(path), f"{path}::{section}"


def model_keys(path: Path, section: str) -> list[str]:
    value = torch.load(path, weights_only=False)
    return list(value.get(section, value))


@pytest.mark.filterwarnings("ignore:.*TypedStorage")
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("form", ["serialized", "ddp", "compile", "lightning"])
def test_remap_of_a_section_writes_the_keys_of_the_file(
    name: str, form: str, run: Run, tmp_path: Path
) -> None:
    whole, section = write(name, tmp_path)
    picked = [] if "averaged" not in name else ["--sections", "state_dict"]
    options = ("--to", form)
    first = run("remap", whole, *options, *picked, "-o", tmp_path / "whole_out.pt")
    second = run("remap", section, *options, "-o", tmp_path / "section_out.pt")
    if "nothing to change" in first.err:  # a section without the rest of its file is a change
        assert f"already {form}" in first.err
        assert second.status == 0, second.said
        unchanged = torch.load(tmp_path / "section_out.pt")
        assert list(unchanged) == list(FILES[name][0].get(FILES[name][1], FILES[name][0]))
        return
    assert (first.status, second.status) == (0, 0), (first.said, second.said)
    assert model_keys(tmp_path / "whole_out.pt", FILES[name][1]) == model_keys(
        tmp_path / "section_out.pt", "-"
    )
    if form == "serialized" and name != "not_lightning.ckpt":
        assert model_keys(tmp_path / "section_out.pt", "-") == list(PLAIN)


@pytest.mark.filterwarnings("ignore:.*TypedStorage")
@pytest.mark.parametrize("name", FILES)
def test_diff_of_a_section_compares_the_keys_of_the_file(
    name: str, run: Run, tmp_path: Path
) -> None:
    whole, section = write(name, tmp_path)
    torch.save(PLAIN, tmp_path / "right.pt")
    same = run("diff", whole, section, "--format", "json")
    assert json.loads(same.out)["identical"], same.said
    first, second = (
        json.loads(run("diff", one, tmp_path / "right.pt", "--format", "json").out)
        for one in (whole, section)
    )
    assert first["entries"] == second["entries"]
    assert first["entries"]


@pytest.mark.filterwarnings("ignore:.*TypedStorage")
@pytest.mark.parametrize("name", FILES)
def test_inspect_of_a_section_shows_the_keys_and_wrappers_of_the_file(
    name: str, run: Run, tmp_path: Path
) -> None:
    whole, section = write(name, tmp_path)
    listed, alone = (
        json.loads(run("inspect", one, "--format", "json").out) for one in (whole, section)
    )
    (expected,) = [one for one in listed["sections"] if one["path"] == FILES[name][1]]
    (other,) = alone["sections"]
    assert expected.pop("path") == FILES[name][1]
    assert other.pop("path") == ""
    assert expected == other


def test_lightning_prefix_is_removed_if_the_version_key_is_dropped(
    run: Run, tmp_path: Path
) -> None:
    whole, _ = write("lightning.ckpt", tmp_path)
    out = tmp_path / "out.pt"
    drop = ("--drop", "pytorch-lightning_version")
    assert run("remap", whole, "--to", "serialized", *drop, "-o", out).status == 0
    assert list(torch.load(out)["state_dict"]) == list(PLAIN)
