"""Notes on checkpoints of trainers: sections of Lightning, files and placeholders of DeepSpeed."""

from __future__ import annotations

import argparse
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

from ckpttool import open_checkpoint
from command import Run


class Callback:
    """A foreign class in a checkpoint: copied, never imported."""

    def __init__(self) -> None:
        self.best = torch.tensor(0.5)


def lightning(path: Path) -> dict[str, object]:
    model = nn.Module()
    model.model = nn.Linear(3, 2)
    optimizers = [
        torch.optim.AdamW(model.parameters()),
        torch.optim.SGD(model.parameters(), momentum=0.9),
    ]
    model.model(torch.ones(1, 3)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    state = {
        "epoch": 3, "global_step": 120, "pytorch-lightning_version": "2.4.0", "state_dict": model.state_dict(),
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 4}}}},
        "callbacks": {"ModelCheckpoint{'monitor': 'val'}": {"best_model_score": torch.tensor(0.25), "dirpath": "x"}},
        "optimizer_states": [optimizer.state_dict() for optimizer in optimizers],
        "lr_schedulers": [{"last_epoch": 3, "_get_lr_called_within_step": False}],
        "hparams_name": "kwargs", "hyper_parameters": argparse.Namespace(lr=0.1), "custom": Callback(),
    }  # fmt: skip
    torch.save(state, path)
    return state


@pytest.mark.parametrize("size", [16, 816, 817, 5056])
def test_states_of_random_generators_are_not_sections(tmp_path: Path, size: int) -> None:
    torch.save(
        {"model": {"w": torch.ones(1)}, "rng": {"cuda": torch.zeros(size, dtype=torch.uint8)}},
        tmp_path / "a.pt",
    )
    paths = [
        section.path
        for section in open_checkpoint(str(tmp_path / "a.pt")).sections
        if section.kind == "state_dict"
    ]
    assert paths == (["model", "rng"] if size == 817 else ["model"])


def test_lightning_checkpoints_have_sections(tmp_path: Path, run: Run) -> None:
    state = lightning(tmp_path / "last.ckpt")
    checkpoint = open_checkpoint(str(tmp_path / "last.ckpt"))
    kinds = {section.path: section.kind for section in checkpoint.sections}
    assert kinds["state_dict"] == "state_dict"
    assert kinds["optimizer_states.0"] == kinds["optimizer_states.1"] == "optimizer"
    assert {"argparse.Namespace", f"{__name__}.Callback"} <= set(checkpoint.globals)
    assert {"epoch", "hyper_parameters", "lr_schedulers"} <= set(checkpoint.others)
    assert checkpoint.notes == ()
    out = tmp_path / "out.ckpt"
    done = run(
        "remap", tmp_path / "last.ckpt", "-o", out, "--rule", "model.{x*} => {x*}", "--verify"
    )
    assert done.status == 0, done.err
    found = torch.load(out, weights_only=False)
    assert list(found) == list(state)
    assert list(found["state_dict"]) == ["weight", "bias"]
    assert found["hyper_parameters"] == state["hyper_parameters"]
    assert found["custom"].best == 0.5
    assert found["callbacks"] == state["callbacks"]
    assert found["loops"] == state["loops"]


