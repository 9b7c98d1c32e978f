"""docs/formats.md says what the code's own table of formats says, and what each format does when it is tried.

`UPDATE_DOCS=1` writes the table anew.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import fsspec
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from ckpttool.formats.open import open_checkpoint
from ckpttool.formats.table import TABLE, Format
from command import Done, Run
from places import DATA, DOCS

PAGE = DOCS / "formats.md"
START, END = "<!-- the table of ckpttool/formats -->\n", "<!-- end of the table -->\n"
STATE = {f"{part}.weight": torch.arange(600.0) for part in ("up", "down")}
INDEX = "model.{}.index.json"


class Net(torch.nn.Module):
    """The model of that state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.LayerNorm(600, bias=False), torch.nn.LayerNorm(600, bias=False)


def _sharded(kind: str, run: Run, folder: Path) -> Path:
    """What the tool shards, which `tests/formats` holds against the libraries."""
    save_file(STATE, folder / "whole.safetensors")
    out = folder / "shards" / INDEX.format(kind)
    out.parent.mkdir()
    assert run("remap", folder / "whole.safetensors", "-o", out, "--max-shard-size", "3KB").status == 0
    return out.parent


def _torch(run: Run, folder: Path, *, is_zip: bool) -> Path:
    torch.save(STATE, folder / "in.pt", _use_new_zipfile_serialization=is_zip)
    return folder / "in.pt"


def _safetensors(run: Run, folder: Path) -> Path:
    save_file(STATE, folder / "in.safetensors")
    return folder / "in.safetensors"


def _dcp(run: Run, folder: Path) -> Path:
    dcp.save(STATE, checkpoint_id=folder / "in.dcp")
    return folder / "in.dcp"


def _ranks(run: Run, folder: Path) -> Path:
    for rank in range(2):
        torch.save(STATE, folder / f"rank_{rank}.pt")
    return folder / "rank_*.pt"


def _copied(name: str, run: Run, folder: Path) -> Path:
    copy = shutil.copytree if (DATA / name).is_dir() else shutil.copy
    return Path(copy(DATA / name, folder / Path(name).name))


SAMPLES: dict[str, Callable[[Run, Path], Path]] = {
    "safetensors": _safetensors,
    "torch_zip": partial(_torch, is_zip=True),
    "torch_legacy": partial(_torch, is_zip=False),
    "torchscript": partial(_copied, "script-torch-2.5.1.pt"),
    "pt2": partial(_copied, "tagger-torch-2.9.1.pt2"),
    "sharded": partial(_sharded, "safetensors"),
    "sharded_bin": partial(_sharded, "bin"),
    "rank_files": _ranks,
    "deepspeed": partial(_copied, "deepspeed-0.19.8/zero-3"),
    "dcp": _dcp,
}
HEADS = ("format", "in JSON", "on disk", "inspect", "diff", "remap from", "written", "in place", "URL", "holds")


def holds(row: Format) -> str:
    """What a file of the format can hold, in words."""
    if row.tensors_only:
        names = "also under several names" if row.aliases else "each under one name"
        return f"one state dict of dense tensors, {names}"
    return "whatever `torch.save` pickles" if row.pickled else "what its writer put there"


def is_written(row: Format, ending: str, run: Run, folder: Path) -> bool:
    """Whether an output of that ending is a file or a folder of the format."""
    index = ending.endswith(".json")
    name = INDEX.format(ending.split(".")[1]) if index else ending if ending == ".metadata" else f"out{ending}"
    out = folder / f"outputs{ending}" / name
    out.parent.mkdir()
    options = ("--max-shard-size", "3KB") if index else ()
    done = run("remap", folder / "plain.safetensors", "-o", out, *options)
    at = out.parent if row.folder and not out.is_dir() else out
    return done.status == 0 and open_checkpoint(str(at)).format == row.name


def written(row: Format, sample: Path, run: Run, folder: Path) -> str:
    """How an output of the format is asked for, where there is a way."""
    save_file(STATE, folder / "plain.safetensors")
    if row.endings and all(is_written(row, ending, run, folder) for ending in row.endings):
        return " ".join(f"`{ending}`" for ending in row.endings)
    out = folder / f"out{sample.suffix}"
    if row.pickled and run("remap", sample, "-o", out, "--torch-format", "legacy").status == 0:
        return "`--torch-format legacy`"
    return "`swap-weights`" if run("swap-weights", sample, sample, "-o", out).status == 0 else "no"


def by_url(sample: Path, run: Run) -> str:
    """Whether it is read where it lies behind a URL."""
    memory, url = fsspec.filesystem("memory"), "memory://formats"
    if memory.exists(url):
        memory.rm(url, recursive=True)
    folder = sample if sample.is_dir() else sample.parent
    memory.put(f"{folder}/", f"{url}/", recursive=True)
    at = url if sample.is_dir() else f"{url}/{sample.name}"
    return _mark(run("inspect", at))


def _mark(done: Done) -> str:
    return "yes" if done.status == 0 else "no"


def cells(row: Format, run: Run, folder: Path) -> list[str]:
    """The row of the page, as it turns out when each is tried on files of the format."""
    (folder / "in").mkdir()
    sample = SAMPLES[row.name](run, folder / "in")
    listed = run("inspect", sample, "--format", "json")
    assert listed.data["format"] == row.name
    on_disk = "folder" if sample.is_dir() else "files" if "*" in sample.name else "file"
    different = run("diff", sample, sample, "--values")
    converted = conversion(sample, run, folder)
    url, out = by_url(sample, run), written(row, sample, run, folder)
    edited = run("remap", sample, "--rule", "re:(.*) => m.\\1", "--in-place", "--format", "json")
    way = edited.data["written"]["way"] if edited.status == 0 else "no"
    tried = (_mark(listed), _mark(different), converted, out, way, url)
    return [row.title, f"`{row.name}`", on_disk, *tried, holds(row)]


def conversion(sample: Path, run: Run, folder: Path) -> str:
    """Whether a torch file is made of it, and what of the model that takes."""
    to_torch = ("remap", sample, "-o", folder / "converted.pt", "--verify")
    if run(*to_torch).status == 0:
        return "yes"
    return "with `--model`" if run(*to_torch, "--model", f"{__file__}:Net").status == 0 else "no"


def line(words: list[str]) -> str:
    return f"| {' | '.join(words)} |\n"


def test_the_page_has_the_row_that_comes_out(run: Run, tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    said, _, after = rest.partition(END)
    rows = [list(HEADS), ["---"] * len(HEADS)]
    for row in TABLE:
        (tmp_path / row.name).mkdir()
        rows.append(cells(row, run, tmp_path / row.name))
    table = "".join(map(line, rows))
    if os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(before + START + table + END + after, encoding="utf-8")
        said = table
    assert said == table
