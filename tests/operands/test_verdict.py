"""The verdict on a strict load is found once for each content. Oracle: torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ckpttool.core.checkpoint import Section
from ckpttool.operands.checkpoint import model_section
from ckpttool.operands.in_memory import checkpoint_of
from ckpttool.operands.model import ModelOperand
from ckpttool.tracing import loading


def section_of(state: dict[str, torch.Tensor]) -> Section:
    return model_section(checkpoint_of(state))


def test_verdict_is_found_once_for_the_same_content(monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[Section] = []
    load = loading.load_verdict

    def counted(model: Any, section: Section, **options: Any) -> loading.Verdict:
        loads.append(section)
        return load(model, section, **options)

    monkeypatch.setattr(loading, "load_verdict", counted)
    state = nn.Linear(2, 2).state_dict()
    model, first = ModelOperand(nn.Linear(2, 2)), section_of(state)
    assert model.verdict(first).ok
    assert model.verdict(replace(first, path="model")) is model.verdict(first)
    assert len(loads) == 1
    for other in (
        state | {"weight": torch.zeros(3, 2)},
        {"weight": state["weight"]},
        state | {"more": torch.ones(1)},
    ):
        with pytest.raises(RuntimeError):
            nn.Linear(2, 2).load_state_dict(other)
        assert not model.verdict(section_of(other)).ok
    model.verdict(replace(first, modules={}))  # module versions decide what hooks do
    assert len(loads) == 5
