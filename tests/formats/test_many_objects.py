"""Functions that make an object for each tensor pause Python's cycle collector, which would look
through all of these objects again and again.
"""

from __future__ import annotations

import gc
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpttool
from places import DATA

Function = tuple[str, str]
STATE = {f"layers.{number}.weight": torch.full((2,), float(number)) for number in range(30)}


class Watch:
    """The code that ran, and the code that the collector interrupted."""

    def __init__(self) -> None:
        self.calls: set[CodeType] = set()
        self.stopped: set[CodeType] = set()

    def on_call(self, frame: FrameType, event: str, _: object) -> None:
        self.calls.add(frame.f_code)

    def on_collection(self, phase: str, _: object) -> None:
        frame: FrameType | None = sys._getframe() if phase == "start" else None
        while frame is not None:
            self.stopped.add(frame.f_code)
            frame = frame.f_back

    @property
    def ran(self) -> set[Function]:
        return set(map(function_of, self.calls))

    @property
    def interrupted(self) -> set[Function]:
        return set(map(function_of, self.stopped))


def function_of(code: CodeType) -> Function:
    path = Path(code.co_filename)
    return f"{path.parent.name}/{path.stem}", code.co_name


@contextmanager
def watched() -> Iterator[Watch]:
    """Let the collector run whenever objects are made."""
    watch, before = Watch(), gc.get_threshold()
    gc.callbacks.append(watch.on_collection)
    gc.set_threshold(20, 1_000_000, 1_000_000)  # only the youngest objects, which is quick
    sys.setprofile(watch.on_call)
    try:
        yield watch
    finally:
        sys.setprofile(None)
        gc.set_threshold(*before)
        gc.callbacks.remove(watch.on_collection)


def save_legacy(path: Path) -> None:
    torch.save(STATE, path, _use_new_zipfile_serialization=False)


def save_script(path: Path) -> None:
    torch.jit.save(torch.jit.script(torch.nn.Sequential(torch.nn.Linear(2, 2))), path)


def save_shards(path: Path) -> None:
    whole = path.with_suffix(".pt")
    torch.save(STATE, whole)
    ckpttool.convert(whole, f"{path}/", max_shard_size="100")


def save_dcp(path: Path) -> None:
    torch.distributed.checkpoint.save(STATE, checkpoint_id=path)


def copy_deepspeed(path: Path) -> None:
    shutil.copytree(DATA / "deepspeed-0.19.8" / "zero-3", path)


ZIP: list[Function] = [
    ("containers/zip_read", "_read"),
    ("formats/torch_zip", "read_from"),
]
READ: dict[str, tuple[Callable[[Path], Any], list[Function]]] = {
    "a.pt": (lambda path: torch.save(STATE, path), ZIP),
    "legacy.pt": (save_legacy, [("formats/torch_legacy", "read")]),
    "script.pt": (save_script, [("formats/torchscript", "read")]),
    "a.safetensors": (
        lambda path: save_file(STATE, path),
        [("formats/safetensors", "_read_common_header")],
    ),
    "shards": (save_shards, [("formats/huggingface", "read")]),
    "a.dcp": (save_dcp, [("formats/dcp", "read")]),
    "deepspeed": (copy_deepspeed, [("formats/deepspeed", "read")]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", READ)
def test_no_collection_interrupts_the_reading_of_an_index(name: str, tmp_path: Path) -> None:
    save, functions = READ[name]
    save(tmp_path / name)
    with watched() as watch:
        ckpttool.inspect(tmp_path / name)
    assert watch.interrupted
    assert watch.ran >= {*functions}
    assert not watch.interrupted & {*functions}


def test_no_collection_interrupts_the_reading_of_an_object() -> None:
    with watched() as watch:
        ckpttool.inspect(STATE)
    assert ("containers/tree", "read_tree") in watch.ran
    assert ("containers/tree", "read_tree") not in watch.interrupted


@pytest.mark.parametrize(
    ("where", "function"),
    [
        ({"out": "b.pt"}, ("formats/torch_zip", "layout")),
        ({"in_place": True}, ("formats/torch_zip", "layout_in_place")),
        ({"out": "b.dcp"}, ("formats/dcp", "layout_files")),
    ],
)
def test_no_collection_interrupts_the_layout_of_an_output(
    where: dict[str, Any], function: Function, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(STATE, "a.pt")
    with watched() as watch:
        ckpttool.remap("a.pt", rule="layers.{x*} => {x*}", **where)
    assert function in watch.ran
    assert function not in watch.interrupted


def test_no_collection_interrupts_the_search_for_pairs(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "a.pt")
    renamed = {key.replace("layers", "blocks"): value for key, value in STATE.items()}
    torch.save(renamed, tmp_path / "b.pt")
    with watched() as watch:
        ckpttool.diff(tmp_path / "a.pt", tmp_path / "b.pt")
    assert ("naming/pairing", "try_way") in watch.ran
    assert ("naming/pairing", "try_way") not in watch.interrupted
