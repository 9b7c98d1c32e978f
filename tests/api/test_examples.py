"""Docstrings of the API: they are complete, and their examples run as they are printed."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch import nn

import ckpttool

FUNCTIONS = [name for name in ckpttool.__all__ if inspect.isfunction(getattr(ckpttool, name))]
RESULTS = [name for name in ckpttool.__all__ if dataclasses.is_dataclass(getattr(ckpttool, name))]
BUILD = """
from torch import nn

def build():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
"""


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The files and objects that the examples name."""
    monkeypatch.chdir(tmp_path)
    model = build()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state = model.state_dict()
    Path("model.py").write_text(BUILD)
    torch.save(state, "good.pt")
    torch.save({f"module.{key}": value for key, value in state.items()}, "wrapped.pt")
    torch.save({"model": state, "optimizer": optimizer.state_dict()}, "train.pt")
    torch.export.save(torch.export.export(model, (torch.ones(1, 4),)), "program.pt2")
    ckpttool.remap("good.pt", "good.safetensors")
    ckpttool.save_names(build(), "names.json")
    return {"ckpttool": ckpttool, "build": build, "model": build(), "optimizer": None}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_documents_its_arguments_and_its_example_runs(
    name: str, names: dict[str, Any]
) -> None:
    names["optimizer"] = torch.optim.Adam(names["model"].parameters())
    function = getattr(ckpttool, name)
    text = inspect.getdoc(function) or ""
    arguments = text.partition("\nArgs:\n")[2].partition("\n\n")[0]
    for parameter in inspect.signature(inspect.unwrap(function)).parameters.values():
        if parameter.kind is not parameter.VAR_KEYWORD:
            assert re.search(rf"^    {parameter.name}: ", arguments, re.MULTILINE)
    assert "\nRaises:\n" in text

    example = dedent(text.partition("Example::\n")[2])
    exec(compile(example, name, "exec"), names)
    for key, value in list(names.items()):
        if key.startswith("test_"):
            value()


@pytest.mark.parametrize("name", RESULTS)
def test_result_documents_each_of_its_fields(name: str) -> None:
    result = getattr(ckpttool, name)
    attributes = (inspect.getdoc(result) or "").partition("\nAttributes:\n")[2]
    documented = re.findall(r"^    (\w+): ", attributes, re.MULTILINE)
    assert documented == [field.name for field in dataclasses.fields(result)]
