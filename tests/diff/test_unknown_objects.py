"""Tensors of a class that no safe loader creates are not said to load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from command import Run, notes_in

MODEL = "import torch\ndef Net():\n    return torch.nn.Linear(2, 2)\n"


class Packed(torch.Tensor):
    content: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Packed:
        packed = torch.Tensor._make_wrapper_subclass(cls, inner.shape)
        packed.content = inner
        return packed

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any) -> Any:
        raise NotImplementedError(function)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return Packed, (self.content,)


@pytest.mark.parametrize("others", [{"more": torch.ones(1)}, {}])
def test_a_tensor_of_an_unknown_class(
    others: dict[str, Any], tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m.py").write_text(MODEL)
    torch.save({"weight": Packed(torch.ones(2, 2)), "bias": torch.ones(2), **others}, "a.pt")
    done = run("diff", "--model", "m.py:Net", "a.pt", "--format", "json")
    if not others:
        assert done.status == 2
        return
    assert done.status == 1
    statuses = {entry["left"][0]: entry["status"] for entry in done.data["entries"]}
    assert statuses == {"weight": "shape", "bias": "same", "more": "unexpected"}
    assert not any("ckpttool" in note for note in notes_in(done.data))
