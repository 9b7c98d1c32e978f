"""What OUT asks for: which files are written, in which format, beside what; and that they hold what was read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ckpttool
from ckpttool.core.errors import Refused

ONE, INDEX = ["model.safetensors"], "model.safetensors.index.json"
TWO = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", INDEX]
BIN = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin", "pytorch_model.bin.index.json"]
DCP, BESIDE = [".metadata", "__0_0.distcp"], ["config.json", "notes.md"]


@pytest.fixture(autouse=True)
def _sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three kinds of folders with a checkpoint of 48 KiB, two of which have other files beside it; and its files."""
    monkeypatch.chdir(tmp_path)
    state = {f"l.{i}.weight": torch.full((64, 64), float(i)) for i in range(3)}
    for name in ("hf", "bin", "out/there"):
        Path(name).mkdir(parents=True)
    save_file(state, "hf/model.safetensors")
    torch.save(state, "bin/pytorch_model.bin")
    for name in ("hf", "bin"):
        Path(name, "config.json").write_text("{}")
        Path(name, "notes.md").write_text("what it is")
    dcp.save(state, checkpoint_id="saved.dcp")
    shutil.copy("bin/pytorch_model.bin", "one.pt")
    ckpttool.convert("one.pt", "shards/", max_shard_size="40KB")


@pytest.mark.filterwarnings("ignore:.*(no_dist|single process|TypedStorage)")
@pytest.mark.parametrize(
    ("source", "out", "size", "written"),
    [
        ("one.pt", "new.safetensors", None, ["new.safetensors"]),
        ("one.pt", "new.pt", None, ["new.pt"]),
        ("one.pt", "new/", None, ONE),
        ("one.pt", "new/", "40KB", TWO),
        ("one.pt", "there", None, ONE),  # a folder
        ("one.pt", "new.dcp", None, DCP),
        ("one.pt", "new.dcp/", None, DCP),
        ("one.pt", f"there/{INDEX}", "40KB", TWO),
        ("one.pt", "there/.metadata", None, DCP),
        ("hf", "new.pt", None, ["new.pt"]),
        ("hf", "new", None, [*ONE, *BESIDE]),
        ("hf", "new/", "40KB", [*TWO, *BESIDE]),
        ("hf", "new.dcp", None, [*DCP, *BESIDE]),
        ("hf::", "new/", None, ONE),  # a section has nothing beside it
        ("hf/model.safetensors", "new/", None, ONE),
        ("bin", "new", None, ["pytorch_model.bin", *BESIDE]),
        ("bin", "there", "40KB", [*BIN, *BESIDE]),
        ("bin", f"there/{INDEX}", "40KB", [*TWO, *BESIDE]),
        ("shards", "new", None, TWO),
        ("shards", "new.safetensors", None, ["new.safetensors"]),
        ("saved.dcp", "new", None, DCP),
        ("saved.dcp", "new.safetensors", None, ["new.safetensors"]),
        ("saved.dcp", f"there/{INDEX}", "40KB", TWO),
    ],
)
def test_what_out_asks_for_is_written(source: str, out: str, size: str | None, written: list[str]) -> None:
    try:
        ckpttool.convert(source, f"out/{out}", max_shard_size=size)
    except Refused as error:  # the same names in the same format
        if "nothing to convert" not in error.message:
            raise
        ckpttool.write(ckpttool.open_checkpoint(source), f"out/{out}", max_shard_size=size)
    assert sorted(path.name for path in Path("out").rglob("*") if path.is_file()) == sorted(written)
    assert ckpttool.diff("one.pt", f"out/{out}", values=True).identical
    assert all(path.read_text() in ("{}", "what it is") for name in BESIDE for path in Path("out").rglob(name))


@pytest.mark.parametrize("source", ["one.pt", "hf::"])
def test_a_name_without_an_ending_is_no_folder_for_what_is_none(source: str) -> None:
    with pytest.raises(ckpttool.CkptError, match="no format has the ending"):
        ckpttool.remap(source, "out/new")


def test_files_that_are_a_part_of_it_have_no_place_in_a_file() -> None:
    """Megatron's folders have such beside the tensors."""
    torch.save({"iteration": 3}, "saved.dcp/common.pt")
    with pytest.raises(Refused) as refused:
        ckpttool.remap("saved.dcp", "out/new.pt")
    assert [problem.key for problem in refused.value.problems] == ["common.pt"]
    assert refused.value.hint == "leave it out: --drop common.pt"
    ckpttool.remap("saved.dcp", "out/new.pt", drop=["common.pt"])
    ckpttool.remap("saved.dcp", "out/new.dcp", rule="l.{i}.weight => w.{i}")
    assert torch.load("out/new.dcp/common.pt") == {"iteration": 3}
