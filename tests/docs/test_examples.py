"""Run the Python code of each documentation page, from top to bottom, in an empty folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from places import DOCS, ROOT

PAGES = {"live.md": DOCS / "live.md", "api.md": DOCS / "api.md", "README.md": ROOT / "README.md"}


@pytest.mark.parametrize("name", PAGES)
def test_examples_of_the_page_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGES[name].read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    scope: dict[str, Any] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, name, "exec"), scope)
