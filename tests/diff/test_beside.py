"""What stands beside the models of two files is compared, or said not to be: nothing in a file differs without a word.

The oracle is torch: a file is read, one place in what it holds is changed, and `torch.save` writes the other.
"""

from __future__ import annotations

import argparse
import random
import re
import shlex
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from copy import copy
from functools import partial, reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpttool
from ckpttool.diffing.result import Diff
from ckpttool.diffing.run import OTHERS_DIFFER
from command import Run


class Settings:
    """An object of a user's own class."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


def training() -> dict[str, Any]:
    """A run with what people keep in its file."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "ema": {key: value.clone() for key, value in model.state_dict().items()},
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "epoch": 3,
        "args": argparse.Namespace(lr=0.1, names=["a", "b"], size=(3, 4)),
        "rng": {"torch": torch.get_rng_state(), "python": random.Random(0).getstate()},
        "seen": {"files": {"a", "b"}, "counts": Counter(x=2), "by": defaultdict(list, q=[1.5])},
        "more": OrderedDict(best=[0.5, float("nan")], when=None, device=torch.device("cpu"), dtype=torch.float16),
        "settings": Settings(scale=torch.ones(2), rate=0.5, inner=Settings(deep=[torch.zeros(1), 7])),
    }


Change = Callable[[Any], Any]


def places(value: Any) -> Iterator[tuple[str, Change]]:
    """Every place inside `value`, and what makes of the whole one that is other at this place."""
    if isinstance(value, torch.Tensor):
        if value.numel():
            yield "", lambda old: old.logical_not() if old.dtype == torch.bool else old + 1
    elif isinstance(value, (dict, list, tuple)):
        keys = list(value) if isinstance(value, dict) else range(len(value))
        for key in keys:
            for way, change in places(value[key]):
                yield f"{key}.{way}", partial(_with, key, change)
        if isinstance(value, dict) and value:
            yield "-", lambda old: _without(old, next(reversed(list(old))))
    elif isinstance(value, (argparse.Namespace, Settings)):
        for name in vars(value):
            for way, change in places(getattr(value, name)):
                yield f"{name}.{way}", partial(_having, name, change)
    else:
        yield "", lambda old: "something else"


def _with(key: Any, change: Change, old: Any) -> Any:
    new = change(old[key])
    if isinstance(old, dict):
        made = copy(old)
        made[key] = new
        return made
    return type(old)(new if at == key else one for at, one in enumerate(old))


def _without(old: Any, key: Any) -> Any:
    made = copy(old)
    del made[key]
    return made


def _having(name: str, change: Change, old: Any) -> Any:
    made = copy(old)
    setattr(made, name, change(getattr(old, name)))
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("beside")
    torch.save(training(), made / "left.pt")
    return made


def between(left: Path, right: Path) -> Diff:
    return ckpttool.diff(str(left), str(right), values=True)


WAYS = [way for way, _ in places(training()) if not way.startswith("rng.python.1.") or way == "rng.python.1.0."]


@pytest.mark.parametrize("way", WAYS)
def test_a_change_at_any_place_is_told(folder: Path, way: str) -> None:
    torch.save(dict(places(training()))[way](training()), folder / "right.pt")
    found = between(folder / "left.pt", folder / "right.pt")
    where = way.partition(".")[0]
    if where == "model":
        assert not found.identical
    else:
        told = " ".join(
            (*found.notes, *(key for entry in found.entries for key in entry.left if found.is_difference(entry)))
        )
        assert where in told or way == "-"
        assert found.has_other_notes or not found.identical


def test_equal_files_have_nothing_beside(folder: Path, tmp_path: Path) -> None:
    torch.save(training(), tmp_path / "again.pt", _use_new_zipfile_serialization=False)
    found = between(folder / "left.pt", tmp_path / "again.pt")
    assert (found.identical, found.has_other_notes, found.notes) == (True, False, ())


class Whole(dict[str, Any]):
    """What holds the whole of a file, with something of its own."""


def test_the_object_that_is_the_whole_file_is_told(tmp_path: Path) -> None:
    files = {"plain.pt": {"model": {"w": torch.ones(2)}}}
    for rate in (1, 2):
        files[f"{rate}.pt"] = made = Whole(model={"w": torch.ones(2)})
        made.rate = rate  # type: ignore[attr-defined]
    for name, value in files.items():
        torch.save(value, tmp_path / name)
    one, other, plain = (tmp_path / name for name in ("1.pt", "2.pt", "plain.pt"))
    assert between(one, other).notes == ("non-tensor entries with different values: (root)",)
    assert between(one, plain).notes == ("non-tensor entries in left only: (root)",)
    assert between(plain, one).notes == ("non-tensor entries in right only: (root)",)


