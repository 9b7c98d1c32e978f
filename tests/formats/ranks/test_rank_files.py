"""Rank files as one checkpoint: tensors sharded over any mesh are assembled, differences between
ranks are reported.
"""

from __future__ import annotations

import math
import os
import random
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from ckpttool.containers.pickle_read import Call, Global, loads
from ckpttool.containers.pickle_write import dumps
from ckpttool.formats.rank_files import _numbers
from command import Run, notes_in
from files import change_archive
from places import DATA
from sharded_tensors import as_rank, save_sharded
from torch_version import needs_torch

SEEDS = range(int(os.environ.get("CKPTTOOL_SEEDS", "4")))
ONES = torch.ones(2)


def saved(folder: Path, *states: Any, name: str = "rank_{}.pt") -> str:
    for rank, state in enumerate(states):
        torch.save(state, folder / name.format(rank))
    return f"{folder}/{name.format('*')}"


# DTensors


@pytest.mark.parametrize("seed", SEEDS)
def test_tensors_sharded_over_any_mesh_are_assembled(run: Run, tmp_path: Path, seed: int) -> None:
    """Ranks in any order, up to three mesh dimensions, which may shard the same dimension, and
    empty tensors.
    """
    needs_torch("2.7", "cutting a tensor that every rank has")
    draw = random.Random(seed)
    sizes = draw.choice(((1,), (2,), (3,), (5,), (2, 2), (3, 2), (1, 3), (2, 2, 2)))
    ranks = math.prod(sizes)
    order = torch.tensor(draw.sample(range(ranks), ranks)).reshape(sizes)
    wholes, cuts = {}, {}
    for number in range(6):
        shape = [draw.choice((0, 1, 2, 3, 5, 7)) for _ in range(draw.randint(1, 3))]
        wholes[f"t{number}"] = torch.arange(math.prod(shape)).reshape(shape)
        placements = [Replicate(), *map(Shard, range(len(shape)))]
        cuts[f"t{number}"] = [draw.choice(placements) for _ in sizes]
    for rank in range(ranks):
        with as_rank(rank, ranks):
            mesh = DeviceMesh("cpu", order)
            parts = {
                key: distribute_tensor(w, mesh, cuts[key], src_data_rank=None)
                for key, w in wholes.items()
            }
            torch.save(parts, tmp_path / f"rank_{rank}.pt")
    done = run("remap", tmp_path / "rank_*.pt", "-o", tmp_path / "out.pt", "--verify")
    assert done.status == 0, done.err
    found = torch.load(tmp_path / "out.pt")
    assert all(torch.equal(found[key], whole) for key, whole in wholes.items()), cuts


@pytest.mark.parametrize("version", ["2.6.0", "2.9.1", "2.10.0", "2.12.1", "2.15.0"])
def test_dtensors_of_other_releases_of_torch_are_assembled(
    run: Run, tmp_path: Path, version: str
) -> None:
    done = run(
        "remap",
        DATA / f"dtensors-torch-{version}" / "rank_*.pt",
        "-o",
        tmp_path / "out.pt",
        "--verify",
    )
    assert done.status == 0, done.err
    found, whole = torch.load(tmp_path / "out.pt"), torch.arange(42.0).reshape(7, 6)
    assert {key: torch.equal(value, whole) for key, value in found.items()} == dict.fromkeys(
        ("replicated", "square", "strided"), True
    )


