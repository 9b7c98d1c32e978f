"""Incomplete or conflicting options are refused with a specific message, and the fixed options are
accepted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttool import CkptError
from ckpttool.remapping.options import RemapOptions
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


@pytest.mark.parametrize(("options", "words", "fixed"), CONFLICTS)
def test_only_conflicting_options_are_refused(
    options: Options, words: str, fixed: list[Options]
) -> None:
    with pytest.raises(CkptError) as caught:
        RemapOptions(**options).check("a.pt")
    assert words in caught.value.message
    assert caught.value.hint
    for one in fixed:
        RemapOptions(**one).check("a.pt")


@pytest.mark.parametrize("ckpt", [None, "a.pt::model"])
def test_in_place_refuses_a_section_operand(ckpt: str | None) -> None:
    with pytest.raises(CkptError, match="would leave only one section"):
        RemapOptions(in_place=True).check(ckpt)
    RemapOptions(out="o.pt").check(ckpt)


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
