"""Every function returns the same answer for an object in memory and its file from `torch.save`."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpttool
from ckpttool import CkptError

IN_MEMORY = "a checkpoint in memory"


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters())


NET = model()
OPTIMIZER = adamw(NET)
NET(torch.ones(4, 2)).sum().backward()
OPTIMIZER.step()
STATE = NET.state_dict()
T = torch.arange(4.0)

CONTAINERS: dict[str, Any] = {
    "state_dict": STATE,
    "plain dict": dict(STATE),
    "nested": {"model": STATE, "epoch": 1},
    "with an optimizer": {
        "model": STATE,
        "optimizer": OPTIMIZER.state_dict(),
        "args": {"lr": 0.1, "betas": [1, 2]},
    },
    "optimizer alone": OPTIMIZER.state_dict(),
    "Lightning": {
        "epoch": 1,
        "global_step": 3,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": OrderedDict((f"net.{key}", value) for key, value in STATE.items()),
        "optimizer_states": [OPTIMIZER.state_dict()],
        "lr_schedulers": [],
    },
    "list": [dict(STATE), {"a": T}],
    "tuple": (dict(STATE), 3),
    "nested lists": {"layers": [{"w": T}, {"w": T + 1}]},
    "two models": {
        "model": STATE,
        "ema": {key: value + 1 for key, value in STATE.items()},
        "other": {"a": T},
    },
    "tied": {"a": T, "b": T, "c": T[1:], "d": T.view(2, 2).t()},
    "sparse": {"coo": torch.eye(3).to_sparse(), "csr": torch.eye(3).to_sparse_csr(), "w": T},
    "subclasses": {
        "p": nn.Parameter(T.clone()),
        "q": torch.quantize_per_tensor(T, 0.5, 0, torch.qint8),
    },
    "conjugated": {"z": torch.tensor([1 + 1j, 2 - 3j]).conj(), "w": T},
    "dtypes": {
        "half": T.half(),
        "f8": T.to(torch.float8_e4m3fn),
        "u16": T.to(torch.uint16),
        "bool": T > 1,
    },
    "meta": {"m": torch.empty(2, device="meta"), "w": T},
    "extra state": {"w": T, "_extra_state": {"scale": T + 1, "n": 3}, "config": {"a": [1, "b"]}},
    "module": {"net": nn.Linear(1, 1), "step": 1},
    "storage": {"w": T, "raw": T.clone().untyped_storage()},
    "no tensors": {"epoch": 3},
    "empty": {},
    "numeric keys": {0: T, 1: T + 1},
}

VERBS: dict[str, Callable[[Any], Any]] = {
    "inspect": lambda ckpt: ckpttool.inspect(ckpt, stats=True).to_json(),
    "diff": lambda ckpt: ckpttool.diff(
        ckpt, {"model": {"0.weight": T.view(2, 2)}, "epoch": 3}, whole=True
    ).to_json(),
    "diff values": lambda ckpt: ckpttool.diff(
        {"0.bias": torch.ones(3), "w": T}, ckpt, values=True
    ).to_json(),
    "diff model": lambda ckpt: ckpttool.diff(ckpt, model=model).to_json(),
    "diff optimizer": lambda ckpt: ckpttool.diff(ckpt, model=model, optimizer=adamw).to_json(),
    "remap": lambda ckpt: ckpttool.remap(ckpt, rule=["0.* => first.*"]).to_json(),
    "remap to": lambda ckpt: ckpttool.remap(ckpt, model=model, to="serialized").to_json(),
    "remap like": lambda ckpt: ckpttool.remap(
        {"module.0.weight": T, "module.w": T}, like=ckpt
    ).to_json(),
}
# Fields with the name of the operand or the size of its file.
FIELDS_OF_THE_SOURCE = {
    "source",
    "left",
    "base",
    "format",
    "nbytes",
    "bytes",
    "file_bytes",
    "fix",
    "cost",
    "rest",
}


def answer(verb: Callable[[Any], Any], ckpt: Any, path: str) -> Any:
    try:
        result = verb(ckpt)
    except CkptError as error:
        result = [type(error).__name__, error.message, [str(problem) for problem in error.problems]]
    return _without_names(json.loads(json.dumps(result).replace(json.dumps(path)[1:-1], IN_MEMORY)))


def _without_names(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _without_names(item)
            for key, item in value.items()
            if key not in FIELDS_OF_THE_SOURCE
        }
    if isinstance(value, list):  # notes about placeholders
        return [_without_names(item) for item in value if not str(item).startswith("not tried")]
    if isinstance(value, str):  # the rest is a command or a Python call
        return value.partition("was not compared: ")[0].partition(", run `")[0]
    return value


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", CONTAINERS)
def test_an_object_and_its_file_get_the_same_answer(name: str, tmp_path: Path) -> None:
    path, obj = str(tmp_path / "the file.pt"), CONTAINERS[name]  # commands and the title quote it
    torch.save(obj, path)
    for name_of_verb, verb in VERBS.items():
        assert answer(verb, obj, path) == answer(verb, path, path), name_of_verb
    option_sets: list[dict[str, Any]] = [{"rule": ["0.* => first.*"]}, {"to": "serialized"}]
    for options in option_sets:  # some are refused
        try:
            ckpttool.remap(path, str(tmp_path / "of_file.pt"), force=True, **options)
        except CkptError as error:
            with pytest.raises(CkptError, match=re.escape(error.message.replace(path, IN_MEMORY))):
                ckpttool.remap(obj, str(tmp_path / "of_object.pt"), force=True, **options)
            continue
        ckpttool.remap(obj, str(tmp_path / "of_object.pt"), force=True, **options)
        loaded = [
            torch.load(tmp_path / f"of_{kind}.pt", weights_only=False)
            for kind in ("object", "file")
        ]
        assert repr(loaded[0]) == repr(loaded[1])


def test_a_swap_in_memory_finds_the_model_in_a_nested_dict() -> None:
    module = model()
    with torch.no_grad():
        module[0].weight.zero_()
    ckpttool.swap_weights(module, {"model": STATE, "epoch": 1})
    assert all(torch.equal(value, STATE[key]) for key, value in module.state_dict().items())
    with pytest.raises(CkptError, match="holds several state dicts"):
        ckpttool.swap_weights(module, {"a": STATE, "b": dict(STATE)})


def test_an_object_that_torch_cannot_save_is_an_error() -> None:
    for obj in ({"w": T, "f": lambda: 0}, {"a": T, "b": T.view(torch.int32)}):
        with pytest.raises(CkptError, match=r"torch.save cannot save this object"):
            ckpttool.inspect(obj)


def test_the_index_reads_the_live_tensors() -> None:
    """Nothing is copied when the object is opened."""
    tensor = torch.zeros(2)
    checkpoint = ckpttool.open_checkpoint({"model": {"w": tensor}})
    tensor += 1
    assert ckpttool.diff(checkpoint, {"model": {"w": torch.ones(2)}}, values=True).identical


def test_hints_on_an_object_in_memory_are_python_calls() -> None:
    ckpt = {name: {"a.weight": torch.ones(2)} for name in ("model", "ema")}
    cases: tuple[tuple[Callable[[], object], str], ...] = (
        (lambda: ckpttool.remap(ckpt, drop="none"), "`ckpttool.inspect(ckpt)`"),
        (lambda: ckpttool.inspect(ckpt, filter="none"), "`ckpttool.inspect(ckpt)`"),
        (
            lambda: ckpttool.remap(ckpt["ema"], model=model, to="runtime"),
            "ckpttool.diff(ckpt, model=model)",
        ),
        (lambda: ckpttool.remap({"module.w": T}), "ckpttool.remap(ckpt, to='serialized', out="),
        (lambda: ckpttool.remap({"w": T}, rule="x => y"), "`ckpttool.inspect(ckpt)`"),
        (lambda: ckpttool.remap(ckpt, optimizer_keys="fqn"), "`ckpttool.inspect(ckpt)`"),
        (lambda: ckpttool.diff({"x": ckpt["ema"], "y": ckpt["ema"]}, ckpt["ema"]), "ckpt['x']"),
    )
    for call, hint in cases:
        with pytest.raises(CkptError) as raised:
            call()
        assert hint in raised.value.hint
        assert "in memory" not in raised.value.hint
    notes = ckpttool.diff(ckpt, model=lambda: nn.ModuleDict({"a": nn.RMSNorm(2)})).notes
    (note,) = (note for note in notes if "was not compared" in note)
    assert note.endswith("ckpttool.diff(ckpt['ema'], model=...)")
