"""What Python prints, results and errors, names keywords and no flags of the command line."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpttool

_COMMAND = re.compile(r"`ckpttool [^`]*`|\bckpttool [a-z][^;\n)]*")
_FLAG = re.compile(r"(?<![\w-])--?[a-z][a-z-]*")


class Net(nn.Module):
    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, outputs)


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 5)
        self.decoder = nn.Linear(5, 4)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), momentum=0.9)


def trained(model: nn.Module, make: Callable[[nn.Module], torch.optim.Optimizer]) -> dict[str, Any]:
    optimizer = make(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 1}


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    net = Net()
    torch.save(trained(net, adamw), "train.pt")
    torch.save(trained(Other(), sgd), "other.pt")
    torch.save(net.state_dict(), "plain.pt")
    torch.save(net.double().state_dict(), "double.pt")
    torch.save({f"module.{key}": value for key, value in Net().state_dict().items()}, "ddp.pt")
    torch.save({f"layer.{index}": torch.ones(1) for index in range(40)}, "layers.pt")
    torch.save({f"block.{index}": torch.ones(1) for index in range(50)}, "blocks.pt")


def texts_of(call: Callable[[], object]) -> str:
    """Return what is printed for a result, or for an error."""
    try:
        result = call()
    except ckpttool.CkptError as error:
        return "\n".join((error.message, error.hint, *getattr(error, "__notes__", ())))
    html = getattr(result, "_repr_html_", lambda: None)() or ""
    return f"{result}\n{result!r}\n{html}"


CALLS: dict[str, Callable[[], object]] = {
    "fits": lambda: ckpttool.diff("plain.pt", model=Net),
    "wrapped": lambda: ckpttool.diff("ddp.pt", model=Net),
    "other keys": lambda: ckpttool.diff("other.pt", model=Net),
    "other shapes": lambda: ckpttool.diff("plain.pt", model=lambda: Net(7)),
    "other dtypes": lambda: ckpttool.diff("double.pt", model=Net),
    "two files": lambda: ckpttool.diff("other.pt", "plain.pt"),
    "two training files": lambda: ckpttool.diff("other.pt", "train.pt", whole=True),
    "many keys": lambda: ckpttool.diff("layers.pt", "blocks.pt"),
    "values": lambda: ckpttool.diff("plain.pt", "ddp.pt", values=True),
    "accepted": lambda: ckpttool.diff("plain.pt", "double.pt", fail_on=["missing"]),
    "optimizer": lambda: ckpttool.diff("train.pt", model=Net, optimizer=sgd),
    "other optimizer": lambda: ckpttool.diff("other.pt", model=Net, optimizer=adamw),
    "names": lambda: ckpttool.trace(Net),
    "inspect": lambda: ckpttool.inspect("train.pt"),
    "inspect many": lambda: ckpttool.inspect("layers.pt"),
    "explain": lambda: ckpttool.explain("head.weight", Net),
    "check": lambda: ckpttool.check(["train.pt", "ddp.pt"]),
    "remap": lambda: ckpttool.remap("train.pt", "out.pt", rule="body.{x*} => trunk.{x*}"),
    "dry run": lambda: ckpttool.remap("layers.pt", "out.pt", rule="layer.{x} => {x}", dry_run=True),
    "converted": lambda: ckpttool.convert("train.pt", "half.pt", dtype="float16"),
    "load": lambda: ckpttool.load("ddp.pt", Net()),
    "load a part": lambda: ckpttool.load("plain.pt", Net(7), partial=True),
    "load another": lambda: ckpttool.load("other.pt", Net()),
    "load without a section": lambda: ckpttool.load("train.pt", Net(), section="nothing"),
    "no such file": lambda: ckpttool.inspect("nothing.pt"),
    "nothing to do": lambda: ckpttool.remap("plain.pt", "out.pt"),
    "nothing to convert": lambda: ckpttool.convert("plain.pt", "out.pt"),
    "output exists": lambda: ckpttool.convert("train.pt", "plain.pt", dtype="float16"),
    "no place": lambda: ckpttool.convert("train.pt", "out.safetensors"),
    "no rule": lambda: ckpttool.remap("plain.pt", "out.pt", rule="a.* => b.*"),
    "collision": lambda: ckpttool.remap("plain.pt", "out.pt", rule="{x}.{y} => {y}"),
    "no fix": lambda: ckpttool.fix("other.pt", "out.pt", model=Net),
    "no model": lambda: ckpttool.fix("plain.pt", "out.pt"),
    "no form": lambda: ckpttool.remap("plain.pt", "out.pt", to="runtime"),
    "no dtype": lambda: ckpttool.convert("plain.pt", "out.pt", dtype="int8"),
    "partial": lambda: ckpttool.remap("plain.pt", "out.pt", model=lambda: Net(7)),
    "too little": lambda: ckpttool.remap("plain.pt", "out.pt", select="body", model=Net),
    "part of the state": lambda: ckpttool.remap("train.pt", "out.pt", drop="optimizer.state.*"),
    "no program": lambda: ckpttool.swap_weights("plain.pt", "train.pt", "out.pt2"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_printed_texts_name_keywords(name: str) -> None:
    text = texts_of(CALLS[name])
    flags = _FLAG.findall(_COMMAND.sub("", text))
    assert not flags, text


def test_the_command_line_names_flags(capsys: pytest.CaptureFixture[str]) -> None:
    """The texts of the same results name flags there: the test above sees a difference."""
    from command import main

    Path("net.py").write_text("from torch import nn\n\nbuild = lambda: nn.Linear(9, 9)\n")
    assert main(["diff", "layers.pt", "--model", "net.py:build"]) == 1
    out = capsys.readouterr().out
    assert "--all lists every key" in out
    assert "remap --fill-from CKPT" in out


def test_loaded_is_printed_in_complete_texts() -> None:
    loaded = ckpttool.load("ddp.pt", Net())
    assert str(loaded).splitlines() == [
        "loaded from ddp.pt: 4 tensors",
        f"its keys were renamed on the way, as {loaded.fix} does",
    ]
    assert repr(loaded.fix) in repr(loaded)
    part = ckpttool.load("plain.pt", Net(7), partial=True)
    assert "2 keys of another shape: head.weight, head.bias" in str(part)


def test_a_repeated_problem_is_said_once_in_a_traceback() -> None:
    with pytest.raises(ckpttool.Refused) as refused:
        ckpttool.load("other.pt", Net())
    notes = "\n".join(refused.value.__notes__)
    assert notes.count("missing from other.pt") == 1
    assert "    head.bias" in notes


def test_a_traceback_ends_with_the_hint_that_a_command_completed(tmp_path: Path) -> None:
    class Head(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x)

    program, weights = str(tmp_path / "p.pt2"), str(tmp_path / "w.pt")
    torch.export.save(torch.export.export(Head(), (torch.zeros(1, 2),)), program)
    torch.save({**Head().state_dict(), "old": torch.zeros(1)}, weights)
    with pytest.raises(ckpttool.CkptError) as refused:
        ckpttool.swap_weights(program, weights, out=str(tmp_path / "q.pt2"))
    assert "--drop old" in refused.value.hint
    assert refused.value.__notes__[-1] == f"hint: {refused.value.hint}"
