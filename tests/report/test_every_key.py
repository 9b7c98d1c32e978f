"""With ``--all``, every format of every command prints each key."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from command import Run

KEYS = [f"layers.{at}.{name}" for at in range(60) for name in ("wq", "wk")]
LINES = {
    "inspect": ["inspect", "b.pt"],
    "two": ["diff", "a.pt", "b.pt"],
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    for name, state in (
        ("a", {}),
        ("b", {key: torch.zeros(at % 7) for at, key in enumerate(KEYS)}),
        ("c", {}),
    ):
        torch.save({"w": torch.ones(2), **state}, folder / f"{name}.pt")
    return folder


@pytest.mark.parametrize("format", ["text", "markdown", "github", "html", "json"])
@pytest.mark.parametrize("line", LINES)
def test_every_key_is_shown(
    line: str, format: str, files: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    shown = run(*LINES[line], "--all", "--format", format)
    assert shown.status < 2
    text = shown.out.replace("<wbr>", "")  # line break opportunities in names
    assert [key for key in KEYS if key not in text] == []
