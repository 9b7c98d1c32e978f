"""Other entries in rank files: averages of the model, other models, tensors outside of state dicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ckpttool.core.checkpoint import Section
from ckpttool.evaluate import torch_eval
from ckpttool.formats.detect_folder import open_checkpoint
from ckpttool.formats.rank_shards import SHARDED_TENSOR, shard_kind
from command import Run
from fsdp_run import Net
from places import SUPPORT
from versioned_zoo import ZOO as VERSIONED

SCRIPT = SUPPORT / "fsdp_run.py"
MODEL = ["--model", f"{SCRIPT}:Net"]
FORMS = ["fsdp-flat", "fsdp-sharded"]


def state_of(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    model = Net()
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.normal_()
    return dict(model.state_dict())


def shapes(section: Section) -> dict[str, tuple[int, ...]]:
    return {entry.key: entry.shape for entry in section.tensors}


def same(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def save_ranks(folder: Path, *files: dict[str, Any]) -> Path:
    for rank, file in enumerate(files):
        torch.save(file, folder / f"rank_{rank}.pt")
    return folder / "rank_*.pt"


def slices(state: Mapping[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """Return the state_dict of one of two ranks with `use_orig_params`: half of each parameter, and full buffers."""
    parameters = dict(Net().named_parameters(remove_duplicate=False))
    return {k: v.flatten().chunk(2)[rank].clone() if k in parameters else v for k, v in state.items()}


@pytest.mark.parametrize("form", FORMS)
def test_averages_are_sharded_and_unsharded_like_the_model(run: Run, tmp_path: Path, form: str) -> None:
    """Averages may have another dtype or a wrapper with a counter; another model is complete in every file."""
    average = AveragedModel(Net())
    average.module.load_state_dict(state_of(1))
    half = {key: value.half() for key, value in state_of(2).items()}
    other = {"w": torch.arange(3.0)}
    torch.save({"model": state_of(0), "ema": average.state_dict(), "half": half, "other": other}, tmp_path / "all.pt")
    done = run("remap", tmp_path / "all.pt", *MODEL, "--to", f"{form}(world_size=2)", "-o", tmp_path / "rank_{rank}.pt")
    assert done.status == 0, done.err
    assert "not cut: every rank's file holds all of other" in done.out + done.err
    for path in tmp_path.glob("rank_*.pt"):
        parts = open_checkpoint(str(path))
        model, ema, halved, alone = (parts.section(name) for name in ("model", "ema", "half", "other"))
        assert shapes(model) == shapes(ema) == shapes(halved)
        assert torch.equal(torch_eval.load(alone.tensors[0]), other["w"])
    back = tmp_path / "back.pt"
    done = run("remap", tmp_path / "rank_*.pt", *MODEL, "--to", "serialized", "-o", back, "--format", "json")
    assert done.data["sections"] == ["model", "ema", "half"]
    result = torch.load(back)
    expected = {"model": state_of(0), "ema": state_of(1), "half": half, "other": other}
    assert all(same(result[name], state) for name, state in expected.items())


@pytest.mark.parametrize("form", FORMS)
def test_every_sharded_section_is_checked(run: Run, tmp_path: Path, form: str) -> None:
    """This includes sections named with --sections; the message names the section."""
    torch.save({"model": state_of(0), "ema": {**state_of(1), "head.bias": torch.ones(6)}}, tmp_path / "all.pt")
    out = ["--to", f"{form}(world_size=2)", "-o", tmp_path / "rank_{rank}.pt"]
    done = run("remap", tmp_path / "all.pt", *MODEL, *out, "--sections", "model,ema")
    assert (done.status, list(tmp_path.glob("rank_*"))) == (1, [])
    assert "error: ema cannot be " in done.err
    assert "[6], the model's is [7] @ head.bias" in done.err
    done = run("remap", tmp_path / "all.pt", *MODEL, *out)
    assert done.status == 0
    assert "every rank's file holds all of ema" in done.out + done.err


@pytest.mark.parametrize("form", FORMS)
def test_only_the_named_section_is_sharded(run: Run, tmp_path: Path, form: str) -> None:
    wrapped = {f"module.{key}": value for key, value in state_of(0).items()}
    torch.save({"model": wrapped, "ema": state_of(1)}, tmp_path / "all.pt")
    out = ["--to", f"{form}(world_size=2)", "-o", tmp_path / "rank_{rank}.pt"]
    assert run("remap", tmp_path / "all.pt", *MODEL, *out, "--sections", "ema").status == 0
    result = open_checkpoint(str(tmp_path / "rank_0.pt"))
    assert all(torch.equal(torch_eval.load(entry), wrapped[entry.key]) for entry in result.section("model").tensors)
    assert SHARDED_TENSOR in map(shard_kind, result.section("ema").tensors)


def test_slices_of_an_average_are_joined(run: Run, tmp_path: Path) -> None:
    files: list[dict[str, Any]]
    files = [{"model": slices(state_of(0), rank), "ema": slices(state_of(1), rank)} for rank in (0, 1)]
    for file in files:
        group = {"lr": torch.tensor(0.1), "params": ["emb.weight"]}
        state = {"emb.weight": {"exp_avg": file["ema"]["emb.weight"]}}
        file["optimizer"] = {"state": state, "param_groups": [group]}
    done = run("remap", save_ranks(tmp_path, *files), *MODEL, "-o", tmp_path / "out.pt")
    assert done.status == 0, done.err
    assert "differs" not in done.err
    result = torch.load(tmp_path / "out.pt")
    assert torch.equal(result["optimizer"]["state"]["emb.weight"]["exp_avg"], result["ema"]["emb.weight"])
    assert same(result["model"], state_of(0))
    assert same(result["ema"], state_of(1))


def test_tensors_of_another_model_that_differ_between_ranks_are_refused(run: Run, tmp_path: Path) -> None:
    """Without that model, shards cannot be told from copies; identical copies are kept."""
    files = [{"model": slices(state_of(0), r), "disc": {"w": torch.full((2,), r), "b": torch.ones(1)}} for r in (0, 1)]
    command = ["remap", save_ranks(tmp_path, *files), *MODEL, "-o", tmp_path / "out.pt"]
    done = run(*command)
    assert (done.status, (tmp_path / "out.pt").exists()) == (1, False)
    assert "  differs between the ranks @ disc.w\n" in done.err
    assert "disc.b" not in done.err
    assert run(*command, "--drop", "disc.w").status == 0
    assert same(torch.load(tmp_path / "out.pt")["disc"], {"b": torch.ones(1)})


def test_incompatible_average_is_kept_with_a_warning(run: Run, tmp_path: Path) -> None:
    small = {"_flat_param": torch.ones(3)}
    files = save_ranks(tmp_path, *({"model": slices(state_of(0), rank), "ema": small} for rank in (0, 1)))
    done = run("remap", files, *MODEL, "-o", tmp_path / "out.pt")
    assert done.status == 0
    assert f"ema does not fit {SCRIPT}:Net, and stays as the ranks hold it" in done.err
    assert same(torch.load(tmp_path / "out.pt")["ema"], {"_flat_param": torch.ones(6)})


def test_full_parameters_must_be_equal_on_all_ranks(run: Run, tmp_path: Path) -> None:
    """Otherwise the files are of two steps. For buffers and for entries outside state dicts, rank 0's is used."""
    states = [{**state_of(0), "layers.0.seen": torch.full((2,), rank)} for rank in (0, 1)]
    files = save_ranks(
        tmp_path,
        *({"model": state, "rng": torch.full((3,), r), "one": torch.ones(2)} for r, state in enumerate(states)),
    )
    done = run("remap", files, *MODEL, "-o", tmp_path / "out.pt")
    assert done.status == 0
    assert "warning: layers.0.seen differs between the ranks: rank 0's is used\n" in done.err
    assert "warning: rng differs between the ranks: rank 0's is used\n" in done.err
    assert done.err.count("differs") == 2
    states[1]["emb.weight"] = state_of(1)["emb.weight"]
    done = run("remap", save_ranks(tmp_path, *states), *MODEL, "-o", tmp_path / "out.pt", "--force")
    assert done.status == 2
    assert "error: the files are not of one step\n  differs between the ranks @ emb.weight\n" in done.err


