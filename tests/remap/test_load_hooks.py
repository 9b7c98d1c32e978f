"""Checkpoints of earlier versions of a model, whose keys only a load hook accepts. Oracle: a strict
load by torch.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from command import Run

State = dict[str, Any]


class Base(nn.Module):
    """A network whose weights are written under other keys by its earlier versions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.layer = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.layer(self.embed(tokens))))


class Renamed(Base):
    """Its layer was called ``dense``."""

    def __init__(self) -> None:
        super().__init__()
        self._register_load_state_dict_pre_hook(self.read_old)

    def read_old(self, state: State, prefix: str, *_: Any) -> None:
        for key in [key for key in state if key.startswith(f"{prefix}dense.")]:
            state[key.replace("dense", "layer")] = state.pop(key)


class Transposed(Renamed):
    """It saves the weight of its layer transposed, as its earlier version did."""

    def __init__(self) -> None:
        super().__init__()
        self._register_state_dict_hook(self.transpose)

    def transpose(self, _: nn.Module, state: State, prefix: str, *__: Any) -> None:
        state[f"{prefix}layer.weight"] = state[f"{prefix}layer.weight"].t()

    def read_old(self, state: State, prefix: str, *rest: Any) -> None:
        super().read_old(state, prefix, *rest)
        self.transpose(self, state, prefix)


class Normed(Base):
    """`torch.nn.utils.parametrizations.weight_norm` reads what `torch.nn.utils.weight_norm`
    wrote.
    """

    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.layer)


class Split(Base):
    """Its layer was two layers, one after the other."""

    def _load_from_state_dict(self, state: State, prefix: str, *rest: Any) -> None:
        for name in ("weight", "bias"):
            halves = [state.pop(f"{prefix}{half}.{name}", None) for half in ("upper", "lower")]
            if None not in halves:
                state[f"{prefix}layer.{name}"] = torch.cat(halves)
        super()._load_from_state_dict(state, prefix, *rest)


class Forgetful(Renamed):
    """It also drops a key of the earlier version."""

    def read_old(self, state: State, prefix: str, *rest: Any) -> None:
        super().read_old(state, prefix, *rest)
        state.pop(f"{prefix}positions", None)


class ByValue(Renamed):
    """What it makes of the earlier key depends on its values."""

    def read_old(self, state: State, prefix: str, *rest: Any) -> None:
        super().read_old(state, prefix, *rest)
        weight = state[f"{prefix}layer.weight"]
        if weight[0, 0] > 0:
            state[f"{prefix}layer.weight"] = -weight


class Versioned(Base):
    """Version 1 called its layer ``dense``, and wrote half of its weight."""

    _version = 2

    def _load_from_state_dict(self, state: State, prefix: str, metadata: State, *rest: Any) -> None:
        if (metadata.get("version") or 1) < 2:
            state[f"{prefix}layer.weight"] = 2 * state.pop(f"{prefix}dense.weight")
            state[f"{prefix}layer.bias"] = state.pop(f"{prefix}dense.bias")
        super()._load_from_state_dict(state, prefix, metadata, *rest)


class Doubled(Base):
    """Version 1 wrote half of the layer's weight under the same key."""

    _version = 2

    def _load_from_state_dict(self, state: State, prefix: str, metadata: State, *rest: Any) -> None:
        if (metadata.get("version") or 1) < 2:
            state[f"{prefix}layer.weight"] = 2 * state[f"{prefix}layer.weight"]
        super()._load_from_state_dict(state, prefix, metadata, *rest)


class AlwaysDoubled(Base):
    """It loads twice what it saves."""

    def _load_from_state_dict(self, state: State, prefix: str, *rest: Any) -> None:
        state[f"{prefix}layer.weight"] = 2 * state[f"{prefix}layer.weight"]
        super()._load_from_state_dict(state, prefix, *rest)


