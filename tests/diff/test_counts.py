"""The first line, the summary, the tables and JSON count the same entries, over random checkpoints and
models.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

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
CHANGES = {
    0: (),
    1: ("--values",),
    2: ("--ignore-dtype", "--ignore", "missing *.bias # filled in later"),
}
HARMLESS = {"alias", "not_serialized", "extra_state"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("counts")
    lines = [MODELS]
    for seed in range(5):
        namespace: dict[str, Any] = {}
        exec(MODELS, namespace)
        state = dict(namespace["net"](seed).state_dict())
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


def groups(text: str) -> dict[str, list[tuple[str, int, list[str]]]]:
    """Return title -> (status, number of keys, lines) of each group of keys; the differences have
    no title.
    """
    result: dict[str, list[tuple[str, int, list[str]]]] = {}
    for block in text.split("\n\n")[1:]:
        title = ""
        for line in block.splitlines():
            heading = re.match(r"(\w+)(?: renames)?: ([\d,]+) (?:key|pair)s?\b", line)
            if heading:
                result.setdefault(title, []).append(
                    (heading[1], int(heading[2].replace(",", "")), [])
                )
            elif line.startswith("  ") and title in result:
                result[title][-1][2].append(line.strip())
            else:
                title = line
    return result


def number_of_keys(line: str) -> int:
    """Count the keys in a line such as ``layers.{0-2}.w -> layers.{0-2}.v: detail`` or ``... 3 more
    keys``.
    """
    if line.startswith("... "):
        return int(line.split()[1])
    pattern = re.split(r" -> |: | \+ ", line)[0]
    return prod(
        sum(len(_range(part)) for part in numbers.split(","))
        for numbers in re.findall(r"\{([^}]*)\}", pattern)
    )


def _range(part: str) -> range:
    first, _, last = part.partition("-")
    return range(int(first), int(last or first) + 1)


def counts(rows: list[tuple[str, int, list[str]]]) -> Counter[str]:
    result: Counter[str] = Counter()
    for status, count, _ in rows:
        result[status] += count
    return result


# The words of a count -> the status that JSON has for it
COUNTED = {
    r"same": "same",
    r"likely renames?": "likely",
    r"renamed keys?": "renamed",
    r"computed values?": "transformed",
    r"keys? only in LEFT": "unexpected",
    r"keys? only in RIGHT": "missing",
    r"tensors? of another shape": "shape",
    r"tensors? of another dtype": "dtype",
    r"tensors? with other values": "value",
    r"second names?": "alias",
}


def counted(text: str, left: str, right: str) -> Counter[str]:
    """Return the counts in a text such as ``1 renamed key, 2 second names``."""
    result: Counter[str] = Counter()
    for phrase in text.split(", "):
        count, _, words = phrase.partition(" ")
        (status,) = (
            status
            for pattern, status in COUNTED.items()
            if re.fullmatch(pattern.replace("LEFT", left).replace("RIGHT", right), words)
        )
        result[status] += int(count)
    return result


def summary_counts(text: str) -> Counter[str]:
    """Return the counts of the footer."""
    lines = dict(line.split(maxsplit=1) for line in text.split("\n\n")[-1].splitlines())
    left, right = (
        lines.get("left", lines.get("checkpoint")),
        lines.get("right", lines.get("model")),
    )
    names = [re.escape((name or ".*").partition(" ")[0]) for name in (left, right)]
    return counted(lines["keys"], *names) if "keys" in lines else Counter()


PAIRS = [(left, right) for left in range(5) for right in (left, (left + 1) % 5, (left + 3) % 5)]
COMMANDS = [
    *(pytest.param((f"{a}.pt", f"{b}.pt", *CHANGES[(a + b) % 3]), id=f"{a} {b}") for a, b in PAIRS),
    *(
        pytest.param((f"{a}.pt", "--model", f"models.py:net{b}"), id=f"{a} of {b}")
        for a, b in PAIRS[::2]
    ),
    *(pytest.param(("--model", f"models.py:net{a}"), id=f"model {a}") for a in range(5)),
]


@pytest.mark.parametrize("arguments", COMMANDS)
def test_all_outputs_have_the_same_counts(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.chdir(folder)
    done, data = run("diff", *arguments), run("diff", *arguments, "--format", "json").data
    assert done.status in (0, 1), done.err
    answer, shown = done.out.splitlines()[0], groups(done.out)
    summary = summary_counts(done.out)
    listed, others = counts(shown.get("", [])), counts(shown.get("Not counted as differences", []))
    same = Counter(same=summary["same"])
    harmless = re.search(r"; (\d+) harmless differences?$", answer)
    ignored = re.search(r"; accepted \(|; (\d+) ignored$", answer)
    of_two = re.match(r"(\S+) and (\S+) differ: ", answer)
    if of_two:
        end = ignored.start() if ignored else None
        assert counted(answer[of_two.end() : end], of_two[1], of_two[2]) == summary - same
    elif harmless:
        assert (summary - same).total() == int(harmless[1])
    elif done.status == 0 and not ignored:
        assert summary == same
    else:
        words = answer.partition(";")[0]
        totals = {int(count) for count in re.findall(r"(?<![\w.])\d+(?= [a-z])", words)}
        assert {count for status, count in (summary - same).items()} <= totals
    assert listed == summary - same
    pairs = [pair for pair in data.get("suggested", []) if pair["left"] != pair["right"]]
    assert summary.pop("likely", 0) == len(pairs)
    left, right = ({key for pair in pairs for key in pair[side]} for side in ("left", "right"))
    for entry in data["entries"]:
        if entry["status"] in ("unexpected", "missing", "shape", "alias"):
            summary[entry["status"]] += left.issuperset(entry["left"]) and right.issuperset(
                entry["right"]
            )
    entries = Counter(entry["status"] for entry in data["entries"])
    assert +summary + others == Counter(data["summary"]) == entries
    assert set(others) <= {*HARMLESS, "dtype"}
    for rows in shown.values():
        for status, count, lines in rows:
            if status != "transformed":
                assert sum(map(number_of_keys, lines)) == count, (status, lines)
    all_groups = groups(run("diff", *arguments, "--all").out)
    of_every_key = counts([*all_groups.get("", []), *all_groups.get("Every key", [])])
    assert of_every_key == listed + same
    assert counts(all_groups.get("Not counted as differences", [])) == others
    assert all(len(lines) == count for rows in all_groups.values() for _, count, lines in rows)
    shown_keys = Counter(
        key for line in all_lines(all_groups) for key in re.split(r" -> |: | \+ ", line)
    )
    for entry in data["entries"]:
        assert all(shown_keys[key] for key in (*entry["left"], *entry["right"])), entry


def all_lines(groups: dict[str, list[tuple[str, int, list[str]]]]) -> list[str]:
    return [line for rows in groups.values() for _, _, lines in rows for line in lines]


def test_a_suggested_rename_is_one_missing_and_one_unexpected_key(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, kind in (("a.pt", "wq"), ("b.pt", "q_proj")):
        torch.save({f"layers.{at}.{kind}.weight": torch.ones(3, 4 + at) for at in range(2)}, name)
    done = run("diff", "a.pt", "b.pt")
    assert done.out.splitlines()[0] == "a.pt and b.pt differ: 2 likely renames"
    assert done.out.count("layers.{0-1}.wq.weight") == 1
    assert "layers.{0-1}.wq.weight -> layers.{0-1}.q_proj.weight" in done.out
    torch.save(
        {"layers.0.q_proj.weight": torch.ones(3, 4), "layers.1.wq.weight": torch.ones(3, 5)}, "b.pt"
    )
    assert run("diff", "a.pt", "b.pt").out.startswith("a.pt and b.pt differ: 1 likely rename\n")


def test_a_likely_rename_to_a_model_is_listed_once(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(
        "from torch import nn\n"
        "def build():\n"
        "    return nn.ModuleDict({'layers': nn.ModuleList(nn.Linear(2, 3) for _ in range(2)),"
        " 'head': nn.Linear(3, 5)})\n"
    )
    old = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(2, 3) for _ in range(2))})
    torch.save(old.state_dict(), "old.pt")
    done = run("diff", "old.pt", "--model", "model.py:build")
    assert done.status == 1
    assert done.out.splitlines()[0] == (
        "old.pt lacks 2 keys of model.py:build and has 4 keys likely under other names"
    )
    assert "\n  blocks.{0-1}.weight -> layers.{0-1}.weight\n" in done.out
    assert done.out.count("blocks.{0-1}.weight") == 1
    assert "missing: 2 keys" in done.out
    assert "unexpected" not in done.out
    result = json.loads(run("diff", "old.pt", "--model", "model.py:build", "--format", "json").out)
    pairs = {pair["left"][0]: pair["right"][0] for pair in result["suggested"]}
    assert pairs == {key: key.replace("blocks", "layers") for key in old.state_dict()}
    # the entries are the answer of a strict load
    assert result["summary"] == {"missing": 6, "unexpected": 4}


def test_keys_that_are_not_saved_are_not_in_the_summary(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    shown = run("diff", "--model", "models.py:net0").out
    assert "not_serialized" not in summary_counts(shown)
    assert "not_serialized" in counts(groups(shown)["Not counted as differences"])
