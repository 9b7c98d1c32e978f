"""Tensors that torchao saves in parts: a rename also updates their metadata, or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from command import Run
from places import DATA

GOLDEN = DATA / "torchao-0.18.0.safetensors"
RULE = ["--rule", "{x}.{y*} => net.{x}.{y*}"]
PARTS = ["0._weight_qdata", "0._weight_scale"]


def content(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with safe_open(path, "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118 - not a mapping


def saved(path: Path, change: dict[str, str]) -> Path:
    tensors, metadata = content(GOLDEN)
    save_file(tensors, path, {**metadata, **change})
    return path


def written(way: str, run: Run, folder: Path) -> Path:
    """Rename the golden file: to a copy, in place, or with shards that separate the parts of a
    tensor.
    """
    out = folder / "out.safetensors"
    if way == "in place":
        long = ("--rule", "{x}.{y*} => longer.{x}.{y*}")  # whose names have room for the new ones
        assert run("remap", GOLDEN, *long, "-o", out).status == 0
        assert run("remap", out, "--in-place", "--rule", "longer.{x*} => net.{x*}").status == 0
    elif way == "a copy":
        assert run("remap", GOLDEN, *RULE, "-o", out).status == 0
    else:
        size = ["--max-shard-size", "1KB"] if "shards" in way else []
        assert run("convert", GOLDEN, *size, "-o", f"{folder}/shards/").status == 0
        assert run("remap", folder / "shards", *RULE, "-o", out).status == 0
    return out


WAYS = ["a copy", "in place", "from shards", "from a folder"]


@pytest.mark.parametrize("way", WAYS)
def test_the_metadata_of_the_parts_is_renamed(run: Run, tmp_path: Path, way: str) -> None:
    (tensors, metadata), (before, old) = content(written(way, run, tmp_path)), content(GOLDEN)
    names = json.loads(old["tensor_names"])
    assert json.loads(metadata["tensor_names"]) == [f"net.{name}" for name in names]
    assert {f"net.{name}": old[name] for name in names}.items() <= metadata.items()
    assert not metadata.keys() & set(names)
    assert tensors.keys() == {f"net.{key}" for key in before}


def test_a_rename_and_its_inverse_restore_the_bytes(run: Run, tmp_path: Path) -> None:
    renamed = written("a copy", run, tmp_path)
    assert (
        run("remap", renamed, *RULE, "--reverse", "-o", tmp_path / "back.safetensors").status == 0
    )
    assert (tmp_path / "back.safetensors").read_bytes() == GOLDEN.read_bytes()


@pytest.mark.parametrize("way", WAYS)
def test_torchao_loads_the_same_tensors(run: Run, tmp_path: Path, way: str) -> None:
    support: Any = pytest.importorskip(
        "torchao.prototype.safetensors.safetensors_support", reason="no torchao"
    )
    found, rest = support.unflatten_tensor_state_dict(*content(written(way, run, tmp_path)))
    expected, _ = support.unflatten_tensor_state_dict(*content(GOLDEN))
    assert (list(found), rest) == ([f"net.{name}" for name in expected], {})
    for name, tensor in expected.items():
        own = found[f"net.{name}"]
        assert type(own) is type(tensor)
        plain = (lambda t: t) if type(tensor) is torch.Tensor else (lambda t: t.dequantize())
        assert torch.equal(plain(own), plain(tensor))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--rule", "0._weight_scale => 0._other_scale"],
            "torchao would not find its parts together",
        ),
        (["--rule", "0._weight_scale => 0.scale"], "torchao would not find its parts together"),
        (
            ["--rule", r"re:0\._weight_(.+) => 0.weight_\1"],
            "torchao would not find its parts together",
        ),
        (
            ["--rule", r"re:0\._weight_(.+) => _weight_\1"],
            "torchao would not find its parts together",
        ),
        (["--rule", r"re:0\._weight_(.+) => 0.__\1"], "torchao would not find its parts together"),
        (
            ["--drop", "0._weight_scale"],
            "not all of its parts are there as they were: 0._weight_qdata",
        ),
    ],
)
def test_a_rename_that_separates_parts_is_refused(
    run: Run, tmp_path: Path, options: list[str], message: str
) -> None:
    for out in ("out.safetensors", "out/"):
        done = run("remap", GOLDEN, *options, "-o", f"{tmp_path}/{out}")
        assert (done.status, list(tmp_path.iterdir())) == (1, [])
        assert f"{message}" in done.err
        assert "@ 0.weight" in done.err


def test_a_tensor_is_dropped_with_all_its_parts(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    assert run("remap", GOLDEN, "--drop", "0._weight_*", "-o", out).status == 0
    tensors, metadata = content(out)
    assert not tensors.keys() & set(PARTS)
    assert "0.weight" not in json.loads(metadata["tensor_names"])
    assert "0.weight" not in metadata


def test_the_parts_of_a_tensor_are_named(run: Run) -> None:
    done = run("inspect", GOLDEN)
    assert (
        "torchao in parts (2 Float8Tensor): 0.weight is 0._weight_scale, 0._weight_qdata"
        in done.err
    )


def test_other_formats_are_refused(run: Run, tmp_path: Path) -> None:
    done = run("remap", GOLDEN, "-o", tmp_path / "out.pt")
    assert (done.status, list(tmp_path.iterdir())) == (1, [])
    assert "a Float8Tensor in 2 parts @ 0.weight" in done.err
    assert "unflatten_tensor_state_dict" in done.err


def test_diff_values_compares_the_metadata_of_parts(run: Run, tmp_path: Path) -> None:
    other = saved(
        tmp_path / "other.safetensors",
        {"0.weight": content(GOLDEN)[1]["0.weight"].replace("bfloat16", "float32")},
    )
    assert run("diff", GOLDEN, other, "--values", "--format", "json").data["summary"]["value"] == 2


@pytest.mark.parametrize("parts", ["qdata", ["qdata", 1], [["qdata"]], {"qdata": 1}], ids=str)
def test_parts_that_are_not_names_are_ignored(run: Run, tmp_path: Path, parts: Any) -> None:
    described = json.loads(content(GOLDEN)[1]["0.weight"])
    (listed,) = (name for name, value in described.items() if isinstance(value, list))
    other = saved(
        tmp_path / "other.safetensors", {"0.weight": json.dumps({**described, listed: parts})}
    )
    assert all(
        "torchao" not in str(tensor)
        for tensor in run("inspect", other, "--format", "json").data["tensors"]
    )
    assert run("remap", other, *RULE, "-o", tmp_path / "out.safetensors").status == 0


@pytest.mark.parametrize("names", ["", "{", "[1]", '["no.such"]', '"text"'])
def test_invalid_tensor_names_are_ignored(run: Run, tmp_path: Path, names: str) -> None:
    other = saved(tmp_path / "other.safetensors", {"tensor_names": names})
    assert run("remap", other, *RULE, "-o", tmp_path / "out.safetensors").status == 0
    assert content(tmp_path / "out.safetensors")[1]["tensor_names"] == names
