"""The table in docs/formats.md agrees with the table in the code and with a trial of each format.

`UPDATE_DOCS=1` rewrites the table.
"""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import fsspec
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from ckpttool import open_checkpoint
from ckpttool.formats.protocol import Format
from ckpttool.formats.registry import TABLE
from command import Done, Run
from places import DATA, DOCS
from torchrun_ranks import run_ranks

PAGE = DOCS / "formats.md"
START, END = "<!-- the table of ckpttool/formats -->\n", "<!-- end of the table -->\n"
STATE = {f"{part}.weight": torch.arange(600.0) for part in ("up", "down")}
INDEX = "model.{}.index.json"


class Net(torch.nn.Module):
    """The model of `STATE`."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (
            torch.nn.LayerNorm(600, bias=False),
            torch.nn.LayerNorm(600, bias=False),
        )


def _sharded(kind: str, run: Run, folder: Path) -> Path:
    """Write shards with ckpttool; `tests/formats` compares them with shards that the libraries
    wrote.
    """
    save_file(STATE, folder / "whole.safetensors")
    out = folder / "shards" / INDEX.format(kind)
    out.parent.mkdir()
    assert (
        run("convert", folder / "whole.safetensors", "-o", out, "--max-shard-size", "3KB").status
        == 0
    )
    return out.parent


def _torch(run: Run, folder: Path, *, is_zip: bool) -> Path:
    torch.save(STATE, folder / "in.pt", _use_new_zipfile_serialization=is_zip)
    return folder / "in.pt"


def _pickle(run: Run, folder: Path) -> Path:
    arrays = {key: value.numpy() for key, value in STATE.items()}
    (folder / "in.pkl").write_bytes(pickle.dumps(arrays))
    return folder / "in.pkl"


def _safetensors(run: Run, folder: Path) -> Path:
    save_file(STATE, folder / "in.safetensors")
    return folder / "in.safetensors"


def _dcp(run: Run, folder: Path) -> Path:
    dcp.save(STATE, checkpoint_id=folder / "in.dcp")
    return folder / "in.dcp"


def _accelerate(run: Run, folder: Path) -> Path:
    """Write a folder like accelerate's; tests/formats/test_accelerate.py uses real ones."""
    dcp.save({"model": STATE}, checkpoint_id=folder / "run" / "pytorch_model_fsdp_0")
    optimizer = {
        "state": {"up.weight": {"step": torch.ones(())}},
        "param_groups": [{"params": ["up.weight"]}],
    }
    dcp.save({"optimizer": optimizer}, checkpoint_id=folder / "run" / "optimizer_0")
    return folder / "run"


def _ranks(run: Run, folder: Path) -> Path:
    for rank in range(2):
        torch.save(STATE, folder / f"rank_{rank}.pt")
    return folder / "rank_*.pt"


def _rank_folder(run: Run, folder: Path) -> Path:
    """Write a folder like verl's; tests/formats/ranks/test_rank_folder.py has sharded tensors."""
    for rank in range(2):
        torch.save(STATE, folder / f"model_world_size_2_rank_{rank}.pt")
    return folder


def _copied(name: str, run: Run, folder: Path) -> Path:
    copy = shutil.copytree if (DATA / name).is_dir() else shutil.copy
    return Path(copy(DATA / name, folder / Path(name).name))


SAMPLES: dict[str, Callable[[Run, Path], Path]] = {
    "safetensors": _safetensors,
    "torch_zip": partial(_torch, is_zip=True),
    "torch_legacy": partial(_torch, is_zip=False),
    "pickle": _pickle,
    "torchscript": partial(_copied, "script-torch-2.5.1.pt"),
    "pt2": partial(_copied, "tagger-torch-2.9.1.pt2"),
    "sharded": partial(_sharded, "safetensors"),
    "sharded_bin": partial(_sharded, "bin"),
    "rank_files": _ranks,
    "deepspeed": partial(_copied, "deepspeed-0.19.8/zero-3"),
    "accelerate": _accelerate,
    "rank_folder": _rank_folder,
    "dcp": _dcp,
}
RENAMED = ("--rule", r"re:(.*) => m.\1")  # a remap without changes is refused
HEADS = ("format", "in JSON", "remap from", "written", "in place", "by torchrun")


