"""Whether an adapter fits a base model. Oracle: PEFT loads it without missing or unexpected keys."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ckpttool.naming.wrappers import ADAPTERS
from command import Run, fixes_in
from places import SUPPORT

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore")
MODELS = """
import warnings
from torch import nn
from peft import LoraConfig, get_peft_model
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.query = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
class Net(nn.Module):
    def __init__(self, layers=2, width=8):
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 3)
    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block.value(block.query(x))
        return self.head(x)
def adapted():
    return get_peft_model(Net(), LoraConfig(r=2, target_modules=["query", "value"]))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "adapter_nets.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def nets() -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(MODELS, names)
    return names


CONFIGS: dict[str, Any] = {
    "lora": lambda: peft.LoraConfig(r=2, target_modules=["query", "value"]),
    "dora": lambda: peft.LoraConfig(r=3, target_modules=["query"], use_dora=True),
    "pissa": lambda: peft.LoraConfig(r=2, target_modules=["value"], init_lora_weights="pissa"),
    "bias": lambda: peft.LoraConfig(r=2, target_modules=["query"], bias="lora_only"),
    "saved": lambda: peft.LoraConfig(r=2, target_modules=["query"], modules_to_save=["head"]),
    "regex": lambda: peft.LoraConfig(r=2, target_modules=r".*\.1\.(query|value)"),
    "embedding": lambda: peft.LoraConfig(r=2, target_modules=["embed", "value"]),
    "ia3": lambda: peft.IA3Config(target_modules=["value"], feedforward_modules=[]),
}


def saved(config: Any, folder: Path, wrap: Any = lambda net: net) -> None:
    torch.manual_seed(3)
    peft.get_peft_model(wrap(nets()["Net"]()), config).save_pretrained(folder)


def peft_loads(folder: Path, model: nn.Module) -> bool:
    """Return whether PEFT puts the adapter on the model, with no adapter key left over."""
    try:
        config = peft.PeftConfig.from_pretrained(folder)
        adapted = peft.get_peft_model(model, config)
        result = peft.set_peft_model_state_dict(adapted, peft.load_peft_weights(folder))
    except (RuntimeError, ValueError, KeyError):
        return False
    of_adapter = [key for key in result.missing_keys if "lora_" in key or "ia3_" in key]
    return not of_adapter and not result.unexpected_keys


def without_first(path: Path) -> None:
    state = load_file(path)
    del state[next(iter(state))]
    save_file(state, path)


def with_one_more(path: Path) -> None:
    state = load_file(path)
    key = next(key for key in state if "lora" in key or "ia3" in key)
    save_file(
        {
            **state,
            key.replace("blocks.1", "blocks.7").replace("embed", "other"): state[key].clone(),
        },
        path,
    )


def with_other_rank(path: Path) -> None:
    config = path.with_name("adapter_config.json")
    settings = json.loads(config.read_text())
    config.write_text(json.dumps({**settings, "r": 5}))