def test_parts_that_do_not_match_their_placements_are_refused(run: Run, tmp_path: Path) -> None:
    """The parts have the right number of elements, but their positions are unknown."""
    # two elements over four ranks: the first two have one each
    for rank, numel in enumerate((0, 1, 1, 0)):
        with as_rank(rank, 4):
            mesh, shape = init_device_mesh("cpu", (4,)), torch.Size([2])
            part = DTensor.from_local(
                torch.ones(numel), mesh, [Shard(0)], run_check=False, shape=shape, stride=(1,)
            )
            torch.save({"w": part}, tmp_path / f"rank_{rank}.pt")
    done = run("inspect", tmp_path / "rank_*.pt")
    problem = "its part has the shape [0], but its placements give [1] @ w"
    assert (done.status, problem in done.err) == (2, True), done.err


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("_coordinate_on_dim", (0,), None),
        ("_coordinate_on_dim", (0,), "its chunks hold 2 elements, it has 4 @ w"),
        ("_coordinate_on_dim", (0, 0), "its coordinate is not in the mesh"),
        ("_coordinate_on_dim", (-1,), "not counts"),
        ("_coordinate_on_dim", (0.0,), "not counts"),
        ("_coordinate_on_dim", ("0",), "not counts"),
        ("_flatten_rank_map", (0, 1 << 63), "not counts"),
        ("_layout", SimpleNamespace(shape=(2,), stride=(1,)), None),  # as in older torch
        ("_layout", SimpleNamespace(shape=((1, 2),), stride=((2, 1),)), None),
        ("_layout", 5, "the DTensor w"),
        ("_coordinate_on_dim", (2,), "its coordinate is not in the mesh"),
        ("_coordinate_on_dim", (), "its coordinate is not in the mesh"),
        ("_coordinate_on_dim", None, "the DTensor w"),
        ("_rank", 9, "its rank is not in the mesh"),
        ("_rank", 0, "is rank 0, as another file is"),
    ],
)
def test_a_wrong_mesh_is_refused(
    run: Run, tmp_path: Path, attribute: str, value: object, message: str | None
) -> None:
    needs_torch("2.13", "meshes with these attributes")
    for rank in (0, 1):
        with as_rank(rank, 2):
            mesh = init_device_mesh("cpu", (2,))
            part = DTensor.from_local(
                ONES, mesh, [Shard(0) if message else Replicate()], run_check=False
            )
            if rank:
                setattr(mesh, attribute, value)
            torch.save({"w": part}, tmp_path / f"rank_{rank}.pt")
    done = run("inspect", tmp_path / "rank_*.pt")
    assert (done.status, (message or "") in done.err) == (2 if message else 0, True), done.err


class PickledCall:
    def __init__(self, function: Any, args: Any, state: Any = None) -> None:
        self.reduced = (function, args) if state is None else (function, args, state)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


@pytest.mark.parametrize("kind", [5, AssertionError, ValueError])
def test_a_tensor_of_another_class_is_not_a_dtensor(run: Run, tmp_path: Path, kind: Any) -> None:
    odd = PickledCall(torch._tensor._rebuild_from_type_v2, (print, kind, (), {"_spec": None}))
    assert run("inspect", saved(tmp_path, *[{"w": odd, "a": ONES}] * 2)).status == 0


@pytest.mark.parametrize(
    "node", [Call(Call(Global("a", "B"), ()), ()), Call(Global("a", "B"), (), "NEWOBJ")]
)
def test_an_object_of_any_call_is_not_a_part(run: Run, tmp_path: Path, node: Call) -> None:
    """Not even a call that Python cannot produce."""
    pattern = saved(tmp_path, *[{"a": ONES, "x": 1}] * 2)

    def with_node(name: str, data: bytes) -> bytes:
        if not name.endswith("data.pkl"):
            return data
        pickle = loads(data)
        pickle.root["x"] = node
        return dumps(pickle)

    for path in tmp_path.iterdir():
        change_archive(path, with_node)
    done = run("inspect", pattern)
    assert (done.status, "internal" in done.err) == (0, False), done.err


