"""ZeRO folders that DeepSpeed wrote: what is gathered is what its own programs gather, bit for bit."""

from __future__ import annotations

import shlex
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed_run
from command import Run
from flips import check_flips
from places import DATA
from standins import edited

FOLDERS = sorted(folder for folder in (DATA / "deepspeed-0.19.8").iterdir() if (folder / "latest").exists())
UNIVERSAL = sorted((DATA / "deepspeed-0.19.8").glob("*-universal"))


@pytest.fixture(params=FOLDERS, ids=lambda folder: folder.name)
def saved(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.param
    return folder


def test_weights_and_moments_are_those_that_deepspeed_gathers(saved: Path, run: Run, tmp_path: Path) -> None:
    """`zero_to_fp32` gives buffers in fp32; here they, and what is frozen, keep the dtype in which they were saved."""
    done = run("remap", saved, "-o", tmp_path / "whole.pt", "--verify")
    assert done.status == 0, done.err
    assert "not carried: skipped_steps, global_steps, global_samples, epoch of" in done.err
    want, have = torch.load(saved / "whole.pt"), torch.load(tmp_path / "whole.pt")
    model = have["model"]
    assert want["model"].keys() <= model.keys() <= {*want["model"], "frozen.weight"}
    assert all(torch.equal(model[key].to(value.dtype), value) for key, value in want["model"].items())
    assert model["head.weight"].data_ptr() == model["emb.weight"].data_ptr()
    state = have["optimizer"]["state"]
    assert state.keys() == want["optimizer"].keys()
    assert [own["step"].item() for own in state.values()] == [2.0] * 7
    for name, moments in want["optimizer"].items():
        assert all(torch.equal(state[name][key].flatten(), value.flatten()) for key, value in moments.items())
        assert {key: value.shape for key, value in state[name].items() if key != "step"} == dict.fromkeys(
            moments, model[name].shape
        )


def test_the_gathered_optimizer_steps_the_model(saved: Path, run: Run, tmp_path: Path) -> None:
    """With ids of the model's own order, as `Optimizer.load_state_dict` wants them."""
    definition = f"{deepspeed_run.__file__}:Net"
    out = ("--optimizer-keys", "id", "-o", tmp_path / "ids.pt")
    done = run("remap", saved, "--model", definition, "--to", "serialized", *out)
    assert done.status == 0, done.err
    have, model = torch.load(tmp_path / "ids.pt"), deepspeed_run.Net()
    model.load_state_dict(have["model"])
    groups = deepspeed_run.groups_of(model, len(have["optimizer"]["param_groups"]))
    optimizer = torch.optim.AdamW(groups, lr=0.5)
    optimizer.load_state_dict(have["optimizer"])
    named = dict(model.named_parameters())
    moments = torch.load(saved / "whole.pt")["optimizer"]
    loaded = {name: optimizer.state[parameter]["exp_avg"] for name, parameter in named.items() if name in moments}
    assert all(torch.equal(value.flatten(), moments[name]["exp_avg"].flatten()) for name, value in loaded.items())
    assert optimizer.param_groups[0]["lr"] == 0.01


def test_it_is_named_and_listed(saved: Path, run: Run) -> None:
    listed = run("inspect", saved, "--format", "json").data
    assert listed["format"] == "deepspeed"
    assert [section["kind"] for section in listed["sections"]] == ["state_dict", "optimizer"]
    assert "deepspeed.runtime.zero.config.ZeroStageEnum" in " ".join(listed["globals"])
    step = run("inspect", saved / "global_step2", "--format", "json").data
    assert step["tensors"] == listed["tensors"]


def test_it_is_read_and_not_written(saved: Path, run: Run, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "run")
    done = run("remap", tmp_path / "run", "--rule", "emb.{x*} => e.{x*}", "--in-place")
    assert (
        done.status,
        "is in another format (DeepSpeed folder (ZeRO, universal)) than what would replace it" in done.err,
    ) == (1, True)
    done = run("remap", f"{tmp_path / 'run'}::model", "--keep-aliases", "-o", f"{tmp_path / 'out'}/")
    assert done.status == 0, done.err
    assert (tmp_path / "out" / "model.safetensors").exists()


def rewritten(path: Path, change: Callable[[bytes], bytes]) -> None:
    with zipfile.ZipFile(path) as source:
        records = {name: source.read(name) for name in source.namelist()}
    with zipfile.ZipFile(path, "w") as out:
        for name, data in records.items():
            out.writestr(name, change(data))


def _without_rank(step: Path) -> None:
    next(step.glob("*zero_pp_rank_1_mp_rank_00_optim_states.pt")).unlink()


def _without_model(step: Path) -> None:
    for path in step.glob("*model_states.pt"):
        path.unlink()


def _of_another_step(step: Path) -> None:
    path = next(step.glob("*zero_pp_rank_1_mp_rank_00_optim_states.pt"))
    rewritten(path, lambda data: struct.pack("<f", 3.0) if data == struct.pack("<f", 2.0) else data)


def _with_a_stranger(step: Path) -> None:
    path = next(step.glob("*zero_pp_rank_1_mp_rank_00_optim_states.pt"))
    shutil.copy(path, path.with_name(path.name.replace("rank_1", "rank_7")))


def _of_one_model_part_more(step: Path) -> None:
    path = next(step.glob("*model_states.pt"))
    shutil.copy(path, path.with_name(path.name.replace("mp_rank_00", "mp_rank_01")))


def _rank(rank: int, change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """A change of what the optimizer's file of a rank says."""
    return lambda step: edited(
        next(step.glob(f"*zero_pp_rank_{rank}_*optim*")), lambda content: change(content["optimizer_state_dict"])
    )


def _base(state: dict[str, Any]) -> Any:
    return state.get("base_optimizer_state") or state["optimizer_state_dict"]


def _second_model(step: Path) -> None:
    path = next(step.glob("*model_states.pt"))
    other = "mp_rank_00_model_states.pt" if path.name.startswith("zero") else f"zero_pp_rank_0_{path.name}"
    shutil.copy(path, step / other)


def _set(where: dict[str, Any], **items: Any) -> None:
    where.update(items)


def _negative(own: dict[str, Any]) -> None:
    for gaps in own.setdefault("param_alignment_paddings", [[0]]):
        gaps[0] = -1


def _of_another_dtype(own: dict[str, Any]) -> None:
    flats = own.get("fp32_flat_groups") or own["single_partition_of_fp32_groups"]
    flats[0] = flats[0].view(torch.int32)


def _strided(own: dict[str, Any]) -> None:
    flats = own.get("fp32_flat_groups") or own["single_partition_of_fp32_groups"]
    flats[0] = flats[0].repeat_interleave(2)[::2]


def _longer(own: dict[str, Any]) -> None:
    flats = own.get("fp32_flat_groups") or own["single_partition_of_fp32_groups"]
    flats[0] = torch.cat([flats[0], torch.zeros(9)])


def _one_group_less(own: dict[str, Any]) -> None:
    (own.get("fp32_flat_groups") or own["single_partition_of_fp32_groups"]).pop()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_without_rank, "no file of this rank's optimizer states @ rank 1"),
        (_without_model, "without the model's own file"),
        (_of_another_step, "has neither the shape of the partitions nor one value on all ranks @ step"),
        (_with_a_stranger, "@ rank 7"),
        (_of_one_model_part_more, "not of the one model part that is read @"),
        (_rank(0, lambda own: _base(own)["state"][0].pop("exp_avg")), "one value on all ranks @ exp_avg"),
        (_rank(1, lambda own: _base(own)["state"][0].pop("exp_avg")), "one value on all ranks @ exp_avg"),
        (_rank(1, lambda own: _set(_base(own)["state"][0], more=1)), "one value on all ranks @ more"),
        (_rank(1, lambda own: _set(_base(own)["param_groups"][0], lr=0.5)), "lr is 0.5, and 0.01 on rank 0 @"),
        (_rank(1, lambda own: _set(_base(own)["param_groups"][0], more=1)), "more is 1, and None on rank 0 @"),
        (_rank(0, lambda own: _set(own, param_alignment_paddings=[5])), "param_alignment_paddings is no list"),
        (_rank(0, _negative), "not one for each parameter @ param_alignment_paddings"),
        (_rank(0, lambda own: _set(own, param_alignment_paddings=[[0]])), "one for each parameter @ param_alignment_"),
        (_rank(1, lambda own: _set(own, zero_stage=7)), "zero_stage is 7, in "),
        (_rank(0, lambda own: _set(own, zero_stage=7)), " 7"),
        (_rank(1, lambda own: _set(own, partition_count=4)), "partition_count is 4, in "),
        (_rank(0, lambda own: _set(own, partition_count=[4])), "no file of this rank's optimizer states @ rank 3"),
        (_rank(0, lambda own: _set(own, partition_count=[3, 2])), "are cut over [3, 2] ranks, as those of experts are"),
        (_rank(0, lambda own: _set(own, partition_count=[])), "[] partitions"),
        (_rank(0, lambda own: _set(own, partition_count=0)), "0 partitions"),
        (_rank(1, _of_another_dtype), "the ranks' partitions are of several dtypes: float32, int32"),
        (_rank(1, _strided), "is no flat tensor"),
        (_rank(1, _longer), "rank_0_mp_rank_00_optim_states.pt: the partitions do not fit the parameters of"),
        (_rank(1, _one_group_less), "the partitions do not fit the parameters"),
        (_rank(1, lambda own: _set(own, ds_version="0.1")), "ds_version is '0.1', in "),
        (_second_model, "rank 0"),
    ],
)
def test_what_is_not_whole_and_ranks_that_say_other_things_are_refused(
    saved: Path, run: Run, tmp_path: Path, damage: Callable[[Path], None], says: str
) -> None:
    shutil.copytree(saved, tmp_path / "run")
    damage(tmp_path / "run" / "global_step2")
    done = run("inspect", tmp_path / "run")
    assert (done.status, says in done.err) == (2, True), done.err


