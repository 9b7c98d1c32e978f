"""Exit status 0 of `diff --model` against a strict load by torch itself, over random pairs of a
model and a checkpoint.

The suite draws a few; ``CKPTTOOL_PAIRS=10000 pytest tests/tracing/test_strict_load.py`` draws more.
"""

from __future__ import annotations

import json
import os
import random
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import loading_zoo
from command import main
from drawn_models import MODELS, build, is_safe
from surroundings import only_large_models

torch.set_num_threads(1)
PAIRS = int(os.environ.get("CKPTTOOL_PAIRS", "150"))
FIRST = int(os.environ.get("CKPTTOOL_FIRST_PAIR", "0"))
# Loading reads these models' keys, and keeps the values of none.
COMBINING = {"loading_zoo:adds_on_loading", "loading_zoo:selects_rows", "hook_zoo:pads_vocabulary"}
ON_CPU = ["--materialize"]  # for models that cannot be built on meta
State = OrderedDict[str, Any]


# Damages: each changes one entry of a state_dict, or all of it.


def _dtypes() -> list[torch.dtype]:
    names = (
        "float64 float16 bfloat16 float8_e4m3fn float8_e5m2 int64 int8 uint8 uint16 bool complex64"
    )
    return [getattr(torch, name) for name in names.split()]


def _dtensor(value: torch.Tensor, random: random.Random) -> torch.Tensor:
    """Return a DTensor on rank 0 of one or two ranks, sharded or replicated."""
    world = random.choice((1, 2))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        mesh = init_device_mesh("cpu", (world,))
        placement = random.choice([Replicate(), *([Shard(0)] if value.dim() else [])])
        return distribute_tensor(value, mesh, [placement])
    finally:
        dist.destroy_process_group()


VALUES: dict[str, Callable[[torch.Tensor, random.Random], Any]] = {
    "another dtype": lambda v, r: v.to(r.choice(_dtypes())),
    "a tensor with an extra dimension": lambda v, r: v.unsqueeze(0),
    "a tensor with an extra element": lambda v, r: torch.cat([v.reshape(-1), v.reshape(-1)[:1]]),
    "a number": lambda v, r: v.reshape(-1)[0].clone() if v.numel() else v,
    "transposed": lambda v, r: v.t() if v.dim() == 2 else v,
    "transposed in memory": lambda v, r: v.t().contiguous().t() if v.dim() == 2 else v,
    "expanded": lambda v, r: (
        v.reshape(-1)[:1].expand(v.numel()).reshape(v.shape) if v.numel() else v
    ),
    "a view": lambda v, r: torch.stack([v, v])[r.randrange(2)],
    "a Parameter": lambda v, r: nn.Parameter(
        v, requires_grad=v.is_floating_point() and r.random() < 0.5
    ),
    "sparse": lambda v, r: v.to_sparse(),
    "sparse rows": lambda v, r: v.to_sparse_csr() if v.dim() == 2 else v.to_sparse(),
    "quantized": lambda v, r: torch.quantize_per_tensor(v.float(), 0.1, 0, torch.quint8),
    "a TwoTensor": lambda v, r: TwoTensor(v, v),
    "packed": lambda v, r: loading_zoo.packed(),
    "packed and undeclared": lambda v, r: loading_zoo.packed(loading_zoo.Undeclared),
    "a DTensor": lambda v, r: _dtensor(v, r),
    "nested": lambda v, r: torch.nested.nested_tensor([v, v]),
    "conjugated": lambda v, r: v.to(torch.complex64).conj(),
    "on meta": lambda v, r: v.to("meta"),
    "not finite": lambda v, r: v.float() * float("nan"),
    "zeros": lambda v, r: torch.zeros_like(v),
    "none": lambda v, r: None,
    "an integer": lambda v, r: 5,
    "a list": lambda v, r: [v],
    "a dict": lambda v, r: {"of": v},
    "an object": lambda v, r: loading_zoo.Opaque(),
}


def _change_value(state: State, random: random.Random) -> str:
    kind = random.choice(list(VALUES))
    key = random.choice([k for k, v in state.items() if isinstance(v, torch.Tensor)])
    state[key] = VALUES[kind](state[key].detach(), random)
    return f"{key} is {kind}"


