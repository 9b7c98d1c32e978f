"""The fast header parser matches the strict one, or falls back to it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ckpttool.core.errors import CkptError
from ckpttool.formats import safetensors
from ckpttool.io.files import look_anew

NAMES = st.text(max_size=4) | st.sampled_from(["a.0.weight", "__metadata__", 'q"', "b\\", "{", "dtype"])
SIZES = st.lists(st.integers(0, 3), max_size=3)


@st.composite
def headers(draw):
    """Draw valid headers with all kinds of names and whitespace, and sometimes an error."""
    infos, end = {}, 0
    if draw(st.booleans()):
        infos["__metadata__"] = draw(st.dictionaries(NAMES, NAMES, max_size=2) | st.none())
    for name in draw(st.lists(NAMES, unique=True, max_size=4)):
        code, width = draw(st.sampled_from([("F32", 4), ("BF16", 2), ("I64", 8), ("F8_E4M3", 1)]))
        shape = draw(SIZES)
        length = width
        for size in shape:
            length *= size
        infos[name] = {"dtype": code, "shape": shape, "data_offsets": [end, end + length]}
        end += length
    members = draw(st.permutations(list(infos.items())))
    separators = draw(st.sampled_from([(",", ":"), (", ", ": "), (" , ", " : ")]))
    text = json.dumps(dict(members), separators=separators, ensure_ascii=draw(st.booleans()))
    if draw(st.booleans()):
        at, what = (
            draw(st.integers(0, len(text))),
            draw(st.sampled_from(['"', ",", "}", "0", "-", "1", " ", "\\", "[", ""])),
        )
        text = text[:at] + what + text[at + draw(st.integers(0, 2)) :]
    return text + draw(st.sampled_from(["", "  ", "\n", "x"])), bytes(end)


@given(headers())
def test_the_fast_parser_matches_the_strict_one(tmp_path_factory, header):
    text, data = header
    path = tmp_path_factory.getbasetemp() / "header.safetensors"
    raw = text.encode("utf-8", "surrogatepass")
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    assert outcome(path, fast=True) == outcome(path, fast=False)


def outcome(path: Path, fast: bool):
    """Return keys, shapes, offsets and metadata, or the error and its problems."""
    kept = safetensors._as_usual
    if not fast:
        safetensors._as_usual = lambda text, data: None
    look_anew(str(path))
    try:
        read = safetensors.read(str(path))
    except CkptError as error:
        return error.message, error.problems
    finally:
        safetensors._as_usual = kept
    tensors = [(e.key, e.dtype, e.shape, e.stride, e.storage and e.storage.data) for e in read.sections[0].tensors]
    container: Any = read.container
    text = container.read()
    names = [json.loads(text[start:end]) for start, end in safetensors.quoted_names(text)]
    assert names == [key for key, *_ in tensors]
    return tensors, read.metadata


def test_headers_of_common_writers_take_the_fast_path(tmp_path, monkeypatch):
    import torch
    from safetensors.torch import save_file

    save_file({f"layers.{i}.ä": torch.zeros(2, i) for i in range(9)}, tmp_path / "m.safetensors", metadata={"a": '"'})
    monkeypatch.setattr(safetensors, "_strictly", None)
    assert len(safetensors.read(str(tmp_path / "m.safetensors")).sections[0].tensors) == 9