def write_output(
    row: Format, ending: str, run: Run, folder: Path
) -> tuple[Path, tuple[object, ...]] | None:
    """Write an output with this ending; return it and the command if it has the format, else
    None.
    """
    index = ending.endswith(".json")
    name = (
        INDEX.format(ending.split(".")[1])
        if index
        else ending
        if ending == ".metadata"
        else f"out{ending}"
    )
    out = folder / f"outputs{ending}" / name
    out.parent.mkdir()
    way = ("convert", "--max-shard-size", "2MB") if index else ("remap", *RENAMED)
    command = (way[0], folder / "plain.safetensors", *way[1:])
    done = run(*command, "-o", out)
    at = out.parent if row.folder and not out.is_dir() else out
    return (
        (out, command) if done.status == 0 and open_checkpoint(str(at)).format == row.name else None
    )


def written(row: Format, sample: Path, run: Run, folder: Path) -> tuple[str, str]:
    """Return how to request an output of the format, and whether ranks can write it together."""
    save_file(
        {key: value.repeat(700) for key, value in STATE.items()}, folder / "plain.safetensors"
    )
    outputs = [
        write_output(row, ending, run, folder) for ending in (row.index, *row.endings) if ending
    ]
    if outputs and outputs[0] is not None and all(outputs):
        return " ".join(f"`{ending}`" for ending in (row.index, *row.endings) if ending), by_ranks(
            run, *outputs[0]
        )
    out = folder / f"out{sample.suffix}"
    swap = ("swap-weights", sample, sample)
    return ("`swap-weights`" if run(*swap, "-o", out).status == 0 else "no", "no")


def by_ranks(run: Run, alone: Path, command: tuple[object, ...]) -> str:
    """Return "yes" if two ranks write the bytes of one process, or a DCP folder with equal tensors,
    else "no".
    """
    folder = alone.parent.with_name(f"{alone.parent.name}-by-ranks")
    folder.mkdir()
    done = run_ranks(folder, 2, *command, "-o", folder / alone.name)
    if done[0].status == 1:
        return "no"
    if alone.name == ".metadata":
        assert len([*folder.glob("*.distcp")]) == 2
        same = run("diff", alone.parent, folder, "--values").status == 0
    else:
        same = files_in(folder / alone.name) == files_in(alone)
    return "yes" if same and [one.status for one in done] == [0, 0] else "no"


def files_in(out: Path) -> dict[str, bytes]:
    folder = out if out.is_dir() else out.parent if out.suffix in (".json", "") else None
    files = [out] if folder is None else sorted(folder.iterdir())
    return {path.name: path.read_bytes() for path in files}


def by_url(sample: Path, run: Run) -> Done:
    memory, url = fsspec.filesystem("memory"), "memory://formats"
    if memory.exists(url):
        memory.rm(url, recursive=True)
    folder = sample if sample.is_dir() else sample.parent
    memory.put(f"{folder}/", f"{url}/", recursive=True)
    at = url if sample.is_dir() else f"{url}/{sample.name}"
    return run("inspect", at)


def cells(row: Format, run: Run, folder: Path) -> list[str]:
    """Return the row of the page, from trying each operation on a sample of the format."""
    (folder / "in").mkdir()
    sample = SAMPLES[row.name](run, folder / "in")
    listed = run("inspect", sample, "--format", "json")
    assert listed.data["format"] == row.name
    read = (listed, run("diff", sample, sample, "--values"), by_url(sample, run))
    assert [done.status for done in read] == [0, 0, 0]
    converted, (out, together) = conversion(sample, run, folder), written(row, sample, run, folder)
    edited = run("remap", sample, "--rule", r"re:(.*)\.(.*) => \1.w", "--in-place")
    way = "yes" if edited.status == 0 else "no"
    return [row.title, f"`{row.name}`", converted, out, way, together]


def conversion(sample: Path, run: Run, folder: Path) -> str:
    to_torch = ("remap", sample, "-o", folder / "converted.pt", "--verify")
    if run(*to_torch, *RENAMED).status == 0:
        return "yes"
    return "with `--model`" if run(*to_torch, "--model", f"{__file__}:Net").status == 0 else "no"


def line(words: list[str]) -> str:
    return f"| {' | '.join(words)} |\n"


def test_table_of_the_page_equals_the_trials(run: Run, tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    shown, _, after = rest.partition(END)
    rows = [list(HEADS), ["---"] * len(HEADS)]
    for row in TABLE:
        (tmp_path / row.name).mkdir()
        rows.append(cells(row, run, tmp_path / row.name))
    table = "".join(map(line, rows))
    if os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(before + START + table + END + after, encoding="utf-8")
        shown = table
    assert shown == table