def _drop(state: State, random: random.Random) -> str:
    key = random.choice(list(state))
    del state[key]
    return f"{key} is dropped"


def _add(state: State, random: random.Random) -> str:
    key = random.choice(["more", "_extra_state", "0._extra_state", "norm.more"])
    state[key] = random.choice([torch.ones(2), None, 3, torch.eye(2).to_sparse()])
    return f"{key} is added"


def _rename(state: State, random: random.Random) -> str:
    key = random.choice(list(state))
    new = random.choice([f"module.{key}", f"{key}_old", key.rpartition(".")[2]])
    state[new] = state.pop(key)
    return f"{key} is renamed to {new}"


def _prefix(state: State, random: random.Random) -> str:
    for key in list(state):
        state[f"module.{key}"] = state.pop(key)
    return "all keys have a prefix"


def _copy_value(state: State, random: random.Random) -> str:
    key, other = random.choice(list(state)), random.choice(list(state))
    state[key] = state[other]
    return f"{key} has the value of {other}"


def _change_versions(state: State, random: random.Random) -> str:
    if random.random() < 0.5 or not hasattr(state, "_metadata"):
        state.__dict__.pop("_metadata", None)
        return "no versions"
    state._metadata = OrderedDict(
        (path, {**meta, "version": 0}) for path, meta in state._metadata.items()
    )
    return "version 0"


DAMAGES = [*[_change_value] * 4, _drop, _add, _rename, _prefix, _copy_value, _change_versions]


def _truncate(path: Path, random: random.Random) -> str:
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    storages = [name for name, data in records.items() if "/data/" in name and len(data) > 1]
    if not storages:
        return "not truncated"
    name = random.choice(storages)
    records[name] = records[name][: random.randrange(len(records[name]))]
    with zipfile.ZipFile(path, "w") as archive:
        for record, data in records.items():
            archive.writestr(record, data)
    return f"{name} is truncated"


LAYOUTS: dict[str, Callable[[State], dict[str, Any]]] = {
    "a plain dict": dict,
    "a plain dict under a key": lambda state: {"model": dict(state), "epoch": 3},
}


# The pair and the answer of torch


def draw(random: random.Random, path: Path) -> tuple[str, str]:
    """Write a checkpoint; return the model that loads it, and the damage."""
    operand = random.choice(list(MODELS))
    source = operand if random.random() < 0.9 else random.choice(list(MODELS))
    given = build(source, random.randrange(100)).state_dict()
    # only its own model tells this dict from a section of a file
    if source != operand and list(given) == ["folded"]:
        given = given["folded"]
    state: State = OrderedDict(given)
    if hasattr(given, "_metadata"):
        state._metadata = given._metadata  # type: ignore[attr-defined]
    damages = [source] if source != operand else []
    for _ in range(random.choice([0, 1, 1, 1, 2])):
        if any(isinstance(value, torch.Tensor) for value in state.values()):
            damages.append(random.choice(DAMAGES)(state, random))
    damages.append(random.choice(["unchanged", "unchanged", *LAYOUTS]))
    torch.save(LAYOUTS.get(damages[-1], lambda state: state)(state), path)
    if random.random() < 0.04:
        damages.append(_truncate(path, random))
    return operand, "; ".join(damages)


def load_state(path: Path) -> Any:
    content = torch.load(path, weights_only=False)
    return content["model"] if list(content) == ["model", "epoch"] else content


