"""Remaps of one submodule or of trainable parameters, with torch's get_model_state_dict as the
oracle.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.optim.swa_utils import AveragedModel

import optimizer_models as models
from command import Run, main
from optimizer_support import same
from wrapped_ranks import Net, net, wrap

MODEL = ("--model", "wrapped_ranks:Net")


def narrowed(state: dict, tmp_path: Path, *options: str) -> dict:
    torch.save(state, tmp_path / "model.pt")
    out = ("-o", str(tmp_path / "out.pt"), "--force")
    assert main(["remap", str(tmp_path / "model.pt"), *options, *out]) == 0
    return torch.load(tmp_path / "out.pt")


@pytest.mark.parametrize("options", [(), MODEL])
@pytest.mark.parametrize("form", ["plain", "compile", "dp", "dp(compile)"])
def test_selected_submodule_equals_its_own_state_dict(
    form: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    state = wrap(form, net(0)).state_dict()
    found = narrowed(state, tmp_path, *options, "--select", "block")
    assert same(dict(found), dict(net(0).block.state_dict()))
    if not options:
        (prefix,) = {key.partition("block")[0] for key in state if "block" in key}
        assert same(dict(narrowed(state, tmp_path, "--select", f"{prefix}block")), dict(found))
    Net().block.load_state_dict(found)


def test_wrapper_of_the_submodule_is_kept(tmp_path: Path) -> None:
    state = wrap("dp, block: compile", net(0)).state_dict()
    found = narrowed(state, tmp_path, "--select", "block")
    assert list(found) == list(wrap("block: compile", net(0)).block.state_dict())
    found = narrowed(state, tmp_path, "--select", "block", "--to", "serialized")
    assert list(found) == list(Net().block.state_dict())


def test_a_submodule_in_another_wrapper(tmp_path: Path) -> None:
    found = narrowed(
        wrap("compile", net(0)).state_dict(), tmp_path, "--select", "block", "--to", "dp"
    )
    wrap("dp", net(1).block).load_state_dict(found)


@pytest.mark.parametrize("options", [(), ("--select", "block")])
def test_averaging_counter_is_kept_with_the_average(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    """A submodule is a separate model, whose average has its own counter."""
    average = torch.optim.swa_utils.AveragedModel(net(0))
    average.n_averaged += 7
    found = narrowed(average.state_dict(), tmp_path, *options, "--to", "averaged")
    assert next(iter(found)) == "n_averaged"
    found = narrowed(average.state_dict(), tmp_path, *options, "--to", "ddp")
    assert "n_averaged" not in found


KEPT = ("--select", "block", "--rule", "{x*} => block.{x*}")


def test_rule_restores_the_prefix_like_keep_submodule_prefixes(tmp_path: Path) -> None:
    model = net(0)
    state = wrap("compile", net(0)).state_dict()
    kept = narrowed(state, tmp_path, *KEPT, "--to", "serialized")
    bare_names = StateDictOptions(keep_submodule_prefixes=False)
    with warnings.catch_warnings():  # `submodules` is deprecated
        warnings.simplefilter("ignore")
        expected = get_model_state_dict(model, submodules={model.block})
        bare = get_model_state_dict(model, submodules={model.block}, options=bare_names)
    assert same(dict(kept), expected)
    assert same(dict(narrowed(state, tmp_path, "--select", "block")), bare)
    kept = narrowed(state, tmp_path, *KEPT)
    assert list(kept) == list(expected)


def test_user_module_named_like_a_wrapper(tmp_path: Path) -> None:
    model = nn.ModuleDict({"module": nn.ModuleDict({"a": nn.Linear(1, 1)}), "a": nn.Linear(1, 1)})
    found = narrowed(nn.DataParallel(model).state_dict(), tmp_path, "--select", "module.a")
    assert same(dict(found), dict(model.module.a.state_dict()))


def test_unknown_submodule_is_an_error(tmp_path: Path, run: Run) -> None:
    torch.save(Net().state_dict(), tmp_path / "model.pt")
    for name in ("blo", "scale", "block.0.weight", "", "module.block"):
        done = run("remap", tmp_path / "model.pt", "--select", name, "-o", tmp_path / "out.pt")
        assert (done.status, f"no key is below {name!r}" in done.err) == (1, True)
        assert "scale, embed, block, head" in done.err


@pytest.mark.parametrize("to", ["serialized", "runtime", "ddp"])
def test_trainable_only_equals_torchs_ignore_frozen_params(to: str, tmp_path: Path) -> None:
    model = models.Frozen()
    found = narrowed(
        model.state_dict(),
        tmp_path,
        "--model",
        "optimizer_models:Frozen",
        "--trainable-only",
        "--to",
        to,
    )
    expected = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    prefix = "module." if to == "ddp" else ""
    assert same(dict(found), {prefix + key: value for key, value in expected.items()})
    assert len(found) < len(model.state_dict())


class Renamed(nn.Module):
    """Save two weights under each other's names; only the first is trainable."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (
            nn.Parameter(torch.ones(2)),
            nn.Parameter(torch.zeros(2), requires_grad=False),
        )
        self.register_state_dict_post_hook(_exchange)
        self.register_load_state_dict_pre_hook(_exchange)


def _exchange(_module: nn.Module, state: dict, prefix: str, *_more: object) -> None:
    a, b = prefix + "a", prefix + "b"
    state[a], state[b] = state[b], state[a]


@pytest.mark.parametrize(("to", "kept"), [("serialized", "b"), ("runtime", "a")])
def test_trainable_is_a_property_of_the_parameter_not_of_its_key(
    to: str, kept: str, tmp_path: Path
) -> None:
    options = ("--model", f"{__file__}:Renamed", "--trainable-only", "--to", to)
    assert same(dict(narrowed(Renamed().state_dict(), tmp_path, *options)), {kept: torch.ones(2)})


def test_trainable_only_keeps_buffers(tmp_path: Path) -> None:
    assert "scale" in narrowed(
        Net().state_dict(), tmp_path, *MODEL, "--trainable-only", "--to", "serialized"
    )


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        (("--trainable-only",), "--model MODEL"),
        (("--like", "other.pt", "--to", "ddp"), "leave one of them out"),
    ],
)
def test_incomplete_or_conflicting_options_are_errors(
    options: tuple[str, ...], hint: str, run: Run
) -> None:
    done = run("remap", "model.pt", *options, "-o", "out.pt")
    assert (done.status, hint in done.err) == (2, True)


class WithAverage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)
        self.ema = AveragedModel(nn.Sequential(nn.Linear(2, 2)))


@pytest.mark.parametrize("form", ["serialized", "ddp", "averaged"])
def test_wrappers_around_the_selected_submodule_are_replaced(tmp_path: Path, form: str) -> None:
    """The oracle: the submodule in that wrapper loads the keys."""
    part = nn.Sequential(nn.Linear(2, 2))
    wrapped = {"serialized": part, "ddp": nn.DataParallel(part), "averaged": AveragedModel(part)}[
        form
    ]
    state = narrowed(WithAverage().state_dict(), tmp_path, "--select", "ema", "--to", form)
    wrapped.load_state_dict(state)
