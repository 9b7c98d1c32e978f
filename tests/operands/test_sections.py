"""State dicts that contain dicts, at the top level or under a key, are read as the model loads
them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import loading_zoo
from ckpttool import diff, open_checkpoint, remap
from command import main

State = dict[str, Any]
FOLDED = ["dict_next_to_tensors", "dict_of_all_tensors", "dicts_of_layers"]


def legacy(state: State, path: Path) -> None:
    torch.save(state, path, _use_new_zipfile_serialization=False)


def folder(state: State, path: Path) -> None:
    dcp.save(state, checkpoint_id=path)


SAVED: dict[str, Callable[[State, Path], None]] = {
    "zip.pt": torch.save,
    "legacy.pt": legacy,
    "folder.dcp": folder,
}
PLACES: dict[str, Callable[[State], State]] = {
    "root": dict,
    "key": lambda state: {"model": dict(state)},
    "with others": lambda state: {
        "epoch": 3,
        "loss_weight": torch.ones(2),
        "net_to_train": dict(state),
    },
}


def build(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return loading_zoo.ZOO[name]()


def load_section(path: Path, place: str) -> State:
    """Return the state_dict in the file as torch loads it."""
    content: State = torch.load(path)
    return (
        content
        if place == "root"
        else content[{"key": "model", "with others": "net_to_train"}[place]]
    )


@pytest.mark.filterwarnings("ignore:.*(TypedStorage|deprecated|no_dist|single process|DCP)")
@pytest.mark.parametrize(  # every pair of two of the three occurs
    ("name", "place", "file"),
    [
        (name, place, list(SAVED)[(i + j) % 3])
        for i, name in enumerate(FOLDED)
        for j, place in enumerate(PLACES)
    ],
)
def test_nested_state_dict_round_trips_with_a_model(
    name: str, place: str, file: str, tmp_path: Path
) -> None:
    path, model = tmp_path / file, build(name)
    SAVED[file](PLACES[place](model.state_dict()), path)
    operand = f"loading_zoo:{name}"
    assert main(["diff", "--model", operand, str(path)]) == 0
    out = tmp_path / "runtime.pt"
    options = ["--model", operand, "--verify"]
    assert main(["remap", str(path), *options, "--to", "runtime", "-o", str(out)]) == 0
    torch.testing.assert_close(
        {
            key: value
            for key, value in load_section(out, place).items()
            if isinstance(value, torch.Tensor)
        },
        {key: value.detach() for key, value in model.named_parameters()},
    )
    back = tmp_path / "back.pt"
    assert main(["remap", str(out), *options, "--to", "serialized", "-o", str(back)]) == 0
    other = build(name, 1)
    other.load_state_dict(load_section(back, place))
    torch.testing.assert_close(other.state_dict(), model.state_dict())


def test_nested_state_dict_is_kept_in_a_section_and_in_place(tmp_path: Path) -> None:
    path, out = tmp_path / "a.pt", tmp_path / "b.pt"
    torch.save({"net": dict(build("dict_next_to_tensors").state_dict())}, path)
    (section,) = open_checkpoint(f"{path}::net").sections
    assert (section.kind, list(section.by_key())) == ("state_dict", ["weight", "folded"])
    assert main(["remap", f"{path}::net", "--rule", "weight => w", "-o", str(out), "--verify"]) == 0
    assert list(torch.load(out)) == ["w", "folded"]
    options = ["--model", "loading_zoo:dict_next_to_tensors", "--rule", "weight => w"]
    assert main(["remap", str(path), *options, "-o", str(out), "--force", "--verify"]) == 0
    assert list(torch.load(out)["net"]) == ["w", "folded"]
    assert main(["remap", str(path), *options, "--in-place", "--verify"]) == 0
    assert list(torch.load(path)["net"]) == ["w", "folded"]


def test_dict_around_the_only_state_dict_names_it(tmp_path: Path) -> None:
    average = {"decay": 0.99, "shadow": nn.Linear(2, 3).state_dict()}
    torch.save({"model": nn.Linear(2, 3).state_dict(), "ema": average}, tmp_path / "a.pt")
    (section,) = open_checkpoint(f"{tmp_path}/a.pt::ema").sections
    assert list(section.by_key()) == ["weight", "bias"]
    two = {"fast": average["shadow"], "slow": average["shadow"]}
    torch.save({"ema": two}, tmp_path / "b.pt")
    (section,) = open_checkpoint(f"{tmp_path}/b.pt::ema").sections
    assert not section.tensors  # a choice would be a guess


def test_tensor_next_to_a_section_is_not_a_state_dict(tmp_path: Path) -> None:
    """This holds even if the tensor has the name of a parameter."""
    torch.save(
        {"model": dict(nn.Linear(2, 2).state_dict()), "bias": torch.ones(2)}, tmp_path / "a.pt"
    )
    line = ["diff", "--model", "torch.nn:Linear(in_features=2, out_features=2)"]
    assert main([*line, str(tmp_path / "a.pt")]) == 0


def momentum(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.filterwarnings("ignore:.*(TypedStorage|deprecated|no_dist|single process|DCP)")
@pytest.mark.parametrize(
    ("save", "keeps_order"), [(torch.save, True), (legacy, True), (folder, False)]
)
@pytest.mark.parametrize("picked", ["", "::optimizer"])
def test_ids_follow_the_keys_of_a_format_that_keeps_their_order(
    tmp_path: Path, save: Callable[[State, Path], None], keeps_order: bool, picked: str
) -> None:
    """Also if the operand is the optimizer alone."""

    def build() -> nn.Module:
        return nn.ParameterDict({name: nn.Parameter(torch.ones(2)) for name in "zam"})

    model = build()
    optimizer = momentum(model)
    sum(value.sum() for value in model.parameters()).backward()
    optimizer.step()
    save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved")
    found = diff(f"{tmp_path}/saved{picked}", model=build, optimizer=momentum)
    confirmed = [note for note in found.notes if "the file lists the model's keys in this" in note]
    assert (found.identical, len(confirmed)) == (True, keeps_order), found.notes


def test_a_file_may_have_the_mark_of_a_section_in_its_name(tmp_path: Path) -> None:
    state = {"w": torch.ones(2)}
    torch.save({"model": state, "ema": state}, tmp_path / "a::b.pt")
    path = f"{tmp_path}/a::b.pt"
    assert [s.path for s in open_checkpoint(path).sections] == ["model", "ema"]
    remap(f"{path}::ema", f"{tmp_path}/out::c.pt", rule=["w => v"], verify=True)
    assert torch.load(tmp_path / "out::c.pt").keys() == {"v"}
    torch.save({"b.pt": state}, tmp_path / "a")  # then it is the section of a file
    assert [s.path for s in open_checkpoint(path).sections] == [""]
