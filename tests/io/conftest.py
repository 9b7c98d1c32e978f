"""One S3 store for all tests of remote files: a driver keeps the endpoint that it found first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from remote_servers import s3_server


@pytest.fixture(scope="session")
def endpoint() -> Iterator[str]:
    with s3_server() as url:
        yield url
