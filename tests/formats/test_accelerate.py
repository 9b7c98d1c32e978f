"""FSDP checkpoints that accelerate wrote are read as one checkpoint, and accelerate loads what
ckpttool writes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from accelerate_run import KINDS, LOADED
from command import Run
from files import tensor_bytes
from places import ROOT, SUPPORT
from torch_version import needs_torch

SCRIPT = SUPPORT / "accelerate_run.py"
WHOLE = [kind for kind in KINDS if "LOCAL" not in kind]
OTHER_FILES = ["random_states_0.pkl", "random_states_1.pkl", "scheduler.bin"]
DROPPED = [word for name in OTHER_FILES for word in ("--drop", name)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    needs_torch("2.7", "fully_shard without a GPU")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    folder = tmp_path_factory.mktemp("accelerate")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, str(SCRIPT), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def same(left: Any, right: Any, path: str = "") -> None:
    if isinstance(left, dict):
        assert set(left) == set(right), path
        for key, value in left.items():
            same(value, right[key], f"{path}.{key}")
    elif isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype, path
        assert torch.equal(left, right), path
    else:
        assert left == right, path


@pytest.mark.parametrize("kind", WHOLE)
def test_a_folder_is_converted_with_model_and_optimizer(
    saved: Path, run: Run, tmp_path: Path, kind: str
) -> None:
    out, expected = tmp_path / "whole.pt", torch.load(saved / f"{kind}.pt")
    done = run("remap", saved / kind, "-o", out, *DROPPED, "--verify")
    assert done.status == 0, done.err
    found = torch.load(out)
    same(found["model"], expected["model"])
    same(found["optimizer"]["state"], expected["optimizer"]["state"])
    assert run("diff", saved / kind, saved / f"{kind}.pt", "--values").status == 0


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "SHARDED" in kind])
def test_convert_writes_the_same_bytes_as_merge_fsdp_weights(
    saved: Path, run: Run, tmp_path: Path, kind: str
) -> None:
    merge = pytest.importorskip("accelerate.utils").merge_fsdp_weights
    folder, out = saved / kind / "pytorch_model_fsdp_0", tmp_path / "out.safetensors"
    merge(folder, tmp_path / "merged")
    assert run("convert", folder, "-o", out).status == 0
    assert tensor_bytes(out) == tensor_bytes(tmp_path / "merged/model.safetensors")


ADAM = {"state": {0: {"step": torch.ones(1)}}, "param_groups": [{"params": [0]}]}


@pytest.mark.parametrize(
    ("files", "sections"),
    [
        ({"pytorch_model_fsdp": {"w": torch.ones(2)}}, ["model"]),
        (
            {
                "pytorch_model_fsdp_1": {"v": torch.ones(2)},
                "optimizer_1": ADAM,
                "pytorch_model_fsdp_0": {"w": torch.ones(2)},
            },
            ["model", "model_1", "optimizer_1"],
        ),
    ],
)
def test_each_model_has_its_own_sections(
    tmp_path: Path, run: Run, files: Any, sections: list[str]
) -> None:
    for name, state in files.items():
        torch.save(state, tmp_path / f"{name}.bin")
    (tmp_path / "optimizer").write_text("not a folder")
    (tmp_path / "pytorch_model_fsdp_9.bin").mkdir()
    done = run("inspect", tmp_path, "--format", "json")
    assert [section["path"] for section in done.data["sections"]] == sections
    out = tmp_path / "whole.pt"
    assert run("remap", tmp_path, "-o", out).status == 0
    assert list(torch.load(out)) == sections


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("pytorch_model_fsdp", ADAM, "holds (root) (optimizer) instead of the one of model @ {}"),
        (
            "optimizer",
            {"w": torch.ones(2)},
            "holds (root) (state_dict) instead of the one of optimizer @ {}",
        ),
        (
            "pytorch_model_fsdp",
            {"a": {"w": torch.ones(2)}, "b": {"w": torch.ones(2)}},
            "holds a (state_dict), b (state_dict) instead of the one of model @ {}",
        ),
        ("pytorch_model_fsdp", 3, "holds no state dict instead of the one of model @ {}"),
        (
            "pytorch_model_fsdp",
            {"a": {"w": torch.ones(2)}, "epoch": 3},
            "is not expected there @ {}::epoch",
        ),
    ],
)
def test_an_invalid_part_is_reported(
    tmp_path: Path, run: Run, name: str, content: Any, problem: str
) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model_fsdp_1.bin")
    torch.save(content, tmp_path / f"{name}.bin")
    done = run("inspect", tmp_path)
    assert done.status == 2
    assert "is not as accelerate saves it" in done.err
    assert problem.format(tmp_path / f"{name}.bin") in done.err


def test_other_files_are_refused_or_copied(saved: Path, run: Run, tmp_path: Path) -> None:
    done = run("remap", saved / KINDS[0], "-o", tmp_path / "whole.pt")
    assert done.status == 1
    assert "--drop 'random_states_*.pkl' --drop scheduler.bin -o" in done.err
    done = run("remap", saved / KINDS[0], "-o", tmp_path / "whole.dcp")
    assert done.status == 0, done.err
    assert (
        sorted(OTHER_FILES)
        == sorted(p.name for p in (tmp_path / "whole.dcp").iterdir() if "distcp" not in p.name)[1:]
    )
    assert run("diff", tmp_path / "whole.dcp", saved / KINDS[0], "--values").status == 0


def test_a_second_copy_of_the_weights_is_reported(saved: Path, run: Run, tmp_path: Path) -> None:
    """The Trainer also saves the weights for `from_pretrained`."""
    folder = shutil.copytree(saved / WHOLE[-1], tmp_path / "checkpoint-2")
    save_file({"other": torch.ones(2)}, folder / "model.safetensors")
    (folder / "trainer_state.json").write_text("{}")
    done = run("inspect", folder)
    assert done.status == 0
    assert "model.safetensors is in the same folder, and is not read" in done.err
    out = tmp_path / "model.safetensors"
    assert run("remap", f"{folder}::model", "-o", out).status == 0
    same(load_file(out), torch.load(saved / f"{WHOLE[-1]}.pt")["model"])


def test_accelerate_loads_a_written_folder(saved: Path) -> None:
    same(torch.load(saved / "loaded.pt"), torch.load(saved / f"{LOADED}.pt"))


def test_rank_files_are_listed_as_a_glob(saved: Path, run: Run, tmp_path: Path) -> None:
    done = run("inspect", saved / "1 LOCAL_STATE_DICT")
    assert done.status == 2
    glob = f"{saved}/1 LOCAL_STATE_DICT/pytorch_model_fsdp_rank*.bin"
    assert f"'{glob}'" in done.err
    done = run("remap", glob, "--model", f"{SCRIPT}:Net", "-o", tmp_path / "whole.pt")
    assert done.status == 0, done.err
    same(torch.load(tmp_path / "whole.pt"), torch.load(saved / "1 LOCAL_STATE_DICT.pt")["model"])
