"""The state dicts of a checkpoint operand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from ckpttool import open_checkpoint
from ckpttool.operands.checkpoint import saved_state_dicts

State = dict[str, torch.Tensor]


def legacy(state: State, path: Path) -> None:
    torch.save(state, path, _use_new_zipfile_serialization=False)


def folder(state: State, path: Path) -> None:
    dcp.save(state, checkpoint_id=path)


@pytest.mark.parametrize(
    ("save", "keeps_order"), [(torch.save, True), (legacy, True), (save_file, False), (folder, False)]
)
def test_key_order_is_that_of_the_state_dict_or_unknown(
    tmp_path: Path, save: Callable[[State, Path], None], keeps_order: bool
) -> None:
    state = {name: torch.ones(2) for name in "zam"}
    save(state, tmp_path / "saved")
    state_dicts = saved_state_dicts(open_checkpoint(str(tmp_path / "saved")))
    assert [[entry.key for entry in section.tensors] for section in state_dicts] == [list(state)] * keeps_order