def renamed(state: State) -> State:
    return {key.replace("layer", "dense"): value for key, value in state.items()}


def normed(state: State) -> State:
    ends = {
        "parametrizations.weight.original0": "weight_g",
        "parametrizations.weight.original1": "weight_v",
    }
    return {
        key.replace(end, ends.get(end, end)): value
        for key, value in state.items()
        for end in [key[6:]]
    }


def split(state: State) -> State:
    parts = {
        f"{half}.{name}": part.clone()
        for name in ("weight", "bias")
        for half, part in zip(("upper", "lower"), state[f"layer.{name}"].chunk(2))
    }
    return {**{key: value for key, value in state.items() if not key.startswith("layer")}, **parts}


OLD: dict[type[nn.Module], Callable[[State], State]] = {
    Renamed: renamed,
    Transposed: renamed,
    Normed: normed,
    Split: split,
}


def trained(model: type[nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    made = model()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_()
    return made


def old_state(model: type[nn.Module]) -> State:
    """Return what an earlier version of the model wrote; the model loads it strictly."""
    state = OLD[model](dict(trained(model).state_dict()))
    assert state.keys() != model().state_dict().keys()
    model().load_state_dict(state)
    return state


def same(actual: State, expected: State) -> bool:
    return actual.keys() == expected.keys() and all(
        torch.equal(actual[key], expected[key]) for key in expected
    )


@pytest.fixture(params=OLD, ids=lambda model: model.__name__)
def model(request: pytest.FixtureRequest) -> type[nn.Module]:
    return request.param


def operand(model: type[nn.Module]) -> str:
    return f"{__file__}:{model.__name__}"


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod."])
def test_old_keys_become_what_the_model_saves_after_it_loads_them(
    prefix: str, model: type[nn.Module], tmp_path: Path, run: Run
) -> None:
    torch.save(
        {prefix + key: value for key, value in old_state(model).items()}, tmp_path / "old.pt"
    )
    out = tmp_path / "new.pt"
    done = run(
        "remap", tmp_path / "old.pt", "--model", operand(model), "--to", "serialized", "-o", out
    )
    assert done.status == 0, done.err
    assert same(torch.load(out), trained(model).state_dict())
    assert "load-hook -> serialized" in done.out
    loaded = torch.load(out)
    assert loaded["embed.weight"].data_ptr() == loaded["head.weight"].data_ptr()


def test_old_keys_become_runtime_names(model: type[nn.Module], tmp_path: Path, run: Run) -> None:
    torch.save(old_state(model), tmp_path / "old.pt")
    out = tmp_path / "new.pt"
    assert (
        run(
            "remap", tmp_path / "old.pt", "--model", operand(model), "--to", "runtime", "-o", out
        ).status
        == 0
    )
    assert same(torch.load(out), dict(trained(model).named_parameters(remove_duplicate=False)))


def test_program_gets_weights_with_old_keys(
    model: type[nn.Module], tmp_path: Path, run: Run
) -> None:
    tokens = torch.tensor([0, 3])
    torch.export.save(torch.export.export(model().eval(), (tokens,)), tmp_path / "program.pt2")
    torch.save(old_state(model), tmp_path / "old.pt")
    given = tmp_path / "program.pt2", tmp_path / "old.pt", "--model", operand(model)
    found = run("diff", *given)
    fix = next(
        line for line in found.out.splitlines() if "fix" in line.partition(":")[0]
    ).partition(": ")[2]
    assert run(*shlex.split(fix)[1:]).status == 0
    swapped = torch.export.load(tmp_path / "program.swapped.pt2").module()
    assert torch.equal(swapped(tokens), trained(model).eval()(tokens))


def test_dtypes_stay_and_the_second_name_of_tied_weights_may_be_absent(
    model: type[nn.Module], tmp_path: Path, run: Run
) -> None:
    state = {key: value.half() for key, value in old_state(model).items() if key != "head.weight"}
    torch.save(state, tmp_path / "old.pt")
    out = tmp_path / "new.pt"
    assert (
        run(
            "remap", tmp_path / "old.pt", "--model", operand(model), "--to", "serialized", "-o", out
        ).status
        == 0
    )
    assert same(torch.load(out), trained(model).half().state_dict())


def test_keys_that_loading_does_not_use_are_refused_with_the_command_that_leaves_them_out(
    tmp_path: Path, run: Run
) -> None:
    torch.save({**old_state(Renamed), "positions": torch.arange(4)}, tmp_path / "old.pt")
    model, out = operand(Forgetful), tmp_path / "new.pt"
    words = "remap", tmp_path / "old.pt", "--model", model, "--to", "serialized", "-o", out
    refused = run(*words)
    assert refused.status == 1
    assert "not used @ positions" in refused.err
    hint = shlex.split(refused.err.partition("hint: leave them out: ")[2])
    places = {"CKPT": str(tmp_path / "old.pt"), "PART": str(tmp_path / "part.pt")}
    assert run(*(places.get(word, word) for word in hint[1:])).status == 0
    assert run("remap", tmp_path / "part.pt", *words[2:]).status == 0
    assert same(torch.load(out), trained(Renamed).state_dict())


def test_loading_that_depends_on_values_is_left_to_the_model(tmp_path: Path, run: Run) -> None:
    torch.save(old_state(Renamed), tmp_path / "old.pt")
    out = tmp_path / "new.pt"
    refused = run(
        "remap", tmp_path / "old.pt", "--model", operand(ByValue), "--to", "serialized", "-o", out
    )
    assert refused.status == 1
    assert "hint: let it load them, and save that: model.load_state_dict(" in refused.err
    assert not out.exists()


def test_version_of_the_file_is_not_written_with_the_keys_of_another_version(
    tmp_path: Path, run: Run
) -> None:
    """A model that loads the output would convert it again."""
    model = trained(Versioned)
    state: Any = model.state_dict()
    state["dense.weight"], state["dense.bias"] = (
        state.pop("layer.weight") / 2,
        state.pop("layer.bias"),
    )
    state._metadata[""]["version"] = 1
    torch.save(state, tmp_path / "old.pt")
    given = tmp_path / "old.pt", "--model", operand(Versioned)
    refused = run("remap", *given, "--to", "serialized", "-o", tmp_path / "new.pt")
    assert refused.status == 1
    assert "version 1, and the model saves version 2" in refused.err
    assert (
        "model.load_state_dict(torch.load(CKPT)); torch.save(model.state_dict(), OUT)"
        in refused.err
    )
    assert run("remap", *given, "--to", "runtime", "-o", tmp_path / "runtime.pt").status == 0
    assert same(
        torch.load(tmp_path / "runtime.pt"), dict(model.named_parameters(remove_duplicate=False))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_diff_pairs_old_keys_with_the_keys_that_the_model_saves(
    dtype: torch.dtype, model: type[nn.Module], tmp_path: Path, run: Run
) -> None:
    """They are no reason for a failure: a load hook accepts them, whatever else differs."""
    state = {key: value.to(dtype) for key, value in old_state(model).items()}
    torch.save(state, tmp_path / "old.pt")
    done = run("diff", tmp_path / "old.pt", "--model", operand(model), "--format", "json")
    found = json.loads(done.out)
    assert done.status == (dtype != torch.float32)
    by_hook = [entry for entry in found["entries"] if entry.get("code") == "load-hook"]
    assert {
        key for entry in by_hook for key in entry["left"]
    } == state.keys() - model().state_dict().keys()
    assert {
        key for entry in by_hook for key in entry["right"]
    } == model().state_dict().keys() - state.keys()
    assert {"missing", "unexpected"}.isdisjoint(found["summary"])
    assert {entry["code"] for entry in found["unfixed"]} <= {"dtype"}


def test_diff_lists_a_key_with_another_name_once_even_if_saving_computes_it(
    tmp_path: Path, run: Run
) -> None:
    torch.save(old_state(Transposed), tmp_path / "old.pt")
    done = run("diff", tmp_path / "old.pt", "--model", operand(Transposed), "--format", "json")
    differing = [
        entry
        for entry in json.loads(done.out)["entries"]
        if entry["status"] not in ("same", "alias")
    ]
    assert [(entry["status"], entry["left"], entry["right"]) for entry in differing] == [
        ("renamed", ["dense.weight"], ["layer.weight"]),
        ("renamed", ["dense.bias"], ["layer.bias"]),
    ]


@pytest.mark.parametrize("equal", [True, False])
def test_diff_reports_values_that_a_load_hook_replaces_by_others(
    equal: bool, tmp_path: Path, run: Run
) -> None:
    """With both keys in the file a strict load succeeds, and the values under the model's own key
    are lost.
    """
    state = old_state(Renamed)
    state["layer.weight"] = state["dense.weight"].clone() if equal else torch.ones(4, 4)
    net = Renamed()
    net.load_state_dict(dict(state))
    assert torch.equal(net.layer.weight, state["layer.weight"]) == equal
    torch.save(state, tmp_path / "both.pt")
    done = run("diff", tmp_path / "both.pt", "--model", operand(Renamed), "--format", "json")
    found = {tuple(entry["left"]): entry for entry in json.loads(done.out)["entries"]}
    assert (done.status, found["layer.weight",].get("code")) == (
        (0, None) if equal else (1, "lost-value")
    )
    drop = shlex.split(f"remap {tmp_path / 'both.pt'} --drop layer.weight -o {tmp_path / 'one.pt'}")
    assert run(*drop).status == 0
    assert run("diff", tmp_path / "one.pt", "--model", operand(Renamed)).status == 0


@pytest.mark.parametrize("version", [1, 2])
def test_values_that_a_load_hook_computes_are_not_called_the_same(
    version: int, tmp_path: Path, run: Run
) -> None:
    state = trained(Doubled).state_dict()
    torch.save(state if version == 2 else dict(state), tmp_path / "a.pt")
    net = Doubled()
    net.load_state_dict(torch.load(tmp_path / "a.pt"))
    assert torch.equal(net.layer.weight, state["layer.weight"]) == (version == 2)
    done = run("diff", tmp_path / "a.pt", "--model", operand(Doubled), "--format", "json")
    found = {entry["left"][0]: entry["status"] for entry in json.loads(done.out)["entries"]}
    assert done.status == 0
    assert found == dict.fromkeys(state, "same") | (
        {} if version == 2 else {"layer.weight": "transformed"}
    )


def test_model_that_does_not_load_what_it_saves_is_reported(tmp_path: Path, run: Run) -> None:
    """The values in the file are those that the model had; loading gives others."""
    state = trained(AlwaysDoubled).state_dict()
    torch.save(state, tmp_path / "a.pt")
    torch.export.save(
        torch.export.export(AlwaysDoubled(), (torch.tensor([0, 3]),)), tmp_path / "a.pt2"
    )
    done = run("diff", tmp_path / "a.pt", "--model", operand(AlwaysDoubled), "--format", "json")
    entries = json.loads(done.out)["entries"]
    assert [entry["left"] for entry in entries if entry["status"] != "same"] == [["layer.weight"]]
    swapped = (
        "swap-weights",
        tmp_path / "a.pt2",
        tmp_path / "a.pt",
        "-o",
        tmp_path / "b.pt2",
        "--format",
        "json",
    )
    done = run(*swapped, "--model", operand(AlwaysDoubled))
    assert [note["code"] for note in json.loads(done.out)["notes"]] == ["roundtrip"]
    assert same(dict(torch.export.load(tmp_path / "b.pt2").state_dict), state)
