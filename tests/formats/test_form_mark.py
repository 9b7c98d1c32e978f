"""The mark of the naming form: writing it changes nothing else, and invalid marks are ignored."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ckpttool import Checkpoint, open_checkpoint
from files import write

MARK = "ckpttool.form"
MODULES = {"": {"version": 1}, "a": {"version": 2}, "zz": {"version": 3}}
W = torch.ones(2)


def state_dict(modules: Any = None) -> dict[str, torch.Tensor]:
    state: Any = OrderedDict(w=W)
    if modules is not None:
        state._metadata = OrderedDict(modules)
    return state


def saved(contents: Any, path: Path) -> Checkpoint:
    torch.save(contents, path)
    return open_checkpoint(path)


def with_form(checkpoint: Checkpoint, path: str, form: str) -> Checkpoint:
    sections = [
        replace(section, form=form) if section.path == path else section
        for section in checkpoint.sections
    ]
    return replace(checkpoint, sections=tuple(sections))


@pytest.mark.parametrize("modules", [None, {}, MODULES])
@pytest.mark.parametrize("form", ["runtime", "serialized"])
def test_a_torch_file_has_the_mark_in_the_module_versions(
    form: str, modules: Any, tmp_path: Path
) -> None:
    contents = {"model": state_dict(modules), "ema": state_dict(MODULES)}
    marked = with_form(saved(contents, tmp_path / "a.pt"), "model", form)
    out = write(marked, tmp_path / "b.pt")
    found = torch.load(out)
    assert dict(found["model"]._metadata) == {**(modules or {}), MARK: {"form": form}}
    assert dict(found["ema"]._metadata) == MODULES
    again = open_checkpoint(out)
    assert [section.form for section in again.sections] == [form, None]
    assert [section.modules for section in again.sections] == [modules or {}, MODULES]


@pytest.mark.parametrize("form", ["runtime", "serialized"])
def test_a_safetensors_file_has_the_mark_in_its_metadata(form: str, tmp_path: Path) -> None:
    metadata = {"a": "0", "format": "pt", "zz": "1"}
    save_file({"w": W}, tmp_path / "a.safetensors", metadata)
    marked = with_form(open_checkpoint(tmp_path / "a.safetensors"), "", form)
    out = write(marked, tmp_path / "b.safetensors")
    with safe_open(out, "pt") as file:
        assert file.metadata() == {**metadata, MARK: form}
    again = open_checkpoint(out)
    assert (again.metadata, again.sections[0].form) == (metadata, form)


def test_a_checkpoint_without_a_form_has_no_mark(tmp_path: Path) -> None:
    plain = saved(state_dict(MODULES), tmp_path / "a.pt")
    assert torch.load(write(plain, tmp_path / "b.pt"))._metadata == MODULES
    with safe_open(write(plain, tmp_path / "b.safetensors"), "pt") as file:
        assert MARK not in (file.metadata() or {})


@pytest.mark.parametrize(
    "mark", [None, 3, [], "runtime", {}, {"form": 3}, {"form": None}, {"form": "zz"}, {"form": ""}]
)
def test_an_invalid_mark_is_ignored(mark: Any, tmp_path: Path) -> None:
    (section,) = saved(state_dict({**MODULES, MARK: mark}), tmp_path / "a.pt").sections
    assert (section.form, section.modules) == (None, MODULES)


def test_an_invalid_mark_in_the_metadata_is_ignored(tmp_path: Path) -> None:
    save_file({"w": W}, tmp_path / "a.safetensors", {MARK: "zz", "format": "pt"})
    found = open_checkpoint(tmp_path / "a.safetensors")
    assert (found.sections[0].form, found.metadata) == (None, {"format": "pt"})
