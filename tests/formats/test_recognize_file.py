"""Files are recognized by content; for a file that is not a checkpoint the error says what to
do.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import tarfile
import zipfile
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import save

from ckpttool import CkptError, open_checkpoint
from places import DATA


class Doubling(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, x):
        return x * 2 * self.weight


def written(write, *args, **kwargs) -> bytes:
    buffer = io.BytesIO()
    write(*args, buffer, **kwargs)
    return buffer.getvalue()


def tarred() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("weights.pt"))
    return buffer.getvalue()


def zipped(*names: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in names:
            archive.writestr(name, b"x")
    return buffer.getvalue()


def numpy_archive() -> bytes:
    buffer = io.BytesIO()
    numpy.savez(buffer, weight=numpy.ones(2), bias=numpy.ones(1))
    return buffer.getvalue()


def exported() -> bytes:
    return written(torch.export.save, torch.export.export(Doubling(), (torch.ones(2),)))


def format_of(tmp_path, data: bytes, name: str = "model.bin") -> str:
    (tmp_path / name).write_bytes(data)
    return open_checkpoint(str(tmp_path / name)).format


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: save({"a": torch.ones(2)}), "safetensors"),
        (lambda: save({}), "safetensors"),
        (lambda: written(torch.save, {"a": torch.ones(2)}), "torch_zip"),
        (lambda: written(torch.save, 3), "torch_zip"),
        (exported, "pt2"),
        (lambda: (DATA / "tagger-torch-2.5.1.pt2").read_bytes(), "pt2"),
        (lambda: (DATA / "tagger-torch-2.8.0.pt2").read_bytes(), "pt2"),
        (lambda: zipped("p/data/aotinductor/model/m.so", "p/archive_format"), "pt2"),
        (lambda: written(torch.save, {}, _use_new_zipfile_serialization=False), "torch_legacy"),
        (
            lambda: written(torch.save, 3, _use_new_zipfile_serialization=False, pickle_protocol=4),
            "torch_legacy",
        ),
        (lambda: written(torch.jit.save, torch.jit.script(Doubling())), "torchscript"),
    ],
)
def test_formats_are_recognized_by_content(tmp_path, make, expected):
    assert format_of(tmp_path, make(), "misleading.html") == expected


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 4265\n"


@pytest.mark.parametrize(
    ("make", "kind", "hint"),
    [
        (lambda: b"", "is empty", "again"),
        (lambda: LFS, "is a Git LFS pointer", "git lfs pull --include"),
        (lambda: b"\n<!DOCTYPE html><html>", "an HTML page", "resolve"),
        (lambda: b"<html lang=en>", "an HTML page", "resolve"),
        (lambda: b"<?xml version='1.0'?><Error><Code>AccessDenied", "an XML page", "login"),
        (lambda: gzip.compress(b"x"), "gzip", "gzip -dk"),
        (lambda: gzip.compress(tarred()), "a tar archive compressed with gzip", "tar -xzf"),
        (lambda: lzma.compress(b"x"), "xz", "xz -dk"),
        (lambda: bz2.compress(b"x"), "bzip2", "bzip2 -dk"),
        (lambda: b"\x28\xb5\x2f\xfd\x04\x00", "zstd", "zstd -dk"),
        (tarred, "a tar archive", "tar -xf"),
        (
            lambda: written(lambda a, f: numpy.save(f, a), numpy.ones(3)),
            "a NumPy array",
            "safetensors",
        ),
        (numpy_archive, "a NumPy archive", "safetensors"),
        (lambda: b"\x89HDF\r\n\x1a\n\0\0\0", "an HDF5 file", "safetensors"),
        (lambda: b"GGUF\3\0\0\0" + bytes(20), "a GGUF file", "made from"),
        (lambda: b"\x08\x08\x12\x07pytorch\x1a\x052.1.0:", "an ONNX model", "exported from"),
        (lambda: json.dumps({"hidden_size": 8}).encode(), "JSON text", "holds the tensors"),
        (lambda: b"[1, 2]", "JSON text", "holds the tensors"),
        (
            lambda: zipped("m/model.json", "m/tensors/0"),
            "a TorchScript archive of torch 1.0",
            "torch.jit.load",
        ),
        (
            lambda: zipped("m/.data/extern_modules", "m/model.pkl"),
            "a torch.package archive",
            "state dict",
        ),
        (
            lambda: zipped("m/archive_format", "m/extra/note"),
            "a .pt2 archive without a program",
            "export",
        ),
        (lambda: b"\x1c\0\0\0PTMF" + bytes(40), "for mobile", "made from"),
        (lambda: zipped("m/model.json"), "a zip archive that torch did not write", "unzip"),
        (lambda: b"PK\3\4" + zipped(), "a zip archive that torch did not write", "unzip"),
        (lambda: zipped("a/model.weights.h5"), "a zip archive that torch did not write", "unzip"),
        (lambda: zipped(), "an empty zip archive", "again"),
        (lambda: exported()[:-30], "is truncated", "again"),
        (lambda: exported()[:200], "is truncated", "again"),
        (lambda: b"#!/bin/sh\necho", "is not a checkpoint that ckpttool knows", "safetensors"),
        (lambda: bytes(100), "is not a checkpoint that ckpttool knows", "safetensors"),
        (lambda: b"\x01", "is not a checkpoint that ckpttool knows", "safetensors"),
    ],
)
def test_other_files_are_errors_with_a_hint(tmp_path, make, kind, hint):
    with pytest.raises(CkptError) as caught:
        format_of(tmp_path, make())
    assert caught.value.exit_status == 2
    assert kind in caught.value.message
    assert hint in caught.value.hint


def test_the_index_of_a_sharded_checkpoint_is_recognized(tmp_path):
    index = json.dumps({"metadata": {}, "weight_map": {"a": "b"}}, indent=2)
    with pytest.raises(CkptError, match="and its shards disagree"):
        format_of(tmp_path, index.encode())


def test_broken_safetensors_are_recognized(tmp_path):
    data = save({"a": torch.ones(2)})
    for broken in (data[:20], b"\xff" * 8 + data[8:]):
        with pytest.raises(CkptError, match="is not a valid safetensors file"):
            format_of(tmp_path, broken)


def test_missing_files_are_errors(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(CkptError, match="no such file") as caught:
        open_checkpoint(str(tmp_path / "modle.safetensor"))
    assert str(tmp_path / "model.safetensors") in caught.value.hint
    with pytest.raises(CkptError, match="no such file") as caught:
        open_checkpoint(str(tmp_path / "none" / "a.pt"))
    assert "folder" in caught.value.hint
    with pytest.raises(CkptError, match="null byte"):
        open_checkpoint("a\0b")


def test_a_file_of_a_dcp_folder_leads_to_the_folder(tmp_path):
    folder = tmp_path / "saved"
    torch.distributed.checkpoint.save({"w": torch.ones(2)}, checkpoint_id=folder)
    (part,) = folder.glob("*.distcp")
    with pytest.raises(CkptError, match="is a part of the checkpoint in") as refused:
        open_checkpoint(str(part))
    assert refused.value.hint == f"name the folder: ckpttool inspect {folder}"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_an_error(tmp_path):
    (tmp_path / "a.pt").write_bytes(b"x")
    (tmp_path / "a.pt").chmod(0)
    with pytest.raises(CkptError, match="cannot read"):
        open_checkpoint(str(tmp_path / "a.pt"))


def test_a_link_to_nothing_is_named(tmp_path: Path) -> None:
    """As in a Hugging Face cache whose blobs were deleted."""
    (tmp_path / "model.pt").symlink_to("blobs/1234")
    with pytest.raises(CkptError) as error:
        open_checkpoint(str(tmp_path / "model.pt"))
    assert "is a link to blobs/1234, which does not exist" in error.value.message
    assert "did you mean" not in (error.value.hint or "")
