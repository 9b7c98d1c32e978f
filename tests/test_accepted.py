"""Accepted differences need a reason and are counted; any other difference still fails."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckpttool
from ckpttool import CkptError
from command import Run
from surroundings import limited

MODEL = """
import torch
from torch import nn
def build(): return nn.ModuleDict({"head": nn.Linear(2, 2), "body": nn.Linear(2, 2)})
def wide(): return nn.ModuleDict({"head": nn.Linear(2, 2), "body": nn.Linear(3, 2)})
class Strict(nn.Linear):
    def __init__(self): super().__init__(2, 2)
    def _load_from_state_dict(self, state, prefix, meta, strict, missing, unexpected, errors):
        super()._load_from_state_dict(state, prefix, meta, strict, missing, unexpected, errors)
        errors.append("written by another version")
"""
HEAD = "missing head.* # the head is retrained"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    body = {"body.weight": torch.ones(2, 2), "body.bias": torch.ones(2)}
    torch.save(body, "body.pt")
    torch.save({**body, "body.bias": torch.ones(2).half()}, "half.pt")
    torch.save({"weight": torch.ones(2, 2)}, "weight.pt")
    return tmp_path


def test_ignored_differences_are_counted_and_not_identical(run: Run) -> None:
    line = ("diff", "body.pt", "--model", "model.py:build")
    assert run(*line).status == 1
    done = run(*line, "--ignore", HEAD)
    assert done.status == 0
    answer = "body.pt lacks 2 keys of model.py:build; accepted (2 ignored)"
    assert done.out.splitlines()[0] == answer
    assert "the head is retrained" in done.out
    assert done.out.count("2 keys missing from body.pt") == 1
    data = run(*line, "--ignore", HEAD, "--format", "json").data
    assert (data["identical"], data["accepted"], data["summary"]) == (
        False,
        True,
        {"same": 2, "missing": 2},
    )
    assert data["ignored"] == {"missing": 2}
    assert {entry.get("ignored") for entry in data["entries"]} == {None, "the head is retrained"}
    assert run(*line, "--ignore", "missing head.weight # one of two").status == 1
    assert run(*line, "--ignore", "shape head.* # another status").status == 1


def test_ignore_file_accepts_differences_and_reports_unused_entries(run: Run, folder: Path) -> None:
    (folder / "allow.txt").write_text(
        f"# known differences\n\n{HEAD}\nshape neck.{{x*}} # removed in 2.0\n"
    )
    line = ("diff", "body.pt", "--model", "model.py:build", "--ignore-file", "allow.txt")
    done = run(*line)
    assert done.status == 0
    assert "unused ignore entry: shape neck.{x*} # removed in 2.0 (allow.txt:4)" in done.err
    assert run(*line, "--fail-on-unused").status == 1
    assert run("diff", "body.pt", "body.pt", "--ignore-file", "allow.txt").status == 0
    assert (
        run("diff", "body.pt", "body.pt", "--ignore-file", "allow.txt", "--fail-on-unused").status
        == 1
    )


@pytest.mark.parametrize(
    "text",
    [
        "missing head.*",
        "head.* # no status",
        "same head.* # the same",
        "missing",
        "missing re:( # odd",
        "x # y",
    ],
)
def test_entry_without_a_status_or_reason_is_an_error(run: Run, folder: Path, text: str) -> None:
    (folder / "allow.txt").write_text(f"{HEAD}\n{text}\n")
    done = run("diff", "body.pt", "body.pt", "--ignore-file", "allow.txt")
    assert done.status == 2
    assert "allow.txt:2" in done.err
    assert run("diff", "body.pt", "body.pt", "--ignore", text).status == 2
    assert run("diff", "body.pt", "body.pt", "--ignore-file", "none.txt").status == 2


def test_oversized_ignore_file_names_the_limit() -> None:
    line = "missing * # removed\n"
    Path("ignored.txt").write_text(line)
    for limit, status in ((len(line), 0), (len(line) - 1, 2)):
        refused = (
            pytest.raises(CkptError, match=r"the limit rules_bytes is") if status else nullcontext()
        )
        with limited(rules_bytes=limit), refused:
            ckpttool.diff("body.pt", "body.pt", ignore_file="ignored.txt")


def test_fail_on_restricts_which_statuses_fail(run: Run) -> None:
    assert run("diff", "body.pt", "half.pt").status == 1
    done = run("diff", "body.pt", "half.pt", "--fail-on", "missing,unexpected,shape")
    assert (done.status, "accepted (1 not in --fail-on)" in done.out) == (0, True)
    assert run("diff", "body.pt", "half.pt", "--fail-on", "dtype").status == 1
    done = run("diff", "body.pt", "half.pt", "--fail-on", "dtpye")
    assert (done.status, "unknown status 'dtpye'" in done.err) == (2, True)


@pytest.mark.parametrize("fail_on", [None, "missing", "unexpected", "dtype,value", "missing,shape"])
def test_what_torch_refuses_without_strict_always_fails(run: Run, fail_on: str | None) -> None:
    body = torch.load("body.pt")
    files = {
        "shape": {**body, "head.weight": torch.ones(3, 2), "head.bias": torch.ones(2)},
        "missing": body,
        "unexpected": {
            **body,
            "head.weight": torch.ones(2, 2),
            "head.bias": torch.ones(2),
            "more": torch.ones(1),
        },
        "shape, missing": {**body, "head.weight": torch.ones(3, 2)},
    }
    scope: dict[str, Any] = {}
    exec(MODEL, scope)
    words = () if fail_on is None else ("--fail-on", fail_on)
    for name, state in files.items():
        torch.save(state, "state.pt")
        status = run("diff", "state.pt", "--model", "model.py:build", *words).status
        try:
            scope["build"]().load_state_dict(state, strict=False)
        except RuntimeError:
            assert status == 1, name
        else:
            assert status == int(fail_on is None or name in fail_on.split(",")), name
    accepted = ("--ignore", "shape head.weight # another number of classes", "--ignore", HEAD)
    assert run("diff", "state.pt", "--model", "model.py:build", *words, *accepted).status == 0


@pytest.mark.parametrize("line", [["names.json", "--model", "model.py:wide"], ["old.pt", "new.pt"]])
def test_a_shape_fails_whatever_is_compared(run: Run, line: list[str]) -> None:
    scope: dict[str, Any] = {}
    exec(MODEL, scope)
    for build, path in (("build", "old.pt"), ("wide", "new.pt")):
        torch.save(scope[build]().state_dict(), path)
    assert run("trace", "model.py:build", "-o", "names.json").status == 0
    assert run("diff", *line, "--fail-on", "missing").status == 1
    accepted = ("--ignore", "shape body.weight # more features")
    assert run("diff", *line, "--fail-on", "missing", *accepted).status == 0
    with pytest.raises(RuntimeError, match="size mismatch"):
        scope["wide"]().load_state_dict(torch.load("old.pt"), strict=False)


def test_error_raised_by_the_model_is_not_accepted(run: Run) -> None:
    """A key is missing, and the model's own loading code also reports an error."""
    line = (
        "diff",
        "weight.pt",
        "--model",
        "model.py:Strict",
        "--ignore",
        "missing bias # reinitialized",
    )
    assert run(*line).status == 1
    assert run(*line, "--fail-on", "shape").status == 1


