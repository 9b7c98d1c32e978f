"""Kinds of tensors that cannot be loaded as each other: dense, sparse, sharded; torch is the
oracle.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from command import Run, main

KINDS = ("dense", "conjugated", "sparse", "csr", "sharded")
MODEL = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("w", torch.zeros(3, 3, dtype=torch.complex64))
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("kinds")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for kind, value in tensors().items():
        torch.save({"w": value}, folder / f"{kind}.pt")
    (folder / "net.py").write_text(MODEL)
    yield folder
    dist.destroy_process_group()


def tensors() -> dict[str, torch.Tensor]:
    dense = torch.eye(3, dtype=torch.complex64)
    parts = distribute_tensor(dense, init_device_mesh("cpu", (1,)), [Shard(0)])
    return dict(
        zip(
            KINDS,
            (dense, dense.conj(), dense.to_sparse(), dense.to_sparse_csr(), parts),
            strict=True,
        )
    )


def loads(left: torch.Tensor, right: torch.Tensor) -> bool:
    model = nn.Module()
    model.register_buffer("w", right.clone())
    try:
        model.load_state_dict({"w": left}, strict=True)
    except RuntimeError:
        return False
    return True


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(("left", "right"), list(product(KINDS, KINDS)))
def test_kinds_are_the_same_only_if_torch_loads_one_as_the_other(
    files: Path, run: Run, left: str, right: str
) -> None:
    status = run("diff", files / f"{left}.pt", files / f"{right}.pt", "--format", "json").status
    by_kind = tensors()
    assert status in (0, 1)
    assert status == 1 or loads(by_kind[left], by_kind[right])
    assert status == 0 or left != right


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("kind", KINDS)
def test_names_alone_cannot_decide_if_another_kind_loads(files: Path, run: Run, kind: str) -> None:
    """The result is an error if only the model's code could answer."""
    names = files / "names.json"
    assert main(["trace", f"{files / 'net.py'}:Net", "-o", str(names), "--force"]) == 0
    done = run("diff", "--model", names, files / f"{kind}.pt")
    is_dense = kind in ("dense", "conjugated")
    assert done.status == (0 if is_dense else 2), done
    assert is_dense or "a tensor of another kind" in done.err
    assert ("is the part of one rank: name the files of all ranks" in done.err) is (
        kind == "sharded"
    )


def test_file_of_one_rank_is_the_reason_and_the_error_of_torch_is_printed_once(
    files: Path, tmp_path: Path, run: Run
) -> None:
    part = tensors()["sharded"]
    torch.save({"weight": part, "bias": part}, tmp_path / "rank_0.pt")
    source = (
        "import torch\nclass Net(torch.nn.Module):\n    def __init__(self):\n       "
        " super().__init__()\n"
    )
    source += "".join(
        f"        self.{name} = torch.nn.Parameter(torch.ones(3, 3, dtype=torch.complex64))\n"
        for name in ("weight", "bias")
    )
    (tmp_path / "pair.py").write_text(source)
    done = run("diff", tmp_path / "rank_0.pt", "--model", f"{tmp_path / 'pair.py'}:Net")
    assert done.status == 1
    assert "is the part of one rank" in done.out.splitlines()[1]
    assert (done.out + done.err).count("an exception occurred") == 1
    assert "(the same for bias)" in done.out
    assert "assign=True" not in done.err


def test_torch_warnings_about_dtensors_are_printed_once(files: Path) -> None:
    """This needs a new process: torch logs to the stderr of its import time."""
    args = [
        sys.executable,
        "-m",
        "ckpttool",
        "diff",
        "--model",
        f"{files / 'net.py'}:Net",
        str(files / "sharded.pt"),
    ]
    lines = subprocess.run(args, capture_output=True, text=True, check=False).stderr.splitlines()
    ends = next(
        (at for at, line in enumerate(lines) if line.startswith("nanobind: ")), None
    )  # printed by triton at exit
    assert all(line.startswith("warning: ") for line in lines[:ends]), lines
    # older releases do not warn
    assert sum("DeviceMesh" in line for line in lines) == (torch.__version__ >= "2.7")
