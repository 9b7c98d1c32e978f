"""Other entries in rank files: averages of the model, other models, tensors outside of state
dicts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from command import Run
from fsdp_run import Net
from places import SUPPORT

SCRIPT = SUPPORT / "fsdp_run.py"
MODEL = ["--model", f"{SCRIPT}:Net"]


def state_of(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    model = Net()
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.normal_()
    return dict(model.state_dict())


def same(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def save_ranks(folder: Path, *files: dict[str, Any]) -> Path:
    for rank, file in enumerate(files):
        torch.save(file, folder / f"rank_{rank}.pt")
    return folder / "rank_*.pt"


def slices(state: Mapping[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """Return the state_dict of one of two ranks with `use_orig_params`: half of each parameter, and
    full buffers.
    """
    parameters = dict(Net().named_parameters(remove_duplicate=False))
    return {
        k: v.flatten().chunk(2)[rank].clone() if k in parameters else v for k, v in state.items()
    }


def test_averages_are_joined_like_the_model(run: Run, tmp_path: Path) -> None:
    """Averages may have another dtype or a wrapper; another model is complete in every file."""
    half = {key: value.half() for key, value in state_of(2).items()}
    other = {"w": torch.arange(3.0)}
    files: list[dict[str, Any]] = []
    for rank in (0, 1):
        ema = {f"module.{key}": value for key, value in slices(state_of(1), rank).items()}
        parts = {"model": slices(state_of(0), rank), "ema": ema}
        files.append({**parts, "half": slices(half, rank), "other": other})
    back = tmp_path / "back.pt"
    named = [*MODEL, "--to", "serialized", "-o", back, "--format", "json"]
    done = run("remap", save_ranks(tmp_path, *files), *named)
    assert done.data["sections"] == ["model", "ema", "half"]
    result = torch.load(back)
    expected = {"model": state_of(0), "ema": state_of(1), "half": half, "other": other}
    assert all(same(result[name], state) for name, state in expected.items())


def test_slices_of_an_average_are_joined(run: Run, tmp_path: Path) -> None:
    files: list[dict[str, Any]]
    files = [
        {"model": slices(state_of(0), rank), "ema": slices(state_of(1), rank)} for rank in (0, 1)
    ]
    for file in files:
        group = {"lr": torch.tensor(0.1), "params": ["emb.weight"]}
        state = {"emb.weight": {"exp_avg": file["ema"]["emb.weight"]}}
        file["optimizer"] = {"state": state, "param_groups": [group]}
    done = run("remap", save_ranks(tmp_path, *files), *MODEL, "-o", tmp_path / "out.pt")
    assert done.status == 0, done.err
    assert "differs" not in done.err
    result = torch.load(tmp_path / "out.pt")
    assert torch.equal(
        result["optimizer"]["state"]["emb.weight"]["exp_avg"], result["ema"]["emb.weight"]
    )
    assert same(result["model"], state_of(0))
    assert same(result["ema"], state_of(1))


def test_tensors_of_another_model_that_differ_between_ranks_are_refused(
    run: Run, tmp_path: Path
) -> None:
    """Without that model, shards cannot be told from copies; identical copies are kept."""
    files = [
        {"model": slices(state_of(0), r), "disc": {"w": torch.full((2,), r), "b": torch.ones(1)}}
        for r in (0, 1)
    ]
    command = ["remap", save_ranks(tmp_path, *files), *MODEL, "-o", tmp_path / "out.pt"]
    done = run(*command)
    assert (done.status, (tmp_path / "out.pt").exists()) == (1, False)
    assert "  differs between the ranks @ disc.w\n" in done.err
    assert "disc.b" not in done.err
    assert run(*command, "--drop", "disc.w").status == 0
    assert same(torch.load(tmp_path / "out.pt")["disc"], {"b": torch.ones(1)})


def test_incompatible_average_is_kept_with_a_warning(run: Run, tmp_path: Path) -> None:
    small = {"_flat_param": torch.ones(3)}
    files = save_ranks(
        tmp_path, *({"model": slices(state_of(0), rank), "ema": small} for rank in (0, 1))
    )
    done = run("remap", files, *MODEL, "-o", tmp_path / "out.pt")
    assert done.status == 0
    assert f"ema does not fit {SCRIPT}:Net, and stays as the ranks hold it" in done.err
    assert same(torch.load(tmp_path / "out.pt")["ema"], {"_flat_param": torch.ones(6)})


def test_full_parameters_must_be_equal_on_all_ranks(run: Run, tmp_path: Path) -> None:
    """Otherwise the files are of two steps. For buffers and for entries outside state dicts, rank
    0's is used.
    """
    states = [{**state_of(0), "layers.0.seen": torch.full((2,), rank)} for rank in (0, 1)]
    files = save_ranks(
        tmp_path,
        *(
            {"model": state, "rng": torch.full((3,), r), "one": torch.ones(2)}
            for r, state in enumerate(states)
        ),
    )
    done = run("remap", files, *MODEL, "-o", tmp_path / "out.pt")
    assert done.status == 0
    assert "warning: layers.0.seen differs between the ranks: rank 0's is used\n" in done.err
    assert "warning: rng differs between the ranks: rank 0's is used\n" in done.err
    assert done.err.count("differs") == 2
    states[1]["emb.weight"] = state_of(1)["emb.weight"]
    done = run("remap", save_ranks(tmp_path, *states), *MODEL, "-o", tmp_path / "out.pt", "--force")
    assert done.status == 2
    assert (
        "error: the files are not of one step\n  differs between the ranks @ emb.weight\n"
        in done.err
    )


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
        f"_metadata (module versions) differs or is missing on rank {none}, rank 2: rank {used}'s"
        " is used" in done.err
    )
    assert torch.load(tmp_path / "out.pt")._metadata == Net().state_dict()._metadata  # type: ignore[attr-defined]
    assert (
        "_metadata"
        not in run("remap", save_ranks(tmp_path, *states[2:], states[2]), *MODEL, "--dry-run").err
    )


def test_wrapper_paths_are_removed_from_module_versions(run: Run, tmp_path: Path) -> None:
    state = torch.nn.DataParallel(Net()).state_dict()
    assert {"", "module", "module.head"} < state._metadata.keys()  # type: ignore[attr-defined]
    done = run(
        "remap",
        save_ranks(tmp_path, state, state),
        *MODEL,
        "--to",
        "serialized",
        "-o",
        tmp_path / "out.pt",
    )
    assert done.status == 0, done.err
    assert torch.load(tmp_path / "out.pt")._metadata == Net().state_dict()._metadata  # type: ignore[attr-defined]
