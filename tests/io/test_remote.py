"""Checkpoints behind URLs: fsspec's memory, and local S3 and web servers; torch is the oracle."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shlex
import socket
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load, load_file, save, save_file

import ckpttool
from ckpttool import Checkpoint, CkptError, open_checkpoint
from ckpttool.core.checkpoint import Lazy, Span
from ckpttool.evaluate.torch_eval import load as tensor_of
from ckpttool.io import remote, remote_errors
from ckpttool.io.files import opened
from ckpttool.io.paths import is_url, join, name, parent, safe_path
from ckpttool.io.pieces import Piece, SpanReader, read_span
from ckpttool.io.write_remote import PART, _appearing, write
from command import fixes_in, main
from places import DATA
from remote_servers import web_server

STATE = {
    "embed.weight": torch.arange(60, dtype=torch.float32).reshape(12, 5),
    "ünter.0.weight": torch.arange(7, dtype=torch.bfloat16),
    "scale": torch.tensor(2.5, dtype=torch.float64),
    "empty": torch.empty(0, 3),
    "flags": torch.tensor([True, False, True]),
}
NEEDS_S3 = pytest.mark.skipif(
    not (find_spec("s3fs") and find_spec("moto")), reason="s3fs or moto is not installed"
)
NEEDS_HTTP = pytest.mark.skipif(not find_spec("aiohttp"), reason="aiohttp is not installed")


@dataclass(frozen=True)
class Store:
    """An empty folder in a remote file system."""

    fs: Any
    url: str

    def put(self, filename: str, data: bytes | Path) -> str:
        self.fs.pipe_file(
            self.fs._strip_protocol(f"{self.url}/{filename}"),
            data if isinstance(data, bytes) else data.read_bytes(),
        )
        return f"{self.url}/{filename}"

    def put_folder(self, filename: str, folder: Path) -> str:
        for path in folder.rglob("*"):
            if path.is_file():
                self.put(f"{filename}/{path.relative_to(folder)}", path)
        return f"{self.url}/{filename}"

    def get(self, filename: str) -> bytes:
        return bytes(self.fs.cat_file(self.fs._strip_protocol(f"{self.url}/{filename}")))

    def names(self) -> set[str]:
        self.fs.invalidate_cache()
        root = self.fs._strip_protocol(self.url)
        return {path.removeprefix(root).strip("/") for path in self.fs.find(root)}


@pytest.fixture(params=["memory", pytest.param("s3", marks=NEEDS_S3)])
def store(request: pytest.FixtureRequest) -> Store:
    if request.param == "memory":
        return Store(
            fsspec.filesystem("memory"),
            f"memory://bucket-{zlib.crc32(request.node.nodeid.encode()):x}",
        )
    fs, name = request.getfixturevalue("bucket")
    return Store(fs, f"s3://{name}/deep")


def torch_zip(state: object, **options: Any) -> bytes:
    out = io.BytesIO()
    torch.save(state, out, **options)
    return out.getvalue()


def tensors(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    (section,) = [section for section in checkpoint.sections if section.kind == "state_dict"]
    return {entry.key: tensor_of(entry) for entry in section.tensors}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[key].dtype == right[key].dtype and torch.equal(left[key], right[key]) for key in left
    )


# Reading


def test_every_kind_of_file_is_read(store: Store) -> None:
    legacy = torch_zip(STATE, _use_new_zipfile_serialization=False)
    for url in (
        store.put("a.safetensors", save(STATE)),
        store.put("a.pt", torch_zip(STATE)),
        store.put("legacy.pt", legacy),
        store.put("train.ckpt", torch_zip({"epoch": 3, "model": STATE})) + "::model",
    ):
        assert same(tensors(ckpttool.open_checkpoint(url)), STATE)


@pytest.mark.parametrize(
    "filename", ["script-torch-2.5.1.pt", "tagger-torch-2.7.1.pt2", "tagger-torch-2.9.1.pt2"]
)
def test_exported_programs_are_read(store: Store, filename: str) -> None:
    remote_one, local = (
        open_checkpoint(store.put(filename, DATA / filename)),
        open_checkpoint(str(DATA / filename)),
    )
    assert remote_one.format == local.format
    assert [section.path for section in remote_one.sections] == [
        section.path for section in local.sections
    ]
    assert same(tensors(remote_one), tensors(local))


def test_sharded_folder_is_read(store: Store, tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "all.safetensors")
    assert (
        main(
            [
                "convert",
                str(tmp_path / "all.safetensors"),
                "-o",
                f"{tmp_path}/m/",
                "--max-shard-size",
                "100B",
            ]
        )
        == 0
    )
    (tmp_path / "m" / "config.json").write_text("{}")
    url = store.put_folder("m", tmp_path / "m")
    if url.startswith("s3:"):
        bucket = url.split("/")[2]  # a folder made in the S3 console is an object of that name
        store.fs.call_s3("put_object", Bucket=bucket, Key="deep/m/", Body=b"")
    assert remote.names_in(url) == sorted(os.listdir(tmp_path / "m"))
    for operand in (url, url + "/", url + "/model.safetensors.index.json"):
        found = open_checkpoint(operand)
        assert found.format == "sharded"
        assert same(tensors(found), STATE)


def test_dcp_folder_is_read(store: Store, tmp_path: Path) -> None:
    dcp.save({"model": STATE, "step": 7}, checkpoint_id=tmp_path / "d")
    url = store.put_folder("d", tmp_path / "d")
    for operand in (url, url + "/.metadata"):
        found = open_checkpoint(operand)
        assert found.format == "dcp"
        assert same(tensors(found), STATE)


def test_glob_is_read(store: Store) -> None:
    for rank in range(2):
        store.put(f"rank_{rank}.pt", torch_zip(STATE))
    store.put("rank_9.pt/no file", b"")
    found = open_checkpoint(f"{store.url}/rank_*.pt")
    assert found.format == "rank_files"
    assert {entry.key for entry in found.sections[0].tensors} == set(STATE)


def test_folder_with_several_checkpoints_lists_them(store: Store) -> None:
    store.put("m/a.safetensors", save(STATE))
    store.put("m/b.pt", torch_zip(STATE))
    with pytest.raises(CkptError, match="several checkpoints") as error:
        open_checkpoint(f"{store.url}/m")
    assert [problem.key for problem in error.value.problems] == ["a.safetensors", "b.pt"]


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_changed_file_is_read_again(store: Store, count: int) -> None:
    store.put("a.safetensors", save({"w": torch.zeros(5)}))
    url = f"{store.url}/a.safetensors"
    open_checkpoint(url)
    store.put("a.safetensors", save({"new": torch.ones(count)}))
    assert same(tensors(open_checkpoint(url)), {"new": torch.ones(count)})


def test_spans_larger_than_all_buffers_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(300_001)
    url = Store(fsspec.filesystem("memory"), "memory://spans").put("data", data)
    for constant, value in (("BLOCK", 1 << 10), ("_LARGE", 1 << 12), ("PART", 10_007)):
        monkeypatch.setattr(remote, constant, value)
    monkeypatch.setattr(remote, "BATCH", 40 << 10)
    for start, length in (
        (0, 300_001),
        (1, 299_999),
        (4095, 4097),
        (300_000, 1),
        (7, 0),
        (123_456, 4096),
    ):
        assert read_span(Span(url, start, length)) == data[start : start + length]
        remote.forget(url)
    reader, taken = SpanReader(512), b""
    for start in range(0, 300_000, 5000):  # adjacent spans; the end of the run is known
        taken += b"".join(map(bytes, reader.chunks(Span(url, start, 5000), 300_000)))
    assert taken == data[:300_000]
    with opened(url) as file:
        file.prefetch([(5, 10), (12, 100), (299_990, 100), (400_000, 5)])
        assert file.read_at(20, 30) == data[20:50]
        assert file.read_at(299_995, 100) == data[299_995:]
        assert file.read_at(400_000, 5) == b""
        file.seek(299_000)
        assert file.read() == data[299_000:]


# Number of bytes fetched


@NEEDS_HTTP
def test_logged_bytes_equal_the_count_of_the_server(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = save({f"layers.{number}.weight": torch.zeros(64, 256) for number in range(50)})
    with web_server({"/m/large.safetensors": data}) as server:
        url = f"{server.url}/m/large.safetensors"
        monkeypatch.setenv("CKPTTOOL_LOG", "info")
        assert main(["inspect", url, "--format", "json"]) == 0
        out, log = capsys.readouterr()
        assert json.loads(out)["bytes"] == len(data)
        assert 0 < server.sent < 300_000
        assert f"INFO {url}: {server.sent:,} bytes fetched in 1 requests" in log.splitlines()


def test_remap_fetches_every_byte_once(store: Store, tmp_path: Path) -> None:
    state = {
        f"layers.{number}.weight": torch.full((100, 100), float(number)) for number in range(60)
    }
    url = store.put("a.safetensors", save(state))
    before = remote.cache.fetched[url]
    out = tmp_path / "out.safetensors"
    assert main(["remap", url, "--rule", "layers.{n}.weight => h.{n}.w", "-o", str(out)]) == 0
    assert same(
        load_file(out), {f"h.{number}.w": state[f"layers.{number}.weight"] for number in range(60)}
    )
    assert remote.cache.fetched[url] - before < 2_400_000 + 2 * remote.BLOCK


# Writing


RENAME = ["--rule", "embed.weight => e.w"]
RENAMED = {"e.w" if key == "embed.weight" else key: value for key, value in STATE.items()}


def test_file_is_written_and_verified(store: Store, tmp_path: Path) -> None:
    url = store.put("a.pt", torch_zip(STATE))
    assert main(["remap", url, *RENAME, "-o", f"{store.url}/b.safetensors", "--verify"]) == 0
    assert same(load(store.get("b.safetensors")), RENAMED)
    assert (
        main(["remap", f"{store.url}/b.safetensors", "-o", f"{store.url}/new/c.pt", "--verify"])
        == 0
    )
    assert same(torch.load(io.BytesIO(store.get("new/c.pt"))), RENAMED)
    assert store.names() == {"a.pt", "b.safetensors", "new/c.pt"}
    local = tmp_path / "a.pt"
    assert main(["remap", f"{store.url}/b.safetensors", "-o", str(local), "--verify"]) == 0
    assert same(torch.load(local), RENAMED)
    assert main(["remap", str(local), "-o", f"{store.url}/d.safetensors", "--verify"]) == 0
    assert same(load(store.get("d.safetensors")), RENAMED)


def test_existing_file_is_replaced_only_with_force(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    url, old = store.put("a.pt", torch_zip(STATE)), store.put("b.safetensors", b"old")
    assert main(["remap", url, "-o", old]) == 2
    assert "pass --force" in capsys.readouterr().err
    assert store.get("b.safetensors") == b"old"
    assert main(["remap", url, "-o", old, "--force"]) == 0
    assert same(load(store.get("b.safetensors")), STATE)


@pytest.mark.parametrize("options", [["--in-place"], ["--in-place", "--force"]])
def test_remote_file_is_not_edited_in_place(
    store: Store, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    url = store.put("a.pt", torch_zip(STATE))
    before = store.get("a.pt")
    assert main(["remap", url, *RENAME, *options]) == 2
    assert "cannot be changed in place" in capsys.readouterr().err
    assert main(["remap", url, *RENAME, "-o", url, "--force"]) == 2
    assert "is the source itself" in capsys.readouterr().err
    assert store.get("a.pt") == before


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("nbytes", [1000, 12 << 20])  # one request; several parts
def test_failed_write_leaves_no_files(store: Store, nbytes: int) -> None:
    def produce() -> Iterator[bytes]:
        for _ in range(0, nbytes, min(nbytes, 1 << 20)):
            yield bytes(min(nbytes, 1 << 20))
        raise CkptError("the source ends", hint="")

    store.put("other", b"there")
    with pytest.raises(CkptError, match="the source ends"):
        write([Piece(Lazy(nbytes, produce))], f"{store.url}/out.pt")
    assert store.names() == {"other"}
    if store.url.startswith("s3"):
        bucket = store.url.split("/")[2]
        assert not store.fs.call_s3("list_multipart_uploads", Bucket=bucket).get("Uploads")


@pytest.mark.usefixtures("small_parts")
def test_multipart_upload_makes_one_file(store: Store) -> None:
    data = os.urandom(12 << 20)
    write([Piece(data), Piece(b"end")], f"{store.url}/out")
    assert store.get("out") == data + b"end"


@pytest.mark.parametrize(("nbytes", "block"), [(1, PART), (1 << 37, PART), (5 << 40, 583 << 20)])
def test_block_size_keeps_uploads_below_10_000_parts(
    monkeypatch: pytest.MonkeyPatch, nbytes: int, block: int
) -> None:
    options: dict[str, Any] = {}
    opened = MemoryFileSystem.open
    monkeypatch.setattr(
        MemoryFileSystem,
        "open",
        lambda fs, *args, **more: options.update(more) or opened(fs, *args),
    )
    with pytest.raises(ZeroDivisionError), _appearing("memory://parts/big", nbytes, True):
        1 / 0  # noqa: B018
    assert options == {"block_size": block}
    assert -(-nbytes // block) <= 10_000


@pytest.mark.parametrize("is_removed", [False, True])
@pytest.mark.parametrize("to", ["local", "remote"])
def test_source_changed_during_a_write_is_refused(
    store: Store, tmp_path: Path, to: str, is_removed: bool
) -> None:
    from ckpttool.io.write import write_file

    url = store.put("a.safetensors", save(STATE))
    pieces = [Piece(Span(url, 0, open_checkpoint(url).nbytes))]

    def change() -> list[bytes]:
        store.fs.rm(store.fs._strip_protocol(url))
        return [b"x"]

    if is_removed:
        pieces.append(Piece(Lazy(1, change)))
    else:
        store.put(
            "a.safetensors",
            save(
                {
                    key: value.clone() + 1 if value.is_floating_point() else value
                    for key, value in STATE.items()
                }
            ),
        )
    out = str(tmp_path / "out") if to == "local" else f"{store.url}/out"
    with pytest.raises(CkptError, match="was changed while it was read"):
        write_file(pieces, out)
    assert store.names() == (set() if is_removed else {"a.safetensors"})
    assert not list(tmp_path.iterdir())


def test_source_changed_between_two_output_files_is_refused(store: Store) -> None:
    """The names of the output files start with the name of the source."""
    from ckpttool.io.write_folder import write_folder

    url = store.put("a", save(STATE))
    span = Span(url, 0, open_checkpoint(url).nbytes)

    def change() -> list[bytes]:
        store.put("a", save({"other": torch.ones(span.length // 4)})[: span.length])
        return [b"x"]

    files = {"first": [Piece(span)], "between": [Piece(Lazy(1, change))], "second": [Piece(span)]}
    with pytest.raises(CkptError, match="was changed while it was read"):
        write_folder(files, f"{store.url}/a.parts")
    assert store.names() == {"a"}


def test_folders_are_written(store: Store, tmp_path: Path) -> None:
    url = store.put("a.pt", torch_zip(STATE))
    assert (
        main(["convert", url, "-o", f"{store.url}/shards/", "--max-shard-size", "100B", "--verify"])
        == 0
    )
    assert same(tensors(open_checkpoint(f"{store.url}/shards")), STATE)
    assert main(["remap", f"{store.url}/shards", *RENAME, "-o", f"{store.url}/m/", "--verify"]) == 0
    assert same(tensors(open_checkpoint(f"{store.url}/m")), RENAMED)
    assert main(["remap", f"{store.url}/m", "-o", f"{store.url}/d.dcp", "--verify"]) == 0
    for filename in store.names():
        if filename.startswith("d.dcp/"):
            path = tmp_path / filename
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(store.get(filename))
    into = {key: torch.zeros_like(value) for key, value in RENAMED.items()}
    dcp.load(into, checkpoint_id=tmp_path / "d.dcp")
    assert same(into, RENAMED)


def test_dcp_rename_copies_data_within_the_store(store: Store) -> None:
    url = store.put("a.pt", torch_zip(STATE))
    assert main(["remap", url, "-o", f"{store.url}/d.dcp"]) == 0
    open_checkpoint(f"{store.url}/d.dcp")
    data = f"{store.url}/d.dcp/__0_0.distcp"
    before = remote.cache.fetched[data]
    assert main(["remap", f"{store.url}/d.dcp", *RENAME, "-o", f"{store.url}/e.dcp"]) == 0
    assert remote.cache.fetched[data] - before <= remote.BLOCK  # only its small objects
    assert store.get("d.dcp/__0_0.distcp") == store.get("e.dcp/__0_0.distcp")
    assert same(tensors(open_checkpoint(f"{store.url}/e.dcp")), RENAMED)


def test_checkpoint_in_a_folder_of_a_store_is_never_replaced(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    old = store.put("old.safetensors", save({"w": torch.ones(40), "v": torch.ones(40)}))
    new = store.put("new.safetensors", save({"x": torch.zeros(40)}))
    out = f"{store.url}/m/"
    assert main(["convert", old, "-o", out, "--max-shard-size", "200B"]) == 0
    before = store.names()
    for options in ([], ["--force"]):
        assert main(["remap", new, "-o", out, *options]) == 2
        error = capsys.readouterr().err
        assert f"{out} holds a checkpoint: model-00001-of-00002.safetensors" in error
        assert "hint: name another folder, or remove it first" in error
    assert store.names() == before
    assert main(["undo", out]) == 2
    assert "files of a URL are never edited in place" in capsys.readouterr().err


def test_swap_weights_reads_and_writes_urls(store: Store) -> None:
    program = store.put("p.pt2", DATA / "tagger-torch-2.9.1.pt2")
    state = {
        key: value + 1 if value.is_floating_point() else value
        for key, value in tensors(open_checkpoint(program)).items()
    }
    new = store.put("new.pt", torch_zip(state))
    assert main(["swap-weights", program, new, "-o", f"{store.url}/q.pt2", "--verify"]) == 0
    assert same(tensors(open_checkpoint(f"{store.url}/q.pt2")), state)


def test_diff_reads_urls(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    left = store.put("a.pt", torch_zip(STATE))
    right = store.put(
        "b.safetensors", save({f"module.{key}": value for key, value in STATE.items()})
    )
    assert main(["diff", left, left, "--values"]) == 0
    capsys.readouterr()
    assert main(["diff", left, right, "--format", "json"]) == 1
    (fix,) = fixes_in(json.loads(capsys.readouterr().out))
    assert fix == f"ckpttool remap {left} --like {right} -o {store.url}/a.renamed.pt"
    assert main(shlex.split(fix)[1:]) == 0
    assert main(["diff", f"{store.url}/a.renamed.pt", right]) == 0


# URLs as operands


@pytest.mark.parametrize(
    ("folder", "filename", "joined"),
    [
        ("s3://b/m", "x.pt", "s3://b/m/x.pt"),
        ("s3://b/m/", "x.pt", "s3://b/m/x.pt"),
        ("memory://", "x.pt", "memory://x.pt"),
        ("simplecache::s3://b/m", "x.pt", "simplecache::s3://b/m/x.pt"),
        ("zip://m::s3://b/a.zip", "x.pt", "zip://m/x.pt::s3://b/a.zip"),
    ],
)
def test_join_name_and_parent_of_urls(folder: str, filename: str, joined: str) -> None:
    assert join(folder, filename) == joined
    assert name(joined) == filename
    assert parent(joined).rstrip("/") == folder.rstrip("/")


@pytest.mark.parametrize(
    "path", ["m.pt", "/a/b.pt", "a::b", "C:\\x", "dir:/x", "://x", "1a://x", "x/y://z"]
)
def test_local_path_is_not_a_url(path: str) -> None:
    assert not is_url(path)


def test_a_driver_that_cannot_read_ranges_is_asked_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """simplecache:: of older fsspec answers so for each file that it has not fetched yet."""
    memory = fsspec.filesystem("memory")
    url = Store(memory, "memory://ranges").put("m.pt", torch_zip({"model": STATE}))

    def refuse(*args: Any, **how: Any) -> None:
        raise AttributeError("no such file in the cache")

    monkeypatch.setattr(type(memory), "cat_ranges", refuse)
    assert same(tensors(ckpttool.open_checkpoint(f"{url}::model")), STATE)
    other = Store(memory, "memory://ranges").put("n.pt", torch_zip({"model": STATE}))
    monkeypatch.setattr(type(memory), "cat_file", lambda self, *rest, **options: 1 / 0)
    with pytest.raises(CkptError, match=r"n\.pt: ZeroDivisionError"):
        ckpttool.open_checkpoint(other)


def test_chained_urls_are_read(tmp_path: Path) -> None:
    url = Store(fsspec.filesystem("memory"), "memory://chain").put(
        "m.pt", torch_zip({"model": STATE})
    )
    assert same(tensors(ckpttool.open_checkpoint(f"simplecache::{url}::model")), STATE)
    with fsspec.open("memory://chain/a.zip", "wb") as file:
        import zipfile

        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("deep/m.safetensors", save(STATE))
    assert same(
        tensors(ckpttool.open_checkpoint("zip://deep/m.safetensors::memory://chain/a.zip")), STATE
    )
    assert same(tensors(ckpttool.open_checkpoint("zip://deep::memory://chain/a.zip")), STATE)


def test_file_urls_are_read_but_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file(STATE, tmp_path / "a.safetensors")
    url = (tmp_path / "a.safetensors").as_uri()
    assert same(tensors(ckpttool.open_checkpoint(url)), STATE)
    assert main(["remap", url, "-o", (tmp_path / "b.pt").as_uri()]) == 2
    assert f"hint: -o {tmp_path / 'b.pt'}" in capsys.readouterr().err
    assert main(["remap", url, "-o", f"simplecache::{url}", "--force"]) == 2
    assert "a chain of URLs is read, not written" in capsys.readouterr().err


@pytest.mark.parametrize(
    "filename",
    ["../x", "/x", "a/../x", "%2e%2e/x", "x?y", "x#y", "a::memory:", "memory://x", "*", ""],
)
def test_unsafe_name_in_a_remote_folder_is_refused(filename: str) -> None:
    assert safe_path("s3://b/m", filename) is None


def test_index_that_names_a_file_outside_its_folder_is_refused(store: Store) -> None:
    store.put("secret.safetensors", save(STATE))
    index = {"weight_map": dict.fromkeys(STATE, "../secret.safetensors")}
    url = store.put("m/model.safetensors.index.json", json.dumps(index).encode())
    with pytest.raises(CkptError) as error:
        open_checkpoint(url)
    assert "leads out of its folder" in str(error.value.problems[0])


# Errors


@pytest.fixture
def failing(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*words: str) -> str:
        assert main(list(words)) == 2
        out, err = capsys.readouterr()
        assert not out
        assert err.startswith("error: ")
        assert "\nhint: " in err
        assert "internal error" not in err
        return err

    return run


def test_missing_file_or_section_is_reported(store: Store, failing: Any) -> None:
    store.put("a.pt", torch_zip(STATE))
    assert "no such file" in failing("inspect", f"{store.url}/b.pt")
    assert "no such file" in failing("inspect", f"{store.url}/b/")
    assert "no file matches" in failing("inspect", f"{store.url}/b*.pt")
    assert "no section 'x'" in failing("inspect", f"{store.url}/a.pt::x")
    assert "no such file" in failing("remap", f"{store.url}/b.pt", "-o", f"{store.url}/c.pt")


def test_file_that_is_not_a_checkpoint_is_reported(store: Store, failing: Any) -> None:
    assert "is empty" in failing("inspect", store.put("empty.pt", b""))
    assert "truncated" in failing("inspect", store.put("cut.pt", torch_zip(STATE)[:-100]))
    assert "truncated" in failing("inspect", store.put("cut.safetensors", save(STATE)[:-1]))
    assert "HTML" in failing("inspect", store.put("page.pt", b"<!doctype html><html></html>"))


@NEEDS_S3
@pytest.mark.usefixtures("bucket")
def test_missing_bucket_is_reported(failing: Any, tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "a.safetensors")
    assert "no such file" in failing("inspect", "s3://no-such-bucket/a.pt")
    assert "bucket" in failing(
        "remap", str(tmp_path / "a.safetensors"), "-o", "s3://no-such-bucket/a.pt"
    )


def test_missing_driver_is_reported(monkeypatch: pytest.MonkeyPatch, failing: Any) -> None:
    # makes its import fail, as if it were not installed
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    err = failing("inspect", "gs://bucket/a.pt")
    assert "needs the Python package gcsfs" in err
    assert "hint: pip install 'ckpttool[gcs]', or only gcsfs" in err
    assert "ckpttool[gcs]" in failing("inspect", "simplecache::gs://bucket/a.pt")
    monkeypatch.setitem(sys.modules, "adlfs", None)
    assert "hint: pip install adlfs" in failing("inspect", "az://bucket/a.pt")


def test_unknown_scheme_is_reported(failing: Any) -> None:
    assert "no driver is known for s4://" in failing("inspect", "s4://bucket/a.pt")
    assert "did you mean memory://?" in failing("inspect", "memmory://bucket/a.pt")
    # parsed as a section: a chain would need file:///tmp/a.zip
    failing("inspect", "zip://x.pt::/tmp/a.zip")


@NEEDS_HTTP
def test_errors_of_web_servers(failing: Any) -> None:
    data = torch_zip(STATE)
    with web_server({"/a.pt": data}) as server:
        assert same(tensors(open_checkpoint(f"{server.url}/a.pt")), STATE)
        assert "no such file" in failing("inspect", f"{server.url}/b.pt")
        assert "credentials" in failing("inspect", f"{server.url}/secret.pt")
        assert "cannot do this" in failing(
            "remap", f"{server.url}/a.pt", "-o", f"{server.url}/c.pt", "--to", "ddp"
        )
    with web_server({"/a.pt": data * 100}, ranges=False) as server:
        assert "its server cannot send a part" in failing("inspect", f"{server.url}/a.pt")


@NEEDS_HTTP
def test_listing_page_is_read_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing is requested without a range; its body can be read twice."""

    page = b'<a href="rank_0.pt">rank_0.pt</a><a href="rank_1.pt">rank_1.pt</a>'
    files = {"/m/": page, **{f"/m/rank_{rank}.pt": torch_zip(STATE) for rank in range(2)}}
    with web_server(files) as server:
        found = open_checkpoint(f"{server.url}/m/rank_*.pt")
        assert same(tensors(found), STATE)

    async def read_twice(path: str, **headers: str) -> tuple[bytes, bytes]:
        import aiohttp

        async with (
            aiohttp.ClientSession(response_class=remote.BoundedResponse) as session,
            session.get(f"{server.url}{path}", headers=headers) as answer,
        ):
            return await answer.read(), await answer.read()

    with web_server(files) as server:
        assert (
            asyncio.run(read_twice("/m/rank_0.pt", Range="bytes=0-9"))
            == (files["/m/rank_0.pt"][:10],) * 2
        )
        for room in (0, -1):
            monkeypatch.setattr(remote, "_LISTING", len(page) + room)
            with pytest.raises(remote_errors.SendsTooMuch) if room else nullcontext():
                assert asyncio.run(read_twice("/m/")) == (page, page)


@NEEDS_HTTP
def test_unreachable_server_is_reported(failing: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert "check the network" in failing("inspect", f"http://127.0.0.1:{port}/a.pt")


def test_unknown_log_level_is_reported(monkeypatch: pytest.MonkeyPatch, failing: Any) -> None:
    monkeypatch.setenv("CKPTTOOL_LOG", "loud")
    assert "CKPTTOOL_LOG=loud" in failing("inspect", "memory://x")


def test_local_paths_do_not_import_fsspec(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "a.safetensors")
    code = (
        "import sys; from ckpttool.cli.app import main; status = main(sys.argv[1:]);"
        "assert not {'fsspec', 'torch', 'ckpttool.io.remote'} & sys.modules.keys();"
        " sys.exit(status)"
    )
    words = [
        "remap",
        str(tmp_path / "a.safetensors"),
        *RENAME,
        "-o",
        str(tmp_path / "b.safetensors"),
    ]
    subprocess.run([sys.executable, "-c", code, *words], check=True, capture_output=True)
