"""Folders that torch.distributed.checkpoint writes under DDP, FSDP2, HSDP, tensor parallelism and
pipeline stages.

The oracles are torch's own conversions, and `dcp.load` with another number of ranks.
`CKPTTOOL_SUITES=all` tests all layouts and numbers of ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from places import ROOT
from torch_version import needs_torch

ALL = os.environ.get("CKPTTOOL_SUITES") == "all"
LAYOUTS = (
    ("ddp", "fsdp", "hsdp", "tp", "fsdp of tp", "pipeline") if ALL else ("fsdp of tp", "pipeline")
)


@pytest.mark.parametrize(
    ("savers", "loaders"), [(2, 4), (4, 2), (2, 2), (4, 4)] if ALL else [(2, 4)]
)
def test_layouts(tmp_path: Path, savers: int, loaders: int, record_property: Any) -> None:
    needs_torch("2.7", "fully_shard without a GPU")
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(ROOT / "tests/support/dcp_layouts.py"),
        str(tmp_path),
    ]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(savers), str(loaders), *LAYOUTS],
        env=environment,
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr.decode()
    found = json.loads((tmp_path / "found.json").read_text())
    record_property("cases", len(found))
    assert len(found) == 3 * len(LAYOUTS)  # one conversion and two loads
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
