"""NumPy writes what the package reads; each test that ckpttool has for its own formats applies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ckpttool_npz import FORMAT

import ckpttool
from ckpttool.core.errors import CkptError
from ckpttool.formats import registry
from contract import FormatContract, State

PACKAGE = Path(__file__).resolve().parents[1]
LACKS = frozenset(
    (
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2fnuz,
    )
)


@pytest.fixture(autouse=True)
def plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the format as if its package were installed."""
    installed = registry.Installed((FORMAT,), ())
    monkeypatch.setattr(registry, "installed", lambda: installed)


def arrays_of(state: State) -> dict[str, Any]:
    return {key: tensor.numpy() for key, tensor in state.items()}


class TestNpz(FormatContract):
    name = "npz"
    ending = ".npz"
    lacks = LACKS
    setup = (
        f"import sys; sys.path.insert(0, {str(PACKAGE)!r});"
        "from ckpttool.formats import registry; from ckpttool_npz import FORMAT;"
        "registry.installed = lambda: registry.Installed((FORMAT,), ());"
    )

    def save(self, state: State, path: Path) -> None:
        np.savez(path, **arrays_of(state))

    def load(self, path: Path) -> State:
        with np.load(path) as arrays:
            return {key: torch.from_numpy(arrays[key].copy()) for key in arrays.files}


class TestCompressedNpz(TestNpz):
    def save(self, state: State, path: Path) -> None:
        np.savez_compressed(path, **arrays_of(state))


def test_columns_of_fortran_order_are_read(tmp_path: Path) -> None:
    matrix = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    np.savez(tmp_path / "f.npz", matrix=matrix)
    state = {"matrix": torch.from_numpy(matrix.copy())}
    assert ckpttool.diff(str(tmp_path / "f.npz"), state, values=True).identical


def test_arrays_of_objects_are_refused_all_at_once(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {
        "good": np.ones(2),
        "text": np.array(["a"]),
        "any": np.array([{}], dtype=object),
    }
    np.savez(tmp_path / "o.npz", **arrays)
    with pytest.raises(CkptError) as caught:
        ckpttool.inspect(str(tmp_path / "o.npz"))
    assert [problem.key for problem in caught.value.problems] == ["text.npy", "any.npy"]


def test_an_output_cannot_have_the_format(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    with pytest.raises(CkptError, match=r"NumPy archive .* is only read"):
        ckpttool.convert(str(tmp_path / "a.pt"), str(tmp_path / "out.npz"))
