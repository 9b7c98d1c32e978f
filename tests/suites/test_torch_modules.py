"""Every module of torch's own test suite (`module_db`), with its inputs: names, strict loads,
renames, swaps.

`CKPTTOOL_SUITES=all` tests all inputs, both modes and three dtypes, and exports each module;
otherwise only the first input of every eighth module is tested.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpttool

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    common_modules = pytest.importorskip("torch.testing._internal.common_modules")

pytestmark = pytest.mark.filterwarnings("ignore")
ALL = os.environ.get("CKPTTOOL_SUITES") == "all"
INFOS = {info.name: info for info in common_modules.module_db[:: 1 if ALL else 8]}
PARTS = 8 if ALL else 1  # some modules have hundreds of cases, which several processes share
MODES = [(False, torch.float32)] + [
    (True, torch.float32),
    (False, torch.float64),
    (False, torch.bfloat16),
] * ALL


def cases(name: str) -> Iterator[tuple[Callable[[], nn.Module], Any]]:
    """Yield a factory and the forward inputs for every case of the suite."""
    info = INFOS[name]
    for training, dtype in MODES:
        if dtype not in info.supported_dtypes(torch.device("cpu").type):
            continue
        torch.manual_seed(0)
        try:
            inputs = info.module_inputs_func(
                info,
                device="cpu",
                dtype=dtype,
                requires_grad=False,
                training=training,
                set_seed=False,
            )
        except TypeError:  # torch before 2.8 lacks set_seed
            inputs = info.module_inputs_func(
                info, device="cpu", dtype=dtype, requires_grad=False, training=training
            )
        for one in inputs[: None if ALL else 1]:
            args, kwargs = one.constructor_input.args, dict(one.constructor_input.kwargs)

            def build(
                args: Any = args,
                kwargs: Any = kwargs,
                dtype: torch.dtype = dtype,
                training: bool = training,
            ) -> nn.Module:
                module: nn.Module = info.module_cls(*args, **kwargs).to(dtype)
                return module.train(training)

            yield build, one.forward_input


def with_other_values(module: nn.Module, seed: int) -> dict[str, Any]:
    """Give the module other values and return its state dict."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point() and not torch.nn.parameter.is_lazy(tensor):
                tensor.add_(torch.rand(tensor.shape, generator=generator).to(tensor.dtype) / 8)
    return module.state_dict()


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(value, right[key]) if isinstance(value, torch.Tensor) else True
        for key, value in left.items()
    )


def is_lazy(module: nn.Module) -> bool:
    return any(map(torch.nn.parameter.is_lazy, (*module.parameters(), *module.buffers())))


@pytest.mark.parametrize("name", INFOS)
@pytest.mark.parametrize("part", range(PARTS))
def test_module(name: str, part: int, tmp_path: Path, record_property: Any) -> None:
    path, renamed, back = (str(tmp_path / f"{word}.pt") for word in ("saved", "renamed", "back"))
    drawn = list(cases(name))[part::PARTS]
    record_property("cases", len(drawn))
    for build, inputs in drawn:
        state = with_other_values(build(), 1)
        keys = list(state)
        if is_lazy(build()):  # the names are known, but not the shapes
            assert [key.key for key in ckpttool.trace(build).serialized] == keys
            continue
        assert [key.key for key in ckpttool.trace(build).serialized] == keys
        torch.save(state, path)
        assert ckpttool.diff(path, model=build).identical
        if not keys:
            continue
        ckpttool.remap(path, renamed, rule="{x*} => some.prefix.{x*}", force=True)
        assert list(torch.load(renamed)) == [f"some.prefix.{key}" for key in keys]
        assert not ckpttool.diff(renamed, model=build).identical
        ckpttool.remap(renamed, back, rule="some.prefix.{x*} => {x*}", force=True)
        assert same(torch.load(back), state)
        fresh = build()
        loaded = ckpttool.load(renamed, fresh)
        assert loaded.fix is not None
        assert same(fresh.state_dict(), state)
        del state[keys[-1]]
        torch.save(state, path)
        fresh = build()
        expected = fresh.load_state_dict(state, strict=False)
        assert ckpttool.diff(path, model=build).identical == (not expected.missing_keys)
        if ALL:
            check_exported(build, inputs, tmp_path)


def check_exported(build: Callable[[], nn.Module], inputs: Any, path: Path) -> None:
    """Swap other weights into the exported module; its outputs must equal the eager module with
    these weights.
    """
    old, new = build().eval(), build().eval()
    try:
        torch.manual_seed(0)
        program = torch.export.export(old, inputs.args, dict(inputs.kwargs))
    except Exception:  # torch cannot export this module
        return
    torch.export.save(program, path / "program.pt2")
    state = with_other_values(new, 2)
    torch.save(state, path / "new.pt")
    ckpttool.swap_weights(
        str(path / "program.pt2"),
        str(path / "new.pt"),
        str(path / "out.pt2"),
        model=build,
        force=True,
    )
    swapped = torch.export.load(path / "out.pt2").module()
    outputs = []
    for module in (swapped, new):
        torch.manual_seed(0)
        outputs.append(module(*inputs.args, **inputs.kwargs))
    torch.testing.assert_close(*outputs, rtol=0, atol=0, equal_nan=True)
