"""Every command that a diff prints runs unchanged, and its output holds the values of all input
tensors.

Only a command that takes one submodule for a model leaves out what is not below it, and a note
names that.

``CKPTTOOL_FIXES=2000`` tries 2000 random pairs.
"""

from __future__ import annotations

import json
import os
import random
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from command import call, fixes_in, main, notes_in

SEEDS = int(os.environ.get("CKPTTOOL_FIXES", "40"))
State = dict[str, torch.Tensor]

MODULE = """
import torch
from torch import nn


class Hidden(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self._register_state_dict_hook(self.save)
        self.register_load_state_dict_pre_hook(self.load)

    @staticmethod
    def save(module, state, prefix, _):
        for key in [key for key in state if key.startswith(prefix + "layer.")]:
            state[prefix + key[len(prefix) + 6:]] = state.pop(key)

    @staticmethod
    def load(module, state, prefix, *_):
        for key in [key for key in state if key.startswith(prefix) and not key.startswith(prefix + "layer.")]:
            state[prefix + "layer." + key[len(prefix):]] = state.pop(key)


class Net(nn.Module):
    def __init__(self, layers=2, tied=False, hidden=False):
        super().__init__()
        self.emb = nn.Embedding(6, 3)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(layers))
        if hidden:
            self.layers[0] = Hidden(self.layers[0])
        self.head = nn.Linear(3, 6, bias=False)
        if tied:
            self.head.weight = self.emb.weight
"""


def values(state: State) -> list[tuple[Any, ...]]:
    return [(value.dtype, tuple(value.shape), value.numpy().tobytes()) for value in state.values()]


def write_state(state: State, path: Path, rng: random.Random) -> str:
    aliases = len({value.data_ptr() for value in state.values()}) < len(state)
    if rng.random() < 0.5:
        torch.save(state, f"{path}.pt")
        return f"{path}.pt"
    if aliases:  # like save_pretrained, under one name
        state = {key: value for key, value in state.items() if not key.endswith("head.weight")}
    save_file({key: value.contiguous() for key, value in state.items()}, f"{path}.safetensors")
    return f"{path}.safetensors"


def read(path: str) -> State:
    return load_file(path) if path.endswith(".safetensors") else torch.load(path)


def damage(state: State, rng: random.Random) -> State:
    prefix = rng.choice(["", "", "module.", "_orig_mod.", "net.", "module._orig_mod."])
    state = {prefix + key: value for key, value in state.items()}
    if rng.random() < 0.5:
        extra = rng.choice([prefix, ""]) + rng.choice(["score", "layers.7", "layers.1.lora_A"])
        state |= {f"{extra}.weight": torch.randn(2, 3), f"{extra}.bias": torch.randn(2)}
    if rng.random() < 0.3:
        removed = rng.choice([key.rpartition(".")[0] for key in state])
        state = {
            key: value for key, value in state.items() if not key.startswith(f"{removed}.")
        } or state
    if rng.random() < 0.3:  # different values for tied names
        state = {key: value.clone() + key.count("head") for key, value in state.items()}
    return state


def draw_model(namespace: dict[str, Any], rng: random.Random) -> tuple[dict[str, Any], nn.Module]:
    kwargs = {
        "layers": rng.choice([1, 2, 3]),
        "tied": rng.random() < 0.5,
        "hidden": rng.random() < 0.3,
    }
    return kwargs, namespace["Net"](**kwargs)


def state_of(model: nn.Module, rng: random.Random) -> State:
    if rng.random() < 0.3:
        return {
            key: value.detach() for key, value in model.named_parameters(remove_duplicate=False)
        }
    return model.state_dict()


