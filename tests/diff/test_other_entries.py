"""Entries next to the models of two files: each difference is reported, or a note says that it was
not compared.

The oracle is torch: one place in the contents of a file is changed, and `torch.save` writes the
second file.
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
from ckpttool import Diff
from command import Run

OTHERS_DIFFER = "other sections or entries, not the models"


class Settings:
    """An object of a user-defined class."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


def training_checkpoint() -> dict[str, Any]:
    """Return the contents of a typical training checkpoint."""
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
        "more": OrderedDict(
            best=[0.5, float("nan")], when=None, device=torch.device("cpu"), dtype=torch.float16
        ),
        "settings": Settings(
            scale=torch.ones(2), rate=0.5, inner=Settings(deep=[torch.zeros(1), 7])
        ),
    }


Change = Callable[[Any], Any]


def places(value: Any) -> Iterator[tuple[str, Change]]:
    """Yield each place in `value`, and a function that returns a copy of `value` changed at that
    place.
    """
    if isinstance(value, torch.Tensor):
        if value.numel():
            yield "", lambda old: old.logical_not() if old.dtype == torch.bool else old + 1
    elif isinstance(value, (dict, list, tuple)):
        keys = list(value) if isinstance(value, dict) else range(len(value))
        for key in keys:
            for place, change in places(value[key]):
                yield f"{key}.{place}", partial(_replace_item, key, change)
        if isinstance(value, dict) and value:
            yield "-", lambda old: _remove_item(old, next(reversed(list(old))))
    elif isinstance(value, (argparse.Namespace, Settings)):
        for name in vars(value):
            for place, change in places(getattr(value, name)):
                yield f"{name}.{place}", partial(_replace_attribute, name, change)
    else:
        yield "", lambda old: "something else"


def _replace_item(key: Any, change: Change, old: Any) -> Any:
    new = change(old[key])
    if isinstance(old, dict):
        result = copy(old)
        result[key] = new
        return result
    return type(old)(new if at == key else one for at, one in enumerate(old))


def _remove_item(old: Any, key: Any) -> Any:
    result = copy(old)
    del result[key]
    return result


def _replace_attribute(name: str, change: Change, old: Any) -> Any:
    result = copy(old)
    setattr(result, name, change(getattr(old, name)))
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("other_entries")
    torch.save(training_checkpoint(), path / "left.pt")
    return path


def diff_values(left: Path, right: Path) -> Diff:
    return ckpttool.diff(str(left), str(right), values=True)


CHANGES = {
    place: change
    for place, change in places(training_checkpoint())
    if not place.startswith("rng.python.1.") or place == "rng.python.1.0."
}


@pytest.mark.parametrize("place", CHANGES)
def test_a_change_at_any_place_is_reported(folder: Path, place: str) -> None:
    torch.save(CHANGES[place](training_checkpoint()), folder / "right.pt")
    result = diff_values(folder / "left.pt", folder / "right.pt")
    section = place.partition(".")[0]
    if section == "model":
        assert not result.identical
    else:
        reported = " ".join(
            (
                *result.notes,
                *(
                    key
                    for entry in result.entries
                    for key in entry.left
                    if result.is_difference(entry)
                ),
            )
        )
        assert section in reported or place == "-"
        assert result.has_other_notes or not result.identical


def test_equal_files_have_no_notes(folder: Path, tmp_path: Path) -> None:
    torch.save(training_checkpoint(), tmp_path / "again.pt", _use_new_zipfile_serialization=False)
    result = diff_values(folder / "left.pt", tmp_path / "again.pt")
    assert (result.identical, result.has_other_notes, result.notes) == (True, False, ())


class RootDict(dict[str, Any]):
    """The root object of a file, which may have attributes."""


def test_a_root_object_with_another_attribute_is_reported(tmp_path: Path) -> None:
    files = {"plain.pt": {"model": {"w": torch.ones(2)}}}
    for rate in (1, 2):
        files[f"{rate}.pt"] = result = RootDict(model={"w": torch.ones(2)})
        result.rate = rate  # type: ignore[attr-defined]
    for name, value in files.items():
        torch.save(value, tmp_path / name)
    one, other, plain = (tmp_path / name for name in ("1.pt", "2.pt", "plain.pt"))
    assert diff_values(one, other).notes == ("non-tensor entries with different values: (root)",)
    assert diff_values(one, plain).notes == ("non-tensor entries in left only: (root)",)
    assert diff_values(plain, one).notes == ("non-tensor entries in right only: (root)",)


