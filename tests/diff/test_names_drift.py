"""A committed names file against the model's code: which changes break checkpoints, and how to
migrate them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from command import Run, fixes_in, notes_in
from places import ROOT
from surroundings import free_memory

LINEAR = "\n        self.head = nn.Linear(width, 4)"

DIFF = ("diff", "names.json", "--model", "model.py:build", "--optimizer", "model.py:optimizer")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy examples/ci, and save a checkpoint of its model and optimizer after one step."""
    shutil.copytree(
        ROOT / "examples" / "ci", tmp_path / "ci", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in [name for name in os.environ if name.startswith("CKPTTOOL_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path / "ci")
    net, optimizer = build_net()
    net(torch.randn(5, 8)).sum().backward()
    optimizer.step()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, "CKPT")
    return tmp_path / "ci"


def build_net() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    spec = importlib.util.spec_from_file_location("changed", "model.py")
    assert spec is not None
    module: Any = importlib.util.module_from_spec(spec)
    assert spec.loader is not None
    spec.loader.exec_module(module)
    net = module.build()
    return net, module.optimizer(net)


def change(*pairs: tuple[str, str]) -> None:
    text = Path("model.py").read_text()
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    Path("model.py").write_text(text)
    shutil.rmtree("__pycache__", ignore_errors=True)


def load_moments(path: str) -> dict[str, torch.Tensor]:
    net, optimizer = build_net()
    saved = torch.load(path)
    net.load_state_dict(saved["model"], strict=True)
    optimizer.load_state_dict(saved["optimizer"])
    return {
        name: optimizer.state[parameter]["exp_avg"] for name, parameter in net.named_parameters()
    }


def run_command(run: Run, command: str) -> None:
    words = shlex.split(command)
    assert words[0] == "ckpttool"
    assert run(*words[1:]).status in (0, 1)


def test_a_rename_is_reported_migrated_and_accepted(repository: Path, run: Run) -> None:
    moments = load_moments("CKPT")
    assert run(*DIFF).status == 0
    change(("self.head", "self.classifier"), ("self.embed", "self.embedding"))
    done = run(*DIFF, "--format", "json")
    assert done.status == 1
    assert done.data["summary"] == {"same": 12, "missing": 4, "unexpected": 4}
    assert any("rejects checkpoints with the old keys" in note for note in notes_in(done.data))
    assert run(*DIFF, "--suggest", "migrate.toml").status == 1
    assert run("remap", "CKPT", "--rules", "migrate.toml", "-o", "new.pt").status == 0
    renamed = {
        name.replace("head", "classifier").replace("embed", "embedding"): m
        for name, m in moments.items()
    }
    result = load_moments("new.pt")
    assert result.keys() == renamed.keys()
    assert all(torch.equal(result[name], renamed[name]) for name in renamed)
    for command in fixes_in(done.data):
        run_command(run, command)
    assert load_moments("CKPT.renamed.pt").keys() == renamed.keys()
    updated = run(*DIFF, "--update")
    assert (updated.status, "differ" in updated.out) == (0, False)
    answer = "model.py:build has changed since names.json: 4 likely renames"
    assert updated.out.splitlines()[0] == answer
    assert "names.json has the names of model.py:build now" in updated.said[1]
    assert run(*DIFF).status == 0
    before = Path("names.json").stat().st_mtime_ns
    assert "is as it was" in run(*DIFF, "--update").out
    assert Path("names.json").stat().st_mtime_ns == before


def test_a_changed_definition_order_changes_the_ids(repository: Path, run: Run) -> None:
    """A strict load succeeds, but torch would assign every moment to the wrong parameter."""
    moments = load_moments("CKPT")
    change(
        (LINEAR, ""), ("self.embed = ", "self.head = nn.Linear(width, 4)\n        self.embed = ")
    )
    done = run(*DIFF, "--format", "json")
    assert done.status == 1
    assert done.data["summary"] == {"same": 16, "order": 16}
    assert {entry["detail"] for entry in done.data["entries"] if entry["status"] == "order"} == set(
        moments
    )
    assert any("accepts the old keys" in note for note in notes_in(done.data))
    (command,) = fixes_in(done.data)
    run_command(run, command)
    result = load_moments("CKPT.migrated.pt")
    assert all(torch.equal(result[name], moments[name]) for name in moments)


@pytest.mark.parametrize(
    ("old", "new", "statuses"),
    [
        ("nn.Linear(8, width)", "nn.Linear(8, width, bias=False)", {"unexpected", "order"}),
        ("nn.Linear(width, 4)", "nn.Linear(width, 5)", {"shape"}),
        ("nn.Linear(width, 4)", "nn.Linear(width, 4).half()", {"dtype"}),
        (
            LINEAR,
            LINEAR + "\n        self.scale = nn.Parameter(torch.ones(1))",
            {"missing", "order"},
        ),
        (LINEAR, LINEAR + "\n        self.register_buffer('scale', torch.ones(1))", {"missing"}),
        ("model.parameters()", "reversed(list(model.parameters()))", {"order"}),
        ("model.parameters()", "model.head.parameters()", {"unexpected", "order"}),
        ("AdamW", "SGD", set()),
        ("'lost'", "'gone'", {"unexpected", "missing"}),
    ],
)
def test_a_code_change_has_the_expected_statuses(
    repository: Path, run: Run, old: str, new: str, statuses: set[str]
) -> None:
    if old == "'lost'":  # a parameter that is not saved: only the optimizer knows its name
        hook = (
            "\n        self.register_state_dict_post_hook(lambda module, state, *_:"
            " state.__delitem__('lost'))"
        )
        lost = "\n        self.register_parameter('lost', nn.Parameter(torch.ones(1)))"
        change(
            (LINEAR, LINEAR + lost + hook),
            ("__delitem__('lost')", "__delitem__(*module._parameters)"),
        )
        assert run(*DIFF, "--update", "-q").status == 0
    change((old, new))
    done = run(*DIFF, "--format", "json")
    assert done.status == 1
    assert set(done.data["summary"]) - {"same"} == statuses
    assert run(*DIFF, "--update", "-q").status == 0
    assert run(*DIFF).status == 0


def test_changed_hooks_are_differences(repository: Path, run: Run) -> None:
    hook = "\n        self.register_state_dict_post_hook(rename)"
    rename = (
        "def rename(module, state, prefix, meta):\n    state[prefix + 'out.weight'] ="
        " state.pop(prefix + '{}.weight')"
    )
    change((LINEAR, LINEAR + hook), ("def build", rename.format("head") + "\n\n\ndef build"))
    assert run(*DIFF, "--update", "-q").status == 0
    change(("self.head", "self.inner"), ("head.weight", "inner.weight"))
    done = run(*DIFF, "--format", "json")
    renamed = [entry for entry in done.data["entries"] if entry["status"] == "renamed"]
    assert [(entry["left"], entry["right"]) for entry in renamed] == [
        (["head.weight"], ["inner.weight"])
    ]
    change(("state.pop(prefix + 'inner.weight')", "2 * state.pop(prefix + 'inner.weight')"))
    done = run(*DIFF, "--format", "json")
    assert ["out.weight"] in [
        entry["left"] for entry in done.data["entries"] if entry["status"] == "transformed"
    ]


def test_parameters_added_to_the_optimizer_are_listed(repository: Path, run: Run) -> None:
    change(("model.parameters()", "model.head.parameters()"))
    assert run(*DIFF, "--update", "-q").status == 0
    change(("model.head.parameters()", "model.parameters()"))
    entries = run(*DIFF, "--format", "json").data["entries"]
    result = {(entry["status"], entry["detail"]) for entry in entries if entry["status"] != "same"}
    others = [name for name, _ in build_net()[0].named_parameters() if not name.startswith("head.")]
    assert result == {
        *(("missing", name) for name in others),
        ("order", "head.weight"),
        ("order", "head.bias"),
    }


def test_an_optimizer_missing_from_the_names_file_is_reported(repository: Path, run: Run) -> None:
    names = ("names.json", "--model", "model.py:build")
    assert run("trace", "model.py:build", "-o", "names.json", "--force").status == 0
    assert run("diff", *names).status == 0
    done = run("diff", *names, "--optimizer", "model.py:optimizer")
    assert (done.status, "the optimizer is AdamW; it was not named" in done.out + done.err) == (
        1,
        True,
    )


def test_changed_values_added_by_hooks_are_differences(repository: Path, run: Run) -> None:
    hook = "\n        self.register_state_dict_post_hook(add)"
    add = (
        "def add(module, state, *_):\n    state['added'] = torch.ones(2)\n    state['twice'] = 2"
        " * state['head.bias']"
    )
    change((LINEAR, LINEAR + hook), ("class Cl", f"{add}\n\n\nclass Cl"))
    assert run(*DIFF, "--update", "-q").status == 0
    assert run(*DIFF).status == 0
    change(("torch.ones(2)", "torch.ones(3)"))
    done = run(*DIFF, "--format", "json")
    assert [entry["left"] for entry in done.data["entries"] if entry["status"] == "shape"] == [
        ["added"]
    ]


def test_without_memory_to_load_the_old_keys_a_note_says_so(
    repository: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the result of loading the old keys depends on values."""
    hook = "\n        self.register_load_state_dict_pre_hook(read)"
    read = "def read(module, state, *_):\n    assert float(state['embed.weight'].sum()) < 1e9"
    change((LINEAR, LINEAR + hook), ("class Cl", f"{read}\n\n\nclass Cl"))
    assert run(*DIFF, "--update", "-q").status == 0
    change(("self.head", "self.classifier"))
    free = 4 * sum(
        parameter.nbytes for parameter in build_net()[0].parameters()
    )  # tracing needs 3 times the size of the model, loading 5 times
    free_memory(monkeypatch, free)
    notes = notes_in(run(*DIFF, "--format", "json").data)
    assert any(
        note.startswith("could not check if the new code loads the old keys") for note in notes
    )


def test_wrong_usage_is_an_error(repository: Path, run: Run) -> None:
    line = ("diff", "names.json", "--model", "model.py:build")
    done = run(*line)  # the file has optimizer ids, but no --optimizer was passed
    assert (done.status, "has the ids of an optimizer (AdamW)" in done.err) == (2, True)
    assert run("diff", "names.json").status == 2  # no model
    assert run(*DIFF, "--values").status == 2
    assert run(*DIFF, "CKPT").status == 2
    assert run("diff", "none.json", "--update").status == 2
    assert run("diff", "CKPT", "--update").status == 2


LAYERS = """
from torch import nn

class Net(nn.Module):
    def __init__(self, *sizes):
        super().__init__()
        for name, size in sizes:
            setattr(self, name, nn.Linear(4, size))

def net(): return Net(("first", 3), ("second", 5))
def reordered(): return Net(("second", 5), ("first", 3))
def fused(): return Net(("qkv", 12), ("out", 6))
def split(): return Net(*((name, 4) for name in ("q_proj", "k_proj", "v_proj")), ("out", 6))
"""


@pytest.mark.parametrize(
    ("old", "new", "commands"),
    [("net", "reordered", ["remap"]), ("fused", "split", ["diff", "remap"])],
)
def test_a_split_is_fixed_with_rules_and_a_new_order_with_the_models(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run: Run,
    old: str,
    new: str,
    commands: list[str],
) -> None:
    """The fix depends on the parameter order even without an optimizer in the names file."""
    monkeypatch.chdir(tmp_path)
    Path("layers.py").write_text(LAYERS)
    assert run("trace", f"layers.py:{old}", "-o", "names.json").status == 0
    spec = importlib.util.spec_from_file_location("layers", "layers.py")
    assert spec is not None
    module: Any = importlib.util.module_from_spec(spec)
    assert spec.loader is not None
    spec.loader.exec_module(module)
    net = getattr(module, old)()
    optimizer = torch.optim.Adam(net.parameters())
    sum(parameter.sum() for parameter in net.parameters()).backward()
    optimizer.step()
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state if new == "reordered" else state["model"], "CKPT")
    fix = fixes_in(
        run("diff", "names.json", "--model", f"layers.py:{new}", "--format", "json").data
    )
    assert [line.split()[1] for line in fix] == commands
    for line in fix:
        run_command(run, line)
    migrated = torch.load(fix[-1].split()[-1])
    net = getattr(module, new)()
    net.load_state_dict(migrated.get("model", migrated), strict=True)
    if "optimizer" in migrated:
        optimizer = torch.optim.Adam(net.parameters())
        optimizer.load_state_dict(migrated["optimizer"])
        assert all(
            optimizer.state[parameter]["exp_avg"].shape == parameter.shape
            for parameter in net.parameters()
        )


def test_two_names_files_can_be_compared(repository: Path, run: Run) -> None:
    names = json.loads(Path("names.json").read_text())
    names["serialized"][0]["shape"] = [3, 3]
    Path("other.json").write_text(json.dumps(names))
    assert run("diff", "names.json", "names.json").status == 0
    assert run("diff", "names.json", "other.json", "--format", "json").data["summary"] == {
        "same": 15,
        "shape": 1,
    }


@pytest.mark.parametrize(
    ("shape", "old", "new"),
    [
        ("()", "calls", "counter"),
        ("(1,)", "scale", "running_total"),
        ("(7,)", "a.pe", "b.table"),
        ("(2, 3)", "a.pe", "b.table"),
    ],
)
def test_a_single_missing_and_a_single_unexpected_buffer_are_a_suggested_rename(
    run: Run, tmp_path: Path, old: str, new: str, shape: str
) -> None:
    for name, buffer in (("old", old), ("new", new)):
        (tmp_path / f"{name}.py").write_text(
            "import torch\nfrom torch import nn\n\n\ndef build():\n"
            "    net = nn.Sequential(nn.Linear(4, 4), nn.Module())\n    at = net[1]\n"
            f"    *way, name = {buffer!r}.split('.')\n"
            "    for part in way:\n        at.add_module(part, nn.Module())\n        at ="
            " at.get_submodule(part)\n"
            f"    at.register_buffer(name, torch.zeros({shape}))\n    return net\n"
        )
    names = tmp_path / "names.json"
    assert run("trace", f"{tmp_path}/old.py:build", "-o", names).status == 0
    done = run("diff", names, "--model", f"{tmp_path}/new.py:build", "--format", "json")
    assert [(one["left"], one["right"]) for one in done.data["suggested"]] == [
        ([f"1.{old}"], [f"1.{new}"])
    ]
    assert done.data["ambiguous"] == []
    assert fixes_in(done.data) == [
        f"ckpttool remap CKPT --rule '1.{old} => 1.{new}' -o CKPT.renamed.pt"
    ]


CHANGED = """
import torch
from torch import nn
def build(): return nn.ModuleDict({"a": nn.Linear(4, 8), "b": nn.Linear(4, 5, bias=False)})
def new():
    a, b = nn.Linear(4, 8, dtype=torch.bfloat16), nn.Linear(4, 6, bias=False)
    return nn.ModuleDict({"a": a, "b": b})
"""


def test_a_change_of_dtype_or_shape_says_what_is_new_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(CHANGED)
    assert run("trace", "model.py:build", "-o", "names.json").status == 0
    line = ("diff", "names.json", "--model", "model.py:new")
    done = run(*line)
    assert "dtype: 2 keys, bfloat16 instead of float32" in done.out
    assert "reason: bfloat16 instead of float32 (2 keys)" in done.out
    assert "b.weight: [6, 4] instead of [5, 4]" in done.out
    entries = {entry["left"][0]: entry for entry in run(*line, "--format", "json").data["entries"]}
    assert entries["a.weight"]["reason"] == "bfloat16 instead of float32"
    assert entries["b.weight"]["detail"] == "[6, 4] instead of [5, 4]"
