"""`adapter_config.json` follows a rename. Oracle: PEFT loads the folder onto the renamed base and
saves it again.
"""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import ckpttool
from ckpttool import Refused

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore")
OLD = {name: name for name in ("emb", "layers", "q_proj", "v_proj", "up", "head")}
MOVED = {**OLD, "layers": "h"}
NEW = {
    "emb": "tokens",
    "layers": "h",
    "q_proj": "query",
    "v_proj": "value",
    "up": "w1",
    "head": "final",
}


class Layer(nn.Sequential):
    def __init__(self, n: dict[str, str]) -> None:
        super().__init__()
        for name in ("q_proj", "v_proj", "up"):
            self.add_module(n[name], nn.Linear(4, 4))


class Tree(nn.Module):
    def __init__(self, n: dict[str, str]) -> None:
        super().__init__()
        self.n = n
        self.add_module(n["emb"], nn.Embedding(5, 4))
        self.add_module(n["layers"], nn.ModuleList(Layer(n) for _ in range(3)))
        # as q_proj is called in NEW
        self.add_module("extra", nn.ModuleDict({"query": nn.Linear(4, 4)}))
        self.add_module(n["head"], nn.Sequential(nn.Linear(4, 3)))
        if n is not OLD:
            self._register_load_state_dict_pre_hook(self._rename)

    def _rename(self, state: dict[str, Any], *_: object) -> None:
        for key in list(state):
            is_extra = key.startswith("extra")
            new_key = (
                key if is_extra else ".".join(self.n.get(part, part) for part in key.split("."))
            )
            state[new_key] = state.pop(key)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.get_submodule(self.n["emb"])(x)
        for layer in self.get_submodule(self.n["layers"]).children():
            x = layer(x)
        x = self.get_submodule("extra.query")(x)
        head: torch.Tensor = self.get_submodule(self.n["head"])(x)
        return head


def old() -> nn.Module:
    return Tree(OLD)


def moved() -> nn.Module:
    return Tree(MOVED)


def new() -> nn.Module:
    return Tree(NEW)


INSIDE = "layers.{{i}}.{0}.{{x*}} => h.{{i}}.{1}.{{x*}}"
RULES = {
    "moved": ["layers.{x*} => h.{x*}"],
    "new": [
        *("emb.{x*} => tokens.{x*}", "head.{x*} => final.{x*}"),
        *(INSIDE.format(name, NEW[name]) for name in ("q_proj", "v_proj", "up")),
    ],
}


def draw_config(rng: random.Random) -> Any:
    full_names = ["layers.0.q_proj", "layers.2.up"]
    if rng.random() < 0.15:
        targets = rng.choice([["up"], full_names])
        return peft.IA3Config(target_modules=targets, feedforward_modules=targets)
    short_names = [["q_proj", "v_proj"], ["layers.1.q_proj", "up"], ["emb", "up"]]
    fields: dict[str, Any] = {
        "target_modules": rng.choice([*short_names, full_names, r".*\.v_proj"])
    }
    if rng.random() < 0.15:
        fields |= {
            "target_modules": ["q_proj"],
            "layers_to_transform": [1, 2],
            "layers_pattern": "layers",
        }
    if rng.random() < 0.15:
        fields["exclude_modules"] = rng.choice([["layers.1.q_proj"], r".*2\.q_proj"])
    if rng.random() < 0.3:
        fields["modules_to_save"] = rng.choice([["head", "classifier"], ["layers.1.v_proj"]])
    if rng.random() < 0.4:
        pattern = rng.choice(
            [{"q_proj": 3}, {"layers.0.q_proj": 1, "layers.2.up": 4}, {r".*\.2\.up": 3}]
        )
        fields[rng.choice(["rank_pattern", "alpha_pattern"])] = pattern
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


def check(
    folder: Path, model: Any, base: nn.Module, weights: dict[str, torch.Tensor], again: Path
) -> None:
    """Check that PEFT computes the same outputs on the renamed base, and saves the same files
    again.
    """
    base.load_state_dict(weights)
    onto = peft.PeftModel.from_pretrained(base, folder).eval()
    x = torch.arange(5)
    torch.testing.assert_close(onto(x), model(x), rtol=0, atol=0)
    onto.save_pretrained(again, save_embedding_layers=False)
    first, second = (load_file(place / "adapter_model.safetensors") for place in (folder, again))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("seed", range(16))
