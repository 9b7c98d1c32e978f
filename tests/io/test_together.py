"""A command on several ranks writes the bytes of one process, prints once, and never leaves a
partial OUT.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import ckpttool
import dcp_ranks
import torchrun_ranks
from command import Run
from places import ROOT
from sharded_tensors import flat_parameters, save_sharded
from torchrun_ranks import Fault, run_ranks

RULE = ("--rule", "layers.{x*} => blocks.{x*}")
CAST = '[[rule]]\ncast = "layers.*"\ndtype = "bfloat16"\n'


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a checkpoint of 8 MiB in two formats, and rules that cast it."""
    folder = tmp_path_factory.mktemp("source")
    torch.manual_seed(0)
    tensors = {f"layers.{number}.weight": torch.randn(256, 512) for number in range(16)} | {
        "scale": torch.ones(3)
    }
    save_file(tensors, folder / "model.safetensors")
    torch.save({"model": tensors, "step": 7}, folder / "model.pt")
    (folder / "rules.toml").write_text(CAST)
    ckpttool.convert(str(folder / "model.safetensors"), f"{folder}/shards/", max_shard_size="3MB")
    return folder


@pytest.fixture(scope="module")
def large_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like `source`, with 22 MiB, since parts of an upload have at least 5 MiB."""
    folder = tmp_path_factory.mktemp("large_source")
    tensors = {
        f"layers.{number}.weight": torch.full((1024, 512), float(number)) for number in range(11)
    }
    save_file(tensors, folder / "model.safetensors")
    torch.save({"model": tensors, "step": 7}, folder / "model.pt")
    (folder / "rules.toml").write_text(CAST)
    return folder


def files_in(path: Path) -> dict[str, tuple[int, bytes]]:
    """Return mode and bytes of the file, or of every file in the folder."""
    paths = sorted(path.rglob("*")) if path.is_dir() else [path]
    return {
        str(one.relative_to(path)): (one.stat().st_mode, one.read_bytes())
        for one in paths
        if one.is_file()
    }


@pytest.mark.parametrize(
    ("ckpt", "out", "options"),
    [
        ("shards", "out/", RULE),
        ("model.safetensors", "out/", ("--max-shard-size", "3MB", "--verify")),
        ("shards", "out/", ("--rules", "rules.toml", "--verify")),
    ],
)
def test_ranks_write_the_bytes_of_one_process(
    source: Path,
    tmp_path: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    ckpt: str,
    out: str,
    options: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("model.safetensors", "shards", "rules.toml"):
        os.symlink(source / name, name)
    command = "convert" if "--max-shard-size" in options else "remap"
    alone = run(command, ckpt, "-o", f"alone-{out}", *options)
    first, second = run_ranks(tmp_path, 2, command, ckpt, "-o", out, *options)
    assert first.said == (0, alone.out.replace("alone-", "") + alone.err)
    assert second.said == (0, "")
    assert files_in(tmp_path / out) == files_in(tmp_path / f"alone-{out}")
    assert [*tmp_path.glob(".*")] == []


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with training checkpoints that differ in the model, the optimizer and other
    entries.
    """
    folder = tmp_path_factory.mktemp("pair")
    torch.manual_seed(1)
    model = {f"layers.{number}.weight": torch.randn(64, 64) for number in range(6)} | {
        "empty": torch.ones(0)
    }
    model |= {
        "bits": torch.tensor([True, False]),
        "double": torch.tensor([1e-300, float("nan"), float("inf")]).double(),
    }
    model["turned"], model["tied"] = torch.randn(32, 64).t(), model["layers.0.weight"]
    state = {number: {"exp_avg": torch.randn(4), "step": torch.tensor(3.0)} for number in range(2)}
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    torch.save({"model": model, "optimizer": optimizer, "rng": torch.arange(9)}, folder / "base.pt")
    model["layers.1.weight"] = model["layers.1.weight"] + 0.25
    model["layers.2.weight"], model["layers.3.weight"] = (
        model["layers.3.weight"],
        model["layers.2.weight"],
    )
    torch.save(
        {"model": model, "optimizer": optimizer, "rng": torch.arange(9) * 2}, folder / "new.pt"
    )
    state[1]["exp_avg"] = torch.ones(4)
    model["double"] = -model["double"]
    torch.save(
        {"model": {f"module.{key}": value for key, value in model.items()}, "optimizer": optimizer},
        folder / "other.pt",
    )
    save_file(
        {key: value.contiguous() for key, value in model.items() if key != "tied"},
        folder / "other.safetensors",
    )
    return folder


