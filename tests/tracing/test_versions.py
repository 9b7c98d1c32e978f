"""Loading that asks for the versions of modules: whatever a file says of them, nothing is carried over otherwise than
torch loads it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckpttool
from ckpttool.cli.app import main
from ckpttool.core.errors import CkptError
from ckpttool.operands.model import ModelOperand
from versioned_zoo import ZOO
from zoo import randomized, runtime_values

FILES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "as saved": lambda own: own,
    "no versions": lambda own: {},
    **{
        f"version {version}": lambda own, version=version: {path: {"version": version} for path in own}  # type: ignore[misc]
        for version in range(4)
    },
}
OUTPUTS = [(to, ending) for to in ("serialized", "runtime") for ending in ("pt", "safetensors")]


def saved(name: str, file: str, folder: Path) -> str:
    """A checkpoint of the model, under other versions."""
    state: Any = randomized(ZOO[name](), 1).state_dict()
    state._metadata = OrderedDict(FILES[file](state._metadata))
    if file == "no versions":
        state = dict(state)
    torch.save(state, folder / "in.pt")
    return str(folder / "in.pt")


def loaded(name: str, path: str) -> dict[str, torch.Tensor] | None:
    """What an instance holds that torch has loaded the file into; None where it does not."""
    model = randomized(ZOO[name](), 2)
    state = load_file(path) if path.endswith(".safetensors") else torch.load(path)
    try:
        model.load_state_dict(state)
    except (RuntimeError, KeyError):
        return None
    return runtime_values(model)


@pytest.mark.parametrize("name", ZOO)
def test_two_files_are_the_same_only_where_torch_loads_the_same(name: str, tmp_path: Path) -> None:
    """Whichever versions they are of, and whether they have the model's keys or its runtime names."""
    model = ModelOperand(ZOO[name])
    made: dict[str, dict[str, torch.Tensor] | None] = {}
    for number, file in enumerate(FILES):
        (tmp_path / str(number)).mkdir()
        path = saved(name, file, tmp_path / str(number))
        made[path] = loaded(name, path)
    own = randomized(ZOO[name](), 1)
    if runtime_values(own).keys() != own.state_dict().keys():
        torch.save(runtime_values(own), tmp_path / "runtime.pt")
        made[str(tmp_path / "runtime.pt")] = runtime_values(own)
    answers = 0
    for (one, mine), (other, theirs) in product(made.items(), made.items()):
        try:
            same = ckpttool.diff(one, other, model=model, values=True).identical
        except CkptError:
            continue
        answers += 1
        if same and mine is not None:
            assert theirs is not None, (one, other)
            assert alike(mine, theirs), (one, other)
        assert same or one != other
    assert answers >= len(made)


def alike(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[fqn], wanted[fqn]) for fqn in wanted)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("name", ZOO)
def test_what_is_written_is_what_torch_loads(name: str, file: str, tmp_path: Path) -> None:
    path, operand = saved(name, file, tmp_path), f"versioned_zoo:{name}"
    wanted = loaded(name, path)
    names, program = str(tmp_path / "names.json"), str(tmp_path / "program.pt2")
    assert main(["trace", operand, "-o", names]) == 0
    assert main(["diff", "--model", operand, path]) == (wanted is None)
    assert main(["diff", "--model", names, path]) != 0 or wanted is not None
    for to, ending in OUTPUTS:
        out = str(tmp_path / f"{to}.{ending}")
        status = main(["remap", path, "--model", operand, "--to", to, "-o", out])
        assert status == 0 or (file, out[-3:]) != ("as saved", ".pt")
        if status == 0 and to == "serialized":
            after = loaded(name, out)
            assert (after is None) == (wanted is None)
            assert after is None or wanted is None or alike(after, wanted)
        elif status == 0:
            found = load_file(out) if ending == "safetensors" else torch.load(out)
            assert wanted is not None
            assert alike(found, wanted)
    example = torch.ones(2, 4)
    torch.export.save(torch.export.export(randomized(ZOO[name](), 3), (example,)), program)
    status = main(["swap-weights", program, path, "--model", operand, "-o", str(tmp_path / "swapped.pt2")])
    assert status == 0 or file != "as saved"
    if status == 0:
        model = ZOO[name]()
        model.load_state_dict(torch.load(path, weights_only=True))
        swapped = torch.export.load(tmp_path / "swapped.pt2").module()
        assert torch.allclose(swapped(example), model(example), 0, 0, equal_nan=True)
