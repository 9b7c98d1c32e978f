"""Exceptions of drivers: which are retried, which mean that a file is missing, and their
messages.
"""

from __future__ import annotations

import errno
import time
from typing import Any

import pytest
from fsspec.exceptions import FSTimeoutError

from ckpttool import CkptError
from ckpttool.io.remote_errors import (
    CameShort,
    SendsTooMuch,
    answered,
    is_failure,
    is_passing,
    patiently,
)


class DriverError(Exception):
    """An exception of a library, with the attributes that such exceptions have."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__("from a driver")
        self.__dict__.update(attributes)


class ServerDisconnectedError(Exception):
    """Named as in aiohttp."""


class SlowDown(Exception):
    """Named as the error code of S3."""


def caused(by: Exception) -> Exception:
    error = ValueError("wrapped")
    error.__cause__ = by
    return error


def boto_error(status: int) -> Exception:
    return DriverError(response={"ResponseMetadata": {"HTTPStatusCode": status}})


@pytest.mark.parametrize(
    ("error", "is_transient"),
    [
        *((DriverError(status=status), True) for status in (408, 425, 429, 500, 502, 503, 504)),
        *((DriverError(status=status), False) for status in (200, 400, 401, 403, 404, 410, 501)),
        *((boto_error(status), status == 503) for status in (403, 503)),
        (DriverError(response="text"), False),
        *(
            (OSError(number, "said"), True)
            for number in (errno.ECONNRESET, errno.EPIPE, errno.ETIMEDOUT)
        ),
        *(
            (OSError(number, "said"), False)
            for number in (errno.ENOENT, errno.ECONNREFUSED, errno.EACCES)
        ),
        (ServerDisconnectedError(), True),
        (SlowDown(), True),
        (TimeoutError(), True),
        (FSTimeoutError(), False),  # the full time limit has passed already
        (SendsTooMuch("too much"), False),
        (CameShort(3, 9, 2), True),
        (caused(SlowDown()), True),
        (caused(KeyError("x")), False),
    ],
    ids=repr,
)
def test_only_transient_errors_are_retried(error: Exception, is_transient: bool) -> None:
    assert is_passing(error) == is_transient


@pytest.mark.parametrize("failures", [0, 1, 4, 5])
def test_request_is_retried_four_times(monkeypatch: pytest.MonkeyPatch, failures: int) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    left = [failures]

    def request() -> str:
        if left[0]:
            left[0] -= 1
            raise SlowDown
        return "answer"

    if failures <= 4:
        assert patiently("m://x", request) == "answer"
    else:
        with pytest.raises(CkptError, match="m://x: SlowDown"):
            patiently("m://x", request)
    assert len(slept) == min(failures, 4)
    assert slept == sorted(slept)


def test_permanent_error_is_not_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(time, "sleep", lambda seconds: calls.append(0))

    def request() -> None:
        calls.append(1)
        raise DriverError(status=403)

    with pytest.raises(CkptError) as caught:
        patiently("m://x", request)
    assert calls == [1]
    assert "credentials" in caught.value.hint


@pytest.mark.parametrize(
    ("cause", "fails"),
    [
        (None, False),
        (FileNotFoundError(), False),
        (NotADirectoryError(), False),
        (DriverError(status=404), False),
        (DriverError(status=410), False),
        (ValueError(), False),
        (DriverError(status=403), True),
        (DriverError(status=500), True),
        (PermissionError(), True),
        (ConnectionResetError(), True),
    ],
    ids=repr,
)
def test_failed_lookup_is_not_a_missing_file(cause: BaseException | None, fails: bool) -> None:
    assert is_failure(cause) == fails


def missing_module(name: str, by: ImportError | None = None) -> ImportError:
    error = ImportError("no module", name=name)
    error.__cause__ = by
    return error


@pytest.mark.parametrize(
    ("error", "message", "hint"),
    [
        (
            missing_module("gcsfs.core"),
            "gs:// needs the Python package gcsfs, which is",
            "pip install 'ckpttool[gcs]'",
        ),
        (missing_module("smbclient"), "the Python package smbprotocol", "pip install smbprotocol"),
        (
            missing_module("adlfs", missing_module("yarl")),
            "the Python package aiohttp",
            "pip install aiohttp",
        ),
        (missing_module(""), "the driver of gs:// cannot be loaded", "ImportError: no module"),
        (
            ValueError("Protocol not known: memmory"),
            "no driver is known for memmory://",
            "did you mean memory://?",
        ),
        (
            ValueError("Protocol not known: q"),
            "no driver is known for q://",
            "every part with a path is a URL",
        ),
        (
            ValueError("something else"),
            "x::gs://b/a: ValueError: something else",
            "check the URL, the network",
        ),
        (FileNotFoundError(), "no such file, folder or bucket: x::gs://b/a", "check the URL"),
        (FileExistsError(), "exists: another process has written it meanwhile", "another place"),
        (SendsTooMuch("sends more"), "x::gs://b/a: sends more", "hostile"),
        (CameShort(3, 9, 2), "asked for 6 bytes from byte 3, got 2", "changed while it was read"),
        (FSTimeoutError(), "no answer: ", "check the network"),
        (NotImplementedError(), "the driver of gs:// cannot do this", "use a local file"),
        (PermissionError(13, "denied"), "x::gs://b/a: [Errno 13] denied", "check the credentials"),
        (DriverError(status=401), "DriverError: from a driver", "check the credentials"),
        (DriverError(status=500), "DriverError: from a driver", "check the URL, the network"),
        (TimeoutError(), "x::gs://b/a: ", "check the network"),
        (ServerDisconnectedError("a\n b"), "ServerDisconnectedError: a b", "check the network"),
        (KeyError(), "x::gs://b/a: KeyError: ", "check the URL, the network"),
    ],
    ids=repr,
)
def test_message_and_hint_of_each_error(error: Exception, message: str, hint: str) -> None:
    with pytest.raises(CkptError) as caught, answered("x::gs://b/a"):
        raise error
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert caught.value.__cause__ is error


def test_errors_of_botocore_get_a_hint() -> None:
    exceptions = pytest.importorskip("botocore.exceptions")
    for error, hint in (
        (exceptions.NoCredentialsError(), "credentials"),
        (exceptions.EndpointConnectionError(endpoint_url="x"), "network"),
        (exceptions.ConnectTimeoutError(endpoint_url="x"), "network"),
    ):
        with pytest.raises(CkptError) as raised, answered("s3://b/x"):
            raise error
        assert hint in raised.value.hint
        assert "\n" not in raised.value.message


@pytest.mark.parametrize("error", [CkptError("as it is", hint="so"), MemoryError("much")])
def test_errors_with_a_message_pass_unchanged(error: BaseException) -> None:
    with pytest.raises(type(error), match=r"as it is|much"), answered("m://x"):
        raise error
