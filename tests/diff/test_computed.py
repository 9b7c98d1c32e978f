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

from ckpttool.diffing.causes import Cause, Code
from ckpttool.diffing.result import Entry, only_left, only_right
from ckpttool.diffing.sections import explain_computed, parts
from ckpttool.fixes.commands import PART
from command import Run, fixes_in, notes_in

torch.set_num_threads(1)
X = torch.rand(3, 4)


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


def test_a_renamed_key_is_not_called_computed() -> None:
    """Left `w` is right `x`; only right `w`, another tensor, is computed from `w_g` and `w_v`."""
    renamed = Entry("renamed", ("w",), ("x",), Cause(Code.HOOK, ("hides `a`",)))
    result = explain_computed(
        [renamed, only_left("w_g"), only_left("w_v"), only_right("w"), only_right("other")]
    )
    assert [entry.has(Code.PART, Code.COMPUTED_FROM) for entry in result] == [
        False,
        True,
        True,
        True,
        False,
    ]


def test_part_names_match_torch() -> None:
    for name, build in MODELS.items():
        state = build().state_dict()
        of = {parameter for parameter, _ in parts(state).values()}
        assert of == (set() if name == "plain" else {"0.weight", "2.weight"})
        assert set(state) - set(parts(state)) <= set(plain().state_dict())


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
            assert any(PART in note for note in notes_in(answer.data)), command
            continue
        assert torch.allclose(target.eval()(X), source.eval()(X)), command
