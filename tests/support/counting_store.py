"""A store in memory that answers late and counts: requests, and rounds of requests side by side."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import fsspec
from fsspec.asyn import AsyncFileSystem

_DELAY = 0.002  # seconds before an answer, so that requests side by side overlap


class CountingStore(AsyncFileSystem):
    """Files by path. A round begins with a request while no other is under way."""

    protocol = "counting"
    cachable = False
    files: ClassVar[dict[str, bytes]] = {}
    requests = 0
    rounds = 0
    under_way = 0

    async def _answer(self) -> None:
        store = CountingStore
        store.requests += 1
        store.rounds += store.under_way == 0
        store.under_way += 1
        await asyncio.sleep(_DELAY)
        store.under_way -= 1

    async def _cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        await self._answer()
        return self._content(path)[start:end]

    async def _info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        await self._answer()
        path = self._strip_protocol(path).strip("/")
        if path in self.files:
            return {"name": path, "size": len(self.files[path]), "type": "file", "ETag": "1"}
        if any(name.startswith(f"{path}/") for name in self.files):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    async def _ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        await self._answer()
        path = self._strip_protocol(path).strip("/")
        rows = [
            {"name": name, "size": len(content), "type": "file", "ETag": "1"}
            for name, content in self.files.items()
            if name.startswith(f"{path}/")
        ]
        if not rows:
            raise FileNotFoundError(path)
        return rows if detail else [row["name"] for row in rows]

    def _content(self, path: str) -> bytes:
        path = self._strip_protocol(path).strip("/")
        if path not in self.files:
            raise FileNotFoundError(path)
        return self.files[path]


fsspec.register_implementation("counting", CountingStore, clobber=True)


def counted() -> tuple[int, int]:
    """Return requests and rounds since the last call."""
    counts = CountingStore.requests, CountingStore.rounds
    CountingStore.requests = CountingStore.rounds = 0
    return counts
