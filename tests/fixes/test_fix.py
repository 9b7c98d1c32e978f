"""`fix` writes a file that the model loads, or refuses with the reasons and writes nothing."""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel

import ckpttool
from command import Run

CODE = """
import torch
from torch import nn

class Hidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 3)
        self.head = nn.Linear(3, 2)
        self._register_state_dict_hook(self.rename)
        self.register_load_state_dict_pre_hook(self.back)

    @staticmethod
    def rename(module, state, prefix, metadata):
        for key in [key for key in state if key.startswith("layer.")]:
            state["hidden" + key[5:]] = state.pop(key)

    @staticmethod
    def back(module, state, prefix, *rest):
        for key in [key for key in state if key.startswith("layer.")]:
            state["stray" + key[5:]] = state.pop(key)
        for key in [key for key in state if key.startswith("hidden.")]:
            state["layer" + key[6:]] = state.pop(key)

def sgd(model):
    return torch.optim.AdamW([{"params": [p]} for p in reversed([*model.parameters()])])
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("fix_net.py").write_text(CODE)
    torch.manual_seed(0)


def model() -> nn.Module:
    found: nn.Module = __import__("fix_net").Hidden()
    return found


WRAPPED = {
    "runtime": lambda net: dict(net.named_parameters()),
    "ddp": lambda net: {f"module.{key}": value for key, value in net.state_dict().items()},
    "compiled": lambda net: {f"_orig_mod.{key}": value for key, value in net.state_dict().items()},
    "submodule": lambda net: {
        f"encoder.net.{key}": value for key, value in net.state_dict().items()
    },
}


@pytest.mark.parametrize("where", ["out", "in place"])
@pytest.mark.parametrize("form", WRAPPED)
def test_model_loads_the_fixed_file(form: str, where: str, run: Run) -> None:
    net = model()
    torch.save(WRAPPED[form](net), "in.pt")
    before = Path("in.pt").read_bytes()
    assert (
        run("fix", "in.pt", "--model", "fix_net.py:Hidden", "-o", "out.pt", "--dry-run").status == 0
    )
    assert not Path("out.pt").exists()
    out = ("-o", "out.pt") if where == "out" else ("--in-place",)
    done = run("fix", "in.pt", "--model", "fix_net.py:Hidden", *out, "--verify")
    assert done.status == 0, done.said
    other = model()
    other.load_state_dict(torch.load("out.pt" if where == "out" else "in.pt"), strict=True)
    assert all(
        torch.equal(value, other.state_dict()[key]) for key, value in net.state_dict().items()
    )
    assert where == "in place" or Path("in.pt").read_bytes() == before


def test_guessed_rules_are_refused_with_the_command_that_applies_them(run: Run) -> None:
    net = model()
    torch.save({f"old_{key}": value for key, value in net.state_dict().items()}, "in.pt")
    done = run("fix", "in.pt", "--model", "fix_net.py:Hidden", "-o", "out.pt")
    assert (done.status, "guessed from names and shapes" in done.err) == (1, True), done.said
    assert not Path("out.pt").exists()
    (hint,) = re.findall(r"if they are right, run (ckpttool .*)", " ".join(done.err.split()))
    before = {*Path().iterdir()}
    for line in hint.split("; "):
        assert run(*shlex.split(line)[1:]).status == 0
    (made,) = {*Path().iterdir()} - before
    model().load_state_dict(torch.load(made), strict=True)


@pytest.mark.parametrize("name", ["OLD", "CKPT", "MODEL", "PROGRAM.pt2"])
def test_a_file_may_be_called_as_a_placeholder(name: str, run: Run) -> None:
    model = nn.Linear(2, 3)
    torch.save({f"module.{key}": value for key, value in model.state_dict().items()}, name)
    done = run("diff", name, "--model", "torch.nn:Linear(in_features=2,out_features=3)")
    assert "not tried" not in done.out
    (line,) = re.findall(r"^fix: ckpttool (.*)$", done.out, re.M)
    assert f"./{name}" in shlex.split(line)
    assert run(*shlex.split(line)).status == 0
    out = shlex.split(line)[-1]
    model.load_state_dict(torch.load(out))
    diff = ckpttool.diff(name, model="torch.nn:Linear(in_features=2,out_features=3)")
    assert all(fix.tried for fix in diff.fix)


def test_unfixable_files_are_refused(run: Run) -> None:
    net = model()
    torch.save(net.state_dict(), "good.pt")
    torch.save({**net.state_dict(), "head.weight": torch.ones(5, 5)}, "bad.pt")
    torch.save({"model": {"head.bias": torch.ones(2)}}, "less.pt")
    for path, message in (("bad.pt", "head.weight"), ("less.pt", "head.weight")):
        done = run("fix", path, "--model", "fix_net.py:Hidden", "-o", "out.pt", "--report", "r.md")
        assert (done.status, message in done.err) == (1, True), done.said
        assert "ckpttool diff" in done.err
        assert not Path("out.pt").exists()
        assert not Path("r.md").exists()
    assert run("fix", "good.pt", "-o", "out.pt").status == 2
    assert run("fix", "good.pt", "--model", "fix_net.py:Hidden").status == 2


FITS = "already loads into fix_net.py:Hidden"


@pytest.mark.parametrize("out", ["out.pt", "out.safetensors", "out.dcp"])
def test_a_file_that_fits_is_copied(out: str, run: Run) -> None:
    torch.save(model().state_dict(), "good.pt")
    words = ("fix", "good.pt", "--model", "fix_net.py:Hidden", "-o", out)
    tried = run(*words, "--dry-run")
    assert (tried.status, f"{out} would have the same tensors as good.pt" in tried.out) == (0, True)
    assert not Path(out).exists()
    done = run(*words, "--verify")
    assert done.status == 0, done.said
    assert done.out.startswith(f"{out} has the same tensors as good.pt, in ")
    assert done.out.splitlines()[0].endswith(f"; good.pt {FITS}")
    assert run("diff", out, "good.pt", "--values").status == 0
    assert run("diff", out, "--model", "fix_net.py:Hidden").status == 0
    assert run(*words).status == 2  # OUT exists
    assert run(*words, "--force").status == 0


def test_a_training_checkpoint_that_fits_is_copied_completely(run: Run) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    torch.save(state, "good.pt")
    assert run("fix", "good.pt", "--model", "fix_net.py:Hidden", "-o", "out.pt").status == 0
    copy = torch.load("out.pt")
    assert copy["epoch"] == 3
    assert copy["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]
    assert run("diff", "good.pt", "out.pt", "--values", "--whole").status == 0
    # a format that cannot hold all of it
    done = run("fix", "good.pt", "--model", "fix_net.py:Hidden", "-o", "out.safetensors")
    assert (done.status, Path("out.safetensors").exists()) == (1, False)


def test_nothing_is_changed_in_place_if_the_file_fits(run: Run) -> None:
    torch.save(model().state_dict(), "good.pt")
    before = Path("good.pt").read_bytes()
    done = run("fix", "good.pt", "--model", "fix_net.py:Hidden", "--in-place")
    assert (done.status, done.out.splitlines()[0]) == (0, f"good.pt {FITS}: nothing was changed")
    assert Path("good.pt").read_bytes() == before


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("where", ["one/model.safetensors", "one", "shards", "run.dcp"])
def test_aliases_that_a_folder_cannot_hold_are_written_to_a_file(where: str, run: Run) -> None:
    """Like `save_pretrained`, the source has tied weights under one name."""
    net = Tied()
    weights = {"embed.weight": net.embed.weight.detach()}
    if where == "run.dcp":
        dcp.save(weights, checkpoint_id=where)
    else:
        Path("one").mkdir()
        save_file(weights, "one/model.safetensors")
        if where == "shards":
            assert run("convert", "one", "-o", "shards/", "--max-shard-size", "1KB").status == 0
    found = ckpttool.diff(where, model=Tied)
    assert [fix.complete for fix in found.fix] == [True]
    assert ckpttool.fix(where, "out.pt", model=Tied).output == "out.pt"
    other, live = Tied(), Tied()
    other.load_state_dict(torch.load("out.pt"), strict=True)
    ckpttool.load(where, live)
    for loaded in (other, live):
        assert torch.equal(loaded.head.weight, net.embed.weight)


def test_hint_with_a_remap_option_includes_the_command(run: Run) -> None:
    Path("tied.py").write_text(f"from torch import nn\n\n{inspect.getsource(Tied)}")
    net = Tied()
    torch.save({f"module.{key}": value for key, value in net.state_dict().items()}, "in.pt")
    done = run("fix", "in.pt", "--model", "tied.py:Tied", "-o", "out.safetensors")
    hint = " ".join(done.err.split()).partition("hint: ")[2]
    assert (done.status, hint.startswith("--keep-aliases keeps ")) == (1, True), done.said
    assert (
        run(*shlex.split(hint.partition("add it to: ckpttool ")[2]), "--keep-aliases").status == 0
    )
    assert list(load_file("out.safetensors")) == ["embed.weight"]
    Path("out.pt").touch()
    assert run("fix", "in.pt", "--model", "tied.py:Tied", "-o", "out.pt").err.endswith(
        "or name another file\n"
    )


def test_what_a_fix_leaves_out_is_named_once(run: Run) -> None:
    state = {f"net.{key}": value for key, value in nn.Linear(2, 3).state_dict().items()}
    torch.save({**state, "more.weight": torch.ones(2)}, "larger.pt")
    Path("small.py").write_text("from torch import nn\ndef build(): return nn.Linear(2, 3)\n")
    done = run("fix", "larger.pt", "--model", "small.py:build", "-o", "out.pt")
    assert done.status == 0
    assert done.out.count("more.weight") == 1
    assert "left" not in done.out.replace("left out", "").replace("Left out", "")


def test_an_optimizer_is_fixed_with_its_model(run: Run) -> None:
    net = model()
    optimizer = __import__("fix_net").sgd(net)
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    saved = {"model": WRAPPED["ddp"](net), "optimizer": optimizer.state_dict(), "step": 1}
    torch.save(saved, "in.pt")
    words = ("--model", "fix_net.py:Hidden", "--optimizer", "fix_net.py:sgd")
    done = run("fix", "in.pt", *words, "-o", "out.pt")
    assert done.status == 0, done.said
    assert run("diff", "out.pt", *words).status == 0
    loaded, other = torch.load("out.pt"), model()
    other.load_state_dict(loaded["model"])
    __import__("fix_net").sgd(other).load_state_dict(loaded["optimizer"])
    assert loaded["step"] == 1


@pytest.mark.parametrize("optimizer", [False, True])
def test_an_averaged_model_next_to_the_model_keeps_its_counter(optimizer: bool, run: Run) -> None:
    """Without it, AveragedModel does not load its own state again."""
    net = model()
    averaged = AveragedModel(net)
    averaged.update_parameters(net)
    weights = {f"module.{key}": value for key, value in net.state_dict().items()}
    file = {
        "model": weights,
        "ema": averaged.state_dict(),
        "optimizer": torch.optim.AdamW(net.parameters()).state_dict(),
    }
    torch.save(file, "run.pt")
    words = ("--optimizer", "fix_net.py:sgd") if optimizer else ()
    done = run("fix", "run.pt", "--model", "fix_net.py:Hidden", *words, "-o", "fixed.pt")
    assert done.status == 0
    assert "names of model and stays as it is (`remap --sections" in done.err
    fixed = torch.load("fixed.pt")
    model().load_state_dict(fixed["model"])
    AveragedModel(model()).load_state_dict(fixed["ema"])
    alone = run("fix", "run.pt::ema", "--model", "fix_net.py:Hidden", "-o", "ema.pt")
    assert alone.status == 0
    assert "n_averaged" in alone.out
    model().load_state_dict(torch.load("ema.pt"))


def test_from_python_with_objects() -> None:
    net = model()
    fixed = ckpttool.fix(WRAPPED["runtime"](net), "out.pt", model=__import__("fix_net").Hidden)
    assert fixed.output == "out.pt"
    model().load_state_dict(torch.load("out.pt"), strict=True)
    copied = ckpttool.fix("out.pt", "again.pt", model=__import__("fix_net").Hidden)
    assert (copied.output, copied.loads_into, copied.changes_content) == (
        "again.pt",
        "Hidden",
        False,
    )
    model().load_state_dict(torch.load("again.pt"), strict=True)
    with pytest.raises(ckpttool.CkptError, match="for a model"):
        ckpttool.fix("out.pt", "again.pt")


def test_only_remaining_keys_are_listed(run: Run) -> None:
    """A module around the model, as in Lightning, adds a buffer."""
    outer = nn.Module()
    outer.net, outer.loss = model(), nn.CrossEntropyLoss(torch.ones(2))
    torch.save(outer.state_dict(), "train.pt")
    output = run("diff", "train.pt", "--model", "fix_net.py:Hidden").out
    assert "train.pt has the prefix `net`" in " ".join(output.split())
    assert "4 renamed keys, 1 key only in train.pt" in output
    done = run("fix", "train.pt", "--model", "fix_net.py:Hidden", "-o", "out.pt")
    assert done.status == 1
    assert re.findall("^  .*@.*$", done.err, re.MULTILINE) == [
        "  not in fix_net.py:Hidden @ loss.weight"
    ]
    assert (
        run(
            "remap",
            "train.pt",
            "--model",
            "fix_net.py:Hidden",
            "--to",
            "serialized",
            "--drop",
            "loss.*",
            "-o",
            "out.pt",
        ).status
        == 0
    )
    model().load_state_dict(torch.load("out.pt"))


def test_hint_names_a_separate_optimizer_file(run: Run) -> None:
    """The layout of transformers' Trainer."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    sum(parameter.sum() for parameter in net.parameters()).backward()
    optimizer.step()
    Path("step").mkdir()
    save_file(net.state_dict(), "step/model.safetensors")
    torch.save(optimizer.state_dict(), "step/optimizer.pt")
    Path("opt.py").write_text(
        "import torch\ndef adam(model): return torch.optim.AdamW(model.parameters())\n"
    )
    done = run("diff", "step", "--model", "fix_net.py:Hidden", "--optimizer", "opt.py:adam")
    assert done.status == 2
    (hint,) = re.findall(r"name the file: ckpttool (.*)", " ".join(done.err.split()))
    assert run(*shlex.split(hint)).status == 0
    with pytest.raises(ckpttool.CkptError, match="separate file") as caught:
        ckpttool.load("step", net, optimizer)
    (path,) = re.findall("name the file: (.*)", caught.value.hint)
    assert ckpttool.load(path, net, optimizer).optimizer == ""
