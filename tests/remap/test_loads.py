"""A model is named, so the output is one that it loads; the oracle is `load_state_dict` of the
model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from command import Run, notes_in

torch.set_num_threads(1)
State = dict[str, Any]


class Backbone(nn.Module):
    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 1)
        self.fc = nn.Linear(4, classes)


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.box = nn.Linear(2, 2)


class Tied(nn.Module):
    """Its load hook reads the names of an earlier version."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 2)
        self.head = nn.Linear(2, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_load_state_dict_pre_hook(self.rename)

    @staticmethod
    def rename(module: nn.Module, state: State, prefix: str, *_: Any) -> None:
        for key in [key for key in state if key.startswith(f"{prefix}old.")]:
            state[key.replace("old.", "embed.")] = state.pop(key)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "Backbone": Backbone,
    "Detector": Detector,
    "Tied": Tied,
}
DAMAGES: dict[str, Callable[[State, str], object]] = {
    "none": lambda state, key: None,
    "dropped": lambda state, key: state.pop(key),
    "extra": lambda state, key: state.update({f"{key}.more": torch.zeros(1)}),
    "reshaped": lambda state, key: state.update({key: torch.zeros(7, 1)}),
    "half": lambda state, key: state.update({key: state[key].half()}),
}


def compiled(model: nn.Module) -> nn.Module:
    wrapped: Any = torch.compile(model)
    return wrapped


OPTIONS: dict[str, tuple[tuple[str, ...], Callable[[nn.Module], nn.Module]]] = {
    "serialized": (("--to", "serialized"), lambda model: model),
    "ddp": (("--to", "ddp"), nn.DataParallel),
    "compile": (("--to", "compile"), compiled),
    "averaged": (("--to", "averaged"), torch.optim.swa_utils.AveragedModel),
}


def is_loaded(model: nn.Module, path: Path) -> bool:
    try:
        model.load_state_dict(torch.load(path), strict=True)
    except RuntimeError:
        return False
    return True


def saved(name: str, damage: str, position: int) -> State:
    torch.manual_seed(0)
    state = {key: value.clone() for key, value in MODELS[name]().state_dict().items()}
    DAMAGES[damage](state, list(state)[position])
    return state


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("form", OPTIONS)
@pytest.mark.parametrize("name", MODELS)
def test_output_is_written_if_and_only_if_the_model_loads_it(
    tmp_path: Path, run: Run, name: str, form: str, damage: str
) -> None:
    options, wrap = OPTIONS[form]
    for position in (0, -1):
        state = {f"module.{key}": value for key, value in saved(name, damage, position).items()}
        torch.save(state, tmp_path / "in.pt")
        out = tmp_path / f"out{position}.pt"
        done = run(
            "remap", tmp_path / "in.pt", "--model", f"{__file__}:{name}", *options, "-o", out
        )
        unwrapped = tmp_path / "unwrapped.pt"
        torch.save(saved(name, damage, position), unwrapped)
        loads = is_loaded(MODELS[name](), unwrapped)
        if not loads and name == "Tied" and damage == "dropped":
            loads = True  # the other name of the tensor is in the file, and is written twice
        assert (done.status, out.exists()) == ((0, True) if loads else (1, False)), done.err
        if loads:
            assert is_loaded(wrap(MODELS[name]()), out)


@pytest.mark.parametrize("damage", DAMAGES)
def test_output_of_rules_is_loaded_by_the_model_that_they_lead_to(
    tmp_path: Path, run: Run, damage: str
) -> None:
    torch.save(saved("Backbone", damage, 0), tmp_path / "in.pt")
    torch.save(
        {f"backbone.{key}": value for key, value in Detector().state_dict().items()},
        tmp_path / "box.pt",
    )
    arguments = (
        "remap",
        tmp_path / "in.pt",
        "--to-model",
        f"{__file__}:Detector",
        "-o",
        tmp_path / "out.pt",
    )
    for rule in ("{x*} => backbone.{x*}", "conv.{x*} => zzz.{x*}", "fc.{x*} => backbone.fc.{x*}"):
        refused = run(*arguments, "--rule", rule)
        assert refused.status == 1
        assert "missing" in refused.err
        assert not (tmp_path / "out.pt").exists()
    done = run(*arguments, "--rule", "{x*} => backbone.{x*}", "--partial")
    if damage in ("extra", "reshaped"):
        assert done.status == 1
        return
    assert done.status == 0, done.err
    model = Detector()
    result = model.load_state_dict(torch.load(tmp_path / "out.pt"), strict=False)
    missing = {"box.weight", "box.bias"} | (
        {"backbone.conv.weight"} if damage == "dropped" else set()
    )
    assert (set(result.missing_keys), result.unexpected_keys) == (missing, [])


