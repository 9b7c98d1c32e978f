"""GitHub annotations: they list keys, show errors, and give the reason that a diff fails."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from command import Run

HOOKED = """import torch
from torch import nn


class Net(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self._register_state_dict_hook(self.rename)

    @staticmethod
    def rename(module, state, prefix, metadata):
        state[prefix + "kernel"] = state.pop(prefix + "weight")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    state = {f"w{at}": torch.zeros(at + 1) for at in range(30)}
    torch.save(state, "old.pt")
    torch.save({key: value + 1 for key, value in state.items()}, "new.pt")


@pytest.mark.parametrize(
    "line", [("diff", "old.pt", "nope.pt"), ("inspect", "nope.pt"), ("diff", "old.pt")]
)
def test_an_error_is_an_annotation(
    run: Run, monkeypatch: pytest.MonkeyPatch, line: tuple[str, ...]
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    done = run(*line, "--format", "github")
    assert done.status == 2
    error, hint = done.err.splitlines()
    title = error.removeprefix("error: ").replace(":", "%3A")
    assert done.out == f"::error title={title}::{hint}\n"


def test_an_annotation_lists_at_most_ten_keys(run: Run) -> None:
    done = run("diff", "old.pt", "new.pt", "--values", "--format", "github")
    first = done.out.splitlines()[0]
    assert first.startswith(
        "::error title=old.pt and new.pt differ%3A 30 tensors with other values::value: w0%0Avalue: w1%0A"
    )
    assert (first.count("value: "), "... 20 more" in first) == (10, True)
    same = run("diff", "old.pt", "old.pt", "--values", "--format", "github")
    assert same.out.startswith(
        "::notice title=old.pt and old.pt have the same keys%2C shapes%2C dtypes and values::old.pt"
    )


def test_an_annotation_says_the_shapes_of_repeated_layers_once(run: Run) -> None:
    torch.save({f"layers.{at}.weight": torch.zeros(2, 3) for at in range(12)}, "small.pt")
    torch.save({f"layers.{at}.weight": torch.zeros(2, 4) for at in range(12)}, "large.pt")
    first = run("diff", "small.pt", "large.pt", "--format", "github").out.splitlines()[0]
    assert first.endswith("::shape: layers.{0-11}.weight: [2, 3] instead of [2, 4]")


def test_an_annotation_points_to_the_line_of_the_hook(run: Run) -> None:
    Path("net.py").write_text(HOOKED)
    done = run("diff", "--model", "net.py:Net", "--format", "github")
    line = next(at for at, text in enumerate(HOOKED.splitlines(), 1) if "def rename" in text)
    (annotation,) = (text for text in done.out.splitlines() if text.startswith("::error file="))
    assert (
        annotation.startswith(f"::error file=net.py,line={line},title=net.py%3ANet saves ")
        or f",line={line - 1}," in annotation
    )
    assert "renamed: kernel" in annotation


def test_the_headline_gives_the_reason_for_a_failure(run: Run) -> None:
    ignored = ("--ignore", "value w* # trained", "--ignore", "value other # gone")
    done = run("diff", "old.pt", "new.pt", "--values", *ignored, "--fail-on-unused")
    differ = "old.pt and new.pt differ: 30 tensors with other values"
    unused = "1 unused ignore entry (--fail-on-unused)"
    assert (done.status, done.out.splitlines()[0]) == (
        1,
        f"{unused}; {differ}; accepted (30 ignored)",
    )
    assert run("diff", "old.pt", "new.pt", "--values", *ignored).status == 0
    done = run("diff", "old.pt", "new.pt", "--values", *ignored[2:], "--fail-on-unused")
    assert done.out.splitlines()[0] == differ
    done = run("diff", "old.pt", "old.pt", *ignored, "--fail-on-unused")
    assert done.out.splitlines()[0] == (
        "2 unused ignore entries (--fail-on-unused); old.pt and old.pt have the same keys, shapes"
        " and dtypes"
    )
