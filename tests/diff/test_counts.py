"""The verdict, the summary, the tables and JSON count the same entries, over random checkpoints and models."""

from __future__ import annotations

import re
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from command import Run

MODELS = """import random

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, choose):
        super().__init__()
        names = choose.sample(["wq", "wk", "q_proj", "k_proj", "fc", "norm"], 3)
        for name in names:
            setattr(self, name, nn.Linear(3, choose.choice([3, 4])))
        if choose.random() < 0.5:
            self.tied = getattr(self, names[0])
        self.register_buffer("cache", torch.ones(2), persistent=choose.random() < 0.5)
        self.register_buffer("mask", torch.ones(3), persistent=False)
        if choose.random() < 0.5:
            self.register_state_dict_post_hook(self._rename)

    @staticmethod
    def _rename(module, state, prefix, metadata):
        for key in [key for key in state if key.startswith(prefix + "fc.")]:
            state[key.replace(".fc.", ".mlp.")] = state.pop(key)


class Quantized(Block):
    def get_extra_state(self):
        return {"scale": 1}

    def set_extra_state(self, state):
        pass


def net(seed):
    torch.manual_seed(0)
    choose = random.Random(seed)
    kind = choose.choice([Block, Quantized])
    blocks = nn.ModuleList(kind(random.Random(seed)) for _ in range(choose.randrange(1, 4)))
    return nn.ModuleDict({choose.choice(["layers", "h"]): blocks, "head": nn.Linear(3, 2)})
"""
CHANGES = {0: (), 1: ("--values",), 2: ("--ignore-dtype", "--ignore", "missing *.bias # filled in later")}
HARMLESS = {"alias", "not_serialized", "extra_state"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("counts")
    lines = [MODELS]
    for seed in range(5):
        space: dict[str, Any] = {}
        exec(MODELS, space)
        state = dict(space["net"](seed).state_dict())
        if seed % 3 == 1:
            state = {f"module.{key}": value for key, value in state.items()}
        if seed % 3 == 2:
            key = next(key for key, value in state.items() if isinstance(value, torch.Tensor))
            state[key] = state[key].half()
            state["head.bias"] = state["head.bias"] + 1
        torch.save(state, folder / f"{seed}.pt")
        lines.append(f"def net{seed}():\n    return net({seed})\n")
    (folder / "models.py").write_text("\n\n".join(lines))
    return folder


def tables(text: str) -> dict[str, list[list[str]]]:
    """Title -> rows of cells, of which the first has the column titles."""
    blocks = [block.splitlines() for block in text.split("\n\n")]
    return {
        lines[0]: [re.split(r" {2,}", line.strip()) for line in lines[1:]]
        for lines in blocks
        if len(lines) > 1 and all(line.startswith("  ") for line in lines[1:])
    }


def keys_in(cell: str) -> int:
    """How many keys a cell such as ``layers.{0-2}.w (+3 more)`` is for."""
    if cell == "-":
        return 0
    pattern, _, more = cell.partition(" (+")
    sizes = [sum(len(_range(part)) for part in own.split(",")) for own in re.findall(r"\{([^}]*)\}", pattern)]
    return prod(sizes) + int(more.removesuffix(" more)") or 0)


def _range(part: str) -> range:
    ends, _, step = part.partition("/")
    first, _, last = ends.partition("-")
    return range(int(first), int(last or first) + 1, int(step or 1))


def counts(rows: list[list[str]]) -> Counter[str]:
    found: Counter[str] = Counter()
    for status, count, *_ in rows[1:]:
        found[status] += int(count)
    return found


PAIRS = [(left, right) for left in range(5) for right in (left, (left + 1) % 5, (left + 3) % 5)]
WAYS = [
    *(pytest.param((f"{a}.pt", f"{b}.pt", *CHANGES[(a + b) % 3]), id=f"{a} {b}") for a, b in PAIRS),
    *(pytest.param((f"{a}.pt", "--model", f"models.py:net{b}"), id=f"{a} of {b}") for a, b in PAIRS[::2]),
    *(pytest.param(("--model", f"models.py:net{a}"), id=f"model {a}") for a in range(5)),
]


@pytest.mark.parametrize("words", WAYS)
def test_the_numbers_add_up(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    monkeypatch.chdir(folder)
    done, data = run("diff", *words), run("diff", *words, "--format", "json").data
    assert done.status in (0, 1), done.err
    verdict, shown = done.out.splitlines()[1], tables(done.out)
    told = re.match(r"(?:loads; )?(\d+)(?: harmless)? differences?\b", verdict)
    total = int(told[1]) if told else 0
    summary = counts(shown.get("Summary", []))
    listed = counts(shown.get("Differences, one line for each cause (--all lists every key)", []))
    others = counts(shown.get("Not counted as differences", []))
    same = Counter(same=summary["same"])
    if told or verdict.startswith("no differences"):
        assert (summary - same).total() == total
    assert listed == summary - same
    assert summary + others == Counter(data["summary"]) == Counter(entry["status"] for entry in data["entries"])
    assert set(others) <= {*HARMLESS, "dtype"}
    for at, side in ((-2, "left"), (-1, "right")):
        for title, rows in shown.items():
            if "cause" in title or "Not counted" in title:
                status = set(counts(rows))
                wanted = sum(len(entry[side]) for entry in data["entries"] if entry["status"] in status)
                assert sum(keys_in(row[at]) for row in rows[1:]) == wanted, title
    suggested = next((rows for title, rows in shown.items() if title.startswith("Likely")), [])
    pairs = re.search(r"\((\d+) likely renames?", verdict)
    assert sum(int(row[0]) for row in suggested[1:]) == (int(pairs[1]) if pairs else 0)
    if told and done.status != 0:
        assert (int(pairs[1]) if pairs else 0) == len(data.get("suggested", ()))
    every = tables(run("diff", *words, "--all").out)
    assert Counter(row[0] for row in every.get("Every key", [])[1:]) == summary
    assert Counter(row[0] for row in every.get("Not counted as differences", [])[1:]) == others


def test_a_suggested_rename_is_one_missing_and_one_unexpected_key(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, kind in (("a.pt", "wq"), ("b.pt", "q_proj")):
        torch.save({f"layers.{at}.{kind}.weight": torch.ones(3, 4 + at) for at in range(2)}, name)
    done = run("diff", "a.pt", "b.pt")
    assert done.out.splitlines()[1].startswith("4 differences (2 likely renames); values not")
    assert "layers.{0-1}.wq.weight  layers.{0-1}.q_proj.weight" in done.out
    torch.save({"layers.0.q_proj.weight": torch.ones(3, 4), "layers.1.wq.weight": torch.ones(3, 5)}, "b.pt")
    assert "2 differences (1 likely rename); " in run("diff", "a.pt", "b.pt").out


def test_what_is_not_saved_is_not_in_the_summary(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    shown = tables(run("diff", "--model", "models.py:net0").out)
    assert "not_serialized" not in counts(shown["Summary"])
    assert "not_serialized" in counts(shown["Not counted as differences"])
