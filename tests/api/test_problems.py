"""Errors of the library say what is wrong with which key, by the codes of `diff`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpttool
from ckpttool import CkptError, Refused

State = dict[str, Any]


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))


SAVED: State = dict(build().state_dict())
FILES: dict[str, tuple[State, Mapping[str, str]]] = {
    "shape": ({**SAVED, "1.bias": torch.ones(9)}, {"1.bias": "shape"}),
    "unexpected": ({**SAVED, "more": torch.ones(1)}, {"more": "unexpected"}),
    "dtype": ({**SAVED, "0.bias": torch.ones(2).int()}, {"0.bias": "dtype"}),
    "missing": (
        {key: value for key, value in SAVED.items() if key != "1.bias"},
        {"1.bias": "missing"},
    ),
}
FILES["all"] = (
    {**FILES["missing"][0], "more": torch.ones(1), "0.bias": torch.ones(3)},
    {"1.bias": "missing", "more": "unexpected", "0.bias": "shape"},
)


@pytest.mark.parametrize(("state", "kinds"), FILES.values(), ids=FILES)
@pytest.mark.parametrize("call", ["load", "fix"])
def test_each_problem_has_the_status_of_its_difference(
    call: str, state: State, kinds: Mapping[str, str], tmp_path: Path
) -> None:
    torch.save(state, tmp_path / "a.pt")
    calls: dict[str, Callable[[], Any]] = {
        "load": lambda: ckpttool.load(str(tmp_path / "a.pt"), build()),
        "fix": lambda: ckpttool.fix(str(tmp_path / "a.pt"), str(tmp_path / "b.pt"), model=build),
    }
    with pytest.raises(Refused) as refused:
        calls[call]()
    assert {problem.key: problem.kind for problem in refused.value.problems} == kinds


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters())


def reversed_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(list(model.parameters())[::-1])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


CHANGES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "another shape": (lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 4)), adam),
    "fewer layers": (lambda: nn.Sequential(nn.Linear(2, 2)), adam),
    "another optimizer": (build, sgd),
    "another order": (build, reversed_adam),
}


@pytest.mark.parametrize(("model", "optimizer"), CHANGES.values(), ids=CHANGES)
def test_check_names_says_what_changed(
    model: Callable[[], nn.Module], optimizer: Any, tmp_path: Path
) -> None:
    path = str(tmp_path / "names.json")
    ckpttool.save_names(build(), path, optimizer=adam)
    ckpttool.check_names(build(), path, optimizer=adam)
    with pytest.raises(Refused) as refused:
        ckpttool.check_names(model(), path, optimizer=optimizer)
    assert refused.value.problems
    assert all(problem.problem and problem.key for problem in refused.value.problems)
    assert "0 names" not in refused.value.message


def test_load_says_what_does_not_fit_the_optimizer(tmp_path: Path) -> None:
    model = build()
    optimizer = adam(model)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt"
    )
    groups = torch.optim.Adam([{"params": [model[0].weight]}, {"params": [model[1].weight]}])
    for other in (sgd(model), groups):
        with pytest.raises(Refused) as refused:
            ckpttool.load(tmp_path / "a.pt", model, other)
        assert refused.value.problems
        assert all(problem.problem and problem.key for problem in refused.value.problems)


@pytest.mark.parametrize(
    "fail_on", [["value"], ("missing", "value"), "missing,value", ["missing,shape", "value"]]
)
def test_fail_on_takes_several(fail_on: Any) -> None:
    left, right = {"w": torch.ones(2)}, {"w": torch.zeros(2)}
    assert not ckpttool.diff(left, right, values=True, fail_on=fail_on).passes
    assert ckpttool.diff(left, right, values=True, fail_on=["missing"]).passes
    assert ckpttool.diff(left, right, values=True, fail_on="missing").passes


@pytest.mark.parametrize("fail_on", ["valu", ["value", "x"], ["missing,x"]])
def test_unknown_status_is_an_error(fail_on: Any) -> None:
    with pytest.raises(CkptError, match="unknown status"):
        ckpttool.diff({"w": torch.ones(2)}, {"w": torch.zeros(2)}, fail_on=fail_on)


def test_counts_of_problems_and_differences_agree(tmp_path: Path) -> None:
    torch.save(FILES["all"][0], tmp_path / "a.pt")
    diff = ckpttool.diff(tmp_path / "a.pt", model=build)
    with pytest.raises(Refused) as refused:
        ckpttool.load(tmp_path / "a.pt", build())
    counts = Counter(problem.kind for problem in refused.value.problems)
    assert counts == {status: count for status, count in diff.summary.items() if status != "same"}


def _wrong_arguments() -> list[tuple[str, Callable[[Any, str], object]]]:
    """Calls with an argument of a wrong kind, or with two that were exchanged."""
    return [
        ("out", lambda model, path: ckpttool.remap(path, model)),
        ("out", lambda model, path: ckpttool.convert(path, 3)),  # type: ignore[arg-type]
        ("out", lambda model, path: ckpttool.fix(path, model, model=model)),
        ("rule", lambda model, path: ckpttool.remap(path, rule=[1])),  # type: ignore[list-item]
        ("rules", lambda model, path: ckpttool.remap(path, rules=model)),
        ("to", lambda model, path: ckpttool.remap(path, to=model)),
        ("drop", lambda model, path: ckpttool.remap(path, drop=1.5)),  # type: ignore[arg-type]
        ("ignore", lambda model, path: ckpttool.diff(path, model=model, ignore=model)),
        ("progress", lambda model, path: ckpttool.remap(path, progress=path)),  # type: ignore[arg-type]
        ("name", lambda model, path: ckpttool.explain(model, path)),
        ("files", lambda model, path: ckpttool.check(model)),
        ("path", lambda model, path: ckpttool.undo(model)),
        ("path", lambda model, path: ckpttool.save_names(path, model)),
        ("path", lambda model, path: ckpttool.check_names(path, model)),
        ("path", lambda model, path: ckpttool.check_names(model, None)),  # type: ignore[arg-type]
        ("module", lambda model, path: ckpttool.load(model, path)),  # type: ignore[arg-type]
        ("optimizer", lambda model, path: ckpttool.load(path, model, path)),  # type: ignore[arg-type]
        ("checkpoint", lambda model, path: ckpttool.inspect(model)),
        ("checkpoint", lambda model, path: ckpttool.open_checkpoint(None)),  # type: ignore[arg-type]
        ("model", lambda model, path: ckpttool.trace(None)),
    ]


@pytest.mark.parametrize(("named", "call"), _wrong_arguments())
def test_a_wrong_kind_of_argument_is_named(
    named: str, call: Callable[[Any, str], object], tmp_path: Path
) -> None:
    model, path = torch.nn.Linear(2, 2), tmp_path / "weights.pt"
    torch.save(model.state_dict(), path)
    with pytest.raises(CkptError) as error:
        call(model, str(path))
    assert named in error.value.message
    assert error.value.hint


def test_names_of_a_live_optimizer(tmp_path: Path) -> None:
    path = tmp_path / "names.json"
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    groups: list[dict[str, Any]] = [
        {"params": model[1].parameters()},
        {"params": model[0].parameters(), "lr": 0.5},
    ]
    optimizer = torch.optim.AdamW(groups)
    ckpttool.save_names(model, path, optimizer=optimizer)  # type: ignore[arg-type]
    ckpttool.check_names(model, path, optimizer=optimizer)  # type: ignore[arg-type]
    other = torch.optim.AdamW(model.parameters())
    with pytest.raises(Refused, match="changed since"):
        ckpttool.check_names(model, path, optimizer=other)  # type: ignore[arg-type]


def test_the_hint_for_a_live_optimizer_is_a_function_that_works() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with pytest.raises(CkptError, match="object belongs to") as error:
        ckpttool.trace(build, optimizer=optimizer)
    _, _, function = (error.value.hint or "").partition("as in ")
    names = ckpttool.trace(build, optimizer=eval(function, {"torch": torch}))
    assert names.to_json()["optimizer_groups"][0]["lr"] == 0.5
