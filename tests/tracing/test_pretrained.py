"""Models of a ``config.json``, and the names of ``from_pretrained`` for other models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from ckpttool import CkptError
from ckpttool.tracing import pretrained
from ckpttool.tracing.build_model import of_object
from ckpttool.tracing.pretrained import as_pretrained, by_transformers, of_folder
from ckpttool.tracing.trace import trace
from pretrained_models import FEW, TEXT

pytestmark = pytest.mark.skipif(
    int(transformers.__version__.split(".")[0]) < 5,
    reason="transformers 4 keeps no mapping of names as data",
)
CONFIG = {"model_type": "llama", **TEXT}


def write_config(path: Path, **extra: Any) -> str:
    (path / "config.json").write_text(json.dumps({**CONFIG, **extra}))
    return f"hf:{path}"


def test_a_model_is_built_from_its_config(tmp_path: Path) -> None:
    """It has the class and dtype of the config (or the headless class); the default dtype is
    restored.
    """
    model = of_folder(
        write_config(tmp_path, architectures=["LlamaForCausalLM"], dtype="bfloat16"), {}, False
    ).build()
    assert {one.dtype for one in model.parameters()} == {torch.bfloat16}
    assert type(model).__name__ == "LlamaForCausalLM"
    assert {one.device.type for one in model.parameters()} == {"meta"}
    headless = of_folder(write_config(tmp_path), {}, True).build()
    assert type(headless).__name__ == "LlamaModel"
    assert {(one.dtype, one.device.type) for one in headless.parameters()} == {
        (torch.float32, "cpu")
    }
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(("extra", "arguments", "message"), [
    ({}, {"width": 2}, "is described by its config.json"),
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, {}, "holds quantized weights"),
    ({"architectures": ["LlamaForNothing"]}, {}, "has no LlamaForNothing"),
    ({"model_type": "no_such_kind"}, {}, "transformers cannot build a model from"),
])  # fmt: skip
def test_a_config_without_a_model_is_an_error(
    extra: Any, arguments: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(CkptError) as raised:
        of_folder(write_config(tmp_path, **extra), arguments, False)
    assert message in raised.value.message


def test_a_missing_folder_or_missing_transformers_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CkptError, match=r"^hf: holds no config.json"):
        of_folder("hf:", {}, False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(CkptError, match="needs transformers"):
        of_folder(write_config(tmp_path), {}, False)


@pytest.mark.parametrize(("model", "status"), [
    ("hf:here", 2),
    ("build.py:imports_nothing_of_it", 1),
    ("build.py:imports_a_model", 2),
])  # fmt: skip
def test_transformers_with_a_broken_dependency(model: str, status: int, tmp_path: Path) -> None:
    """If torchvision was built for another torch, for example, most classes of transformers cannot
    be imported.
    """
    (tmp_path / "here").mkdir()
    write_config(tmp_path / "here", architectures=["LlamaForCausalLM"])
    (tmp_path / "build.py").write_text(
        "import torch, transformers\n"
        "def imports_nothing_of_it(): return torch.nn.Linear(2, 3)\n"
        "def imports_a_model(): return transformers.LlamaForCausalLM(transformers.LlamaConfig())\n"
    )
    torch.save(nn.Linear(3, 2).state_dict(), tmp_path / "here" / "x.pt")
    code = (
        "import sys; sys.modules['transformers.modeling_utils'] = None\n"
        "from ckpttool.cli.app import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", code, "diff", "--model", model, "here/x.pt"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    assert "internal error" not in done.stderr
    assert (
        status == 1
        or ("caused by ModuleNotFoundError: import of transformers.modeling_utils halted")
        in done.stderr
    )


def test_an_old_version_of_transformers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import modeling_utils

    monkeypatch.delattr(modeling_utils, "remove_tied_weights_from_state_dict")
    with pytest.raises(CkptError, match="not a model of transformers 5 or newer"):
        as_pretrained(of_object(FEW["tied"]))


def test_pretrained_loading_follows_strict_and_the_keys_to_ignore() -> None:
    """Inside another model it keeps its own names; strict=False accepts missing keys; ignored keys
    are not saved.
    """
    model: Any = as_pretrained(of_object(FEW["experts"])).build(True)
    original = FEW["experts"]().state_dict()
    assert nn.ModuleDict({"part": model}).state_dict().keys() == {f"part.{key}" for key in original}
    state = model.state_dict()
    assert state.keys() != original.keys()
    first = next(iter(state))
    incomplete = {key: torch.zeros_like(value) for key, value in state.items() if key != first}
    with pytest.raises(RuntimeError, match=f'Missing key.*"{first}"'):
        model.load_state_dict(incomplete)
    model.load_state_dict(incomplete, strict=False)
    assert not any(value.any() for key, value in model.state_dict().items() if key != first)
    model._keys_to_ignore_on_save = {"lm_head.weight"}
    assert state.keys() - model.state_dict().keys() == {"lm_head.weight"}


def test_the_hook_is_the_function_that_converts_when_saving() -> None:
    from transformers.core_model_loading import revert_weight_conversion

    code = revert_weight_conversion.__code__
    names = by_transformers(trace(as_pretrained(of_object(FEW["experts"], materialize=True))))
    hooks = {
        (hook.function, hook.file, hook.line) for key in names.serialized if (hook := key.hook)
    }
    assert hooks == {("revert_weight_conversion", code.co_filename, code.co_firstlineno)}


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
