"""Function calls and memory of a command grow linearly with the number of keys, not
quadratically.
"""

from __future__ import annotations

import cProfile
import json
import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from command import main

FEW = 300
TIMES = 8
SOME = 8_000
A_KEY = 1_000  # bytes; 2**30 / 1_000_000, less some for constant costs
BASE = 12  # largest allowed ratio for 8 times the keys; a quadratic step would have 64

# Name -> command line; words in capitals are files.
LINES = {
    "inspect": ["inspect", "LEFT"],
    "rename": [
        "remap",
        "LEFT",
        "-o",
        "OUT",
        "--force",
        "--no-fsync",
        "--rule",
        "layers.{x*} => blocks.{x*}",
    ],
    "to torch": ["remap", "LEFT", "-o", "OUT.pt", "--force", "--no-fsync"],
    "diff of equal files": ["diff", "LEFT", "LEFT"],
    "diff of renamed keys": ["diff", "LEFT", "RIGHT"],
    "diff of some renamed keys": ["diff", "LEFT", "SOME"],
    "diff of unrelated names": ["diff", "LEFT", "UNLIKE"],
    "diff of swapped indices": ["diff", "LEFT", "TURNED"],
    "diff with missing keys": ["diff", "LEFT", "FEWER"],
}

MEMORY = {
    "inspect": 1,
    "rename": 1,
    "diff of equal files": 1,
    "diff of renamed keys": 2.3,
    "diff with missing keys": 1.5,
}


# File -> name of its tensor with this number, or "" if it has none.
NAMES = {
    "LEFT": lambda i: f"layers.{i // 10}.block.{i % 10}.weight",
    "RIGHT": lambda i: f"blocks.{i // 10}.block.{i % 10}.weight",
    "SOME": lambda i: f"{'layers' if i % 37 else 'blocks'}.{i // 10}.block.{i % 10}.weight",
    "UNLIKE": lambda i: f"{i * 7919 % 104729:x}a.{i * 104723 % 15485863:x}b.w",
    "TURNED": lambda i: f"encoder.{i % 10}.{i // 10}.w",
    "FEWER": lambda i: f"layers.{i // 10}.block.{i % 10}.weight" if i % 37 else "",
}


def write_file(path: Path, count: int, named: Callable[[int], str]) -> str:
    keys = filter(None, map(named, range(count)))
    places = {key: [8 * i, 8 * i + 8] for i, key in enumerate(keys)}
    spec = {
        key: {"dtype": "F32", "shape": [2, 1], "data_offsets": at} for key, at in places.items()
    }
    header = json.dumps(spec).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + os.urandom(8 * len(places)))
    return str(path)


def on_files(line: list[str], folder: Path, count: int) -> list[str]:
    """Return the command line with files of `count` keys."""
    files = {
        **{
            name: write_file(folder / f"{name}.safetensors", count, named)
            for name, named in NAMES.items()
            if name in line
        },
        "OUT": str(folder / "out.safetensors"),
        "OUT.pt": str(folder / "out.pt"),
    }
    return [files.get(word, word) for word in line]


def calls(line: list[str], folder: Path, count: int) -> int:
    profile = cProfile.Profile()
    assert profile.runcall(main, on_files(line, folder, count)) < 2
    return sum(row.callcount for row in profile.getstats())


@pytest.mark.parametrize("name", LINES)
def test_work_grows_linearly_with_keys(tmp_path, name):
    main(on_files(LINES[name], tmp_path, 1))  # do not count its imports
    few, many = (calls(LINES[name], tmp_path, count) for count in (FEW, FEW * TIMES))
    assert many < BASE * few, f"{few:,} calls for {FEW:,} keys, {many:,} for {FEW * TIMES:,}"


def peak_memory(line: list[str], folder: Path, count: int) -> int:
    command = on_files(line, folder, count)
    status = main(command)  # do not count its imports
    tracemalloc.start()
    try:
        assert main(command) == status
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("name", "gib"), MEMORY.items())
def test_memory_for_a_million_keys_is_bounded(tmp_path, name, gib):
    # both include the read buffers
    few, many = (peak_memory(LINES[name], tmp_path, count) for count in (FEW, SOME))
    a_key = (many - few) / (SOME - FEW)
    assert a_key < gib * A_KEY, f"{a_key:.0f} bytes a key"
