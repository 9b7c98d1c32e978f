"""Recognition of folders; file names from an untrusted index cannot leave the folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckpttool import CkptError, open_checkpoint
from ckpttool.formats.folders import (
    checkpoint_files,
    companions,
    other_files,
    other_weights,
    state_files,
)
from ckpttool.formats.registry import recognize
from ckpttool.io.paths import safe_path


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
        (
            ["model.safetensors", "optimizer.pt", "training_args.bin", "rng_state_0.pth"],
            "safetensors",
            "model",
        ),
        (["optimizer.pt"], "torch_zip", "optimizer.pt"),
        (
            ["model.safetensors.index.json", "model-00001-of-00001.safetensors"],
            "sharded",
            "index.json",
        ),
        (["model.safetensors.index.fp16.json", "optimizer.pt"], "sharded", "index.fp16.json"),
        ([".metadata", "__0_0.distcp", "train.pt"], "dcp", ""),
    ],
)
def test_the_only_checkpoint_is_found(
    tmp_path: Path, names: list[str], format: str, found: str
) -> None:
    located = recognize(str(put(tmp_path, *names)))
    assert located.format.name == format
    assert found in located.path


@pytest.mark.parametrize(
    ("names", "message", "hint"),
    [
        ([], "holds nothing", "check the path"),
        (["config.json"], "no weights", "check the path"),
        (["run/model.pt"], "no checkpoint", "/run"),
        (
            ["notes.txt", "step_100/model.pt", "step_200/model.pt", "step_300/model.pt"],
            "no checkpoint",
            "step_300",
        ),
        (["model-00001-of-00002.safetensors"], "1 shards without their index", "index.json"),
        (["__0_0.distcp"], "without its .metadata", "hidden"),
        (["__0.metadata", "__0_0.distcp"], "each rank has its own index", "use_collectives=True"),
        (["run/model.pt", ".zzz/x.pt"], "no checkpoint", "/run"),
        (
            ["optimizer_rank0.bin", "pytorch_model_fsdp_rank0.bin"],
            "holds files of ranks",
            "pytorch_model_fsdp_rank*.bin",
        ),
        (["optimizer_rank0.bin"], "holds files of ranks", "optimizer_rank*.bin"),
        (  # scheduler.bin is not a checkpoint if there is another one
            ["optimizer_0/.metadata", "weights/.metadata", "random_states_0.pkl", "scheduler.bin"],
            "holds several checkpoints, each in its own folder",
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
            ["latest", "global_step5/mp_rank_00_model_states.pt", ".zzz/x"],
            "the step",
            "global_step5",
        ),
        (["latest", "global_step5"], "the step", "copy the folder again"),
        (
            ["zero_pp_rank_0_mp_rank_00_optim_states.pt"],
            "without the model's own file",
            "copy the folder again",
        ),
        (
            ["bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"],
            "without the model's own file",
            "copy the folder again",
        ),
    ],
)
def test_a_folder_without_a_checkpoint_is_an_error(
    tmp_path: Path, names: list[str], message: str, hint: str
) -> None:
    with pytest.raises(CkptError, match=message) as caught:
        open_checkpoint(str(put(tmp_path, *names)))
    assert hint in caught.value.hint
    assert caught.value.exit_status == 2


def test_a_step_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    put(tmp_path, "latest", "global_step5/mp_rank_00_model_states.pt")
    (tmp_path / "latest").write_text("latest")
    with pytest.raises(
        CkptError, match="the step 'latest' that its file `latest` names is not there"
    ):
        open_checkpoint(str(tmp_path))


def test_folders_with_names_of_files_are_ignored(tmp_path: Path) -> None:
    files = (
        "pytorch_model_fsdp.bin",
        "scheduler.bin",
        "own.pkl",
        "model.safetensors",
        "train.pt",
        "training_args.bin",
    )
    put(tmp_path, *files)
    functions = [other_weights, state_files, other_files]
    found = [names(str(tmp_path)) for names in functions]
    assert found == [
        ("model.safetensors", "train.pt"),
        ("own.pkl", "scheduler.bin", "training_args.bin"),
        (
            "model.safetensors",
            "pytorch_model_fsdp.bin",
            "scheduler.bin",
            "train.pt",
            "training_args.bin",
        ),
    ]
    for name in ("other.safetensors", "sampler.bin", "sampler.pkl"):
        (tmp_path / name).mkdir()
    assert [names(str(tmp_path)) for names in functions] == found


def test_files_of_the_same_kind_are_replaced(tmp_path: Path) -> None:
    """A new checkpoint replaces the files of the same kind, and no other files."""
    others = [".gitattributes", "zz", "config.json", "train.pt"]
    bins = ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"]
    safe = ["model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    dcp = [".metadata", "__0_0.distcp"]
    for name in (*others, *bins, *safe, *dcp):
        (tmp_path / name).write_bytes(b"")
    for like, expected in (
        (".metadata", dcp),
        (safe[0], safe),
        (safe[2], safe),
        (bins[0], bins),
        (bins[2], bins),
    ):
        assert checkpoint_files(str(tmp_path), like) == set(expected)
    assert checkpoint_files(str(tmp_path / "none"), ".metadata") == set()


def test_several_checkpoints_are_listed(tmp_path: Path) -> None:
    put(tmp_path, "model.safetensors", "pytorch_model.bin", "model.safetensors.index.json")
    with pytest.raises(CkptError, match="several checkpoints") as caught:
        recognize(str(tmp_path))
    assert {p.key for p in caught.value.problems} == {
        "model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"
    }  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "../a",
        "/etc/passwd",
        "x/../../a",
        "",
        "a\0b",
        "..\\a",
        "./a",
        "a//b",
        "out.safetensors",
        "way/a",
    ],
)
def test_names_that_leave_the_folder_are_unsafe(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (tmp_path / "secret").write_text("x")
    (folder / "out.safetensors").symlink_to(tmp_path / "secret")
    (folder / "way").symlink_to(tmp_path)
    assert safe_path(str(folder), name) is None


def test_names_inside_the_folder_are_safe(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("x")
    (tmp_path / "link").symlink_to("real")
    assert safe_path(str(tmp_path), "sub/model.safetensors") == str(
        tmp_path / "sub/model.safetensors"
    )
    assert safe_path(str(tmp_path), "link") == str(tmp_path / "link")


def test_links_of_a_hugging_face_cache_are_followed(tmp_path: Path) -> None:
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


def test_companions_are_the_small_files_next_to_the_weights(tmp_path: Path) -> None:
    put(
        tmp_path,
        "config.json",
        "tokenizer.model",
        "model.safetensors",
        "tf_model.h5",
        ".gitattributes",
        "sub/x.txt",
    )
    (tmp_path.parent / "outside.json").write_text("{}")
    (tmp_path / "link.json").symlink_to(tmp_path.parent / "outside.json")
    assert set(companions(str(tmp_path))) == {"config.json", "tokenizer.model"}


def test_snapshot_of_torchsnapshot_is_named(tmp_path: Path) -> None:
    """Its folders hold raw bytes, and no checkpoint."""
    (tmp_path / "0" / "app").mkdir(parents=True)
    (tmp_path / "0" / "app" / "weight").write_bytes(bytes(16))
    (tmp_path / ".snapshot_metadata").write_text(
        '{"version": "0.1.0", "world_size": 1, "manifest": {}}'
    )
    with pytest.raises(CkptError, match="is a snapshot of torchsnapshot") as error:
        open_checkpoint(str(tmp_path))
    assert "torchsnapshot.Snapshot(" in error.value.hint
