"""Files of ranks as one checkpoint: tensors cut over any mesh are whole, what differs between ranks is told."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckpttool.formats.ranks.files import _numbers
from command import Run
from places import DATA
from torch_version import needs_torch

SEEDS = range(int(os.environ.get("CKPTTOOL_SEEDS", "4")))
ONES = torch.ones(2)


def saved(folder: Path, *states: Any, name: str = "rank_{}.pt") -> str:
    for rank, state in enumerate(states):
        torch.save(state, folder / name.format(rank))
    return f"{folder}/{name.format('*')}"


@contextmanager
def of_rank(rank: int, ranks: int) -> Iterator[None]:
    """A process group of which this process is that rank; nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


# DTensors


@pytest.mark.parametrize("seed", SEEDS)
def test_tensors_cut_over_any_mesh_are_whole(run: Run, tmp_path: Path, seed: int) -> None:
    """Ranks in any order; up to three dimensions of the mesh, which may cut the same one of the tensor; no elements."""
    needs_torch("2.7", "cutting a tensor that every rank has")
    draw = random.Random(seed)
    sizes = draw.choice(((1,), (2,), (3,), (5,), (2, 2), (3, 2), (1, 3), (2, 2, 2)))
    ranks = math.prod(sizes)
    order = torch.tensor(draw.sample(range(ranks), ranks)).reshape(sizes)
    wholes, cuts = {}, {}
    for number in range(6):
        shape = [draw.choice((0, 1, 2, 3, 5, 7)) for _ in range(draw.randint(1, 3))]
        wholes[f"t{number}"] = torch.arange(math.prod(shape)).reshape(shape)
        ways = [Replicate(), *map(Shard, range(len(shape)))]
        cuts[f"t{number}"] = [draw.choice(ways) for _ in sizes]
    for rank in range(ranks):
        with of_rank(rank, ranks):
            mesh = DeviceMesh("cpu", order)
            parts = {key: distribute_tensor(w, mesh, cuts[key], src_data_rank=None) for key, w in wholes.items()}
            torch.save(parts, tmp_path / f"rank_{rank}.pt")
    done = run("remap", tmp_path / "rank_*.pt", "-o", tmp_path / "out.pt", "--verify")
    assert done.status == 0, done.err
    made = torch.load(tmp_path / "out.pt")
    assert all(torch.equal(made[key], whole) for key, whole in wholes.items()), cuts


@pytest.mark.parametrize("version", ["2.6.0", "2.15.0"])
def test_dtensors_that_other_releases_of_torch_wrote(run: Run, tmp_path: Path, version: str) -> None:
    done = run("remap", DATA / f"dtensors-torch-{version}" / "rank_*.pt", "-o", tmp_path / "out.pt", "--verify")
    assert done.status == 0, done.err
    made, whole = torch.load(tmp_path / "out.pt"), torch.arange(42.0).reshape(7, 6)
    assert {key: torch.equal(value, whole) for key, value in made.items()} == dict.fromkeys(
        ("replicated", "square", "strided"), True
    )


def test_parts_that_are_not_what_the_placements_give_are_refused(run: Run, tmp_path: Path) -> None:
    """Together they are as many elements as the tensor has; whose place is which nothing says."""
    for rank, numel in enumerate((0, 1, 1, 0)):  # two elements over four ranks: the first two have one each
        with of_rank(rank, 4):
            mesh, shape = init_device_mesh("cpu", (4,)), torch.Size([2])
            part = DTensor.from_local(torch.ones(numel), mesh, [Shard(0)], run_check=False, shape=shape, stride=(1,))
            torch.save({"w": part}, tmp_path / f"rank_{rank}.pt")
    done = run("inspect", tmp_path / "rank_*.pt")
    said = "its part has the shape [0], where its placements give [1] @ w"
    assert (done.status, said in done.err) == (2, True), done.err


