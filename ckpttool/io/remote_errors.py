"""Errors of stores and their drivers: which pass, and what a user can do about the others."""

from __future__ import annotations

import errno
import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from shlex import quote
from typing import TypeGuard, TypeVar

from fsspec.exceptions import FSTimeoutError

from ckpttool.core.errors import CkptError
from ckpttool.core.limits import limits

# Modules that drivers import, if the package to install has another name.
_PACKAGES = {
    "smbclient": "smbprotocol",
    "dropboxdrivefs": "dropboxdrivefs",
    "yarl": "aiohttp",
    "git": "pygit2",
}
# of ckpttool, with versions that work
_EXTRAS = {"s3fs": "s3", "gcsfs": "gcs", "huggingface_hub": "hf"}
_LOGIN = "check the credentials that the driver finds, and that they may do this"
_NETWORK = "check the network, and the endpoint that the driver is set to"
_ANY = "check the URL, the network, and what the driver is set to"
# Drivers share no classes for these, but their names are similar.
_NAMES = (
    (
        re.compile(
            "Credential|TokenRetrieval|Login|Auth|Gated|Profile|Forbidden|AccessDenied|Unauthorized"
        ),
        _LOGIN,
    ),
    (
        re.compile(
            "Connect|Timeout|Endpoint|DNS|gaierror|SSL|ServerDisconnected|IncompleteRead|Payload"
        ),
        _NETWORK,
    ),
)
_PASSING = re.compile(
    "Timeout|Disconnected|IncompleteRead|Payload|ConnectionReset|ConnectionClosed|SlowDown|Throttl"
)
_PASSING_NUMBERS = frozenset(
    (errno.ECONNRESET, errno.EPIPE, errno.EBUSY, errno.EAGAIN, errno.ETIMEDOUT)
)
_PASSING_STATUS = frozenset((408, 425, 429, 500, 502, 503, 504))

_WAITS = (0.2, 0.5, 1.0, 2.0)  # seconds before a request is made again

Answer = TypeVar("Answer")
log = logging.getLogger(__name__)


class SendsTooMuch(OSError): ...


class CameShort(OSError):
    """An answer has fewer bytes than the range (`start`, `end`) in the request."""

    def __init__(self, start: int, end: int, came: int) -> None:
        super().__init__(f"asked for {end - start:,} bytes from byte {start:,}, got {came:,}")


def patiently(url: str, ask: Callable[[], Answer]) -> Answer:
    """Return the result of `ask`; retry for some seconds after errors that may pass. Raises
    `CkptError`.
    """
    for wait in _WAITS:
        try:
            return ask()
        except Exception as error:
            if not is_passing(error):
                with answered(url):
                    raise
            log.info("%s: asked again in %s s: %s", url, wait, _text(error))
        time.sleep(wait)
    with answered(url):
        return ask()


@contextmanager
def answered(url: str) -> Iterator[None]:
    """Turn whatever the driver of the URL raises inside into a `CkptError`."""
    try:
        yield
    except (CkptError, MemoryError):
        raise
    except Exception as error:  # drivers raise what they like, their libraries too
        raise _explained(url, error) from error


def is_passing(error: BaseException) -> bool:
    """Return True if the same request may succeed a moment later: throttled, cut off, a busy
    server.

    A server that is silent for too long, or that refuses the connection, is not asked again.
    """
    if isinstance(error, (FSTimeoutError, SendsTooMuch)):
        return False
    if isinstance(error, CameShort):
        return True
    response = getattr(error, "response", None)
    status = None
    if isinstance(response, dict):  # of botocore
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    if getattr(error, "status", status) in _PASSING_STATUS:
        return True
    if getattr(error, "errno", None) in _PASSING_NUMBERS:
        return True
    if any(_PASSING.search(kind.__name__) for kind in type(error).__mro__):
        return True
    return error.__cause__ is not None and is_passing(error.__cause__)


def is_failure(cause: BaseException | None) -> TypeGuard[BaseException]:
    """Return True if a file that a driver calls missing may exist: access was denied, or the store
    did not answer.
    """
    return getattr(cause, "status", 404) not in (404, 410) or (
        isinstance(cause, OSError)
        and not isinstance(cause, (FileNotFoundError, NotADirectoryError))
    )


def _explained(url: str, error: Exception) -> CkptError:
    scheme = url.partition("://")[0].rpartition("::")[2]
    if isinstance(error, ImportError):
        return _no_driver(url, scheme, error)
    if isinstance(error, ValueError) and str(error).startswith("Protocol not known"):
        from fsspec.registry import known_implementations

        unknown = str(error).partition(": ")[2]
        near = get_close_matches(unknown, known_implementations, 1)
        hint = (
            f"did you mean {near[0]}://?"
            if near
            else ("fsspec reads s3://, gs://, az://, hf://, https:// and others")
        )
        if "::" in url:
            hint += "; in a chain (simplecache::s3://…) every part with a path is a URL"
        return CkptError(f"{url}: no driver is known for {unknown}://", hint=hint)
    if isinstance(error, FileNotFoundError):
        return CkptError(
            f"no such file, folder or bucket: {url}", hint="check the URL: scheme, bucket and key"
        )
    if isinstance(error, FileExistsError):
        return CkptError(
            f"{url} exists: another process has written it meanwhile",
            hint="look at it, then name another place",
        )
    if isinstance(error, SendsTooMuch):
        return CkptError(
            f"{url}: {error}",
            hint="its server cannot send a part, or is hostile: download it first",
        )
    if isinstance(error, CameShort):
        hint = (
            "it was changed while it was read, or its server cannot send a part: download it first"
        )
        return CkptError(f"{url}: {error}", hint=hint)
    if isinstance(error, FSTimeoutError):
        return CkptError(f"{url}: no answer: {limits().named('remote_seconds')}", hint=_NETWORK)
    if isinstance(error, NotImplementedError):
        return CkptError(
            f"{url}: the driver of {scheme}:// cannot do this", hint="use a local file"
        )
    if isinstance(error, PermissionError) or getattr(error, "status", None) in (401, 403):
        return CkptError(f"{url}: {_text(error)}", hint=_LOGIN)
    names = " ".join(kind.__name__ for kind in type(error).__mro__)
    hint = next((hint for pattern, hint in _NAMES if pattern.search(names)), _ANY)
    return CkptError(f"{url}: {_text(error)}", hint=hint)


def _no_driver(url: str, scheme: str, error: ImportError) -> CkptError:
    cause = error.__cause__ if isinstance(error.__cause__, ImportError) else error
    module = (cause.name or "").partition(".")[0]
    if not module:
        return CkptError(f"{url}: the driver of {scheme}:// cannot be loaded", hint=_text(error))
    package = _PACKAGES.get(module, module)
    extra = f"'ckpttool[{_EXTRAS[module]}]', or only " if module in _EXTRAS else ""
    return CkptError(
        f"{url}: {scheme}:// needs the Python package {package}, which is not installed",
        hint=f"pip install {extra}{package}",
    )


def _text(error: Exception) -> str:
    said = " ".join(str(error).split()) or quote(repr(error))
    return said if isinstance(error, OSError) else f"{type(error).__name__}: {said}"