def test_exit_zero_and_quiet(run: Run) -> None:
    assert run("diff", "body.pt", "half.pt", "--exit-zero").status == 0
    assert run("diff", "body.pt", "none.pt", "--exit-zero").status == 2
    quiet = run("diff", "body.pt", "half.pt", "--quiet", "--report", "r.json")
    assert quiet == (1, "", "")
    assert Path("r.json").exists()
    assert run("diff", "body.pt", "none.pt", "-q").err.startswith("error: ")


KEYS = st.sampled_from(["a.w", "a.b", "b.w"])
STATUSES = ("missing", "unexpected", "shape", "dtype")


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(KEYS, st.sampled_from(("same", *STATUSES))),
    st.sets(st.sampled_from(STATUSES)),
    st.sets(KEYS),
)
def test_only_accepted_differences_pass(
    statuses: dict[str, str], fail: set[str], keys: set[str]
) -> None:
    left, right = {"same": torch.ones(1)}, {"same": torch.ones(1)}
    others = {"shape": torch.ones(3), "dtype": torch.ones(2).half()}
    for key, status in statuses.items():
        if status != "missing":
            left[key] = torch.ones(2)
        if status != "unexpected":
            right[key] = others.get(status, torch.ones(2))
    done = ckpttool.diff(
        left,
        right,
        ignore=[f"{','.join(STATUSES)} {key} # why" for key in keys],
        fail_on=",".join(sorted(fail)) or None,
    )
    differing = {key for key, status in statuses.items() if status != "same"}
    # torch refuses another shape even with strict=False
    failing = {key for key in differing if not fail or statuses[key] in {*fail, "shape"}}
    assert done.passes is (failing <= keys)
    assert done.identical is (not differing)


def test_every_ignore_file_counts(run: Run, folder: Path) -> None:
    line = ("diff", "body.pt", "--model", "model.py:build")
    files = []
    for key in ("head.weight", "head.bias"):
        path = folder / f"{key}.txt"
        path.write_text(f"missing {key} # the head is retrained\n")
        files.append(("--ignore-file", path.name))
    assert run(*line, *files[0], *files[1]).status == 0
    assert run(*line, *files[0]).status == 1
    assert run(*line, *files[1]).status == 1