def test_peft_finds_the_same_modules_or_fields_are_refused(
    seed: int, name: str, tmp_path: Path
) -> None:
    config = draw_config(random.Random(seed))
    if getattr(config, "layers_pattern", None) and peft.__version__.startswith("0.18."):
        pytest.skip("PEFT 0.18 does not find modules by layers_pattern")
    folder, rules = tmp_path / "a", tmp_path / "rules.toml"
    model, weights = trained(config, folder, seed)
    rules.write_text("".join(f'[[rule]]\nrename = "{rule}"\n' for rule in RULES[name]))
    fields = json.loads((folder / "adapter_config.json").read_text())
    ways: list[dict[str, Any]] = [
        {
            "out": str(tmp_path / "by_models"),
            "model": f"{__file__}:old",
            "to_model": f"{__file__}:{name}",
        },
        {"out": str(tmp_path / "by_rules"), "rules": str(rules)},
        {"in_place": True, "rules": str(rules)},
    ]
    for number, way in enumerate(ways[:2]):
        place = tmp_path / f"pasted {number}"
        values = values_in_the_refusal(folder, **{**way, "out": f"{place}/"})
        if values:
            out = str(place / "adapter_model.safetensors")
            place.mkdir()
            ckpttool.remap(str(folder / "adapter_model.safetensors"), **{**way, "out": out})
            (place / "adapter_config.json").write_text(json.dumps({**fields, **values}))
            base = {"moved": moved, "new": new}[name]()
            check(place, model, base, weights, tmp_path / f"pasted again {number}")
    for number, way in enumerate(ways):
        problems = problems_of(folder, **way)
        assert all(text.startswith(json.dumps(fields[field])) for field, text in problems.items())
        if not problems:
            place = Path(way.get("out", folder))
            check(
                place,
                model,
                {"moved": moved, "new": new}[name](),
                weights,
                tmp_path / f"again {number}",
            )


def values_in_the_refusal(folder: Path, **options: Any) -> dict[str, Any]:
    """Return the values that the hint says, if the folder is refused and all fields have one."""
    hint, fields = "", set[str]()
    try:
        ckpttool.remap(str(folder), **options)
    except Refused as refused:
        hint, fields = refused.hint, {problem.key for problem in refused.problems}
    values = values_in(hint)
    is_complete = "not known" not in hint
    assert is_complete == (fields <= values.keys())
    return values if is_complete else {}


def values_in(text: str) -> dict[str, Any]:
    """Return the values that a hint or a note says."""
    _, found, rest = text.partition("with these values: ")
    values: dict[str, Any] = json.JSONDecoder().raw_decode(rest)[0] if found else {}
    return values


def problems_of(folder: Path, **options: Any) -> dict[str, str]:
    """Rename the folder. Return the fields that are refused, and why."""
    try:
        ckpttool.remap(str(folder), **options)
    except Refused as refused:
        return {problem.key: problem.problem for problem in refused.problems}
    return {}


