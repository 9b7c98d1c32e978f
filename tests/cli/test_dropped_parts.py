"""--drop removes no part of an optimizer's state or of a quantized weight; the printed ways out work as pasted."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import ckpttool
from command import Run

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def trained(named: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.named_parameters() if named else model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


def write(kind: str, path: Path) -> str:
    """Write model and optimizer; return the dotted way to the optimizer."""
    model, optimizer = trained(kind == "named")
    if kind == "alone":
        torch.save(optimizer.state_dict(), path)
        return ""
    state: dict[str, Any] = optimizer.state_dict()
    if kind in ("flat", "dcp"):
        state = get_optimizer_state_dict(model, optimizer, options=FLAT if kind == "flat" else None)
    saved = {"model": model.state_dict(), "optimizer": state, "epoch": 1}
    if kind == "dcp":
        dcp.save(saved, checkpoint_id=str(path), no_dist=True)
    else:
        torch.save(saved, path)
    return "optimizer"


def parameter(kind: str, number: int) -> str:
    return ("0.weight", "0.bias", "1.weight", "1.bias")[number] if kind in ("flat", "dcp") else str(number)


@pytest.mark.filterwarnings("ignore:.*TypedStorage")
@pytest.mark.parametrize("kind", ["ids", "named", "alone", "flat", "dcp"])
def test_a_part_of_the_optimizer_state_is_not_dropped(kind: str, run: Run, tmp_path: Path) -> None:
    """Any part of the entries of the state, and all of them: what is left is never a whole optimizer."""
    path, out = tmp_path / "in", tmp_path / "out.pt"
    way = write(kind, path)
    state = ".".join(filter(None, (way, "state")))
    one = f"{state}.{parameter(kind, 1)}"
    patterns = [f"{state}.*", f"{one}.*", f"{one}.exp_avg", f"{state}.*.exp_avg_sq", f"re:.*{re.escape(one)}.step"]
    for first, second in itertools.combinations([*patterns, *(["optimizer.*", "model.0.bias"] if way else [])], 2):
        done = run("remap", path, "--drop", first, "--drop", second, "-o", out)
        assert done.status == 1, (first, second, done.said)
        assert "optimizer state" in done.err
        assert f"would go @ {state}." in done.err
        assert not out.exists()
        printed = re.search(r"hint: .*?: (--drop .*);", done.err)
        assert (printed is not None) == bool(way)
    if not way:
        return
    done = run("remap", path, *shlex.split("" if printed is None else printed[1]), "-o", out)
    assert done.status == 0, done.said
    left = torch.load(out)
    assert left.keys() == {"model", "epoch"}
    assert run("remap", path, "--drop", "model.0.bias", "-o", out, "--force").status == 0  # the other way out
    assert "optimizer" in torch.load(out)


def test_what_torch_does_with_half_of_it(tmp_path: Path) -> None:
    """torch takes the file that --drop is not to write, and starts again."""
    model, optimizer = trained()
    state = optimizer.state_dict()
    state["state"] = {number: {} for number in state["state"]}
    fresh = torch.optim.AdamW(model.parameters())
    fresh.load_state_dict(state)
    fresh.step()
    assert fresh.state_dict()["state"][0]["step"] == 1
    assert optimizer.state_dict()["state"][0]["step"] == 1
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "in.pt")
    with pytest.raises(ckpttool.Refused, match="optimizer state"):
        ckpttool.remap(str(tmp_path / "in.pt"), drop="optimizer.*")


def test_what_stands_next_to_the_state_may_go(run: Run, tmp_path: Path) -> None:
    model, optimizer = trained()
    saved = {**optimizer.state_dict(), "scaler": {"scale": torch.ones(3)}}
    torch.save({"model": model.state_dict(), "optimizer": saved}, tmp_path / "in.pt")
    out = tmp_path / "out.pt"
    assert run("remap", tmp_path / "in.pt", "--drop", "optimizer.scaler.*", "-o", out).status == 0
    assert torch.load(out)["optimizer"]["state"].keys() == saved["state"].keys()


def test_a_plan_drops_no_part_of_the_state_either(run: Run, tmp_path: Path) -> None:
    model, optimizer = trained()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "in.pt")
    plan = tmp_path / "plan.json"
    assert run("remap", tmp_path / "in.pt", "--drop", "model.0.bias", "--save-plan", plan).status == 0
    text = plan.read_text()
    dropped = '{"section": "model", "key": "0.bias"'
    assert dropped in text
    keys = [f"state.{number}.{name}" for number in range(4) for name in ("step", "exp_avg", "exp_avg_sq")]
    more = "".join(f'{{"section": "optimizer", "key": "{key}", "reason": "x"}}, ' for key in keys)
    plan.write_text(text.replace(dropped, more + dropped))
    done = run("remap", tmp_path / "in.pt", "--plan", plan, "-o", tmp_path / "out.pt")
    assert done.status == 1
    assert "optimizer state" in done.err


def test_a_quantized_weight_stays_with_its_scales(run: Run, tmp_path: Path) -> None:
    """As bitsandbytes saves a weight of four bits: its record names the weight."""
    weight = {
        "0.weight": torch.zeros(3, 1, dtype=torch.uint8),
        "0.weight.absmax": torch.ones(1),
        "0.weight.quant_map": torch.ones(16),
        "0.weight.quant_state.bitsandbytes__nf4": torch.zeros(8, dtype=torch.uint8),
    }
    torch.save({**weight, "0.bias": torch.ones(3)}, tmp_path / "in.pt")
    out = tmp_path / "out.pt"
    for pattern in ("0.weight", "*.absmax", "0.weight.*"):
        done = run("remap", tmp_path / "in.pt", "--drop", pattern, "-o", out)
        assert done.status == 1, pattern
        assert "quantized weight" in done.err
    assert run("remap", tmp_path / "in.pt", "--drop", "0.weight{rest*}", "-o", out).status != 0
    assert run("remap", tmp_path / "in.pt", "--drop", "0.weight*", "-o", out).status == 0
    assert list(torch.load(out)) == ["0.bias"]
    assert run("remap", tmp_path / "in.pt", "--drop", "0.bias", "-o", out, "--force").status == 0
