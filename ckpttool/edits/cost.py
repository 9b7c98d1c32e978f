"""What writing an output takes, and what has proved it: bytes that are read, that are written, and memory."""

from __future__ import annotations

from ckpttool.checkpoint import Lazy, Span
from ckpttool.io.files import size
from ckpttool.io.pieces import Files, Link, nbytes_of
from ckpttool.json_schema import COUNT, record
from ckpttool.values import dataclass
from ckpttool.words import human_bytes


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes. `memory` is the most that is held of values at a time: where all is copied in small parts, none is."""

    read: int
    written: int
    memory: int

    def __str__(self) -> str:
        held = f"holds {human_bytes(self.memory)} of values at most" if self.memory else "holds no values"
        return f"reads {human_bytes(self.read)}, writes {human_bytes(self.written)}, {held}"


COST = record(Cost, {"read": COUNT, "written": COUNT, "memory": COUNT})


@dataclass(frozen=True, slots=True)
class Verified:
    """Bytes of an output's tensors that were proved: by checksums of the store that holds them, or `read` back."""

    by_checksum: int
    read: int

    def __str__(self) -> str:
        by_store = f"{human_bytes(self.by_checksum)} by checksums of its store, " if self.by_checksum else ""
        return f"every tensor of the output: {by_store}{human_bytes(self.read)} read back and compared"


VERIFIED = record(Verified, {"by_checksum": COUNT, "read": COUNT})


def cost_of(files: Files, copies: bool = True) -> Cost:
    """What it takes to write the files, as they are laid out; a file that is taken over takes nothing unless it is one
    that it `copies`.
    """
    links = [content for content in files.values() if isinstance(content, Link)]
    copied = sum(size(link.path) for link in links) if copies else 0
    pieces = [piece for content in files.values() if not isinstance(content, Link) for piece in content]
    data = [piece.data for piece in pieces]
    lazy = [one for one in data if isinstance(one, Lazy)]
    read = sum(one.length for one in data if isinstance(one, Span))
    read += sum(one.length if one.reads is None else one.reads for one in lazy)
    return Cost(copied + read, copied + nbytes_of(pieces), max((one.held for one in lazy), default=0))