@pytest.mark.parametrize(
    ("rank", "change", "says"),
    [
        (0, lambda own: own["shared_params"].clear(), "neither a parameter, a buffer nor shared @ head.weight"),
        (1, lambda own: own["frozen_param_fragments"].clear(), "a rank has no part of it @ frozen.weight"),
        (
            0,
            lambda own: own["frozen_param_shapes"].update({"frozen.weight": torch.Size([6, 5])}),
            "is cut short @ frozen",
        ),
        (1, lambda own: own.update(global_steps=4), "global_steps is 4, in "),
        (1, lambda own: own.update(dp_world_size=4), "dp_world_size is 4, in "),
        (0, lambda own: own.update(param_shapes=None), "says no shapes of parameters @ param_shapes"),
        (0, lambda own: own.update(param_shapes=[{"up.weight": [-1]}]), "sizes [-1]"),
        (0, lambda own: own.update(param_shapes=[{"up.weight": [1 << 20_000]}]), "sizes that no tensor has"),
        (0, lambda own: own.update(param_shapes=[{"up.weight": [-1 << 20_000]}]), "sizes that no tensor has"),
        (0, lambda own: own["param_shapes"][1].update(more=torch.Size([4])), "its parts of the parameters are"),
    ],
)
def test_model_files_of_stage_3_that_lie_are_refused(
    run: Run, tmp_path: Path, rank: int, change: Callable[[dict[str, Any]], None], says: str
) -> None:
    step = shutil.copytree(DATA / "deepspeed-0.19.8" / "zero-3", tmp_path / "run") / "global_step2"
    edited(step / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", change)
    done = run("inspect", tmp_path / "run")
    assert (done.status, says in done.err) == (2, True), done.err


@pytest.mark.parametrize("listed", [["scale", "count"], []])
def test_buffers_that_differ_are_rank_0s_and_it_is_said(run: Run, tmp_path: Path, listed: list[str]) -> None:
    """Also where the file does not list them: what is no placeholder is the module's own."""
    step = shutil.copytree(DATA / "deepspeed-0.19.8" / "zero-3", tmp_path / "run") / "global_step2"
    edited(step / "zero_pp_rank_0_mp_rank_00_model_states.pt", lambda own: own.update(buffer_names=listed))
    edited(step / "zero_pp_rank_1_mp_rank_00_model_states.pt", lambda own: own["module"]["scale"].add_(1))
    edited(step / "zero_pp_rank_2_mp_rank_00_model_states.pt", lambda own: own["module"].pop("count"))
    done = run("remap", tmp_path / "run", "-o", tmp_path / "whole.pt")
    assert [f"{name} differs between the ranks: rank 0's is taken" in done.err for name in ("scale", "count")] == [
        True,
        True,
    ]
    assert torch.load(tmp_path / "whole.pt")["model"]["scale"].tolist() == [0, 1, 2, 3, 4]


def test_what_the_module_holds_beside_tensors_is_carried(saved: Path, run: Run, tmp_path: Path) -> None:
    step = shutil.copytree(saved, tmp_path / "run") / "global_step2"
    for number, path in enumerate(sorted(step.glob("*model_states.pt"))):
        objects = {"up._extra_state": {"amax": number}, "n": [1, 2]}
        edited(path, partial(lambda objects, content: content["module"].update(objects), objects))
    done = run("remap", tmp_path / "run", "-o", tmp_path / "whole.pt", "--verify")
    assert done.status == 0, done.err
    have = torch.load(tmp_path / "whole.pt")["model"]
    assert (have["up._extra_state"], have["n"]) == ({"amax": 0}, [1, 2])
    assert ("up._extra_state differs between the ranks: rank 0's is taken" in done.err) == saved.name.startswith(
        "zero-3"
    )
    assert "n differs" not in done.err


def test_an_option_that_is_not_carried_is_said(saved: Path, run: Run, tmp_path: Path) -> None:
    step = shutil.copytree(saved, tmp_path / "run") / "global_step2"
    options = {"lr": torch.tensor(0.1), "betas": (torch.tensor(0.9), 0.99), "own": None, "pair": [1, [2.0]]}
    for rank, _ in enumerate(step.glob("*optim_states.pt")):
        _rank(rank, lambda own: _base(own)["param_groups"][0].update(options))(step)
    done = run("remap", tmp_path / "run", "-o", tmp_path / "whole.pt")
    assert all(f"not carried: {name} of param group 0" in done.err for name in ("lr", "betas"))
    group = torch.load(tmp_path / "whole.pt")["optimizer"]["param_groups"][0]
    assert group.keys().isdisjoint({"lr", "betas"})
    assert (group["own"], group["pair"]) == (None, [1, [2.0]])


@pytest.mark.parametrize("name", ["zero-1", "zero-2"])
def test_files_under_other_ranks_are_found_out(run: Run, tmp_path: Path, name: str) -> None:
    """ZeRO-1 and -2 say where each rank's part lies."""
    shutil.copytree(DATA / "deepspeed-0.19.8" / name, tmp_path / "run")
    zero, one = (next((tmp_path / "run").rglob(f"*zero_pp_rank_{rank}_*optim*")) for rank in (0, 1))
    zero.rename(tmp_path / "other")
    one.rename(zero)
    (tmp_path / "other").rename(one)
    done = run("inspect", tmp_path / "run")
    assert (done.status, "says that its part lies elsewhere @" in done.err) == (2, True), done.err


def test_a_step_that_latest_does_not_have(run: Run, tmp_path: Path) -> None:
    shutil.copytree(FOLDERS[0], tmp_path / "run")
    (tmp_path / "run" / "latest").write_text("global_step9")
    done = run("inspect", tmp_path / "run")
    assert (done.status, "the step 'global_step9' that its file `latest` names is not there" in done.err) == (2, True)
    (tmp_path / "run" / "latest").write_text("../../etc")
    assert run("inspect", tmp_path / "run").status == 2


def test_a_folder_of_another_layout_holds_no_optimizer_and_says_so(run: Run, tmp_path: Path) -> None:
    """Older releases wrote a list of states; the weights are read all the same."""
    shutil.copytree(FOLDERS[0], tmp_path / "run")
    for path in (tmp_path / "run").rglob("*optim_states.pt"):
        rewritten(path, lambda data: data.replace(b"base_optimizer_state", b"base_optimizer_stata"))
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


def test_a_universal_checkpoint_is_what_it_was_converted_from(universal: Path, run: Run, tmp_path: Path) -> None:
    """All that `ds_to_universal` keeps: weights, buffers, moments, steps and hyperparameters."""
    source = universal.with_name(universal.name.removesuffix("-universal"))
    have = gathered(universal, run, tmp_path / "universal.pt")
    want = gathered(source, run, tmp_path / "parts.pt")
    assert list(have["model"]) == list(want["model"])
    assert all(torch.equal(have["model"][key], value) for key, value in want["model"].items())
    assert have["optimizer"]["param_groups"] == want["optimizer"]["param_groups"]
    assert have["optimizer"]["state"].keys() == want["optimizer"]["state"].keys()
    for name, own in want["optimizer"]["state"].items():
        mine = have["optimizer"]["state"][name]
        assert mine.keys() == own.keys()
        assert all(torch.equal(mine[key], value) and mine[key].shape == value.shape for key, value in own.items())
    own = torch.load(source / "whole.pt")
    assert all(torch.equal(have["model"][key].to(v.dtype), v) for key, v in own["model"].items())


def _without(name: str) -> Callable[[Path], None]:
    return lambda zero: (zero / "up.weight" / name).unlink()


def _of_another_shape(zero: Path) -> None:
    shutil.copy(zero / "up.bias" / "exp_avg.pt", zero / "up.weight" / "exp_avg.pt")


def _no_parameter(zero: Path) -> None:
    shutil.rmtree(zero / "norm.bias")


def _no_step(zero: Path) -> None:
    shutil.rmtree(zero)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_without("fp32.pt"), "no file fp32.pt of it @ up.weight"),
        (_of_another_shape, "exp_avg.pt is of shape [5], the parameter of [5, 3] @ up.weight"),
        (_no_parameter, "no file fp32.pt of it @ norm.bias"),
        (lambda zero: (zero / "optimizer_state.pt").unlink(), "optimizer_state.pt"),
        (_no_step, "without the partitions of the weights"),
    ],
)
def test_a_universal_checkpoint_that_is_not_whole_is_refused(
    universal: Path, run: Run, tmp_path: Path, damage: Callable[[Path], None], says: str
) -> None:
    shutil.copytree(universal, tmp_path / "run")
    damage(tmp_path / "run" / "global_step2_universal" / "zero")
    done = run("inspect", tmp_path / "run")
    assert (done.status, says in done.err) == (2, True), done.err


