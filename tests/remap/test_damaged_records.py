"""A damaged record of a torch zip is never copied without an error. The oracle is the zipfile
module.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch import nn

import ckpttool
from ckpttool import CkptError
from command import Run
from torch_version import needs_torch

ROWS, COLUMNS = 300, 400  # more than one read
KEYS = ("a.weight", "b.weight", "c.bias")


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "a.weight": torch.randn(ROWS, COLUMNS),
        "b.weight": torch.randn(2, ROWS),
        "c.bias": torch.randn(5),
    }


def with_optimizer() -> dict[str, Any]:
    moments = {"step": torch.tensor(1.0), "exp_avg": torch.randn(5), "exp_avg_sq": torch.rand(5)}
    group = {
        "lr": 0.1,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "amsgrad": False,
        "params": [0, 1, 2],
    }
    return {"model": state(), "optimizer": {"state": {2: moments}, "param_groups": [group]}}


def damage(path: Path, number: int, at: int = -1) -> str:
    """Change one bit of the storage `number`, and return the name of its record."""
    name = f"{path.stem}/data/{number}"
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(name)
    data = bytearray(path.read_bytes())
    header = info.header_offset
    begin = header + 30 + int.from_bytes(data[header + 26 : header + 28], "little")
    begin += int.from_bytes(data[header + 28 : header + 30], "little")
    data[begin + at % info.file_size] ^= 4
    path.write_bytes(data)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() == name
    return name


def checked(run: Run, out: Path, record: str, *words: object) -> None:
    done = run(*words)
    assert done.status == 2, done.said
    assert f"its CRC-32 does not match @ {record}\n" in done.err
    assert not out.exists(), sorted(out.iterdir()) if out.is_dir() else out


RULES = '[[rule]]\nsplit = "a.weight"\ninto = ["x", "y"]\n'
COPIES = {
    "convert to safetensors": ("convert", "in.pt", "-o", "out.safetensors"),
    "convert and verify": ("convert", "in.pt", "-o", "out.safetensors", "--verify"),
    "convert to shards": ("convert", "in.pt", "-o", "out/", "--max-shard-size", "2KB"),
    "convert to DCP": ("convert", "in.pt", "-o", "out.dcp"),
    "rename": ("remap", "in.pt", "-o", "out.pt", "--rule", "{x}.{y} => {x}.z.{y}"),
    "rename and verify": (
        "remap",
        "in.pt",
        "-o",
        "out.pt",
        "--rule",
        "{x}.{y} => {x}.z.{y}",
        "--verify",
    ),
    "computed": ("remap", "in.pt", "-o", "out.pt", "--rules", "rules.toml"),
    "computed, safetensors": ("remap", "in.pt", "-o", "out.safetensors", "--rules", "rules.toml"),
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rules.toml").write_text(RULES)
    Path("again").mkdir()


@pytest.mark.parametrize("number", range(len(KEYS)))
@pytest.mark.parametrize("words", COPIES.values(), ids=COPIES)
def test_a_copy_of_a_damaged_record_is_an_error(
    words: tuple[str, ...], number: int, run: Run
) -> None:
    torch.save(state(), "in.pt")
    out = words[words.index("-o") + 1]
    assert run(*words).status == 0
    # the undamaged file is read before the damaged one
    run("convert", "in.pt", "-o", "in.safetensors")
    record = damage(Path("in.pt"), number, at=1000 * number)
    checked(
        run,
        Path("again") / out,
        record,
        *[f"again/{word}" if word == out else word for word in words],
    )


def test_all_damaged_records_are_named(run: Run) -> None:
    torch.save(state(), "in.pt")
    data = Path("in.pt").read_bytes()
    changed = data.replace(state()["a.weight"].numpy().tobytes(), bytes(4 * ROWS * COLUMNS))
    Path("in.pt").write_bytes(changed.replace(state()["c.bias"].numpy().tobytes(), bytes(20)))
    done = run("convert", "in.pt", "-o", "out.safetensors")
    assert done.status == 2
    assert "in/data/0" in done.err
    assert "in/data/1" not in done.err
    assert "in/data/2" in done.err


def test_a_record_that_is_not_read_is_not_compared(run: Run) -> None:
    torch.save({"model": state(), "ema": {"a.weight": torch.ones(7)}}, "in.pt")
    damage(Path("in.pt"), 1)
    assert run("convert", "in.pt::ema", "-o", "out.safetensors").status == 0
    done = run("remap", "in.pt::model", "-o", "part.safetensors", "--select", "a")
    assert done.status == 0, done.err


@pytest.mark.parametrize("key", ["first", "last", "middle", "twice"])
def test_a_part_of_a_damaged_storage_is_an_error(key: str, run: Run) -> None:
    whole = torch.randn(40, 50)
    parts = {"first": whole[:10], "last": whole[30:], "middle": whole[10:30], "twice": whole[::2]}
    torch.save({**parts, "other": torch.ones(3)}, "in.pt")
    assert (
        run("remap", "in.pt", "-o", "good.safetensors", "--drop", *_all_but(key, parts)).status == 0
    )
    record = damage(Path("in.pt"), 0, at=20 * 50 * 4)
    words = ("remap", "in.pt", "-o", "out.safetensors", "--drop", *_all_but(key, parts))
    checked(run, Path("out.safetensors"), record, *words)


def _all_but(key: str, parts: dict[str, torch.Tensor]) -> list[str]:
    dropped = [word for name in parts if name != key for word in ("--drop", name)]
    return dropped[1:]


def test_a_record_without_a_crc_is_copied(run: Run) -> None:
    needs_torch("2.6", "set_crc32_options")
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state(), "in.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert run("convert", "in.pt", "-o", "out.safetensors", "--verify").status == 0


def test_a_damaged_file_behind_a_url_is_an_error(tmp_path: Path, run: Run) -> None:
    torch.save(state(), "in.pt")
    record = damage(Path("in.pt"), 0)
    fs = fsspec.filesystem("memory")
    fs.pipe("/damaged/in.pt", Path("in.pt").read_bytes())
    try:
        checked(
            run,
            Path("out.safetensors"),
            record,
            "convert",
            "memory://damaged/in.pt",
            "-o",
            "out.safetensors",
        )
        done = run("convert", "in.pt", "-o", "memory://damaged/out.safetensors")
        assert done.status == 2, done.said
        assert fs.ls("/damaged", detail=False) == ["/damaged/in.pt"]
    finally:
        fs.rm("/damaged", recursive=True)


@pytest.mark.parametrize("number", [0, 4])
def test_load_refuses_a_damaged_file_and_changes_nothing(number: int) -> None:
    model = nn.ModuleDict(
        {"a": nn.Linear(COLUMNS, ROWS, bias=False), "b": nn.Linear(ROWS, 2, bias=False)}
    )
    model["c"] = nn.Module()
    model["c"].bias = nn.Parameter(torch.zeros(5))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.3)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    torch.save(with_optimizer(), "in.pt")
    record = damage(Path("in.pt"), number)
    with pytest.raises(CkptError, match="CRC-32") as caught:
        ckpttool.load("in.pt", model, optimizer)
    assert [problem.key for problem in caught.value.problems] == [record]
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.3


def test_damaged_weights_of_a_swap(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x)

    torch.export.save(torch.export.export(Net(), (torch.ones(1, 8),)), "p.pt2")
    torch.save(Net().state_dict(), "in.pt")
    assert run("swap-weights", "p.pt2", "in.pt", "-o", "good.pt2").status == 0
    record = damage(Path("in.pt"), 0)
    checked(run, Path("out.pt2"), record, "swap-weights", "p.pt2", "in.pt", "-o", "out.pt2")


def test_diff_compares_damaged_values(run: Run) -> None:
    torch.save(state(), "good.pt")
    torch.save(state(), "in.pt")
    damage(Path("in.pt"), 1)
    done = run("diff", "good.pt", "in.pt", "--values", "--format", "json")
    assert done.status == 1
    assert [entry["left"] for entry in done.data["entries"] if entry["status"] == "value"] == [
        ["b.weight"]
    ]


def test_another_file_with_the_same_relative_path(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(state(), "in.pt")
    assert run("convert", "in.pt", "-o", "out.safetensors").status == 0
    for number, zipped in enumerate((False, True)):
        Path(f"folder{number}").mkdir()
        monkeypatch.chdir(f"folder{number}")
        other = {f"{number}.{key}": torch.ones(3, 3) for key in "abcdef"}
        torch.save(other, "in.pt", _use_new_zipfile_serialization=zipped)
        assert run("convert", "in.pt", "-o", "out.safetensors", "--verify").status == 0


def test_a_file_that_is_written_again_is_compared_with_its_new_records(run: Run) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        torch.save({"a": torch.randn(50)}, "in.pt")
        ckpttool.convert("in.pt", "out.safetensors", force=True)
        assert run("remap", "in.pt", "--in-place", "--rule", "a => b").status == 0
        ckpttool.convert("in.pt", "out.safetensors", force=True, verify=True)
