"""What drivers raise: what is asked again, what is a failure to look, and the words of each."""

from __future__ import annotations

import errno
import time
from typing import Any

import pytest
from fsspec.exceptions import FSTimeoutError

from ckpttool.core.errors import CkptError
from ckpttool.io.remote import CameShort, SendsTooMuch, answered, is_failure, is_passing, patiently


class OfDriver(Exception):
    """An exception of a library, with what such carry."""

    def __init__(self, **own: Any) -> None:
        super().__init__("of a driver")
        self.__dict__.update(own)


class ServerDisconnectedError(Exception):
    """As aiohttp calls it."""


class SlowDown(Exception):
    """As S3 says it."""


def caused(by: Exception) -> Exception:
    error = ValueError("wrapped")
    error.__cause__ = by
    return error


def of_boto(status: int) -> Exception:
    return OfDriver(response={"ResponseMetadata": {"HTTPStatusCode": status}})


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        *((OfDriver(status=status), True) for status in (408, 425, 429, 500, 502, 503, 504)),
        *((OfDriver(status=status), False) for status in (200, 400, 401, 403, 404, 410, 501)),
        *((of_boto(status), status == 503) for status in (403, 503)),
        (OfDriver(response="text"), False),
        *((OSError(number, "said"), True) for number in (errno.ECONNRESET, errno.EPIPE, errno.ETIMEDOUT)),
        *((OSError(number, "said"), False) for number in (errno.ENOENT, errno.ECONNREFUSED, errno.EACCES)),
        (ServerDisconnectedError(), True),
        (SlowDown(), True),
        (TimeoutError(), True),
        (FSTimeoutError(), False),  # silence for as long as the limit
        (SendsTooMuch("too much"), False),
        (CameShort(3, 9, 2), True),
        (caused(SlowDown()), True),
        (caused(KeyError("x")), False),
    ],
    ids=repr,
)
def test_what_may_be_answered_a_moment_later_is_asked_again(error: Exception, passes: bool) -> None:
    assert is_passing(error) == passes


@pytest.mark.parametrize("times", [0, 1, 4, 5])
def test_it_is_asked_so_often_and_no_more(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    left = [times]

    def ask() -> str:
        if left[0]:
            left[0] -= 1
            raise SlowDown
        return "answer"

    if times <= 4:
        assert patiently("m://x", ask) == "answer"
    else:
        with pytest.raises(CkptError, match="m://x: SlowDown"):
            patiently("m://x", ask)
    assert len(slept) == min(times, 4)
    assert slept == sorted(slept)


def test_what_does_not_pass_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(time, "sleep", lambda seconds: asked.append(0))

    def ask() -> None:
        asked.append(1)
        raise OfDriver(status=403)

    with pytest.raises(CkptError) as caught:
        patiently("m://x", ask)
    assert asked == [1]
    assert "credentials" in caught.value.hint


@pytest.mark.parametrize(
    ("cause", "fails"),
    [
        (None, False),
        (FileNotFoundError(), False),
        (NotADirectoryError(), False),
        (OfDriver(status=404), False),
        (OfDriver(status=410), False),
        (ValueError(), False),
        (OfDriver(status=403), True),
        (OfDriver(status=500), True),
        (PermissionError(), True),
        (ConnectionResetError(), True),
    ],
    ids=repr,
)
def test_a_file_that_could_not_be_looked_for_is_not_missing(cause: BaseException | None, fails: bool) -> None:
    assert is_failure(cause) == fails


def missing(name: str, by: ImportError | None = None) -> ImportError:
    error = ImportError("no module", name=name)
    error.__cause__ = by
    return error


@pytest.mark.parametrize(
    ("error", "message", "hint"),
    [
        (missing("gcsfs.core"), "gs:// needs the Python package gcsfs, which is not", "pip install 'ckpttool[gcs]'"),
        (missing("smbclient"), "the Python package smbprotocol", "pip install smbprotocol"),
        (missing("adlfs", missing("yarl")), "the Python package aiohttp", "pip install aiohttp"),
        (missing(""), "the driver of gs:// cannot be loaded", "ImportError: no module"),
        (ValueError("Protocol not known: memmory"), "no driver is known for memmory://", "did you mean memory://?"),
        (ValueError("Protocol not known: q"), "no driver is known for q://", "every part with a path is a URL"),
        (ValueError("something else"), "x::gs://b/a: ValueError: something else", "check the URL, the network"),
        (FileNotFoundError(), "no such file, folder or bucket: x::gs://b/a", "check the URL"),
        (FileExistsError(), "exists: another process has written it meanwhile", "--force"),
        (SendsTooMuch("sends more"), "x::gs://b/a: sends more", "hostile"),
        (CameShort(3, 9, 2), "asked for 6 bytes from byte 3, got 2", "changed while it was read"),
        (FSTimeoutError(), "no answer: ", "check the network"),
        (NotImplementedError(), "the driver of gs:// cannot do this", "use a local file"),
        (PermissionError(13, "denied"), "x::gs://b/a: [Errno 13] denied", "check the credentials"),
        (OfDriver(status=401), "OfDriver: of a driver", "check the credentials"),
        (OfDriver(status=500), "OfDriver: of a driver", "check the URL, the network"),
        (ServerDisconnectedError("a\n b"), "ServerDisconnectedError: a b", "check the network"),
        (KeyError(), "x::gs://b/a: KeyError: ", "check the URL, the network"),
    ],
    ids=repr,
)
def test_each_failure_has_its_words(error: Exception, message: str, hint: str) -> None:
    with pytest.raises(CkptError) as caught, answered("x::gs://b/a"):
        raise error
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [CkptError("as it is", hint="so"), MemoryError("much")])
def test_what_is_said_already_is_left_as_it_is(error: BaseException) -> None:
    with pytest.raises(type(error), match=r"as it is|much"), answered("m://x"):
        raise error
