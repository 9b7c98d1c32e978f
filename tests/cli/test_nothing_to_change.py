"""A remap or convert that changes nothing is refused, and the suggested command that removes
wrappers works.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

import ckpttool
from command import Run

PLAIN = nn.Linear(2, 3).state_dict()
WRAPPED = {f"module._orig_mod.{key}": value for key, value in PLAIN.items()}
MODEL = ("--model", "torch.nn:Linear(in_features=2, out_features=3)")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    home = Path.cwd()
    os.chdir(folder)
    try:
        _write()
    finally:
        os.chdir(home)
    return folder


@pytest.fixture(autouse=True)
def _files(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(files, tmp_path / "files")
    monkeypatch.chdir(tmp_path / "files")


def _write() -> None:
    torch.save(PLAIN, "plain.pt")
    save_file(PLAIN, "plain.safetensors")
    torch.save(WRAPPED, "wrapped.pt")
    save_file(WRAPPED, "wrapped.safetensors")
    torch.save({"model": WRAPPED, "ema": WRAPPED, "epoch": 3}, "train.pt")
    torch.save(
        {
            "state_dict": {f"model.{k}": v for k, v in PLAIN.items()},
            "pytorch-lightning_version": "2.5",
        },
        "last.ckpt",
    )
    Path("optional.toml").write_text('[[rule]]\nrename = "nowhere => w"\noptional = true\n')
    Path("float32.toml").write_text("[[rule]]\ncast = '{x*}'\ndtype = 'float32'\n")
    Path("multiple.toml").write_text(
        "[[rule]]\npad = 'weight'\nmultiple = 3\nfrom_size = 3\ndim = 0\n"
    )
    Path("hf").mkdir()
    save_file(WRAPPED, "hf/model.safetensors")
    Path("hf/config.json").write_text("{}")
    dcp.save(dict(PLAIN), checkpoint_id="saved.dcp")
    linear = nn.Linear(2, 3)
    linear.load_state_dict(PLAIN)
    torch.export.save(torch.export.export(linear, (torch.ones(1, 2),)), "program.pt2")


def snapshot() -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}


NOTHING = [
    "wrapped.pt -o out.pt",
    "wrapped.pt -o out.pth",
    "wrapped.pt --in-place",
    "wrapped.pt --dry-run",
    "wrapped.pt -o out.pt --dry-run",
    "wrapped.pt -o out.pt --verify --no-fsync",
    "wrapped.safetensors -o out.safetensors",
    "wrapped.pt --in-place --rules optional.toml",
    "train.pt -o out.pt",
    "train.pt -o out.pt --sections model,ema",
    "last.ckpt -o out.ckpt",
    "hf -o out/",
    "hf --in-place",
    "plain.pt -o out.pt",
    "plain.pt --in-place --to serialized",
    "plain.pt --in-place --to runtime MODEL",
    "plain.pt -o out.pt MODEL",
    "'plain.p*' -o out.pt",
    "saved.dcp -o out.dcp",
    "program.pt2 -o out.pt2",
]


def args_of(line: str) -> list[str]:
    return [part for word in shlex.split(line) for part in (MODEL if word == "MODEL" else (word,))]


@pytest.mark.parametrize("line", NOTHING)
@pytest.mark.filterwarnings("ignore:.*TypedStorage")
def test_remap_without_changes_is_refused(line: str, run: Run) -> None:
    before = snapshot()
    done = run("remap", *args_of(line))
    assert done.status == 1, done.said
    assert done.out == ""
    assert "nothing to change" in done.err.splitlines()[0]
    assert snapshot() == before
    if " --to serialized" in line or " --to runtime" in line:
        assert "already" in done.err
    if line.startswith(("wrapped", "train", "hf")):
        assert "ddp(compile)" in done.err
    command = re.search(r"hint: remove the wrappers: (ckpttool .*)", done.err)
    assert (command is None) == line.startswith(("plain", "'plain", "saved", "program")), done.err
    if command is None:
        return
    words = shlex.split(command[1])[1:]
    assert run(*words).status == 0
    out = words[words.index("-o") + 1] if "-o" in words else words[1]
    found = ckpttool.open_checkpoint(out)
    assert found.state_dicts
    assert all(set(section.keys) == set(PLAIN) for section in found.state_dicts)


@pytest.mark.parametrize(
    "line",
    [
        "wrapped.pt -o out.pt --like wrapped.safetensors",
        "wrapped.pt -o out.pt --to ddp(compile)",
        "plain.pt -o out.pt --to serialized",
        "plain.pt -o out.pt --to serialized MODEL",
        "plain.pt -o out.pt --to runtime MODEL",
        "plain.pt -o out.pt --rule 'weight => weight'",
        "wrapped.pt -o out.pt --rules optional.toml",
        "plain.pt -o out.pt --rules float32.toml",
        "plain.pt -o out.pt --rules multiple.toml",
    ],
)
def test_requested_names_that_already_match_are_copied_with_a_note(line: str, run: Run) -> None:
    done = run("remap", *args_of(line))
    assert done.status == 0, done.said
    assert "already" in done.out + done.err
    left, right = torch.load(args_of(line)[0]), torch.load("out.pt")
    assert list(left) == list(right)
    assert all(torch.equal(value, right[key]) for key, value in left.items())


CHANGES = [
    "wrapped.pt -o out.safetensors",
    "wrapped.pt -o out/",
    "wrapped.pt -o out.pt --to compile",
    "train.pt -o out.pt --drop epoch",
    "train.pt::model -o out.pt",
    "last.ckpt -o out.ckpt --to serialized",
    "hf -o out.pt",
    "saved.dcp -o out.pt",
]


@pytest.mark.parametrize("line", CHANGES)
@pytest.mark.filterwarnings("ignore:.*TypedStorage")
def test_other_format_part_or_sharding_is_a_change(line: str, run: Run) -> None:
    before = snapshot()
    done = run("remap", *args_of(line))
    assert done.status == 0, done.said
    assert snapshot() != before


CONVERSIONS = [
    ("wrapped.pt -o out.safetensors", 0),
    ("wrapped.pt -o out/", 0),
    ("train.pt::model -o out.pt", 0),
    ("hf -o out/ --max-shard-size 10B", 0),
    ("saved.dcp -o out.pt", 0),
    ("wrapped.pt -o out.pt", 1),
    ("hf -o out/", 1),
]


@pytest.mark.parametrize(("line", "status"), CONVERSIONS)
@pytest.mark.filterwarnings("ignore:.*TypedStorage")
def test_convert_keeps_the_keys_and_refuses_a_plain_copy(line: str, status: int, run: Run) -> None:
    before = snapshot()
    done = run("convert", *args_of(line))
    assert done.status == status, done.said
    if status:
        assert "nothing to convert" in done.err
        assert snapshot() == before
        return
    out = line.split()[2] if "-o" in line else "wrapped.pt"
    keys = [set(ckpttool.open_checkpoint(path).sections[0].keys) for path in (line.split()[0], out)]
    assert keys[0] == keys[1]


def test_python_api_refuses_a_remap_without_changes() -> None:
    calls: list[tuple[Any, dict[str, Any]]] = [
        ("wrapped.pt", {}),
        ("wrapped.pt", {"out": "out.pt"}),
        (PLAIN, {}),
    ]
    for ckpt, options in calls:
        with pytest.raises(ckpttool.Refused, match="nothing to change"):
            ckpttool.remap(ckpt, **options)
    assert not Path("out.pt").exists()
    ckpttool.write(ckpttool.open_checkpoint("plain.pt"), "copy.pt")
    renamed = ckpttool.remap("plain.pt", rule="weight => w").result
    ckpttool.remap(renamed, "renamed.pt")
    assert set(torch.load("renamed.pt")) == {"w", "bias"}
    ckpttool.remap(PLAIN, "memory.pt")