@pytest.mark.parametrize(
    ("command", "is_shared"),
    [
        ("inspect new.pt --stats --all", True),
        ("inspect new.pt --stats --format json --report OUT.md", True),
        ("diff base.pt new.pt --values --all", True),
        ("diff base.pt new.pt --rtol 1e-3 --atol 1e-9 --format json", True),
        ("diff new.pt other.safetensors --values --format json", True),
        ("diff base.pt::optimizer other.pt::optimizer --values", True),
        ("diff new.pt other.pt --format json", False),
    ],
)
def test_ranks_print_and_write_the_same_as_one_process(
    pair: Path,
    tmp_path: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    is_shared: bool | None,
) -> None:
    """Written files are identical too; the other ranks read a part and print nothing."""
    alone, together = (tmp_path / name for name in ("alone", "together"))
    for folder in (alone, together):
        folder.mkdir()
        for path in pair.iterdir():
            os.symlink(path, folder / path.name)
    monkeypatch.chdir(alone)
    expected = run(*command.replace("OUT", "out").split())
    first, *others = run_ranks(together, 3, *command.replace("OUT", "out").split())
    assert first.said == (expected.status, expected.out + expected.err)
    assert [other.said for other in others] == [(expected.status, "")] * 2
    assert is_shared is None or any(other.read for other in others) == is_shared
    assert {name: data for name, (_, data) in files_in(together).items()} == {
        name: data for name, (_, data) in files_in(alone).items()
    }


@pytest.mark.parametrize(
    "command",
    ["diff base.pt other.safetensors --values", "inspect base.pt --stats --report out.md"],
)
def test_read_error_on_one_rank_fails_all_ranks(pair: Path, tmp_path: Path, command: str) -> None:
    for path in pair.iterdir():
        os.symlink(path, tmp_path / path.name)
    first, second = run_ranks(tmp_path, 2, *command.split(), fault=Fault(1))
    assert first.said == (2, "error: base.pt: Input/output error\nhint: check the disk it is on\n")
    assert second.said == (2, "")
    assert not [*tmp_path.glob("out.*")]


