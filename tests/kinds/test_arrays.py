"""State dicts of NumPy arrays, in torch files and in pickles. Oracle: NumPy reads what was written,
and torch's strict load takes what ckpttool writes.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from command import Run, fixes_in

MODEL = """
from torch import nn
def build():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
"""
DTYPES = ["f2", "f4", "f8", "c8", "c16", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?"]
SAVERS: dict[str, Any] = {
    **{
        f"protocol-{protocol}": lambda value, path, protocol=protocol: path.write_bytes(
            pickle.dumps(value, protocol)
        )
        for protocol in (2, 3, 4, 5)
    },
    "torch.save": torch.save,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def model() -> nn.Module:
    names: dict[str, Any] = {}
    exec(MODEL, names)
    module: nn.Module = names["build"]()
    return module


def arrays() -> dict[str, np.ndarray]:
    torch.manual_seed(1)
    return {key: value.numpy() for key, value in model().state_dict().items()}


@pytest.mark.parametrize("saver", SAVERS)
@pytest.mark.parametrize("section", ["", "model"])
def test_fix_writes_tensors_that_the_model_loads(
    folder: Path, run: Run, saver: str, section: str
) -> None:
    state = arrays()
    saved = {"model": state, "__author__": "someone", "epoch": 3} if section else state
    SAVERS[saver](saved, folder / "zoo.pkl")

    done = run("diff", "--model", "model.py:build", "zoo.pkl", "--format", "json")
    assert done.status == 0
    assert [kind["name"] for kind in done.data["kinds"]] == ["arrays"]
    (line,) = fixes_in(done.data)
    assert "NumPy arrays, which load_state_dict() does not accept" in run("inspect", "zoo.pkl").out

    commands = (
        line.split()[1:],
        ("fix", "zoo.pkl", "--model", "model.py:build", "-o", "fixed.pt"),
        ("convert", "zoo.pkl", "-o", "converted.pt"),
    )
    for command in commands:
        done = run(*command, "--verify")
        assert done.status == 0, done.err
        written = torch.load(command[-1], weights_only=True)
        if section:
            assert {key: written[key] for key in ("__author__", "epoch")} == {
                "__author__": "someone",
                "epoch": 3,
            }
            written = written["model"]
        model().load_state_dict(written, strict=True)
        assert all(np.array_equal(written[key].numpy(), value) for key, value in state.items())
    assert run("diff", "zoo.pkl", "fixed.pt", "--values").status == 0


@pytest.mark.parametrize("saver", SAVERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_shapes_and_orders_are_those_of_numpy(
    folder: Path, run: Run, saver: str, dtype: str
) -> None:
    numbers = np.arange(24).astype(dtype)
    saved = {
        "rows": numbers.reshape(4, 6),
        "columns": np.asfortranarray(numbers.reshape(4, 6)),
        "deep": np.asfortranarray(numbers.reshape(2, 3, 4)),
        "view": numbers[::3],
        "scalar": numbers[5:6].reshape(()),
        "empty": numbers[:0].reshape(0, 3),
    }
    SAVERS[saver](saved, folder / "a.pkl")
    done = run("convert", "a.pkl", "-o", "a.pt")
    assert done.status == 0, done.err
    written = torch.load("a.pt")
    for key, value in saved.items():
        array = written[key].numpy()
        assert array.dtype == value.dtype
        assert np.array_equal(array, value), key


@pytest.mark.parametrize("saver", SAVERS)
def test_an_array_under_two_keys_is_one_tensor(folder: Path, run: Run, saver: str) -> None:
    array = np.arange(6, dtype="f4")
    SAVERS[saver]({"a": array, "b": array, "c": array.copy()}, folder / "a.pkl")
    assert run("convert", "a.pkl", "-o", "a.pt").status == 0
    written = torch.load("a.pt")
    assert written["a"].data_ptr() == written["b"].data_ptr() != written["c"].data_ptr()
    assert run("convert", "a.pkl", "-o", "a.safetensors").status == 1
    assert run("diff", "a.pkl", "a.pt", "--values").status == 0


def test_rules_rename_arrays(folder: Path, run: Run) -> None:
    torch.save(arrays(), "a.pt")
    assert run("remap", "a.pt", "--rule", "0.{x*} => up.{x*}", "-o", "b.pt").status == 0
    assert list(torch.load("b.pt"))[:2] == ["up.weight", "up.bias"]


UNKNOWN: dict[str, Any] = {
    "big-endian": np.arange(3).astype(">f4"),
    "objects": np.array([{}, []], dtype=object),
    "text": np.array(["a", "b"]),
    "dates": np.array(["2020-01-01"], dtype="M8[D]"),
    "records": np.zeros(2, dtype=[("x", "f4"), ("y", "i4")]),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_an_array_that_torch_has_no_tensor_for_is_no_tensor(
    folder: Path, run: Run, kind: str
) -> None:
    """The file is not read as a part of it: the other arrays are no state dict either."""
    (folder / "a.pkl").write_bytes(pickle.dumps({"w": np.ones(3), "x": UNKNOWN[kind]}))
    done = run("inspect", "a.pkl")
    assert done.status == 2
    assert "a pickle that torch.save did not write" in done.err


def test_a_pickle_without_arrays_is_no_checkpoint(folder: Path, run: Run) -> None:
    (folder / "a.pkl").write_bytes(pickle.dumps({"epoch": 3}))
    done = run("inspect", "a.pkl")
    assert done.status == 2
    assert "a pickle that torch.save did not write" in done.err
    assert "torch.save(state_dict, 'OUT.pt')" in done.err


class Hostile:
    def __reduce__(self) -> Any:
        return (open, ("ran", "w"))


def test_a_pickle_with_arrays_never_runs(folder: Path, run: Run) -> None:
    saved = {"model": arrays(), "extra": Hostile()}
    (folder / "a.pkl").write_bytes(pickle.dumps(saved))
    done = run("inspect", "a.pkl")
    assert done.status == 0
    assert "dangerous" in done.out
    assert run("check", "a.pkl").status == 1
    assert not (folder / "ran").exists()


def test_what_follows_the_pickle_is_not_ignored(folder: Path, run: Run) -> None:
    """Another call of `pickle.load` would read it."""
    data = pickle.dumps(arrays()) + pickle.dumps(Hostile())
    (folder / "a.pkl").write_bytes(data)
    assert run("inspect", "a.pkl").status == 2


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_every_truncation_is_an_error(folder: Path, run: Run, protocol: int) -> None:
    data = pickle.dumps({"w": np.ones(3, "f4"), "b": np.zeros((2, 1), "i8")}, protocol)
    for length in range(len(data)):
        (folder / "a.pkl").write_bytes(data[:length])
        assert run("inspect", "a.pkl").status == 2, length