CHANGES: dict[str, Any] = {
    "none": lambda path: None,
    "without a key": without_first,
    "with another key": with_one_more,
    "with another rank": with_other_rank,
}
BASES = {
    "Net": "Net()",
    "deep": "Net(layers=3)",
    "shallow": "Net(layers=1)",
    "wide": "Net(width=12)",
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("config", CONFIGS)
def test_the_verdict_is_that_of_peft(folder: Path, run: Run, config: str, change: str) -> None:
    saved(CONFIGS[config](), folder / "adapter")
    CHANGES[change](folder / "adapter/adapter_model.safetensors")
    for base in BASES.values():
        name, _, arguments = base.rstrip(")").partition("(")
        loads = peft_loads(folder / "adapter", eval(base, nets()))
        model = f"adapter_nets.py:{name}({arguments})" if arguments else f"adapter_nets.py:{name}"
        done = run("diff", "adapter", "--model", model)
        assert done.status == (0 if loads else 1), (base, done.said)
        first_lines = "\n".join(done.out.splitlines()[:4])
        assert "adapter" in first_lines
        assert "whether PEFT loads it" in first_lines


def test_a_model_with_an_adapter_takes_the_same_adapter(folder: Path, run: Run) -> None:
    """Its keys have the adapter's name: ``lora_A.default.weight``."""
    saved(CONFIGS["lora"](), folder / "adapter")
    (folder / "adapter/adapter_config.json").unlink()
    words = ("diff", "adapter/adapter_model.safetensors", "--model", "adapter_nets.py:adapted")
    assert run(*words).status == 0
    without_first(folder / "adapter/adapter_model.safetensors")
    done = run(*words, "--format", "json")
    assert done.status == 1
    assert [entry["status"] for entry in done.data["entries"]].count("missing") == 1


def test_names_alone_do_not_answer(folder: Path, run: Run) -> None:
    saved(CONFIGS["lora"](), folder / "adapter")
    assert run("trace", "adapter_nets.py:Net", "-o", "names.json").status == 0
    done = run("diff", "adapter", "--model", "names.json")
    assert done.status == 2
    assert "needs its code" in done.err


@pytest.mark.parametrize("config", ["lora", "saved", "dora"])
def test_only_wrappers_are_removed_from_an_adapter(folder: Path, run: Run, config: str) -> None:
    """``get_peft_model(torch.compile(net))`` writes ``base_model.model._orig_mod.``."""
    saved(CONFIGS[config](), folder / "compiled", torch.compile)
    model = ("--model", "adapter_nets.py:Net")
    assert not peft_loads(folder / "compiled", nets()["Net"]())
    done = run("diff", "compiled", *model, "--format", "json")
    assert done.status == 1
    (line,) = fixes_in(done.data)
    assert run(*line.split()[1:]).status == 0
    assert run("fix", "compiled", *model, "-o", "fixed").status == 0
    before = load_file(folder / "compiled/adapter_model.safetensors")
    after = load_file(folder / "fixed/adapter_model.safetensors")
    assert list(after) == [key.replace("_orig_mod.", "") for key in before]
    assert peft_loads(folder / "fixed", nets()["Net"]())
    assert run("diff", "fixed", *model).status == 0


# Keys as diffusers and kohya's scripts write them, and a sentence about what reads them
NAMINGS = {
    "base_model.model.down.0.to_q.lora_A.weight": "PeftModel",
    "down.0.to_q.lora_A.weight": "loralib",
    "unet.down.0.to_q.lora_A.weight": "load_lora_weights",
    "transformer.down.0.to_q.lora_A.weight": "load_lora_weights",
    "text_encoder.down.0.to_q.lora_linear_layer.down.weight": "load_lora_weights",
    "unet.down.0.to_q.lora.down.weight": "load_lora_weights",
    "lora_unet_down_0_to_q.lora_down.weight": "load_lora_weights",
    "lora_te1_down_0_to_q.lora_down.weight": "load_lora_weights",
}


@pytest.mark.parametrize("key", NAMINGS)
def test_the_sentence_says_what_reads_the_keys(folder: Path, run: Run, key: str) -> None:
    other = key.replace("lora_A", "lora_B").replace("down.weight", "up.weight")
    save_file({key: torch.ones(2, 4), other: torch.ones(4, 2)}, folder / "a.safetensors")
    (folder / "unet.py").write_text(
        "from torch import nn\n"
        "def build():\n"
        "    net = nn.Module(); net.down = nn.ModuleList([nn.Module()])\n"
        "    net.down[0].to_q = nn.Linear(4, 4)\n"
        "    return net\n"
    )
    line = next(
        line for line in run("inspect", "a.safetensors").out.splitlines() if "kind:" in line
    )
    assert NAMINGS[key] in line
    assert ("PEFT does not" in line) == ("PeftModel" not in line)
    done = run("diff", "a.safetensors", "--model", "unet.py:build")
    assert done.status == 1
    assert "1 module, all of them are in" in done.err + done.out
    assert str(SUPPORT) not in done.out
    assert ("PeftModel" in done.err + done.out) == ("PeftModel" in NAMINGS[key])


NETS, MODEL_OF_PEFT = "adapter_nets.py:Net", "adapter_nets.py:adapted"


def test_keys_of_an_adapter_that_does_not_fit_are_named(folder: Path, run: Run) -> None:
    saved(CONFIGS["lora"](), folder / "adapter")
    (folder / "other_nets.py").write_text(MODELS.replace("query", "proj").replace("value", "gate"))
    out = run("diff", "adapter", "--model", "other_nets.py:adapted").out
    lines = [line for line in out.splitlines() if line.startswith("no fix: ")]
    first = "base_model.model.blocks.0"
    assert [line.partition(",")[0] for line in lines] == [
        f"no fix: 8 keys missing from adapter ({first}.proj.lora_A.weight",
        f"no fix: 8 keys not in other_nets.py:adapted ({first}.query.lora_A.weight",
    ]


def test_advice_on_a_state_dict_with_an_adapter_is_true(folder: Path, run: Run) -> None:
    """Only the side that has the adapter is merged, and what PEFT returns has the keys of the
    base.
    """
    config = CONFIGS["lora"]()
    adapted = peft.get_peft_model(nets()["Net"](), config)
    torch.save(adapted.state_dict(), "adapted.pt")
    torch.save(nets()["Net"]().state_dict(), "base.pt")
    for words in (("diff", "base.pt", "adapted.pt"), ("diff", "base.pt", "--model", MODEL_OF_PEFT)):
        done = run(*words)
        assert done.status == 1
        assert "has a LoRA adapter next to 4 modules, all of them are in" in done.out
        assert "merge_and_unload" not in done.out
    advice = "get_peft_model(MODEL, config), and save the state_dict() of what its merge_and_unload"
    for words in (("diff", "adapted.pt", "base.pt"), ("diff", "adapted.pt", "--model", NETS)):
        done = run(*words)
        assert done.status == 1
        assert done.out.count(advice) == 1
    loaded = peft.get_peft_model(nets()["Net"](), config)
    loaded.load_state_dict(torch.load("adapted.pt"))
    torch.save(loaded.merge_and_unload().state_dict(), "merged.pt")
    assert run("diff", "merged.pt", "--model", NETS).status == 0


def test_no_advice_for_an_adapter_that_peft_does_not_know(folder: Path, run: Run) -> None:
    """As loralib writes it, in the module itself."""
    state = nets()["Net"]().state_dict()
    torch.save(state, "base.pt")
    pair = {"head.lora_A": torch.ones(2, 8), "head.lora_B": torch.ones(3, 2)}
    torch.save({**state, **pair}, "adapted.pt")
    out = run("diff", "adapted.pt", "base.pt").out
    assert "without it the weights are not the trained ones" in out
    assert "peft" not in out.lower()


def test_a_file_without_the_configuration_is_warned_of(folder: Path, run: Run) -> None:
    saved(CONFIGS["lora"](), folder / "adapter")
    warning = "adapter_config.json is not copied, and PEFT needs it: write a folder, -o OUT/"
    for words in (("convert", "adapter"), ("fix", "adapter", "--model", NETS)):
        assert warning in run(*words, "-o", f"{words[0]}.pt").err
    shards = run("convert", "adapter", "-o", "bf16/", "--dtype", "bfloat16")
    assert warning not in shards.err
    assert (folder / "bf16" / "adapter_config.json").exists()


def test_the_hint_for_a_model_that_does_not_help_is_not_what_was_passed(
    folder: Path, run: Run
) -> None:
    saved(CONFIGS["lora"](), folder / "adapter")
    words = ("remap", "adapter", "--rule", "blocks.{x*} => layers.{x*}", "-o", "moved")
    done = run(*words, "--model", NETS)
    assert done.status == 1
    assert "leave --model out" in done.err
    assert run(*words).status == 0


def with_trained_biases(folder: Path, bias: str) -> dict[str, torch.Tensor]:
    """Save an adapter whose biases differ from those of its base; return its tensors."""
    config = peft.LoraConfig(r=2, target_modules=["query"], bias=bias)
    adapted = peft.get_peft_model(nets()["Net"](), config)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    adapted.save_pretrained(folder)
    state: dict[str, torch.Tensor] = load_file(folder / "adapter_model.safetensors")
    return state


@pytest.mark.parametrize("bias", ["lora_only", "all"])
def test_trained_biases_that_are_not_in_the_file_are_named(
    folder: Path, run: Run, bias: str
) -> None:
    """PEFT loads such a file, and the biases of the base stay."""
    state = with_trained_biases(folder / "adapter", bias)
    words = ("diff", "adapter", "--model", NETS, "--format", "json")
    done = run(*words)
    assert (done.status, done.data["notes"]) == (0, [])
    biases = [key for key in state if key.endswith(".bias")]
    assert len(biases) == {"lora_only": 2, "all": 5}[bias]
    for key in biases:
        rest = {other: value for other, value in state.items() if other != key}
        save_file(rest, folder / "adapter/adapter_model.safetensors")
        onto = peft.PeftModel.from_pretrained(nets()["Net"](), folder / "adapter")
        for other in biases:
            is_trained = torch.equal(onto.state_dict()[other], state[other])
            assert is_trained == (other != key)
        done = run(*words)
        assert done.status == 0
        (note,) = done.data["notes"]
        assert f'(bias: "{bias}"), and the file lacks 1 bias: {key};' in note["text"]


@pytest.mark.parametrize("segment", ADAPTERS)
def test_every_method_has_the_name_that_peft_gives_it(
    segment: str, run: Run, tmp_path: Path
) -> None:
    file = tmp_path / "adapter_model.safetensors"
    save_file({f"base_model.model.layer.{segment}x.weight": torch.ones(2)}, file)
    (kind,) = run("inspect", file, "--format", "json").data["kinds"]
    title = re.search(r"is an? (.+) adapter for 1 module", kind["text"])
    assert title is not None, kind["text"]
    other_names = {"hada": "LOHA", "ln": "LN_TUNING", "trainable": "TRAINABLE_TOKENS"}
    word = segment.partition("_")[0]
    assert other_names.get(word, word.upper()) in peft.PeftType.__members__
    plain = re.sub(r"[^a-z]", "", title[1].lower().replace("layernorm", "ln"))
    assert plain == re.sub(r"[^a-z]", "", other_names.get(word, word).lower())