def cut(whole: torch.Tensor, mesh: DeviceMesh, placements: Any, local: torch.Tensor) -> DTensor:
    """Return a DTensor with the part `local` of `whole`."""
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ([_StridedShard(0, split_factor=2), Shard(0), Shard(1)], None),
        ([_StridedShard(0, split_factor=2), Replicate(), Shard(0)], None),
        ([_StridedShard(0, split_factor=4), Shard(0), Shard(0)], None),
        ([_StridedShard(0, split_factor=1), Replicate(), Shard(1)], None),
        (
            [_StridedShard(0, split_factor=3), Shard(0), Shard(1)],
            "is cut in strides (3 pieces) that the mesh does not",
        ),
        (
            [_StridedShard(0, split_factor=2), Shard(1), Shard(1)],
            "is cut in strides (2 pieces) that the mesh does not",
        ),
        (
            [_StridedShard(0, split_factor=4), _StridedShard(0, split_factor=2), Shard(0)],
            "is cut in strides (2 pieces) that the mesh does not",
        ),
        (
            [Shard(0), _StridedShard(0, split_factor=2), Shard(0)],
            "is cut in strides after other cuts",
        ),
        ([Shard(0), Replicate(), Partial()], "is Partial: a part of a sum over ranks"),
    ],
)
def test_strided_shards_are_assembled_or_refused(
    run: Run, tmp_path: Path, placements: Any, message: str | None
) -> None:
    """A strided shard is cut after the placements that follow it."""
    whole = torch.arange(32.0).reshape(8, 4)
    for rank in range(8):
        with as_rank(rank, 8):
            mesh = init_device_mesh("cpu", (2, 2, 2))
            local = whole
            for dim in (1, 2, 0):
                if isinstance(placements[dim], (Shard, _StridedShard)):
                    local = local.chunk(2, placements[dim].dim)[mesh.get_coordinate()[dim]]
            torch.save(
                {"w": cut(whole, mesh, placements, local.clone())}, tmp_path / f"rank_{rank}.pt"
            )
    done = run("remap", tmp_path / "rank_*.pt", "-o", tmp_path / "out.pt")
    assert (done.status, (message or "") in done.err) == (2 if message else 0, True), done.err
    assert (
        "hint: save it with torch.distributed.checkpoint, or its full_tensor()" in done.err
    ) == bool(message)
    assert message or torch.equal(torch.load(tmp_path / "out.pt")["w"], whole)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda part: setattr(part, "_local_tensor", 5), "no local tensor"),
        (
            lambda part: setattr(part, "_local_tensor", ONES.to_sparse()),
            "its part is a sparse_coo tensor @ w",
        ),
        (
            lambda part: setattr(part, "_local_tensor", torch.ones(3)),
            "its part has the shape [3], but its placem",
        ),
        (lambda part: setattr(part._spec, "placements", (5,)), "the DTensor w"),
        (lambda part: setattr(part._spec, "placements", (PickledCall(Shard, (0,)),)), None),
        (
            lambda part: setattr(part._spec, "placements", (PickledCall(_StridedShard, (0, 1)),)),
            None,
        ),
        (
            lambda part: setattr(part._spec, "placements", (PickledCall(_StridedShard, (0, 2)),)),
            "is cut in strides (2 pieces)",
        ),
        (
            lambda part: setattr(part._spec, "placements", (PickledCall(_StridedShard, (0, 0)),)),
            "0 pieces",
        ),
        (
            lambda part: setattr(part._spec, "placements", (PickledCall(Shard, (1,)),)),
            "cut along dimension 1 of 1",
        ),
        (
            lambda part: setattr(part._spec, "placements", (PickledCall(Shard, (-1,)),)),
            "cut along dimension -1 of 1",
        ),
        (
            lambda part: setattr(part._spec, "placements", (PickledCall(Shard, ("0",)),)),
            "the DTensor w",
        ),
        (
            lambda part: vars(part._spec).update(shard_order=((0, (1,)),)),
            "an order of shards that does not match the",
        ),
    ],
)
def test_a_wrong_dtensor_is_refused(
    run: Run, tmp_path: Path, change: Callable[[Any], None], message: str | None
) -> None:
    needs_torch("2.13", "DTensors with these attributes")
    for rank in (0, 1):
        with as_rank(rank, 2):
            part = DTensor.from_local(
                ONES, init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False
            )
            change(part)
            torch.save({"w": part}, tmp_path / f"rank_{rank}.pt")
    done = run("inspect", tmp_path / "rank_*.pt")
    assert (done.status, (message or "") in done.err) == (2 if message else 0, True), done.err


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)])
def test_parts_that_are_views_are_assembled(run: Run, tmp_path: Path, placement: Any) -> None:
    whole = torch.arange(12.0).reshape(4, 3).t()
    for rank in (0, 1):
        with as_rank(rank, 2):
            mesh = init_device_mesh("cpu", (2,))
            local = (
                whole if isinstance(placement, Replicate) else whole.chunk(2, placement.dim)[rank]
            )
            part = cut(whole, mesh, [placement], local.clone())
            part._local_tensor = local
            torch.save({"w": part, "s": torch.eye(2).to_sparse()}, tmp_path / f"rank_{rank}.pt")
    assert run("remap", tmp_path / "rank_*.pt", "-o", tmp_path / "out.pt", "--verify").status == 0
    found = torch.load(tmp_path / "out.pt")
    assert torch.equal(found["w"], whole)
    assert torch.equal(found["s"].to_dense(), torch.eye(2))