def test_error_on_any_rank_fails_all_ranks_and_is_printed_once(
    source: Path, tmp_path: Path
) -> None:
    """Work that is not shared, such as writing a report file, is done only by the first rank."""
    refused = run_ranks(
        tmp_path, 2, "remap", source / "model.pt", "-o", "out.dcp", "--rule", "no.such => thing"
    )
    assert [done.status for done in refused] == [1, 1]
    assert refused[0].err.count("error: ") == 1
    assert refused[1].said == (1, "")
    assert [*tmp_path.iterdir()] == []
    wrong = ("--max-shard-size", "many")
    failed = run_ranks(
        tmp_path, 2, "convert", source / "model.safetensors", "-o", "out/", last=wrong
    )
    assert [done.status for done in failed] == [2, 2]
    assert "error: 'many' is not a size\n" in failed[0].err
    assert [*tmp_path.iterdir()] == []
    planned = run_ranks(
        tmp_path, 2, "remap", source / "model.pt", "--dry-run", *RULE, "--report", "plan.md"
    )
    assert [done.status for done in planned] == [0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["plan.md"]
    inspected = run_ranks(tmp_path, 2, "inspect", source / "model.pt", "--format", "json")
    assert len(json.loads(inspected[0].out)["tensors"]) == 17
    assert inspected[1].said == (0, "")


def test_ranks_with_different_plans_write_nothing(source: Path, tmp_path: Path) -> None:
    command = ("convert", source / "model.safetensors", "-o", "out/")
    first, second = run_ranks(tmp_path, 2, *command, last=("--max-shard-size", "3MB"))
    assert first.status == second.status == 2
    assert (
        "error: the ranks planned different outputs\n  another plan than rank 0 @ rank 1\n"
        in first.err
    )
    assert [*tmp_path.iterdir()] == []


def test_one_file_is_refused(source: Path, tmp_path: Path) -> None:
    first, second = run_ranks(
        tmp_path, 2, "remap", source / "model.safetensors", *RULE, "-o", "out.safetensors"
    )
    assert (first.status, second.said) == (1, (1, ""))
    assert "error: out.safetensors is one file" in first.err
    assert "-o OUT/, or -o OUT.dcp" in first.err
    assert [*tmp_path.iterdir()] == []


def test_next_job_replaces_what_a_killed_job_left(source: Path, tmp_path: Path, run: Run) -> None:
    command = ("convert", source / "model.safetensors", "--max-shard-size", "3MB", "-o")
    killed = run_ranks(tmp_path, 2, *command, "out/", fault=Fault(1, 0), all_die=True)
    assert killed[1].status == -9, killed
    assert not (tmp_path / "out").exists()
    assert [*tmp_path.glob(".out.*.ckpttool.job")]
    done = run_ranks(tmp_path, 3, *command, "out/")
    assert [one.status for one in done] == [0, 0, 0], done
    run(*command, f"{tmp_path}/alone/")
    assert files_in(tmp_path / "out") == files_in(tmp_path / "alone")
    assert [*tmp_path.glob(".*")] == []


def test_torchrun_restarts_a_killed_rank(source: Path, tmp_path: Path, run: Run) -> None:
    options = ("--rules", source / "rules.toml")
    command = (
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1",
        torchrun_ranks.__file__,
    )
    path = os.pathsep.join((str(ROOT), str(Path(torchrun_ranks.__file__).parent)))
    argv = ("remap", source / "shards", "-o", f"{tmp_path}/out/", *options)
    done = subprocess.run(
        [sys.executable, *command, *map(str, argv)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "exitcode: -9" in done.stderr
    run("remap", source / "shards", "-o", f"{tmp_path}/alone/", *options)
    assert files_in(tmp_path / "out") == files_in(tmp_path / "alone")
    assert [*tmp_path.glob(".*")] == []


def test_first_rank_alone_swaps_weights(tmp_path: Path, run: Run) -> None:
    linear = torch.nn.Linear(3, 2)
    torch.export.save(torch.export.export(linear, (torch.ones(1, 3),)), tmp_path / "program.pt2")
    torch.save(
        {key: torch.full_like(value, 2.0) for key, value in linear.state_dict().items()},
        tmp_path / "new.pt",
    )
    command = ("swap-weights", tmp_path / "program.pt2", tmp_path / "new.pt", "-o")
    done = run_ranks(tmp_path, 2, *command, "out.pt2")
    assert ([one.status for one in done], done[1].written) == ([0, 0], 0), done
    run(*command, tmp_path / "alone.pt2")
    assert (tmp_path / "out.pt2").read_bytes() == (tmp_path / "alone.pt2").read_bytes()


def test_model_code_runs_on_one_rank(tmp_path: Path, run: Run) -> None:
    """The other ranks receive the names from it, so the code need not be deterministic."""
    (tmp_path / "model.py").write_text(
        "import os\nfrom torch import nn\n\n\n"
        "class Renamed(nn.Linear):\n"
        "    def _save_to_state_dict(self, destination, prefix, keep_vars):\n"
        "        destination[prefix + 'kernel'] = self.weight if keep_vars else"
        " self.weight.detach()\n\n\n"
        "def build():\n    print(os.environ['RANK'], file=open('ran', 'a'))\n    return Renamed(3,"
        " 3, bias=False)\n"
    )
    torch.save({"kernel": torch.ones(3, 3)}, tmp_path / "a.pt")
    done = run_ranks(
        tmp_path, 3, "remap", "a.pt", "-o", "out/", "--model", "model.py:build", "--to", "runtime"
    )
    assert [one.status for one in done] == [0, 0, 0], done
    assert [*load_file(tmp_path / "out" / "model.safetensors")] == ["weight"]
    assert {*(tmp_path / "ran").read_text().split()} == {"0"}


OPTIMIZER = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.expert = nn.Linear(3, 3), nn.Linear(3, 3)
    def forward(self, x):
        return self.body(x)
def adam(model):
    biases = [p for p in model.parameters() if p.ndim < 2]
    weights = [p for p in model.parameters() if p.ndim > 1]
    return torch.optim.Adam([{"params": biases}, {"params": weights, "lr": 0.1}])
"""


@pytest.mark.parametrize("options", [(), ("--partial",)])
def test_all_ranks_have_the_ids_and_the_new_state_of_the_optimizer(
    options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    """The first rank alone runs the optimizer's code, after the model's. Both have answers."""
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(OPTIMIZER)
    code: dict[str, Any] = {"__name__": "net"}
    exec(OPTIMIZER, code)
    model = code["Net"]()
    optimizer = code["adam"](model)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "a.pt")
    command = ["remap", "a.pt", "--model", "net.py:Net", "--optimizer", "net.py:adam"]
    command += ["--optimizer-keys", "flat", *options, "-o"]
    done = run_ranks(tmp_path, 2, *command, "out.dcp")
    assert [rank.status for rank in done] == [0, 0], done
    assert run(*command, "alone.dcp").status == 0
    assert run("diff", "out.dcp", "alone.dcp", "--values", "--whole").status == 0
    loads = run("diff", "out.dcp", "--model", "net.py:Net", "--optimizer", "net.py:adam")
    assert loads.status == (0 if options else 1)


# Resharding


MODEL = """
from torch import nn

def build():
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
"""


@pytest.fixture(scope="module")
def saved_by_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model on three ranks: FSDP1 flat parameters and sharded tensors, DTensors, and DCP."""
    folder = tmp_path_factory.mktemp("saved_by_ranks")
    (folder / "model.py").write_text(MODEL)
    torch.manual_seed(2)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6)))
    torch.save({"model": model.state_dict()}, folder / "full.pt")
    state = model.state_dict()
    units = flat_parameters(state, "0", "1", "2")
    units["_flat_param"] = torch.cat(
        [value.flatten() for key, value in state.items() if key[0] in "345"]
    )
    save_sharded(folder, "flat", units, 3, "model")
    save_sharded(folder, "parts", state, 3, "model")
    for rank in range(3):
        torch.save(
            {"model": as_dtensors(model.state_dict(), rank, 3)}, folder / f"dtensors_{rank}.pt"
        )
    (done, *_) = run_ranks(folder, 3, "remap", "full.pt", "-o", "three.dcp")
    assert done.status == 0, done
    return folder


