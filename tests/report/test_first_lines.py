"""The first five lines of common commands, and text that fits the terminal."""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from ckpttool import Problem
from ckpttool.core.codes import CODES
from ckpttool.diffing.causes import Code
from ckpttool.report import render
from ckpttool.report.document import (
    Cell,
    Column,
    Commands,
    Document,
    Facts,
    KeyGroup,
    Keys,
    Paragraph,
    Problems,
    Table,
)
from ckpttool.report.renderers.text import Terminal
from command import Run
from torch_version import needs_torch

CODE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_state_dict_post_hook(self._hide)
        self.register_load_state_dict_pre_hook(self._show)

    @staticmethod
    def _hide(module, state, prefix, metadata):
        for key in [k for k in state if k.startswith(prefix + "layer.")]:
            state[prefix + key[len(prefix) + 6 :]] = state.pop(key)

    @staticmethod
    def _show(module, state, prefix, *rest):
        for key in [k for k in state if k.startswith(prefix)]:
            state[prefix + "layer." + key[len(prefix) :]] = state.pop(key)

    def forward(self, x):
        return self.layer(x)

def hooked():
    return nn.Sequential(nn.Linear(3, 6), Block(), Block())

def net(out=2):
    return nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, out))

def three():
    return net(3)

class Reordered(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = nn.Linear(2, 2)
        self.a = nn.Linear(2, 2)

def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1)
"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        _make()
    return folder


