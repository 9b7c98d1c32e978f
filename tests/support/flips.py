"""Files with some bits turned: whatever is read of them has a status of the contract, and no traceback."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path

from command import Run

FLIPS = int(os.environ.get("CKPTTOOL_FLIPS", "20"))


def check_flips(run: Run, operand: object, files: Sequence[Path], seed: str) -> None:
    """Turns bits in one of the files at a time, inspects `operand` down to its values, and gives the file back."""
    draw = random.Random(seed)
    for _ in range(FLIPS):
        path = draw.choice(files)
        whole = path.read_bytes()
        broken = bytearray(whole)
        for _ in range(draw.choice((1, 1, 1, 8))):
            broken[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        path.write_bytes(broken)
        done = run("inspect", operand, "--stats", "--format", "json")
        assert done.status in (0, 2), (path, done.err)
        assert "internal error" not in done.err, (path, done.err)
        path.write_bytes(whole)
