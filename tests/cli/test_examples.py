"""Run every example of the help texts, on files with the names in the examples."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ckpttool.cli import topics
from ckpttool.cli.params import COMMANDS, load
from ckpttool.cli.parser import ABOUT
from command import Run

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
TEXTS = {
    **{name: load(name).function.__doc__ or "" for name in COMMANDS},
    **{f"help {topic}".strip(): topics.text(topic, 200) or "" for topic in topics.TOPICS},
}
EXAMPLES = {
    line: place
    for place, text in TEXTS.items()
    for line in re.findall(r"^ +(ckpttool .*)$", text, re.MULTILINE)
}


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
    assert [
        name
        for name in COMMANDS
        if len(re.findall(rf"^ +ckpttool {name}\b", TEXTS[name], re.MULTILINE)) < 2
    ] == []
    assert "ckpttool help COMMAND" in ABOUT


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


@pytest.mark.parametrize("width", [50, 80, 120])
@pytest.mark.parametrize(
    "words", [*(("help", topic) for topic in topics.TOPICS), ("--help",), *((name, "--help") for name in COMMANDS)]
)  # fmt: skip
def test_no_help_is_wider_than_the_terminal(
    run: Run, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    text = run(*filter(None, words)).out if words != ("help", "") else run().out
    assert text
    assert [line for line in text.splitlines() if len(line) > width] == []
    if width >= 80:
        assert len(topics.text("rules", 80).splitlines()) <= 24


def test_commands_that_continue_can_be_pasted() -> None:
    line = "ckpttool remap a.pt -o b.pt --rule 'encoder.{x*} => backbone.{x*}' --model 'm.py:build(n=1)'"
    for width in (30, 50, 80):
        lines = list(topics.continued(line, width, 2))
        assert all(part.endswith(" \\") for part in lines[:-1])
        joined = "\n".join(lines).replace("\\\n", "")  # as a shell does
        assert shlex.split(joined) == shlex.split(line)