@pytest.mark.parametrize("none", [0, 1])
def test_different_module_versions_are_reported(run: Run, tmp_path: Path, none: int) -> None:
    """Those of the first rank that has any are used."""
    states: list[Any] = [Net().state_dict() for _ in range(3)]
    states[2]._metadata["head"] = {"version": 7}
    states[none] = dict(state_of(0))
    for state in states:
        state.update(state_of(0))
    done = run("remap", save_ranks(tmp_path, *states), *MODEL, "-o", tmp_path / "out.pt")
    assert done.status == 0
    used = 1 - none
    assert (
        f"_metadata (module versions) differs or is missing on rank {none}, rank 2: rank {used}'s is used" in done.err
    )
    assert torch.load(tmp_path / "out.pt")._metadata == Net().state_dict()._metadata  # type: ignore[attr-defined]
    assert "_metadata" not in run("remap", save_ranks(tmp_path, *states[2:], states[2]), *MODEL, "--dry-run").err


def test_wrapper_paths_are_removed_from_module_versions(run: Run, tmp_path: Path) -> None:
    state = torch.nn.DataParallel(Net()).state_dict()
    assert {"", "module", "module.head"} < state._metadata.keys()  # type: ignore[attr-defined]
    done = run("remap", save_ranks(tmp_path, state, state), *MODEL, "--to", "serialized", "-o", tmp_path / "out.pt")
    assert done.status == 0, done.err
    assert torch.load(tmp_path / "out.pt")._metadata == Net().state_dict()._metadata  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", VERSIONED)
