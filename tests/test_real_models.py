"""Run every command on third-party models; torch, safetensors and the models themselves are the
oracle.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import set_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import real_models
from command import Run
from files import run_measured
from torch_version import needs_torch

MODELS = Path(real_models.__file__)
State = dict[str, torch.Tensor]

torch.set_num_threads(1)
os.environ["HF_HUB_OFFLINE"] = "1"


@dataclass(frozen=True)
class Trained:
    """A model: its operand, the newly trained module, and the files that it was saved to."""

    name: str
    operand: str
    model: nn.Module
    checkpoint: Path  # torch.save(model.state_dict())
    pretrained: Path  # model.save_pretrained(...)
    program: Path  # the program that was exported before the training

    @property
    def state(self) -> State:
        return dict(self.model.state_dict())


@pytest.fixture(scope="module", params=real_models.ALL)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    needs_torch("2.7", "torch.export of transformers' models")
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    torch.export.save(
        real_models.export(real_models.build(name, seed=0), name), folder / "deployed.pt2"
    )
    model = real_models.build(name, seed=1)
    torch.save(model.state_dict(), folder / "new.pt")
    model.save_pretrained(folder / "pretrained")
    (pretrained,) = (folder / "pretrained").glob("*.safetensors")
    return Trained(
        name, f"{MODELS}:{name}", model, folder / "new.pt", pretrained, folder / "deployed.pt2"
    )


RunJson = Callable[..., tuple[int, Any]]


@pytest.fixture
def run_json(run: Run) -> RunJson:
    """Run one command; return its exit status and the JSON object on stdout, or None."""

    def run_json(*args: object) -> tuple[int, Any]:
        done = run(*args, "--format", "json")
        sys.stderr.write(done.err)  # pytest shows it if the test fails
        return done.status, done.data

    return run_json


def same(left: State, right: State) -> bool:
    return left.keys() == right.keys() and all(
        left[key].dtype == right[key].dtype and torch.equal(left[key], right[key]) for key in left
    )


def loads(name: str, state: State) -> bool:
    try:
        real_models.build(name, seed=2).load_state_dict(state, strict=True)
    except RuntimeError:
        return False
    return True


def peft_takes(name: str, state: State) -> bool:
    """Return whether PEFT loads the adapter without a missing or unexpected key of it."""
    model = real_models.build(name, seed=2)
    result: Any = set_peft_model_state_dict(model, dict(state))
    missing = [key for key in result.missing_keys if "lora_" in key]
    return not missing and not result.unexpected_keys


def runtime(model: nn.Module) -> State:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def test_trace_gives_the_same_names_as_torch(trained: Trained, run_json: RunJson) -> None:
    status, names = run_json("trace", trained.operand)
    tensors, state = runtime(trained.model), trained.state
    assert status == 0
    assert {r["fqn"]: (r["shape"], f"torch.{r['dtype']}") for r in names["runtime"]} == {
        fqn: (list(tensor.shape), str(tensor.dtype)) for fqn, tensor in tensors.items()
    }
    assert [s["key"] for s in names["serialized"]] == list(state)
    assert names["not_serialized"] == [fqn for fqn in tensors if fqn not in state]
    assert names["roundtrips"]
    first: dict[int, str] = {}
    tied = {fqn: first[id(t)] for fqn, t in tensors.items() if first.setdefault(id(t), fqn) != fqn}
    assert {r["fqn"]: r["alias_of"] for r in names["runtime"] if r["alias_of"]} == tied


def longest(state: State) -> str:
    return max(state, key=lambda key: state[key].numel())


DAMAGES: dict[str, Callable[[State], object]] = {
    "missing key": lambda state: state.pop(longest(state)),
    "unexpected key": lambda state: state.update(more=torch.zeros(1)),
    "misspelt key": lambda state: state.update(misspelt=state.pop(longest(state))),
    "another shape": lambda state: state.update({longest(state): torch.zeros(3)}),
    "another dtype": lambda state: state.update(
        {key: tensor.half() for key, tensor in state.items()}
    ),
}


def test_diff_judges_as_torch_does(trained: Trained, run_json: RunJson, tmp_path: Path) -> None:
    """`save_pretrained` omits tied names and splits experts: that is not a full state dict. Of an
    adapter, PEFT says whether it fits.

    Each model has another damage; tests of strict loading combine them at random.
    """
    damaged = trained.state
    list(DAMAGES.values())[real_models.ALL.index(trained.name) % len(DAMAGES)](damaged)
    torch.save(damaged, tmp_path / "damaged.pt")
    takes = peft_takes if trained.name == "lora" else loads
    pretrained = takes(trained.name, load_file(trained.pretrained))
    for path, fits in (
        (trained.checkpoint, True),
        (trained.pretrained, pretrained),
        (tmp_path / "damaged.pt", False),
    ):
        status, diff = run_json("diff", "--model", trained.operand, path)
        assert (status, diff["identical"]) == (0 if fits else 1, fits), path


def test_remap_to_runtime_names_and_back(
    trained: Trained, run_json: RunJson, tmp_path: Path
) -> None:
    there, back = tmp_path / "runtime.pt", tmp_path / "back.pt"
    assert (
        run_json(
            "remap", trained.checkpoint, "-o", there, "--model", trained.operand, "--to", "runtime"
        )[0]
        == 0
    )
    tensors = {fqn: t for fqn, t in runtime(trained.model).items() if fqn in trained.state}
    assert same(torch.load(there), {fqn: tensor.detach() for fqn, tensor in tensors.items()})
    assert (
        run_json("remap", there, "-o", back, "--model", trained.operand, "--to", "serialized")[0]
        == 0
    )
    assert back.read_bytes() == trained.checkpoint.read_bytes()


def test_conversion_to_safetensors_and_back(
    trained: Trained, run_json: RunJson, tmp_path: Path
) -> None:
    there, back = tmp_path / "new.safetensors", tmp_path / "back.pt"
    tied = len({tensor.data_ptr() for tensor in trained.state.values()}) < len(trained.state)
    assert run_json("remap", trained.checkpoint, "-o", tmp_path / "once.safetensors")[0] == (
        1 if tied else 0
    )
    assert (tmp_path / "once.safetensors").exists() != tied
    assert run_json("remap", trained.checkpoint, "-o", there, "--keep-aliases")[0] == 0
    with safe_open(there, "pt") as file:
        kept, aliases = {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118
    assert aliases.pop("format") == "pt"
    assert same({**kept, **{key: kept[first] for key, first in aliases.items()}}, trained.state)
    assert run_json("remap", there, "-o", back)[0] == 0
    # the recorded aliases are tensors again
    assert same(torch.load(back, mmap=True), trained.state)


def test_swapped_program_computes_what_the_trained_model_computes(
    trained: Trained, run_json: RunJson, tmp_path: Path
) -> None:
    swapped = tmp_path / "swapped.pt2"
    status, _ = run_json(
        "swap-weights",
        trained.program,
        trained.checkpoint,
        "-o",
        swapped,
        "--model",
        trained.operand,
    )
    assert status == 0
    expected = real_models.first_output(trained.model, trained.name)
    before = real_models.first_output(torch.export.load(trained.program).module(), trained.name)
    after = real_models.first_output(torch.export.load(swapped).module(), trained.name)
    assert not torch.equal(before, expected)
    assert torch.equal(after, expected)


def test_trace_of_70_billion_parameters_needs_little_memory(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "ckpttool",
        "trace",
        "--force",
        "-o",
        str(tmp_path / "names.json"),
    ]
    _, small = run_measured([*command, f"{MODELS}:llama"], tmp_path)
    _, peak = run_measured([*command, f"{MODELS}:llama_70b"], tmp_path)
    names = json.loads((tmp_path / "names.json").read_text())
    assert sum(torch.Size(s["shape"]).numel() for s in names["serialized"]) > 70e9
    assert peak < small + 200 * 2**20
