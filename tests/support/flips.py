"""Files with flipped bits: reading them must end with a documented exit status and without a
traceback.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path

from command import Run

FLIPS = int(os.environ.get("CKPTTOOL_FLIPS", "20"))


def check_flips(run: Run, operand: object, files: Sequence[Path], seed: str) -> None:
    """Flip bits in one of the files at a time, inspect `operand` including values, and restore the
    file.
    """
    draw = random.Random(seed)
    for _ in range(FLIPS):
        path = draw.choice(files)
        original = path.read_bytes()
        broken = bytearray(original)
        for _ in range(draw.choice((1, 1, 1, 8))):
            broken[draw.randrange(len(original))] ^= 1 << draw.randrange(8)
        path.write_bytes(broken)
        done = run("inspect", operand, "--stats", "--format", "json")
        assert done.status in (0, 2), (path, done.err)
        assert "internal error" not in done.err, (path, done.err)
        path.write_bytes(original)
