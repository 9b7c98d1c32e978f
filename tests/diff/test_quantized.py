"""`diff` of models that round some loaded values. The oracle is the values of the model after torch
loads them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import rounded_tensors
from command import Run
from rounded_tensors import Rounded, dense, of_kind

KINDS = {
    "plain": "plain",
    "int8": "int8 0.5",
    "int8_fine": "int8 0.25",
    "int16": "int16 0.5",
    "exact": "float32 1",
}
VALUES = {
    "multiples": torch.tensor([[1.0, -2.5], [0.5, 4.0], [-1.5, 0.0]]),
    "integers": torch.tensor([[1.0, -2.0], [5.0, 4.0], [-3.0, 0.0]]),
    "other values": torch.tensor([[0.1, -0.3], [2.75, 1.1], [3.3, 0.25]]),
}


def saved(kind: str, values: str, path: Path) -> dict[str, Any]:
    state = {"weight": of_kind(VALUES[values], KINDS[kind]), "bias": torch.ones(3)}
    torch.save(state, path)
    return state


def keeps(model: str, state: dict[str, Any]) -> bool:
    """Return True if loading keeps the values, and the dtype of packed tensors."""
    net = getattr(rounded_tensors, model)()
    net.load_state_dict(state, strict=True)
    held, value = net.weight.detach(), state["weight"]
    both_packed = isinstance(held, Rounded) and isinstance(value, Rounded)
    same = not both_packed or (held.values_.dtype, held.step) == (value.values_.dtype, value.step)
    return same and torch.equal(dense(held), dense(value))


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("model", KINDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_is_the_same_only_if_loading_keeps_its_value(
    kind: str, model: str, values: str, run: Run, tmp_path: Path
) -> None:
    state = saved(kind, values, tmp_path / "model.pt")
    done = run(
        "diff", tmp_path / "model.pt", "--model", f"rounded_tensors:{model}", "--format", "json"
    )
    expected = keeps(model, state)
    assert done.status == (0 if expected else 1)
    entry = next(entry for entry in done.data["entries"] if entry["left"] == ["weight"])
    assert entry["status"] == ("same" if expected else "value")


def test_a_large_model_is_also_loaded_with_values(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpttool.tracing.instances._CHEAP", 0)
    saved("plain", "other values", tmp_path / "model.pt")
    assert run("diff", tmp_path / "model.pt", "--model", "rounded_tensors:int8").status == 1


@pytest.mark.parametrize(("model", "status"), [("plain", 0), ("int8", 2)])
def test_names_cannot_decide_if_a_rounded_value_is_kept(
    model: str, status: int, run: Run, tmp_path: Path
) -> None:
    saved("plain", "other values", tmp_path / "model.pt")
    names = tmp_path / "names.json"
    assert run("trace", f"rounded_tensors:{model}", "-o", names).status == 0
    done = run("diff", tmp_path / "model.pt", "--model", names)
    assert done.status == status
    assert ("names cannot tell" in done.err) == (status == 2)


def test_a_class_without_clone_is_reported(run: Run, tmp_path: Path) -> None:
    saved("plain", "integers", tmp_path / "model.pt")
    done = run("diff", tmp_path / "model.pt", "--model", "rounded_tensors:single")
    assert done.status == 2
    assert (
        "weight cannot be copied: NotImplementedError: Single does not implement aten.clone.default"
    ) in done.err
