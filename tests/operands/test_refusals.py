"""Wrong operands: one error, and a hint that says what the operand is or what to write instead."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpttool
from ckpttool import CkptError
from command import Run

CODE = """
import torch
from torch import nn
def build(width=2): return nn.Linear(2, width)
class Net(nn.Linear): pass
def _hidden(): pass
def sgd(model): return torch.optim.SGD(model.parameters(), lr=0.1)
"""


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    state, other = nn.Linear(2, 2).state_dict(), nn.Linear(2, 3).state_dict()
    saved: dict[str, Any] = {
        "lin.pt": state,
        "two.pt": {"a": state, "b": other},
        "usual.pt": {"ema_model": other, "model": state},
        "unknown.pt": {"lr": torch.ones(1).untyped_storage(), "steps": [torch.ones(2)], "epoch": 3},
        "empty.pt": {"epoch": 3},
    }
    for name, value in saved.items():
        torch.save(value, name)
    for name, text in (("m.py", CODE), ("void.py", "x = 1\n"), ("bad.py", "def (:\n")):
        Path(name).write_text(text)


REFUSED = {
    # command line: (error, hint)
    "inspect m.py:build": (
        "m.py:build is a model, and a checkpoint is expected",
        "--model m.py:build",
    ),
    "inspect usual.pt:ema_model": (
        "usual.pt:ema_model does not exist",
        "two colons name a section of a file: usual.pt::ema_model",
    ),
    "diff two.pt:a lin.pt": ("two.pt:a does not exist", "two.pt::a"),
    "diff lin.pt m.py:build(width=3)": (
        "m.py:build(width=3) is a model, and diff compares",
        "--model 'm.py:build(width=3)'",
    ),
    "inspect lin.pt::ema": ("lin.pt has no section 'ema'", "its sections are: (root)"),
    "inspect empty.pt::ema": ("empty.pt has no section 'ema'", "its sections are: none"),
    "remap two.pt --model m.py:build --to runtime -o o.pt": (
        "two.pt holds several state dicts: a, b",
        "two.pt::a",
    ),
    "diff --model m.py:build unknown.pt": (
        "unknown.pt holds no state dict",
        "(root) (other), lr (a storage, not un",
    ),
    "diff --model m.py:build empty.pt": (
        "empty.pt holds no state dict",
        "it holds: no tensors at all",
    ),
    "diff --model names.json --optimizer m.py:sgd lin.pt": (
        "--optimizer needs the model's code, and names.json",
        "trace",
    ),
    "diff --model m.py lin.pt": (
        "m.py is a file of code",
        "name what builds the model: m.py:build, m.py:Net, m.py:sgd",
    ),
    "diff --model void.py lin.pt": ("void.py is a file of code", "as in file.py:build"),
    "diff --model m lin.pt": ("'m' names no Python object", "did you mean m.py:FUNCTION?"),
    "diff --model m.build lin.pt": ("'m.build' names no Python object", "m.py:build"),
    "diff --model m.py::build lin.pt": ("'m.py:' is neither a module nor", "m.py:build"),
    "diff --model ./m:build lin.pt": ("'./m' is neither a module nor", "./m.py:build"),
    "remap lin.pt --strip-prefix x. -o o.pt": ("no such option", "--rule 'PREFIX.{x*} => {x*}'"),
    "diff --model bad.py lin.pt": ("bad.py is a file of code", "as in file.py:build"),
    "diff --model lin.pt lin.pt": ("lin.pt is not a model", "`ckpttool inspect lin.pt`"),
    "diff --model m.py:build(a=) lin.pt": (
        "m.py:build(a=) has no arguments that can be read",
        "build(layers=4",
    ),
    "diff --model m.py:build(1) lin.pt": (
        "m.py:build(1) has no arguments that can be read",
        "build(layers=4",
    ),
    "diff --model m.py:build(**x) lin.pt": (
        "m.py:build(**x) has no arguments that can",
        "arguments have names",
    ),
    "diff --model m.py:build(a=open('x')) lin.pt": (
        "m.py:build(a=open('x')) has no",
        "arguments have names",
    ),
    "remap two.pt --sections a,c,d -o o.pt --to ddp": (
        "two.pt has no state dict 'c', 'd'",
        "its state dicts are: a, b",
    ),
    "remap two.pt --sections a,c -o o.pt --drop b.*": (
        "two.pt has no state dict 'c'",
        "its state dicts are: a, b",
    ),
    "remap empty.pt --sections c -o o.pt": (
        "empty.pt has no state dict 'c'",
        "its state dicts are: none",
    ),
    "inspect lin.pt --report r.md --report ./r.md": (
        "r.md is named for two outputs",
        "its own name",
    ),
    "diff names.json --model m.py:build --report names.json --force": (
        "names.json is read by this",
        "another file",
    ),
    "trace m.py:build -o m.py --force": ("m.py is read by this command", "name another file"),
    "inspect lin.pt --report names.json": ("names.json exists", "--force"),
    "remap --rule a=>b": ("missing argument 'CKPT'", "usage: ckpttool remap [OPTIONS]"),
    "diff lin.pt lin.pt --update": (
        "--update rewrites a names file",
        "ckpttool trace MODEL -o names.json",
    ),
    "diff names.json --update": (
        "--update rewrites a names file",
        "ckpttool diff names.json --model MODEL --update",
    ),
    "diff lin.pt two.pt::a --materialise": ("no such option", "did you mean --materialize?"),
    "diff lin.pt lin.pt --model m.py:build --suggest x": (
        "--suggest needs two checkpoints, or a model",
        "LEFT RIGHT",
    ),
    "diff lin.pt lin.pt two.pt --suggest x.toml": (
        "diff compares two checkpoints",
        "ckpttool diff lin.pt lin.pt",
    ),
}


def contents() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path().iterdir() if path.is_file()}


@pytest.mark.parametrize("line", REFUSED)
def test_wrong_operand_gets_an_error_and_a_hint(run: Run, line: str) -> None:
    if "names.json" in line:
        assert run("trace", "m.py:build", "-o", "names.json").status == 0
    before = contents()
    done = run(*line.split())
    error, hint = done.err.splitlines()
    assert (done.status, done.out) == (2, "")
    assert error.startswith(f"error: {REFUSED[line][0]}")
    assert REFUSED[line][1] in hint
    assert contents() == before


def test_unchanged_state_dict_with_half_of_the_names_is_reported(run: Run) -> None:
    weights = {f"layers.{i}.weight": torch.ones(2) for i in range(6)}
    unrelated = {f"unrelated.{i}": torch.ones(3) for i in range(3)}
    parts = {"most": 5, "half": 3, "few": 2, "none": 0}
    others = {
        name: {**dict(list(weights.items())[:count]), **unrelated} for name, count in parts.items()
    }
    torch.save({"model": weights, **others}, "many.pt")
    done = run("remap", "many.pt", "-o", "out.pt", "--rule", "layers.{x*} => blocks.{x*}")
    reported = {line.split()[1] for line in done.err.splitlines() if "stays as it is" in line}
    assert (done.status, reported) == (0, {"most", "half"})
    assert (
        "half has 3 of the 6 names of model and stays as it is (`remap --sections model,half` takes"
        " it too)"
    ) in done.err


def test_sections_are_deduplicated_in_order() -> None:
    done = ckpttool.remap("two.pt", sections="b, a,b", rule=["weight => w"], dry_run=True)
    assert done.sections == ("b", "a")


@pytest.mark.parametrize("sections", [("a", "x"), ("model", "net", "x")])
def test_ambiguous_model_section_is_refused(run: Run, sections: tuple[str, ...]) -> None:
    torch.save({name: {f"{name}.w": torch.ones(1)} for name in sections}, "f.pt")
    done = run("diff", "f.pt", "--model", "m.py:build")
    assert done.status == 2
    assert "holds several state dicts" in done.err
    assert f"hint: pick one: f.pt::{sections[0]}" in done.err


def test_file_named_like_a_model_operand_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(1)}, "model.py:build")
    assert [
        entry.key for entry in ckpttool.open_checkpoint("model.py:build").sections[0].tensors
    ] == ["w"]
    with pytest.raises(CkptError, match="is a model"):
        ckpttool.open_checkpoint("model.py:other")


def test_unread_storages_are_listed_by_section(tmp_path: Path) -> None:
    path = str(tmp_path / "a.pt")
    odd = torch.UntypedStorage(range(3))
    torch.save(
        {
            "model": {"w": torch.ones(1), "x": [odd]},
            "ema": {"w": torch.ones(1)},
            "more": [odd.clone()],
        },
        path,
    )
    assert sorted(storage.path for storage in ckpttool.open_checkpoint(path).unreached) == [
        "model.x.0",
        "more.0",
    ]
    assert [storage.path for storage in ckpttool.open_checkpoint(f"{path}::model").unreached] == [
        "model.x.0"
    ]
    assert not ckpttool.open_checkpoint(f"{path}::ema").unreached


def test_names_object_is_accepted_as_a_model(tmp_path: Path) -> None:
    names = ckpttool.trace(partial(torch.nn.Linear, in_features=2, out_features=3))
    assert [key.shape for key in names.serialized] == [(3, 2), (3,)]
    torch.save(torch.nn.Linear(2, 3).state_dict(), tmp_path / "a.pt")
    result = ckpttool.diff(str(tmp_path / "a.pt"), model=names)
    assert (result.identical, result.right) == (True, f"{names.model} (what it loads)")
    (tmp_path / "n.json").write_text(json.dumps(names.to_json()))
    with pytest.raises(CkptError, match="lists no names of from_pretrained"):
        ckpttool.remap(str(tmp_path / "a.pt"), model=str(tmp_path / "n.json"), to="pretrained")


def test_json_files_are_recognized_in_any_member_order(run: Run) -> None:
    """A JSON formatter may have sorted the members."""
    assert run("trace", "m.py:build", "-o", "names.json").status == 0
    names = json.loads(Path("names.json").read_text())
    Path("sorted.json").write_text(json.dumps(names, sort_keys=True))
    assert run("diff", "sorted.json", "--model", "m.py:build").status == 0
    assert (
        run("diff", "sorted.json", "--model", "m.py:Net(in_features=2, out_features=3)").status == 1
    )
    (checked,) = run("check", "sorted.json", "--model", "m.py:build", "--format", "json").data[
        "files"
    ]
    assert (checked["kind"], checked["problems"]) == ("names", [])
    assert run("diff", "--model", "sorted.json", "lin.pt").status == 0