def test_an_alias_outside_the_models_is_a_difference_with_whole(folder: Path, run: Run) -> None:
    model, w = {"w": torch.zeros(1)}, torch.ones(2)
    for name, ema in ("tied.pt", {"w": w, "v": w}), ("one.pt", {"w": w}):
        torch.save({"model": model, "ema": ema}, folder / name)
    for pair in ("tied.pt", "one.pt"), ("one.pt", "tied.pt"):
        both = [str(folder / name) for name in pair]
        assert run("diff", *both).status == 0
        whole = run("diff", *both, "--whole")
        answer = whole.out.splitlines()[0]
        assert (whole.status, answer.partition(" differ: ")[2]) == (1, OTHERS_DIFFER)
        (command,) = re.findall(r"ema: 1 difference \(ckpttool (.*)\)", whole.out + whole.err)
        assert run(*shlex.split(command)).status == 1


@pytest.mark.parametrize("change", [0, 1e-3, 1])
def test_options_count_for_other_sections_too(tmp_path: Path, run: Run, change: float) -> None:
    model = {"w": torch.ones(2)}
    torch.save({"model": model, "ema": {"w": torch.ones(2)}}, tmp_path / "left.pt")
    torch.save(
        {"model": model, "ema": {"w": torch.ones(2).double() + change}}, tmp_path / "right.pt"
    )
    line = ("diff", tmp_path / "left.pt", tmp_path / "right.pt", "--whole", "--rtol", "0.01")
    assert run(*line).status == 1
    whole = run(*line, "--ignore-dtype")
    assert whole.status == (change == 1)
    if change == 1:
        (command,) = re.findall(r"ema: 1 difference \(ckpttool (.*)\)", whole.out)
        assert "differ: 1 tensor with other values\n" in run(*shlex.split(command)).out


def test_the_verdict_covers_only_the_models_and_commands_compare_the_rest(
    tmp_path: Path, run: Run
) -> None:
    left, right = training_checkpoint(), training_checkpoint()
    right["epoch"], right["optimizer"]["state"][0]["exp_avg"] = 4, torch.ones(4, 3)
    right["ema"] = {key: value + 1 for key, value in right["ema"].items()}
    del right["args"]
    for name, result in (("left.pt", left), ("right.pt", right)):
        torch.save(result, tmp_path / name)
    done = run("diff", "--values", tmp_path / "left.pt", tmp_path / "right.pt")
    assert done.status == 0
    pair = f"{tmp_path / 'left.pt'} and {tmp_path / 'right.pt'}"
    aspects = "have the same keys, shapes, dtypes"
    assert done.out.splitlines()[0] == f"the models in {pair} {aspects} and values"
    assert f"non-tensor entries in {tmp_path / 'left.pt'} only: args" in done.out
    assert "non-tensor entries with different values: epoch" in done.out
    commands = re.findall(
        r"^(ema|optimizer): (\d+) differences? \((ckpttool diff .*)\)$", done.out, re.MULTILINE
    )
    assert [(name, int(count)) for name, count, _ in commands] == [("ema", 9), ("optimizer", 1)]
    for _, count, command in commands:
        section_diff = run(*shlex.split(command)[1:])
        assert section_diff.status == 1
        answer = section_diff.out.splitlines()[0].partition(" differ: ")[2]
        assert re.fullmatch(rf"{count} tensors? with other values", answer)
    answer = run("diff", tmp_path / "left.pt", tmp_path / "right.pt").out.splitlines()[0]
    assert answer == f"{pair} have the same keys, shapes and dtypes"
    done = run("diff", "--values", "--whole", tmp_path / "left.pt", tmp_path / "right.pt")
    assert (done.status, done.out.splitlines()[0]) == (1, f"{pair} differ: {OTHERS_DIFFER}")
    assert (
        run("diff", "--values", "--whole", tmp_path / "left.pt", tmp_path / "left.pt").status == 0
    )


@pytest.mark.parametrize("line", ["a.pt --model M", "a.pt", "a.pt a.pt a.pt"])
def test_whole_requires_two_checkpoints(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(2)}, "a.pt")
    line = line.replace("M", f"{Path(__file__).parents[1] / 'support' / 'small_models.py'}:Block")
    done = run("diff", "--whole", *line.split())
    assert done.status == 2
    assert "--whole" in done.err or "diff compares two checkpoints" in done.err


