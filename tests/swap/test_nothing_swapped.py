"""A swap without a weight is refused; a swap of unchanged values is reported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from command import Run

X = torch.ones(2, 3)


class Scaled(nn.Module):
    """It has only a constant, no state dict entry."""

    def __init__(self, k: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((3,), k), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def export(model: nn.Module, path: Path) -> Path:
    torch.export.save(torch.export.export(model.eval(), (X,)), path)
    return path


@pytest.mark.parametrize("options", [[], ["--dry-run"], ["--keep-constants"]])
def test_swap_without_a_matching_key_is_refused(options: list[str], run: Run, tmp_path: Path) -> None:
    program, out = export(Scaled(), tmp_path / "p.pt2"), tmp_path / "out.pt2"
    torch.save({"model": {}, "epoch": 3, "state_dict": {"_extra_state": 3}}, tmp_path / "new.pt")
    torch.save({"scale": torch.full((3,), 2.0)}, tmp_path / "scale.pt")
    torch.save({"state_dict": {"_extra_state": 3}, "w": torch.ones(1)}, tmp_path / "other.pt")
    torch.save(nn.Linear(3, 3).state_dict(), tmp_path / "linear.pt")
    for name in ("new.pt", "scale.pt", "other.pt", "linear.pt"):
        done = run("swap-weights", program, tmp_path / name, "-o", out, *options)
        assert done.status in (1, 2), (name, done.said)
        assert not out.exists()
    done = run("swap-weights", program, tmp_path / "scale.pt", "-o", out, "--constants")
    assert done.status == 0, done.said
    assert torch.equal(torch.export.load(out).module()(X), X * 2)


class Marked(Scaled):
    """Its state dict has an additional version entry."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(lambda own, state, prefix, _: state.update({f"{prefix}v": torch.ones(1)}))
        self.register_load_state_dict_pre_hook(lambda own, state, prefix, *rest: state.pop(f"{prefix}v"))


@pytest.mark.parametrize("options", [[], ["--dry-run"], ["--keep-constants"]])
def test_keys_without_a_weight_are_refused(options: list[str], run: Run, tmp_path: Path) -> None:
    """A constant that a hook writes into the state dict is ignored if weights are swapped."""
    program, out = export(Marked(), tmp_path / "p.pt2"), tmp_path / "out.pt2"
    torch.save(Marked().state_dict(), tmp_path / "new.pt")
    done = run("swap-weights", program, tmp_path / "new.pt", "-o", out, "--model", f"{__file__}:Marked", *options)
    assert done.status == 1, done.said
    assert done.err.splitlines()[-2].startswith("error: nothing to swap: no key of ")
    assert not out.exists()


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_unchanged_values_are_reported(dry: list[str], run: Run, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    program = export(model, tmp_path / "p.pt2")
    torch.save(model.state_dict(), tmp_path / "same.pt")
    torch.save({**model.state_dict(), "1.bias": torch.full((2,), 9.0)}, tmp_path / "last.pt")
    verdict = "all values unchanged"
    for name, unchanged in (("same.pt", True), ("last.pt", False)):
        command = ("swap-weights", program, tmp_path / name, "-o", tmp_path / "out.pt2", "--force", *dry)
        done = run(*command)
        assert done.status == 0, done.said
        assert (verdict in done.out) is unchanged
        assert run(*command, "--format", "json").data["unchanged"] is unchanged
