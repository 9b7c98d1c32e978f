"""Parameters that one side computes from others; the oracle is what the loaded model computes."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from command import Run, fixes_in, notes_in

torch.set_num_threads(1)
X = torch.rand(3, 4)
FIXES_SOME = "the suggested command fixes only some of the differences"


def plain() -> nn.Module:
    """Return the model that each of the others computes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)).eval()


def _change_both_layers(change: Callable[[nn.Module], object]) -> nn.Module:
    model = plain()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # old files use torch's deprecated forms
        change(model.get_submodule("0"))
        change(model.get_submodule("2"))
    return model


def weight_norm() -> nn.Module:
    return _change_both_layers(nn.utils.weight_norm)


def parametrized_weight_norm() -> nn.Module:
    return _change_both_layers(parametrizations.weight_norm)


def spectral_norm() -> nn.Module:
    return _change_both_layers(nn.utils.spectral_norm)


def parametrized_spectral_norm() -> nn.Module:
    return _change_both_layers(parametrizations.spectral_norm)


def pruned() -> nn.Module:
    return _change_both_layers(lambda layer: prune.l1_unstructured(layer, "weight", 0.5))


MODELS = {
    build.__name__: build
    for build in (
        plain,
        weight_norm,
        parametrized_weight_norm,
        spectral_norm,
        parametrized_spectral_norm,
        pruned,
    )
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils:FutureWarning")
@pytest.mark.parametrize(
    ("saved_kind", "target_kind"), [pair for pair in product(MODELS, MODELS) if pair[0] != pair[1]]
)
def test_a_printed_command_produces_the_same_model(
    saved_kind: str, target_kind: str, tmp_path: Path, run: Run
) -> None:
    """If there is no such command, the reason is printed."""
    source, target = MODELS[saved_kind](), MODELS[target_kind]()
    torch.save(source.state_dict(), tmp_path / "saved.pt")
    torch.save(target.state_dict(), tmp_path / "wanted.pt")
    answer = run("diff", tmp_path / "saved.pt", tmp_path / "wanted.pt", "--format", "json")
    assert answer.status == 1
    if "plain" in (saved_kind, target_kind):
        assert not fixes_in(answer.data)
        assert all(
            entry["code"] in ("part", "computed-from")
            for entry in answer.data["entries"]
            if entry["status"] != "same"
        )
    for command in fixes_in(answer.data):
        words = shlex.split(command)
        assert run(*words[1:]).status == 0
        out = torch.load(words[words.index("-o") + 1])
        try:
            target.load_state_dict(out)
        except RuntimeError:
            assert any(FIXES_SOME in note for note in notes_in(answer.data)), command
            continue
        assert torch.allclose(target.eval()(X), source.eval()(X)), command
