"""Tensors in folders of torch.distributed.checkpoint that are not dense: subclasses, quantized by
torch, lazily conjugated. ``.metadata`` describes all of them as dense. Oracle: dcp.load, torch.load.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.testing._internal.two_tensor import TwoTensor

import dcp_ranks
import subclass_ranks
from command import Run
from subclass_ranks import two

pytestmark = pytest.mark.filterwarnings("ignore")


def save(state: dict[str, Any], folder: Path) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder)
    return str(folder)


def shapes(run: Run, folder: str) -> dict[str, str]:
    tensors = run("inspect", folder, "--format", "json").data["sections"][0]["tensors"]
    return {tensor["key"]: tensor.get("layout", "strided") for tensor in tensors}


@pytest.mark.parametrize("rows", [4, 2000])
def test_a_subclass_is_never_a_plain_tensor(rows: int, tmp_path: Path, run: Run) -> None:
    state: dict[str, Any] = {"large": two(9000), "t": two(rows), "w": torch.ones(3)}
    folder = save(state, tmp_path / "two")
    plain = {key: torch.zeros(value.shape) for key, value in state.items()}
    same_names = save(plain, tmp_path / "plain")
    assert "[9000, 3] subclass" in run("inspect", folder).out
    done = run("diff", folder, same_names, "--format", "json")
    assert done.status == 1
    statuses = {entry["left"][0]: entry["status"] for entry in done.data["entries"]}
    assert statuses == {"large": "shape", "t": "shape", "w": "same"}
    assert run("diff", folder, folder, "--values").status == 0
    other = save({**state, "t": two(rows, 1.0)}, tmp_path / "other")
    assert run("diff", folder, other, "--values").status == 1


def test_a_model_of_plain_tensors_does_not_load_a_subclass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(
        "from torch import nn\ndef build():\n    return nn.Linear(300, 300)\n"
    )
    values = torch.zeros(300, 300)
    save({"weight": TwoTensor(values, values + 1), "bias": torch.zeros(300)}, tmp_path / "two")
    done = run("diff", "two", "--model", "net.py:build")
    assert done.status == 1, done.said
    assert "1 tensor with other values" in done.out


def test_a_subclass_is_converted_and_renamed(tmp_path: Path, run: Run) -> None:
    folder = save({"t": two(900), "w": torch.ones(3)}, tmp_path / "two")
    assert run("convert", folder, "-o", tmp_path / "a.pt").status == 0
    loaded = torch.load(tmp_path / "a.pt", weights_only=False)
    assert type(loaded["t"]) is TwoTensor
    assert torch.equal(loaded["t"].a, two(900).a)
    assert torch.equal(loaded["t"].b, two(900).b)
    renamed = tmp_path / "renamed.dcp"
    assert run("remap", folder, "--rule", "t => u", "-o", renamed).status == 0
    target = {"u": two(900, 5.0), "w": torch.zeros(3)}
    with torch.serialization.safe_globals([TwoTensor]):
        dcp.load(target, checkpoint_id=renamed)
    assert torch.equal(target["u"].a, two(900).a)
    refused = run("convert", folder, "-o", tmp_path / "a.safetensors")
    assert refused.status == 1
    assert "subclass tensor has no place" in refused.err


def test_a_quantized_tensor_keeps_its_scale(tmp_path: Path, run: Run) -> None:
    tensor = torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 3, torch.qint8)
    folder = save({"q": tensor, "w": torch.ones(3)}, tmp_path / "quantized")
    assert "quantized" in run("inspect", folder).out.splitlines()[1]
    assert run("convert", folder, "-o", tmp_path / "a.pt").status == 0
    loaded = torch.load(tmp_path / "a.pt")["q"]
    assert torch.equal(loaded, tensor)
    assert (loaded.q_scale(), loaded.q_zero_point()) == (tensor.q_scale(), tensor.q_zero_point())
    refused = run("convert", folder, "-o", tmp_path / "a.safetensors")
    assert refused.status == 1
    assert "the scale and the zero point of its values would be lost" in refused.err


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_lazily_conjugated_values_are_those_that_dcp_loads(
    ending: str, tmp_path: Path, run: Run
) -> None:
    values = torch.randn(40, dtype=torch.complex64)
    state = {"conj": values.conj(), "neg": values.conj().imag, "plain": values}
    folder = save(state, tmp_path / "lazy")
    target = {key: torch.zeros_like(value.resolve_conj()) for key, value in state.items()}
    dcp.load(target, checkpoint_id=folder)
    assert run("convert", folder, "-o", tmp_path / f"a.{ending}").status == 0
    path = tmp_path / f"a.{ending}"
    loaded = torch.load(path) if ending == "pt" else load_file(path)
    assert all(torch.equal(loaded[key], target[key]) for key in target)
    same = save(target, tmp_path / "same")
    assert run("diff", folder, same, "--values").status == 0


def test_parts_of_a_subclass_on_ranks_are_not_joined(tmp_path: Path, run: Run) -> None:
    dcp_ranks.run("save", tmp_path, subclass_ranks.__file__)
    folder = str(tmp_path / "ranks")
    assert "[8, 3] subclass" in run("inspect", folder).out
    assert run("diff", folder, folder).status == 0
    assert run("diff", folder, folder, "--values").status == 1
    done = run("convert", folder, "-o", tmp_path / "a.pt")
    assert done.status == 2
    assert "t is in 2 parts that are subclass tensors" in done.err
    assert not (tmp_path / "a.pt").exists()
    renamed = tmp_path / "renamed.dcp"
    assert run("remap", folder, "--rule", "t => u", "-o", renamed).status == 0
    dcp_ranks.run("load", tmp_path, subclass_ranks.__file__)
