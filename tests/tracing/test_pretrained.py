"""Models of a ``config.json``, and the names of ``from_pretrained`` for other models."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from ckpttool.core.errors import CkptError
from ckpttool.tracing import pretrained
from ckpttool.tracing.build_model import of_object
from ckpttool.tracing.pretrained import as_pretrained, of_folder
from pretrained_models import FEW, TEXT

pytestmark = pytest.mark.skipif(
    int(transformers.__version__.split(".")[0]) < 5, reason="transformers 4 keeps no mapping of names as data"
)
CONFIG = {"model_type": "llama", **TEXT}


def folder(path: Path, **more: Any) -> str:
    (path / "config.json").write_text(json.dumps({**CONFIG, **more}))
    return f"hf:{path}"


def test_a_model_is_built_from_its_config(tmp_path: Path) -> None:
    """Of the class that it names, or the one without a head, in its dtype; others are made in the default one again."""
    made = of_folder(folder(tmp_path, architectures=["LlamaForCausalLM"], dtype="bfloat16"), {}, False).build()
    assert {one.dtype for one in made.parameters()} == {torch.bfloat16}
    assert type(made).__name__ == "LlamaForCausalLM"
    assert {one.device.type for one in made.parameters()} == {"meta"}
    bare = of_folder(folder(tmp_path), {}, True).build()
    assert type(bare).__name__ == "LlamaModel"
    assert {(one.dtype, one.device.type) for one in bare.parameters()} == {(torch.float32, "cpu")}
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(("more", "arguments", "said"), [
    ({}, {"width": 2}, "is described by its config.json"),
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, {}, "holds quantized weights"),
    ({"architectures": ["LlamaForNothing"]}, {}, "has no LlamaForNothing"),
    ({"model_type": "no_such_kind"}, {}, "config.json describes no model that transformers builds"),
])  # fmt: skip
def test_a_config_without_a_model_is_an_error(more: Any, arguments: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(CkptError) as raised:
        of_folder(folder(tmp_path, **more), arguments, False)
    assert said in raised.value.message


def test_a_missing_folder_and_missing_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CkptError, match=r"^hf: holds no config.json"):
        of_folder("hf:", {}, False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(CkptError, match="needs transformers"):
        of_folder(folder(tmp_path), {}, False)


def test_a_version_of_transformers_without_conversions(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import modeling_utils

    monkeypatch.delattr(modeling_utils, "remove_tied_weights_from_state_dict")
    with pytest.raises(CkptError, match="not a model of transformers 5 or newer"):
        as_pretrained(of_object(FEW["tied"]))


def test_pretrained_loading_has_the_errors_of_torch() -> None:
    """As a part of another it has its own names; not strictly it takes what there is; what is not saved is left out."""
    model: Any = as_pretrained(of_object(FEW["experts"])).build(True)
    own = FEW["experts"]().state_dict()
    assert nn.ModuleDict({"part": model}).state_dict().keys() == {f"part.{key}" for key in own}
    state = model.state_dict()
    assert state.keys() != own.keys()
    first = next(iter(state))
    lacking = {key: torch.zeros_like(value) for key, value in state.items() if key != first}
    with pytest.raises(RuntimeError, match=f'Missing key.*"{first}"'):
        model.load_state_dict(lacking)
    model.load_state_dict(lacking, strict=False)
    assert not any(value.any() for key, value in model.state_dict().items() if key != first)
    model._keys_to_ignore_on_save = {"lm_head.weight"}
    assert state.keys() - model.state_dict().keys() == {"lm_head.weight"}


@pytest.mark.parametrize("bars", [True, False])
@pytest.mark.parametrize("threads", [None, "0"])
def test_settings_of_transformers_are_restored(
    bars: bool, threads: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.utils import logging

    monkeypatch.delenv(pretrained._ASYNC, raising=False)
    if threads is not None:
        monkeypatch.setenv(pretrained._ASYNC, threads)
    before = logging.is_progress_bar_enabled()
    (logging.enable_progress_bar if bars else logging.disable_progress_bar)()
    try:
        with pretrained._in_this_thread():
            assert os.environ[pretrained._ASYNC] == "1"
            assert not logging.is_progress_bar_enabled()
        assert logging.is_progress_bar_enabled() == bars
    finally:
        (logging.enable_progress_bar if before else logging.disable_progress_bar)()
    assert os.environ.get(pretrained._ASYNC) == threads