def as_dtensors(state: dict[str, torch.Tensor], rank: int, size: int) -> dict[str, torch.Tensor]:
    """Shard every tensor along dim 0, as `fully_shard` does."""
    from torch import distributed
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (size,))
        return {
            key: DTensor.from_local(
                value.chunk(size)[rank].clone(),
                mesh,
                [Shard(0)],
                run_check=False,
                shape=value.shape,
                stride=value.stride(),
            )
            for key, value in state.items()
        }
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("parts_*.pt", ("--model", "model.py:build", "-o", "out.dcp")),
        ("dtensors_*.pt", ("-o", "out.dcp")),
        ("flat_*.pt", ("--model", "model.py:build", "-o", "out.dcp")),
        ("three.dcp", ("-o", "out.dcp", "--rule", "{x*} => net.{x*}")),
    ],
)
def test_resharding_moves_each_byte_once(
    saved_by_ranks: Path, tmp_path: Path, source: str, options: tuple[str, ...]
) -> None:
    """One of the two ranks reads each byte and one writes it; the output unshards to the same
    values.
    """
    for path in saved_by_ranks.iterdir():
        os.symlink(path, tmp_path / path.name)
    ranks = run_ranks(tmp_path, 2, "remap", source, *options)
    assert [one.status for one in ranks] == [0, 0], ranks
    model_state = torch.load(saved_by_ranks / "full.pt")["model"]
    values = sum(value.nbytes for value in model_state.values())
    read, written = (
        sum(counts) for counts in zip(*((one.read or 0, one.written or 0) for one in ranks))
    )
    nbytes = sum(size for _, size in sizes(tmp_path))
    # The pickles of rank files may be read twice. A record that ranks read in parts is read
    # completely for its CRC.
    assert read <= nbytes * (1.02 if source.startswith("dtensors") or "--rule" in options else 3.02)
    assert written <= nbytes
    assert read >= values / 2
    back = tmp_path / "back.pt"
    ckpttool.remap(str(tmp_path / "out.dcp"), str(back))
    actual = model_in(back)
    assert all(torch.equal(actual[key], value) for key, value in model_state.items())


