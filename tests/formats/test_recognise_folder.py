"""What a folder holds, and that names from a file of a stranger stay in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckpttool.errors import CkptError
from ckpttool.formats.open import open_checkpoint
from ckpttool.formats.recognise_folder import companions, locate
from ckpttool.io.safe_path import safe_path


def put(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".safetensors"):
            save_file({"a": torch.ones(2)}, path)
        elif name.endswith((".pt", ".bin", ".pth")):
            torch.save({"a": torch.ones(2)}, path)
        else:
            path.write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("names", "format", "found"),
    [
        (["model.safetensors", "config.json"], "safetensors", "model.safetensors"),
        (["pytorch_model.bin"], "torch_zip", "pytorch_model.bin"),
        (["model.safetensors", "optimizer.pt", "training_args.bin", "rng_state_0.pth"], "safetensors", "model"),
        (["optimizer.pt"], "torch_zip", "optimizer.pt"),
        (["model.safetensors.index.json", "model-00001-of-00001.safetensors"], "sharded", "index.json"),
        (["model.safetensors.index.fp16.json", "optimizer.pt"], "sharded", "index.fp16.json"),
        ([".metadata", "__0_0.distcp", "train.pt"], "dcp", ""),
    ],
)
def test_the_one_checkpoint(tmp_path: Path, names: list[str], format: str, found: str) -> None:
    located = locate(str(put(tmp_path, *names)))
    assert located.format == format
    assert found in located.path


@pytest.mark.parametrize(
    ("names", "message", "hint"),
    [
        ([], "holds nothing", "check the path"),
        (["config.json"], "no weights", "check the path"),
        (["run/model.pt"], "no checkpoint", "/run"),
        (["notes.txt", "step_100/model.pt", "step_200/model.pt", "step_300/model.pt"], "no checkpoint", "step_300"),
        (["model-00001-of-00002.safetensors"], "1 shards without their index", "index.json"),
        (["__0_0.distcp"], "without its .metadata", "hidden"),
        (  # scheduler.bin is no checkpoint where there is another
            ["optimizer_0/.metadata", "weights/.metadata", "random_states_0.pkl", "scheduler.bin"],
            "holds its checkpoint in folders, each one of its own",
            "weights",
        ),
        (
            ["pytorch_model_fsdp_0/.metadata", "pytorch_model_fsdp.bin"],
            "holds the same twice, as accelerate saves it with other settings",
            "pytorch_model_fsdp_0",
        ),
        (
            ["latest", "global_step5/mp_rank_00_model_states.pt"],
            "the step '{}' that its file `latest` names",
            "global_step5",
        ),
        (
            ["zero_pp_rank_0_mp_rank_00_optim_states.pt"],
            "DeepSpeed checkpoint without the model's own file",
            "copy the folder again",
        ),
        (
            ["bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"],
            "DeepSpeed checkpoint without the model's own file",
            "copy the folder again",
        ),
    ],
)
def test_what_is_none_is_named(tmp_path: Path, names: list[str], message: str, hint: str) -> None:
    with pytest.raises(CkptError, match=message) as caught:
        open_checkpoint(str(put(tmp_path, *names)))
    assert hint in caught.value.hint
    assert caught.value.exit_status == 2


def test_several_are_listed(tmp_path: Path) -> None:
    put(tmp_path, "model.safetensors", "pytorch_model.bin", "model.safetensors.index.json")
    with pytest.raises(CkptError, match="several checkpoints") as caught:
        locate(str(tmp_path))
    assert {p.key for p in caught.value.problems} == {
        "model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"
    }  # fmt: skip


@pytest.mark.parametrize(
    "name", ["../a", "/etc/passwd", "x/../../a", "", "a\0b", "..\\a", "./a", "a//b", "out.safetensors", "way/a"]
)
def test_names_that_leave_the_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (tmp_path / "secret").write_text("x")
    (folder / "out.safetensors").symlink_to(tmp_path / "secret")
    (folder / "way").symlink_to(tmp_path)
    assert safe_path(str(folder), name) is None


def test_names_that_stay(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("x")
    (tmp_path / "link").symlink_to("real")
    assert safe_path(str(tmp_path), "sub/model.safetensors") == str(tmp_path / "sub/model.safetensors")
    assert safe_path(str(tmp_path), "link") == str(tmp_path / "link")


def test_the_links_of_a_hugging_face_cache_stay(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    blobs = tmp_path / "models--org--name" / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    put(blobs, "x.safetensors")
    (snapshot / "model-00001-of-00001.safetensors").symlink_to("../../blobs/x.safetensors")
    index = {"metadata": {"total_size": 8}, "weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (blobs / "y").write_text(json.dumps(index))
    (snapshot / "model.safetensors.index.json").symlink_to("../../blobs/y")
    assert [e.key for e in open_checkpoint(str(snapshot)).sections[0].tensors] == ["a"]
    (snapshot / "bad").symlink_to("../../../elsewhere")
    assert safe_path(str(snapshot), "bad") is None


def test_companions_are_the_small_files_beside_the_weights(tmp_path: Path) -> None:
    put(tmp_path, "config.json", "tokenizer.model", "model.safetensors", "tf_model.h5", ".gitattributes", "sub/x.txt")
    (tmp_path.parent / "outside.json").write_text("{}")
    (tmp_path / "link.json").symlink_to(tmp_path.parent / "outside.json")
    assert set(companions(str(tmp_path))) == {"config.json", "tokenizer.model"}