def test_values_that_depend_on_module_versions_are_not_sharded(run: Run, tmp_path: Path, name: str) -> None:
    """Neither rank files nor safetensors can store module versions."""
    torch.save(VERSIONED[name]().state_dict(), tmp_path / "in.pt")
    command = ["remap", tmp_path / "in.pt", "--model", f"versioned_zoo:{name}", "--to"]
    other = run(*command, "serialized", "-o", tmp_path / "out.safetensors")
    done = run(*command, "fsdp-sharded(world_size=2)", "-o", tmp_path / "rank_{rank}.pt")
    assert done.status == other.status
    runtime = run(*command, "runtime", "-o", tmp_path / "runtime.safetensors")  # no model loads these names
    assert runtime.status == 0, runtime.err
    assert bool(list(tmp_path.glob("rank_*"))) == (done.status == 0)
    assert ("(_metadata) are absent, and rank files have no place for them" in done.err) == (done.status == 1)
    assert ("the module versions in _metadata are left out" in done.err) == (done.status == 0)


def test_plan_of_unsharding_cannot_be_saved(tmp_path: Path, run: Run) -> None:
    (tmp_path / "m.py").write_text("from torch import nn\ndef net(): return nn.Linear(4, 2)")
    torch.save(torch.nn.Linear(4, 2).state_dict(), tmp_path / "in.pt")
    model = ("--model", f"{tmp_path / 'm.py'}:net")
    ranks = ("--to", "fsdp-sharded(world_size=2)", "-o", tmp_path / "rank_{rank}.pt")
    assert run("remap", tmp_path / "in.pt", *model, *ranks).status == 0
    unshard = ("remap", tmp_path / "rank_*.pt", *model, "-o", tmp_path / "out.pt")
    refused = run(*unshard, "--save-plan", tmp_path / "plan.json")
    assert (refused.status, "without a plan" in refused.err) == (2, True)
    assert not (tmp_path / "plan.json").exists()
    assert run(*unshard).status == 0
    assert torch.load(tmp_path / "out.pt").keys() == torch.load(tmp_path / "in.pt").keys()
    missing = run("remap", tmp_path / "in.pt", *model, *ranks[:-1], tmp_path / "new/rank_{rank}.pt")
    assert (missing.status, f"mkdir -p {tmp_path / 'new'}" in missing.err) == (2, True)


State = dict[str, Any]


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
