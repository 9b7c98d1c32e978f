"""One S3 server for all tests of remote files: a driver keeps the first endpoint that it connects
to.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest

from remote_servers import s3_server
from surroundings import upload_in_parts


@pytest.fixture(scope="session")
def endpoint() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """Return the S3 driver and the name of a bucket that only this test uses."""
    pytest.importorskip("s3fs", reason="the driver of s3:// is not installed")
    for variable, value in (
        ("ACCESS_KEY_ID", "me"),
        ("SECRET_ACCESS_KEY", "x"),
        ("DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(f"AWS_{variable}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    fs = fsspec.filesystem("s3")
    name = f"bucket-{zlib.crc32(request.node.nodeid.encode()):x}"
    fs.mkdir(name)
    return fs, name


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upload in parts of 5 MiB, the least that S3 allows."""
    upload_in_parts(monkeypatch, 5 << 20)
