"""Models with modules named like wrapper segments, saved inside wrappers: each value keeps its
name.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import segment_models
from command import fixes_in, main, notes_in
from zoo import randomized, runtime_values

SEEDS = int(os.environ.get("CKPTTOOL_SEEDS", "5"))
WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "none": lambda model: model,
    "dp": nn.DataParallel,
    "compile": lambda model: torch.compile(model),  # type: ignore[dict-item,return-value]
    "compile(dp)": lambda model: torch.compile(nn.DataParallel(model)),  # type: ignore[dict-item,return-value]
    "averaged": AveragedModel,
}
INFERRED = "the suggested rules are inferred from names and shapes; check the values"


def loaded(make: Callable[[], nn.Module], path: str) -> dict[str, torch.Tensor]:
    model = randomized(make(), 2)
    model.load_state_dict(torch.load(path))
    return runtime_values(model)


def same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return actual.keys() == expected.keys() and all(
        torch.equal(actual[fqn], expected[fqn]) for fqn in expected
    )


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_loaded_values_are_the_saved_values(
    seed: int, wrapper: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    operand, path, out = (
        f"segment_models:tree_{seed}",
        str(tmp_path / "in.pt"),
        str(tmp_path / "out.pt"),
    )
    make = getattr(segment_models, f"tree_{seed}")
    model = randomized(make(), 1)
    expected = runtime_values(model)
    torch.save(WRAPPERS[wrapper](model).state_dict(), path)
    if main(["remap", path, "--model", operand, "--to", "serialized", "-o", out]) == 0:
        assert same(loaded(make, out), expected)
    capsys.readouterr()
    status = main(["diff", "--model", operand, path, "--format", "json"])
    result = json.loads(capsys.readouterr().out)
    assert (status == 0) == (wrapper == "none")
    for command in fixes_in(result):
        arguments = shlex.split(command)[1:]
        assert main(arguments) == 0, command
        fixed = arguments[arguments.index("-o") + 1]
        if main(["diff", "--model", operand, fixed]) == 0 and INFERRED not in notes_in(result):
            assert same(loaded(make, fixed), expected), command
