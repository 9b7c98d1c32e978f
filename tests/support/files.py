"""Helpers for files: write pieces without optimizations, measure peak memory, read the bytes of
tensors.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import ckpttool
from ckpttool import Checkpoint


def write(checkpoint: Checkpoint, path: str | Path) -> str:
    """Write the checkpoint and return the path as a string."""
    ckpttool.write(checkpoint, str(path), force=True, no_fsync=True)
    return str(path)


def write_pieces(pieces: Iterable[Any], path: str | Path) -> str:
    """Write the pieces one after the other and return the path as a string."""
    with open(path, "wb") as out:
        for piece in pieces:
            chunks = list(content(piece.data))
            written = sum(out.write(chunk) for chunk in chunks)
            assert written == piece.nbytes
            if piece.crc is not None:
                for chunk in chunks:
                    piece.crc.value = zlib.crc32(chunk, piece.crc.value)
    return str(path)


def content(part: Any) -> Iterator[bytes]:
    """Yield the bytes of a part of a storage: of a file, computed, or in memory."""
    if hasattr(part, "produce"):
        for inner in part.produce():
            yield from content(inner)
    elif hasattr(part, "path"):
        with open(part.path, "rb") as source:
            source.seek(part.offset)
            yield source.read(part.length)
    else:
        yield bytes(part)


_PEAK = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[1:])
_, status, usage = os.wait4(process.pid, 0)
print(os.waitstatus_to_exitcode(status), usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024))
"""


def run_measured(command: list[str], cwd: Path) -> tuple[str, int]:
    """Run a program that must succeed; return its output and its peak memory in bytes.

    A small intermediate process starts it, because a child inherits the peak of its parent.
    """
    launch = [sys.executable, "-c", _PEAK, *command]
    done = subprocess.run(launch, cwd=cwd, capture_output=True, text=True, check=True)
    *printed, last = done.stdout.splitlines()
    status, peak = map(int, last.split())
    assert status == 0, done.stderr
    return "\n".join(printed), peak


def tensor_bytes(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Return the dtype, shape and bytes of each tensor in a safetensors file."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header.pop("__metadata__", None)
    offsets = {
        key: slice(*(end + at for at in entry["data_offsets"])) for key, entry in header.items()
    }
    return {
        key: (entry["dtype"], entry["shape"], content[offsets[key]])
        for key, entry in header.items()
    }


def change_archive(
    path: str | Path,
    change: Callable[[str, bytes], bytes | None],
    out: str | Path | None = None,
    method: int = zipfile.ZIP_STORED,
) -> str:
    """Write the zip archive to `out`, or in place, with the results of `change`; None removes a
    record.
    """
    with zipfile.ZipFile(path) as source:
        records = {name: source.read(name) for name in source.namelist()}
    with zipfile.ZipFile(out or path, "w", method) as archive:
        for name, data in records.items():
            if (new := change(name, data)) is not None:
                archive.writestr(name, new)
    return str(out or path)
