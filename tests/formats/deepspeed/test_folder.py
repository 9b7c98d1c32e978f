"""ZeRO folders of DeepSpeed are gathered with the same bits as by DeepSpeed's own tools."""

from __future__ import annotations

import shlex
import shutil
import struct
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from functools import partial, reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import deepspeed_run
from command import Run, notes_in
from files import change_archive
from flips import check_flips
from places import DATA
from standins import edited

FOLDERS = sorted(
    folder for folder in (DATA / "deepspeed-0.19.8").iterdir() if (folder / "latest").exists()
)
UNIVERSAL = sorted((DATA / "deepspeed-0.19.8").glob("*-universal"))


@pytest.fixture(params=FOLDERS, ids=lambda folder: folder.name)
def zero_folder(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.param
    return folder


def test_weights_and_moments_match_deepspeed(zero_folder: Path, run: Run, tmp_path: Path) -> None:
    """`zero_to_fp32` converts buffers to fp32; ckpttool keeps the saved dtype of buffers and frozen
    parameters.
    """
    done = run("remap", zero_folder, "-o", tmp_path / "whole.pt", "--verify")
    assert done.status == 0, done.err
    assert "not copied: skipped_steps, global_steps, global_samples, epoch of" in done.err
    expected, found = torch.load(zero_folder / "whole.pt"), torch.load(tmp_path / "whole.pt")
    model = found["model"]
    assert expected["model"].keys() <= model.keys() <= {*expected["model"], "frozen.weight"}
    assert all(
        torch.equal(model[key].to(value.dtype), value) for key, value in expected["model"].items()
    )
    assert model["head.weight"].data_ptr() == model["emb.weight"].data_ptr()
    state = found["optimizer"]["state"]
    assert state.keys() == expected["optimizer"].keys()
    assert [entry["step"].item() for entry in state.values()] == [2.0] * 7
    for name, moments in expected["optimizer"].items():
        assert all(
            torch.equal(state[name][key].flatten(), value.flatten())
            for key, value in moments.items()
        )
        assert {
            key: value.shape for key, value in state[name].items() if key != "step"
        } == dict.fromkeys(moments, model[name].shape)


def test_the_gathered_optimizer_is_loaded_by_torch(
    zero_folder: Path, run: Run, tmp_path: Path
) -> None:
    """With ids in the order of the model, as `Optimizer.load_state_dict` expects."""
    definition = f"{deepspeed_run.__file__}:Net"
    out = ("--optimizer-keys", "id", "-o", tmp_path / "ids.pt")
    done = run("remap", zero_folder, "--model", definition, "--to", "serialized", *out)
    assert done.status == 0, done.err
    found, model = torch.load(tmp_path / "ids.pt"), deepspeed_run.Net()
    model.load_state_dict(found["model"])
    groups = deepspeed_run.groups_of(model, len(found["optimizer"]["param_groups"]))
    optimizer = torch.optim.AdamW(groups, lr=0.5)
    optimizer.load_state_dict(found["optimizer"])
    named = dict(model.named_parameters())
    moments = torch.load(zero_folder / "whole.pt")["optimizer"]
    loaded = {
        name: optimizer.state[parameter]["exp_avg"]
        for name, parameter in named.items()
        if name in moments
    }
    assert all(
        torch.equal(value.flatten(), moments[name]["exp_avg"].flatten())
        for name, value in loaded.items()
    )
    assert optimizer.param_groups[0]["lr"] == 0.01


def test_inspect_lists_the_sections_of_a_folder(zero_folder: Path, run: Run) -> None:
    listed = run("inspect", zero_folder, "--format", "json").data
    assert listed["format"] == "deepspeed"
    assert [section["kind"] for section in listed["sections"]] == ["state_dict", "optimizer"]
    assert "deepspeed.runtime.zero.config.ZeroStageEnum" in " ".join(listed["globals"])
    step = run("inspect", zero_folder / "global_step2", "--format", "json").data
    assert step["tensors"] == listed["tensors"]


def test_in_place_edits_are_refused(zero_folder: Path, run: Run, tmp_path: Path) -> None:
    shutil.copytree(zero_folder, tmp_path / "run")
    done = run("remap", tmp_path / "run", "--rule", "emb.{x*} => e.{x*}", "--in-place")
    assert done.status == 1
    assert (
        "is in another format (DeepSpeed folder (ZeRO, universal)) than its replacement" in done.err
    )
    done = run(
        "remap", f"{tmp_path / 'run'}::model", "--keep-aliases", "-o", f"{tmp_path / 'out'}/"
    )
    assert done.status == 0, done.err
    assert (tmp_path / "out" / "model.safetensors").exists()


def _without_rank(step: Path) -> None:
    next(step.glob("*zero_pp_rank_1_mp_rank_00_optim_states.pt")).unlink()


def _without_model(step: Path) -> None:
    for path in step.glob("*model_states.pt"):
        path.unlink()


def _of_another_step(step: Path) -> None:
    path = next(step.glob("*zero_pp_rank_1_mp_rank_00_optim_states.pt"))
    change_archive(
        path, lambda _, data: struct.pack("<f", 3.0) if data == struct.pack("<f", 2.0) else data
    )


def _with_an_extra_rank(step: Path) -> None:
    path = next(step.glob("*zero_pp_rank_1_mp_rank_00_optim_states.pt"))
    shutil.copy(path, path.with_name(path.name.replace("rank_1", "rank_7")))


def _of_another_kind(content: object) -> Callable[[Path], None]:
    return lambda step: torch.save(content, next(step.glob("*model_states.pt")))


def _all(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:

    def damage(step: Path) -> None:
        for path in _ranks(step):
            edited(path, lambda content: change(content["optimizer_state_dict"]))

    return damage


def _ranks(step: Path) -> list[Path]:
    return sorted(step.glob("*optim_states.pt"))


def _of_another_format(step: Path) -> None:
    torch.save({}, next(step.glob("*model_states.pt")), _use_new_zipfile_serialization=False)


def _experts(step: Path) -> None:
    path = next(step.glob("*model_states.pt"))
    for name in ("layer_00-model_states.pt", "expp_rank_0_mp_rank_00_optim_states.pt"):
        shutil.copy(path, step / name)


def _with_an_extra_model_part(step: Path) -> None:
    path = next(step.glob("*model_states.pt"))
    shutil.copy(path, path.with_name(path.name.replace("mp_rank_00", "mp_rank_01")))


def _rank(rank: int, change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    return lambda step: edited(
        next(step.glob(f"*zero_pp_rank_{rank}_*optim*")),
        lambda content: change(content["optimizer_state_dict"]),
    )


def _base(state: dict[str, Any]) -> Any:
    return state.get("base_optimizer_state") or state["optimizer_state_dict"]


def _second_model(step: Path) -> None:
    path = next(step.glob("*model_states.pt"))
    other = (
        "mp_rank_00_model_states.pt"
        if path.name.startswith("zero")
        else f"zero_pp_rank_0_{path.name}"
    )
    shutil.copy(path, step / other)


def _set(where: dict[str, Any], **items: Any) -> None:
    where.update(items)


def _negative(raw: dict[str, Any]) -> None:
    for gaps in raw.setdefault("param_alignment_paddings", [[0]]):
        gaps[0] = -1


def _first_flat(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, Any]], None]:
    return lambda raw: raw[_flat(raw)].__setitem__(0, change(raw[_flat(raw)][0]))


def _with_one_group_less(raw: dict[str, Any]) -> None:
    raw[_flat(raw)].pop()


def _flat(raw: dict[str, Any]) -> str:
    return "fp32_flat_groups" if "fp32_flat_groups" in raw else "single_partition_of_fp32_groups"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without_rank, "no file of this rank's optimizer states @ rank 1"),
        (_without_model, "without the model's own file"),
        (
            _of_another_step,
            "has neither the shape of the partitions nor one value on all ranks @ step",
        ),
        (_with_an_extra_rank, " ranks @ rank 7"),
        (_experts, "belongs to another model part @ layer_00-model_states.pt"),
        (_experts, "belongs to another model part @ expp_rank_0_mp_rank_00_optim_states.pt"),
        (_of_another_format, "was not written by torch.save"),
        (_of_another_kind([1]), "does not hold a dict"),
        (_rank(1, lambda raw: _set(raw, **{_flat(raw): [3]})), "is not a flat tensor"),
        (
            _rank(1, lambda raw: _set(raw, **{_flat(raw): [torch.ones(9).to_sparse()]})),
            "is not a flat tensor",
        ),
        (_rank(0, lambda raw: _set(raw, partition_count=1)), "the run had 1 ranks"),
        (_rank(0, lambda raw: _set(raw, partition_count="x")), "'x' partitions"),
        (_rank(0, lambda raw: _set(raw, partition_count=1 << 63)), "None partitions"),
        (
            lambda step: edited(_ranks(step)[0], lambda raw: _set(raw, optimizer_state_dict=5)),
            "_dict is not a dict",
        ),
        (
            _all(lambda raw: _set(_base(raw)["state"][0], more=torch.ones(3))),
            "one value on all ranks @ more",
        ),
        (_all(lambda raw: _set(_base(raw)["state"][0], more="x")), "one value on all ranks @ more"),
        (
            _rank(0, lambda raw: _set(raw, param_alignment_paddings=[[None] * 7])),
            "each parameter @ param_alignment_",
        ),
        (_with_an_extra_model_part, "belongs to another model part @"),
        (
            _rank(0, lambda raw: _base(raw)["state"][0].pop("exp_avg")),
            "one value on all ranks @ exp_avg",
        ),
        (
            _rank(1, lambda raw: _base(raw)["state"][0].pop("exp_avg")),
            "one value on all ranks @ exp_avg",
        ),
        (
            _rank(1, lambda raw: _set(_base(raw)["state"][0], more=1)),
            "one value on all ranks @ more",
        ),
        (
            _rank(1, lambda raw: _set(_base(raw)["param_groups"][0], lr=0.5)),
            "lr is 0.5, and 0.01 on rank 0 @",
        ),
        (
            _rank(1, lambda raw: _set(_base(raw)["param_groups"][0], more=1)),
            "more is 1, and None on rank 0 @",
        ),
        (
            _rank(0, lambda raw: _set(raw, param_alignment_paddings=[5])),
            "param_alignment_paddings is not a list",
        ),
        (_rank(0, _negative), "not one for each parameter @ param_alignment_paddings"),
        (
            _rank(0, lambda raw: _set(raw, param_alignment_paddings=[[0]])),
            "one for each parameter @ param_alignment_",
        ),
        (_rank(1, lambda raw: _set(raw, zero_stage=7)), "zero_stage is 7, in "),
        (_rank(0, lambda raw: _set(raw, zero_stage=7)), " 7"),
        (_rank(1, lambda raw: _set(raw, partition_count=4)), "partition_count is 4, in "),
        (
            _rank(0, lambda raw: _set(raw, partition_count=[4])),
            "no file of this rank's optimizer states @ rank 3",
        ),
        (
            _rank(0, lambda raw: _set(raw, partition_count=[3, 2])),
            "are partitioned over [3, 2] ranks, as for experts",
        ),
        (_rank(0, lambda raw: _set(raw, partition_count=[])), "[] partitions"),
        (_rank(0, lambda raw: _set(raw, partition_count=0)), "0 partitions"),
        (
            _rank(1, _first_flat(lambda flat: flat.view(torch.int32))),
            "the ranks' partitions have several dtypes: float32, int32",
        ),
        (
            _rank(1, _first_flat(lambda flat: flat.repeat_interleave(2)[::2])),
            "is not a flat tensor",
        ),
        (
            _rank(1, _first_flat(lambda flat: torch.cat([flat, torch.zeros(9)]))),
            "rank_0_mp_rank_00_optim_states.pt: the partitions do not fit the parameters of",
        ),
        (_rank(1, _with_one_group_less), "the partitions do not fit the parameters"),
        (_rank(1, lambda raw: _set(raw, ds_version="0.1")), "ds_version is '0.1', in "),
        (_second_model, "rank 0"),
    ],
)
def test_missing_or_contradictory_ranks_are_refused(
    zero_folder: Path, run: Run, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    shutil.copytree(zero_folder, tmp_path / "run")
    damage(tmp_path / "run" / "global_step2")
    done = run("inspect", tmp_path / "run")
    assert (done.status, message in done.err) == (2, True), done.err


@pytest.mark.parametrize(
    ("rank", "change", "message"),
    [
        (
            0,
            lambda raw: raw["shared_params"].clear(),
            "neither a parameter, a buffer nor shared @ head.weight",
        ),
        (
            0,
            lambda raw: raw["shared_params"].update({"head.weight": "gone"}),
            "a buffer nor shared @ head.weight",
        ),
        (
            0,
            lambda raw: raw["shared_params"].update({"head.weight": [1]}),
            "a buffer nor shared @ head.weight",
        ),
        (
            0,
            lambda raw: raw["frozen_param_fragments"].clear(),
            "a rank has no part of it @ frozen.weight",
        ),
        (
            1,
            lambda raw: raw["frozen_param_fragments"].clear(),
            "a rank has no part of it @ frozen.weight",
        ),
        (
            0,
            lambda raw: raw["frozen_param_shapes"].update({"frozen.weight": torch.Size([6, 5])}),
            "the ranks hold too few elements @ frozen",
        ),
        (1, lambda raw: raw.update(global_steps=4), "global_steps is 4, in "),
        (1, lambda raw: raw.update(dp_world_size=4), "dp_world_size is 4, in "),
        (0, lambda raw: raw.update(param_shapes=None), "no shapes of parameters @ param_shapes"),
        (0, lambda raw: raw.update(param_shapes=[{"up.weight": [-1]}]), "sizes [-1]"),
        (
            0,
            lambda raw: raw.update(param_shapes=[{"up.weight": [1 << 20_000]}]),
            "sizes that no tensor has",
        ),
        (
            0,
            lambda raw: raw.update(param_shapes=[{"up.weight": [-1 << 20_000]}]),
            "sizes that no tensor has",
        ),
        (
            0,
            lambda raw: raw["param_shapes"][1].update(more=torch.Size([4])),
            "its parts of the parameters are",
        ),
    ],
)
def test_wrong_model_files_of_stage_3_are_refused(
    run: Run, tmp_path: Path, rank: int, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    step = shutil.copytree(DATA / "deepspeed-0.19.8" / "zero-3", tmp_path / "run") / "global_step2"
    edited(step / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", change)
    done = run("inspect", tmp_path / "run")
    assert (done.status, message in done.err) == (2, True), done.err


def test_missing_model_files_of_ranks_are_reported(run: Run, tmp_path: Path) -> None:
    step = shutil.copytree(DATA / "deepspeed-0.19.8" / "zero-3", tmp_path / "run") / "global_step2"
    for rank in (1, 2):
        (step / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt").unlink()
    done = run("inspect", tmp_path / "run")
    assert done.status == 2
    assert [line for line in done.err.splitlines() if line.startswith("  ")] == [
        f"  no file of this rank's model states @ rank {rank}" for rank in (1, 2)
    ]


@pytest.mark.parametrize("name", ["zero-1", "zero-2"])
@pytest.mark.parametrize(
    ("model", "optimizer", "message"),
    [
        (
            lambda raw: raw.update(shared_params={"head.weight": "gone"}),
            None,
            "a buffer nor shared @ head.weight",
        ),
        (
            lambda raw: raw.update(param_shapes=[{} for _ in raw["param_shapes"]]),
            {"param_alignment_paddings": None},
            "its parameters are 0 @",
        ),
        (
            None,
            {"param_slice_mappings": [{"up.weight": 5}]},
            "gives another place for its part @ up.weight",
        ),
        (
            None,
            {"param_slice_mappings": [{"up.weight": SimpleNamespace(numel=None, start=0)}]},
            "gives another place for its part @ up.weight",
        ),
        (
            None,
            {"param_slice_mappings": [{"up.weight": SimpleNamespace(numel=0, start=None)}]},
            "gives another place for its part @ up.weight",
        ),
        (None, _with_one_group_less, "param groups, the ranks have"),
    ],
)
def test_wrong_files_of_stages_1_and_2_are_refused(
    run: Run, tmp_path: Path, name: str, model: Any, optimizer: Any, message: str
) -> None:
    step = shutil.copytree(DATA / "deepspeed-0.19.8" / name, tmp_path / "run") / "global_step2"
    if model is not None:
        edited(step / "mp_rank_00_model_states.pt", model)
    if optimizer is not None:
        _all(optimizer if callable(optimizer) else lambda raw: raw.update(optimizer))(step)
    done = run("inspect", tmp_path / "run")
    assert (done.status, message in done.err) == (2, True), done.err


@pytest.mark.parametrize("name", ["zero-1", "zero-2"])
@pytest.mark.parametrize("left", [0, 1])
def test_files_without_positions_of_parts_are_read(
    run: Run, tmp_path: Path, name: str, left: int
) -> None:
    zero_folder = DATA / "deepspeed-0.19.8" / name
    step = shutil.copytree(zero_folder, tmp_path / "run") / "global_step2"
    _all(lambda raw: raw.update(param_slice_mappings=raw["param_slice_mappings"][:left]))(step)
    done = run("diff", tmp_path / "run", zero_folder, "--values", "--whole")
    assert (done.status, done.err) == (0, "")


@pytest.mark.parametrize("listed", [["scale", "count"], [], ["gone", [1]]])
def test_a_note_reports_that_buffers_of_rank_0_are_used(
    run: Run, tmp_path: Path, listed: list[str]
) -> None:
    """Also if the file does not list them: all entries but placeholders belong to the module."""
    step = shutil.copytree(DATA / "deepspeed-0.19.8" / "zero-3", tmp_path / "run") / "global_step2"
    edited(
        step / "zero_pp_rank_0_mp_rank_00_model_states.pt",
        lambda raw: raw.update(buffer_names=listed),
    )
    edited(
        step / "zero_pp_rank_1_mp_rank_00_model_states.pt",
        lambda raw: raw["module"]["scale"].add_(1),
    )
    edited(
        step / "zero_pp_rank_2_mp_rank_00_model_states.pt", lambda raw: raw["module"].pop("count")
    )
    done = run("remap", tmp_path / "run", "-o", tmp_path / "whole.pt")
    assert all(
        f"{name} differs between the ranks: rank 0's is used" in done.err
        for name in ("scale", "count")
    )
    assert torch.load(tmp_path / "whole.pt")["model"]["scale"].tolist() == [0, 1, 2, 3, 4]


def test_other_objects_of_the_module_are_copied(
    zero_folder: Path, run: Run, tmp_path: Path
) -> None:
    step = shutil.copytree(zero_folder, tmp_path / "run") / "global_step2"
    for number, path in enumerate(sorted(step.glob("*model_states.pt"))):
        objects = {"up._extra_state": {"amax": number}, "n": [1, 2]}
        edited(path, partial(lambda objects, content: content["module"].update(objects), objects))
    done = run("remap", tmp_path / "run", "-o", tmp_path / "whole.pt", "--verify")
    assert done.status == 0, done.err
    found = torch.load(tmp_path / "whole.pt")["model"]
    assert (found["up._extra_state"], found["n"]) == ({"amax": 0}, [1, 2])
    assert (
        "up._extra_state differs between the ranks: rank 0's is used" in done.err
    ) == zero_folder.name.startswith("zero-3")
    assert "n differs" not in done.err


def nested_lists(depth: int) -> list[Any]:
    return reduce(lambda inner, _: [inner], range(depth), list[Any]())


def test_a_note_lists_options_that_are_not_copied(
    zero_folder: Path, run: Run, tmp_path: Path
) -> None:
    step = shutil.copytree(zero_folder, tmp_path / "run") / "global_step2"
    dropped = {
        "lr": torch.tensor(0.1),
        "betas": (torch.tensor(0.9), 0.99),
        "foreach": {},
        "fused": torch.device("cpu"),
    }
    dropped |= {
        "capturable": OrderedDict(),
        "maximize": [torch.Size([1])],
        "amsgrad": nested_lists(400),
    }
    options = dropped | {"own": None, "pair": [1, [2.0]]}
    for rank, _ in enumerate(step.glob("*optim_states.pt")):
        _rank(rank, lambda raw: _base(raw)["param_groups"][0].update(options))(step)
    done = run("remap", tmp_path / "run", "-o", tmp_path / "whole.pt")
    assert all(f"not copied: {name} of param group 0" in done.err for name in dropped)
    group = torch.load(tmp_path / "whole.pt")["optimizer"]["param_groups"][0]
    assert group.keys().isdisjoint(dropped)
    assert (group["own"], group["pair"]) == (None, [1, [2.0]])


def test_a_state_that_is_a_number_applies_to_each_parameter(
    zero_folder: Path, run: Run, tmp_path: Path
) -> None:
    step = shutil.copytree(zero_folder, tmp_path / "run") / "global_step2"
    _all(
        lambda raw: _base(raw)["state"].update(
            {at: {**state, "step": 2} for at, state in _base(raw)["state"].items()}
        )
    )(step)
    assert run("remap", tmp_path / "run", "-o", tmp_path / "whole.pt").status == 0
    state = torch.load(tmp_path / "whole.pt")["optimizer"]["state"]
    assert [(type(entry["step"]), entry["step"]) for entry in state.values()] == [(int, 2)] * 7


def test_no_note_if_everything_is_copied(zero_folder: Path, run: Run, tmp_path: Path) -> None:
    step = shutil.copytree(zero_folder, tmp_path / "run") / "global_step2"
    for path in step.glob("*model_states.pt"):
        edited(
            path,
            lambda raw: raw.update(
                skipped_steps=None, global_steps=None, global_samples=None, epoch=None
            ),
        )
    assert "not copied" not in run("inspect", tmp_path / "run").err


@pytest.mark.parametrize(
    "change",
    [
        lambda base: _set(base, state=[]),
        lambda base: _set(base, param_groups={}),
        lambda base: _set(base, param_groups=[5, *base["param_groups"]]),
        lambda base: base["param_groups"].append({"params": [9]}),
        lambda base: base["param_groups"].pop(),
        lambda base: base["param_groups"][0].update(params={}),
        lambda base: base["param_groups"][0].update(params=["x"]),
    ],
)
def test_an_optimizer_with_another_layout_is_not_read(
    zero_folder: Path, run: Run, tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    step = shutil.copytree(zero_folder, tmp_path / "run") / "global_step2"
    _all(lambda raw: change(_base(raw)))(step)
    done = run("inspect", tmp_path / "run", "--format", "json")
    assert [section["path"] for section in done.data["sections"]] == ["model"]
    assert any("the optimizer is not read: " in note for note in notes_in(done.data))


@pytest.mark.parametrize("name", ["zero-1", "zero-2"])
def test_files_with_swapped_ranks_are_refused(run: Run, tmp_path: Path, name: str) -> None:
    """ZeRO-1 and -2 save the position of each rank's part."""
    shutil.copytree(DATA / "deepspeed-0.19.8" / name, tmp_path / "run")
    zero, one = (next((tmp_path / "run").rglob(f"*zero_pp_rank_{rank}_*optim*")) for rank in (0, 1))
    zero.rename(tmp_path / "other")
    one.rename(zero)
    (tmp_path / "other").rename(one)
    done = run("inspect", tmp_path / "run")
    assert (done.status, "gives another place for its part @" in done.err) == (2, True), done.err


def test_a_missing_step_in_latest_is_an_error(run: Run, tmp_path: Path) -> None:
    shutil.copytree(FOLDERS[0], tmp_path / "run")
    (tmp_path / "run" / "latest").write_text("global_step9")
    done = run("inspect", tmp_path / "run")
    assert (
        done.status,
        "the step 'global_step9' that its file `latest` names is not there" in done.err,
    ) == (2, True)
    (tmp_path / "run" / "latest").write_text("../../etc")
    assert run("inspect", tmp_path / "run").status == 2


def test_an_old_layout_is_read_without_its_optimizer(run: Run, tmp_path: Path) -> None:
    """Older releases wrote a list of states; the weights are still read."""
    shutil.copytree(FOLDERS[0], tmp_path / "run")
    for path in (tmp_path / "run").rglob("*optim_states.pt"):
        change_archive(
            path, lambda _, data: data.replace(b"base_optimizer_state", b"base_optimizer_stata")
        )
    assert "the optimizer is not read" in run("inspect", tmp_path / "run").err
    listed = run("inspect", tmp_path / "run", "--format", "json").data
    assert [section["path"] for section in listed["sections"]] == ["model"]


# Universal checkpoints


@pytest.fixture(params=UNIVERSAL, ids=lambda folder: folder.name)
def universal(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.param
    return folder


def gathered(folder: Path, run: Run, out: Path) -> Any:
    done = run("remap", folder, "-o", out, "--verify")
    assert done.status == 0, done.err
    return torch.load(out)


def test_a_universal_checkpoint_equals_its_source(
    universal: Path, run: Run, tmp_path: Path
) -> None:
    """Compare everything that `ds_to_universal` keeps: weights, buffers, moments, steps and
    hyperparameters.
    """
    source = universal.with_name(universal.name.removesuffix("-universal"))
    found = gathered(universal, run, tmp_path / "universal.pt")
    expected = gathered(source, run, tmp_path / "parts.pt")
    assert list(found["model"]) == list(expected["model"])
    assert all(torch.equal(found["model"][key], value) for key, value in expected["model"].items())
    assert found["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
    assert found["optimizer"]["state"].keys() == expected["optimizer"]["state"].keys()
    for name, moments in expected["optimizer"]["state"].items():
        state = found["optimizer"]["state"][name]
        assert state.keys() == moments.keys()
        assert all(
            torch.equal(state[key], value) and state[key].shape == value.shape
            for key, value in moments.items()
        )
    gathered_by_deepspeed = torch.load(source / "whole.pt")
    assert all(
        torch.equal(found["model"][key].to(v.dtype), v)
        for key, v in gathered_by_deepspeed["model"].items()
    )


def _without(name: str) -> Callable[[Path], None]:
    return lambda zero: (zero / "up.weight" / name).unlink()


def _of_another_shape(zero: Path) -> None:
    shutil.copy(zero / "up.bias" / "exp_avg.pt", zero / "up.weight" / "exp_avg.pt")


def _file(content: object) -> Callable[[Path], None]:
    return lambda zero: torch.save(content, zero / "up.weight" / "fp32.pt")


def _shapes(shapes: object) -> Callable[[Path], None]:
    def damage(zero: Path) -> None:
        for path in zero.parent.glob("*model_states.pt"):
            edited(path, lambda raw: raw.update(param_shapes=shapes))

    return damage


def _no_parameter(zero: Path) -> None:
    shutil.rmtree(zero / "norm.bias")


def _no_step(zero: Path) -> None:
    shutil.rmtree(zero)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without("fp32.pt"), "no file fp32.pt of it @ up.weight"),
        (_of_another_shape, "exp_avg.pt has the shape [5], the parameter [5, 3] @ up.weight"),
        (_no_parameter, "no file fp32.pt of it @ norm.bias"),
        (lambda zero: (zero / "optimizer_state.pt").unlink(), "optimizer_state.pt"),
        (_no_step, "without the partitions of the weights"),
        (_file({}), "state.up.weight.fp32 is not a flat tensor"),
        (
            _file({"param": torch.tensor(1.0)}),
            "fp32.pt has the shape [], the parameter [5, 3] @ up.weight",
        ),
        (_file({"param": torch.ones(15).to_sparse()}), "state.up.weight.fp32 is not a flat tensor"),
        (_shapes(None), "does not hold every parameter completely"),
        (_shapes([{"../norm.bias": torch.Size([5])}]), "no file fp32.pt of it @ ../norm.bias"),
    ],
)
def test_an_incomplete_universal_checkpoint_is_refused(
    universal: Path, run: Run, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    shutil.copytree(universal, tmp_path / "run")
    damage(tmp_path / "run" / "global_step2_universal" / "zero")
    done = run("inspect", tmp_path / "run")
    assert (done.status, message in done.err) == (2, True), done.err


def test_the_hint_for_a_split_model_extracts_the_weights(
    universal: Path, run: Run, tmp_path: Path
) -> None:
    """Its universal checkpoint has a model file for each part, and complete parameters."""
    step = shutil.copytree(universal / "global_step2_universal", tmp_path / "step")
    first = next(step.glob("*model_states.pt"))
    shutil.copy(first, step / first.name.replace("mp_rank_00", "mp_rank_01"))
    done = run("inspect", step)
    assert done.status == 2
    assert "split by layers, by experts or within tensors" in done.err
    words = shlex.split(done.err.rpartition("shared weights: ")[2])
    subprocess.run([sys.executable, *words[1:-1], str(tmp_path / "OUT.pt")], check=True)
    found = torch.load(tmp_path / "OUT.pt")
    whole = gathered(universal, run, tmp_path / "whole.pt")["model"]
    assert found
    for name, value in found.items():  # ZeRO-3 parameters are flat
        # a tied weight has the precision of the model
        trained = (step / "zero" / name / "exp_avg.pt").exists()
        expected = whole[name].flatten().float()
        assert torch.equal(
            value.flatten(), expected if trained else expected.to(torch.bfloat16).float()
        ), name


def test_the_hint_for_a_split_model_names_ds_to_universal(
    zero_folder: Path, run: Run, tmp_path: Path
) -> None:
    step = next(shutil.copytree(zero_folder, tmp_path / "run").glob("global_step*"))
    first = next(step.glob("*model_states.pt"))
    shutil.copy(first, step / first.name.replace("mp_rank_00", "mp_rank_01"))
    done = run("inspect", step)
    assert done.status == 2
    assert f"ds_to_universal --input_folder {step} --output_folder {step}_universal" in done.err


@pytest.mark.parametrize(
    "change",
    [
        lambda rest: _set(rest, param_groups=[]),
        lambda rest: rest["param_groups"].append(5),
        lambda rest: _set(rest, param_groups=[5, *rest["param_groups"][1:]]),
    ],
)
def test_a_universal_checkpoint_with_invalid_groups_has_no_optimizer(
    universal: Path, run: Run, tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    shutil.copytree(universal, tmp_path / "run")
    edited(next((tmp_path / "run").rglob("optimizer_state.pt")), change)
    done = run("inspect", tmp_path / "run", "--format", "json")
    assert [section["path"] for section in done.data["sections"]] == ["model"]
    assert any(note.startswith("the optimizer is not read: ") for note in notes_in(done.data))


def test_state_of_rank_0_applies_to_all_parameters_or_is_omitted(
    universal: Path, run: Run, tmp_path: Path
) -> None:
    """A single value applies to every parameter; a tensor is left out with a note unless each
    parameter has one.
    """
    shutil.copytree(universal, tmp_path / "run")
    state = {
        "step": 7,
        "beta": 0.5,
        "exp_avg": torch.ones(4),
        "alone": torch.ones(3),
        "none": torch.ones(0),
    }
    edited(
        next((tmp_path / "run").rglob("optimizer_state.pt")),
        lambda rest: rest.update(optimizer_state_dict={"state": {0: state}}),
    )
    done = run("remap", tmp_path / "run", "-o", tmp_path / "o.pt")
    assert [f"not copied: {name} of " in done.err for name in state] == [
        False,
        False,
        False,
        True,
        True,
    ], done.err
    found = torch.load(tmp_path / "o.pt")["optimizer"]
    first, second = (group["params"] for group in found["param_groups"])
    assert all(found["state"][name]["beta"] == 0.5 for name in first)
    assert all("beta" not in found["state"][name] for name in second)


def test_a_parameter_of_one_element_keeps_its_shape(
    universal: Path, run: Run, tmp_path: Path
) -> None:
    step = shutil.copytree(universal, tmp_path / "run") / "global_step2_universal"
    for name, shape, value in (
        ("one", [1], torch.ones(1)),
        ("none", [], torch.ones(1)),
        ("cube", [1, 1], torch.ones(1)),
    ):
        for path in step.glob("*model_states.pt"):
            edited(
                path,
                partial(
                    lambda name, shape, raw: raw["param_shapes"][0].update({name: shape}),
                    name,
                    shape,
                ),
            )
        (step / "zero" / name).mkdir()
        torch.save({"param": value}, step / "zero" / name / "fp32.pt")
        torch.save({"param": torch.tensor(4.0)}, step / "zero" / name / "step.pt")
    found = gathered(tmp_path / "run", run, tmp_path / "o.pt")
    assert [found["model"][name].shape for name in ("one", "none", "cube")] == [(1,), (), (1, 1)]
    assert [
        found["optimizer"]["state"][name]["step"].shape for name in ("one", "none", "cube")
    ] == [()] * 3


def test_a_note_lists_unknown_folders_of_a_universal_checkpoint(
    universal: Path, run: Run, tmp_path: Path
) -> None:
    shutil.copytree(universal, tmp_path / "run")
    zero = tmp_path / "run" / "global_step2_universal" / "zero"
    shutil.copytree(zero / "up.bias", zero / "stranger")
    assert "stranger belongs to no parameter" in run("inspect", tmp_path / "run").err


# Damaged files


@pytest.mark.parametrize(
    "folder", [FOLDERS[0], FOLDERS[-1], UNIVERSAL[0]], ids=lambda folder: folder.name
)
def test_flipped_bytes_are_an_error_or_change_values(
    folder: Path, run: Run, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "run")
    files = sorted(path for path in (tmp_path / "run").rglob("*.pt") if path.name != "whole.pt")
    check_flips(run, tmp_path / "run", files, folder.name)


@pytest.mark.parametrize("rank", ["first", "last"])
def test_only_the_last_rank_pads_its_state(
    zero_folder: Path, run: Run, tmp_path: Path, rank: str
) -> None:
    """DeepSpeed saves the weights of ZeRO-1 and -2 without the padding at their end, and the state
    with it.
    """
    step = shutil.copytree(zero_folder, tmp_path / "run") / "global_step2"
    path = _ranks(step)[0 if rank == "first" else -1]

    def pad(state: dict[str, Any]) -> None:
        slots = _base(state)["state"][0]
        slots["exp_avg"] = torch.cat([slots["exp_avg"], torch.zeros(1)])

    edited(path, lambda content: pad(content["optimizer_state_dict"]))
    done = run("remap", tmp_path / "run", "-o", tmp_path / "whole.pt")
    if rank == "first" or zero_folder.name.startswith("zero-3"):
        assert (done.status, "all ranks @ exp_avg" in done.err) == (2, True), done.err
        return
    assert done.status == 0, done.err
    expected = torch.load(zero_folder / "whole.pt")["optimizer"]
    state = torch.load(tmp_path / "whole.pt")["optimizer"]["state"]
    for name, moments in expected.items():
        assert torch.equal(state[name]["exp_avg"].flatten(), moments["exp_avg"].flatten())


def test_options_that_are_nan_on_all_ranks_are_kept(
    zero_folder: Path, run: Run, tmp_path: Path
) -> None:
    step = shutil.copytree(zero_folder, tmp_path / "run") / "global_step2"
    options = {"lr": float("nan"), "betas": (0.5, float("nan"))}
    _all(lambda raw: _base(raw)["param_groups"][0].update(options))(step)
    done = run("remap", tmp_path / "run", "-o", tmp_path / "whole.pt")
    assert done.status == 0, done.err
    group = torch.load(tmp_path / "whole.pt")["optimizer"]["param_groups"][0]
    assert (repr(group["lr"]), repr(group["betas"])) == ("nan", "(0.5, nan)")


def _with_slot(name: object, value: int) -> Callable[[dict[str, Any]], None]:

    def add(raw: dict[str, Any]) -> None:
        for slots in _base(raw)["state"].values():
            slots[name] = value

    return add


def test_names_of_state_that_are_numbers_are_read(
    zero_folder: Path, run: Run, tmp_path: Path
) -> None:
    step = shutil.copytree(zero_folder, tmp_path / "run") / "global_step2"
    _all(_with_slot("own", 7))(step)
    _all(_with_slot(5, 6))(step)
    done = run("remap", tmp_path / "run", "-o", tmp_path / "whole.pt")
    assert done.status == 0, done.err
    state = torch.load(tmp_path / "whole.pt")["optimizer"]["state"]
    assert {(slots["own"], slots["5"]) for slots in state.values()} == {(7, 6)}
    _all(_with_slot("5", 6))(step)
    done = run("inspect", tmp_path / "run")
    assert (done.status, "two keys of the state are the same as text @ 5" in done.err) == (2, True)


def shared_lists() -> list[Any]:
    """Return a list of few objects, at 400 to the power of four places."""
    content: list[Any] = [1] * 400
    for _ in range(3):
        content = [content] * 400
    return content


@pytest.mark.parametrize(
    "damage",
    [
        _rank(0, lambda raw: _set(raw, partition_count=shared_lists())),
        _rank(0, lambda raw: _set(raw, zero_stage=shared_lists())),
        _all(lambda raw: _set(raw, param_alignment_paddings=shared_lists())),
        _all(lambda raw: _set(_base(raw)["param_groups"][0], more=shared_lists())),
        _all(lambda raw: _set(_base(raw)["state"][0], more=shared_lists())),
    ],
    ids=["partition_count", "zero_stage", "paddings", "option", "state"],
)
def test_lists_that_share_their_parts_are_refused(
    run: Run, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    shutil.copytree(FOLDERS[0], tmp_path / "run")
    damage(tmp_path / "run" / "global_step2")
    done = run("inspect", tmp_path / "run")
    assert (done.status, "its lists share too many parts" in done.err) == (2, True), done.err
    assert "optim_states.pt: " in done.err


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([5], "model_states.pt: an item of param_shapes is not a dict"),
        (5, "model_states.pt: param_shapes is not a list"),
        (
            [{"emb.weight": (4, -1)}],
            "model_states.pt: param_shapes: emb.weight: sizes (4, -1)",
        ),
    ],
)
def test_errors_name_the_file_and_the_item(
    zero_folder: Path, run: Run, tmp_path: Path, shapes: object, message: str
) -> None:
    step = shutil.copytree(zero_folder, tmp_path / "run") / "global_step2"
    for path in step.glob("*model_states.pt"):
        edited(path, lambda content: _set(content, param_shapes=shapes))
    done = run("inspect", tmp_path / "run")
    assert (done.status, message in done.err) == (2, True), done.err
