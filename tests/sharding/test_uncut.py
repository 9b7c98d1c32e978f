"""Parameters that FSDP1 cannot flatten or shard are refused with all reasons, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpttool.formats.detect_folder import open_checkpoint
from command import Run

State = dict[str, Any]
FORMS = ["fsdp-flat", "fsdp-sharded"]


def two() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2, bias=False))


class Scalar(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 3)
        self.scale = nn.Parameter(torch.ones(()))


class Doubled(nn.Linear):
    """A layer that saves twice its weight and a constant."""

    def __init__(self) -> None:
        super().__init__(2, 3)
        self.register_state_dict_post_hook(self._change_state)

    @staticmethod
    def _change_state(module: nn.Module, state: State, prefix: str, metadata: object) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2
        state[f"{prefix}version"] = torch.ones(1)


class Renamed(Doubled):
    """A layer that saves its weight under another name."""

    @staticmethod
    def _change_state(module: nn.Module, state: State, prefix: str, metadata: object) -> None:
        state[f"{prefix}kernel"] = state.pop(f"{prefix}weight")


def with_sparse_weight(state: State) -> State:
    return {key: value.to_sparse() if key == "0.weight" else value for key, value in state.items()}


@pytest.mark.parametrize(
    ("model", "change", "flat", "sharded"),
    [
        (Scalar, dict, ["FSDP1 cannot flatten scalars @ scale"], ["FSDP1 cannot shard scalars @ scale"]),
        (
            Scalar,
            lambda state: {**state, "scale": torch.ones(1)},
            ["FSDP1 cannot flatten scalars @ scale"],
            ["[1], the model's is [] @ scale"],
        ),
        (
            two,
            with_sparse_weight,
            ["sparse_coo: only dense tensors can be flattened @ 0.weight"],
            ["sparse_coo: only dense tensors can be sharded @ 0.weight"],
        ),
        (
            two,
            lambda state: {**state, "0.weight": torch.ones(2, 3), "1.weight": torch.ones(3, 2)},
            ["[2, 3], the model's is [3, 2] @ 0.weight", "[3, 2], the model's is [2, 3] @ 1.weight"],
            ["[2, 3], the model's is [3, 2] @ 0.weight", "[3, 2], the model's is [2, 3] @ 1.weight"],
        ),
        (
            two,
            lambda state: {**state, "0.bias": state["0.bias"].half()},
            ["its parameters are float16, float32, and one flat parameter has one dtype @ (root)"],
            [],
        ),
        (
            Doubled,
            dict,
            [
                "not in the checkpoint @ weight",
                "a hook computes it, and FSDP1 saves the parameters as they are @ weight",
            ],
            ["a hook computes it from weight, and FSDP1 saves the parameters as they are @ weight"],
        ),
        (
            Renamed,
            dict,
            [],
            [
                "a hook computes it from weight, and FSDP1 saves the parameters as they are @ kernel",
                "not in the checkpoint @ weight",
            ],
        ),
    ],
)
def test_parameter_that_fsdp_cannot_shard_is_refused(
    run: Run, tmp_path: Path, model: Callable[[], nn.Module], change: Any, flat: list[str], sharded: list[str]
) -> None:
    torch.save(change(model().state_dict()), tmp_path / "model.pt")
    line = ["remap", tmp_path / "model.pt", "--model", f"{__file__}:{model.__name__}", "-o", tmp_path / "r{rank}.pt"]
    for form, problems in zip(FORMS, (flat, sharded)):
        done = run(*line, "--to", f"{form}(world_size=2)", "--force", "--format", "json")
        assert (done.status, bool(list(tmp_path.glob("r*")))) == (bool(problems), not problems), done.err
        actual = [f"{one['problem']} @ {one['key']}" for one in done.data.get("problems", ())]
        assert actual == problems
        for path in tmp_path.glob("r*"):
            path.unlink()


def test_units_that_match_no_module_are_refused(run: Run, tmp_path: Path) -> None:
    """All are reported: a missing module, a pattern that is too deep, and a parameter."""
    torch.save(two().state_dict(), tmp_path / "model.pt")
    line = ["remap", tmp_path / "model.pt", "--model", f"{__file__}:two", "-o", tmp_path / "r{rank}.pt"]
    units = ["2", "*.*", "0.weight", "[01]"]
    done = run(*line, "--to", f"fsdp-flat(world_size=2, units={units})", "--format", "json")
    assert (done.status, list(tmp_path.glob("r*"))) == (1, [])
    actual = [(one["problem"], one["key"]) for one in done.data["problems"]]
    assert actual == [("names no module that has parameters", pattern) for pattern in ("2", "*.*", "0.weight")]


@pytest.mark.parametrize(("size", "status"), [(0, 2), (1, 2), (2, 0), (65_537, 2)])
def test_world_size_must_be_supported(run: Run, tmp_path: Path, size: int, status: int) -> None:
    torch.save(two().state_dict(), tmp_path / "model.pt")
    line = ["remap", tmp_path / "model.pt", "--model", f"{__file__}:two", "-o", tmp_path / "r{rank}.pt"]
    for form in FORMS:
        done = run(*line, "--to", f"{form}(world_size={size})", "--dry-run")
        assert done.status == status, done.err
        assert ("FSDP1 shards over 2 to 65,536 ranks" in done.err) == bool(status)


def optimizer(groups: list[list[str]], **changes: Any) -> State:
    """Return state with a first moment for every parameter in a group, with `changes` to `0.weight`."""
    shapes = {name: parameter.shape for name, parameter in two().named_parameters()}
    state = {name: {"exp_avg": torch.ones(shapes[name]), "step": torch.ones(())} for own in groups for name in own}
    state["0.weight"].update(changes)
    return {"state": state, "param_groups": [{"lr": 0.1 * (1 + at), "params": own} for at, own in enumerate(groups)]}


ALL = ["0.weight", "0.bias", "1.weight"]


SEVERAL = "its parameters are in several param groups, or only some in any"
UNEVEN = "has neither its shape nor one value for all of the unit @ 0.weight"


@pytest.mark.parametrize(
    ("groups", "changes", "units", "problems"),
    [
        ([ALL], {}, [], []),
        ([ALL[:2], ALL[2:]], {}, [], [f"{SEVERAL} @ (root)"]),
        ([ALL[:2], ALL[2:]], {}, ["0", "1"], []),
        ([ALL[:1]], {}, ["0", "1"], [f"{SEVERAL} @ 0"]),
        ([ALL[:2]], {}, ["0", "1"], []),
        ([ALL], {"exp_avg": None}, [], [f"exp_avg {UNEVEN}"]),
        ([ALL], {"exp_avg": torch.ones(3, 2).half()}, [], [f"exp_avg {UNEVEN}"]),
        ([ALL], {"step": torch.zeros(())}, [], [f"step {UNEVEN}"]),
        ([ALL], {"kind": "a"}, [], [f"kind {UNEVEN}"]),
    ],
)
def test_flat_parameter_needs_uniform_optimizer_state(
    run: Run, tmp_path: Path, groups: list[list[str]], changes: State, units: list[str], problems: list[str]
) -> None:
    torch.save({"model": two().state_dict(), "optimizer": optimizer(groups, **changes)}, tmp_path / "in.pt")
    line = ["remap", tmp_path / "in.pt", "--model", f"{__file__}:two", "-o", tmp_path / "r{rank}.pt"]
    done = run(*line, "--to", f"fsdp-flat(world_size=2, units={units})", "--format", "json")
    actual = [f"{one['problem']} @ {one['key']}" for one in done.data.get("problems", ())]
    assert (done.status, actual) == (bool(problems), problems), done.err
    if not problems:
        (result,) = open_checkpoint(str(tmp_path / "r1.pt")).optimizers
        assert len([entry for entry in result.tensors if entry.key.endswith("exp_avg")]) == len(groups)


def test_scalar_is_reported_once_for_model_and_optimizer(run: Run, tmp_path: Path) -> None:
    """This holds even if the optimizer comes before the model."""
    model = Scalar()
    state = {"state": {0: {"exp_avg": torch.ones(())}}, "param_groups": [{"params": [0], "param_names": ["scale"]}]}
    torch.save({"optimizer": state, "model": model.state_dict()}, tmp_path / "in.pt")
    line = ["remap", tmp_path / "in.pt", "--model", f"{__file__}:Scalar", "-o", tmp_path / "r{rank}.pt"]
    done = run(*line, "--to", "fsdp-sharded(world_size=2)", "--format", "json")
    actual = [f"{one['problem']} @ {one['key']}" for one in done.data["problems"]]
    assert (done.status, actual) == (1, ["FSDP1 cannot shard scalars @ scale"])