def test_of_a_model_that_was_cut_the_hint_takes_the_weights(universal: Path, run: Run, tmp_path: Path) -> None:
    """Its universal checkpoint has a model file for each part, and the parameters whole."""
    step = shutil.copytree(universal / "global_step2_universal", tmp_path / "step")
    first = next(step.glob("*model_states.pt"))
    shutil.copy(first, step / first.name.replace("mp_rank_00", "mp_rank_01"))
    done = run("inspect", step)
    assert done.status == 2
    assert "cut by layers, by experts or within tensors" in done.err
    words = shlex.split(done.err.rpartition("precision: ")[2])
    subprocess.run([sys.executable, *words[1:-1], str(tmp_path / "OUT.pt")], check=True)
    made = torch.load(tmp_path / "OUT.pt")
    whole = gathered(universal, run, tmp_path / "whole.pt")["model"]
    assert made
    for name, value in made.items():  # of ZeRO-3 flat
        trained = (step / "zero" / name / "exp_avg.pt").exists()  # a second name of one has the model's precision
        want = whole[name].flatten().float()
        assert torch.equal(value.flatten(), want if trained else want.to(torch.bfloat16).float()), name


def test_the_hint_for_a_model_that_is_cut_is_deepspeeds_own_program(saved: Path, run: Run, tmp_path: Path) -> None:
    step = next(shutil.copytree(saved, tmp_path / "run").glob("global_step*"))
    first = next(step.glob("*model_states.pt"))
    shutil.copy(first, step / first.name.replace("mp_rank_00", "mp_rank_01"))
    done = run("inspect", step)
    assert done.status == 2
    assert f"ds_to_universal --input_folder {step} --output_folder {step}_universal" in done.err


def test_what_a_universal_checkpoint_has_beside_is_said(universal: Path, run: Run, tmp_path: Path) -> None:
    shutil.copytree(universal, tmp_path / "run")
    zero = tmp_path / "run" / "global_step2_universal" / "zero"
    shutil.copytree(zero / "up.bias", zero / "stranger")
    assert "stranger is of no parameter" in run("inspect", tmp_path / "run").err


# Files of other bytes


@pytest.mark.parametrize("folder", [FOLDERS[0], FOLDERS[-1], UNIVERSAL[0]], ids=lambda folder: folder.name)
def test_flipped_bytes_are_an_error_or_other_values(folder: Path, run: Run, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "run")
    files = sorted(path for path in (tmp_path / "run").rglob("*.pt") if path.name != "whole.pt")
    check_flips(run, tmp_path / "run", files, folder.name)