@pytest.mark.parametrize(
    ("attribute", "value", "says"),
    [
        ("_coordinate_on_dim", (0,), None),
        ("_coordinate_on_dim", (2,), "no place in the mesh"),
        ("_coordinate_on_dim", (), "no place in the mesh"),
        ("_coordinate_on_dim", None, "the DTensor w"),
        ("_rank", 9, "no rank of the mesh"),
        ("_rank", 0, "is rank 0, as another file is"),
    ],
)
def test_a_mesh_that_lies_is_refused(run: Run, tmp_path: Path, attribute: str, value: object, says: str | None) -> None:
    needs_torch("2.13", "meshes with these attributes")
    for rank in (0, 1):
        with of_rank(rank, 2):
            mesh = init_device_mesh("cpu", (2,))
            part = DTensor.from_local(ONES, mesh, [Shard(0) if says else Replicate()], run_check=False)
            if rank:
                setattr(mesh, attribute, value)
            torch.save({"w": part}, tmp_path / f"rank_{rank}.pt")
    done = run("inspect", tmp_path / "rank_*.pt")
    assert (done.status, (says or "") in done.err) == (2 if says else 0, True), done.err


class Odd:
    """Pickled as a tensor of a class that is none."""

    def __reduce__(self) -> tuple[Any, ...]:
        return torch._tensor._rebuild_from_type_v2, (print, 5, (), {"_spec": None})


def test_a_tensor_of_no_class_is_no_dtensor(run: Run, tmp_path: Path) -> None:
    assert run("inspect", saved(tmp_path, *[{"w": Odd(), "a": ONES}] * 2)).status == 0


# What ranks hold otherwise than others


LONG = 1 << 20_000  # more digits than Python writes


def optimizer(**own: Any) -> dict[str, Any]:
    return {"model": {"w": ONES}, "optimizer": {"state": {0: own}, "param_groups": [{"lr": 0.1, "params": [0]}]}}


@pytest.mark.parametrize(
    ("zero", "one", "says"),
    [
        (optimizer(m=None), optimizer(m=ONES), "is None on rank 0, and a tensor on rank 1 @ optimizer.state.0.m"),
        (optimizer(m=ONES), optimizer(m={"a": ONES}), "is a tensor on rank 0, and a dict on rank 1"),
        (optimizer(m=ONES, n=[1]), optimizer(m=ONES, n=[1, 2]), "a list of 1 on rank 0, and a list of 2 on rank 1"),
        (optimizer(m=ONES, n=LONG), optimizer(m=ONES, n=LONG), None),
        (optimizer(m=ONES, n=LONG), optimizer(m=ONES, n=-LONG), "is 0x1000"),
        (optimizer(m=ONES, n=1), optimizer(m=ONES, n=True), "is 1 on rank 0, and True on rank 1"),
        ({"a": ONES, "b": None}, {"a": ONES, "b": ONES}, "differs between the ranks, and no parts make it @ b"),
        ({"a": ONES, "b": ONES}, {"a": ONES, "b": None}, "differs between the ranks, and no parts make it @ b"),
        ({"a": torch.eye(2).to_sparse()}, {"a": torch.ones(2, 2).to_sparse()}, "and no parts make it @ a"),
        ({"m": {"a": ONES}}, {"m": {"a": ONES}, "epoch": 2, "n": 3}, None),
        ({"m": {"a": ONES}, "epoch": math.nan}, {"m": {"a": ONES}, "epoch": math.nan}, None),
        ({"m": {"a": ONES}, "epoch": 1}, {"m": {"a": ONES}, "epoch": 1.0}, "is 1 on rank 0, and 1.0 on rank 1 @ epoch"),
        ({"m": {"a": ONES}}, {"m": optimizer(a=ONES)["optimizer"]}, "'state_dict' on rank 0, and 'optimizer' on"),
    ],
)
def test_what_is_not_the_same_thing_on_all_ranks_is_refused(
    run: Run, tmp_path: Path, zero: Any, one: Any, says: str | None
) -> None:
    done = run("inspect", saved(tmp_path, zero, one))
    assert (done.status, (says or "") in done.err) == (2 if says else 0, True), done.err


