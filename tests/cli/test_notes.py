"""Each note is printed if its condition holds, and not by an almost identical command for which it
does not.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import ckpttool
from command import Run
from places import DATA
from standins import edited

Args = list[Any]
Case = Callable[[Path, bool], Args]  # (folder, whether the note is expected) -> the command

CASES: dict[str, tuple[str, Case]] = {}


def prints(text: str) -> Callable[[Case], Case]:
    def note(case: Case) -> Case:
        CASES[case.__name__] = text, case
        return case

    return note


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


class Larger(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*net(), nn.Linear(2, 2))


class Lossy(nn.Linear):
    """A layer that writes a key that it does not read."""

    def __init__(self, lossy: bool = True) -> None:
        super().__init__(2, 2)
        if lossy:
            self.register_state_dict_post_hook(
                lambda module, state, prefix, _: state.update({"more": torch.ones(1)})
            )


def save(path: Path, state: Any = None) -> Path:
    torch.save(net().state_dict() if state is None else state, path)
    return path


def names(path: Path, model: Callable[[], nn.Module], **options: Any) -> Path:
    path.write_text(json.dumps(ckpttool.trace(model, **options).to_json()))
    return path


def trained(groups: int = 1, flat: bool = True) -> dict[str, Any]:
    model = net()
    parameters = list(model.parameters())
    parts = [{"params": parameters[at::groups], "lr": 0.1 * (at + 1)} for at in range(groups)]
    optimizer = torch.optim.SGD(parts, lr=0.1, momentum=0.5)
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = (
        get_optimizer_state_dict(model, optimizer, options=options)
        if flat
        else optimizer.state_dict()
    )
    return {"model": model.state_dict(), "optimizer": state}


@prints("the other checkpoint has no name for 1 key: 2.w")
def own_names_with_like(path: Path, shown: bool) -> Args:
    like = save(
        path / "like.pt",
        {("2.w" if key == "2.weight" and not shown else key): v for key, v in state().items()},
    )
    return [
        "remap",
        save(path / "in.pt"),
        "--like",
        like,
        "--rule",
        "2.weight => 2.w",
        "-o",
        path / "out.pt",
    ]


@prints("not in the output are 1 key of the other checkpoint: 2.weight")
def left_out_of_like(path: Path, shown: bool) -> Args:
    like = save(path / "like.pt")
    rule = "2.weight => 2.w" if shown else "w => 2.weight"
    renamed_state = {
        ("w" if key == "2.weight" and not shown else key): value for key, value in state().items()
    }
    return [
        "remap",
        save(path / "in.pt", renamed_state),
        "--like",
        like,
        "--rule",
        rule,
        "-o",
        path / "out.pt",
    ]


def state() -> dict[str, torch.Tensor]:
    return net().state_dict()


@prints("the module versions in _metadata are left out")
def versions(path: Path, shown: bool) -> Args:
    saved = state() if shown else dict(state())
    return ["remap", save(path / "in.pt", saved), "-o", path / "out.safetensors"]


@prints("__metadata__ is left out")
def header(path: Path, shown: bool) -> Args:
    save_file(dict(state()), path / "in.safetensors", metadata={"author": "me"} if shown else None)
    return ["remap", path / "in.safetensors", "-o", path / "out.pt"]


@prints("the code of the TorchScript archive is left out")
def code(path: Path, shown: bool) -> Args:
    if shown:
        torch.jit.script(net()).save(path / "in.pt")
    else:
        save(path / "in.pt")
    return ["remap", path / "in.pt", "--rule", "0.{x*} => a.{x*}", "-o", path / "out.pt"]


@prints("this model does not read back all that it writes")
def lossy(path: Path, shown: bool) -> Args:
    model = names(path / "names.json", partial(Lossy, lossy=shown))
    saved = save(path / "in.pt", Lossy(lossy=shown).state_dict())
    return ["remap", saved, "--model", model, "--to", "runtime", "-o", path / "out.pt", "--partial"]


@prints("still holds the bytes of what was left out; a copy does not: ckpttool convert")
def bytes_left(path: Path, shown: bool) -> Args:
    change = ["--drop", "2.weight"] if shown else ["--rule", "2.weight => 2.w"]
    return ["remap", save(path / "in.pt"), *change, "--in-place"]


@prints("optimizer: the flattened form does not say which param groups there were")
def flattened(path: Path, shown: bool) -> Args:
    model = names(path / "names.json", net)
    saved = save(path / "in.pt", trained(flat=shown))
    return ["remap", saved, "--optimizer-keys", "fqn", "--model", model, "-o", path / "out.pt"]


@prints("optimizer: new, and without state: 3.weight, 3.bias")
def new_parameters(path: Path, shown: bool) -> Args:
    old, new = names(path / "old.json", net), names(path / "new.json", Larger if shown else net)
    saved = save(path / "in.pt", trained(flat=False))
    return [
        "remap",
        saved,
        "--model",
        old,
        "--to-model",
        new,
        "--partial",
        "--to",
        "runtime",
        "-o",
        path / "out.pt",
    ]


@prints("optimizer still holds the state of all parameters")
def whole_optimizer(path: Path, shown: bool) -> Args:
    return [
        "remap",
        save(path / "in.pt", trained(flat=not shown)),
        "--select",
        "2",
        "-o",
        path / "out.pt",
    ]


@prints("ema has 9 of the 9 names of model and stays as it is")
def other_section(path: Path, shown: bool) -> Args:
    ema = {
        key: value[:1] if shown and key == "0.weight" else value for key, value in state().items()
    }
    saved = save(path / "in.pt", {"model": state(), "ema": ema})
    return ["remap", saved, "--rule", "0.{x*} => a.{x*}", "-o", path / "out.pt"]


@prints("ema holds the same model as model, and was not compared")
def second_model(path: Path, shown: bool) -> Args:
    ema = state() if shown else {"decay": torch.ones(1)}
    model = names(path / "names.json", net)
    return ["diff", "--model", model, save(path / "in.pt", {"model": state(), "ema": ema})]


@prints("0 of 9 tensors matched")
def nothing_matches(path: Path, shown: bool) -> Args:
    renamed_state = {
        (key if key == "0.weight" and not shown else f"{key}_"): value
        for key, value in state().items()
    }
    return ["diff", "--model", names(path / "names.json", net), save(path / "in.pt", renamed_state)]


# Folders and runs


def zero(path: Path, stage: int = 1) -> Path:
    return Path(shutil.copytree(DATA / f"deepspeed-0.19.8/zero-{stage}", path / "zero"))


@prints("not copied: skipped_steps, global_steps, global_samples, epoch of")
def counters_of_deepspeed(path: Path, shown: bool) -> Args:
    folder = zero(path)
    for file in [] if shown else folder.rglob("*model_states.pt"):
        edited(file, without_counters)
    return ["remap", folder, "-o", path / "whole.pt"]


def without_counters(content: dict[str, Any]) -> None:
    for name in ("skipped_steps", "global_steps", "global_samples", "epoch"):
        del content[name]


def scaled(content: dict[str, Any], by: int) -> None:
    content["module"]["scale"].fill_(by)


@prints("scale differs between the ranks: rank 0's is used")
def ranks_of_deepspeed(path: Path, shown: bool) -> Args:
    folder = zero(path, 3)
    for rank, file in enumerate(sorted(folder.rglob("*model_states.pt"))):
        edited(file, partial(scaled, by=rank if shown else 1))
    return ["inspect", folder]


def hf(path: Path, *names: str) -> Path:
    folder = path / "hf"
    folder.mkdir()
    save_file(dict(state()), folder / "model.safetensors", metadata={"format": "pt"})
    for name in names:
        (folder / name).write_text("{}")
    return folder


@prints("not copied: config.json, which describes the keys of")
def config_of_other_keys(path: Path, shown: bool) -> Args:
    folder = hf(path, "config.json")
    change = ["--rule", "2.{x*} => head.{x*}"] if shown else ["--drop", "1.num_batches_tracked"]
    return ["remap", folder, "-o", path / "out", *change]


@prints("config.json did not: check that it describes the new keys")
def config_in_place(path: Path, shown: bool) -> Args:
    folder = hf(path, *(["config.json"] if shown else ["tokenizer.json"]))
    return ["remap", folder, "--in-place", "--rule", "2.{x*} => h.{x*}"]


@prints("optimizer.bin is copied unchanged: its ids keep the parameter order")
def optimizer_next_to_it(path: Path, shown: bool) -> Args:
    folder = hf(path)
    torch.save(trained(flat=False)["optimizer"], folder / "optimizer.bin")
    change = ["--rule", "2.{x*} => head.{x*}"] if shown else ["--drop", "1.num_batches_tracked"]
    return ["remap", folder, "-o", path / "out", *change]


@pytest.mark.parametrize("name", CASES)
def test_note_is_printed_only_if_it_applies(name: str, run: Run, tmp_path: Path) -> None:
    text, case = CASES[name]
    for shown in (True, False):
        folder = tmp_path / str(shown)
        folder.mkdir()
        done = run(*case(folder, shown))
        assert done.status in (0, 1), done.said
        assert (text in done.err + done.out) == shown, (shown, done.said)
