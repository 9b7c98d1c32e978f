"""Models of transformers, timm, torchvision, diffusers and torchtune: names, and the verdict of a strict load.

`CKPTTOOL_SUITES=all` takes every model that its library builds small; otherwise a few of each library are taken.
"""

from __future__ import annotations

import copy
import os
import random
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import ckpttool
import model_zoos

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore")
ALL = os.environ.get("CKPTTOOL_SUITES") == "all"
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    ZOOS = {name: zoo() for name, zoo in model_zoos.zoos().items()}
MODELS = [(zoo, name) for zoo, models in ZOOS.items() for name in list(models)[:: 1 if ALL else 150]]
SECONDS = 60
State = dict[str, Any]


def faults(state: State, name: str) -> dict[str, State]:
    """The file as it is, and with one thing wrong in it that the model's name draws."""
    draw = random.Random(name)
    key = draw.choice([key for key, value in state.items() if isinstance(value, torch.Tensor)])
    fault = draw.choice(("is missing", "is renamed", "has another shape"))
    faulty = copy.copy(state)  # with the versions of the modules
    value = faulty.pop(key)
    if fault == "is renamed":
        faulty[f"{key}x"] = value
    elif fault == "has another shape":
        faulty[key] = filled(value.new_empty(2 * value.numel() + 2, device="meta"))
    return {"nothing is wrong": state, f"{key} {fault}": faulty}


def filled(tensor: Any) -> Any:
    """Give a tensor of the meta device values, all of them one element."""
    if not isinstance(tensor, torch.Tensor) or not tensor.is_meta:
        return tensor
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


@pytest.fixture
def limited() -> Iterator[None]:
    """Give up a model that takes too long."""
    old = signal.signal(signal.SIGALRM, lambda *_: pytest.skip(f"takes over {SECONDS} seconds"))
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, old)


def loads(model: nn.Module, state: State) -> bool:
    try:
        model.load_state_dict(state, strict=True)
    except Exception:  # also what a module's own loading raises
        return False
    return True


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize(("zoo", "name"), MODELS)
def test_model(zoo: str, name: str, tmp_path: Path, record_property: Any) -> None:
    record_property("part", zoo)
    try:
        build = ZOOS[zoo][name]()
        model = build()
    except model_zoos.NoCase as reason:
        pytest.skip(str(reason))
    state = model.state_dict()
    is_meta = any(isinstance(value, torch.Tensor) and value.is_meta for value in state.values())
    for key, value in state.items():
        state[key] = filled(value)
    options: Any = {} if model_zoos.builds_on_meta(build) else {"materialize": True}
    assert [key.key for key in ckpttool.trace(build, **options).serialized] == list(state)
    for what, faulty in faults(state, name).items():
        path = str(tmp_path / "model.pt")
        torch.save(faulty, path)
        assert ckpttool.diff(path, model=build, **options).identical == loads(model, faulty), what
    if zoo == "transformers" and not is_meta:
        from_pretrained(model, tmp_path)


def from_pretrained(model: Any, tmp_path: Path) -> None:
    """The names of save_pretrained to those of ``state_dict()`` and back; `diff` says what from_pretrained says."""
    folder = tmp_path / "hf"
    try:
        model.save_pretrained(folder)
        type(model).from_pretrained(folder)
    except Exception:  # transformers itself does not load what it saves
        return
    hf = f"hf:{folder}"
    ckpttool.remap(str(folder), str(tmp_path / "own.pt"), model=hf, to="serialized")
    own = torch.load(tmp_path / "own.pt")
    state = model.state_dict()
    assert own.keys() == state.keys()
    assert all(torch.equal(own[key], state[key]) for key in own)
    path = folder / "model.safetensors"
    for what, faulty in faults(load_file(path), model.config.model_type).items():
        save_file({key: value.clone() for key, value in faulty.items()}, path, metadata={"format": "pt"})
        assert ckpttool.diff(str(path), model=hf).identical == taken(model, faulty), what


def taken(model: Any, state: State) -> bool:
    """Whether from_pretrained finds everything in the file, leaves nothing over, and converts nothing."""
    try:
        _, info = type(model).from_pretrained(
            None, config=copy.deepcopy(model.config), state_dict=dict(state), output_loading_info=True
        )
    except RuntimeError:
        return False
    return not any(info.values())