def test_a_note_says_how_to_gather_files_of_deepspeed(tmp_path: Path, run: Run) -> None:
    common = {"ds_config": {"zero_optimization": {"stage": 3}}, "ds_version": "0.16.4"}
    placeholders = OrderedDict(
        (key, torch.zeros(0, dtype=torch.bfloat16)) for key in ("a.weight", "a.bias")
    )
    placeholders["norm.running_mean"] = torch.zeros(3)
    model = {
        **common, "module": placeholders, "buffer_names": ["norm.running_mean"], "optimizer": None,
        "param_shapes": [OrderedDict({"a.weight": torch.Size([2, 3]), "a.bias": torch.Size([2])})],
        "frozen_param_shapes": None, "shared_params": {}, "dp_world_size": 2, "mp_world_size": 1, "global_steps": 7,
    }  # fmt: skip
    ranks = {
        **common,
        "optimizer_state_dict": {
            "loss_scaler": None, "zero_stage": 3, "partition_count": 2, "fp32_flat_groups": [torch.ones(4)],
            "optimizer_state_dict": {"state": {0: {"exp_avg": torch.ones(4)}}, "param_groups": [{"params": [0]}]},
        },
    }  # fmt: skip
    torch.save(model, tmp_path / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    torch.save(ranks, tmp_path / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    first, second = open_checkpoint(
        str(tmp_path / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    ).notes
    assert "the model's part of a DeepSpeed checkpoint" in first
    assert second.startswith("2 tensors have shape [0]: ZeRO-3 placeholders")
    assert "ckpttool remap FOLDER -o whole.pt" in second
    (note,) = open_checkpoint(
        str(tmp_path / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    ).notes
    assert "one rank's part of a DeepSpeed checkpoint" in note
    done = run("inspect", tmp_path / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    assert "ckpttool remap FOLDER -o whole.pt" in done.out + done.err


def test_diff_names_placeholders_as_the_reason(tmp_path: Path, run: Run) -> None:
    torch.save({"weight": torch.zeros(0), "bias": torch.zeros(2)}, tmp_path / "zero.pt")
    torch.save({"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}, tmp_path / "full.pt")
    done = run("diff", tmp_path / "zero.pt", tmp_path / "full.pt", "--format", "json")
    assert done.status == 1
    assert "ZeRO-3 placeholder" in done.out
    assert "ckpttool remap FOLDER -o whole.pt" in done.out


E, ONE = (0,), (1,)
# The shapes of a state dict, and a part of the note; None if no note is expected.
SHAPES: dict[str, tuple[dict[str, tuple[int, ...]], str | None]] = {
    "all empty": ({"a.weight": E, "b.weight": E}, "2 tensors have shape [0]"),
    "a single empty tensor": ({"a.weight": E}, None),
    "one of two is empty": ({"a.weight": E, "b.weight": (2,)}, None),
    "two of three are empty": ({"weight": (5,), "bias": E, "output_mask": E}, None),
    "empty in two dimensions": ({"a.weight": (0, 3), "b.weight": (0, 3)}, None),
    "empty, next to integers": (
        {"a.weight": E, "b.weight": E, "n:int": E},
        "2 tensors have shape [0]",
    ),
    "next to a larger bias": (
        {"a.weight": ONE, "a.bias": (3,), "c.weight": (3,)},
        "a.weight next to a bias of 3",
    ),
    "next to the bias of another module": (
        {"a.weight": ONE, "b.bias": (3,), "c.weight": (3,)},
        None,
    ),
    "next to a bias of one element": ({"a.weight": ONE, "a.bias": ONE}, None),
    "a bias next to a larger weight": ({"a.bias": ONE, "a.weight": (3,)}, None),
    "an integer weight": ({"a.weight:int": ONE, "a.bias": (3,)}, None),
    "two, one next to its bias": (
        {"x.weight": ONE, "a.weight": ONE, "a.bias": (3,)},
        "a.weight next to a bias of 3",
    ),
    "mostly single elements, including a matrix": (
        {"q_proj.weight": ONE, "n.weight": ONE, "m.weight": (4,)},
        "as q_proj.weight",
    ),
    "half are single elements": (
        {"q_proj.weight": ONE, "n.weight": ONE, "m.weight": (4,), "o.weight": (4,)},
        None,
    ),
    "mostly single elements, without a matrix": (
        {"norm.weight": ONE, "n.weight": ONE, "m.weight": (4,)},
        None,
    ),
    "inside a module": (
        {"h.0.c_fc.weight": ONE, "h.0.n.weight": ONE, "m.weight": (4,)},
        "as h.0.c_fc.weight",
    ),
    "a module, not a matrix": (
        {"q_proj.norm.weight": ONE, "n.weight": ONE, "m.weight": (4,)},
        None,
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_zero_placeholders_are_distinguished_from_small_tensors(tmp_path: Path, name: str) -> None:
    shapes, expected = SHAPES[name]
    state = {key.removesuffix(":int"): torch.zeros(shape, dtype=torch.int64 if ":int" in key else torch.float32)
             for key, shape in shapes.items()}  # fmt: skip
    torch.save(state, tmp_path / "model.pt")
    notes = open_checkpoint(str(tmp_path / "model.pt")).notes
    assert len(notes) == (expected is not None)
    assert all(str(expected) in note and "gathers them" in note for note in notes)


@pytest.mark.parametrize("key", ["ds_version", "ds_config"])
@pytest.mark.parametrize(
    ("other", "note"), [("param_shapes", "the model's part"), ("more", "one rank's part")]
)
def test_one_placeholder_is_reported_in_a_deepspeed_file(
    tmp_path: Path, key: str, other: str, note: str
) -> None:
    state = {"module": {"a.weight": torch.zeros(0), "b.weight": torch.zeros(2)}, key: {}, other: 1}
    torch.save(state, tmp_path / "states.pt")
    first, second = open_checkpoint(str(tmp_path / "states.pt")).notes
    assert first.startswith(note)
    assert second.startswith("1 tensors have shape [0]")
