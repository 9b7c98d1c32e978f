"""Commands that were refused when pasted: files with code in other entries, optimizers, rules,
folders, two files.
"""

from __future__ import annotations

import collections
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from command import Done, Run, fixes_in, notes_in

CODE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

class Layer(nn.Module):
    def __init__(self, fused):
        super().__init__()
        if fused:
            self.qkv = nn.Linear(6, 18)
        else:
            self.q, self.k, self.v = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.o = nn.Linear(6, 6)

class Lm(nn.Module):
    def __init__(self, fused=False, more=False):
        super().__init__()
        self.layers, self.emb = nn.ModuleList(Layer(fused) for _ in range(3)), nn.Embedding(7, 6)
        if more:
            self.extra = nn.Linear(6, 5)

def adam(model):
    return torch.optim.Adam(model.parameters())

def grouped(model):
    weights = [value for value in model.parameters() if value.ndim > 1]
    biases = [value for value in model.parameters() if value.ndim < 2]
    return torch.optim.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0}])
"""
scope: dict[str, Any] = {}
exec(CODE, scope)
Net, Lm, adam, grouped = scope["Net"], scope["Lm"], scope["adam"], scope["grouped"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(CODE)


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = adam(model)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    optimizer.step()
    return optimizer


class Called:
    """As mmengine's message hub is pickled: an attribute that a call of `getattr` takes."""

    def __reduce__(self) -> Any:
        return getattr, (collections.OrderedDict, "fromkeys")


def paste(run: Run, done: Done) -> str:
    """Run the printed commands; return the output of the last one."""
    assert done.status == 1, done.said
    out = ""
    for command in fixes_in(done.data):
        line = shlex.split(command)
        assert line[0] == "ckpttool"
        result = run(*line[1:])
        assert result.status == (1 if line[1] == "diff" else 0), f"{command}\n{result.said}"
        out = line[line.index("-o") + 1] if "-o" in line else out
    return out


@pytest.mark.parametrize("with_optimizer", [False, True])
@pytest.mark.parametrize("place", ["message_hub", "meta.hooks"])
def test_code_in_another_entry_is_left_out(place: str, with_optimizer: bool, run: Run) -> None:
    model = Net()
    saved: dict[str, Any] = {
        "meta": {"epoch": 1},
        "state_dict": {f"module.{k}": v for k, v in model.state_dict().items()},
    }
    if with_optimizer:
        saved["optimizer"] = stepped(model).state_dict()
    entry: dict[str, Any] = saved
    *outer, last = place.split(".")
    for name in outer:
        entry = entry[name]
    entry[last] = {"log_scalars": {"lr": Called()}}
    torch.save(saved, "epoch_1.pth")
    done = run("diff", "epoch_1.pth", "--model", "net.py:Net", "--format", "json")
    out = paste(run, done)
    content = torch.load(out, weights_only=True)
    Net().load_state_dict(content["state_dict"], strict=True)
    assert ("optimizer" in content) == with_optimizer
    assert any("would run code when it is loaded" in note for note in notes_in(done.data))
    assert run("diff", out, "--model", "net.py:Net").status == 0
    assert run("fix", "epoch_1.pth", "--model", "net.py:Net", "-o", "fixed.pth").status == 0
    Net().load_state_dict(torch.load("fixed.pth", weights_only=True)["state_dict"], strict=True)


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("with_optimizer", [False, True])
@pytest.mark.parametrize("suggests", [False, True])
def test_rules_are_applied_with_what_the_optimizer_needs(
    suggests: bool, with_optimizer: bool, more: bool, run: Run
) -> None:
    model = Lm(fused=True)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    saved = {"model": state, "optimizer": stepped(model).state_dict()} if with_optimizer else state
    torch.save(saved, "fused.pt")
    operand = f"net.py:Lm(more={more})"
    question = ("diff", "fused.pt", "--model", operand, "--format", "json")
    done = run(*question, *(("--suggest", "rules.toml") if suggests else ()))
    assert done.data["fix"][-1]["complete"] is not more
    if more:  # what is left is named
        assert any(
            "2 keys missing from left (extra.weight, extra.bias)" in note
            for note in notes_in(done.data)
        )
        assert {key for one in done.data["unfixed"] for key in one["keys"]} == {
            "extra.weight",
            "extra.bias",
        }
    out = paste(run, done)
    content = torch.load(out)
    loaded = Lm(more=more)
    missing = loaded.load_state_dict(
        content["model"] if with_optimizer else content, strict=not more
    ).missing_keys
    assert missing == (["extra.weight", "extra.bias"] if more else [])
    assert torch.equal(loaded.layers[1].k.weight, state["layers.1.qkv.weight"][6:12])


