"""Suggestions that could lose tensors: they are not made, or they write a format that can hold the tensors."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import small_models
from command import Run, fixes_in, notes_in
from places import SUPPORT


def test_keys_without_a_counterpart_get_no_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).state_dict(), "two.pt")
    torch.save(nn.Sequential(nn.Linear(4, 4)).state_dict(), "one.pt")
    for words in (("two.pt", "one.pt"), ("two.pt", "one.pt", "--values")):
        done = run("diff", *words, "--format", "json")
        found = done.data
        assert done.status == 1
        assert found["summary"]["unexpected"] == 2
        assert not any("1.weight" in line or "--drop" in line for line in fixes_in(found))
        assert any("1.weight, 1.bias" in note and "no fix is suggested" in note for note in notes_in(found))


def test_command_for_tied_names_writes_a_format_that_can_hold_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    state = small_models.tied().state_dict()
    torch.save(state, "tied.pt")
    save_file({key: value for key, value in state.items() if key != "head.weight"}, "tied.safetensors")
    for left, right in (("tied.safetensors", "tied.pt"), ("tied.pt", "tied.safetensors")):
        done = run("diff", left, right, "--format", "json")
        assert done.status == 1
        (line,) = fixes_in(done.data)
        parts = [{"MODEL": f"{SUPPORT}/small_models.py:tied"}.get(word, word) for word in shlex.split(line)[1:]]
        assert run(*parts).status == 0
        assert run("diff", parts[parts.index("-o") + 1], right).status == 0


REFUSED = {
    "another model": (("remap", "two.pt", "--model", "torch.nn:Linear(in_features=4, out_features=4)",
                          "-o", "out.pt"), "no name of this model"),
    "another model's": (("remap", "two.pt", "--model", "m.py:two", "--to-model", "m.py:one", "-o", "out.pt"), "do not"),
    "format that holds tensors only": (("remap", "run.pt", "-o", "out.safetensors"), "holds tensors only"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_hint_of_a_refusal_does_not_suggest_drop(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m.py").write_text(
        "from torch import nn\ntwo = lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))\n"
        "one = lambda: nn.Sequential(nn.Linear(4, 4))\n"
    )
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    torch.save(model.state_dict(), "two.pt")
    torch.save({"model": model.state_dict(), "ema": model.state_dict(), "epoch": 3}, "run.pt")
    words, message = REFUSED[name]
    done = run(*words)
    assert (done.status, message in done.err) == (1, True)
    assert "hint:" in done.err
    assert "--drop" not in done.err
