"""OUT determines which files are written and in which format; the values equal the source."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ckpttool
from ckpttool import Refused

ONE, INDEX = ["model.safetensors"], "model.safetensors.index.json"
TWO = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", INDEX]
BIN = [
    "pytorch_model-00001-of-00002.bin",
    "pytorch_model-00002-of-00002.bin",
    "pytorch_model.bin.index.json",
]
DCP, OTHER_FILES = [".metadata", "__0_0.distcp"], ["config.json", "notes.md"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a checkpoint of 48 KiB as a file and as folders of several kinds, two of them with
    other files.
    """
    home = tmp_path_factory.mktemp("sources")
    state = {f"l.{i}.weight": torch.full((64, 64), float(i)) for i in range(3)}
    for name in ("hf", "bin", "out/there"):
        (home / name).mkdir(parents=True)
    save_file(state, home / "hf" / "model.safetensors")
    torch.save(state, home / "bin" / "pytorch_model.bin")
    for name in ("hf", "bin"):
        (home / name / "config.json").write_text("{}")
        (home / name / "notes.md").write_text("what it is")
    dcp.save(state, checkpoint_id=home / "saved.dcp")
    shutil.copy(home / "bin" / "pytorch_model.bin", home / "one.pt")
    ckpttool.convert(str(home / "one.pt"), f"{home}/shards/", max_shard_size="40KB")
    return home


@pytest.fixture(autouse=True)
def _working_folder(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(sources, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


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
        ("one.pt", "NEW.DCP", None, DCP),
        ("one.pt", "NEW.SafeTensors", None, ["NEW.SafeTensors"]),
        ("one.pt", f"there/{INDEX}", "40KB", TWO),
        ("one.pt", "there/.metadata", None, DCP),
        ("hf", "new.pt", None, ["new.pt"]),
        ("hf", "new", None, [*ONE, *OTHER_FILES]),
        ("hf", "new/", "40KB", [*TWO, *OTHER_FILES]),
        ("hf", "new.dcp", None, [*DCP, *OTHER_FILES]),
        ("hf::", "new/", None, ONE),  # the other files do not belong to a section
        ("hf/model.safetensors", "new/", None, ONE),
        ("bin", "new", None, ["pytorch_model.bin", *OTHER_FILES]),
        ("bin", "there", "40KB", [*BIN, *OTHER_FILES]),
        ("bin", f"there/{INDEX}", "40KB", [*TWO, *OTHER_FILES]),
        ("shards", "new", None, TWO),
        ("shards", "new.safetensors", None, ["new.safetensors"]),
        ("saved.dcp", "new", None, DCP),
        ("saved.dcp", "new.safetensors", None, ["new.safetensors"]),
        ("saved.dcp", f"there/{INDEX}", "40KB", TWO),
    ],
)
def test_out_determines_files_and_format(
    source: str, out: str, size: str | None, written: list[str]
) -> None:
    try:
        ckpttool.convert(source, f"out/{out}", max_shard_size=size)
    except Refused as error:  # the same names in the same format
        if "nothing to convert" not in error.message:
            raise
        ckpttool.write(ckpttool.open_checkpoint(source), f"out/{out}", max_shard_size=size)
    assert sorted(path.name for path in Path("out").rglob("*") if path.is_file()) == sorted(written)
    assert ckpttool.diff("one.pt", f"out/{out}", values=True).identical
    assert all(
        path.read_text() in ("{}", "what it is")
        for name in OTHER_FILES
        for path in Path("out").rglob(name)
    )


@pytest.mark.parametrize("source", ["one.pt", "hf::"])
def test_out_without_an_ending_is_refused_for_a_file(source: str) -> None:
    with pytest.raises(ckpttool.CkptError, match="no format has the ending"):
        ckpttool.remap(source, "out/new")


@pytest.mark.parametrize("out", ["new.metadata", "MODEL.SAFETENSORS.INDEX.JSON"])
def test_a_name_that_is_like_an_index_has_no_format(out: str) -> None:
    with pytest.raises(ckpttool.CkptError, match="no format has the ending"):
        ckpttool.remap("one.pt", f"out/{out}")


def test_folder_with_other_state_files_needs_a_folder_as_output() -> None:
    """Megatron folders have such files next to the tensors."""
    torch.save({"iteration": 3}, "saved.dcp/common.pt")
    with pytest.raises(Refused) as refused:
        ckpttool.remap("saved.dcp", "out/new.pt")
    assert [problem.key for problem in refused.value.problems] == ["common.pt"]
    line = "ckpttool remap saved.dcp --drop common.pt -o out/new.pt"
    assert refused.value.hint == f"to leave it out: {line}"
    ckpttool.remap("saved.dcp", "out/new.pt", drop=["common.pt"])
    ckpttool.remap("saved.dcp", "out/new.dcp", rule="l.{i}.weight => w.{i}")
    assert torch.load("out/new.dcp/common.pt") == {"iteration": 3}
