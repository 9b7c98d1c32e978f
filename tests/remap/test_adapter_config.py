"""`adapter_config.json` follows a rename. Oracle: PEFT loads the folder onto the renamed base and saves it again."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ckpttool
from ckpttool.core.errors import Refused

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore")
OLD = {name: name for name in ("emb", "layers", "q_proj", "v_proj", "up", "experts", "head", "score")}
NEW = {
    "emb": "tokens", "layers": "h", "q_proj": "query", "v_proj": "value", "up": "w1", "experts": "moe", "head": "final",
    "score": "judge",
}  # fmt: skip


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w_in, self.w_out = nn.Parameter(torch.zeros(2, 4, 6)), nn.Parameter(torch.zeros(2, 6, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bi,eij,ejk->bk", x, self.w_in, self.w_out)


class Layer(nn.Module):
    def __init__(self, n: dict[str, str]) -> None:
        super().__init__()
        self.n = n
        for name in ("q_proj", "v_proj", "up"):
            self.add_module(n[name], nn.Linear(4, 4))
        self.add_module(n["experts"], Experts())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.n.values():
            x = x + self._modules[name](x) if name in self._modules else x  # type: ignore[misc]
        return x


class Tree(nn.Module):
    def __init__(self, n: dict[str, str]) -> None:
        super().__init__()
        self.n = n
        self.add_module(n["emb"], nn.Embedding(5, 4))
        self.add_module(n["layers"], nn.ModuleList(Layer(n) for _ in range(3)))
        self.add_module("extra", nn.ModuleDict({"query": nn.Linear(4, 4)}))  # q_proj is renamed to the same name
        self.add_module(n["head"], nn.Linear(4, 4))
        self.add_module(n["score"], nn.Sequential(nn.Linear(4, 3)))
        if n is NEW:
            self._register_load_state_dict_pre_hook(_to_new)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.get_submodule(self.n["emb"])(x)
        for layer in self.get_submodule(self.n["layers"]).children():
            x = layer(x)
        x = self.get_submodule("extra.query")(x)
        found: torch.Tensor = self.get_submodule(self.n["score"])(self.get_submodule(self.n["head"])(x))
        return found


def _to_new(state: dict[str, Any], *_: object) -> None:
    for key in list(state):
        state[renamed(key)] = state.pop(key)


def renamed(key: str) -> str:
    return key if key.startswith("extra") else ".".join(NEW.get(part, part) for part in key.split("."))


def old() -> nn.Module:
    return Tree(OLD)


def new() -> nn.Module:
    return Tree(NEW)


RULES = [
    "emb.{x*} => tokens.{x*}",
    "head.{x*} => final.{x*}",
    "score.{x*} => judge.{x*}",
    *(f"layers.{{i}}.{one}.{{x*}} => h.{{i}}.{NEW[one]}.{{x*}}" for one in ("q_proj", "v_proj", "up", "experts")),
]


def draw_config(rng: random.Random) -> Any:
    if rng.random() < 0.15:
        return peft.IA3Config(target_modules=["q_proj", "up"], feedforward_modules=["up"])
    regex = r"layers\.[01]\.(q_proj|up)|.*\.v_proj"
    fields: dict[str, Any] = {
        "target_modules": rng.choice(
            [["q_proj", "v_proj"], ["q_proj"], ["layers.1.q_proj", "up"], regex, ["emb", "up"]]
        )
    }
    if isinstance(fields["target_modules"], list) and rng.random() < 0.4:
        fields |= {"layers_to_transform": [1, 2], "layers_pattern": rng.choice(["layers", ["h", "layers"]])}
        fields["target_modules"] = ["q_proj", "up"]
    if rng.random() < 0.3:
        fields["exclude_modules"] = rng.choice([["layers.1.q_proj"], r".*2\.q_proj"])
    if rng.random() < 0.4:
        fields["modules_to_save"] = rng.choice([["head"], ["score"], ["score", "head", "classifier"]])
    if rng.random() < 0.4:
        pattern = rng.choice([{"q_proj": 3}, {"layers.1.q_proj": 1, "up": 4}, {r".*\.2\.up": 3}])
        fields[rng.choice(["rank_pattern", "alpha_pattern"])] = pattern
    if rng.random() < 0.3:
        fields["target_parameters"] = rng.choice([["experts.w_in"], ["layers.0.experts.w_out", "1.experts.w_in"]])
    return peft.LoraConfig(r=2, lora_alpha=5, init_lora_weights=False, **fields)


def trained(config: Any, folder: Path, seed: int = 0) -> tuple[Any, dict[str, torch.Tensor]]:
    """Save a model with a random adapter; return it and its base's weights under the old names."""
    torch.manual_seed(seed)
    base = old()
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.normal_()
    weights = {name: value.clone() for name, value in base.state_dict().items()}
    model = peft.get_peft_model(base, config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    model.save_pretrained(folder, save_embedding_layers=False)
    return model, weights


def check(folder: Path, model: Any, weights: dict[str, torch.Tensor], again: Path) -> None:
    """Check that PEFT computes the same outputs on the renamed base, and saves the same files again."""
    base = new()
    base.load_state_dict(weights)
    onto = peft.PeftModel.from_pretrained(base, folder).eval()
    x = torch.arange(5)
    torch.testing.assert_close(onto(x), model(x), rtol=0, atol=0)
    onto.save_pretrained(again, save_embedding_layers=False)
    first, second = (load_file(one / "adapter_model.safetensors") for one in (folder, again))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("seed", range(10))
def test_peft_finds_the_same_modules_after_a_rename(seed: int, tmp_path: Path) -> None:
    config = draw_config(random.Random(seed))
    if getattr(config, "layers_pattern", None) and peft.__version__.startswith("0.18."):
        pytest.skip("PEFT 0.18 does not find modules by layers_pattern")
    model, weights = trained(config, tmp_path / "a", seed)
    (tmp_path / "rules.toml").write_text("".join(f'[[rule]]\nrename = "{rule}"\n' for rule in RULES))
    models: dict[str, Any] = {"model": f"{__file__}:old", "to_model": f"{__file__}:new"}
    done = ckpttool.remap(str(tmp_path / "a"), str(tmp_path / "out"), **models)
    assert done.companions is not None
    assert done.companions.rewritten == ("adapter_config.json",)
    check(tmp_path / "out", model, weights, tmp_path / "again")
    ckpttool.remap(str(tmp_path / "a"), in_place=True, rules=str(tmp_path / "rules.toml"))
    check(tmp_path / "a", model, weights, tmp_path / "once more")


KINDS: dict[str, dict[str, Any]] = {
    "LoraConfig": {"trainable_token_indices": {"emb": [1, 2]}},
    "TrainableTokensConfig": {"target_modules": ["emb"], "token_indices": [1, 3]},
    "FourierFTConfig": {"n_frequency": 4},
    "VeraConfig": {"r": 2},
    "VBLoRAConfig": {"r": 2, "num_vectors": 4, "vector_length": 2, "topk": 2},
    "LNTuningConfig": {},
    "RoadConfig": {"group_size": 2},
    "MissConfig": {"r": 2},
    "ShiraConfig": {"r": 1},
    "C3AConfig": {"block_size": 2},
    "GraloraConfig": {"r": 2, "gralora_k": 2},
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_adapter_types_are_renamed(kind: str, tmp_path: Path) -> None:
    """The keys of some types do not show the type; the config names their modules."""
    make = getattr(peft, kind, None)
    if make is None:
        pytest.skip("not in this version of PEFT")
    model, weights = trained(make(**{"target_modules": ["q_proj"], **KINDS[kind]}), tmp_path / "a")
    root = "base_model.model."
    own = [
        f"{root}layers.{{n}}.q_proj.{{x*}} => {root}h.{{n}}.query.{{x*}}",
        f"{root}emb.{{x*}} => {root}tokens.{{x*}}",
    ]
    keys = load_file(tmp_path / "a" / "adapter_model.safetensors").keys()
    rules = [rule for rule, part in zip(own, (".q_proj.", ".emb.")) if any(part in key for key in keys)]
    done = ckpttool.remap(str(tmp_path / "a"), f"{tmp_path}/out/", rule=rules)
    assert done.companions is not None
    assert done.companions.rewritten == ("adapter_config.json",)
    check(tmp_path / "out", model, weights, tmp_path / "again")


Q_PROJ = "{x*}.q_proj.{y} => {x*}.query.{y}"
REFUSED: dict[str, tuple[Any, dict[str, Any], str, str]] = {  # config, changes in the file, rule, text of the problem
    "target_modules": (
        peft.FourierFTConfig(target_modules=["q_proj"], n_frequency=4),
        {"target_modules": ["other"]},
        *(Q_PROJ, '["other"] cannot be rewritten'),
    ),
    "new_field": (
        peft.LoraConfig(target_modules=["q_proj"]),
        {"new_field": {"modules": [{"name": "q_proj"}]}},
        *(Q_PROJ, '{"modules": [{"name": "q_proj"}]}'),
    ),
    # PEFT compares the ends of names, so a module `out` would also match each adapter's `lora_dropout`.
    "modules_to_save": (
        peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["head"]),
        {},
        *("head.{x*} => out.{x*}", ""),
    ),
}


@pytest.mark.parametrize("field", REFUSED)
def test_field_that_cannot_be_renamed_is_refused_with_its_value(field: str, tmp_path: Path) -> None:
    config, changes, rule, problem = REFUSED[field]
    trained(config, tmp_path / "a")
    path = tmp_path / "a" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(Refused) as refused:
        ckpttool.remap(str(tmp_path / "a"), f"{tmp_path}/out/", rule=[rule])
    (found,) = refused.value.problems
    assert (found.key, problem in found.problem) == (field, True)
    assert not (tmp_path / "out").exists()


def test_undo_restores_the_config(tmp_path: Path) -> None:
    trained(peft.LoraConfig(target_modules=["head"]), tmp_path / "a")
    before = {file.name: file.read_bytes() for file in (tmp_path / "a").iterdir()}
    ckpttool.remap(str(tmp_path / "a"), in_place=True, rule=["head.{x*} => last.{x*}"])
    assert json.loads((tmp_path / "a/adapter_config.json").read_text())["target_modules"] == ["last"]
    ckpttool.undo(str(tmp_path / "a"))
    after = {file.name: file.read_bytes() for file in (tmp_path / "a").iterdir() if file.name in before}
    assert after == before


def test_config_is_unchanged_if_module_names_are_kept(tmp_path: Path) -> None:
    trained(peft.LoraConfig(target_modules=["q_proj"], rank_pattern={"1.q_proj": 4}), tmp_path / "a")
    ckpttool.remap(str(tmp_path / "a"), str(tmp_path / "out"), rule=["layers.{x*} => blocks.{x*}"])
    assert (tmp_path / "out/adapter_config.json").read_bytes() == (tmp_path / "a/adapter_config.json").read_bytes()


def test_a_lone_adapter_file_gets_a_note_with_the_config_changes(tmp_path: Path) -> None:
    trained(peft.LoraConfig(target_modules=["q_proj"], alpha_pattern={"0.q_proj": 3}), tmp_path / "a")
    source, out = str(tmp_path / "a/adapter_model.safetensors"), str(tmp_path / "out.safetensors")
    done = ckpttool.remap(source, out, rule=["layers.{i}.q_proj.{x*} => h.{i}.query.{x*}"])
    (note,) = (note for note in done.notes if "adapter_config.json" in note)
    assert '"h.0.query"' in note
    assert 'alpha_pattern = {"h.0.query": 3}' in note
    done = ckpttool.remap(source, str(tmp_path / "same.safetensors"), rule=["layers.{x*} => blocks.{x*}"])
    assert not any("adapter_config.json" in note for note in done.notes)