def test_a_second_name_beside_the_models_is_one_that_a_strict_load_misses(folder: Path, run: Run) -> None:
    model, w = {"w": torch.zeros(1)}, torch.ones(2)
    for name, beside in ("tied.pt", {"w": w, "v": w}), ("one.pt", {"w": w}):
        torch.save({"model": model, "ema": beside}, folder / name)
    for pair in ("tied.pt", "one.pt"), ("one.pt", "tied.pt"):
        both = [str(folder / name) for name in pair]
        assert run("diff", *both).status == 0
        whole = run("diff", *both, "--whole")
        assert (whole.status, whole.out.splitlines()[1].partition(";")[0]) == (1, OTHERS_DIFFER)
        (command,) = re.findall(r"ema: 1 difference \(ckpttool (.*)\)", whole.out + whole.err)
        assert run(*shlex.split(command)).status == 1


def test_the_verdict_speaks_of_the_models_alone_and_the_commands_show_the_rest(tmp_path: Path, run: Run) -> None:
    left, right = training(), training()
    right["epoch"], right["optimizer"]["state"][0]["exp_avg"] = 4, torch.ones(4, 3)
    right["ema"] = {key: value + 1 for key, value in right["ema"].items()}
    del right["args"]
    for name, made in (("left.pt", left), ("right.pt", right)):
        torch.save(made, tmp_path / name)
    done = run("diff", "--values", tmp_path / "left.pt", tmp_path / "right.pt")
    assert (done.status, done.out.splitlines()[1].partition(";")[0]) == (0, "no differences between the models")
    assert "non-tensor entries in left only: args" in done.out
    assert "non-tensor entries with different values: epoch" in done.out
    commands = re.findall(r"^(ema|optimizer): (\d+) differences? \((ckpttool diff .*)\)$", done.out, re.MULTILINE)
    assert [(name, int(count)) for name, count, _ in commands] == [("ema", 9), ("optimizer", 1)]
    for _, count, command in commands:
        told = run(*shlex.split(command)[1:])
        assert told.status == 1
        assert re.fullmatch(rf"{count} of \d+ keys? differs?", told.out.splitlines()[1])
    assert (
        run("diff", tmp_path / "left.pt", tmp_path / "right.pt")
        .out.splitlines()[1]
        .startswith("no differences; values not")
    )
    done = run("diff", "--values", "--whole", tmp_path / "left.pt", tmp_path / "right.pt")
    assert (done.status, done.out.splitlines()[1]) == (1, OTHERS_DIFFER)
    assert run("diff", "--values", "--whole", tmp_path / "left.pt", tmp_path / "left.pt").status == 0


@pytest.mark.parametrize("line", ["a.pt --model M", "a.pt", "a.pt a.json", "a.pt a.pt a.pt"])
def test_whole_is_for_two_checkpoints(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(2)}, "a.pt")
    assert run("inspect", "a.pt", "--manifest", "a.json").status == 0
    line = line.replace("M", f"{Path(__file__).parents[1] / 'support' / 'small_models.py'}:Block")
    done = run("diff", "--whole", *line.split())
    assert done.status == 2
    assert "--whole" in done.err or "diff compares two checkpoints" in done.err


def test_beside_two_optimizers(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1)
    for epoch in (1, 2):
        torch.save({"optimizer": optimizer.state_dict(), "epoch": epoch}, tmp_path / f"{epoch}.pt")
    assert between(tmp_path / "1.pt", tmp_path / "2.pt").notes[-1] == "non-tensor entries with different values: epoch"


EMPTY: dict[str, Any] = {"state": {}, "param_groups": []}


def sections(**parts: Any) -> dict[str, Any]:
    return {"model": {"w": torch.ones(2)}, **parts}


