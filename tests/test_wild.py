"""Files as people have them, each read beside torch, compared with itself and rewritten: what is small of `make wild`.

Files of packages are in data/wild, with their licences; what is larger there has a small sibling here, of the same
pickle, saved by torch itself: a pickled module, packed parameters of dynamic quantization, TorchScript.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from oracle import problems
from places import DATA

FILES = [*sorted(DATA.glob("wild/*.pt*")), *sorted(DATA.glob("*-torch-*.pt")), DATA / "lightning-2.6.6.ckpt"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_files_of_packages_and_of_other_versions(file: Path, tmp_path: Path) -> None:
    assert list(problems(str(file), tmp_path)) == []


def _module() -> object:
    model = nn.Sequential(nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3), nn.LSTM(3, 4))
    model.register_buffer("window", torch.ones(2), persistent=False)
    return model


def _quantized() -> object:
    model = nn.Sequential(nn.Linear(3, 4), nn.LSTM(3, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own plans for its quantization
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear, nn.LSTM}).state_dict()


@pytest.mark.parametrize("made", [_module, _quantized])
@pytest.mark.parametrize("is_zip", [True, False])
def test_small_siblings(tmp_path: Path, made: Callable[[], object], is_zip: bool) -> None:
    torch.manual_seed(0)
    torch.save(made(), tmp_path / "file.pt", _use_new_zipfile_serialization=is_zip)
    assert list(problems(str(tmp_path / "file.pt"), tmp_path)) == []
