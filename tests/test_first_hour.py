"""Eight everyday jobs of a new user: fresh models, printed fixes, and torch as the oracle.

first_hour.md holds the first lines that `diff` prints. `UPDATE_DOCS=1 make test
ARGS=tests/test_first_hour.py` regenerates it.
"""

from __future__ import annotations

import os
import pickle
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.nn.parallel import DistributedDataParallel

import ckpttool
from command import Done, Run, fixes_in
from places import TESTS

Write = Callable[[str, str], Any]
PAGE = TESTS / "first_hour.md"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    torch.manual_seed(0)


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write a module of the user's project and import it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names = []

    def write(name: str, source: str) -> Any:
        Path(f"{name}.py").write_text(
            "import torch\nfrom torch import nn\n" + textwrap.dedent(source)
        )
        sys.modules.pop(name, None)
        names.append(name)
        return __import__(name)

    yield write
    for name in names:
        sys.modules.pop(name, None)


def golden(job: str, done: Done) -> None:
    """Assert that the page shows the first five lines under the job's heading."""
    assert done.status == 1, done.said
    text = PAGE.read_text(encoding="utf-8")
    (shown,) = re.findall(
        rf"^## {re.escape(job)}\n.*?^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL
    )
    lines = [line.rstrip() for line in done.out.splitlines() if line.strip()]
    first = "".join(f"{line}\n" for line in lines[:5])
    if os.environ.get("UPDATE_DOCS"):
        before, heading, after = text.partition(f"## {job}\n")
        PAGE.write_text(before + heading + after.replace(shown, first, 1), encoding="utf-8")
    else:
        assert first == shown


def run_printed(run: Run, command: str) -> Done:
    name, *words = shlex.split(command)
    assert name == "ckpttool"
    return run(*words)


def only_fix(run: Run, *question: object) -> str:
    """Return the only command that `diff` suggests; it must be complete."""
    done = run(*question, "--format", "json")
    assert done.status == 1, done.said
    assert len(fixes_in(done.data)) == 1, done.out
    return str(fixes_in(done.data)[0])


def output_of(command: str) -> str:
    words = shlex.split(command)
    return words[words.index("-o") + 1]


def two_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Take two steps with gradients that depend only on the parameter values; return copies of the
    parameters.
    """
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = parameter.detach().sin()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


HOOKED = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.gate = nn.Parameter(torch.zeros(1))
        self.register_state_dict_post_hook(self._hide)
        self.register_load_state_dict_pre_hook(self._show)

    @staticmethod
    def _hide(module, state, prefix, metadata):
        for key in [k for k in state if k.startswith(prefix + "layer.")]:
            state[prefix + key[len(prefix) + 6 :]] = state.pop(key)

    @staticmethod
    def _show(module, state, prefix, *rest):
        for key in [k for k in state if k.startswith(prefix) and not k.endswith("gate")]:
            state[prefix + "layer." + key[len(prefix) :]] = state.pop(key)

    def forward(self, x):
        return self.layer(x) * (1 + self.gate)

def build():
    return nn.Sequential(nn.Linear(3, 6), Block(), nn.ReLU(), Block(), nn.Linear(6, 2))
"""


def test_a_new_weights_go_from_a_hooked_model_to_its_exported_program(
    run: Run, code: Write
) -> None:
    model = code("hooked", HOOKED).build().eval()
    x = torch.randn(2, 3)
    torch.export.save(torch.export.export(model, (x,)), "deployed.pt2")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    torch.save(model.state_dict(), "trained.pt")

    done = run("diff", "trained.pt", "deployed.pt2", "--model", "hooked.py:build")
    assert done.status == 1
    assert "_hide" in done.out  # the hook is named
    golden("New weights for an exported program", done)
    done = run(
        "swap-weights", "deployed.pt2", "trained.pt", "-o", "new.pt2", "--model", "hooked.py:build"
    )
    assert done.status == 0, done.said
    assert torch.equal(torch.export.load("new.pt2").module()(x), model(x))
    # Without the model the names do not match: the swap is refused, nothing is written, and the
    # hint names --model.
    done = run("swap-weights", "deployed.pt2", "trained.pt", "-o", "guess.pt2")
    assert done.status == 1
    assert "--model" in done.err
    assert not Path("guess.pt2").exists()