@pytest.fixture(autouse=True)
def _files(checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(checkpoints, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


def _make() -> None:
    Path("model.py").write_text(CODE)
    space: dict[str, type[nn.Module]] = {}
    exec(CODE, space)
    hooked, net = space["hooked"](), space["net"]()
    torch.save(hooked.state_dict(), "trained.pt")
    torch.save(dict(hooked.named_parameters()), "runtime.pt")
    torch.export.save(torch.export.export(hooked.eval(), (torch.randn(2, 3),)), "deployed.pt2")
    wrapped = {f"module._orig_mod.{key}": value for key, value in net.state_dict().items()}
    torch.save({"model": wrapped, "step": 2}, "ddp.pt")
    torch.save(
        {key: value for key, value in net.state_dict().items() if key != "2.bias"}, "missing.pt"
    )
    torch.save(
        {key.replace("2.", "head."): value for key, value in net.state_dict().items()}, "renamed.pt"
    )
    torch.save(net.state_dict(), "net.pt")
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().sin()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "resume.pt")


FIRST_LINES = {
    "diff trained.pt deployed.pt2 --model model.py:hooked": """\
trained.pt and deployed.pt2 differ: 4 renamed keys
reason: state_dict hook hides the segment `layer`: Block._hide (model.py:12) (4 keys)
fix: ckpttool swap-weights deployed.pt2 trained.pt --model model.py:hooked -o deployed.swapped.pt2
fix: ckpttool remap trained.pt --model model.py:hooked --to runtime -o trained.runtime.pt
details: --all lists every key; `ckpttool explain hook` says more about the reason
""",
    "diff runtime.pt --model model.py:hooked": """\
runtime.pt has 4 keys of model.py:hooked under other names
reason: runtime.pt has the runtime name; the state_dict hook hides the segment `layer`: Block._hide (model.py:12) (4 keys)
fix: ckpttool remap runtime.pt --model model.py:hooked --to serialized -o runtime.serialized.pt
details: --all lists every key; `ckpttool explain runtime-key` says more about the reason
""",
    "diff ddp.pt --model model.py:net": """\
ddp.pt has all 6 keys of model.py:net under other names (section model)
reason: ddp.pt is wrapped in DistributedDataParallel or DataParallel or AveragedModel (`module`) and torch.compile (`_orig_mod`) (6 keys)
fix: ckpttool remap ddp.pt --model model.py:net --to serialized -o ddp.serialized.pt
details: --all lists every key; `ckpttool explain wrapper-prefix` says more about the reason
""",
    "diff resume.pt --model model.py:Reordered --optimizer model.py:adamw": """\
the optimizer state of resume.pt does not fit model.py:adamw: 4 parameters at another position
reason: its ids may not be this model's: the file lists the model's keys in another order than model.py:Reordered (4 keys)
fix (not tried): ckpttool remap resume.pt --model OLD --optimizer model.py:adamw --to-model model.py:Reordered --to-optimizer model.py:adamw -o resume.mapped.pt
where: OLD is the model that saved the file
details: --all lists every key; `ckpttool explain doubtful-ids` says more about the reason
""",
    "diff missing.pt --model model.py:net": """\
missing.pt lacks 1 key of model.py:net
no fix: 1 key missing from missing.pt (2.bias): copy the values from another checkpoint (remap --fill-from CKPT), or load with strict=False and initialize them
details: --all lists every key; `ckpttool explain missing` says more about the reason

missing: 1 key, missing from missing.pt
""",
    "diff net.pt --model model.py:three": """\
net.pt has 2 tensors of another shape than model.py:three
no fix: 2 tensors of a different shape, which no rename fixes (2.weight, 2.bias): build the model as it was when this was saved (with its old arguments, or its old code), or write rules (`pad`, `slice`, `reshape`)
details: --all lists every key; `ckpttool explain shape` says more about the reason

shape: 2 keys, different shape
""",
    "diff renamed.pt net.pt": """\
renamed.pt and net.pt differ: 2 keys only in renamed.pt, 2 keys only in net.pt
no fix: 2 keys missing from renamed.pt (2.weight, 2.bias): copy the values from another checkpoint (remap --fill-from CKPT), or load with strict=False and initialize them
no fix: 2 keys not in net.pt (head.weight, head.bias): leaving them out loses their values and their effect on the model's output
rename: for tensors that only have another name, run `ckpttool remap renamed.pt --rule 'FROM => TO' -o renamed.renamed.pt`
details: --all lists every key; `ckpttool explain unexpected` says more about the reason
""",
    "diff net.pt net.pt --values": """\
net.pt and net.pt have the same keys, shapes, dtypes and values

left      net.pt
right     net.pt
keys      6 same
""",
}


@pytest.mark.parametrize("words", FIRST_LINES)
def test_first_lines_have_verdict_reason_and_fix(run: Run, words: str) -> None:
    if "adamw" in words:
        needs_torch("2.7", "`decoupled_weight_decay` in the groups of AdamW")
    lines = run(*words.split()).out.splitlines()[:5]
    assert "\n".join(lines).rstrip() == FIRST_LINES[words].rstrip()


# Every line fits


def segment(rng: random.Random) -> str:
    return "".join(rng.choices("abcdefgh_0123456789", k=rng.randint(1, 12)))


def name(rng: random.Random) -> str:
    return ".".join(segment(rng) for _ in range(rng.randint(1, 14)))


def text(rng: random.Random) -> str:
    return " ".join(rng.choice((segment, name))(rng) for _ in range(rng.randint(0, 20)))


def random_document(rng: random.Random) -> Document:
    rows = tuple((name(rng), text(rng), segment(rng)) for _ in range(rng.randint(0, 4)))
    keys = tuple((name(rng), name(rng), text(rng)) for _ in range(rng.randint(0, 4)))
    columns = (Column("key", "key"), Column("why"), Column("count", "number"))
    blocks = (
        Facts((("left", Cell(name(rng), "key")), ("compared", text(rng)))),
        Table(text(rng), columns, rows, text(rng)),
        Keys(text(rng), (KeyGroup(text(rng), keys, text(rng), is_full=rng.random() < 0.5),)),
        Paragraph(text(rng), "warning"),
        Problems((Problem(text(rng), name(rng)),)),
        Commands("fix", ("ckpttool remap " + "x" * 100,)),
    )
    return Document(
        text(rng), text(rng), False, blocks, None, (Facts((("reason", text(rng)),), is_short=True),)
    )


@pytest.mark.parametrize("color", [False, True])
@pytest.mark.parametrize("width", [60, 80])
def test_no_line_is_wider_than_the_terminal(width: int, color: bool) -> None:
    """Commands to paste are an exception. Segments of names are never broken, but none here is too
    wide.
    """
    for seed in range(40):
        document = random_document(random.Random(seed))
        shown = re.sub(r"\x1b\[[0-9;]*m", "", render("text", document, {}, Terminal(width, color)))
        for line in shown.splitlines():
            assert len(line) <= width or line.startswith("fix: ckpttool "), seed


COMMANDS = [
    *FIRST_LINES,
    *(f"{words} --all" for words in FIRST_LINES),
    *(
        "inspect resume.pt",
        "inspect resume.pt --all",
        "inspect resume.pt --depth 3",
        "trace model.py:hooked",
    ),
    "remap ddp.pt -o out.pt --model model.py:net --to serialized --dry-run",
]


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("words", COMMANDS)
def test_reports_fit_the_terminal(
    run: Run, monkeypatch: pytest.MonkeyPatch, words: str, width: int
) -> None:
    monkeypatch.setattr(
        "ckpttool.cli.output._terminal", lambda *streams: Terminal(width, color=False)
    )
    done = run(*words.split())
    assert done.status in (0, 1), done.err
    for line in (done.out + done.err).splitlines():
        assert len(line) <= width or re.match(
            r"\s*((partial )?fix( \(not tried\))?: )?ckpttool ", line
        ), line


def test_the_report_for_ci_names_the_keys(run: Run) -> None:
    words = ("diff", "runtime.pt", "--model", "model.py:hooked", "--format")
    suite = ElementTree.fromstring(run(*words, "junit").out.encode())
    assert suite.attrib == {"name": "ckpttool", "tests": "5", "failures": "5"}
    names = [case.attrib["name"] for case in suite.iter("testcase")]
    assert names[1:] == ["1.layer.weight", "1.layer.bias", "2.layer.weight", "2.layer.bias"]
    passing = run("diff", "net.pt", "net.pt", "--format", "junit")
    assert ElementTree.fromstring(passing.out.encode()).attrib["failures"] == "0"


def test_every_code_of_a_report_is_explained(run: Run) -> None:
    for words in FIRST_LINES:
        data = run(*words.split(), "--format", "json").data
        codes = {one["code"] for one in (*data["notes"], *data["unfixed"])}
        codes |= {entry["status"] for entry in data["entries"]} | {
            e["code"] for e in data["entries"] if "code" in e
        }
        for code in codes:
            assert run("explain", code).status == 0, code
    assert {code.code for code in Code} <= CODES.keys()
    assert run("explain", "no-such-code").status == 2
