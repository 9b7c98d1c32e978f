"""Messages: warnings on stderr, printed once; grouped problems; specific hints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from command import Run

pytestmark = pytest.mark.filterwarnings("default")

NOISY = """
import warnings
from torch import nn
class Layer(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        warnings.warn(f"old {id(self)}")
        print("a layer is made")
def build(): return nn.Sequential(*[Layer() for _ in range(20)])
def number(): return 3
def once():
    warnings.warn("only once")
    return nn.Linear(2, 2)
"""


@pytest.fixture(autouse=True)
def _working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("noisy.py").write_text(NOISY)
    torch.save({"a.w": torch.ones(2)}, "a.pt")
    torch.save({"a.w": torch.ones(3), "b.w": torch.ones(3)}, "b.pt")


def test_warnings_are_printed_to_stderr(run: Run) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "ema": {"w": torch.ones(2)}}, "ema.pt")
    torch.save({"model": {"w": torch.ones(3)}}, "plain.pt")
    done = run("diff", "ema.pt", "plain.pt")
    warning = "warning: not compared: ema in ema.pt only (for example ema.pt::ema)\n"
    assert (done.status, "warning:" in done.out, done.err) == (1, False, warning)


def test_warnings_do_not_repeat_the_report(run: Run) -> None:
    done = run("diff", "a.pt", "b.pt")
    assert (done.status, done.err) == (1, "")
    assert done.out.splitlines()[0] == (
        "a.pt and b.pt differ: 1 key only in b.pt, 1 tensor of another shape"
    )
    assert "no fix: 1 key missing from a.pt (b.w): copy the values from" in done.out


def test_repeated_output_of_model_code_is_printed_once(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run("diff", "--model", "noisy.py:build")
    assert (done.status, "a layer" in done.out) == (0, False)
    lines = done.err.splitlines()
    assert lines.count("a layer is made") == 1
    (warned,) = [line for line in lines if line.startswith("warning: UserWarning: old ")]
    assert "more from there" in warned


def test_a_warning_of_model_code_names_its_line(run: Run) -> None:
    done = run("diff", "--model", "noisy.py:once")
    assert re.fullmatch(r"warning: UserWarning: only once \(.*noisy.py:\d+\)\n", done.err)


def test_json_contains_all_problems(run: Run) -> None:
    torch.save({f"k{i}": torch.ones(1) for i in range(42)}, "many.pt")
    done = run(
        "remap",
        "many.pt",
        "--model",
        "noisy.py:build",
        "--to",
        "runtime",
        "--dry-run",
        "--format",
        "json",
    )
    assert (done.status, len(done.data["problems"])) == (1, 42)
    assert "... and 37 more (--format json)" in done.err


def test_group_with_several_shapes_shows_them(run: Run) -> None:
    for name, size in (("c.pt", 2), ("d.pt", 3)):
        torch.save({f"layers.{i}.w": torch.ones(size + i) for i in range(2)}, name)
    out = run("diff", "c.pt", "d.pt").out
    assert "  layers.0.w: [2] instead of [3]\n  layers.1.w: [3] instead of [4]\n" in out


def test_dry_run_groups_repeated_layers(run: Run) -> None:
    torch.save({f"layers.{i}.{leaf}": torch.ones(1) for i in range(30) for leaf in "ab"}, "deep.pt")
    done = run("remap", "deep.pt", "--to", "ddp", "--dry-run")
    assert done.status == 0
    lines = [" ".join(line.split()) for line in done.out.splitlines()]
    assert "layers.{0-29}.a -> module.layers.{0-29}.a" in lines
    assert sum("layers" in line for line in lines) == 2


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (
            ["diff", "noisy.py:build", "a.pt"],
            "noisy.py:build is a model, and diff compares checkpoints",
        ),
        (["diff", "--model", "a.pt", "b.pt"], "a.pt is not a model"),
        (
            ["diff", "--model", "noisy.py", "a.pt"],
            "noisy.py:Layer, noisy.py:build, noisy.py:number",
        ),
        (
            ["swap-weights", "a.pt", "b.pt", "-o", "o.pt2"],
            "PROGRAM is a .pt2 or a TorchScript archive, and comes first",
        ),
        (["trace", "noisy.py:number"], "gives an int, not an nn.Module"),
        (["trace", "pkg/model.py:build"], "name it pkg.model:build"),
    ],
)
def test_hint_names_the_operand(args: list[str], hint: str, run: Run) -> None:
    Path("pkg").mkdir()
    Path("pkg/__init__.py").touch()
    Path("pkg/parts.py").write_text("from torch import nn\n")
    Path("pkg/model.py").write_text("from .parts import nn\ndef build(): return nn.Linear(2, 2)\n")
    done = run(*args)
    assert (done.status, hint in done.err) == (2, True)


def test_models_as_checkpoints_get_a_command_that_compares_them(run: Run) -> None:
    Path("two.py").write_text(
        "from torch import nn\ndef old(): return nn.Linear(2, 2)\n"
        "def new(): return nn.Linear(2, 3)\n"
    )
    done = run("diff", "two.py:old", "two.py:new")
    assert done.status == 2
    trace, diff = done.err.splitlines()[-1].removeprefix("hint: ").split(" && ")
    assert run(*trace.split()[1:]).status == 0
    compared = run(*diff.split()[1:])
    assert compared.status == 1
    assert "[3, 2] instead of [2, 2]" in compared.out
    done = run("diff", "two.py:old", "two.py:new")
    assert "-o names.old.json" in done.err
    torch.save(torch.nn.Linear(2, 2).state_dict(), "linear.pt")
    for words in (["linear.pt", "two.py:old"], ["two.py:old", "linear.pt"], ["two.py:old"]):
        hint = run("diff", *words).err.splitlines()[-1]
        assert run(*hint.split()[2:]).status == 0


def test_a_folder_as_a_model_gets_a_command_that_builds_its_model(run: Run) -> None:
    transformers = pytest.importorskip("transformers")

    config = transformers.LlamaConfig(
        **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 8),
        **dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 1),
    )
    transformers.LlamaForCausalLM(config).save_pretrained("folder")
    done = run("diff", "folder", "--model", "folder")
    assert done.status == 2
    words = done.err.splitlines()[-1].split()[-2:]
    assert words == ["--model", "hf:folder"]
    assert run("diff", "folder", *words).status == 0


def test_swapped_operands_get_a_corrected_command(run: Run) -> None:
    torch.export.save(torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),)), "p.pt2")
    torch.save(torch.nn.Linear(2, 2).state_dict(), "w.pt")
    done = run("swap-weights", "w.pt", "p.pt2", "-o", "o.pt2")
    assert done.status == 2
    hint = done.err.splitlines()[-1]
    assert hint == "hint: the program comes first: ckpttool swap-weights p.pt2 w.pt -o o.pt2"
    assert run(*hint.partition("ckpttool ")[2].split()).status == 0