def test_b_compiled_ddp_run_with_two_param_groups_resumes_without_wrappers(
    run: Run, code: Write
) -> None:
    source = """
    def build():
        return nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 2))

    def optimizer(model):
        decay = [p for p in model.parameters() if p.ndim > 1]
        rest = [p for p in model.parameters() if p.ndim == 1]
        return torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "lr": 0.01}])
    """
    net = code("net", source)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(torch.compile(net.build(), backend="eager"))
        optimizer = net.optimizer(wrapped)
        two_steps(wrapped, optimizer)
        torch.save(
            {"model": wrapped.state_dict(), "optimizer": optimizer.state_dict(), "step": 2},
            "run.pt",
        )
        expected = two_steps(wrapped, optimizer)
    finally:
        dist.destroy_process_group()

    question = ("diff", "run.pt", "--model", "net.py:build", "--optimizer", "net.py:optimizer")
    golden("A compiled DDP run with two param groups", run(*question))
    fix = only_fix(run, *question)
    assert run_printed(run, fix).status == 0
    assert run("diff", output_of(fix), *question[2:]).status == 0
    loaded = torch.load(output_of(fix))
    model = net.build()
    model.load_state_dict(loaded["model"], strict=True)
    optimizer = net.optimizer(model)
    optimizer.load_state_dict(loaded["optimizer"])
    assert loaded["step"] == 2
    assert all(torch.equal(a, b) for a, b in zip(two_steps(model, optimizer), expected))
    # A remap that would change nothing fails, and lists the wrappers.
    done = run("remap", "run.pt", "-o", "same.pt")
    assert done.status == 1
    assert "module._orig_mod" in done.err or "torch.compile" in done.err
    assert not Path("same.pt").exists()


def test_c_optimizer_resumes_after_a_reorder_and_a_renamed_block(run: Run, code: Write) -> None:
    source = """
    class Old(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
            self.head = nn.Linear(4, 4)

    class New(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 4)
            self.backbone = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def adamw(model):
        return torch.optim.AdamW(model.parameters(), lr=0.1)
    """
    net = code("reorder", source)
    old = net.Old()
    optimizer = net.adamw(old)
    two_steps(old, optimizer)
    torch.save({"model": old.state_dict(), "optimizer": optimizer.state_dict()}, "old.pt")
    two_steps(old, optimizer)

    question = ("diff", "old.pt", "--model", "reorder.py:New", "--optimizer", "reorder.py:adamw")
    golden("A model with another order and a renamed block", run(*question))
    rule = "encoder.{x*} => backbone.{x*}"
    whole = ("--model", "reorder.py:Old", "--to-model", "reorder.py:New", "--rule", rule)
    both = ("--optimizer", "reorder.py:adamw", "--to-optimizer", "reorder.py:adamw")
    done = run("remap", "old.pt", "-o", "new.pt", *whole, *both)
    assert done.status == 0, done.said
    loaded, new = torch.load("new.pt"), net.New()
    new.load_state_dict(loaded["model"], strict=True)
    resumed = net.adamw(new)
    resumed.load_state_dict(loaded["optimizer"])
    two_steps(new, resumed)
    renamed = {
        name.replace("backbone", "encoder"): value for name, value in new.state_dict().items()
    }
    assert all(torch.equal(value, renamed[name]) for name, value in old.state_dict().items())
    # The same rule without the model renames only the keys. The ids keep the old order, which is
    # reported.
    done = run("remap", "old.pt", "-o", "keys.pt", "--rule", rule)
    assert done.status == 0, done.said
    assert "optimizer ids keep the order" in done.out + done.err