@pytest.mark.parametrize("suggests", [False, True])
def test_rules_between_two_files_with_an_optimizer(suggests: bool, run: Run) -> None:
    model = Lm(fused=True)
    torch.save({"model": model.state_dict(), "optimizer": stepped(model).state_dict()}, "fused.pt")
    torch.save(Lm().state_dict(), "plain.pt")
    words = ("--suggest", "rules.toml") if suggests else ()
    out = paste(run, run("diff", "fused.pt", "plain.pt", *words, "--format", "json"))
    Lm().load_state_dict(torch.load(out)["model"], strict=True)
    assert run("diff", out, "plain.pt").status == 0


FUSED_TO_PARTS = {
    "OLD": "net.py:Lm(fused=True)",
    "MODEL": "net.py:Lm",
    "OPTIMIZER": "net.py:grouped",
    "CKPT": "fused.pt",
}


def save_fused_with_groups(prefix: str) -> dict[str, dict[str, torch.Tensor]]:
    """Save a wrapped model whose projections are fused, with an optimizer of two groups. Return the
    state of each parameter of the model with separate projections.
    """
    model = Lm(fused=True)
    optimizer = grouped(model)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    state = {prefix + key: value for key, value in model.state_dict().items()}
    saved = {"model": state, "optim": optimizer.state_dict(), "step": 2}
    torch.save(saved, "fused.pt")
    expected: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        values = {**optimizer.state[parameter], "value": parameter.detach()}
        if "qkv" not in name:
            expected[name] = values
            continue
        for number, part in enumerate("qkv"):
            rows = slice(6 * number, 6 * number + 6)
            part_values = {slot: v if slot == "step" else v[rows] for slot, v in values.items()}
            expected[name.replace("qkv", part)] = part_values
    return expected


def check_parts(out: str, expected: dict[str, dict[str, torch.Tensor]]) -> None:
    """Check that torch loads the file, and that each parameter has its value and its state."""
    content = torch.load(out, weights_only=True)
    assert content["step"] == 2
    model = Lm()
    model.load_state_dict(content["model"], strict=True)
    optimizer = grouped(model)
    optimizer.load_state_dict(content["optim"])
    assert {name for name, _ in model.named_parameters()} == set(expected)
    for name, parameter in model.named_parameters():
        values = {**optimizer.state[parameter], "value": parameter.detach()}
        assert values.keys() == expected[name].keys()
        for slot, value in values.items():
            assert torch.equal(value, expected[name][slot]), (name, slot)


def fill_and_run(run: Run, done: Done) -> str:
    """Run the printed commands, which were not tried, with what only the user knows."""
    for fix in done.data["fix"]:
        assert not fix["tried"]
        line = [FUSED_TO_PARTS.get(word, word) for word in shlex.split(fix["command"])]
        result = run(*line[1:])
        assert result.status == (1 if line[1] == "diff" else 0), result.said
    return line[line.index("-o") + 1]


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.module."])
@pytest.mark.parametrize(
    "right",
    [
        ("--model", "net.py:Lm"),
        ("--model", "net.py:Lm", "--optimizer", "net.py:grouped"),
        ("parts.pt",),
    ],
)
def test_rules_for_ids_that_only_the_old_model_tells(
    prefix: str, right: tuple[str, ...], run: Run
) -> None:
    expected = save_fused_with_groups(prefix)
    torch.save(Lm().state_dict(), "parts.pt")
    done = run("diff", "fused.pt", *right, "--suggest", "rules.toml", "--format", "json")
    check_parts(fill_and_run(run, done), expected)
    assert any("OLD is the model that saved the file" in note for note in notes_in(done.data))


def test_the_way_to_likely_renames_is_said_once_and_works(run: Run) -> None:
    save_fused_with_groups("module.")
    done = run("diff", "fused.pt", "--model", "net.py:Lm")
    (line,) = [line for line in done.out.splitlines() if line.startswith("rename: ")]
    assert (done.out + done.err).count("--suggest") == 1
    assert "--rule" not in done.out + done.err
    printed = line.partition("run ")[2].strip("`")
    assert run(*shlex.split(printed)[1:]).status == 1
    assert "qkv" in Path(shlex.split(printed)[-1]).read_text()
    torch.save({"some.weight": torch.ones(2, 9)}, "other.pt")
    done = run("diff", "other.pt", "--model", "net.py:Net")
    (line,) = [line for line in done.out.splitlines() if line.startswith("rename: ")]
    assert line.endswith("run `ckpttool remap other.pt --rule 'FROM => TO' -o other.renamed.pt`")
    assert (done.out + done.err).count("--rule") == 1


