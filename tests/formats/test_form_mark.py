"""The mark of the naming form: writing it changes nothing else, and invalid marks are ignored."""

from __future__ import annotations

from typing import Any

import pytest

from ckpttool import Checkpoint
from ckpttool.core.checkpoint import Section
from ckpttool.formats.remarks import MARK, read_form, write_form


def checkpoint(*sections: Section, **metadata: str) -> Checkpoint:
    return Checkpoint("made up", "torch_zip", 0, sections, metadata=metadata)


def section(path: str, modules: Any = None, form: str | None = None) -> Section:
    return Section(path, "state_dict", (), modules=modules, form=form)


MODULES = {"": {"version": 1}, "a": {"version": 2}, "zz": {"version": 3}}


@pytest.mark.parametrize("modules", [None, {}, MODULES])
@pytest.mark.parametrize("form", ["runtime", "serialized"])
def test_a_torch_file_has_the_mark_in_the_module_versions(form: str, modules: Any) -> None:
    before = checkpoint(
        section("optimizer"), section("model", modules, form), section("ema", MODULES)
    )
    written = write_form(before, in_metadata=False)
    assert [one.modules for one in written.sections] == [
        None,
        {**(modules or {}), MARK: {"form": form}},
        MODULES,
    ]
    assert written.metadata == {}
    read = read_form(written)
    assert [one.form for one in read.sections] == [None, form, None]
    assert [one.modules for one in read.sections] == [None, modules or {}, MODULES]


@pytest.mark.parametrize("form", ["runtime", "serialized"])
def test_a_safetensors_file_has_the_mark_in_its_metadata(form: str) -> None:
    written = write_form(
        checkpoint(section("", None, form), a="0", format="pt", zz="1"), in_metadata=True
    )
    assert written.metadata == {"a": "0", "format": "pt", "zz": "1", MARK: form}
    read = read_form(
        Checkpoint("made up", "safetensors", 0, (section(""),), metadata=written.metadata)
    )
    assert (read.metadata, read.sections[0].form) == ({"a": "0", "format": "pt", "zz": "1"}, form)


@pytest.mark.parametrize("tensors_only", [True, False])
def test_a_checkpoint_without_a_form_is_unchanged(tensors_only: bool) -> None:
    before = checkpoint(section("", MODULES), format="pt")
    assert write_form(before, in_metadata=tensors_only) is before
    assert read_form(before) is before


@pytest.mark.parametrize(
    "mark", [None, 3, [], "runtime", {}, {"form": 3}, {"form": None}, {"form": "zz"}, {"form": ""}]
)
def test_an_invalid_mark_is_ignored(mark: Any) -> None:
    read = read_form(checkpoint(section("", {**MODULES, MARK: mark})))
    assert (read.sections[0].form, read.sections[0].modules) == (None, MODULES)


def test_an_invalid_mark_in_the_metadata_is_ignored() -> None:
    read = read_form(checkpoint(section(""), **{MARK: "zz", "format": "pt"}))
    assert (read.sections[0].form, read.metadata) == (None, {"format": "pt"})
