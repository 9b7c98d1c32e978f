"""Train a small model with DeepSpeed on gloo, save it, and convert it with DeepSpeed's own scripts.

Start on each rank: ``RANK=r LOCAL_RANK=r WORLD_SIZE=n MASTER_ADDR=127.0.0.1 MASTER_PORT=29500
python deepspeed_run.py FOLDER STAGE fp32|bf16 GROUPS``. ``whole.pt`` holds ``model``, what
`zero_to_fp32` gathers, and ``optimizer``, the states that `ds_to_universal` writes for each
parameter; ``FOLDER-universal`` is the output of the latter.
"""

from __future__ import annotations

import os
import runpy
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

os.environ.setdefault("DS_ACCELERATOR", "cpu")


class Net(nn.Module):
    """Tied weights, a frozen weight, and buffers that are saved."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.up, self.norm = nn.Embedding(7, 3), nn.Linear(3, 5), nn.LayerNorm(5)
        self.register_buffer("scale", torch.arange(5.0))
        self.register_buffer("count", torch.tensor(4))
        self.frozen, self.down, self.head = (
            nn.Linear(5, 5),
            nn.Linear(5, 3, bias=False),
            nn.Linear(3, 7, bias=False),
        )
        self.head.weight = self.emb.weight
        self.frozen.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(
            self.down(
                self.frozen(self.norm(self.up(self.emb(x))) * self.scale.to(self.up.weight.dtype))
            )
        )


def groups_of(model: nn.Module, count: int) -> list[dict[str, Any]]:
    trained = [
        (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
    ]
    if count == 1:
        return [{"params": [parameter for _, parameter in trained]}]
    cut = [[p for name, p in trained if ("bias" in name) is biases] for biases in (False, True)]
    return [{"params": cut[0], "weight_decay": 0.1}, {"params": cut[1], "weight_decay": 0.0}]


def _train(folder: str, stage: int, dtype: str, groups: int) -> None:
    deepspeed = import_module("deepspeed")  # installed only for this script
    # would compile for minutes
    vars(import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = Net()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": dtype == "bf16"},
    }
    optimizer = torch.optim.AdamW(groups_of(model, groups), lr=0.01)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    for step in range(2):
        loss = (
            engine(torch.randint(0, 7, (4,), generator=torch.Generator().manual_seed(step)))
            .float()
            .square()
            .mean()
        )
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(folder, client_state={"epoch": 3})


def _gather(folder: Path) -> None:
    gathered = import_module(
        "deepspeed.utils.zero_to_fp32"
    ).get_fp32_state_dict_from_zero_checkpoint(str(folder))
    model = {key: value.clone() for key, value in gathered.items()}
    step = folder / (folder / "latest").read_text()
    out = Path(f"{folder}-universal", f"{step.name}_universal")
    out.parent.mkdir()
    workers = ["--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state"]
    sys.argv = ["", "--input_folder", str(step), "--output_folder", str(out), *workers]
    runpy.run_module("deepspeed.checkpoint.ds_to_universal", run_name="__main__")
    files = list((out / "zero").rglob("exp_avg*.pt"))
    states: dict[str, dict[str, torch.Tensor]] = {path.parent.name: {} for path in files}
    for path in files:
        found = torch.load(path, weights_only=False)
        states[path.parent.name][path.stem] = (
            found["param"] if isinstance(found, dict) else found
        ).clone()
    torch.save({"model": model, "optimizer": states}, folder / "whole.pt")
    for script in folder.glob("zero_to_*.py"):
        script.unlink()


if __name__ == "__main__":
    _train(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        _gather(Path(sys.argv[1]))
    torch.distributed.barrier()
    os._exit(0)
