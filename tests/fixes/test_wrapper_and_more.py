"""A wrapper and another difference together: the fix is as complete as without the wrapper, and it
loads strictly.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from command import Run, fixes_in


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def weight_norm() -> nn.Module:
    model: Any = plain()
    nn.utils.parametrizations.weight_norm(model[0])
    return model


def old_weight_norm() -> nn.Module:
    model: Any = plain()
    nn.utils.weight_norm(model[0])
    return model


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(4, 2)


class Separate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Module()
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            self.attn.add_module(name, nn.Linear(4, 4))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


class Renamed(nn.Module):
    """The same as `plain`, under other names."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 4), nn.Linear(4, 2)


class FirstKey(Tied):
    """Save one of the tied names only."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        state.pop(next(key for key in state if key.endswith("head.weight")))
        return state


DIFFERENCES: list[tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = [
    (weight_norm, old_weight_norm),
    (old_weight_norm, weight_norm),
    (Fused, Separate),
    (Separate, Fused),
    (Tied, Tied),
    (FirstKey, Tied),
    (plain, Renamed),
]
WRAPPERS = {
    "ddp": "module.",
    "compile": "_orig_mod.",
    "both": "_orig_mod.module.",
    "opacus": "_module.",
}


def fixed(run: Run, path: Path, model: str) -> Path | None:
    """Return what the complete fix of a diff writes; None if there is none."""
    done = run("diff", path, "--model", model, "--format", "json")
    assert done.status == 1
    if not done.data["fix"] or not done.data["fix"][-1]["complete"]:
        return None
    for command in fixes_in(done.data):
        words = shlex.split(command)[1:]
        assert run(*words).status == (1 if words[0] == "diff" else 0), command
    return Path(words[words.index("-o") + 1])


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(("old", "new"), DIFFERENCES, ids=lambda build: build.__name__)
def test_fix_of_a_wrapped_checkpoint(
    old: Callable[[], nn.Module],
    new: Callable[[], nn.Module],
    wrapper: str,
    tmp_path: Path,
    run: Run,
) -> None:
    model, state = f"{__file__}:{new.__name__}", dict(old().state_dict())
    torch.save(
        {f"{WRAPPERS[wrapper]}{key}": value for key, value in state.items()},
        tmp_path / "wrapped.pt",
    )
    path = fixed(run, tmp_path / "wrapped.pt", model)
    assert path is not None
    result = torch.load(path, weights_only=True)
    new().load_state_dict(result)
    size = sum(
        tensor.numel() for tensor in {id(tensor): tensor for tensor in state.values()}.values()
    )
    assert sum(tensor.numel() for key, tensor in result.items() if key != "head.weight") <= size