KINDS: dict[str, dict[str, Any]] = {
    "LoraConfig": {"trainable_token_indices": {"emb": [1, 2]}},
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
def test_full_names_of_any_adapter_type_are_rewritten(kind: str, tmp_path: Path) -> None:
    """The keys of some types do not show the type."""
    make = getattr(peft, kind, None)
    if make is None:
        pytest.skip("not in this version of PEFT")
    targets = [f"layers.{layer}.q_proj" for layer in range(3)]
    model, weights = trained(make(target_modules=targets, **KINDS[kind]), tmp_path / "a")
    root = "base_model.model."
    rule = f"{root}layers.{{n}}.q_proj.{{x*}} => {root}h.{{n}}.query.{{x*}}"
    done = ckpttool.remap(str(tmp_path / "a"), f"{tmp_path}/out/", rule=[rule])
    assert done.companions is not None
    assert done.companions.rewritten == ("adapter_config.json",)
    check(tmp_path / "out", model, Tree({**NEW, "emb": "emb"}), weights, tmp_path / "again")


MOVE = "layers.{x*} => h.{x*}"
RENAME = INSIDE.format("q_proj", "query")
HEAD = "head.{x*} => final.{x*}"
EMB = "emb.{x*} => tokens.{x*}"
FULL, SHORT = "layers.0.q_proj", "q_proj finds layers.0.q_proj, which is h.0.query now"
UNSEEN = "it depends on modules or parameters"
# The fields of a configuration, a rule, and for each field that changes its new value, or why it is
# refused.
FIELDS: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({"target_modules": ["q_proj", "up"], "rank_pattern": {"1.up": 4, r".*0\.q_proj": 3}}, MOVE, {}),
    ({"target_modules": "all-linear"}, RENAME, {}),
    ({"target_modules": ["q_proj", "up"]}, RENAME, {"target_modules": SHORT}),
    ({"target_modules": [FULL]}, RENAME, {"target_modules": ["h.0.query"]}),
    ({"target_modules": [FULL, "layers.1.up"]}, MOVE, {"target_modules": ["h.0.q_proj", "h.1.up"]}),
    ({"target_modules": [FULL, "up"]}, MOVE, {"target_modules": f"{FULL} finds {FULL}, which is"
    " h.0.q_proj now"}),
    ({"target_modules": r".*\.q_proj"}, MOVE, {"target_modules": "an expression may match"}),
    ({"feedforward_modules": r".*\.up"}, MOVE, {"feedforward_modules": "an expression may match"}),
    ({"exclude_modules": ["up"], "layers_to_transform": 0}, MOVE, {
        "exclude_modules": UNSEEN, "layers_to_transform": UNSEEN}),
    ({"target_parameters": ["experts.w_in"]}, MOVE, {"target_parameters": UNSEEN}),
    ({"modules_to_save": ["head"]}, MOVE, {}),
    ({"modules_to_save": ["head"]}, HEAD, {"modules_to_save": "head finds head, which is final now"}),
    ({"modules_to_save": ["ad"]}, HEAD, {"modules_to_save": "ad finds head"}),
    ({"modules_to_save": ["layers.1.up"]}, MOVE, {"modules_to_save": ["h.1.up"]}),
    ({"rank_pattern": {FULL: 4}}, RENAME, {"rank_pattern": {"h.0.query": 4}}),
    ({"alpha_pattern": {r"layers\.\d\.q_proj": 4}}, MOVE, {"alpha_pattern": f"finds {FULL}"}),
    ({"rank_pattern": {f"base_model.model.{FULL}.lora_E": [True]}}, RENAME, {"rank_pattern": f"finds {FULL}"}),
    ({"trainable_token_indices": {"emb": [1]}}, EMB, {"trainable_token_indices": "emb finds emb,"
    " which is tokens now"}),
    ({"new_field": {"modules": [{"name": "q_proj"}]}}, MOVE, {}),
    ({"new_field": {"modules": [{"name": "q_proj"}]}}, RENAME, {"new_field": SHORT}),
    ({"new_field": "layers", "rank_pattern": {"(": 4}}, "{x*}.q_proj.{y*} => {x*}.query.{y*}", {}),
    ({"new_field": "layers"}, "layers.0.{x*} => h.0.{x*}", {"new_field": "layers finds layers,"
    " which is split now"}),
    ({"base_model_name_or_path": "emb"}, EMB, {}),
    ({"exclude_modules": ["up"]}, "base_model.model.{x*} => {x*}", {}),
    ({"target_modules": ["q_proj"], "new_field": "q_proj"}, RENAME, {"target_modules": SHORT, "new_field": SHORT}),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "rule", "expected"), FIELDS)
