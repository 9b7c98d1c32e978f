from __future__ import annotations

from itertools import permutations
from pathlib import Path

import torch

import optimizer_models as models
from ckpttool.diffing.optimizer import SavedOptimizer, compare_optimizers
from ckpttool.diffing.result import HARMLESS, Entry
from ckpttool.formats.detect_folder import open_checkpoint
from command import Run
from optimizer_support import names_of, save, train


def optimizer_alone(path: str) -> SavedOptimizer:
    return SavedOptimizer(open_checkpoint(path).section("optimizer"))


def optimizer_in_file(path: str) -> SavedOptimizer:
    source = open_checkpoint(path)
    return SavedOptimizer.of(source, source.section("optimizer"))


def differences(entries: tuple[Entry, ...]) -> list[tuple[str, str, str, str | None]]:
    return [(e.status, " ".join((*e.left, *e.right)), e.reason, e.detail) for e in entries if e.status not in HARMLESS]


def test_another_model_does_not_hide_a_different_order(tmp_path: Path) -> None:
    """Ids follow the order of --model, unless the keys of the file contradict it, as here."""
    left, right = (
        save(tmp_path / f"{m.__name__}.pt", *train(m, models.sgd, 1)) for m in (models.Net, models.Reordered)
    )
    torch.save({**torch.load(right), "optimizer": torch.load(left)["optimizer"]}, right)
    files = {"Net": optimizer_in_file(left), "Reordered": optimizer_in_file(right), "alone": optimizer_alone(left)}
    for model in ("Net", "Reordered"):  # the state does not have the shapes of Reordered
        for one, other in permutations(files, 2):
            entries, *_ = compare_optimizers(files[one], files[other], names_of(model))
            is_other_order = model == "Reordered" or "Reordered" in (one, other)
            assert {status for status, *_ in differences(entries)} == ({"order"} if is_other_order else set())
        for one in ("Net", "Reordered"):
            assert not differences(compare_optimizers(files[one], files[one], names_of(model)).entries)


def test_an_optimizer_that_is_not_compared_is_noted(tmp_path: Path, run: Run) -> None:
    """The model loads, but torch would assign the moments to the wrong parameters."""
    layers = {name: torch.nn.Linear(2, 2) for name in ("b", "a")}
    model = torch.nn.ModuleDict(layers)
    torch.save({"net": model.state_dict(), "train.adam": models.adamw(model).state_dict()}, tmp_path / "a.pt")
    source = "from torch import nn\ndef build(): return nn.ModuleDict({name: nn.Linear(2, 2) for name in 'ab'})\n"
    (tmp_path / "net.py").write_text(source)
    done = run("diff", "--model", f"{tmp_path / 'net.py'}:build", tmp_path / "a.pt")
    assert done.status == 0
    assert "another order, which decides whose state torch loads: train.adam is not compared" in done.out
