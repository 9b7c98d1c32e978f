"""Flat parameters: rank files of real FSDP1 are unsharded as FSDP does it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ckpttool import Names, Plan, Remap, open_checkpoint
from ckpttool.containers.rank_shards import RankParts
from ckpttool.core.checkpoint import Span
from ckpttool.core.expression import Ref
from ckpttool.core.plan import Output
from ckpttool.core.text import is_flat
from ckpttool.diffing.causes import Code
from ckpttool.evaluate.torch_eval import evaluate
from ckpttool.naming.flat import Slot, misfit, slots, unit_paths
from ckpttool.remapping.gather import gather
from ckpttool.tracing.build_model import load
from ckpttool.tracing.trace import trace
from command import Run, call, fixes_in, notes_in
from flatten_params_wrapper import flattened
from fsdp_run import Block, Mlp, Net
from places import ROOT, SUPPORT
from sharded_tensors import save_sharded

SCRIPT = SUPPORT / "fsdp_run.py"
MODEL = ["--model", f"{SCRIPT}:Net"]
UNITS = ["layers.*", "layers.*.mlp"]


def from_option(*units: str) -> tuple[str, ...]:
    return ("--from", call("fsdp-flat", units=list(units))) if units else ()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Run real FSDP1 on gloo, and return the folder of each world size."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, str(SCRIPT), str(folder), "2", "3"]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return {size: folder / str(size) for size in (2, 3)}


@pytest.fixture(scope="module")
def names() -> Names:
    return trace(load(f"{SCRIPT}:Net", {}, False))


def check_same(left: dict, right: dict) -> None:
    assert set(left) == set(right)
    for key, value in left.items():
        assert value.dtype == right[key].dtype, key
        assert torch.equal(value, right[key]), key


def check_same_optimizer(result: dict, expected: dict) -> None:
    """Both name their parameters; the order within a group may differ."""
    assert {name for group in result["param_groups"] for name in group["params"]} == set(
        expected["state"]
    )
    for group, expected_group in zip(result["param_groups"], expected["param_groups"], strict=True):
        assert set(group["params"]) == set(expected_group["params"])
        assert group["weight_decay"] == expected_group["weight_decay"]
    assert set(result["state"]) == set(expected["state"])
    for name, state in result["state"].items():
        check_same(state, expected["state"][name])


# Real FSDP1


@pytest.mark.parametrize("kind", ["flat", "original", "sharded"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_rank_files_unshard_to_the_full_state_dict_of_fsdp(
    runs: dict[int, Path], run: Run, tmp_path: Path, kind: str, world_size: int
) -> None:
    folder, out = runs[world_size], tmp_path / "full.pt"
    options = ["--to", "serialized", "--optimizer-keys", "fqn", "--verify"]
    status, _, error = run("remap", folder / f"{kind}_rank_*.pt", *MODEL, *options, "-o", out)
    assert status == 0, error
    result, expected = (
        torch.load(out),
        torch.load(folder / f"{kind.replace('sharded', 'flat')}_full.pt"),
    )
    check_same(result["model"], expected["model"])
    check_same(result["ema"], expected["ema"])
    check_same_optimizer(result["optimizer"], expected["optimizer"])


@pytest.mark.parametrize("kind", ["flat", "original"])
@pytest.mark.parametrize(
    ("inside", "optimizer"),
    [("layers", None), ("layers", "by_layers"), ("layers.0", "by_first_layer")],
)
def test_groups_without_names_are_matched_by_size_or_optimizer(
    runs: dict[int, Path], run: Run, tmp_path: Path, kind: str, inside: str, optimizer: str | None
) -> None:
    out, files = tmp_path / "full.pt", runs[3] / f"{kind}{inside}_rank_*.pt"
    option = [] if optimizer is None else ["--optimizer", f"{SCRIPT}:{optimizer}"]
    done = run(
        "remap", files, *MODEL, *option, "--to", "serialized", "--optimizer-keys", "fqn", "-o", out
    )
    assert done.status == 0, done.err
    check_same_optimizer(
        torch.load(out)["optimizer"], torch.load(runs[3] / f"{kind}{inside}_full.pt")["optimizer"]
    )


@pytest.mark.parametrize("kind", ["flat", "original"])
def test_ambiguous_groups_without_names_are_refused(
    runs: dict[int, Path], run: Run, tmp_path: Path, kind: str
) -> None:
    done = run("remap", runs[3] / f"{kind}layers.0_rank_*.pt", *MODEL, "-o", tmp_path / "full.pt")
    assert done.status == 1
    assert "2 param groups, and its ids cannot be told apart" in done.err
    assert "--optimizer" in done.err
    other = ["--optimizer", f"{SCRIPT}:by_layers"]
    done = run(
        "remap", runs[3] / f"{kind}layers.0_rank_*.pt", *MODEL, *other, "-o", tmp_path / "full.pt"
    )
    assert done.status == 1
    assert "other sizes" in done.err
    assert not (tmp_path / "full.pt").exists()


@pytest.mark.parametrize("kind", ["flat", "original", "sharded"])
def test_diff_of_one_rank_asks_for_all_ranks(
    runs: dict[int, Path], run: Run, tmp_path: Path, kind: str
) -> None:
    """This holds against a model, its names file and plain weights; no fix is printed."""
    one, whole, names = (
        runs[2] / f"{kind}_rank_0.pt",
        tmp_path / "whole.pt",
        tmp_path / "names.json",
    )
    torch.save(Net().state_dict(), whole)
    assert run("trace", f"{SCRIPT}:Net", "-o", names).status == 0
    operands = (
        [*MODEL, f"{one}::model"],
        ["--model", names, f"{one}::model"],
        [f"{one}::model", whole],
    )
    for words in (*operands, [whole, f"{one}::model"]):
        done = run("diff", *words)
        assert done.status in (1, 2), words
        assert (
            f"name the files of all ranks at once, as in '{runs[2]}/{kind}_rank_*.pt'"
            in done.out + done.err
        ), words
        assert not ("\nfix: " in done.out and words in operands)


def test_plain_model_and_optimizer_load_the_result(
    runs: dict[int, Path], run: Run, tmp_path: Path
) -> None:
    out = tmp_path / "full.pt"
    assert run("remap", runs[2] / "flat_rank_*.pt", *MODEL, "--to", "serialized", "-o", out)[0] == 0
    result, expected = torch.load(out), torch.load(runs[2] / "flat_full.pt")["optimizer"]["state"]
    model = Net()
    model.load_state_dict(result["model"], strict=True)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(result["optimizer"])
    for name, parameter in model.named_parameters():
        check_same(optimizer.state[parameter], expected[name])
    steps = [
        state["step"].untyped_storage().data_ptr()
        for state in result["optimizer"]["state"].values()
    ]
    assert len(set(steps)) == len(steps)  # a shared storage would be incremented once per parameter


def test_model_section_is_written_as_safetensors(
    runs: dict[int, Path], run: Run, tmp_path: Path
) -> None:
    source, out = f"{runs[3] / 'flat_rank_*.pt'}::model", tmp_path / "full.safetensors"
    status, _, error = run(
        "remap",
        source,
        *MODEL,
        *from_option(*UNITS),
        "--to",
        "serialized",
        "-o",
        out,
        "--keep-aliases",
    )
    assert status == 0, error
    expected = torch.load(runs[3] / "flat_full.pt")["model"]
    expected.pop("head.weight")
    check_same(load_file(out), expected)


def test_empty_parameter_keeps_its_dtype(run: Run, tmp_path: Path) -> None:
    """No rank has an element of it."""
    save_sharded(tmp_path, "rank", Rowless().state_dict(), 2)
    model = ["--model", f"{__file__}:Rowless"]
    assert run("remap", tmp_path / "rank_*.pt", *model, "-o", tmp_path / "back.pt")[0] == 0
    check_same(torch.load(tmp_path / "back.pt"), Rowless().state_dict())


class Rowless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.none, self.weight = (
            nn.Parameter(torch.empty(0, 3).bfloat16()),
            nn.Parameter(torch.ones(2)),
        )


def test_parameter_within_one_file_stays_a_span(runs: dict[int, Path], names: Names) -> None:
    gathered = gather(open_checkpoint(str(runs[2] / "flat_rank_*.pt")), names)
    storages = {entry.storage for entry in gathered.checkpoint.section("model").tensors}
    spread = [storage for storage in storages if not isinstance(storage.data, Span)]
    # two ranks: one parameter of each unit is in both files
    assert len(spread) == len(gathered.units)


def test_parts_are_in_rank_order(runs: dict[int, Path]) -> None:
    checkpoint = open_checkpoint(str(runs[3] / "flat_rank_*.pt"))
    assert "rank 2 flat_rank_2.pt" in checkpoint.notes[0]
    flat = checkpoint.section("model").by_key()["_flat_param"]
    assert isinstance(flat.payload, RankParts)
    paths = [part.storage.data.path for part in flat.payload.parts]
    assert paths == [str(runs[3] / f"flat_rank_{rank}.pt") for rank in range(3)]


def test_different_buffers_are_noted(runs: dict[int, Path], names: Names, run: Run) -> None:
    gathered = gather(open_checkpoint(str(runs[2] / "flat_rank_*.pt")), names)
    assert gathered.notes == tuple(
        f"layers.{i}.seen differs between the ranks: rank 0's is used" for i in (0, 1)
    )
    done = run("remap", runs[2] / "flat_rank_*.pt", *MODEL, "--dry-run", "--format", "json")
    assert set(gathered.notes) <= set(notes_in(done.data))


def test_plan_slices_each_parameter_from_its_flat_parameter(tmp_path: Path, names: Names) -> None:
    expected = Net().state_dict()
    model = Net()
    model.load_state_dict(expected)
    saved = flattened(model, Block, True).state_dict()
    torch.save(saved, tmp_path / "flat.pt")
    gathered = gather(open_checkpoint(str(tmp_path / "flat.pt")), names)
    actual = {
        key: evaluate(source, saved.__getitem__)
        for key, source in gathered.sections[""].sources.items()
    }
    assert actual.keys() >= dict(Net().named_parameters()).keys()
    check_same(actual, {key: expected[key] for key in actual})


def test_redundant_flat_parameter_is_dropped(tmp_path: Path, run: Run) -> None:
    state = Net().state_dict()
    torch.save({**state, "_flat_param": torch.zeros(28)}, tmp_path / "both.pt")
    done = run("remap", tmp_path / "both.pt", *MODEL, "-o", tmp_path / "out.pt", "--format", "json")
    assert done.status == 0
    assert done.data["dropped"] == ["_flat_param"]
    check_same(torch.load(tmp_path / "out.pt"), state)


@pytest.mark.parametrize("average", ["ema", "model_ema"])
def test_report_counts_parameters_sliced_from_a_flat_parameter(
    average: str, tmp_path: Path, names: Names, run: Run
) -> None:
    """Only that section counts: the average, which is renamed too, has separate parameters."""
    model = Net()
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    saved = flattened(model, Block, True).state_dict()
    torch.save({average: expected, "model": saved}, tmp_path / "in.pt")
    rule = ["--rule", "emb.{x} => e.{x}", "-o", tmp_path / "o.pt", "--dry-run", "--format", "json"]
    done = run("remap", tmp_path / "in.pt", *MODEL, *rule)
    assert done.status == 0
    assert done.data["sections"] == ["model", average]
    cut = len(expected.keys() - saved.keys())
    counts = {"renamed": 1, "transformed": cut, "unchanged": 2 * len(expected) - 1 - cut}
    assert {name: done.data[name] for name in counts} == counts
    gathered = gather(open_checkpoint(str(tmp_path / "in.pt")), names)
    plan = Plan(
        tuple(Output(section, "head.bias", Ref("head.bias")) for section in ("model", average))
    )
    of_model, of_average = gathered.as_remap_of_files(Remap(gathered.checkpoint, plan)).plan.outputs
    assert (
        of_model.source
        == gathered.sections["model"].sources["head.bias"]
        != Ref("head.bias")
        == of_average.source
    )


def test_inspect_lists_flat_parameters(runs: dict[int, Path], run: Run) -> None:
    status, out, _ = run("inspect", runs[2] / "flat_rank_*.pt", "--format", "json")
    assert status == 0
    flat = json.loads(out)["flat_parameters"]
    assert flat[0] == {"section": "model", "key": "_flat_param", "unit": "", "elements": 28}
    assert [one["unit"] for one in flat[1:] if one["section"] == "model"] == [
        "layers.0",
        "layers.0.mlp",
        "layers.1",
        "layers.1.mlp",
    ]
    _, one_rank, warned = run("inspect", runs[2] / "flat_rank_1.pt")
    assert "Flat parameters (all parameters of a module, end to end)" in one_rank
    assert "is the part of one rank: name the files of all ranks at once" in warned


def test_fix_for_flat_keys_works(runs: dict[int, Path], run: Run, tmp_path: Path) -> None:
    """The reason names the flat key, and the suggested command writes a file without
    differences.
    """
    data = run("diff", *MODEL, f"{runs[2]}/flat_rank_*.pt", "--format", "json").data
    assert {entry["reason"] for entry in data["entries"] if entry["status"] == "unexpected"} == {
        Code.FLAT.words
    }
    words = shlex.split(fixes_in(data)[0])
    assert words[:2] == ["ckpttool", "remap"]
    words[-1] = str(tmp_path / "whole.pt")
    assert run(*words[1:]).status == 0
    assert run("diff", *MODEL, tmp_path / "whole.pt").status == 0


# Refusals


def test_slices_without_a_model_are_refused(
    runs: dict[int, Path], run: Run, tmp_path: Path
) -> None:
    for rank in (0, 1):
        torch.save({"w": torch.ones(2), "b": torch.ones(2)}, tmp_path / f"slices_{rank}.pt")
    status, _, error = run("remap", tmp_path / "slices_*.pt", "-o", tmp_path / "full.pt")
    assert status == 1
    assert "only the model's shapes tell a part of a tensor from a copy of it" in error


REFUSED: dict[str, tuple[str, Sequence[str], list[str]]] = {
    "no model": (
        "2/flat_rank_*.pt",
        [],
        [
            "holds 10 flat parameters: each is all parameters of one module (a unit)",
            "28 elements: the parameters of the root module @ model._flat_param",
            "35 elements: the parameters of layers.0.mlp @ ema.layers.0.mlp._flat_param",
            "--model MODEL",
        ],
    ),
    "a single rank": (
        "2/flat_rank_0.pt",
        MODEL,
        ["is one rank's part: name the files of all ranks, as in 'rank_*.pt'"],
    ),
    "a model with larger parameters": (
        "2/flat_rank_*.pt",
        ["--model", f"{MODEL[1]}(hidden=6)"],
        ["layers.1.mlp.down.weight [3, 6] would be elements 24 to 42 @ layers.1.mlp._flat_param"],
    ),
    "a model with smaller parameters": (
        "2/flat_rank_*.pt",
        ["--model", f"{MODEL[1]}(hidden=4)"],
        ["after its last parameter, layers.0.mlp.down.weight [3, 4], 7 are left"],
    ),
    "a model with fewer modules": (
        "2/flat_rank_*.pt",
        ["--model", f"{MODEL[1]}(layers=1)"],
        ["the model has no module layers.1 with parameters @ layers.1._flat_param"],
    ),
    "another model of original parameters": (
        "2/original_rank_*.pt",
        ["--model", f"{MODEL[1]}(hidden=6)"],
        ["the ranks hold 15 elements, and the model's shape is [6, 3] @ layers.0.mlp.up.weight"],
    ),
    "other units": (
        "2/flat_rank_*.pt",
        [*MODEL, *from_option("layers.*", "head")],
        [
            "not named in units, but the files have a flat parameter for it @ layers.0.mlp",
            "named in units, but the files have no flat parameter for it @ head",
        ],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_do_not_fit_the_model_are_refused(
    runs: dict[int, Path], run: Run, tmp_path: Path, name: str
) -> None:
    files, options, messages = REFUSED[name]
    done = run("remap", runs[2].parent / files, *options, "-o", tmp_path / "full.pt")
    assert (done.status, (tmp_path / "full.pt").exists()) == (1, False)
    assert [message for message in messages if message not in done.err] == []


def copy_as(folder: Path, sources: dict[str, Path]) -> Path:
    for name, source in sources.items():
        shutil.copy(source, folder / name)
    return folder / "r*.pt"


@pytest.mark.parametrize(
    ("files", "messages"),
    [
        (["3/flat_rank_0.pt", "3/flat_rank_2.pt"], ["no file is of this rank @ rank 1"]),
        (
            ["2/flat_rank_0.pt", "3/flat_rank_1.pt"],
            [
                "comes from a run of 2 ranks @ FOLDER/r0.pt",
                "comes from a run of 3 ranks @ FOLDER/r1.pt",
            ],
        ),
        (
            ["2/flat_rank_0.pt", "2/flat_rank_0.pt"],
            ["is rank 0, as another file is", "no file is of this rank @ rank 1"],
        ),
    ],
)
def test_missing_repeated_and_foreign_ranks_are_refused(
    runs: dict[int, Path], run: Run, tmp_path: Path, files: list[str], messages: list[str]
) -> None:
    done = run(
        "inspect",
        copy_as(tmp_path, {f"r{i}.pt": runs[2].parent / file for i, file in enumerate(files)}),
    )
    assert done.status == 2
    assert [
        message for message in messages if message.replace("FOLDER", str(tmp_path)) not in done.err
    ] == []


def test_rank_is_read_from_the_file_not_its_name(
    runs: dict[int, Path], run: Run, tmp_path: Path
) -> None:
    pattern = copy_as(
        tmp_path, {f"r{1 - rank}.pt": runs[2] / f"flat_rank_{rank}.pt" for rank in (0, 1)}
    )
    status, _, err = run("remap", pattern, *MODEL, "-o", tmp_path / "full.pt")
    assert status == 0
    assert f"rank 1 saved {tmp_path / 'r0.pt'}, although the number in its name is 0" in " ".join(
        err.split()
    )
    check_same(
        torch.load(tmp_path / "full.pt")["model"], torch.load(runs[2] / "flat_full.pt")["model"]
    )


@pytest.mark.parametrize("kind", ["flat", "original", "sharded"])
def test_optimizers_of_two_steps_are_refused(
    runs: dict[int, Path], run: Run, tmp_path: Path, kind: str
) -> None:
    shutil.copy(runs[2] / f"{kind}_rank_0.pt", tmp_path / "r0.pt")
    with (
        zipfile.ZipFile(runs[2] / f"{kind}_rank_1.pt") as source,
        zipfile.ZipFile(tmp_path / "r1.pt", "w") as out,
    ):
        for name in source.namelist():
            data = source.read(name)
            out.writestr(name, struct.pack("<f", 3.0) if data == struct.pack("<f", 2.0) else data)
    done = run("remap", tmp_path / "r*.pt", *MODEL, "-o", tmp_path / "full.pt")
    assert (done.status, (tmp_path / "full.pt").exists()) == (2, False)
    assert "the files are not of one step" in done.err
    assert "differs between the ranks" in done.err
    assert "state." in done.err


@pytest.mark.parametrize(("one", "status"), [(0.0, 0), (1.0, 2)])
def test_full_state_must_be_equal_on_all_ranks(
    run: Run, tmp_path: Path, one: float, status: int
) -> None:
    """Such as the state of a parameter that FSDP ignores or does not shard."""
    for rank, value in enumerate((0.0, one)):
        state = {"weight": {"exp_avg": torch.full((2,), value)}}
        optimizer = {"state": state, "param_groups": [{"params": ["none", "weight"]}]}
        torch.save(
            {"model": Rowless().state_dict(), "optimizer": optimizer}, tmp_path / f"rank_{rank}.pt"
        )
    done = run(
        "remap", tmp_path / "rank_*.pt", "--model", f"{__file__}:Rowless", "-o", tmp_path / "out.pt"
    )
    assert done.status == status, done.err
    assert ("differs between the ranks" in done.err) == bool(status)


@pytest.mark.parametrize("damage", [b"local_rank", b"shard_offsets", b"tensor_properties"])
def test_damaged_sharded_tensor_is_refused(
    runs: dict[int, Path], run: Run, tmp_path: Path, damage: bytes
) -> None:
    """An attribute of its state was renamed, so it is missing."""
    with (
        zipfile.ZipFile(runs[2] / "flat_rank_0.pt") as source,
        zipfile.ZipFile(tmp_path / "r0.pt", "w") as out,
    ):
        for name in source.namelist():
            data = source.read(name)
            out.writestr(
                name, data.replace(damage, damage.upper()) if name.endswith("data.pkl") else data
            )
    shutil.copy(runs[2] / "flat_rank_1.pt", tmp_path / "r1.pt")
    status, _, error = run("inspect", tmp_path / "r*.pt")
    assert status == 2
    assert "not as torch.save writes it" in error
    assert "the sharded tensor _flat_param" in error


def test_globs_of_no_other_or_one_plain_file(run: Run, tmp_path: Path) -> None:
    status, _, error = run("inspect", tmp_path / "rank_*.pt")
    assert (status, "no file matches" in error) == (2, True)
    (tmp_path / "a_0.txt").write_bytes(b"no checkpoint")
    assert run("inspect", tmp_path / "a_*.txt").status == 2
    torch.save(Net().state_dict(), tmp_path / "model.pt")
    assert run("diff", tmp_path / "mod*.pt", tmp_path / "model.pt").status == 0


def test_units_for_a_file_without_flat_parameters_are_refused(run: Run, tmp_path: Path) -> None:
    torch.save(Net().state_dict(), tmp_path / "model.pt")
    done = run(
        "remap", tmp_path / "model.pt", *MODEL, *from_option("layers.*"), "-o", tmp_path / "out.pt"
    )
    assert (done.status, "holds no flat parameters" in done.err) == (2, True), done.err


# Plain flattened tensors, and FlattenParamsWrapper


def padded_parts(flat: torch.Tensor, world_size: int) -> list[torch.Tensor]:
    chunk = -(-flat.numel() // world_size)
    return list(nn.functional.pad(flat, (0, chunk * world_size - flat.numel())).split(chunk))


@pytest.mark.parametrize("name", ["part_{rank}.pt", "{rank}/part.pt", "host{host}_part{rank}.pt"])
def test_more_than_ten_parts_are_in_numeric_order(run: Run, tmp_path: Path, name: str) -> None:
    expected = Net().state_dict()
    model = Net()
    model.load_state_dict(expected)
    saved = flattened(model, Block, True).state_dict()
    for rank in range(12):
        path = tmp_path / name.format(rank=rank, host=99 - 3 * rank)
        path.parent.mkdir(exist_ok=True)
        torch.save(
            {k: padded_parts(v, 12)[rank].clone() if is_flat(k) else v for k, v in saved.items()},
            path,
        )
    files = tmp_path / name.format(rank="*", host="*")
    status, _, error = run("remap", files, *MODEL, "-o", tmp_path / "full.pt")
    assert status == 0, error
    check_same(torch.load(tmp_path / "full.pt"), expected)


@pytest.mark.parametrize(  # every pair of two of the three occurs
    ("hooks", "prefix", "world_size"),
    [
        *((True, "", 1), (True, "", 2), (True, "_fsdp_wrapped_module.", 4)),
        *((False, "_fsdp_wrapped_module.", 1), (False, "_fsdp_wrapped_module.", 2), (False, "", 4)),
    ],
)
def test_flatten_params_wrapper_is_unsharded(
    run: Run, tmp_path: Path, hooks: bool, prefix: str, world_size: int
) -> None:
    expected = Net().state_dict()
    model = Net()
    model.load_state_dict(expected)
    saved = flattened(model, Block, hooks).state_dict()
    assert ("_fpw_module.layers.0._fpw_module.seen" in saved) != hooks
    for rank in range(world_size):
        part = {
            prefix + key: padded_parts(value, world_size)[rank].clone() if is_flat(key) else value
            for key, value in saved.items()
        }
        torch.save(part, tmp_path / f"part{rank}.pt")
    status, _, error = run(
        "remap", tmp_path / "part*.pt", *MODEL, *from_option("layers.*"), "-o", tmp_path / "full.pt"
    )
    assert status == 0, error
    check_same(torch.load(tmp_path / "full.pt"), expected)


def test_single_file_with_complete_flat_parameters(run: Run, tmp_path: Path) -> None:
    model = Net()
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    torch.save(flattened(model, Mlp).state_dict(), tmp_path / "flat.pt")
    status, _, error = run(
        "remap",
        tmp_path / "flat.pt",
        *MODEL,
        *from_option("layers.*.mlp"),
        "-o",
        tmp_path / "full.pt",
    )
    assert status == 0, error
    check_same(torch.load(tmp_path / "full.pt"), expected)


def save_with_optimizer(
    path: Path, by_name: bool, numel: int | None = None
) -> dict[str, torch.Tensor]:
    """Save flat parameters with an optimizer, and return its moments, each of `numel` elements."""
    saved = flattened(Net(), Block, True).state_dict()
    flat = {key: value for key, value in saved.items() if is_flat(key)}
    moments = {
        key: torch.arange(float(value.numel() if numel is None else numel))
        for key, value in flat.items()
    }
    rows = [
        {"exp_avg": value, "step": torch.tensor(2.0), "kind": "plain"} for value in moments.values()
    ]
    params = list(flat) if by_name else [*range(len(flat))]
    group = {"lr": 0.1, "params": params} | ({} if by_name else {"param_names": list(flat)})
    torch.save(
        {"model": saved, "optimizer": {"state": dict(zip(params, rows)), "param_groups": [group]}},
        path,
    )
    return moments


@pytest.mark.parametrize("by_name", [True, False])
def test_state_of_flat_parameters_is_split_like_them(
    run: Run, tmp_path: Path, by_name: bool
) -> None:
    """State keyed by name stays keyed by name; ids become the ids of the model."""
    moments = save_with_optimizer(tmp_path / "flat.pt", by_name)
    done = run(
        "remap", tmp_path / "flat.pt", *MODEL, *from_option("layers.*"), "-o", tmp_path / "full.pt"
    )
    assert done.status == 0, done.err
    result = torch.load(tmp_path / "full.pt")["optimizer"]
    expected_names = [name for name, _ in Net().named_parameters()]
    (group,) = result["param_groups"]
    assert sorted(result["state"], key=str) == sorted(group["params"], key=str)
    assert all(isinstance(param, str) == by_name for param in result["state"])
    assert sorted(group["params"] if by_name else group["param_names"]) == sorted(expected_names)
    sizes = [state["exp_avg"].numel() for state in result["state"].values()]
    assert sum(sizes) == sum(value.numel() for value in moments.values())
    assert len({state["step"].data_ptr() for state in result["state"].values()}) == len(
        expected_names
    )
    assert {state["kind"] for state in result["state"].values()} == {"plain"}


def test_state_that_does_not_fit_its_flat_parameter_is_refused(run: Run, tmp_path: Path) -> None:
    moments = save_with_optimizer(tmp_path / "flat.pt", True, numel=5)
    done = run(
        "remap", tmp_path / "flat.pt", *MODEL, *from_option("layers.*"), "-o", tmp_path / "full.pt"
    )
    assert done.status == 1
    assert "optimizer: its state does not fit the parameters" in done.err
    assert done.err.count("is [5] on the ranks, ") == len(moments)
    assert not (tmp_path / "full.pt").exists()


def test_model_parameter_named_flat_param_is_unchanged(run: Run, tmp_path: Path) -> None:
    torch.save(Owner().state_dict(), tmp_path / "model.pt")
    out = tmp_path / "out.pt"
    assert run("remap", tmp_path / "model.pt", "--model", f"{__file__}:Owner", "-o", out)[0] == 0
    check_same(torch.load(out), torch.load(tmp_path / "model.pt"))


class Owner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flat_param = nn.Parameter(torch.zeros(2, 3))


# Planning


def test_slots_exclude_nested_units_and_count_tied_parameters_once(names: Names) -> None:
    found = slots(names, {"", "layers.0", "layers.0.mlp"})
    assert list(found) == ["", "layers.0", "layers.0.mlp"]
    assert found[""][0].fqns == ("emb.weight", "head.weight")
    assert [slot.fqns[0] for slot in found["layers.0"]] == [
        f"layers.0.{n}" for n in ("scale", "norm.weight", "norm.bias")
    ]
    assert [(slot.start, slot.end) for slot in found["layers.0.mlp"]] == [
        (0, 15),
        (15, 20),
        (20, 35),
    ]


def test_unit_paths_exclude_only_real_wrappers() -> None:
    keys = [
        "_fsdp_wrapped_module.flat_param",
        "_fsdp_wrapped_module._fpw_module.a._fsdp_wrapped_module.flat_param",
    ]
    assert list(unit_paths(keys).values()) == ["", "a"]
    assert unit_paths(["module._flat_param"], ["module.x", "other.x"]) == {
        "module._flat_param": "module"
    }


def test_padding_fills_up_to_a_multiple_of_the_ranks(names: Names) -> None:
    unit_slots = slots(names, {""})[""]
    total = unit_slots[-1].end
    for world_size in (2, 3, 4, 5):
        for numel in range(total - 6, total + 7):
            fits = {numel == total, numel % world_size == 0 and 0 <= numel - total < world_size}
            assert (misfit(unit_slots, numel, world_size, padded=True) is None) == (True in fits)
            assert (misfit(unit_slots, numel, world_size, padded=False) is None) == (numel == total)


SLOTS = (Slot(("a",), (4,), 0), Slot(("b", "tied"), (2, 2), 4))


@pytest.mark.parametrize(("sizes", "numel", "padded", "message"), [
    (SLOTS, 8, False, None),
    (SLOTS, 9, True, None),
    (SLOTS, 9, False, "need 8: after its last parameter, b [2, 2], 1 are left"),
    (SLOTS, 12, True, "need 8: after its last parameter, b [2, 2], 4 are left"),
    (SLOTS, 4, True, "need 8: b [2, 2] would be elements 4 to 8"),
    (SLOTS, 3, False, "need 8: a [4] would be elements 0 to 4"),
    ((), 0, False, None),
    ((), 3, False, "need 0: 3 are left"),
])  # fmt: skip
def test_misfit_names_the_first_parameter_that_does_not_fit(
    sizes: tuple[Slot, ...], numel: int, padded: bool, message: str | None
) -> None:
    """The flat parameter is padded for three ranks."""
    result = misfit(sizes, numel, 3, padded)
    assert result == (
        None if message is None else f"holds {numel} elements, and the model's parameters {message}"
    )