def test_an_empty_part_may_have_any_empty_shape(run: Run, tmp_path: Path) -> None:
    whole = torch.arange(3.0).reshape(1, 3)
    for rank, local in enumerate((whole, torch.empty(0))):
        with as_rank(rank, 2):
            part = cut(whole, init_device_mesh("cpu", (2,)), [Shard(0)], whole)
            part._local_tensor = local
            torch.save({"w": part}, tmp_path / f"rank_{rank}.pt")
    assert run("remap", tmp_path / "rank_*.pt", "-o", tmp_path / "out.pt").status == 0
    assert torch.equal(torch.load(tmp_path / "out.pt")["w"], whole)


@pytest.mark.parametrize("other", [{}, {"w": ONES}])
def test_a_dtensor_on_some_ranks_is_refused(run: Run, tmp_path: Path, other: Any) -> None:
    for rank in (0, 1):
        with as_rank(rank, 2):
            part = DTensor.from_local(
                ONES, init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False
            )
            torch.save(
                {"v": part, **(other if rank else {"w": part})}, tmp_path / f"rank_{rank}.pt"
            )
    done = run("inspect", tmp_path / "rank_*.pt")
    assert (done.status, "a DTensor on some ranks, and not on all @ w" in done.err) == (2, True), (
        done.err
    )


def test_files_of_different_runs_are_refused(run: Run, tmp_path: Path) -> None:
    for rank in (0, 1):
        with as_rank(rank, rank + 2):
            part = DTensor.from_local(
                ONES, init_device_mesh("cpu", (rank + 2,)), [Shard(0)], run_check=False
            )
            torch.save({"w": part}, tmp_path / f"rank_{rank}.pt")
    torch.save({"w": ONES}, tmp_path / "rank_2.pt")
    done = run("inspect", tmp_path / "rank_*.pt")
    assert done.status == 2
    assert [line for line in done.err.splitlines() if line.startswith("  ")] == [
        f"  does not say its rank, but other files do @ {tmp_path}/rank_2.pt",
        f"  comes from a run of 2 ranks @ {tmp_path}/rank_0.pt",
        f"  comes from a run of 3 ranks @ {tmp_path}/rank_1.pt",
    ]


def test_rank_files_of_another_format_are_refused(run: Run, tmp_path: Path) -> None:
    for rank in (0, 1):
        save_file({"w": ONES}, tmp_path / f"rank_{rank}.safetensors")
    done = run("inspect", tmp_path / "rank_*.safetensors")
    assert (
        done.status,
        "rank_0.safetensors was not written by torch.save, but a glob names" in done.err,
    ) == (2, True)


# Differences between ranks


LONG = 1 << 20_000  # more digits than Python writes


def optimizer(**own: Any) -> dict[str, Any]:
    return {
        "model": {"w": ONES},
        "optimizer": {"state": {0: own}, "param_groups": [{"lr": 0.1, "params": [0]}]},
    }


