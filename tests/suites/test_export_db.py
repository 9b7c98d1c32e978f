"""Torch's own examples for export (`torch._export.db`): inspect each program, and swap its weights.

The oracle is torch's program. Only one example has weights. `CKPTTOOL_SUITES=all` tests all,
otherwise every fourth.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpttool

database = pytest.importorskip("torch._export.db.examples", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("ignore")
SUPPORTED = database.filter_examples_by_support_level(database.SupportLevel.SUPPORTED)
FIRST, STEP = (0, 1) if os.environ.get("CKPTTOOL_SUITES") == "all" else (2, 4)
CASES = {name: SUPPORTED[name] for name in sorted(SUPPORTED)[FIRST::STEP]}


@pytest.mark.parametrize("name", CASES)
def test_program(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    old: nn.Module = case.model
    new = copy.deepcopy(old)
    with torch.no_grad():
        for tensor in (*new.parameters(), *new.buffers()):
            tensor.copy_(tensor + 1)
    paths = [str(tmp_path / word) for word in ("old.pt2", "new.pt", "out.pt2")]
    try:
        program = exported(case, old)
    except Exception as error:
        if torch.__version__ >= "2.7":
            raise
        pytest.skip(f"torch does not export its own example: {error}")
    torch.export.save(program, paths[0])
    sections = ckpttool.open_checkpoint(paths[0]).sections
    assert {key for section in sections for key in section.keys} == {
        *program.state_dict,
        *program.constants,
    }
    assert [key.key for key in ckpttool.trace(old).serialized] == list(old.state_dict())
    if not old.state_dict():
        return
    torch.save(new.state_dict(), paths[1])
    assert ckpttool.diff(paths[1], model=old).identical
    ckpttool.swap_weights(paths[0], paths[1], paths[2], model=old)
    args, kwargs = case.example_args, case.example_kwargs
    outputs = [
        program.module()(*copy.deepcopy(args), **copy.deepcopy(kwargs))
        for program in (torch.export.load(paths[2]), exported(case, new))
    ]
    torch.testing.assert_close(*outputs, rtol=0, atol=0)


def exported(case: Any, model: nn.Module) -> torch.export.ExportedProgram:
    args, kwargs = case.example_args, case.example_kwargs
    return torch.export.export(
        model, args, kwargs, dynamic_shapes=case.dynamic_shapes, strict=False
    )
