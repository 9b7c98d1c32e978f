"""--drop does not remove a part of optimizer state or of a quantized weight; the suggested options
work.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

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
    model, optimizer = trained(kind == "named")
    if kind == "alone":
        torch.save(optimizer.state_dict(), path)
        return ""
    state: dict[str, Any] = optimizer.state_dict()
    if kind in ("flat", "dcp"):
        state = get_optimizer_state_dict(model, optimizer, options=FLAT if kind == "flat" else None)
    saved = {"model": model.state_dict(), "optimizer": state, "epoch": 1}
    if kind == "dcp":
        dcp.save(saved, checkpoint_id=str(path))
    else:
        torch.save(saved, path)
    return "optimizer"


def parameter_key(kind: str, number: int) -> str:
    return (
        ("0.weight", "0.bias", "1.weight", "1.bias")[number]
        if kind in ("flat", "dcp")
        else str(number)
    )


@pytest.mark.filterwarnings("ignore:.*TypedStorage")
@pytest.mark.parametrize("kind", ["ids", "named", "alone", "flat", "dcp"])
def test_part_of_the_optimizer_state_is_not_dropped(kind: str, run: Run, tmp_path: Path) -> None:
    """This also holds if all entries of the state are dropped, since the rest is not a complete
    optimizer.
    """
    path, out = tmp_path / "in", tmp_path / "out.pt"
    optimizer_path = write(kind, path)
    state = ".".join(filter(None, (optimizer_path, "state")))
    one = f"{state}.{parameter_key(kind, 1)}"
    patterns = [
        f"{state}.*",
        f"{one}.*",
        f"{one}.exp_avg",
        f"{state}.*.exp_avg_sq",
        f"re:.*{re.escape(one)}.step",
    ]
    for first, second in itertools.combinations(
        [*patterns, *(["optimizer.*", "model.0.bias"] if optimizer_path else [])], 2
    ):
        done = run("remap", path, "--drop", first, "--drop", second, "-o", out)
        assert done.status == 1, (first, second, done.said)
        assert "optimizer state" in done.err
        assert "would go" in done.err
        assert f"{state}." in done.err
        assert not out.exists()
        printed = re.search(r"hint: .*?: (--drop .*);", done.err)
        assert (printed is not None) == bool(optimizer_path)
    if not optimizer_path:
        return
    done = run("remap", path, *shlex.split("" if printed is None else printed[1]), "-o", out)
    assert done.status == 0, done.said
    left = torch.load(out)
    assert left.keys() == {"model", "epoch"}
    ids = ["--optimizer-keys", "fqn"] if kind == "named" else []
    # the other suggestion
    assert run("remap", path, "--drop", "model.0.bias", *ids, "-o", out, "--force").status == 0
    assert "optimizer" in torch.load(out)


def test_entry_next_to_the_state_can_be_dropped(run: Run, tmp_path: Path) -> None:
    model, optimizer = trained()
    saved = {**optimizer.state_dict(), "scaler": {"scale": torch.ones(3)}}
    torch.save({"model": model.state_dict(), "optimizer": saved}, tmp_path / "in.pt")
    out = tmp_path / "out.pt"
    assert run("remap", tmp_path / "in.pt", "--drop", "optimizer.scaler.*", "-o", out).status == 0
    assert torch.load(out)["optimizer"]["state"].keys() == saved["state"].keys()


INT32 = torch.zeros(3, 2, dtype=torch.int32)
FP8 = INT32.to(torch.float8_e4m3fn)
QUANTIZED: dict[str, dict[str, torch.Tensor]] = {
    "fp8 blocks": {"weight": FP8, "weight_scale_inv": torch.ones(1, 1)},
    "fp8": {"weight": FP8, "weight_scale": torch.ones(3, 1), "input_scale": torch.ones(1)},
    "gptq": {"qweight": INT32, "qzeros": INT32[:1], "scales": torch.ones(1, 3)},
    "compressed-tensors": {
        "weight_packed": INT32, "weight_scale": torch.ones(3, 1), "weight_shape": torch.tensor([3, 2])
    },
    "bitsandbytes": {  # a 4-bit weight, with a quant_state record
        "weight": torch.zeros(3, 1, dtype=torch.uint8), "weight.absmax": torch.ones(1),
        "weight.quant_map": torch.ones(16),
        "weight.quant_state.bitsandbytes__nf4": torch.zeros(8, dtype=torch.uint8),
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", QUANTIZED)
def test_part_of_a_quantized_weight_is_not_dropped(kind: str, run: Run, tmp_path: Path) -> None:
    parts = {f"0.{name}": value.clone() for name, value in QUANTIZED[kind].items()}
    folder = tmp_path / "in"
    folder.mkdir()
    save_file(
        {**parts, "0.bias": torch.ones(3), "1.weight": torch.ones(3)}, folder / "model.safetensors"
    )
    if kind != "bitsandbytes":
        (folder / "config.json").write_text(
            json.dumps({"quantization_config": {"quant_method": "fp8"}})
        )
    out = tmp_path / "out.safetensors"
    for pattern in (*parts, *(["*.absmax", "0.weight.*"] if kind == "bitsandbytes" else [])):
        done = run("remap", folder, "--drop", pattern, "-o", out)
        assert (done.status, out.exists()) == (1, False), pattern
        assert "part of a quantized weight" in done.err
    drop_all = [
        word
        for key in (["0.weight*"] if kind == "bitsandbytes" else parts)
        for word in ("--drop", key)
    ]
    assert run("remap", folder, *drop_all, "-o", out).status == 0
    assert set(load_file(out)) == {"0.bias", "1.weight"}
    assert run("remap", folder, "--drop", "0.bias", "-o", out, "--force").status == 0


def test_scale_of_an_ordinary_weight_can_be_dropped(run: Run, tmp_path: Path) -> None:
    """Any model may have a parameter of this name."""
    save_file(
        {"0.weight": torch.ones(3), "0.weight_scale": torch.ones(1)}, tmp_path / "in.safetensors"
    )
    out = tmp_path / "out.safetensors"
    assert (
        run("remap", tmp_path / "in.safetensors", "--drop", "0.weight_scale", "-o", out).status == 0
    )
    assert set(load_file(out)) == {"0.weight"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.enc(x))


KINDS = ("ids", "named", "fqn", "flat")
PARTS = (
    ["--select", "enc"],
    ["--select", "enc", "--rule", "{x*} => enc.{x*}"],
    ["--drop", "model.head.*"],
    ["--drop", "*.0.bias"],
)
OTHER_OPTIONS = (
    [],
    ["--rule", "enc.{x*} => backbone.{x*}"],
    ["--rule", "re:(.*)weight => \\1w"],
    ["--to", "serialized"],
    ["--to", "ddp"],
    ["--to", "compile"],
    *(["--optimizer-keys", form] for form in ("id", "fqn", "flat")),
)


def trained_net(kind: str) -> tuple[Net, torch.optim.Optimizer, dict[str, Any]]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(
        model.named_parameters() if kind == "named" else model.parameters()
    )
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    state: dict[str, Any] = optimizer.state_dict()
    if kind in ("fqn", "flat"):
        state = get_optimizer_state_dict(model, optimizer, options=FLAT if kind == "flat" else None)
    return model, optimizer, {"model": model.state_dict(), "optimizer": state}


def parameter_names(state: dict[str, Any]) -> set[str]:
    if "state" not in state:
        return {
            key.partition(".")[2].rpartition(".")[0] for key in state if key.startswith("state.")
        }
    groups = [
        name
        for group in state["param_groups"]
        for name in (*group["params"], *group.get("param_names", ()))
    ]
    return {name for name in (*state["state"], *groups) if isinstance(name, str)}


@pytest.mark.parametrize("kind", KINDS)
def test_optimizer_names_stay_keys_of_the_model(kind: str, run: Run, tmp_path: Path) -> None:
    *_, saved = trained_net(kind)
    torch.save(saved, tmp_path / "in.pt")
    (tmp_path / "net.json").write_text(json.dumps(ckpttool.trace(Net).to_json()))
    names = ["--model", tmp_path / "net.json"]
    out = tmp_path / "out.pt"
    written = 0
    for number, (first, second) in enumerate(itertools.product(PARTS, OTHER_OPTIONS)):
        by_model = names if number % 2 else []
        done = run(
            "remap",
            tmp_path / "in.pt",
            "-o",
            out,
            "--force",
            "--partial",
            *first,
            *second,
            *by_model,
        )
        if done.status == 1:
            assert kind != "ids" or second or not by_model, done.said
            continue
        assert done.status == 0, (first, second, done.said)
        written += 1
        left = torch.load(out)
        assert parameter_names(left["optimizer"]) <= left["model"].keys(), (first, second)
        if parameter_names(left["optimizer"]):
            assert "still holds the state of all" not in done.err
    assert written >= (4 if kind == "named" else 12)


@pytest.mark.parametrize("kind", ["fqn", "flat"])
def test_torch_loads_the_state_of_a_selected_part(kind: str, run: Run, tmp_path: Path) -> None:
    model, optimizer, saved = trained_net(kind)
    torch.save(saved, tmp_path / "in.pt")
    out = tmp_path / "out.pt"
    done = run("remap", tmp_path / "in.pt", "--select", "enc", "-o", out)
    assert done.status == 0
    assert "state of 2 parameters left out: head.weight, head.bias" in done.err
    left = torch.load(out)
    part = Net().enc
    fresh = torch.optim.AdamW(part.parameters())
    part.load_state_dict(left["model"])
    set_optimizer_state_dict(
        part, fresh, left["optimizer"], options=FLAT if kind == "flat" else None
    )
    for new, old in zip(part.parameters(), model.enc.parameters()):
        assert torch.equal(fresh.state[new]["exp_avg"], optimizer.state[old]["exp_avg"])


def test_submodule_with_all_parameters_can_be_selected(run: Run, tmp_path: Path) -> None:
    saved: dict[str, Any] = {part: {} for part in ("model", "optimizer")}
    *_, inner = trained_net("fqn")
    saved["model"] = {f"net.{key}": value for key, value in inner["model"].items()}
    state = {f"net.{name}": value for name, value in inner["optimizer"]["state"].items()}
    (group,) = inner["optimizer"]["param_groups"]
    groups = [{**group, "params": [f"net.{name}" for name in group["params"]]}]
    saved["optimizer"] = {"state": state, "param_groups": groups}
    torch.save(saved, tmp_path / "in.pt")
    assert (
        run("remap", tmp_path / "in.pt", "--select", "net", "-o", tmp_path / "out.pt").status == 0
    )
    assert (
        torch.load(tmp_path / "out.pt")["optimizer"]["state"].keys()
        == inner["optimizer"]["state"].keys()
    )


def in_two_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Weights in the first group, biases in the second, as for weight decay."""
    weights = [value for name, value in model.named_parameters() if name.endswith("weight")]
    biases = [value for name, value in model.named_parameters() if name.endswith("bias")]
    groups: Any = [{"params": weights}, {"params": biases, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups)


def one_group(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def named_group(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.named_parameters())


@pytest.mark.parametrize("pattern", ["model.head.*", "*.bias", "model.enc.0.weight"])
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(
    "build", [one_group, named_group, in_two_groups], ids=lambda build: str(build.__name__)
)
def test_state_of_parameters_that_are_left_out_goes_too(
    build: Callable[[nn.Module], torch.optim.Optimizer],
    wrapped: bool,
    pattern: str,
    run: Run,
    tmp_path: Path,
) -> None:
    """The oracle: an optimizer of the remaining parameters loads it, and each has its own
    moments.
    """
    torch.manual_seed(0)
    model = Net()
    optimizer = build(model)
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    prefix = "module." if wrapped else ""
    weights = {prefix + key: value for key, value in model.state_dict().items()}
    torch.save({"model": weights, "optimizer": optimizer.state_dict()}, tmp_path / "in.pt")
    if wrapped and not pattern.startswith("*"):
        pattern = pattern.replace("model.", "model.module.")
    words = [
        "--model",
        f"{__file__}:Net",
        "--optimizer",
        f"{__file__}:{build.__name__}",
        "--to",
        "serialized",
    ]
    done = run("remap", tmp_path / "in.pt", "--drop", pattern, *words, "-o", tmp_path / "out.pt")
    assert done.status == 0, done.err
    left = torch.load(tmp_path / "out.pt")

    name_of = {id(value): name for name, value in model.named_parameters()}
    groups = [[name_of[id(value)] for value in group["params"]] for group in optimizer.param_groups]
    rest = [[name for name in group if name in left["model"]] for group in groups]
    fresh_parameters = {name: nn.Parameter(left["model"][name]) for group in rest for name in group}
    present = [group for group in rest if group]
    arguments: Any = [{"params": [fresh_parameters[name] for name in group]} for group in present]
    fresh = torch.optim.AdamW(arguments)
    fresh.load_state_dict(left["optimizer"])
    for name, value in model.named_parameters():
        if name in fresh_parameters:
            moments = fresh.state[fresh_parameters[name]]["exp_avg"]
            assert torch.equal(moments, optimizer.state[value]["exp_avg"]), name
    assert sum(map(len, rest)) < sum(map(len, groups))
    assert "left out: " in done.err


def test_ids_of_an_unknown_order_are_not_kept_next_to_fewer_parameters(
    run: Run, tmp_path: Path
) -> None:
    *_, saved = trained_net("ids")
    torch.save(saved, tmp_path / "in.pt")
    command = ["remap", tmp_path / "in.pt", "--drop", "model.head.*", "-o", tmp_path / "out.pt"]
    done = run(*command)
    assert done.status == 1
    for text in (
        "left out of the model @ head.weight",
        "left out of the model @ head.bias",
        "--model MODEL",
    ):
        assert text in done.err
    assert not (tmp_path / "out.pt").exists()
    for option in (["--drop", "optimizer"], ["--model", f"{__file__}:Net"]):
        assert option[0] in done.err
        assert run(*command, *option, "--force").status == 0
    assert len(torch.load(tmp_path / "out.pt")["optimizer"]["state"]) == 4
    done = run(
        "remap",
        tmp_path / "in.pt",
        "--drop",
        "*.num_batches_tracked",
        "-o",
        tmp_path / "buffers.pt",
    )
    assert done.status == 0  # a count is no parameter


def test_named_ids_are_numbered_again(run: Run, tmp_path: Path) -> None:
    *_, saved = trained_net("named")
    torch.save(saved, tmp_path / "in.pt")
    out = tmp_path / "out.pt"
    for more in ([], ["--to", "ddp"]):
        done = run(
            "remap", tmp_path / "in.pt", "--drop", "model.head.*", *more, "-o", out, "--force"
        )
        assert done.status == 0, done.err
        assert "state of 2 parameters left out: head.weight, head.bias" in done.err
        left = torch.load(out)["optimizer"]
        (group,) = left["param_groups"]
        assert (group["params"], list(left["state"])) == ([0, 1, 2, 3], [0, 1, 2, 3])
        prefix = "module." if more else ""
        names = ["enc.0.weight", "enc.0.bias", "enc.1.weight", "enc.1.bias"]
        assert group["param_names"] == [prefix + name for name in names]
    # a buffer
    assert (
        run("remap", tmp_path / "in.pt", "--drop", "*.running_mean", "-o", out, "--force").status
        == 0
    )
    assert torch.load(out)["optimizer"]["state"].keys() == saved["optimizer"]["state"].keys()


class Normed(nn.Module):
    """An earlier version of the code of `Plain`, with a buffer and a layer more."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.old = nn.Linear(2, 2), nn.Linear(2, 2)
        self.register_buffer("mean", torch.ones(2))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


def test_advice_to_drop_says_what_is_lost(tmp_path: Path, run: Run) -> None:
    weights, program, model = tmp_path / "old.pt", tmp_path / "p.pt2", f"{__file__}:Plain"
    torch.save(Normed().state_dict(), weights)
    torch.export.save(torch.export.export(Plain(), (torch.ones(1, 2),)), program)
    for command in (
        ("diff", weights, "--model", model),
        ("remap", weights, "--to-model", model, "-o", tmp_path / "new.pt"),
        ("swap-weights", program, weights, "-o", tmp_path / "new.pt2"),
    ):
        done = run(*command)
        assert done.status == 1
        assert "effect on the model's output" in done.out + done.err