def torch_error(operand: str, path: Path) -> str:
    """Return the error of a strict load by torch, or an empty string if it succeeds."""
    try:
        state = load_state(path)
        model = build(operand, 7)
        arguments = {} if operand.endswith("bare_signatures") else {"strict": True}
        model.load_state_dict(state, **arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


class ConversionMode(TorchDispatchMode):
    """Record if a copy into a tensor of the model converts its dtype."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        tensors = [*model.parameters(), *model.buffers()]
        self.storages = {
            t.untyped_storage()._cdata for t in tensors if t.layout == torch.strided and t.numel()
        }
        self.converted = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        of_tensor = func is torch.ops.aten.copy_.default and isinstance(args[1], torch.Tensor)
        if of_tensor and args[0].layout == torch.strided:
            is_own = args[0].untyped_storage()._cdata in self.storages
            self.converted |= is_own and args[0].dtype != args[1].dtype
        return func(*args, **(kwargs or {}))


def converts(operand: str, path: Path) -> bool:
    """Return True if torch converts the dtype of a tensor in the file."""
    state, model = load_state(path), build(operand, 7)
    with ConversionMode(model) as conversions:
        model.load_state_dict(state)
    return conversions.converted


def loses_a_tied_value(operand: str, path: Path) -> bool:
    """Return True if the file has different values for tied names: torch loads it, and loses one of
    them.

    Tensors of different kinds count as different.
    """
    state, saved = load_state(path), build(operand, 7).state_dict()
    first_values: dict[tuple[object, ...], Any] = {}
    for key, value in saved.items():
        if (
            isinstance(value, torch.Tensor)
            and key in state
            and value.layout == torch.strided
            and value.numel()
        ):
            first_value = first_values.setdefault(
                (value.data_ptr(), value.shape, value.stride()), state[key]
            )
            if first_value is not state[key] and not _is_same(first_value, state[key]):
                return True
    return False


def _is_same(first: Any, second: Any) -> bool:
    # meta tensors have no values
    is_known = _kind(first) == _kind(second) and not getattr(first, "is_meta", False)
    return is_known and torch.equal(_dense(first), _dense(second))


def _kind(value: Any) -> tuple[object, ...]:
    return type(value), *(getattr(value, name, None) for name in ("dtype", "layout", "device"))


def _dense(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor that torch can compare: it has no `equal` for CSR tensors."""
    return value.to_dense() if value.layout == torch.sparse_csr else value


def not_given(operand: str, path: Path, keys: list[str]) -> list[str]:
    """Return the keys of the file whose value is nowhere in the model that has loaded it, and that
    it does not save.
    """
    state, model = load_state(path), build(operand, 7)
    model.load_state_dict(state)
    held = {_bits(value) for value in (*model.parameters(), *model.buffers()) if _is_plain(value)}
    saved = model.state_dict()  # hooks may change the model's tensors
    plain = [key for key in keys if all(_is_plain(values.get(key)) for values in (state, saved))]
    return [key for key in plain if _bits(state[key]) not in (held | {_bits(saved[key])})]


def _is_plain(value: Any) -> bool:
    is_tensor = type(value) in (torch.Tensor, nn.Parameter)
    strided = is_tensor and value.layout == torch.strided and not value.is_nested
    return strided and not value.is_quantized and value.device.type == "cpu"


def _bits(value: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    dense = value.detach().resolve_conj().resolve_neg().contiguous()
    return (
        value.dtype,
        value.shape,
        dense.flatten().view(torch.uint8).numpy().tobytes() if dense.numel() else b"",
    )


@pytest.mark.parametrize("seed", range(FIRST, FIRST + PAIRS))
def test_status_is_0_if_and_only_if_torch_loads_strictly(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed % 2:
        only_large_models(monkeypatch)
    path = tmp_path / "state.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while True:
            try:
                operand, damages = draw(random.Random(seed), path)
                break
            # torch cannot create or save this tensor
            except (RuntimeError, NotImplementedError, TypeError):
                seed += 1_000_000
        error = torch_error(operand, path)
        quantized = operand.endswith("quantized_linear")
        lenient = seed % 3 > 0
        options = [*(["--ignore-dtype"] if lenient else []), *(ON_CPU if quantized else [])]
        status = main(["diff", "--model", operand, str(path), *options, "--format", "json"])
        converted = not lenient and not error and converts(operand, path)
    printed = capsys.readouterr()
    report = f"{operand}: {damages}\ntorch: {error or 'loads'}\n{printed}"
    entries = json.loads(printed.out)["entries"] if status < 2 else []
    lost = [entry["left"][0] for entry in entries if entry.get("code") == "lost-value"]
    if status == 0:
        assert not error, report
        assert not converted, report
        same = [entry["left"][0] for entry in entries if entry["status"] == "same"]
        if operand not in COMBINING and not converts(operand, path):
            assert not not_given(operand, path, same), report
    elif status == 1:
        assert error or lost == not_given(operand, path, lost), report
        assert error or converted or lost or loses_a_tied_value(operand, path), report
    else:
        assert error or not is_safe(path), report