@pytest.mark.parametrize("suggests", [False, True])
def test_rules_of_two_definitions_move_the_optimizer_too(suggests: bool, run: Run) -> None:
    expected = save_fused_with_groups("module.")
    old = ("net.py:Lm(fused=True)", "--optimizer", "net.py:grouped")
    assert run("trace", *old, "-o", "names.json").status == 0
    words = ("--suggest", "rules.toml") if suggests else ()
    new = ("--model", "net.py:Lm", "--optimizer", "net.py:grouped")
    done = run("diff", "names.json", *new, *words, "--format", "json")
    check_parts(fill_and_run(run, done), expected)


def test_rules_that_leave_keys_were_tried_and_say_what_is_left(run: Run) -> None:
    """Here they fix less than half of the differences."""
    torch.save({"embedding.weight": torch.ones(7, 6)}, "some.pt")
    words = ("diff", "some.pt", "--model", "net.py:Lm", "--suggest", "rules.toml")
    done = run(*words, "--format", "json")
    (fix,) = done.data["fix"]
    assert (fix["tried"], fix["complete"]) == (True, False)
    line = shlex.split(fix["command"])
    assert run(*line[1:]).status == 0
    missing = Lm().load_state_dict(torch.load(line[line.index("-o") + 1]), strict=False)
    assert missing.unexpected_keys == []
    left = {key for group in done.data["unfixed"] for key in group["keys"]}
    assert left == set(missing.missing_keys)


@pytest.mark.parametrize("with_model", [False, True])
def test_reordered_optimizers_of_two_files_name_both_models(with_model: bool, run: Run) -> None:
    source = """
class New(Net):
    def __init__(self):
        super().__init__()
        self._modules["a"] = self._modules.pop("a")
"""
    Path("net.py").write_text(CODE + source)
    exec(source, scope)
    models = {"old": Net(), "new": scope["New"]()}
    for name, model in models.items():
        torch.save(
            {"model": model.state_dict(), "optimizer": stepped(model).state_dict()}, f"{name}.pt"
        )
    words = ("--model", "net.py:New") if with_model else ()
    done = run("diff", "old.pt::optimizer", "new.pt::optimizer", *words, "--format", "json")
    (command,) = fixes_in(done.data)
    filled = {"OLD": "net.py:Net", "MODEL": "net.py:New", "OPTIMIZER": "net.py:adam"}
    line = [filled.get(word, word) for word in shlex.split(command)]
    assert run(*line[1:]).status == 0
    content = torch.load(line[line.index("-o") + 1])
    model = scope["New"]()
    model.load_state_dict(content["model"], strict=True)
    optimizer = adam(model)
    optimizer.load_state_dict(content["optimizer"])
    saved = stepped(models["old"])
    for name, parameter in model.named_parameters():
        old = models["old"].get_parameter(name)
        assert torch.equal(
            optimizer.state[parameter]["exp_avg"] != 0, saved.state[old]["exp_avg"] != 0
        )
    assert (
        run(
            "diff",
            line[line.index("-o") + 1],
            "--model",
            "net.py:New",
            "--optimizer",
            "net.py:adam",
        ).status
        == 0
    )


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module."])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_folder_of_a_wrapped_tied_model_becomes_a_folder(prefix: str, name: str, run: Run) -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    config = transformers.LlamaConfig(
        vocab_size=17, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained("run")
    state = {prefix + key: value for key, value in model.state_dict().items()}
    if name.endswith(".bin"):
        torch.save(state, f"run/{name}")
    else:
        state.pop(f"{prefix}lm_head.weight")
        save_file(state, f"run/{name}", metadata={"format": "pt"})
    done = run("diff", "run", "--model", "hf:run", "--format", "json")
    assert "--to pretrained" in fixes_in(done.data)[0]
    out = paste(run, done)
    assert out.endswith("/")
    loaded = transformers.LlamaForCausalLM.from_pretrained(out)
    assert all(
        torch.equal(value, model.state_dict()[key]) for key, value in loaded.state_dict().items()
    )


@pytest.mark.parametrize("layers", [1, 6])
@pytest.mark.parametrize("section", ["", "model"])
def test_extra_state_is_dropped_by_the_hint(section: str, layers: int, run: Run) -> None:
    class Scaled(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"scale": 1}

        def set_extra_state(self, state: Any) -> None:
            pass

    state = nn.Sequential(*(Scaled(2, 2) for _ in range(layers))).state_dict()
    torch.save({section: state, "epoch": 3} if section else state, "x.pt")
    operands = ["x.pt", *([f"x.pt::{section}"] if section else [])]
    for command in (
        *(("convert", operand) for operand in operands),
        ("remap", "x.pt", "--rule", "0.{x} => a.{x}"),
    ):
        done = run(*command, "-o", "x.safetensors")
        assert done.status == 1
        line = shlex.split(done.err.partition("to leave out what is not a tensor: ")[2])
        assert line[0] == "ckpttool"
        assert run(*line[1:], "--force").status == 0
        written = load_file(line[line.index("-o") + 1])
        assert written.keys() == {key for key in state if not key.endswith("_extra_state")}
