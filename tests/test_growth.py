"""What a command costs grows with the number of keys, and not with its square."""

from __future__ import annotations

import json
import os
import struct
import time
from pathlib import Path

import pytest

from ckpttool.cli.app import main

FEW = 500
TIMES = 8
BASE = 24  # of what is measured at one eighth, a quadratic step would make 64 times as much

# Command line -> what is renamed on the right side of a comparison.
LINES = {
    "inspect": ["inspect", "LEFT"],
    "rename": ["remap", "LEFT", "-o", "OUT", "--force", "--no-fsync", "--rule", "layers.{x*} => blocks.{x*}"],
    "to torch": ["remap", "LEFT", "-o", "OUT.pt", "--force", "--no-fsync"],
    "diff of the same": ["diff", "LEFT", "LEFT"],
    "diff of other names": ["diff", "LEFT", "RIGHT"],
}


def written(path: Path, count: int, head: str) -> str:
    """A safetensors file of `count` small weights below `head`."""
    places = ((f"{head}.{i // 10}.block.{i % 10}.weight", [8 * i, 8 * i + 8]) for i in range(count))
    header = json.dumps({key: {"dtype": "F32", "shape": [2, 1], "data_offsets": at} for key, at in places}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + os.urandom(8 * count))
    return str(path)


def seconds(line: list[str], folder: Path, count: int) -> float:
    """CPU seconds of the command on files of so many keys, the least of two."""
    files = {
        "LEFT": written(folder / "left.safetensors", count, "layers"),
        "RIGHT": written(folder / "right.safetensors", count, "blocks"),
        "OUT": str(folder / "out.safetensors"),
        "OUT.pt": str(folder / "out.pt"),
    }
    taken = []
    for _ in range(2):
        start = time.process_time()
        assert main([files.get(word, word) for word in line]) < 2
        taken.append(time.process_time() - start)
    return min(taken)


@pytest.mark.parametrize("name", LINES)
def test_the_cost_is_that_of_the_keys(tmp_path, name):
    few, many = (seconds(LINES[name], tmp_path, count) for count in (FEW, FEW * TIMES))
    assert many < BASE * few, f"{few:.3f} s of {FEW:,} keys, {many:.3f} s of {FEW * TIMES:,}"
