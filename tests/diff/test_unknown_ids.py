"""An optimizer whose ids nothing identifies: no parameter of it is called the same."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from torch import nn

from command import Run

CODE = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.add_module(first, nn.Linear(4, 4))
        self.add_module(second, nn.Linear(4, 2))
def old():
    return Net("body", "head")
def new():
    net = Net("trunk", "head")
    net.scale = nn.Parameter(torch.ones(4))
    return net
def adam(net):
    matrices = [p for p in net.parameters() if p.ndim > 1]
    return torch.optim.Adam([{"params": matrices}, {"params": [p for p in net.parameters() if p.ndim < 2]}])
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("nets.py").write_text(CODE)
    return tmp_path


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    names: dict[str, object] = {}
    exec(CODE, names)
    torch.manual_seed(0)
    net = names["old"]()
    optimizer = names["adam"](net)
    for parameter in net.parameters():
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    return net, optimizer


def test_no_parameter_is_the_same_and_the_shapes_are_told(run: Run) -> None:
    net, optimizer = trained()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, "run.pt")
    done = run("diff", "run.pt", "--model", "nets.py:new", "--optimizer", "nets.py:adam", "--all")
    assert done.status == 1
    line = "param_groups.1.params.3: state of shape [2]; the optimizer has trunk.bias [4] at this position"
    assert line in done.out
    words = ("diff", "run.pt", "--model", "nets.py:new", "--optimizer", "nets.py:adam")
    entries = run(*words, "--format", "json").data["entries"]
    of_params = [entry for entry in entries if ".params." in "".join(entry["left"])]
    assert {entry["status"] for entry in of_params} == {"order"}
    assert len(of_params) == 4


def test_the_printed_remap_renames_model_and_optimizer(run: Run) -> None:
    """With the code that saved the file, the rename, and the new code: nothing else is needed."""
    net, optimizer = trained()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, "run.pt")
    words = ("--model", "nets.py:new", "--optimizer", "nets.py:adam")
    done = run("diff", "run.pt", *words)
    (line,) = re.findall(r"ckpttool (remap CKPT .* -o OUT)", done.err)
    values = {
        "CKPT": "run.pt",
        "OLD": "nets.py:old",
        "FROM => TO": "body.{x*} => trunk.{x*}",
        "OPTIMIZER": "nets.py:adam",
        "OUT": "out.pt",
    }
    command = [values.get(word, word) for word in shlex.split(line)]
    refused = run(*command)
    assert "scale" in refused.err  # the new parameter has no value in the file
    assert run(*command, "--partial").status == 0
    state = torch.load("out.pt")["optimizer"]["state"]
    moments = [values["exp_avg"] for values in state.values()]
    assert [tuple(moment.shape) for moment in moments] == [(4, 4), (2, 4), (4,), (2,)]


IN_OWN_ORDER = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self, names):
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.zeros(3)))
def old():
    return Net("ab")
def new():
    return Net("cab")
def adam(net):
    return torch.optim.Adam(reversed(list(net.parameters())))
"""


def test_the_printed_remap_names_an_optimizer_in_another_order_than_the_model(run: Run) -> None:
    """Shapes do not tell that the ids are in no model's order."""
    Path("nets.py").write_text(IN_OWN_ORDER)
    names: dict[str, object] = {}
    exec(IN_OWN_ORDER, names)
    net = names["old"]()
    optimizer = names["adam"](net)
    for mark, parameter in enumerate(net.parameters()):
        parameter.grad = torch.full_like(parameter, 10.0**mark)
    optimizer.step()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, "run.pt")
    words = ("diff", "run.pt", "--model", "nets.py:new", "--optimizer", "nets.py:adam")
    (fix,) = run(*words, "--format", "json").data["fix"]
    line = shlex.split(fix["command"].replace("OLD", "nets.py:old"))
    assert run(*line[1:], "-o", "out.pt").status == 0
    net = names["new"]()
    optimizer = names["adam"](net)
    optimizer.load_state_dict(torch.load("out.pt")["optimizer"])
    marks = {name: optimizer.state[param] for name, param in net.named_parameters()}
    assert not marks["c"]
    assert marks["b"]["exp_avg"][0] > marks["a"]["exp_avg"][0]
