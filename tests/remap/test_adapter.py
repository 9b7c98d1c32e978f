"""Adapters are renamed with their base model. Oracle: PEFT loads them onto the renamed base with
the same outputs.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ckpttool
from ckpttool import Refused
from command import main

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore")
OLD, NEW = ("layers", "q_proj", "v_proj", "head"), ("h", "query", "value", "lm_head")


class Layer(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names
        for name in names:
            self.add_module(name, nn.Linear(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = (self.get_submodule(name) for name in self.names)
        return torch.relu(first(x)) + second(x)


class Tree(nn.Module):
    """A network with configurable names; it also loads the names in `old`."""

    def __init__(self, names: tuple[str, ...], old: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.names, self.old = names, old
        self.add_module(names[0], nn.ModuleList(Layer(*names[1:3]) for _ in range(2)))
        self.add_module(names[3], nn.Linear(6, 3))
        if old:
            self._register_load_state_dict_pre_hook(self._rename)

    def _rename(self, state: dict[str, Any], *_: object) -> None:
        to = dict(zip(self.old, self.names))
        for key in list(state):
            state[".".join(to.get(part, part) for part in key.split("."))] = state.pop(key)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.get_submodule(self.names[0]).children():
            x = x + layer(x)
        head: torch.Tensor = self.get_submodule(self.names[3])(x)
        return head


def old() -> nn.Module:
    return Tree(OLD)


def new() -> nn.Module:
    return Tree(NEW, OLD)


def config(rng: random.Random, names: tuple[str, ...]) -> Any:
    targets = [names[at] for at in rng.choice([(1,), (2,), (1, 2)])]
    saved = [names[3]] if rng.random() < 0.4 else None
    if rng.random() < 0.2:
        return peft.IA3Config(target_modules=targets, feedforward_modules=[], modules_to_save=saved)
    kind = {"use_dora": rng.random() < 0.3, "bias": rng.choice(["none", "lora_only"])}
    return peft.LoraConfig(
        target_modules=targets, modules_to_save=saved, r=2, init_lora_weights=False, **kind
    )


def trained(rng: random.Random, seed: int, folder: Path) -> Any:
    torch.manual_seed(seed)
    model = peft.get_peft_model(old(), config(rng, OLD)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    model.save_pretrained(folder)
    return model


def base_of(model: Any) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    frozen = {
        name
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad or ".bias" in name
    }
    own = {key: value for key, value in state.items() if key in frozen}
    plain = (key.removeprefix("base_model.model.") for key in own)
    names = (key.replace(".base_layer", "").replace(".original_module", "") for key in plain)
    return {
        name: value
        for name, value in zip(names, own.values())
        if "lora_" not in name and "modules_to" not in name
    }


RULES = [
    "layers.{i}.q_proj.{x*} => h.{i}.query.{x*}",
    "layers.{i}.v_proj.{x*} => h.{i}.value.{x*}",
    "head.{x*} => lm_head.{x*}",
]


@pytest.mark.parametrize("by", ["models", "rules", "names"])
@pytest.mark.parametrize("seed", range(6))
def test_peft_outputs_are_the_same_on_the_renamed_base(seed: int, by: str, tmp_path: Path) -> None:
    made = trained(random.Random(seed), seed, tmp_path / "a")
    source, out = str(tmp_path / "a/adapter_model.safetensors"), str(tmp_path / "out.safetensors")
    ways: dict[str, dict[str, Any]] = {
        "models": {"model": f"{__file__}:old", "to_model": f"{__file__}:new"},
        "rules": {"rule": [rule for rule in RULES if _applies(rule, load_file(source))]},
        "names": {"rules": str(tmp_path / "rules.toml")},
    }
    text = "".join(f'[[rule]]\nrename = "{rule}"\n' for rule in RULES)
    (tmp_path / "rules.toml").write_text(text)
    done = ckpttool.remap(source, out, verify=True, **ways[by])
    assert any("target_modules" in note for note in done.notes)
    other = new()
    other.load_state_dict(base_of(made))
    onto = peft.get_peft_model(other, config(random.Random(seed), NEW)).eval()
    found = peft.set_peft_model_state_dict(onto, load_file(out))
    assert not found.unexpected_keys
    x = torch.randn(4, 6)
    torch.testing.assert_close(onto(x), made(x), rtol=0, atol=0)


def _applies(rule: str, keys: Iterable[str]) -> bool:
    return any(rule.split(".")[2 if rule.startswith("layers") else 0] in key for key in keys)


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"both": nn.Linear(6, 12)}) for _ in range(2))
        self.head = nn.Linear(6, 3)
        self._register_load_state_dict_pre_hook(self._join)

    @staticmethod
    def _join(state: dict[str, Any], *_: object) -> None:
        for at in range(2):
            for leaf in ("weight", "bias"):
                parts = [
                    state.pop(f"layers.{at}.{name}.{leaf}", None) for name in ("q_proj", "v_proj")
                ]
                if None not in parts:
                    state[f"layers.{at}.both.{leaf}"] = torch.cat(parts)


def fused() -> nn.Module:
    return Fused()


def saves_kernels() -> nn.Module:
    model = old()
    model.register_state_dict_post_hook(_as_kernels)
    return model


def _as_kernels(_: nn.Module, state: dict[str, Any], prefix: str, _meta: object) -> None:
    for key in list(state):
        state[f"{key}_kernel"] = state.pop(key)


def test_joined_modules_are_refused_by_name(tmp_path: Path) -> None:
    trained(random.Random(2), 0, tmp_path / "a")
    source = str(tmp_path / "a/adapter_model.safetensors")
    with pytest.raises(Refused) as refused:
        ckpttool.remap(
            source,
            str(tmp_path / "o.safetensors"),
            model=f"{__file__}:old",
            to_model=f"{__file__}:fused",
        )
    modules = [
        problem for problem in refused.value.problems if not problem.key.startswith("base_model")
    ]
    assert modules
    assert all("both" in problem.problem for problem in modules), modules
    assert "--suggest" in refused.value.hint


def test_no_target_modules_note_if_last_segments_are_kept(tmp_path: Path) -> None:
    trained(random.Random(0), 0, tmp_path / "a")
    source, out = str(tmp_path / "a/adapter_model.safetensors"), str(tmp_path / "o.safetensors")
    done = ckpttool.remap(source, out, rule=["layers.{x*} => blocks.{x*}"])
    assert load_file(out).keys() == {
        key.replace(".layers.", ".blocks.") for key in load_file(source)
    }
    assert not any("target_modules" in note for note in done.notes)


def test_names_files_of_two_models_are_enough(tmp_path: Path) -> None:
    """The second model saves other keys but has the same modules, and an adapter names modules."""
    trained(random.Random(0), 0, tmp_path / "a")
    source, out = str(tmp_path / "a/adapter_model.safetensors"), str(tmp_path / "o.pt")
    files = [str(tmp_path / f"{name}.json") for name in ("old", "saves_kernels")]
    for name, file in zip(("old", "saves_kernels"), files):
        assert main(["trace", f"{__file__}:{name}", "-o", file]) == 0
    ckpttool.remap(source, out, model=files[0], to_model=files[1])
    found, was = torch.load(out), load_file(source)
    assert found.keys() == was.keys()
    assert all(torch.equal(found[key], was[key]) for key in was)


def test_rules_may_name_the_adapters_own_keys(tmp_path: Path) -> None:
    trained(random.Random(0), 0, tmp_path / "a")
    source, out = str(tmp_path / "a/adapter_model.safetensors"), str(tmp_path / "o.safetensors")
    ckpttool.remap(source, out, rule=["base_model.model.{x*} => {x*}"])
    assert not any(key.startswith("base_model") for key in load_file(out))
    with pytest.raises(Refused, match="do not fit"):
        ckpttool.remap(source, str(tmp_path / "p.safetensors"), rule=["nowhere.{x*} => {x*}"])


def test_adapter_is_not_written_for_a_base_without_its_modules(tmp_path: Path) -> None:
    saved_with_head = peft.LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=["head"], init_lora_weights=False
    )
    adapter = peft.get_peft_model(old(), saved_with_head)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapter.save_pretrained(tmp_path / "adapter")
    renamed = Tree(NEW)
    with pytest.raises(Refused) as refused:
        ckpttool.remap(tmp_path / "adapter", str(tmp_path / "out"), to_model=renamed)
    assert {problem.key for problem in refused.value.problems} == {
        "layers.0.q_proj",
        "layers.1.q_proj",
    }
    assert not (tmp_path / "out").exists()
    ckpttool.remap(tmp_path / "adapter", str(tmp_path / "same"), to_model=old())
    # rules between its keys and the model's would take PEFT's segments away
    answer = ckpttool.diff(tmp_path / "adapter", model=renamed)
    assert (answer.passes, answer.fix, answer.rules) == (False, (), None)
    assert any("follows the rules that rename its base" in note for note in answer.notes)
    assert ckpttool.diff(tmp_path / "adapter", model=old()).passes