def test_of_three_ranks_those_are_named_that_differ(run: Run, tmp_path: Path) -> None:
    states = [{"m": {"a": ONES}}, *({"m": {"a": ONES}, "epoch": epoch} for epoch in (4, 5))]
    done = run("inspect", saved(tmp_path, *states))
    assert (done.status, "is 4 on rank 1, and 5 on rank 2 @ epoch" in done.err) == (2, True), done.err


def test_objects_that_differ_are_rank_0s_and_it_is_said(run: Run, tmp_path: Path) -> None:
    states = [{"a": ONES, "b": ONES, "x._extra_state": {"amax": amax}} for amax in (1, 2)]
    notes = run("inspect", saved(tmp_path, *states), "--format", "json").data["notes"]
    assert "x._extra_state differs between the ranks: rank 0's is taken" in notes
    notes = run("inspect", saved(tmp_path, states[0], states[0]), "--format", "json").data["notes"]
    assert not any("differs" in note for note in notes)


def test_what_rank_0_has_not_is_said(run: Run, tmp_path: Path) -> None:
    done = run("inspect", saved(tmp_path, {"m": {"a": ONES}}, {"m": {"a": ONES}, "args": [1]}), "--format", "json")
    assert "not carried: args, which rank 0 has not" in done.data["notes"]


# Which file is of which rank


@pytest.mark.parametrize(
    ("names", "numbers"),
    [
        (["rank_0.pt", "rank_1.pt"], [0, 1]),
        (["step7_rank_1.pt", "step7_rank_0.pt"], [1, 0]),
        (["rank_10/model.pt", "rank_2/model.pt"], [10, 2]),
        (["host9_rank0.pt", "host3_rank1.pt"], [0, 1]),
        (["node0_rank0.pt", "node0_rank1.pt", "node1_rank2.pt"], [0, 1, 2]),
        (["node0_rank0.pt", "node1_rank1.pt"], [0, 1]),
        (["node0_gpu0.pt", "node0_gpu1.pt", "node1_gpu0.pt", "node1_gpu1.pt"], None),
        (["a0_b1.pt", "a1_b0.pt"], None),
        (["first.pt", "second.pt"], None),
        (["rank_0.pt", "rank_1_of_2.pt"], None),
        (["rank_0.pt"], None),
    ],
)
def test_the_number_in_a_name_that_says_the_rank(names: list[str], numbers: list[int] | None) -> None:
    assert _numbers(names) == ({} if numbers is None else dict(zip(names, numbers)))


def test_files_that_do_not_say_their_rank_are_not_put_in_an_order(run: Run, tmp_path: Path) -> None:
    for name in ("one", "two"):
        torch.save({"flat_param": ONES, "b": ONES}, tmp_path / f"{name}.pt")
    done = run("inspect", tmp_path / "*.pt")
    assert done.status == 2
    assert [
        f"does not say its rank, nor does a number in its name @ {tmp_path / name}.pt" in done.err
        for name in ("one", "two")
    ]


# Compared


@pytest.mark.parametrize(
    ("left", "right", "status"),
    [
        ([ONES, ONES], [ONES], 0),
        ([ONES, ONES * 2], [ONES], 1),
        ([ONES], [ONES, ONES * 2], 1),
        ([ONES, ONES * 2], [ONES, ONES * 2], 0),
        ([ONES, ONES * 2], [ONES, ONES * 3], 1),
        ([ONES, ONES, ONES], [ONES, ONES], 0),
        ([ONES, ONES, ONES * 2], [ONES, ONES], 1),
    ],
)
def test_what_other_ranks_hold_is_compared_too(
    run: Run, tmp_path: Path, left: list[Any], right: list[Any], status: int
) -> None:
    sides = [
        saved(tmp_path, *({"a": t} for t in own), name=f"{side}_{{}}.pt") for side, own in (("l", left), ("r", right))
    ]
    assert run("diff", *sides, "--values").status == status
    assert run("diff", *sides).status == 0


