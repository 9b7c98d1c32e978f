"""Web servers, which nobody vouches for: an answer is read as far as it was asked for, and no further.

Imported only for URLs of the web, by way of fsspec, which needs aiohttp for them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import aiohttp

from ckpttool.io.remote.errors import SendsTooMuch

_LISTING = 1 << 26  # bytes of an answer to a request for no range: a page that lists files
_CHUNK = 1 << 16
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


class BoundedResponse(aiohttp.ClientResponse):
    """An answer whose body is read in chunks, until it is longer than the range that was asked for."""

    async def read(self) -> bytes:
        """The body. Raises `SendsTooMuch` where it goes on behind what was asked for."""
        if self._body is None:
            await self._read_to(_asked(self.request_info.headers))
        return await super().read()

    async def _read_to(self, most: int) -> None:
        body = bytearray()
        async for chunk in self.content.iter_chunked(_CHUNK):
            body += chunk
            if len(body) > most:
                self.close()
                raise SendsTooMuch(f"its server sends more than the {most:,} bytes that were asked for")
        self._body = bytes(body)


def _asked(headers: Mapping[str, str]) -> int:
    found = _RANGE.fullmatch(headers.get("Range", ""))
    return _LISTING if found is None else int(found[2]) - int(found[1]) + 1


def options(configured: Mapping[str, Any]) -> dict[str, Any]:
    """The options of fsspec's driver, beside those that the user has configured for its client."""
    client = {"timeout": aiohttp.ClientTimeout(total=None), **configured.get("client_kwargs", {})}
    return {"client_kwargs": {**client, "response_class": BoundedResponse}}
