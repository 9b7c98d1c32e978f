"""A diff of many keys: how often it looks at each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpttool
from ckpttool.fixes import trial
from ckpttool.formats import huggingface, safetensors
from ckpttool.kinds import adapters
from ckpttool.naming import wrappers
from ckpttool.report.documents.answer import LikelyRenames
from ckpttool.ruleset.patterns import RuleList
from command import Run, fixes_in

LAYERS = 40
PARTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj")
Count = Callable[[Any, str], None]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> tuple[Counter[str], Count]:
    """Return how often each function was called, and a function that begins to count another."""
    counts: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    return counts, count


def keys(name: str) -> list[str]:
    """Return the keys of all layers; `name` has a field for the number and one for the part."""
    return [name.format(layer, part) for layer in range(LAYERS) for part in PARTS]


def save_shards(folder: Path, names: list[str]) -> None:
    """Save a tensor under each name, in a folder of two shards."""
    path = folder.with_suffix(".safetensors")
    save_file({name: torch.ones(2, 3) for name in names}, path)
    ckpttool.convert(str(path), f"{folder}/", max_shard_size=str(24 * len(names) // 2))


def test_rules_are_tried_once_on_each_key(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: tuple[Counter[str], Count]
) -> None:
    """Not again when their file is read back, and when the remap is tried."""
    monkeypatch.chdir(tmp_path)
    left, right = keys("model.layers.{}.mlp.{}.weight"), keys("net.h.{}.ffn.{}.weight")
    torch.save({name: torch.ones(2, 3) for name in left}, "left.pt")
    torch.save({name: torch.ones(2, 3) for name in right}, "right.pt")
    counts, count = calls
    count(RuleList, "_rename")
    done = run("diff", "left.pt", "right.pt", "--format", "json")
    assert "--rule" in fixes_in(done.data)[0]
    on_samples = 100
    assert len(left) <= counts["_rename"] <= len(left) + on_samples


def test_no_remap_is_tried_on_shards_whose_common_names_are_equal(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: tuple[Counter[str], Count]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = keys("layers.{}.{}.weight")
    save_shards(Path("left"), names)
    save_shards(Path("right"), [*names, "head.weight"])
    counts, count = calls
    count(trial, "plan_remap")
    done = run("diff", "left", "right", "--format", "json")
    assert done.data["summary"] == {"same": len(names), "missing": 1}
    assert counts["plan_remap"] == 0


def test_a_report_looks_for_likely_renames_once(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: tuple[Counter[str], Count]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({name: torch.ones(2, 3) for name in keys("a.{}.{}.weight")}, "left.pt")
    torch.save({name: torch.ones(2, 3) for name in keys("b.{}.{}.weight")}, "right.pt")
    counts, count = calls
    count(LikelyRenames, "of")
    assert "240 likely renames" in run("diff", "left.pt", "right.pt").out
    assert counts["of"] == 1


def test_facts_about_a_section_are_found_once(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: tuple[Counter[str], Count]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_shards(Path("left"), keys("model.layers.{}.mlp.{}.weight"))
    save_shards(Path("right"), keys("model.layers.{}.mlp.{}.weight"))
    save_shards(Path("renamed"), keys("net.h.{}.ffn.{}.weight"))
    counts, count = calls
    count(adapters, "adapter_of")
    count(wrappers, "infer")
    run("diff", "left", "right")
    assert counts == {"adapter_of": 2}
    counts.clear()
    assert "--rule" in run("diff", "left", "renamed").out
    # also of the keys that the fix changes
    assert counts == {"adapter_of": 3, "infer": 2}


def test_a_fix_is_tried_without_a_layout(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: tuple[Counter[str], Count]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_shards(Path("left"), keys("model.layers.{}.mlp.{}.weight"))
    save_shards(Path("right"), keys("net.h.{}.ffn.{}.weight"))
    counts, count = calls
    count(safetensors, "layout")
    count(huggingface, "layout_files")
    assert "--rule" in fixes_in(run("diff", "left", "right", "--format", "json").data)[0]
    assert counts == {}


def test_a_name_that_is_not_text_is_refused_without_a_layout(tmp_path: Path) -> None:
    torch.save({"\ud800": torch.ones(2)}, tmp_path / "left.pt")
    checkpoint = ckpttool.open_checkpoint(str(tmp_path / "left.pt"))
    for refuses in (safetensors.layout, safetensors.check_holds):
        with pytest.raises(ckpttool.CkptError, match="not text"):
            refuses(checkpoint)


def test_a_header_that_may_be_too_long_is_laid_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_shards(tmp_path / "left", keys("layers.{}.{}.weight"))
    checkpoint = ckpttool.open_checkpoint(str(tmp_path / "left"))
    assert safetensors.check_holds(checkpoint)
    monkeypatch.setattr(safetensors, "MAX_HEADER", 10_000)
    assert not safetensors.check_holds(checkpoint)
