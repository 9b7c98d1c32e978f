"""Models that load by module version: for any version in the file, the result has the values that
torch loads.
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
from ckpttool import CkptError
from command import main
from versioned_zoo import ZOO
from zoo import randomized, runtime_values

FILES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "as saved": lambda versions: versions,
    "no versions": lambda versions: {},
    **{
        f"version {version}": lambda versions, version=version: {
            path: {"version": version} for path in versions
        }  # type: ignore[misc]
        for version in range(4)
    },
}
EXAMPLE = torch.ones(2, 4)
OUTPUTS = [(to, ending) for to in ("serialized", "runtime") for ending in ("pt", "safetensors")]


def saved(name: str, file: str, folder: Path) -> str:
    """Save a checkpoint of the model with other versions."""
    state: Any = randomized(ZOO[name](), 1).state_dict()
    state._metadata = OrderedDict(FILES[file](state._metadata))
    if file == "no versions":
        state = dict(state)
    torch.save(state, folder / "in.pt")
    return str(folder / "in.pt")


def loaded(name: str, path: str) -> dict[str, torch.Tensor] | None:
    """Load the file with torch; return the runtime values, or None if torch refuses it."""
    model = randomized(ZOO[name](), 2)
    state = load_file(path) if path.endswith(".safetensors") else torch.load(path)
    try:
        model.load_state_dict(state)
    except (RuntimeError, KeyError):
        return None
    return runtime_values(model)


@pytest.mark.parametrize("name", ZOO)
def test_two_files_are_the_same_only_if_torch_loads_the_same_values(
    name: str, tmp_path: Path
) -> None:
    """This holds for any pair of versions, and for state_dict keys and runtime names."""
    values: dict[str, dict[str, torch.Tensor] | None] = {}
    for number, file in enumerate(FILES):
        (tmp_path / str(number)).mkdir()
        path = saved(name, file, tmp_path / str(number))
        values[path] = loaded(name, path)
    original = randomized(ZOO[name](), 1)
    if runtime_values(original).keys() != original.state_dict().keys():
        torch.save(runtime_values(original), tmp_path / "runtime.pt")
        values[str(tmp_path / "runtime.pt")] = runtime_values(original)
    count = 0
    for (left, left_values), (right, right_values) in product(values.items(), values.items()):
        try:
            same = ckpttool.diff(left, right, model=ZOO[name], values=True).identical
        except CkptError:
            continue
        count += 1
        if same and left_values is not None:
            assert right_values is not None, (left, right)
            assert equal(left_values, right_values), (left, right)
        assert same or left != right
    assert count >= len(values)


def equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return actual.keys() == expected.keys() and all(
        torch.equal(actual[fqn], expected[fqn]) for fqn in expected
    )


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a names file and an exported program of each model."""
    folder = tmp_path_factory.mktemp("traced")
    for name, build in ZOO.items():
        assert main(["trace", f"versioned_zoo:{name}", "-o", str(folder / f"{name}.json")]) == 0
        torch.export.save(
            torch.export.export(randomized(build(), 3), (EXAMPLE,)), folder / f"{name}.pt2"
        )
    return folder


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("name", ZOO)
def test_written_files_have_the_values_that_torch_loads(
    name: str, file: str, traced: Path, tmp_path: Path
) -> None:
    path, operand = saved(name, file, tmp_path), f"versioned_zoo:{name}"
    expected = loaded(name, path)
    names, program = (str(traced / f"{name}.{ending}") for ending in ("json", "pt2"))
    assert main(["diff", "--model", operand, path]) == (expected is None)
    assert main(["diff", "--model", names, path]) != 0 or expected is not None
    for to, ending in OUTPUTS:
        out = str(tmp_path / f"{to}.{ending}")
        status = main(["remap", path, "--model", operand, "--to", to, "-o", out])
        assert status == 0 or (file, out[-3:]) != ("as saved", ".pt")
        if status == 0 and to == "serialized":
            after = loaded(name, out)
            # it got its versions back
            if expected is None and file == "no versions" and after is not None:
                assert equal(after, runtime_values(randomized(ZOO[name](), 1)))
                continue
            assert (after is None) == (expected is None)
            assert after is None or expected is None or equal(after, expected)
        elif status == 0:
            actual = load_file(out) if ending == "safetensors" else torch.load(out)
            assert expected is not None
            assert equal(actual, expected)
    status = main(
        ["swap-weights", program, path, "--model", operand, "-o", str(tmp_path / "swapped.pt2")]
    )
    assert status == 0 or file != "as saved"
    if status == 0:
        model = ZOO[name]()
        model.load_state_dict(torch.load(path, weights_only=True))
        swapped = torch.export.load(tmp_path / "swapped.pt2").module()
        assert torch.allclose(swapped(EXAMPLE), model(EXAMPLE), 0, 0, equal_nan=True)
