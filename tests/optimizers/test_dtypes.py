"""Numbers in tensors, dtypes that loading converts, and entries under the wrong names, as torch
loads them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpttool
from command import Run, notes_in


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def half() -> nn.Module:
    return net().bfloat16()


def number(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


def tensor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), foreach=False)


def faster(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.02), foreach=False)


def trained(model: nn.Module, make: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    optimizer = make(model)
    model(torch.ones(2, 4, dtype=next(model.parameters()).dtype)).sum().backward()
    optimizer.step()
    return model, optimizer


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


@pytest.mark.parametrize("saved", [number, tensor])
@pytest.mark.parametrize("loads", [number, tensor])
def test_learning_rate_in_a_tensor_is_the_same_number(
    saved: Any, loads: Any, tmp_path: Path
) -> None:
    save(tmp_path / "in.pt", *trained(net(), saved))
    diff = ckpttool.diff(tmp_path / "in.pt", model=net, optimizer=loads)
    assert diff.identical
    assert {entry.status for entry in diff.entries} == {"same"}


def test_another_learning_rate_in_a_tensor_is_listed(tmp_path: Path) -> None:
    save(tmp_path / "in.pt", *trained(net(), number))
    diff = ckpttool.diff(tmp_path / "in.pt", model=net, optimizer=faster)
    (entry,) = (entry for entry in diff.entries if entry.status != "same")
    assert (diff.identical, entry.status, entry.detail) == (True, "value", "0.01 instead of 0.02")


def test_load_converts_state_only_with_cast(tmp_path: Path) -> None:
    saved, optimizer = trained(net(), number)
    torch.save(
        {"model": saved.bfloat16().state_dict(), "optimizer": optimizer.state_dict()},
        tmp_path / "in.pt",
    )
    model = half()
    fresh = number(model)
    with pytest.raises(
        ckpttool.Refused, match=r"0\.weight\.exp_avg \(float32 to bfloat16\)"
    ) as error:
        ckpttool.load(tmp_path / "in.pt", model, fresh)
    assert (error.value.hint, len(fresh.state)) == ("cast=True converts them", 0)
    ckpttool.load(tmp_path / "in.pt", model, fresh, cast=True)
    assert fresh.state_dict()["state"][0]["exp_avg"].dtype is torch.bfloat16


def test_the_dtype_of_the_weights_is_the_reason(tmp_path: Path, run: Run) -> None:
    save(tmp_path / "in.pt", *trained(half(), number))
    asked = ("--model", f"{__file__}:net", "--optimizer", f"{__file__}:number")
    data = run("diff", tmp_path / "in.pt", *asked, "--format", "json").data
    first, second = (note for note in notes_in(data) if not note.startswith("left: "))
    assert first.endswith("bfloat16 instead of float32")
    assert second.startswith("loading converts 8 tensors of the state")


def test_swapped_entries_of_optimizer_and_scheduler(tmp_path: Path, run: Run) -> None:
    model, optimizer = trained(net(), number)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    state = {
        "model": model.state_dict(),
        "optimizer": scheduler.state_dict(),
        "scheduler": optimizer.state_dict(),
    }
    torch.save(state, tmp_path / "swapped.pt")
    state = {**state, "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save(state, tmp_path / "good.pt")
    asked = ("--model", f"{__file__}:net", "--optimizer", f"{__file__}:number")
    assert run("diff", tmp_path / "good.pt", *asked).status == 0
    done = run("diff", tmp_path / "swapped.pt", *asked)
    assert (done.status, "the two entries may be swapped" in done.out) == (1, True)


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(2))


def test_initialised_file_is_loaded_into_lazy_modules(tmp_path: Path) -> None:
    torch.save(net().state_dict(), tmp_path / "in.pt")
    model = lazy()
    ckpttool.load(tmp_path / "in.pt", model)
    assert all(
        torch.equal(value, net().state_dict()[key]) for key, value in model.state_dict().items()
    )
    assert torch.equal(model(torch.ones(2, 4)), net()(torch.ones(2, 4)))


def test_lazy_modules_stay_lazy_if_the_optimizer_state_fails(tmp_path: Path) -> None:
    saved, optimizer = trained(net(), number)
    save(tmp_path / "in.pt", saved, optimizer)
    model = lazy()
    fresh = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ckpttool.CkptError):
        ckpttool.load(tmp_path / "in.pt", model, fresh)
    assert all(map(torch.nn.parameter.is_lazy, model.parameters()))
