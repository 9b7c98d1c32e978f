"""`convert --dtype` casts as `Module.to` does, `--metadata` is what safetensors reads, and `diff` and
`fix` offer the cast.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import ckpttool
from ckpttool import CkptError, Refused
from command import Run, fixes_in

MODEL = """
from torch import nn
import torch
def build(dtype="float32"):
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).to(getattr(torch, dtype))
def mixed():
    model = build()
    model[0].bfloat16()
    return model
"""


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return list(left) == list(right) and all(
        value.dtype == right[key].dtype and torch.equal(value, right[key])
        for key, value in left.items()
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_dtype_casts_as_module_to(dtype: str) -> None:
    model = network()
    torch.save(model.state_dict(), "a.pt")
    ckpttool.convert("a.pt", "b.pt", dtype=dtype)
    assert same(torch.load("b.pt"), model.to(getattr(torch, dtype)).state_dict())


def test_all_state_dicts_are_cast_and_the_optimizer_is_not(run: Run) -> None:
    model, other = network(), nn.Conv1d(2, 2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    saved = {
        "model": model.state_dict(),
        "other": other.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
    }
    torch.save(saved, "a.pt")
    assert run("convert", "a.pt", "--dtype", "bfloat16", "-o", "b.pt").status == 0
    result = torch.load("b.pt")
    assert same(result["other"], other.bfloat16().state_dict())
    assert result["epoch"] == 3
    for number, state in saved["optimizer"]["state"].items():
        assert same(state, result["optimizer"]["state"][number])
    assert same(result["model"], model.bfloat16().state_dict())


def test_tied_weights_stay_tied() -> None:
    weight = torch.randn(4, 3)
    torch.save({"a": weight, "b": weight}, "a.pt")
    ckpttool.convert("a.pt", "b.pt", dtype="float16")
    result = torch.load("b.pt")
    assert result["a"].data_ptr() == result["b"].data_ptr()


def test_quantized_weights_are_not_cast(run: Run) -> None:
    fp8 = torch.ones(4, 4).to(torch.float8_e4m3fn)
    save_file(
        {"w.weight": fp8, "w.weight_scale_inv": torch.ones(1, 1), "n": torch.ones(2)},
        "a.safetensors",
    )
    done = run("convert", "a.safetensors", "--dtype", "bfloat16", "-o", "b.safetensors")
    assert done.status == 1
    assert "w.weight_scale_inv" in done.err
    assert not Path("b.safetensors").exists()


def test_tensors_that_are_not_dense_are_named(run: Run) -> None:
    torch.save({"s": torch.eye(3).to_sparse(), "w": torch.ones(2)}, "a.pt")
    done = run("convert", "a.pt", "--dtype", "bfloat16", "-o", "b.pt")
    assert done.status == 1
    assert "error: 1 tensor cannot be cast to bfloat16" in done.err
    assert "sparse_coo" in done.err


def test_nothing_to_cast_is_refused(run: Run) -> None:
    torch.save({"w": torch.ones(2)}, "a.pt")
    done = run("convert", "a.pt", "--dtype", "float32", "-o", "b.pt")
    assert done.status == 1
    assert "nothing to convert" in done.err


def test_report_says_what_was_cast_and_what_was_not(run: Run) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "train.pt")
    out = run("convert", "train.pt", "--dtype", "bfloat16", "-o", "b.pt").out
    assert out.startswith("wrote b.pt: 6 keys cast to bfloat16\n")
    assert "not cast: 1 int64 tensor and the optimizer state" in out


def test_other_dtypes_are_an_error(run: Run) -> None:
    torch.save({"w": torch.ones(2)}, "a.pt")
    done = run("convert", "a.pt", "--dtype", "int8", "-o", "b.pt")
    assert done.status == 2
    assert "error: int8 is not one of bfloat16, float16, float32, float64" in done.err


@pytest.mark.parametrize("out", ["b.safetensors", "b/"])
def test_metadata_is_what_safetensors_reads(run: Run, out: str) -> None:
    save_file({"w": torch.ones(2), "v": torch.ones(3)}, "a.safetensors", {"a": "1", "b": "2"})
    pairs = ("--metadata", "b=x=y", "--metadata", "c=")
    assert run("convert", "a.safetensors", *pairs, "-o", out).status == 0
    path = out if out != "b/" else next(Path("b").glob("*.safetensors"))
    with safe_open(path, "pt") as file:
        expected = {"a": "1", "b": "x=y", "c": ""}
        assert expected.items() <= file.metadata().items()
    assert same(load_file(path), load_file("a.safetensors"))


@pytest.mark.parametrize(
    ("pair", "out", "message"),
    [
        ("a", "b.safetensors", "'a' is not KEY=VALUE"),
        ("=a", "b.safetensors", "'=a' is not KEY=VALUE"),
        ("a=1", "b.pt", "has no place for --metadata"),
        ("a=w", "b.safetensors", "w is a tensor: a would be its second name"),
        ("a=0", "b.safetensors", "nothing to convert"),
    ],
)
def test_metadata_that_cannot_be_written(run: Run, pair: str, out: str, message: str) -> None:
    save_file({"w": torch.ones(2)}, "a.safetensors", {"a": "0"})
    done = run("convert", "a.safetensors", "--metadata", pair, "-o", out)
    assert done.status in (1, 2)
    assert message in done.err
    assert not Path(out).exists()


def test_fix_casts_if_only_the_dtype_differs(run: Run) -> None:
    torch.save(network().state_dict(), "a.pt")
    model = "model.py:build(dtype='bfloat16')"
    data = run("diff", "--model", model, "a.pt", "--format", "json").data
    assert fixes_in(data) == ["ckpttool convert a.pt --dtype bfloat16 -o a.bfloat16.pt"]
    assert data["fix"][0]["complete"]
    assert run("fix", "a.pt", "--model", model, "--in-place").status == 1
    assert run("fix", "a.pt", "--model", model, "-o", "b.pt").status == 0
    assert run("diff", "--model", model, "b.pt").status == 0
    assert same(torch.load("b.pt"), network().bfloat16().state_dict())


def test_two_checkpoints_that_differ_in_dtype(run: Run) -> None:
    torch.save(network().state_dict(), "a.pt")
    torch.save(network().half().state_dict(), "b.pt")
    data = run("diff", "a.pt", "b.pt", "--values", "--format", "json").data
    assert fixes_in(data) == ["ckpttool convert a.pt --dtype float16 -o a.float16.pt"]
    # a cast to float32 does not bring the lost bits back
    assert fixes_in(run("diff", "b.pt", "a.pt", "--values", "--format", "json").data) == []


def test_no_cast_is_offered_for_several_dtypes(run: Run) -> None:
    torch.save(network().state_dict(), "a.pt")
    assert fixes_in(run("diff", "--model", "model.py:mixed", "a.pt", "--format", "json").data) == []
    assert run("fix", "a.pt", "--model", "model.py:mixed", "-o", "b.pt").status == 1


def test_load_casts_only_on_request() -> None:
    state = network().state_dict()
    model = network().bfloat16()
    with pytest.raises(Refused) as caught:
        ckpttool.load(state, model)
    assert "cast=True" in caught.value.hint
    ckpttool.load(state, model, cast=True)
    assert same(model.state_dict(), network().bfloat16().state_dict())


def test_errors_are_of_the_library() -> None:
    with pytest.raises(CkptError, match="int8 is not one of"):
        ckpttool.convert({"w": torch.ones(2)}, "b.pt", dtype="int8")