def test_all_problems_are_named_at_once(tmp_path: Path, run: Run) -> None:
    state = {**saved("Backbone", "reshaped", 0), "more": torch.zeros(1)}
    del state["fc.bias"]
    torch.save(state, tmp_path / "in.pt")
    out = ("-o", tmp_path / "out.pt")
    refused = run(
        "remap",
        tmp_path / "in.pt",
        "--rule",
        "fc.{x} => head.{x}",
        "--to-model",
        f"{__file__}:Backbone",
        *out,
    )
    assert refused.status == 1
    for line in (
        "not a key that the model loads @ more",
        "not a key that the model loads @ head.weight",
        "shape [7, 1] instead of [2, 1, 1, 1] @ conv.weight",
        "missing @ fc.weight",
        "missing @ fc.bias",
    ):
        assert line in refused.err


@pytest.mark.parametrize("extra", ["conv@1.weight", "module.conv.weight"])
@pytest.mark.parametrize("by_names", [False, True])
def test_second_keys_of_a_name_are_not_loaded(
    extra: str, by_names: bool, tmp_path: Path, run: Run
) -> None:
    """With a call variant, or a key with a wrapper, of a name that has its own key; a names file
    answers as the model's code does.
    """
    model = f"{__file__}:Backbone"
    if by_names:
        names = str(tmp_path / "names.json")
        assert run("trace", model, "-o", names).status == 0
        model = names
    state = Backbone().state_dict()
    state[extra] = state["conv.weight"].clone()
    torch.save(state, tmp_path / "in.pt")
    assert not is_loaded(Backbone(), tmp_path / "in.pt")
    done = run("remap", tmp_path / "in.pt", "--to-model", model, "-o", tmp_path / "out.pt")
    assert done.status == 1, done.out
    assert extra in done.err
    assert not (tmp_path / "out.pt").exists()


HALF_WRAPPED = ("module.", "conv._orig_mod.", "fc.module.")


@pytest.mark.parametrize("by_names", [False, True])
@pytest.mark.parametrize("prefix", HALF_WRAPPED)
@pytest.mark.parametrize("is_whole", [False, True])
def test_wrapped_keys_are_loaded_if_all_keys_around_them_are_wrapped(
    prefix: str, is_whole: bool, by_names: bool, tmp_path: Path, run: Run
) -> None:
    """The oracle is the model with a wrapper at this place."""
    model = f"{__file__}:Backbone"
    if by_names:
        names = str(tmp_path / "names.json")
        assert run("trace", model, "-o", names).status == 0
        model = names
    module, _, _ = prefix.rpartition(".")[0].rpartition(".")
    below = f"{module}." if module else ""
    state = {}
    for key, value in Backbone().state_dict().items():
        is_wrapped = key.startswith(below) and (is_whole or key.endswith("bias"))
        state[prefix + key.removeprefix(below) if is_wrapped else key] = value
    torch.save(state, tmp_path / "in.pt")
    wrapped: Any = Backbone()
    if not module:
        wrapped = nn.DataParallel(wrapped)
    elif "module" in prefix:
        setattr(wrapped, module, nn.DataParallel(getattr(wrapped, module)))
    else:
        setattr(wrapped, module, torch.compile(getattr(wrapped, module)))
    assert is_loaded(wrapped, tmp_path / "in.pt") is is_whole
    done = run("remap", tmp_path / "in.pt", "--to-model", model, "-o", tmp_path / "out.pt")
    assert (done.status == 0) is is_whole, (done.out, done.err)


def test_a_names_file_needs_both_names_of_a_tied_weight(tmp_path: Path, run: Run) -> None:
    model, names = f"{__file__}:Tied", str(tmp_path / "names.json")
    assert run("trace", model, "-o", names).status == 0
    state = Tied().state_dict()
    del state["head.weight"]
    torch.save(state, tmp_path / "in.pt")
    assert not is_loaded(Tied(), tmp_path / "in.pt")
    for operand in (model, names):
        words = ("remap", tmp_path / "in.pt", "--to-model", operand, "-o", tmp_path / "out.pt")
        refused = run(*words)
        assert refused.status == 1
        assert "missing @ head.weight" in refused.err
        assert "then add these second names" in refused.err


def test_a_dtype_that_loading_converts_is_a_note(tmp_path: Path, run: Run) -> None:
    torch.save(saved("Backbone", "half", 0), tmp_path / "in.pt")
    options = (
        "--model",
        f"{__file__}:Backbone",
        "--to",
        "ddp",
        "-o",
        tmp_path / "out.pt",
        "--format",
        "json",
    )
    done = run("remap", tmp_path / "in.pt", *options)
    assert done.status == 0
    note = "loading the output converts 1 tensor: conv.weight (float16 to float32)"
    assert note in notes_in(done.data)


@pytest.mark.parametrize(
    "options",
    [
        ("--rule", "{x*} => other.{x*}"),
        ("--select", "conv"),
        ("--to", "exported"),
    ],
    ids=lambda options: options[0] + options[1],
)
def test_options_that_lead_to_other_names_are_not_held_to_the_model(
    tmp_path: Path, run: Run, options: tuple[str, ...]
) -> None:
    torch.save(Backbone(classes=5).state_dict(), tmp_path / "in.pt")
    done = run(
        "remap",
        tmp_path / "in.pt",
        "--model",
        f"{__file__}:Backbone",
        *options,
        "-o",
        tmp_path / "out.pt",
    )
    assert done.status == 0, done.err