@pytest.mark.parametrize("values", [[], ["--values"]])
def test_slices_of_other_lengths_on_other_ranks_are_not_the_same(run: Run, tmp_path: Path, values: list[str]) -> None:
    left = saved(tmp_path, {"a": torch.ones(3)}, {"a": torch.ones(3)}, name="l_{}.pt")
    right = saved(tmp_path, {"a": torch.ones(3)}, {"a": torch.ones(2)}, name="r_{}.pt")
    done = run("diff", left, right, *values)
    assert (done.status, "of other shapes on other ranks" in done.out) == (1, True)
    whole = saved(tmp_path, {"a": torch.ones(3)}, name="w{}.pt")
    assert run("diff", right, whole, *values).status == 1
    assert run("diff", whole, left, *values).status == 0


# Sharded tensors


def again(sharded: Any, shard: Any) -> None:
    sharded._local_shards.append(shard)


def at(*offsets: int) -> Callable[[Any, Any], None]:
    return lambda sharded, shard: setattr(shard.metadata, "shard_offsets", list(offsets))


def holding(tensor: torch.Tensor) -> Callable[[Any, Any], None]:
    return lambda sharded, shard: setattr(shard, "tensor", tensor)


NOT_IN_ROWS = "is not cut along its first dimension, rank by rank @ w"


@pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda sharded, shard: None, None),
        (again, "rank 1 holds 2 shards of w, and only one a rank can be put together"),
        (at(0, 0), NOT_IN_ROWS),
        (at(2, 1), NOT_IN_ROWS),
        (at(2), NOT_IN_ROWS),
        (at(3, 0), NOT_IN_ROWS),
        (holding(torch.ones(2, 3).double()), NOT_IN_ROWS),
        (holding(torch.ones(3, 3)), NOT_IN_ROWS),
        (holding(torch.ones(2, 2)), NOT_IN_ROWS),
        (holding(torch.ones(1, 3)), "its parts hold 9 of 12 elements @ w"),
        (holding(torch.ones(3, 2).t()), "a part of it is a strided view @ w"),
        (lambda sharded, shard: sharded._local_shards.clear(), "its parts hold 6 of 12 elements @ w"),
        (
            lambda sharded, shard: setattr(sharded._metadata, "size", torch.Size([5, 3])),
            "has another shape or dtype on other ranks @ w",
        ),
        (
            lambda sharded, shard: setattr(shard, "tensor", 1),
            "the sharded tensor w: ValueError('a shard without a tensor')",
        ),
    ],
)
def test_parts_of_a_sharded_tensor_that_are_not_its_rows_in_order_are_refused(
    run: Run, tmp_path: Path, change: Callable[[Any, Any], None], said: str | None
) -> None:
    """As one rank's object would be, of which the other says something else."""
    torch.save({"w": torch.arange(12.0).reshape(4, 3)}, tmp_path / "in.pt")
    asked = ["remap", tmp_path / "in.pt", "--model", f"{__file__}:Rows", "-o", tmp_path / "rank_{rank}.pt"]
    assert run(*asked, "--to", "fsdp-sharded", "--world-size", 2).status == 0
    with of_rank(1, 2):
        state = torch.load(tmp_path / "rank_1.pt", weights_only=False)
        change(state["w"], state["w"].local_shards()[0])
        torch.save(state, tmp_path / "rank_1.pt")
    done = run("inspect", tmp_path / "rank_*.pt")
    assert done.status == (0 if said is None else 2), done.err
    assert (said or "") in done.err


def test_a_sharded_tensor_on_some_ranks_is_refused(run: Run, tmp_path: Path) -> None:
    torch.save({"w": torch.arange(12.0).reshape(4, 3)}, tmp_path / "in.pt")
    asked = ["remap", tmp_path / "in.pt", "--model", f"{__file__}:Rows", "-o", tmp_path / "rank_{rank}.pt"]
    assert run(*asked, "--to", "fsdp-sharded", "--world-size", 2).status == 0
    torch.save({"w": torch.ones(2, 3)}, tmp_path / "rank_1.pt")
    done = run("inspect", tmp_path / "rank_*.pt")
    assert done.status == 2
    assert "does not say its rank, other files do @ " in done.err


class Rows(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(4, 3))