@pytest.mark.parametrize(
    ("zero", "one", "message"),
    [
        (
            optimizer(m=None),
            optimizer(m=ONES),
            "is None on rank 0, and a tensor on rank 1 @ optimizer.state.0.m",
        ),
        (
            optimizer(m=ONES),
            optimizer(m={"a": ONES}),
            "is a tensor on rank 0, and a dict on rank 1",
        ),
        (
            optimizer(m=ONES, n=[1]),
            optimizer(m=ONES, n=[1, 2]),
            "a list of 1 on rank 0, and a list of 2 on rank 1",
        ),
        (optimizer(m=ONES, n=LONG), optimizer(m=ONES, n=LONG), None),
        (optimizer(n=1 << 63), optimizer(n=0), "is 0x8000000000000000 on rank 0, and 0 on rank 1"),
        (optimizer(m=ONES, n=slice(1)), optimizer(m=ONES, n=slice(1)), None),
        (optimizer(m=ONES, n=[1, ONES]), optimizer(m=ONES), None),
        (
            optimizer(m=ONES, n=[1, ONES]),
            optimizer(m=ONES, n=[2, ONES]),
            "is 1 on rank 0, and 2 on rank 1",
        ),
        ({"m": {"a": ONES}}, {"m": {"a": ONES}, "ema": {"a": ONES}}, None),
        ({"m": {"a": ONES}}, optimizer(m=ONES) | {"m": {"a": ONES}}, None),
        ([{"a": ONES}], [{"a": ONES}], None),
        ({"m": {"a": ONES}, 5: 1, "epoch": 2}, {"m": {"a": ONES}, 5: 2, "epoch": 2}, None),
        (
            {"flat_param": ONES, "b": ONES},
            {"flat_param": ONES.double(), "b": ONES},
            "not of one dtype @ flat_param",
        ),
        (
            {"flat_param": ONES, "b": ONES},
            {"flat_param": torch.eye(2), "b": ONES},
            "not one-dimensional or not of one",
        ),
        ({"flat_param": ONES, "b": ONES}, {"b": ONES}, None),
        (optimizer(m=ONES, n=LONG), optimizer(m=ONES, n=-LONG), "is 0x1000"),
        (optimizer(m=ONES, n=1), optimizer(m=ONES, n=True), "is 1 on rank 0, and True on rank 1"),
        (
            {"a": ONES, "b": None},
            {"a": ONES, "b": ONES},
            "differs between the ranks, and has no parts to assemble @ b",
        ),
        (
            {"a": ONES, "b": ONES},
            {"a": ONES, "b": None},
            "differs between the ranks, and has no parts to assemble @ b",
        ),
        (
            {"a": torch.eye(2).to_sparse()},
            {"a": torch.ones(2, 2).to_sparse()},
            "and has no parts to assemble @ a",
        ),
        ({"m": {"a": ONES}}, {"m": {"a": ONES}, "epoch": 2, "n": 3}, None),
        ({"m": {"a": ONES}, "epoch": math.nan}, {"m": {"a": ONES}, "epoch": math.nan}, None),
        (
            {"m": {"a": ONES}, "epoch": 1},
            {"m": {"a": ONES}, "epoch": 1.0},
            "is 1 on rank 0, and 1.0 on rank 1 @ epoch",
        ),
        (
            {"m": {"a": ONES}},
            {"m": optimizer(a=ONES)["optimizer"]},
            "'state_dict' on rank 0, and 'optimizer' on",
        ),
    ],
)
def test_entries_that_differ_between_ranks_are_refused(
    run: Run, tmp_path: Path, zero: Any, one: Any, message: str | None
) -> None:
    done = run("inspect", saved(tmp_path, zero, one))
    assert (done.status, (message or "") in done.err) == (2 if message else 0, True), done.err


def test_the_ranks_that_differ_are_named(run: Run, tmp_path: Path) -> None:
    states = [{"m": {"a": ONES}}, *({"m": {"a": ONES}, "epoch": epoch} for epoch in (4, 5))]
    done = run("inspect", saved(tmp_path, *states))
    assert (done.status, "is 4 on rank 1, and 5 on rank 2 @ epoch" in done.err) == (2, True), (
        done.err
    )


def test_a_note_reports_that_objects_of_rank_0_are_used(run: Run, tmp_path: Path) -> None:
    states = [{"a": ONES, "b": ONES, "x._extra_state": {"amax": amax}} for amax in (1, 2)]
    notes = notes_in(run("inspect", saved(tmp_path, *states), "--format", "json").data)
    assert "x._extra_state differs between the ranks: rank 0's is used" in notes
    notes = notes_in(run("inspect", saved(tmp_path, states[0], states[0]), "--format", "json").data)
    assert not any("differs" in note for note in notes)


def test_a_note_reports_entries_that_rank_0_lacks(run: Run, tmp_path: Path) -> None:
    done = run(
        "inspect",
        saved(tmp_path, {"m": {"a": ONES}}, {"m": {"a": ONES}, "args": [1]}),
        "--format",
        "json",
    )
    assert "not copied: args, which rank 0 does not have" in notes_in(done.data)


# The rank of a file


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
def test_the_rank_is_found_in_file_names(names: list[str], numbers: list[int] | None) -> None:
    assert _numbers(names) == ({} if numbers is None else dict(zip(names, numbers)))


def test_files_without_a_rank_are_refused(run: Run, tmp_path: Path) -> None:
    for name in ("one", "two"):
        torch.save({"flat_param": ONES, "b": ONES}, tmp_path / f"{name}.pt")
    done = run("inspect", tmp_path / "*.pt")
    assert done.status == 2
    for name in ("one", "two"):
        assert (
            f"does not say its rank, nor does a number in its name @ {tmp_path / name}.pt"
            in done.err
        )


