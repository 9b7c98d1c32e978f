"""Run every example of the help texts, on files with the names in the examples."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
from contextlib import redirect_stdout
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from command import Run, commands, main

MODEL = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(self.norm(x))


class Net(nn.Module):
    def __init__(self, layers, tie):
        super().__init__()
        self.layers = nn.Sequential(*[Block() for _ in range(layers)])
        self.head = nn.Linear(4, 4)
        if tie:
            self.head.weight = self.layers[0].fc.weight

    def forward(self, x):
        return self.head(self.layers(x))


def build(layers=4, tie=False):
    return Net(layers, tie)


def optimizer(model, lr=0.01):
    return torch.optim.AdamW(model.parameters(), lr=lr)
"""
CONVERTER = """
def from_hf(state_dict):
    return {key.removeprefix("module."): value for key, value in state_dict.items()}
"""
HEADS, KV_HEADS, WIDTH = 32, 8, 64
TOPICS = [[], *(["help", topic] for topic in ("rules", "patterns", "forms", "formats", "options"))]
HELP = [*TOPICS, ["--help"], *([name, "--help"] for name in commands())]


def printed(words: list[str], width: int = 200) -> str:
    with patch.dict(os.environ, COLUMNS=str(width)), redirect_stdout(StringIO()) as out:
        assert main(words) == 0
    return out.getvalue()


def examples_in(text: str) -> list[str]:
    return re.findall(r"^ +(ckpttool .*)$", text, re.MULTILINE)


EXAMPLES = list(dict.fromkeys(line for words in HELP for line in examples_in(printed(words))))


def llama() -> dict[str, torch.Tensor]:
    """Return a model with torchtune's key naming."""
    layer = {"attn.q_proj": WIDTH, "attn.output_proj": WIDTH, "attn.k_proj": 16, "attn.v_proj": 16}
    state = {f"layers.0.{name}.weight": torch.randn(rows, WIDTH) for name, rows in layer.items()}
    state |= {f"layers.0.mlp.w{number}.weight": torch.randn(WIDTH, WIDTH) for number in (1, 2, 3)}
    state |= {
        f"{name}.scale": torch.ones(WIDTH)
        for name in ("layers.0.sa_norm", "layers.0.mlp_norm", "norm")
    }
    return state | {
        f"{name}.weight": torch.randn(8, WIDTH) for name in ("tok_embeddings", "output")
    }


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files of all examples."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "model.py").write_text(MODEL)
    scope: dict[str, Any] = {"__name__": "model"}
    exec(MODEL, scope)
    net = scope["build"]()
    optimizer = scope["optimizer"](net)
    net(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    state = net.state_dict()

    def save(name: str, value: object) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save(value, folder / name)

    prefixed = {f"module.{key}": value for key, value in state.items()}
    save("train.pt", {"model": prefixed, "optimizer": optimizer.state_dict(), "epoch": 3})
    save("model.pt", state)
    for at in (1, 2, 3):
        save(f"step-{at}.pt", {key: value + at for key, value in state.items()})
        save(f"runs/7/step-{at}.pt", {key: value + at for key, value in state.items()})
    parts = nn.ModuleDict(
        {"encoder": nn.Linear(4, 4), "head": nn.Linear(4, 2), "layers": nn.Linear(2, 2)}
    ).state_dict()
    save("old.pt", parts)
    save("new.pt", {key.replace("encoder.", "backbone."): value for key, value in parts.items()})
    for name in ("pretrained", "ours", "theirs"):
        save(
            f"{name}.pt",
            {**parts, **({} if name == "pretrained" else {f"{name}.w": torch.ones(2)})},
        )
    save("old.ckpt", {"state_dict": state, "args": argparse.Namespace(lr=0.1)})
    save("llama.pt", llama())
    for name, tensors in (("new", parts), ("model", state), ("train", state), ("other", state)):
        save_file(tensors, folder / f"{name}.safetensors")
    (folder / "convert.py").write_text(CONVERTER)
    (folder / "hf").mkdir()
    save_file(prefixed, folder / "hf/model.safetensors")
    is_head = {key: key.startswith("head.") for key in state}
    save("text.pt", {key: value for key, value in state.items() if not is_head[key]})
    save("vision.pt", {key: value for key, value in state.items() if is_head[key]})
    (folder / "checkpoint_folder").mkdir()
    save_file(state, folder / "checkpoint_folder/model.safetensors")
    torch.export.save(torch.export.export(net, (torch.randn(2, 4),)), folder / "deployed.pt2")
    torch.jit.save(torch.jit.trace(net, torch.randn(2, 4)), folder / "scripted.pt")
    (folder / "rules.toml").write_text('[[rule]]\nrename = "encoder.{x*} => backbone.{x*}"\n')
    return folder


def test_every_command_has_two_examples() -> None:
    for name in commands():
        text = printed([name, "--help"])
        assert len(re.findall(rf"^ +ckpttool {name}\b", text, re.MULTILINE)) >= 2, name


@pytest.mark.parametrize("line", EXAMPLES)
def test_example_runs(
    line: str, files: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "s3://" in line:
        pytest.skip("needs an object store")
    shutil.copytree(files, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    command, *words = shlex.split(line.split("  ")[0])[1:]
    if "names.json" in words and "-o" not in words:
        assert run("trace", "model.py:build", "-o", "names.json").status == 0
    if command == "undo":
        assert run("remap", words[0], "--in-place", "--rule", "head.{x} => last.{x}").status == 0
    written = [value for flag, value in pairwise(words) if flag in ("-o", "--suggest")]
    for name in written:
        Path(name).unlink(missing_ok=True)
    done = run(command, *words)
    assert "error:" not in done.err, done.said
    differs = command in ("diff", "check")
    assert done.status in ((0, 1) if differs else (0,)), done.said
    if "--dry-run" not in words:
        assert [
            name for name in written if not list(Path().glob(name.replace("{rank}", "*")))
        ] == []


@pytest.mark.parametrize("words", HELP, ids=" ".join)
def test_no_help_is_wider_than_the_terminal(words: list[str]) -> None:
    for width in (50, 80, 120):
        lines = printed(words, width).splitlines()
        assert lines
        assert [line for line in lines if len(line) > width] == []


def test_help_of_rules_fits_on_a_screen() -> None:
    assert len(printed(["help", "rules"], 80).splitlines()) <= 24


@pytest.mark.parametrize("words", HELP, ids=" ".join)
def test_commands_that_continue_can_be_pasted(words: list[str]) -> None:
    for width in (50, 80):
        joined = printed(words, width).replace("\\\n", "")  # as a shell does
        commands = [shlex.split(line.split("  ")[0]) for line in examples_in(printed(words))]
        assert [shlex.split(line) for line in examples_in(joined)] == commands, width
