"""`diff --model` on each dtype in each format of torch.save; the oracle is torch.load and a strict
load.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from command import Run, fixes_in

DTYPES = sorted(
    {str(dtype)[6:] for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
)
QUANTIZED = ("qint8", "quint8", "qint32", "quint4x2", "quint2x4")
SUB_BYTE = re.compile(r"u?int[1-7]")  # torch.save does not support them
BY_HAND = ("float32", "bfloat16", "float8_e4m3fn", "uint16", "complex32", "int4")
MODEL = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("w", torch.empty(4, dtype=torch.DTYPE))
"""


class Rebuilt:
    """Pickles as a call that rebuilds a tensor, with a dtype or storage that torch.save does not
    write.
    """

    def __init__(self, function: Callable[..., Any], *args: object) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return self.function, self.args


def values(dtype: torch.dtype) -> dict[str, object]:
    saved: dict[str, object] = {"saved": torch.empty(4, dtype=dtype)}
    if str(dtype)[6:] not in BY_HAND:
        return saved
    data = torch.zeros(64, dtype=torch.uint8)
    geometry: tuple[object, ...] = (0, (4,), (1,), False, OrderedDict(), dtype)
    return {
        **saved,
        "untyped": Rebuilt(torch._utils._rebuild_tensor_v3, data.untyped_storage(), *geometry),
        "bytes": Rebuilt(torch._utils._rebuild_tensor_v3, data._typed_storage(), *geometry),
    }


def loads(path: Path, dtype: str) -> bool:
    model = nn.Module()
    model.register_buffer("w", torch.empty(4, dtype=getattr(torch, dtype)))
    try:
        model.load_state_dict(torch.load(path, weights_only=True), strict=True)
    except Exception:  # the class depends on the dtype
        return False
    return True


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "dtype",
    [
        name
        for name in DTYPES
        if name not in QUANTIZED and (name in BY_HAND or not SUB_BYTE.fullmatch(name))
    ],
)
def test_a_file_loads_only_if_torch_loads_it(tmp_path: Path, run: Run, dtype: str) -> None:
    net = tmp_path / "net.py"
    net.write_text(MODEL.replace("DTYPE", dtype))
    for form, value in values(getattr(torch, dtype)).items():
        for is_zip in (True, False):
            path = tmp_path / f"{form}-{is_zip}.pt"
            try:
                torch.save({"w": value}, path, _use_new_zipfile_serialization=is_zip)
            except KeyError:  # torch.save does not support this dtype
                continue
            assert (run("diff", path, "--model", f"{net}:Net").status == 0) == loads(path, dtype), (
                path
            )


@pytest.mark.parametrize("section", [(), ("model",)])
def test_a_file_that_torch_cannot_load_gets_a_command_that_converts_it(
    tmp_path: Path, run: Run, section: tuple[str, ...]
) -> None:
    (tmp_path / "net.py").write_text(MODEL.replace("DTYPE", "float8_e4m3fn"))
    state = {"w": torch.ones(4).to(torch.float8_e4m3fn)}
    path = tmp_path / "old.pt"
    torch.save(
        {"model": state, "epoch": 1} if section else state,
        path,
        _use_new_zipfile_serialization=False,
    )
    with pytest.raises(AttributeError):
        torch.load(path, weights_only=True)
    assert "torch.load raises for this file" in run("inspect", path).err
    options = ("--model", f"{tmp_path / 'net.py'}:Net")
    done = run("diff", "::".join((str(path), *section)), *options)
    assert (done.status, "does not load" in done.out) == (1, True)
    (printed,) = [line for line in done.out.splitlines() if "torch.load raises" in line]
    command = shlex.split(printed.partition("file that it loads: ")[2])
    assert run(*command[1:]).status == 0
    converted = torch.load(command[-1], weights_only=True)
    weights = converted["model"] if section else converted
    assert torch.equal(weights["w"].float(), torch.ones(4))
    assert run("diff", command[-1], *options).status == 0
    fixes = fixes_in(run("diff", path, *options, "--format", "json").data)
    assert fixes
    assert run(*shlex.split(fixes[0])[1:]).status == 0


def test_an_old_file_that_torch_loads_has_no_note(tmp_path: Path, run: Run) -> None:
    (tmp_path / "net.py").write_text(MODEL.replace("DTYPE", "bfloat16"))
    torch.save(
        {"w": torch.ones(4).bfloat16()}, tmp_path / "old.pt", _use_new_zipfile_serialization=False
    )
    assert "torch.load" not in run("inspect", tmp_path / "old.pt").err
    done = run("diff", tmp_path / "old.pt", "--model", f"{tmp_path / 'net.py'}:Net")
    assert (done.status, "torch.load" in done.err) == (0, False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", ["LazyLinear(3)", "Linear(2, 3)"])
@pytest.mark.parametrize("saved", ["LazyLinear(3)", "Linear(2, 3)"])
def test_tensors_that_have_no_shape_yet_load_if_torch_loads_them(
    tmp_path: Path, run: Run, saved: str, model: str
) -> None:
    (tmp_path / "net.py").write_text(f"import torch\ndef build(): return torch.nn.{model}\n")
    state, loads = eval(f"nn.{saved}").state_dict(), True
    torch.save(state, tmp_path / "saved.pt")
    try:
        eval(f"nn.{model}").load_state_dict(state)
    except RuntimeError:
        loads = False
    assert run("diff", tmp_path / "saved.pt", "--model", f"{tmp_path}/net.py:build").status == (
        0 if loads else 1
    )


def test_a_state_dict_of_dicts_that_loads_has_no_note_that_it_would_load_nothing(
    tmp_path: Path, run: Run
) -> None:
    code = """
        import torch
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.a = torch.nn.Linear(2, 2)
            def state_dict(self, *args, **kwargs):
                return {"a": self.a.state_dict()}
            def load_state_dict(self, state, strict=True):
                self.a.load_state_dict(state["a"])
    """
    (tmp_path / "net.py").write_text(textwrap.dedent(code))
    torch.save({"a": nn.Linear(2, 2).state_dict()}, tmp_path / "saved.pt")
    done = run("diff", tmp_path / "saved.pt", "--model", f"{tmp_path}/net.py:Net")
    assert (done.status, "would load nothing" in done.out) == (0, False)