@pytest.mark.parametrize(
    ("left", "right", "told"),
    [
        ({"ema": {"w": torch.ones(2)}}, {}, "not compared: ema in left only (for example LEFT::ema)"),
        ({}, {"ema": {"w": torch.ones(2)}}, "not compared: ema in right only (for example RIGHT::ema)"),
        ({"a": (torch.ones(2),)}, {}, "not compared: 1 entry outside of state dicts in left only: a.0"),
        ({"o": EMPTY}, {"o": {"w": torch.ones(2)}}, "o: optimizer in left, state_dict in right"),
        (
            {"o": {"state": {}, "param_groups": [{"lr": 1}]}},
            {"o": {"state": {}, "param_groups": [{"lr": 1}]}},
            "not compared: o: o is not an optimizer's state dict as torch writes it",
        ),
        ({"epoch": 1}, {}, "non-tensor entries in left only: epoch"),
        ({}, {"epoch": 1}, "non-tensor entries in right only: epoch"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_is_not_compared_is_said(tmp_path: Path, left: Any, right: Any, told: str) -> None:
    for name, parts in (("left.pt", left), ("right.pt", right)):
        torch.save(sections(**parts), tmp_path / name)
    found = between(tmp_path / "left.pt", tmp_path / "right.pt")
    names = (("LEFT", tmp_path / "left.pt"), ("RIGHT", tmp_path / "right.pt"))
    assert [reduce(lambda note, name: note.replace(str(name[1]), name[0]), names, note) for note in found.notes] == [
        told
    ]
    assert found.identical
    assert found.has_other_notes
    whole = ckpttool.diff(str(tmp_path / "left.pt"), str(tmp_path / "right.pt"), values=True, whole=True)
    assert (whole.identical, whole.other_failure, whole.fix) == (False, OTHERS_DIFFER, ())
    assert whole.notes == found.notes


def test_versions_of_modules_are_not_compared(tmp_path: Path) -> None:
    """What a model's loading makes of them is the model's to say."""
    for version in (1, 2):
        state = nn.BatchNorm1d(2).state_dict()
        state._metadata[""]["version"] = version  # type: ignore[attr-defined]
        torch.save(state, tmp_path / f"{version}.pt")
    (note,) = between(tmp_path / "1.pt", tmp_path / "2.pt").notes
    assert note == ("not compared: 1 module with other versions (_metadata): (root)")
    assert not between(tmp_path / "1.pt", tmp_path / "1.pt").notes


def test_an_accepted_difference_of_the_models_does_not_accept_what_else_differs(tmp_path: Path, run: Run) -> None:
    left, right = str(tmp_path / "left.pt"), str(tmp_path / "right.pt")
    weights = {"w": torch.ones(3)}
    torch.save({"model": weights, "ema": {"w": torch.ones(3)}}, left)
    torch.save({"model": {**weights, "head": torch.ones(2)}, "ema": {"w": torch.zeros(3)}}, right)
    accept = ["--values", "--ignore", "missing head # it is new"]
    assert run("diff", left, right, *accept).status == 0
    assert run("diff", left, right, *accept, "--whole").status == 1
    torch.save({"model": {**weights, "head": torch.ones(2)}, "ema": {"w": torch.ones(3)}}, right)
    assert run("diff", left, right, *accept, "--whole").status == 0


@pytest.mark.parametrize("other", [torch.full((2,), 2.0), torch.ones(3)], ids=["values", "shape"])
def test_conversion_of_dtypes_compares_every_rank(tmp_path: Path, run: Run, other: torch.Tensor) -> None:
    def write(folder: str, second: torch.Tensor, dtype: torch.dtype) -> str:
        (tmp_path / folder).mkdir(exist_ok=True)
        for rank, value in enumerate((torch.ones(2), second)):
            torch.save({"w": value.to(dtype)}, tmp_path / folder / f"rank_{rank}.pt")
        return str(tmp_path / folder / "rank_*.pt")

    left = write("left", torch.ones(2), torch.float32)
    options = ["--values", "--ignore-dtype"]
    assert run("diff", left, write("right", torch.ones(2), torch.bfloat16), *options).status == 0
    assert run("diff", left, write("right", other, torch.bfloat16), *options).status == 1


def test_another_dtype_in_an_object_does_not_hide_another_shape(tmp_path: Path, run: Run) -> None:
    def write(name: str, first: torch.Tensor, second: torch.Tensor) -> str:
        torch.save({"w": torch.ones(2), "m._extra_state": {"a": first, "b": second}}, tmp_path / name)
        return str(tmp_path / name)

    left, half = write("left.pt", torch.ones(2), torch.ones(2)), torch.ones(2, dtype=torch.bfloat16)
    assert run("diff", left, write("same.pt", half, torch.ones(2)), "--ignore-dtype").status == 0
    assert run("diff", left, write("other.pt", half, torch.ones(3)), "--ignore-dtype").status == 1
