"""Models of transformers, timm, torchvision, diffusers and torchtune: names, and the result of a
strict load.

`CKPTTOOL_SUITES=all` tests every model that its library can build small, otherwise a few of each
library.
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
MODELS = [
    (zoo, name) for zoo, models in ZOOS.items() for name in list(models)[:: 1 if ALL else 150]
]
SECONDS = 60
State = dict[str, Any]


def faults(state: State, name: str) -> dict[str, State]:
    """Return the intact state, and one with a fault chosen by the model's name."""
    draw = random.Random(name)
    key = draw.choice([key for key, value in state.items() if isinstance(value, torch.Tensor)])
    fault = draw.choice(("is missing", "is renamed", "has another shape"))
    faulty = copy.copy(state)  # including module versions
    value = faulty.pop(key)
    if fault == "is renamed":
        faulty[f"{key}x"] = value
    elif fault == "has another shape":
        faulty[key] = filled(value.new_empty(2 * value.numel() + 2, device="meta"))
    return {"intact": state, f"{key} {fault}": faulty}


def filled(tensor: Any) -> Any:
    """Give a meta tensor values, with a single element as storage."""
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
    except Exception:  # including errors from a module's own loading code
        return False
    return True


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize(("zoo", "name"), MODELS)
def test_model(zoo: str, name: str, tmp_path: Path, record_property: Any) -> None:
    record_property("part", zoo)
    try:
        build = ZOOS[zoo][name]()
        model = build()
    except model_zoos.CannotBuild as reason:
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
    """Convert names of save_pretrained to ``state_dict()`` and back; `diff` must agree with
    from_pretrained.
    """
    folder = tmp_path / "hf"
    try:
        model.save_pretrained(folder)
        type(model).from_pretrained(folder)
    except Exception:  # transformers cannot load its own files
        return
    hf = f"hf:{folder}"
    ckpttool.remap(str(folder), str(tmp_path / "own.pt"), model=hf, to="serialized")
    own = torch.load(tmp_path / "own.pt")
    state = model.state_dict()
    assert own.keys() == state.keys()
    assert all(torch.equal(own[key], state[key]) for key in own)
    path = folder / "model.safetensors"
    for what, faulty in faults(load_file(path), model.config.model_type).items():
        save_file(
            {key: value.clone() for key, value in faulty.items()}, path, metadata={"format": "pt"}
        )
        assert ckpttool.diff(str(path), model=hf).identical == loads_pretrained(model, faulty), what


def loads_pretrained(model: Any, state: State) -> bool:
    """Return whether from_pretrained reports no missing or unexpected key and converts nothing."""
    try:
        _, info = type(model).from_pretrained(
            None,
            config=copy.deepcopy(model.config),
            state_dict=dict(state),
            output_loading_info=True,
        )
    except RuntimeError:
        return False
    return not any(info.values())
