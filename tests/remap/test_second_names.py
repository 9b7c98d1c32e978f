"""A model with tied tensors loads the output of a remap only with both names of them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from command import Run

CODE = """
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
"""


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_the_hint_adds_the_second_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run, ending: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(CODE)
    torch.save({"tokens.weight": torch.ones(5, 3)}, "old.pt")
    out = f"out.{ending}"
    command = ("remap", "old.pt", "--rule", "tokens.{x*} => embed.{x*}", "--to-model", "net.py:Net")
    refused = run(*command, "-o", out)
    assert refused.status == 1
    (line,) = re.findall(r"add these second names: ckpttool (.*)", refused.err)
    assert run(*command, "--partial", "-o", out).status == 0
    names = {"OUT": out, "NEW": "new.pt"}
    assert run(*(names.get(word, word) for word in shlex.split(line))).status == 0
    assert run("diff", "new.pt", "--model", "net.py:Net").status == 0


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_an_added_second_name_is_not_a_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run, ending: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(CODE)
    weights = {"embed.weight": torch.ones(5, 3)}
    torch.save(weights, "one.pt") if ending == "pt" else save_file(weights, "one.safetensors")
    command = ("fix", f"one.{ending}", "--model", "net.py:Net", "-o", "two.pt")
    done = run(*command)
    first_line = "wrote two.pt, which loads into net.py:Net: 1 second name added"
    assert done.out.splitlines()[0] == first_line
    assert "Second names added: 1 key\n  embed.weight -> head.weight\n" in done.out
    assert "Changes" not in done.out
    data = run(*command, "--force", "--format", "json").data
    counts = [data[name] for name in ("renamed", "second_names", "transformed", "unchanged")]
    assert counts == [0, 1, 0, 1]
    assert list(torch.load("two.pt")) == ["embed.weight", "head.weight"]


def test_a_rename_to_two_names_is_one_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(CODE)
    torch.save({"module.embed.weight": torch.ones(5, 3)}, "one.pt")
    done = run("fix", "one.pt", "--model", "net.py:Net", "-o", "two.pt")
    assert done.out.splitlines()[0].endswith(": 1 key renamed, 1 second name added")


def test_other_missing_keys_have_no_second_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(CODE.replace("        self.head.weight = self.embed.weight\n", ""))
    torch.save({"tokens.weight": torch.ones(5, 3)}, "old.pt")
    rule = ("--rule", "tokens.{x*} => embed.{x*}")
    done = run("remap", "old.pt", *rule, "--to-model", "net.py:Net", "-o", "out.pt")
    assert done.status == 1
    assert "second names" not in done.err
