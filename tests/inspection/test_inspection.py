"""Inspection of an index: the JSON report, and the text report."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import ckpttool
from ckpttool import Checkpoint, inspect
from ckpttool.core.checkpoint import (
    ExtraEntry,
    Section,
    Span,
    Storage,
    TensorEntry,
    contiguous_stride,
)
from ckpttool.core.pickle_imports import Import
from ckpttool.report import render
from ckpttool.report.documents.inspection import document

TIED = Storage(Span("train.pt", 64, 288))


def tensor(
    key: str, shape: tuple[int, ...] = (12, 6), storage: Storage | None = None
) -> TensorEntry:
    fresh = Storage(Span("train.pt", 0, 288))
    return TensorEntry(key, "float32", shape, contiguous_stride(shape), 0, storage or fresh)


MODEL = Section(
    "model",
    "state_dict",
    (
        tensor("module.embed.weight", storage=TIED),
        *(tensor(f"module.layers.{index}.w") for index in range(8)),
        tensor("module.scale", ()),
        tensor("module.head.weight", storage=TIED),
    ),
    (ExtraEntry("module.fp8._extra_state"),),
)
SPARSE = TensorEntry(
    "state.0.g", "float32", (4,), (), 0, None, layout="sparse_coo", packed_bytes=24
)
TRAIN = Checkpoint(
    "train.pt",
    "torch_zip",
    4096,
    (MODEL, Section("optimizer", "optimizer", (SPARSE,))),
    ("epoch",),
    (
        Import(
            "argparse.Namespace",
            "unknown",
            "train.pt",
            "train/data.pkl",
            7,
            ("argparse.Namespace()",),
            1,
        ),
    ),
)


def test_the_json_report_follows_the_contract() -> None:
    data = inspect(TRAIN).to_json()
    assert data["tensors"][0] == {
        "section": "model",
        "key": "module.embed.weight",
        "dtype": "float32",
        "shape": [12, 6],
        "bytes": 288,
        "alias_of": None,
    }
    assert [(t["key"], t["alias_of"]) for t in data["tensors"] if t["alias_of"]] == [
        ("module.head.weight", "module.embed.weight")
    ]
    assert data["tensors"][-1]["bytes"] == 24
    del data["tensors"], data["version"]
    assert data == {
        "tool": "ckpttool",
        "schema": "ckpttool.inspect/1",
        "source": "train.pt",
        "format": "torch_zip",
        "bytes": 4096,
        "sections": [
            {
                "path": "model",
                "kind": "state_dict",
                "tensors": 11,
                "bytes": 2884,
                "wrappers": ["module"],
            },
            {"path": "optimizer", "kind": "optimizer", "tensors": 1, "bytes": 24, "wrappers": []},
        ],
        "globals": ["argparse.Namespace"],
        "imports": [
            {
                "name": "argparse.Namespace",
                "verdict": "unknown",
                "file": "train.pt",
                "member": "train/data.pkl",
                "offset": 7,
                "calls": ["argparse.Namespace()"],
                "called": 1,
            }
        ],
        "extras": [{"section": "model", "key": "module.fp8._extra_state"}],
        "others": ["epoch"],
        "metadata": {},
        "flat_parameters": [],
        "adapters": [],
        "optimizers": [],
        "notes": [],
        "unreached": [],
        "kinds": [],
    }


TEXT = """\
train.pt holds a state dict of 11 tensors, an optimizer and 2 non-tensor entries: torch.save, 4.0 KiB

Sections
  section    kind        tensors      size  wrappers
  model      state_dict       11   2.8 KiB  module
  optimizer  optimizer         1  24 bytes

Dtypes
  dtype    tensors  elements     size
  float32       12       725  2.8 KiB

Tensors
  section    tensors  key                    dtype    shape                size
  model            1  module.embed.weight    float32  [12, 6]         288 bytes
  model            8  module.layers.{0-7}.w  float32  [12, 6]           2.2 KiB
  model            1  module.scale           float32  []                4 bytes
  model            1  module.head.weight     float32  [12, 6]         288 bytes
  optimizer        1  state.0.g              float32  [4] sparse_coo   24 bytes

Aliases (second names of a tensor)
  key                       same tensor as
  model.module.head.weight  model.module.embed.weight

Non-tensor entries (copied unchanged)
  key                            type  value
  model.module.fp8._extra_state
  epoch

Pickle imports (never executed)
  name                verdict  where                   called
  argparse.Namespace  unknown  train/data.pkl, byte 7  argparse.Namespace()
"""


def test_the_text_report_lists_sections_and_tensors() -> None:
    assert render("text", document(inspect(TRAIN)), {}) == TEXT


def test_all_lists_every_tensor() -> None:
    text = render("text", document(inspect(TRAIN), all=True), {})
    assert all(f"  {entry.key} " in text for section in TRAIN.sections for entry in section.tensors)
    assert "{" not in text


def test_long_lists_are_cut_without_all() -> None:
    odd = tuple(tensor(f"w{index}", (index + 1,)) for index in range(73))
    checkpoint = Checkpoint(
        "a.safetensors", "safetensors", 1, (Section("", "state_dict", odd),), metadata={"k": "v"}
    )
    text = render("text", document(inspect(checkpoint)), {})
    assert "  ... 33 more (--all)\n" in text
    assert "w39 " in text
    assert "w40 " not in text
    assert text.endswith("Metadata\n  key  value\n  k    v\n")
    assert "more" not in render("text", document(inspect(checkpoint), all=True), {})


def test_a_long_text_is_cut_with_the_number_of_hidden_characters() -> None:
    long = {"at": "x" * 200, "beyond": "x" * 202, "by one": "x" * 201}
    checkpoint = Checkpoint("a.safetensors", "safetensors", 1, (), metadata=long)
    lines = render("text", document(inspect(checkpoint)), {}).splitlines()
    assert [line.partition("x ")[2] for line in lines[-3:]] == [
        "",
        "... 2 more characters (--all)",
        "... 1 more character (--all)",
    ]
    assert "x" * 202 in render("text", document(inspect(checkpoint), all=True), {})


def test_an_empty_checkpoint_has_a_text_report() -> None:
    empty = Checkpoint("a.pt", "torch_zip", 0, ())
    assert render("text", document(inspect(empty)), {}) == (
        "a.pt holds nothing: torch.save, 0 bytes\n"
    )


def test_nan_and_infinity_are_highlighted(tmp_path: Path) -> None:
    state = {
        "odd": torch.tensor([1.0, float("nan"), float("inf"), float("-inf")]),
        "even": torch.ones(2),
    }
    torch.save(state, tmp_path / "a.pt")
    shown = render("html", document(ckpttool.inspect(str(tmp_path / "a.pt"), stats=True)), {})
    for name, role, counts in (("odd", "bad", (1, 2)), ("even", "number", (0, 0))):
        cells = (
            f'<td class="{role}" data-title="{t}">{n}</td>' for t, n in zip(("NaN", "inf"), counts)
        )
        assert re.search(f">{name}<.*{''.join(cells)}", shown)
