"""Incomplete or conflicting options are refused with a specific message, and the fixed options are
accepted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckpttool
from ckpttool import CkptError
from command import Run, notes_in

Options = dict[str, Any]
MODEL: Options = {"model": "m.py:f"}
UNITS: Options = {**MODEL, "from_": "fsdp-flat(units=['a'])"}

# Invalid options, the message, and valid alternatives
CONFLICTS: list[tuple[Options, str, list[Options]]] = [
    (
        {"in_place": True, "out": "o.pt"},
        "--in-place and -o OUT exclude",
        [{"in_place": True}, {"out": "o.pt"}],
    ),
    (
        {"to": "runtime"},
        "--to runtime needs the model's names",
        [{"to": "runtime", **MODEL}, {"to": "ddp"}],
    ),
    (
        {"from_": "exported"},
        "--from exported needs the",
        [{"from_": "exported", **MODEL}, {"from_": "compile"}],
    ),
    (
        {"reverse": True},
        "--reverse without",
        [{"reverse": True, "rule": ["a => b"]}, {"reverse": True, "rules": "r"}],
    ),
    (
        {"trainable_only": True},
        "--trainable-only asks the model",
        [{"trainable_only": True, **MODEL}],
    ),
    ({"like": "o.pt", "to": "ddp"}, "--like and --to both say", [{"like": "o.pt"}]),
    (
        {"optimizer_keys": "names"},
        "--optimizer-keys names: no",
        [{"optimizer_keys": k} for k in ("id", "fqn", "flat")],
    ),
    (
        {"optimizer": "m.py:o"},
        "--optimizer is called with a model",
        [{"optimizer": "m.py:o", **MODEL}],
    ),
    (
        {"to_optimizer": "m.py:o"},
        "--to-optimizer is called with a model",
        [{"to_optimizer": "m.py:o", **MODEL}, {"to_optimizer": "m.py:o", "to_model": "n.py:f"}],
    ),
    ({"from_": "fsdp-flat(size=2)", **MODEL}, "these are not its arguments", [UNITS]),
    ({"from_": "fsdp-flat(units=2)", **MODEL}, "these are not its arguments", []),
    ({**UNITS, "model": None}, "needs the model's modules", []),
    *(
        ({"to": f"{form}(world_size=2)", **MODEL}, "read, not written", [])
        for form in ("fsdp-flat", "fsdp-sharded")
    ),
    ({"to": "ddpp"}, "ddpp", []),
    ({"from_": "ddpp"}, "ddpp", []),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": {"w": torch.ones(2)}}, "a.pt")
    return tmp_path


def flags(options: Options) -> list[str]:
    """Return the options as words of the command line."""
    words: list[str] = []
    for name, value in options.items():
        flag = "-o" if name == "out" else f"--{name.strip('_').replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif value is not None:
            words += [flag, *value] if isinstance(value, list) else [flag, value]
    return words


@pytest.mark.parametrize(("options", "words", "fixed"), CONFLICTS)
def test_only_conflicting_options_are_refused(
    options: Options, words: str, fixed: list[Options], folder: Path, run: Run
) -> None:
    refused = run("remap", "a.pt", "--dry-run", *flags(options))
    assert refused.status == 2
    assert words in refused.err.splitlines()[0]
    assert "hint: " in refused.err
    for alternative in fixed:
        assert words not in run("remap", "a.pt", "--dry-run", *flags(alternative)).err, alternative


def test_in_place_refuses_a_section_operand(folder: Path) -> None:
    with pytest.raises(CkptError, match="would leave only one section"):
        ckpttool.remap("a.pt::model", in_place=True, rule=["w => v"])
    ckpttool.remap("a.pt::model", "o.pt", rule=["w => v"])


@pytest.mark.parametrize(
    ("out", "sharded"), [("b.safetensors", False), ("b.pt", False), ("b.dcp", False), ("b/", True)]
)
def test_unused_max_shard_size_is_reported(
    run: Run, tmp_path: Path, out: str, sharded: bool
) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    assert run("convert", tmp_path / "a.pt", "-o", tmp_path / "a.dcp").status == 0
    source = tmp_path / ("a.dcp" if out == "b.pt" else "a.pt")
    words = ("convert", source, "-o", f"{tmp_path}/{out}", "--format", "json")
    notes = notes_in(run(*words, "--max-shard-size", "1MB").data)
    assert [note.partition(":")[0] for note in notes] == ["--max-shard-size changes nothing"] * (
        not sharded
    )
    assert not notes_in(run(*words, "--force").data)