def test_d_hugging_face_llama_to_fused_projections_and_back(run: Run) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=17, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained("hf")
    Path("fuse.toml").write_text(
        """
        [[rule]]
        join = ["model.layers.{i}.self_attn.q_proj.{p}", "model.layers.{i}.self_attn.k_proj.{p}",
                "model.layers.{i}.self_attn.v_proj.{p}"]
        into = "model.layers.{i}.self_attn.qkv.{p}"
        sizes = [8, 4, 4]
        [[rule]]
        rename = "model.layers.{i}.{x*} => blocks.{i}.{x*}"
        """
    )
    done = run("remap", "hf", "-o", "fused.safetensors", "--rules", "fuse.toml")
    assert done.status == 0, done.said
    golden("Llama to fused projections", run("diff", "hf", "fused.safetensors"))
    attention = model.model.layers[0].self_attn
    joined = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
    assert torch.equal(load_file("fused.safetensors")["blocks.0.self_attn.qkv.weight"], joined)
    done = run(
        "remap", "fused.safetensors", "-o", "back.safetensors", "--rules", "fuse.toml", "--reverse"
    )
    assert done.status == 0, done.said
    assert run("diff", "back.safetensors", "hf", "--values").status == 0
    Path("again").mkdir()
    config.save_pretrained("again")
    Path("back.safetensors").rename("again/model.safetensors")
    again = transformers.LlamaForCausalLM.from_pretrained("again").eval()
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_e_changed_names_fail_a_build_and_known_differences_are_accepted(
    run: Run, code: Write
) -> None:
    code("service", "def build():\n    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))\n")
    assert run("trace", "service.py:build", "-o", "names.json").status == 0
    assert run("diff", "names.json", "--model", "service.py:build").status == 0
    assert run("check", "names.json", "--model", "service.py:build").status == 0
    code(
        "service",
        "def build():\n    return nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2),"
        " nn.Linear(2, 3))\n",
    )
    golden("Changed names in a build", run("diff", "names.json", "--model", "service.py:build"))
    done = run("diff", "names.json", "--model", "service.py:build", "--format", "github")
    assert done.status == 1
    assert "::error" in done.out
    assert "2.weight" in done.out  # annotations name keys
    done = run("diff", "names.json", "--model", "service.py:build", "--format", "json")
    failing = [entry for entry in done.data["entries"] if entry["status"] != "same"]
    known = [
        f"{entry['status']} {[*entry['left'], *entry['right']][0]} # head added"
        for entry in failing
    ]
    accepted = [word for line in known for word in ("--ignore", line)]
    assert run("diff", "names.json", "--model", "service.py:build", *accepted).status == 0
    done = run(
        "diff",
        "names.json",
        "--model",
        "service.py:build",
        *accepted,
        "--ignore",
        "missing nothing.* # typo",
    )
    assert done.status == 0
    done = run("diff", "names.json", "--model", "service.py:build", *accepted,
               "--ignore", "missing nothing.* # typo", "--fail-on-unused")  # fmt: skip
    assert done.status == 1
    assert "unused" in done.out.splitlines()[0]  # the headline says why
    # A typo in the model is an error, not a difference.
    for command in ("diff", "check"):
        assert run(command, "names.json", "--model", "servise.py:build").status == 2
        assert run(command, "names.json", "--model", "service.py:bild").status == 2


class _Runs:
    """A pickle that would create a file if anything executed it."""

    def __init__(self, where: Path):
        self.where = where

    def __reduce__(self) -> Any:
        return (eval, (f"open({str(self.where)!r}, 'w').close()",))


