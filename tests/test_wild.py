"""Read published files and compare them with torch, then diff and rewrite them: the small part of
`make wild`.

data/wild has files of packages, with their licences. Small files with the same pickle, saved by
torch itself, replace the larger ones: a pickled module, packed parameters of dynamic quantization,
TorchScript.
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

FILES = [
    *sorted(DATA.glob("wild/*.pt*")),
    *sorted(DATA.glob("*-torch-*.pt")),
    DATA / "lightning-2.6.6.ckpt",
]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_files_of_packages_and_old_torch_versions(file: Path, tmp_path: Path) -> None:
    assert list(problems(str(file), tmp_path)) == []


def _module() -> object:
    model = nn.Sequential(nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3), nn.LSTM(3, 4))
    model.register_buffer("window", torch.ones(2), persistent=False)
    return model


def _quantized() -> object:
    model = nn.Sequential(nn.Linear(3, 4), nn.LSTM(3, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates this quantization API
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear, nn.LSTM}).state_dict()


@pytest.mark.parametrize("build", [_module, _quantized])
@pytest.mark.parametrize("is_zip", [True, False])
def test_small_files_saved_by_torch(
    tmp_path: Path, build: Callable[[], object], is_zip: bool
) -> None:
    torch.manual_seed(0)
    torch.save(build(), tmp_path / "file.pt", _use_new_zipfile_serialization=is_zip)
    assert list(problems(str(tmp_path / "file.pt"), tmp_path)) == []
