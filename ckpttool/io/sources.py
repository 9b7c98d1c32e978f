"""Which sources tensors are read from: noted by those who read them, asked by `files.sources_stay`."""

from __future__ import annotations

streamed: set[str] = set()  # URLs, since `files.sources_stay` was last entered


def note_streamed(url: str) -> None:
    """Notes that the tensors of the URL are being read."""
    streamed.add(url)
