"""What a command costs grows with the number of keys, and not with its square."""

from __future__ import annotations

import json
import os
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpttool.cli.app import main

FEW = 300
TIMES = 8
SOME = 20_000
A_KEY = 1_000  # bytes; 2**30 / 1_000_000, and some less for what else there is
BASE = 24  # of what is measured at one eighth, a quadratic step would make 64 times as much

# Command line -> what is renamed on the right side of a comparison.
LINES = {
    "inspect": ["inspect", "LEFT"],
    "rename": ["remap", "LEFT", "-o", "OUT", "--force", "--no-fsync", "--rule", "layers.{x*} => blocks.{x*}"],
    "to torch": ["remap", "LEFT", "-o", "OUT.pt", "--force", "--no-fsync"],
    "diff of the same": ["diff", "LEFT", "LEFT"],
    "diff of other names": ["diff", "LEFT", "RIGHT"],
    "diff of some other names": ["diff", "LEFT", "SOME"],
    "diff of unlike names": ["diff", "LEFT", "UNLIKE"],
    "diff of names turned around": ["diff", "LEFT", "TURNED"],
    "diff with some left out": ["diff", "LEFT", "FEWER"],
}

MEMORY = {"inspect": 1, "rename": 1, "diff of the same": 1, "diff of other names": 2, "diff with some left out": 1.5}


# File -> the name of the tensor with this number in it; none where it has no such tensor.
NAMES = {
    "LEFT": lambda i: f"layers.{i // 10}.block.{i % 10}.weight",
    "RIGHT": lambda i: f"blocks.{i // 10}.block.{i % 10}.weight",
    "SOME": lambda i: f"{'layers' if i % 37 else 'blocks'}.{i // 10}.block.{i % 10}.weight",
    "UNLIKE": lambda i: f"{i * 7919 % 104729:x}a.{i * 104723 % 15485863:x}b.w",
    "TURNED": lambda i: f"encoder.{i % 10}.{i // 10}.w",
    "FEWER": lambda i: f"layers.{i // 10}.block.{i % 10}.weight" if i % 37 else "",
}


def written(path: Path, count: int, named: Callable[[int], str]) -> str:
    """A safetensors file of `count` small weights, or of those of them that have a name."""
    keys = filter(None, map(named, range(count)))
    places = {key: [8 * i, 8 * i + 8] for i, key in enumerate(keys)}
    spec = {key: {"dtype": "F32", "shape": [2, 1], "data_offsets": at} for key, at in places.items()}
    header = json.dumps(spec).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + os.urandom(8 * len(places)))
    return str(path)


def on_files(line: list[str], folder: Path, count: int) -> list[str]:
    """The command line on files of so many keys."""
    files = {
        **{
            name: written(folder / f"{name}.safetensors", count, named) for name, named in NAMES.items() if name in line
        },
        "OUT": str(folder / "out.safetensors"),
        "OUT.pt": str(folder / "out.pt"),
    }
    return [files.get(word, word) for word in line]


def seconds(line: list[str], folder: Path, count: int) -> float:
    """CPU seconds of the command on files of so many keys, the least of two."""
    asked = on_files(line, folder, count)
    taken = []
    for _ in range(2):
        start = time.process_time()
        assert main(asked) < 2
        taken.append(time.process_time() - start)
    return min(taken)


@pytest.mark.parametrize("name", LINES)
def test_the_cost_is_that_of_the_keys(tmp_path, name):
    few, many = (seconds(LINES[name], tmp_path, count) for count in (FEW, FEW * TIMES))
    assert many < BASE * few, f"{few:.3f} s of {FEW:,} keys, {many:.3f} s of {FEW * TIMES:,}"


def held(line: list[str], folder: Path, count: int) -> int:
    """Bytes of memory that the command holds at most, on files of so many keys."""
    asked = on_files(line, folder, count)
    status = main(asked)  # what it imports is not counted
    tracemalloc.start()
    try:
        assert main(asked) == status
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("name", "most"), MEMORY.items())
def test_a_million_keys_take_less_than_that_many_gib(tmp_path, name, most):
    few, many = (held(LINES[name], tmp_path, count) for count in (FEW, SOME))  # both have the buffers for reading
    a_key = (many - few) / (SOME - FEW)
    assert a_key < most * A_KEY, f"{a_key:.0f} bytes a key"
