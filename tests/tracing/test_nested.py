"""Models that save other keys where they are a part of another, which torch's own DDP shows; and a cause named."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import ckpttool
import fusion_decoder
from ckpttool.core.names import Names
from mend_models import Absolute


class Relative(Absolute):
    """The same with the prefix, as it should be."""

    @staticmethod
    def _save(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state[prefix + "weight"] = state.pop(prefix + "inner.weight")

    @staticmethod
    def _load(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        state[prefix + "inner.weight"] = state.pop(prefix + "weight")


def test_a_hook_with_absolute_keys() -> None:
    names = ckpttool.trace(Absolute)
    assert names.roundtrips
    (note,) = names.notes
    assert note.startswith("as a part of another model: is not saved under this key")
    assert note.endswith("inner.weight is there instead @ weight")
    assert [*nn.Sequential(Absolute()).state_dict()] == ["0.inner.weight"]  # what torch does
    assert Names.from_json(names.to_json(), "names.json") == names
    assert any("as a part of another model: " in note for note in ckpttool.diff(model=Absolute).notes)


@pytest.mark.parametrize("model", [Relative, fusion_decoder.build, lambda: nn.Linear(2, 2)])
def test_what_may_be_nested(model: Any) -> None:
    names = ckpttool.trace(model)
    assert not any("as a part of another model" in note for note in names.notes)
    parts = nn.ModuleDict({"part": model()}).state_dict()
    assert {key.removeprefix("part.") for key in parts} == {key.key for key in names.serialized}


def test_the_method_that_distributed_checkpoints_need_is_named() -> None:
    with pytest.raises(AttributeError):
        get_model_state_dict(fusion_decoder.build())
    assert any("`_fqn_modifiers`" in note for note in ckpttool.diff(model=fusion_decoder.build).notes)
    plain = nn.Linear(2, 2)
    assert get_model_state_dict(plain).keys() == plain.state_dict().keys()
    assert not any("`_fqn_modifiers`" in note for note in ckpttool.diff(model=lambda: nn.Linear(2, 2)).notes)