def test_entries_next_to_two_optimizers_are_compared(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1)
    for epoch in (1, 2):
        torch.save({"optimizer": optimizer.state_dict(), "epoch": epoch}, tmp_path / f"{epoch}.pt")
    assert (
        diff_values(tmp_path / "1.pt", tmp_path / "2.pt").notes[-1] == "non-tensor entries with"
        " different values: epoch"
    )


EMPTY: dict[str, Any] = {"state": {}, "param_groups": []}


def sections(**parts: Any) -> dict[str, Any]:
    return {"model": {"w": torch.ones(2)}, **parts}


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ({"ema": {"w": torch.ones(2)}}, {}, "not compared: ema in left only (for example"
        " LEFT::ema)"),
        ({}, {"ema": {"w": torch.ones(2)}}, "not compared: ema in right only (for example"
        " RIGHT::ema)"),
        ({"a": (torch.ones(2),)}, {}, "not compared: 1 entry outside of state dicts in left only:"
        " a.0"),
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
def test_entries_that_are_not_compared_are_noted(
    tmp_path: Path, left: Any, right: Any, expected: str
) -> None:
    for name, parts in (("left.pt", left), ("right.pt", right)):
        torch.save(sections(**parts), tmp_path / name)
    result = diff_values(tmp_path / "left.pt", tmp_path / "right.pt")
    names = (("LEFT", tmp_path / "left.pt"), ("RIGHT", tmp_path / "right.pt"))
    assert [
        reduce(lambda note, name: note.replace(str(name[1]), name[0]), names, note)
        for note in result.notes
    ] == [expected]
    assert result.identical
    assert result.has_other_notes
    whole = ckpttool.diff(
        str(tmp_path / "left.pt"), str(tmp_path / "right.pt"), values=True, whole=True
    )
    assert (whole.identical, whole.other_failure, whole.fix) == (False, OTHERS_DIFFER, ())
    assert whole.notes == result.notes


def test_versions_of_modules_are_named(tmp_path: Path) -> None:
    """Loading batch norms that have `num_batches_tracked` is the same for both versions."""
    for version in (1, 2):
        state = nn.BatchNorm1d(2).state_dict()
        state._metadata[""]["version"] = version  # type: ignore[attr-defined]
        torch.save(state, tmp_path / f"{version}.pt")
    (note,) = diff_values(tmp_path / "1.pt", tmp_path / "2.pt").notes
    assert note.startswith(
        "the module versions differ (_metadata); loading these keys is the same: (root)"
    )
    assert not diff_values(tmp_path / "1.pt", tmp_path / "1.pt").notes


def test_an_accepted_model_difference_does_not_accept_other_differences(
    tmp_path: Path, run: Run
) -> None:
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
def test_ignore_dtype_compares_every_rank(tmp_path: Path, run: Run, other: torch.Tensor) -> None:
    def write(folder: str, second: torch.Tensor, dtype: torch.dtype) -> str:
        (tmp_path / folder).mkdir(exist_ok=True)
        for rank, value in enumerate((torch.ones(2), second)):
            torch.save({"w": value.to(dtype)}, tmp_path / folder / f"rank_{rank}.pt")
        return str(tmp_path / folder / "rank_*.pt")

    left = write("left", torch.ones(2), torch.float32)
    options = ["--values", "--ignore-dtype"]
    assert run("diff", left, write("right", torch.ones(2), torch.bfloat16), *options).status == 0
    assert run("diff", left, write("right", other, torch.bfloat16), *options).status == 1


def test_a_dtype_difference_in_an_object_does_not_hide_a_shape_difference(
    tmp_path: Path, run: Run
) -> None:
    def write(name: str, first: torch.Tensor, second: torch.Tensor) -> str:
        torch.save(
            {"w": torch.ones(2), "m._extra_state": {"a": first, "b": second}}, tmp_path / name
        )
        return str(tmp_path / name)

    left, half = write("left.pt", torch.ones(2), torch.ones(2)), torch.ones(2, dtype=torch.bfloat16)
    assert run("diff", left, write("same.pt", half, torch.ones(2)), "--ignore-dtype").status == 0
    assert run("diff", left, write("other.pt", half, torch.ones(3)), "--ignore-dtype").status == 1