def test_f_an_unknown_file_is_inspected_and_cleaned_without_running_it(
    run: Run, tmp_path: Path
) -> None:
    mark = tmp_path / "executed"
    torch.save(
        {"weight": torch.arange(4.0), "callback": _Runs(mark)}, "unknown.pth", pickle_module=pickle
    )
    done = run("inspect", "unknown.pth")
    assert done.status == 0
    assert "eval" in done.out
    assert "executed" in done.out  # the call's arguments are shown
    done = run("check", "unknown.pth")
    assert done.status == 1
    assert "--allow" not in done.out + done.err
    (printed,) = re.findall("do not load it; to take the weights only, run (ckpttool .*)", done.out)
    assert run_printed(run, printed).status == 0
    assert torch.equal(load_file(output_of(printed))["weight"], torch.arange(4.0))
    done = run("remap", "unknown.pth", "-o", "renamed.pth", "--rule", "weight => w")
    assert done.status == 1
    assert not Path("renamed.pth").exists()
    done = run(
        "remap",
        "unknown.pth",
        "-o",
        "clean.safetensors",
        "--rule",
        "weight => w",
        "--drop",
        "callback",
    )
    assert done.status == 0, done.said
    assert torch.equal(load_file("clean.safetensors")["w"], torch.arange(4.0))
    golden("An unknown file, cleaned", run("diff", "unknown.pth", "clean.safetensors"))
    assert not mark.exists()


def test_g_dcp_to_safetensors_and_a_rename_in_place_and_back(run: Run, tmp_path: Path) -> None:
    state = {"encoder.weight": torch.randn(8, 3), "encoder.bias": torch.randn(8)}
    dcp.save({"model": state}, checkpoint_id="step")
    before = {path.name: path.read_bytes() for path in Path("step").iterdir()}
    done = run("remap", "step", "-o", "step.safetensors")
    assert done.status == 0, done.said
    with safe_open("step.safetensors", "pt") as file:
        assert all(torch.equal(file.get_tensor(key), value) for key, value in state.items())
    done = run("remap", "step", "--in-place", "--rule", "encoder.{x} => backbone.{x}")
    assert done.status == 0, done.said
    golden("A rename in place", run("diff", "step", "step.safetensors"))
    dcp_to_torch_save("step", tmp_path / "step.pt")
    renamed = torch.load("step.pt")["model"]
    assert all(
        torch.equal(renamed[key.replace("encoder", "backbone")], value)
        for key, value in state.items()
    )
    assert run("undo", "step").status == 0
    assert {path.name: path.read_bytes() for path in Path("step").iterdir()} == before


def test_h_the_same_from_python(run: Run, code: Write) -> None:
    net = code(
        "python_net", "def build():\n    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))\n"
    )
    model = net.build()
    wrapped = {f"module._orig_mod.{key}": value for key, value in model.state_dict().items()}
    in_memory = {"model": wrapped, "epoch": 3}
    torch.save(in_memory, "wrapped.pt")
    golden("The same from Python", run("diff", "wrapped.pt", "--model", "python_net.py:build"))
    for source in (in_memory, "wrapped.pt"):
        found = ckpttool.diff(source, model=net.build)
        assert not found.identical
        assert len(repr(found)) <= 200
        result = ckpttool.remap(source, "plain.pt", model=net.build, to="serialized", force=True)
        assert len(repr(result)) <= 200
        loaded = torch.load("plain.pt")
        assert loaded["epoch"] == 3
        net.build().load_state_dict(loaded["model"], strict=True)
        assert all(
            torch.equal(value, loaded["model"][key]) for key, value in model.state_dict().items()
        )
    assert ckpttool.diff("plain.pt", model=net.build).identical
    with pytest.raises(TypeError, match="did you mean 'model'"):
        ckpttool.remap("wrapped.pt", "x.pt", modle=net.build)  # type: ignore[call-arg]
    ckpttool.remap("plain.pt", "renamed.pt", rule="0.{x} => first.{x}")
    assert "first.weight" in torch.load("renamed.pt")["model"]
