"""``--verify`` reads the output with the library that loads it; any difference is an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn

import ckpttool
from command import Run


def saved(path: Path) -> tuple[str, int]:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model[0].to(torch.bfloat16)
    weights = {
        **model.state_dict(),
        "tied": model[0].weight.detach(),
        "t": torch.arange(6).reshape(2, 3).t(),
    }
    torch.save({"model": weights}, path / "in.pt")
    return str(path / "in.pt"), sum(value.nbytes for value in weights.values())


@pytest.mark.parametrize(
    ("out", "library"),
    [
        ("out.pt", "torch"),
        ("out.safetensors", "safetensors"),
        ("shards/", "safetensors"),
        ("out.dcp", "torch"),
    ],
)
def test_the_library_reads_every_byte(out: str, library: str, tmp_path: Path, run: Run) -> None:
    source, nbytes = saved(tmp_path)
    words = ["--keep-aliases"] if library == "safetensors" else []
    done = run(
        "remap",
        f"{source}::model",
        "-o",
        f"{tmp_path}/{out}",
        "--rule",
        "{x*} => a.{x*}",
        "--verify",
        *words,
    )
    assert done.status == 0, done.err
    assert f", also by {library} " in done.out
    result = ckpttool.remap(
        f"{source}::model",
        f"{tmp_path}/{out}",
        rule="{x*} => a.{x*}",
        verify=True,
        force=True,
        keep_aliases=bool(words),
    )
    assert result.verified is not None
    # the tied tensor has one name
    assert result.verified.by_library == nbytes - (24 if words else 0)


def test_optimizer_state_is_read_too(tmp_path: Path, run: Run) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "in.pt"
    )
    done = ckpttool.remap(
        str(tmp_path / "in.pt"), str(tmp_path / "out.pt"), rule="{x*} => a.{x*}", verify=True
    )
    assert done.verified is not None
    assert done.verified.by_library == done.verified.read == 32 + 2 * 32 + 8


WRONG: dict[str, Callable[[torch.Tensor], Any]] = {
    "bytes": lambda value: value + 1,
    "shape": lambda value: value[None],
    "nothing": lambda value: None,
}


@pytest.mark.parametrize("out", ["out.pt", "out.safetensors", "out.dcp"])
@pytest.mark.parametrize("what", WRONG)
def test_value_that_the_library_reads_differently_is_an_error(
    out: str, what: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library is patched, because an incorrect output cannot be produced."""
    read_torch, read_dcp, wrong = torch.load, dcp.load_state_dict, WRONG[what]

    def load(*args: Any, **options: Any) -> Any:
        return {key: wrong(value) for key, value in read_torch(*args, **options).items()}

    def load_state_dict(state: dict[str, Any], *args: Any, **options: Any) -> None:
        read_dcp(state, *args, **options)
        state.update({key: wrong(value) for key, value in state.items()})

    class Opened:
        def __init__(self, path: str, framework: str) -> None:
            self.tensors = load_file(path)

        def __enter__(self) -> Opened:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def keys(self) -> list[str]:
            return list(self.tensors)

        def get_tensor(self, key: str) -> Any:
            return wrong(self.tensors[key])

    if out == "out.pt":  # torch.distributed.checkpoint calls it too
        monkeypatch.setattr(torch, "load", load)
    monkeypatch.setattr(dcp, "load_state_dict", load_state_dict)
    monkeypatch.setattr(safetensors, "safe_open", Opened)
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "in.pt")
    with pytest.raises(ckpttool.CkptError, match="differently") as error:
        ckpttool.remap(
            str(tmp_path / "in.pt"), str(tmp_path / out), rule="{x*} => a.{x*}", verify=True
        )
    assert sorted(problem.key for problem in error.value.problems) == ["a.bias", "a.weight"]


class Config:
    """An object that `weights_only` refuses."""


def test_file_that_the_library_refuses_is_verified_by_our_reader_only(tmp_path: Path) -> None:
    torch.save({"model": nn.Linear(2, 2).state_dict(), "config": Config()}, tmp_path / "in.pt")
    done = ckpttool.remap(
        str(tmp_path / "in.pt"), str(tmp_path / "out.pt"), rule="{x*} => a.{x*}", verify=True
    )
    assert done.verified is not None
    assert (done.verified.read, done.verified.by_library) == (24, None)
