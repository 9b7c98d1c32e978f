"""Reads the bytes of spans: whole, in chunks, or two of them side by side. Between the formats' index and `execute`."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ckpttool.checkpoint import Span
from ckpttool.errors import CkptError

CHUNK = 1 << 20  # bytes a read; larger ones were no faster, and memory stays flat


class SpanReader:
    """Reads spans in chunks through one reused buffer of `size` bytes; keeps the last file open."""

    def __init__(self, size: int = CHUNK) -> None:
        self._path = ""
        self._descriptor = -1
        self.buffer = bytearray(max(1, min(size, CHUNK)))

    def chunks(self, span: Span) -> Iterator[memoryview]:
        """The span's bytes; every chunk but the last fills the buffer, and is valid until the next one is asked for.

        Raises `CkptError` where the file cannot be read, or ends before the span does.
        """
        self._open(span.path)
        view = memoryview(self.buffer)
        for start in range(0, span.length, len(view)):
            chunk = view[: min(len(view), span.length - start)]
            self._fill(chunk, span, span.offset + start)
            yield chunk

    def _fill(self, chunk: memoryview, span: Span, offset: int) -> None:
        filled = 0
        while filled < len(chunk):
            try:
                count = os.preadv(self._descriptor, [chunk[filled:]], offset + filled)
            except OSError as error:
                raise CkptError(f"{span.path}: {error.strerror}", hint="check the disk it is on") from error
            if not count:
                raise CkptError(
                    f"{span.path} ends at byte {offset + filled:,}, it was longer when it was opened",
                    hint="it was changed while it was read: copy it again",
                )
            filled += count

    def _open(self, path: str) -> None:
        if path == self._path:
            return
        self.close()
        try:
            self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise CkptError(
                f"{path}: {error.strerror}", hint="the source must stay where it is until all of it is read"
            ) from error
        self._path = path

    def close(self) -> None:
        """Closes the file that is open."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._path, self._descriptor = "", -1


def read_span(span: Span) -> bytearray:
    """All bytes of the span. Raises `CkptError` where they cannot be read."""
    whole, at = bytearray(span.length), 0
    reader = SpanReader(span.length)
    try:
        for chunk in reader.chunks(span):
            whole[at : at + len(chunk)] = chunk
            at += len(chunk)
    finally:
        reader.close()
    return whole


def same_bytes(left: Span, right: Span) -> bool:
    """Whether two spans hold the same bytes, streamed."""
    if left == right:
        return True
    if left.length != right.length:
        return False
    a, b = SpanReader(left.length), SpanReader(right.length)
    try:
        # Full buffers are compared themselves: comparing views of them is a hundred times slower.
        return all(
            a.buffer == b.buffer if len(mine) == len(a.buffer) else bytes(mine) == bytes(theirs)
            for mine, theirs in zip(a.chunks(left), b.chunks(right))
        )
    finally:
        a.close()
        b.close()