@pytest.fixture(scope="module")
def namespace(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    module: dict[str, Any] = {}
    exec(MODULE, module)  # the test's own model
    return module


@pytest.mark.parametrize("seed", range(SEEDS))
def test_printed_command_runs_and_keeps_every_value(
    seed: int,
    namespace: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    monkeypatch.chdir(tmp_path)
    Path("m.py").write_text(MODULE)
    kwargs, model = draw_model(namespace, rng)
    by_model = ["--model", call("m.py:Net", **kwargs)]
    left = write_state(damage(state_of(model, rng), rng), Path("left"), rng)
    if rng.random() < 0.6:
        words = [*by_model, left]
    else:
        other = model if rng.random() < 0.6 else draw_model(namespace, rng)[1]
        words = [left, write_state(damage(state_of(other, rng), rng), Path("right"), rng)]
    status = main(["diff", *words, "--format", "json"])
    found = json.loads(capsys.readouterr().out)
    assert status in (0, 1)
    text = " ".join([*fixes_in(found), *notes_in(found)])
    actual = values(read(left))
    for line in fixes_in(found):
        parts = shlex.split(line)[1:]
        if "MODEL" in parts:
            assert any("depends on MODEL" in note for note in notes_in(found))
            continue
        assert main(parts) == (1 if parts[0] == "diff" else 0), (
            words,
            line,
            capsys.readouterr().err,
        )
        if parts[0] == "remap":
            kept = values(read(parts[parts.index("-o") + 1]))
            lost = [value for value in actual if value not in kept]
            if lost and "--select" in parts:  # a note names what the model has no place for
                (note,) = (note for note in notes_in(found) if "leaves out" in note)
                prefix = parts[parts.index("--select") + 1]
                state = read(left)
                outside = {
                    key: value for key, value in state.items() if f"{prefix}." not in f".{key}"
                }
                assert all(value in values(outside) for value in lost), (words, line)
                assert note.partition("model does not have: ")[2].split(", ")[0] in state
                continue
            assert not lost, (words, line)
    if status == 1 and any(entry["status"] == "unexpected" for entry in found["entries"]):
        assert "--drop PATTERN" not in text


def test_keys_without_a_counterpart_get_no_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).state_dict(), "two.pt")
    torch.save(nn.Sequential(nn.Linear(4, 4)).state_dict(), "one.pt")
    for words in (("two.pt", "one.pt"), ("two.pt", "one.pt", "--values")):
        assert main(["diff", *words, "--format", "json"]) == 1
        found = json.loads(capsys.readouterr().out)
        assert found["summary"]["unexpected"] == 2
        assert not any("1.weight" in line or "--drop" in line for line in fixes_in(found))
        assert any(
            "1.weight, 1.bias" in note and "leaving them out loses their values" in note
            for note in notes_in(found)
        )


def test_command_for_tied_names_writes_a_format_that_can_hold_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m.py").write_text(MODULE)
    state = nn.Module.state_dict(_tied())
    torch.save(state, "tied.pt")
    save_file(
        {key: value for key, value in state.items() if key != "head.weight"}, "tied.safetensors"
    )
    for left, right in (("tied.safetensors", "tied.pt"), ("tied.pt", "tied.safetensors")):
        assert main(["diff", left, right, "--format", "json"]) == 1
        found = json.loads(capsys.readouterr().out)
        (line,) = fixes_in(found)
        parts = [{"MODEL": "m.py:Net(tied=True)"}.get(word, word) for word in shlex.split(line)[1:]]
        assert main(parts) == 0, capsys.readouterr().err
        capsys.readouterr()
        assert main(["diff", parts[parts.index("-o") + 1], right]) == 0
        capsys.readouterr()


def _tied() -> nn.Module:
    module: dict[str, Any] = {}
    exec(MODULE, module)
    model: nn.Module = module["Net"](tied=True)
    return model


REFUSED = {
    "another model": (("remap", "two.pt", "--model", "torch.nn:Linear(in_features=4,"
    " out_features=4)",
                          "-o", "out.pt"), "not a key of this model"),
    "another model's": (("remap", "two.pt", "--model", "m.py:two", "--to-model", "m.py:one", "-o", "out.pt"), "do not"),
    "format that holds tensors only": (("remap", "run.pt", "-o", "out.safetensors"), "holds"
    " tensors only"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_hint_of_a_refusal_does_not_suggest_drop(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
    assert main(list(words)) == 1
    err = capsys.readouterr().err
    assert message in err
    assert "hint:" in err
    assert "--drop" not in err