def test_fields(
    fields: dict[str, Any], rule: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    folder, out = tmp_path / "a", tmp_path / "out"
    folder.mkdir()
    parts = ("layers.0.q_proj.lora_A", "layers.1.up.lora_A", "head", "emb.token_adapter")
    weights = {f"base_model.model.{part}.weight": torch.zeros(2) for part in parts}
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    problems = problems_of(folder, out=str(out), rule=[rule])
    if not problems:
        config = (out / "adapter_config.json").read_text()
        assert json.loads(config) == {**fields, **expected}
        assert expected or config == json.dumps(fields)
        return
    assert problems.keys() == expected.keys()
    assert not out.exists()
    for field, text in problems.items():
        assert text.startswith(f"{json.dumps(fields[field])}: ")
        assert expected[field] in text
    as_the_hint_says = [
        str(folder / "adapter_model.safetensors"),
        str(tmp_path / "out.safetensors"),
    ]
    ckpttool.remap(*as_the_hint_says, rule=[rule])


def with_two_q_proj() -> nn.Module:
    model = moved()
    model.extra = nn.ModuleDict({"q_proj": nn.Linear(4, 4)})
    return model


def test_name_of_another_module_of_the_new_model_is_refused(tmp_path: Path) -> None:
    trained(peft.LoraConfig(target_modules=["q_proj"]), tmp_path / "a")
    models = {"model": f"{__file__}:old", "to_model": f"{__file__}:with_two_q_proj"}
    problems = problems_of(tmp_path / "a", out=str(tmp_path / "out"), **models)
    assert problems == {"target_modules": '["q_proj"]: q_proj would find extra.q_proj too'}


def test_undo_restores_the_config(tmp_path: Path) -> None:
    trained(peft.LoraConfig(target_modules=["layers.0.q_proj"]), tmp_path / "a")
    before = {file.name: file.read_bytes() for file in (tmp_path / "a").iterdir()}
    ckpttool.remap(str(tmp_path / "a"), in_place=True, rule=[RENAME])
    assert json.loads((tmp_path / "a/adapter_config.json").read_text())["target_modules"] == [
        "h.0.query"
    ]
    ckpttool.undo(str(tmp_path / "a"))
    after = {
        file.name: file.read_bytes() for file in (tmp_path / "a").iterdir() if file.name in before
    }
    assert after == before


def test_a_lone_adapter_file_gets_a_note_on_fields_that_name_other_modules(tmp_path: Path) -> None:
    config = peft.LoraConfig(target_modules=["q_proj"], alpha_pattern={"layers.0.q_proj": 3})
    trained(config, tmp_path / "a")
    source, out = str(tmp_path / "a/adapter_model.safetensors"), str(tmp_path / "out.safetensors")
    done = ckpttool.remap(source, out, rule=[RENAME])
    (note,) = (note for note in done.notes if "adapter_config.json" in note)
    assert (
        'target_modules: ["q_proj"]: q_proj finds layers.0.q_proj, which is h.0.query now' in note
    )
    assert 'alpha_pattern = {"h.0.query": 3}' in note
    assert values_in(note) == {
        "alpha_pattern": {"h.0.query": 3},
        "target_modules": [f"h.{layer}.query" for layer in range(3)],
    }


def test_a_long_list_is_an_expression_for_the_same_modules(tmp_path: Path) -> None:
    names = ["q_proj", "v_proj", "up"]
    for width in (3, 60):

        def base(n: dict[str, str], width: int = width) -> nn.Module:
            net = nn.Module()
            net.add_module(n["layers"], nn.ModuleList(Layer(n) for _ in range(width)))
            return net

        config = peft.LoraConfig(r=1, target_modules=names)
        adapted = peft.get_peft_model(base(OLD), config)
        adapted.save_pretrained(tmp_path / f"a{width}")
        root = "base_model.model."
        rules = [rule.replace("layers.", f"{root}layers.", 1) for rule in RULES["new"][2:]]
        rules = [rule.replace("=> ", f"=> {root}") for rule in rules]
        folder = tmp_path / f"a{width}"
        with pytest.raises(Refused) as refused:
            ckpttool.remap(str(folder), f"{tmp_path}/b{width}/", rule=rules)
        (targets,) = values_in(refused.value.hint).values()
        assert isinstance(targets, list if width == 3 else str)
        again = peft.get_peft_model(base(NEW), peft.LoraConfig(r=1, target_modules=targets))
        expected = {name.replace("layers", "h", 1) for name in adapted.targeted_module_names}
        for name in names:
            expected = {path.replace(f".{name}", f".{NEW[name]}") for path in expected}
        assert set(again.targeted_module_names) == expected
