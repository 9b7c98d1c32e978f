"""Outputs behind URLs: each request that changes the store fails once, and signals end uploads."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from command import main
from remote_servers import s3_server

pytestmark = pytest.mark.skipif(
    not (find_spec("s3fs") and find_spec("moto")), reason="s3fs or moto is not installed"
)

ALL_POINTS = os.environ.get("CKPTTOOL_FAULTS") == "all"
CHANGES = frozenset(
    [
        *("put_object", "copy_object", "delete_object", "delete_objects"),
        *("create_multipart_upload", "upload_part", "complete_multipart_upload"),
    ]
)
RENAME = ["--rule", "a.{x} => z.{x}"]
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the file system of a store with an empty bucket named ``bucket``."""
    import fsspec

    for name, value in (
        ("ACCESS_KEY_ID", "me"),
        ("SECRET_ACCESS_KEY", "x"),
        ("DEFAULT_REGION", "us-east-1"),
    ):
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
    """Count the requests that change the store; number `at` fails as if the store were
    overloaded.
    """

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


CASES = {
    "file": ("in.safetensors", "s3://bucket/out.safetensors", (), ()),
    "over another": (
        "in.safetensors",
        "s3://bucket/out.safetensors",
        ("old.safetensors",),
        ("--force",),
    ),
    "folder": ("in.safetensors", "s3://bucket/out/", (), ("--max-shard-size", "200KB")),
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
        left = objects(bucket)
        complete = [path for path in left if path.endswith((INDEX, "out.safetensors"))]
        assert left in (old, new) or not complete, (at, sorted(left))
        if left == new:
            bucket.rm(list(left))
        assert main(line) == 0, at
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
            [*line, "-o", "s3://bucket/out.safetensors", "--force"],
            stderr=subprocess.PIPE,
            text=True,
        )
        deadline = time.monotonic() + 60
        while (
            not bucket.list_multipart_uploads("bucket")
            and process.poll() is None
            and time.monotonic() < deadline
        ):
            time.sleep(0.01)
        time.sleep(wait)
        process.send_signal(number)
        err = process.communicate(timeout=300)[1]
        assert process.returncode in (0, 128 + number), err
        assert not bucket.list_multipart_uploads("bucket")
        assert process.returncode == 0 or "Traceback" not in err
