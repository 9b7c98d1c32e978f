"""The schemas are valid, describe every object that is written, and agree with the readers of these
objects.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ckpttool
import schemas
from ckpttool import CkptError, Names, Plan
from command import Run

MODEL = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 2)
        self.lazy = nn.LazyLinear(2)
        self.register_state_dict_post_hook(twice)
def twice(module, state, prefix, meta):
    state[prefix + "double"] = 2 * state.pop(prefix + "net.weight")
def plain(): return nn.Sequential(nn.Linear(2, 2))
def sgd(model): return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL)
    net = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}, "a.pt")
    torch.save({"net.weight": torch.full((2, 2), torch.nan), "net.bias": torch.ones(2)}, "b.pt")
    torch.export.save(torch.export.export(net, (torch.ones(1, 2),)), "p.pt2")
    return tmp_path


LINES = [
    ("inspect b.pt --stats", "inspect"),
    ("trace model.py:Net", "names"),
    ("trace model.py:plain --optimizer model.py:sgd", "names"),
    ("diff a.pt b.pt", "diff"),
    ("diff a.pt::model b.pt --values --fail-on shape", "diff"),
    ("diff --model model.py:Net b.pt --ignore", "diff"),
    ("diff a.pt --model model.py:plain --optimizer model.py:sgd", "diff"),
    ("explain double --model model.py:Net", "explain"),
    ("explain 0.weight --model model.py:plain --optimizer model.py:sgd", "explain"),
    ("remap a.pt -o c.pt --model model.py:plain --optimizer-keys fqn", "remap"),
    ("remap b.pt --dry-run --rule net.{x*}=>{x*}", "remap"),
    ("swap-weights p.pt2 a.pt -o o.pt2", "swap"),
    ("inspect none.pt", "error"),
    ("remap b.pt -o c.pt --rule net.{x}=>one", "error"),
]


@pytest.mark.parametrize(("line", "name"), LINES, ids=[line for line, _ in LINES])
def test_written_objects_match_their_schema(folder: Path, run: Run, line: str, name: str) -> None:
    words = line.split() + (
        ["missing lazy.* # not initialized yet"] if line.endswith("--ignore") else []
    )
    assert schemas.check(run(*words, "--format", "json").data) == name


def test_python_results_match_the_json_of_the_commands(folder: Path, run: Run) -> None:
    rule, model = "net.{x*} => {x*}", "model.py:plain"
    printed = run(
        "remap", "b.pt", "--rule", rule, "--dry-run", "-o", "c.pt", "--format", "json"
    ).data
    assert ckpttool.remap("b.pt", "c.pt", rule=[rule], dry_run=True).to_json() == printed
    printed = run(
        "swap-weights", "p.pt2", "a.pt", "--dry-run", "--model", model, "--format", "json"
    ).data
    assert ckpttool.swap_weights("p.pt2", "a.pt", dry_run=True, model=model).to_json() == printed


def schema(run: Run, name: str) -> Any:
    return json.loads(run("schema", name).out)


@pytest.mark.parametrize("name", schemas.NAMES.values())
def test_schema_command_prints_a_valid_schema(run: Run, name: str) -> None:
    printed = schema(run, name)
    schemas.Draft202012Validator.check_schema(printed)
    assert printed["title"] in run("schema").out
    assert schemas.validator(name).is_valid({"schema": "another"}) is False


def test_unknown_object_is_an_error(run: Run) -> None:
    done = run("schema", "difff")
    assert (done.status, done.out) == (2, "")
    assert "the objects are inspect, names, diff" in done.err


def test_later_versions_may_add_members(folder: Path, run: Run) -> None:
    data = {**run("inspect", "a.pt", "--format", "json").data, "later": 1}
    validator = schemas.Draft202012Validator(schema(run, "inspect"))
    assert (validator.is_valid(data), schemas.validator("inspect").is_valid(data)) == (True, False)


def paths(value: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [prefix, *(path for name, item in inner for path in paths(item, (*prefix, name)))]


READERS: dict[str, Callable[[Any], object]] = {
    "names": lambda value: Names.from_json(value, "names.json"),
    "plan": Plan.from_json,
}


def refused_by(read: Callable[[Any], object], value: Any) -> bool:
    """Return whether the reader refuses the value for a reason that a schema can express, which
    does not know of duplicates and references.
    """
    try:
        read(value)
    except CkptError as error:
        return not error.problems or any(
            "stands" not in problem.problem and "is not a name in this file" not in problem.problem
            for problem in error.problems
        )
    return False


@pytest.mark.parametrize("name", READERS)
def test_reader_and_schema_agree(folder: Path, run: Run, name: str) -> None:
    """Change one value anywhere: the reader and the schema must both accept or both refuse."""
    if name == "names":
        read, data = READERS[name], run("trace", "model.py:Net", "--format", "json").data
    else:
        options = (
            "--dry-run",
            "--model",
            "model.py:Net",
            "--to",
            "serialized",
            "--partial",
            "--format",
            "json",
        )
        read, data = READERS[name], run("remap", "b.pt", *options).data["plan"]
    validator = schemas.Draft202012Validator(schema(run, name))
    locations = [path for path in paths(data) if path and path != ("schema",)]
    values = st.sampled_from(
        [None, True, 3, -1, 1.5, "x", "float32", [], [1], {}, {"ref": "x"}, {"op": "o", "args": 1}]
    )
    refused = 0

    @settings(max_examples=150)
    @given(st.sampled_from(locations), values)
    def agree(path: tuple[Any, ...], value: Any) -> None:
        nonlocal refused
        changed = copy.deepcopy(data)
        parent = changed
        for step in path[:-1]:
            parent = parent[step]
        parent[path[-1]] = value
        wrong = refused_by(read, changed)
        assert (not wrong) == validator.is_valid(changed), (path, value)
        refused += bool(wrong)

    agree()
    assert refused > 20
