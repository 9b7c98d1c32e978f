"""Outputs behind URLs: each request that changes the store fails once, and signals end uploads."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckpttool.cli.app import main
from ckpttool.io.remote_journal import JOURNAL
from ckpttool.io.temporary import me, owner_of
from remote_servers import s3_server

pytestmark = pytest.mark.skipif(not (find_spec("s3fs") and find_spec("moto")), reason="s3fs or moto is not installed")

ALL_POINTS = os.environ.get("CKPTTOOL_FAULTS") == "all"
CHANGES = frozenset(
    [
        *("put_object", "copy_object", "delete_object", "delete_objects"),
        *("create_multipart_upload", "upload_part", "complete_multipart_upload"),
    ]
)
RENAME = ["--rule", "a.{x} => z.{x}"]


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the file system of a store with an empty bucket named ``bucket``."""
    import fsspec

    for name, value in (("ACCESS_KEY_ID", "me"), ("SECRET_ACCESS_KEY", "x"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    fsspec.filesystem("s3").clear_instance_cache()
    fs = fsspec.filesystem("s3")
    if fs.exists("bucket"):
        fs.rm("bucket", recursive=True)
    fs.mkdir("bucket")
    yield fs
    fs.clear_instance_cache()


class Failing:
    """Count the requests that change the store; number `at` fails as if the store were overloaded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from fsspec.asyn import sync_wrapper
        from s3fs import S3FileSystem

        self.at, self.seen = -1, 0
        call = S3FileSystem._call_s3

        async def failing(fs: Any, method: str, *args: Any, **how: Any) -> Any:
            if method in CHANGES:
                self.seen += 1
                if self.seen - 1 == self.at:
                    raise OSError(errno.EIO, "Slow Down")
            return await call(fs, method, *args, **how)

        monkeypatch.setattr(S3FileSystem, "_call_s3", failing)
        monkeypatch.setattr(S3FileSystem, "call_s3", sync_wrapper(failing))


def objects(fs: Any) -> dict[str, bytes]:
    fs.invalidate_cache()
    return {path: fs.cat_file(path) for path in fs.find("bucket", withdirs=False)}


def without_temporary(found: dict[str, bytes]) -> dict[str, bytes]:
    return {path: data for path, data in found.items() if not any(map(owner_of, path.split("/")))}


CASES = {
    "file": ("in.safetensors", "s3://bucket/out.safetensors", (), ()),
    "over another": ("in.safetensors", "s3://bucket/out.safetensors", ("old.safetensors",), ("--force",)),
    "folder": ("in.safetensors", "s3://bucket/out/", (), ("--max-shard-size", "200KB")),
    "folder, over another": ("in.safetensors", "s3://bucket/out/", ("old/",), ("--max-shard-size", "200KB", "--force")),
}


@pytest.mark.parametrize("name", CASES)
def test_failed_request_leaves_the_old_or_the_new_output(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    save_file({"a.w": torch.arange(100_000.0), "a.b": torch.ones(70_000)}, "in.safetensors")
    save_file({"old": torch.ones(60_000), "older": torch.ones(60_000)}, "old.safetensors")
    source, out, before, options = CASES[name]
    command = ["convert", source] if "--max-shard-size" in options else ["remap", source, *RENAME]
    line = [*command, "-o", out, *options]

    def start() -> dict[str, bytes]:
        failing.at = -1
        if bucket.exists("bucket/out") or bucket.exists("bucket/out.safetensors"):
            bucket.rm(bucket.find("bucket"))
        if before:
            if out.endswith("/"):
                assert main(["convert", "old.safetensors", "-o", out, "--max-shard-size", "200KB"]) == 0
            else:
                bucket.put("old.safetensors", "bucket/out.safetensors")
        found = objects(bucket)
        failing.seen = 0
        return found

    failing = Failing(monkeypatch)
    old = start()
    assert main(line) == 0
    new, count = objects(bucket), failing.seen
    assert count >= 1
    for at in range(0, count, 1 if ALL_POINTS else max(1, count // 2)):
        assert start() == old
        failing.at = at
        assert main(line) == 2, at
        failing.at = -1
        now = without_temporary(objects(bucket))
        marker = "model.safetensors.index.json"
        complete = [path for path in now if path.endswith(marker)] if out.endswith("/") else list(now)
        assert now in (old, new, {}) or not complete, (at, sorted(now))
        left = objects(bucket)
        unfinished = any(path.endswith(f"/{JOURNAL}") for path in left)
        assert unfinished or now in (old, new, {}) or not complete, at
        if complete:
            assert main(["inspect", out]) == (2 if unfinished else 0), at
        assert objects(bucket) == left, at
        assert main(["undo", out]) == 0 or not unfinished, at
        assert without_temporary(objects(bucket)) in (old, new, {}), at
        assert main([*line, *([] if "--force" in line else ["--force"])]) == 0, at
        assert objects(bucket) == new, at
        assert not bucket.list_multipart_uploads("bucket")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of 100 MiB, whose upload takes several parts."""
    path = tmp_path_factory.mktemp("large") / "in.safetensors"
    save_file({"a.w": torch.zeros(25 << 20, dtype=torch.float32)}, path)
    return path


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signal_aborts_the_upload(bucket: Any, large: Path, number: signal.Signals) -> None:
    line = [sys.executable, "-m", "ckpttool", "remap", str(large), *RENAME]
    for wait in (0.0, 0.1, 0.3, 0.7) if ALL_POINTS else (0.05,):
        process = subprocess.Popen(
            [*line, "-o", "s3://bucket/out.safetensors", "--force"], stderr=subprocess.PIPE, text=True
        )
        deadline = time.monotonic() + 60
        while not bucket.list_multipart_uploads("bucket") and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(wait)
        process.send_signal(number)
        err = process.communicate(timeout=300)[1]
        assert process.returncode in (0, 128 + number), err
        assert not bucket.list_multipart_uploads("bucket")
        assert process.returncode == 0 or "Traceback" not in err


def test_next_writer_removes_leftovers_of_a_dead_process(bucket: Any, tmp_path: Path) -> None:
    dead = replace(me(), pid=1 << 23)
    left = f"bucket/out/.model.pt.{dead}-00000000.ckpttool.tmp"
    bucket.pipe(f"{left}/new/model.pt", b"half")
    with bucket.open("bucket/out/model.pt", "wb") as file:
        torch.save({"a": torch.ones(2)}, file)
    assert main(["inspect", "s3://bucket/out"]) == 0
    bucket.invalidate_cache()
    assert bucket.exists(left)
    torch.save({"a": torch.zeros(2)}, tmp_path / "in.pt")
    line = ["convert", str(tmp_path / "in.pt"), "--max-shard-size", "1KB", "-o"]
    assert main([*line, "s3://bucket/out/"]) == 0
    bucket.invalidate_cache()
    assert not bucket.exists(left)
    assert bucket.exists("bucket/out/model.pt")