def sizes(folder: Path) -> list[tuple[str, int]]:
    paths = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return [
        (path.name, path.stat().st_size)
        for path in paths
        if not path.is_relative_to(folder / "three.dcp")
    ]


def model_in(path: Path) -> dict[str, torch.Tensor]:
    content = torch.load(path)
    return {
        key.removeprefix("net.").removeprefix("model.net."): value
        for key, value in content.get("model", content).items()
    }


@pytest.mark.parametrize("world_size", [1, 2])
def test_dcp_folder_written_by_ranks_loads_on_any_number_of_ranks(
    saved_by_ranks: Path, world_size: int
) -> None:
    """Each rank writes one file of about the same size; `dcp.load` reads full tensors and shards of
    two ranks.
    """
    files = sorted((saved_by_ranks / "three.dcp").glob("*.distcp"))
    assert [path.name for path in files] == ["__0_0.distcp", "__1_0.distcp", "__2_0.distcp"]
    assert max(path.stat().st_size for path in files) < 1.3 * min(
        path.stat().st_size for path in files
    )
    if world_size > 1:
        dcp_ranks.run("whole", saved_by_ranks)
        return
    model_state = torch.load(saved_by_ranks / "full.pt")["model"]
    actual = {"model": {key: torch.zeros_like(value) for key, value in model_state.items()}}
    dcp.load(actual, checkpoint_id=saved_by_ranks / "three.dcp")
    assert all(torch.equal(actual["model"][key], value) for key, value in model_state.items())


# Stores


def objects(bucket: Any, folder: str = "") -> dict[str, bytes]:
    fs, name = bucket
    fs.invalidate_cache()
    root = f"{name}/{folder}".rstrip("/")
    return {path.removeprefix(root).strip("/"): fs.cat_file(path) for path in fs.find(root)}


def uploads(bucket: Any) -> list[dict[str, str]]:
    fs, name = bucket
    return list(fs.call_s3("list_multipart_uploads", Bucket=name).get("Uploads") or [])


@pytest.mark.parametrize(
    ("ckpt", "out", "options"),
    [
        ("model.safetensors", "out/", ("--max-shard-size", "6MB", "--verify")),
        ("s3://BUCKET/model.safetensors", "out/", ("--max-shard-size", "6MB")),
    ],
)
def test_ranks_upload_the_bytes_of_one_process(
    large_source: Path,
    bucket: Any,
    tmp_path: Path,
    run: Run,
    ckpt: str,
    out: str,
    options: tuple[str, ...],
) -> None:
    """Nothing else is left in the bucket."""
    fs, name = bucket
    for path in large_source.iterdir():
        os.symlink(path, tmp_path / path.name)
        fs.put_file(str(path), f"{name}/{path.name}")
    options = tuple(
        str(large_source / option) if option.endswith(".toml") else option for option in options
    )
    source = ckpt.replace("BUCKET", name) if "://" in ckpt else str(large_source / ckpt)
    (tmp_path / "alone").mkdir()
    command = "convert" if "--max-shard-size" in options else "remap"
    run(command, source, "-o", f"{tmp_path}/alone/{out}", *options)
    before = objects(bucket).keys()
    first, second = run_ranks(tmp_path, 2, command, source, "-o", f"s3://{name}/{out}", *options)
    assert (first.status, second.said) == (0, (0, "")), first
    assert ("verified" in first.out) == ("--verify" in options)
    assert uploads(bucket) == []
    actual = objects(bucket)
    written = {name: data for name, (_, data) in files_in(tmp_path / "alone").items()}
    assert {key: actual[key] for key in actual.keys() - before} == written


def test_failed_upload_leaves_no_objects(large_source: Path, bucket: Any, tmp_path: Path) -> None:
    """A read error on one rank ends all of them."""
    command = (
        "convert",
        large_source / "model.safetensors",
        "-o",
        f"s3://{bucket[1]}/out/",
        "--max-shard-size",
        "6MB",
    )
    failed = run_ranks(tmp_path, 2, *command, fault=Fault(1))
    assert [one.status for one in failed] == [2, 2]
    assert failed[0].err.count("error: ") == 1
    assert "Input/output error" in failed[0].err
    assert (objects(bucket), uploads(bucket)) == ({}, [])