# Comparison


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
        ([ONES, None], [ONES, None], 0),
        ([ONES, None], [ONES, ONES], 1),
        ([None, ONES], [ONES, None], 1),
    ],
)
def test_diff_compares_entries_of_other_ranks(
    run: Run, tmp_path: Path, left: list[Any], right: list[Any], status: int
) -> None:
    sides = [
        saved(
            tmp_path,
            *({"b": ONES} if t is None else {"a": t, "b": ONES} for t in tensors),
            name=f"{side}_{{}}.pt",
        )
        for side, tensors in (("l", left), ("r", right))
    ]
    assert run("diff", *sides, "--values").status == status
    assert run("diff", *sides).status == (status if None in left else 0)


@pytest.mark.parametrize("values", [[], ["--values"]])
def test_diff_compares_shapes_on_other_ranks(run: Run, tmp_path: Path, values: list[str]) -> None:
    left = saved(tmp_path, {"a": torch.ones(3)}, {"a": torch.ones(3)}, name="l_{}.pt")
    right = saved(tmp_path, {"a": torch.ones(3)}, {"a": torch.ones(2)}, name="r_{}.pt")
    done = run("diff", left, right, *values)
    assert (done.status, "different shape on another rank" in done.out) == (1, True)
    whole = saved(tmp_path, {"a": torch.ones(3)}, name="w{}.pt")
    assert run("diff", right, whole, *values).status == 1
    assert run("diff", whole, left, *values).status == 0


# Sharded tensors


def shards_of(state: Any) -> list[Any]:
    shards: list[Any] = state["w"]._local_shards
    return shards


def with_offsets(*offsets: int) -> Callable[[Any], None]:
    return lambda state: setattr(shards_of(state)[0].metadata, "shard_offsets", list(offsets))


def with_tensor(tensor: Any) -> Callable[[Any], None]:
    return lambda state: setattr(shards_of(state)[0], "tensor", tensor)


def like_torch_1(state: Any) -> None:
    """Pickle it like torch before 2.0."""
    state["w"] = PickledCall(ShardedTensor, (), state["w"].__getstate__())


def with_rank_2(state: Any) -> None:
    shards, metadata, group, *rest = state["w"].__getstate__()
    group.local_rank = 2
    state["w"] = PickledCall(ShardedTensor, (), (shards, metadata, group, *rest))


def without_shards(state: Any) -> None:
    state.clear()
    state["w"] = torch.ones(2, 3)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of two ranks with the sharded tensors `w` and `v`."""
    folder = tmp_path_factory.mktemp("sharded")
    save_sharded(folder, "rank", {"w": torch.arange(12.0).reshape(4, 3), "v": torch.ones(4)}, 2)
    return folder


@pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: None, None),
        (
            lambda state: shards_of(state).append(shards_of(state)[0]),
            "a rank holds 2 shards of w: only one for each rank is supported",
        ),
        (with_offsets(0, 0), "its chunks hold 6 elements, it has 12 @ w"),
        (with_offsets(2, 1), "a chunk at [2, 1] of [2, 3] elements is not inside [4, 3] @ w"),
        (with_offsets(2), "a chunk at [2] of [2, 3] elements is not inside [4, 3] @ w"),
        (with_offsets(3, 0), "a chunk at [3, 0] of [2, 3] elements is not inside [4, 3] @ w"),
        (with_offsets(1, 0), "two of its chunks overlap @ w"),
        (with_tensor(torch.ones(2, 3).double()), "its part is float64, the tensor float32 @ w"),
        (with_tensor(torch.ones(2, 3).to_sparse()), "its part is a sparse_coo tensor @ w"),
        (
            with_tensor(torch.ones(3, 3)),
            "a chunk at [2, 0] of [3, 3] elements is not inside [4, 3] @ w",
        ),
        (with_tensor(torch.ones(2, 2)), "its chunks hold 10 elements, it has 12 @ w"),
        (with_tensor(torch.ones(0, 3)), "its chunks hold 6 elements, it has 12 @ w"),
        (
            lambda state: setattr(state["w"]._metadata.tensor_properties, "dtype", print),
            "ValueError('no dtype')",
        ),
        (with_tensor(torch.ones(1, 3)), "its chunks hold 9 elements, it has 12 @ w"),
        (with_tensor(torch.ones(3, 2).t()), None),
        (lambda state: shards_of(state).clear(), "its chunks hold 6 elements, it has 12 @ w"),
        (
            lambda state: setattr(state["w"]._metadata, "size", torch.Size([5, 3])),
            "its shape, dtype or placements differ between the ranks @ w",
        ),
        (with_tensor(1), "the sharded tensor w: ValueError('a shard without a tensor')"),
        (like_torch_1, None),
        (with_rank_2, "its rank is not in the process group"),
        (lambda state: state.update(w=PickledCall(ShardedTensor, ())), "the sharded tensor w"),
        (lambda state: state.update(v=ONES), "a sharded tensor on some ranks, and not on all @ v"),
        (lambda state: state.pop("v"), "a sharded tensor on some ranks, and not on all @ v"),
        (without_shards, "does not say its rank, but other files do @ "),
    ],
)
def test_changed_sharded_tensors_are_read_or_refused(
    run: Run, two_ranks: Path, tmp_path: Path, change: Callable[[Any], None], message: str | None
) -> None:
    """One rank's tensor is changed, so the ranks may contradict each other."""
    shutil.copy(two_ranks / "rank_0.pt", tmp_path)
    with as_rank(1, 2):
        state = torch.load(two_ranks / "rank_1.pt", weights_only=False)
        change(state)
        torch.save(state, tmp_path / "rank_1.pt")
    done = run("inspect", tmp_path / "rank_*.pt")
    assert (done.status, (message or "") in done.err) == (2 if message else 0, True), done.err


@pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning")
@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([([0, 0], [4, 2]), ([0, 2], [4, 1])], None),
        ([([2, 0], [2, 3]), ([0, 0], [2, 3])], "its chunks are not in the order of the ranks @ w"),
    ],
)
def test_a_sharded_tensor_with_other_chunks_is_assembled_or_refused(
    run: Run, tmp_path: Path, chunks: list[tuple[list[int], list[int]]], message: str | None
) -> None:
    tensor = torch.arange(12.0).reshape(4, 3)
    shards = [
        ShardMetadata(offsets, sizes, f"rank:{rank}/cpu")
        for rank, (offsets, sizes) in enumerate(chunks)
    ]
    metadata = ShardedTensorMetadata(shards, tensor.size(), TensorProperties(dtype=torch.float32))
    for rank, ((top, left), (height, width)) in enumerate(chunks):
        with as_rank(rank, 2):
            local = LocalShard(
                tensor[top : top + height, left : left + width].clone(), shards[rank]
            )
            sharded = ShardedTensor._init_from_local_shards_and_global_metadata([local], metadata)
            torch.save({"w": sharded}, tmp_path / f"rank_{rank}.pt")
    done = run(
        "remap",
        tmp_path / "rank_*.pt",
        "--model",
        f"{__file__}:Rows",
        "-o",
        tmp_path / "out.pt",
        "--verify",
    )
    assert (done.status, (message or "") in done.err) == (2 if message else 0, True), done.err
    assert message or torch.equal(torch.load(tmp_path / "out.pt")["w"], tensor)


@pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning")
def test_a_dtype_without_a_storage_class_is_assembled(run: Run, tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(4, 3).to(torch.float8_e4m3fn)
    save_sharded(tmp_path, "rank", {"w": whole}, 2)
    model = ["--model", f"{__file__}:Small"]
    assert run("remap", tmp_path / "rank_*.pt", *model, "-o", tmp_path / "out.pt").status == 0
    back = torch.load(tmp_path / "out.pt")["w"]
    assert back.dtype == whole.dtype
    assert torch.equal(back.float(), whole.float())


class Rows(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(4, 3))


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(4, 3).to(torch.float8_e4m3fn), requires_grad=False)


def test_the_error_for_files_before_torch_1_6_suggests_a_conversion(
    run: Run, tmp_path: Path
) -> None:
    for rank in range(2):
        torch.save(
            {"w": torch.ones(2)}, tmp_path / f"r_{rank}.pt", _use_new_zipfile_serialization=False
        )
    done = run("inspect", tmp_path / "r_*.pt")
    assert done.status == 2
    assert "is in the format before torch 1.6" in done.err
    assert run(*shlex.split(done.err.rpartition("again: ckpttool ")[2])).status == 0
    assert torch.load(tmp_path / "zip.r_0.pt").keys() == {"w"}
