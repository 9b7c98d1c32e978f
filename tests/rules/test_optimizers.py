"""Rules apply to optimizers: train, convert, load into the other model's optimizer and continue training."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from ckpttool.cli.app import main
from optimizer_support import same

torch.set_num_threads(1)
Make = Callable[[nn.Module], torch.optim.Optimizer]
EXPERTS = 3


class Fused(nn.Module):
    """Query, key and value in one transposed weight, experts in one tensor, scalar scales in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Parameter(torch.randn(4, 12) / 2)
        self.c_bias = nn.Parameter(torch.randn(12) / 2)
        self.experts = nn.Parameter(torch.randn(EXPERTS, 4, 4) / 2)
        self.norm = nn.LayerNorm(4)
        self.scales = nn.Parameter(torch.tensor([0.5, 1.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (x @ self.c_attn + self.c_bias).split(4, -1)
        x = self.norm(torch.sigmoid(q) * k * self.scales[0] + v * self.scales[1])
        return sum((x @ expert.t() for expert in self.experts), x)


class Apart(nn.Module):
    """The same function with separate tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(4, 4) for _ in range(3))
        self.expert = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(EXPERTS))
        self.ln = nn.LayerNorm(4)
        self.scale = nn.ParameterList([torch.tensor(0.0), torch.tensor(0.0)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.ln(torch.sigmoid(self.q(x)) * self.k(x) * self.scale[0] + self.v(x) * self.scale[1])
        return sum((expert(x) for expert in self.expert), x)


RULES = """
[[rule]]
transpose = "c_attn"
[[rule]]
rename = ["c_attn => qkv.weight", "c_bias => qkv.bias", "norm.{p} => ln.{p}"]
[[rule]]
split = "qkv.{p}"
into = ["q.{p}", "k.{p}", "v.{p}"]
[[rule]]
unstack = "experts"
into = "expert.{e}.weight"
[[rule]]
unstack = "scales"
into = "scale.{i}"
"""
MAKERS: dict[str, Make] = {
    "amsgrad": lambda m: torch.optim.AdamW(m.parameters(), 0.01, amsgrad=True, weight_decay=0.1),
    "foreach": lambda m: torch.optim.Adam(m.parameters(), 0.01, foreach=True),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), 0.01, momentum=0.9),
    "plain": lambda m: torch.optim.SGD(m.parameters(), 0.01),
    "named": lambda m: torch.optim.NAdam(m.named_parameters(), 0.01),
    "groups": lambda m: in_groups(m),
}


def in_groups(model: nn.Module) -> torch.optim.Optimizer:
    slow = [p for n, p in model.named_parameters() if "scale" not in n]
    fast = [p for n, p in model.named_parameters() if "scale" in n]
    groups: Any = [{"params": fast, "lr": 0.1}, {"params": slow}]
    return torch.optim.RMSprop(groups, 0.01, momentum=0.5, centered=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int) -> None:
    for number in range(first, first + count):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def state_in(form: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    if form == "id":
        return optimizer.state_dict()
    return get_optimizer_state_dict(model, optimizer, options=options(form))


def options(form: str) -> StateDictOptions:
    return StateDictOptions(flatten_optimizer_state_dict=form == "flat")


def trained(kind: type[nn.Module], make: Make) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = kind()
    optimizer = make(model)
    train(model, optimizer, 0, 3)
    return model, optimizer


def resumed(kind: type[nn.Module], make: Make, form: str, path: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    found = torch.load(path, weights_only=True)
    model = kind()
    model.load_state_dict(found["model"])
    optimizer = make(model)
    if form == "id":
        optimizer.load_state_dict(found["optimizer"])
    else:
        set_optimizer_state_dict(model, optimizer, found["optimizer"], options=options(form))
    return model, optimizer


def saved(path: Path, form: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    torch.save({"model": model.state_dict(), "optimizer": state_in(form, model, optimizer), "epoch": 3}, path)
    return path


def rules_in(folder: Path, text: str = RULES) -> str:
    path = folder / "rules.toml"
    path.write_text(text)
    return str(path)


def close(left: nn.Module, right: nn.Module) -> bool:
    """Return whether weights are equal up to rounding, since sums are in another order."""
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(99))
    return torch.allclose(left(x), right(x), rtol=1e-4, atol=1e-5)


def load_by(form: str, kind: str, old: str, new: str) -> list[str]:
    """Return the options that ids need: the model that loads them, and with several groups both optimizers."""
    if form != "id":
        return []
    whose = ["--model", f"{__file__}:{old}"] if kind == "groups" else []
    return [*whose, "--to-model", f"{__file__}:{new}"]


@pytest.mark.parametrize("form", ["id", "fqn", "flat"])
@pytest.mark.parametrize("kind", MAKERS)
def test_training_continues_in_the_other_model(tmp_path: Path, kind: str, form: str) -> None:
    make = MAKERS[kind]
    model, optimizer = trained(Fused, make)
    source, there, back = (tmp_path / f"{name}.pt" for name in ("in", "there", "back"))
    saved(source, form, model, optimizer)
    rules = rules_in(tmp_path)
    line = ["--rules", rules, "--verify"]
    assert main(["remap", str(source), *line, *load_by(form, kind, "Fused", "Apart"), "-o", str(there)]) == 0
    other = resumed(Apart, make, form, there)
    x = torch.randn(8, 4)
    assert torch.allclose(model(x), other[0](x), atol=1e-5)
    train(model, optimizer, 3, 4)
    train(*other, 3, 4)
    assert close(model, other[0])

    line += load_by(form, kind, "Apart", "Fused")
    assert main(["remap", str(there), *line, "--reverse", "-o", str(back)]) == 0
    again, before = torch.load(back), torch.load(source)
    assert again["epoch"] == 3
    assert same(again["model"], before["model"])
    if form == "flat":
        assert same(again["optimizer"], before["optimizer"])
    else:
        assert same(again["optimizer"]["state"], before["optimizer"]["state"])
        assert same(again["optimizer"]["param_groups"], before["optimizer"]["param_groups"])


def test_each_parameter_gets_its_own_step_tensor(tmp_path: Path) -> None:
    """Adam increments it in place."""
    source = saved(tmp_path / "in.pt", "id", *trained(Fused, MAKERS["amsgrad"]))
    line = ["--rules", rules_in(tmp_path), "--to-model", f"{__file__}:Apart"]
    assert main(["remap", str(source), *line, "-o", str(tmp_path / "out.pt")]) == 0
    state = torch.load(tmp_path / "out.pt")["optimizer"]["state"]
    assert len({own["step"].untyped_storage().data_ptr() for own in state.values()}) == len(state) == 13


def test_moments_are_cast_with_their_parameters(tmp_path: Path) -> None:
    source = saved(tmp_path / "in.pt", "fqn", *trained(Fused, MAKERS["amsgrad"]))
    rules = rules_in(tmp_path, '[[rule]]\ncast = "*"\ndtype = "bfloat16"')
    assert main(["remap", str(source), "--rules", rules, "-o", str(tmp_path / "out.pt")]) == 0
    found, before = torch.load(tmp_path / "out.pt")["optimizer"]["state"], torch.load(source)["optimizer"]["state"]
    for name, own in found.items():
        assert own["step"].dtype == torch.float32
        assert torch.equal(own["exp_avg"], before[name]["exp_avg"].bfloat16())


def test_state_of_a_dropped_parameter_is_dropped(tmp_path: Path) -> None:
    source = saved(tmp_path / "in.pt", "fqn", *trained(Fused, MAKERS["momentum"]))
    rules = rules_in(tmp_path, '[[rule]]\ndrop = "norm.{p}"')
    assert main(["remap", str(source), "--rules", rules, "-o", str(tmp_path / "out.pt")]) == 0
    optimizer = torch.load(tmp_path / "out.pt")["optimizer"]
    names = ["c_attn", "c_bias", "experts", "scales"]
    assert sorted(optimizer["state"]) == sorted(optimizer["param_groups"][0]["params"]) == names


def test_rules_do_not_turn_other_tensors_into_parameters(tmp_path: Path) -> None:
    model, optimizer = trained(Fused, MAKERS["momentum"])
    model.register_buffer("seen", torch.ones(3))
    source = saved(tmp_path / "in.pt", "fqn", model, optimizer)
    rules = [f"[[rule]]\n{one}" for one in ('constant = "made"\nvalue = 1\nshape = [2]', 'rename = "seen => been"')]
    line = ["--rules", rules_in(tmp_path, "\n".join([*rules, '[[rule]]\nrename = "norm.{p} => ln.{p}"']))]
    assert main(["remap", str(source), *line, "-o", str(tmp_path / "out.pt")]) == 0
    found = torch.load(tmp_path / "out.pt")
    assert {"made", "been"} < found["model"].keys()
    assert sorted(found["optimizer"]["state"]) == ["c_attn", "c_bias", "experts", "ln.bias", "ln.weight", "scales"]


def test_ids_of_unknown_parameters_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = trained(Fused, MAKERS["momentum"])
    model.register_buffer("seen", torch.ones(3))
    source = saved(tmp_path / "in.pt", "id", model, optimizer)
    line = ["remap", str(source), "--rules", rules_in(tmp_path), "-o", str(tmp_path / "out.pt")]
    assert main(line) == 1
    assert "--model" in capsys.readouterr().err
    assert not (tmp_path / "out.pt").exists()
    assert main([*line, "--drop", "optimizer"]) == 0


def test_factored_moments_are_left_out_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make: Make = lambda m: torch.optim.Adafactor(m.parameters(), 0.01)  # noqa: E731
    source = saved(tmp_path / "in.pt", "id", *trained(Fused, make))
    line = ["remap", str(source), "--rules", rules_in(tmp_path), "-o", str(tmp_path / "out.pt")]
    line += ["--to-model", f"{__file__}:Apart"]
    assert main(line) == 1
    error = capsys.readouterr().err
    assert "row_var: it does not have the shape of its parameter @ q.weight" in error
    assert "start the optimizer afresh" in error
    assert "--drop" not in error
    assert main([*line, "--drop", "optimizer"]) == 0


@pytest.mark.parametrize("form", ["id", "fqn", "flat"])
def test_a_saved_plan_holds_the_optimizer(tmp_path: Path, form: str) -> None:
    """The plan is applied in a process without the rules, and without torch if it only splits rows."""
    rules = RULES.replace('[[rule]]\ntranspose = "c_attn"\n', "").replace('"c_attn => qkv.weight", ', "")
    source = saved(tmp_path / "in.pt", form, *trained(Fused, MAKERS["named" if form == "id" else "amsgrad"]))
    line = ["remap", str(source), "-o", str(tmp_path / "one.pt"), "--save-plan", str(tmp_path / "plan.json")]
    line += ["--optimizer-keys", "fqn"] if form == "id" else []
    assert main([*line, "--rules", rules_in(tmp_path, rules)]) == 0
    again = ["remap", str(source), "-o", str(tmp_path / "two.pt"), "--rules", str(tmp_path / "plan.json")]
    code = (
        f"import sys; from ckpttool.cli.app import main; assert main({again!r}) == 0; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert same(torch.load(tmp_path / "one.pt"), torch.load(tmp_path / "two.pt"))


PLAN_FAULTS: dict[str, tuple[Callable[[Any], None], int, str]] = {
    # name -> change to the plan, exit status, part of the error
    "missing parameter": (lambda o: o["params"][0].update({"from": {"ref": "x"}}), 1, "@ x"),
    "missing param group": (lambda o: o["groups"][0].update(like=7), 1, "param group 7, and there are 1"),
    "in no group": (lambda o: o["groups"][0].update(params=[]), 1, "is in no group"),
    "in two places": (lambda o: o["groups"][0]["params"].append("k.bias"), 1, "more than once"),
    "no section": (lambda o: o.update(section="x"), 1, "no optimizer @ x"),
    "no form": (lambda o: o.update(form="x"), 2, "@ $.optimizers[0].form"),
    "no expression": (lambda o: o["params"][1].update({"from": 3}), 2, "@ $.optimizers[0].params[1].from"),
    "operator with computation": (
        lambda o: o["params"][0].update({"from": {"op": "aten.neg.default", "args": [o["params"][0]["from"]]}}),
        1,
        "changes values",
    ),
}


@pytest.mark.parametrize("name", PLAN_FAULTS)
def test_plan_for_another_optimizer_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    source = saved(tmp_path / "in.pt", "fqn", *trained(Fused, MAKERS["amsgrad"]))
    plan, out = tmp_path / "plan.json", tmp_path / "out.pt"
    assert main(["remap", str(source), "--rules", rules_in(tmp_path), "--save-plan", str(plan), "--dry-run"]) == 0
    change, status, words = PLAN_FAULTS[name]
    content = json.loads(plan.read_text())
    change(content["optimizers"][0])
    plan.write_text(json.dumps(content))
    capsys.readouterr()
    assert main(["remap", str(source), "--rules", str(plan), "-o", str(out)]) == status
    assert words in capsys.readouterr().err
    assert not out.exists()


def test_optimizer_with_names_of_another_model_is_not_ignored(tmp_path: Path) -> None:
    model, optimizer = trained(Fused, MAKERS["momentum"])
    state = get_optimizer_state_dict(nn.Sequential(model), optimizer)
    torch.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "in.pt")
    line = ["remap", str(tmp_path / "in.pt"), "--rules", rules_in(tmp_path), "-o", str(tmp_path / "out.pt")]
    assert main(line) == 1
    assert main([*line, "--drop", "optimizer"]) == 0


def test_plan_with_splits_from_hooks_needs_no_torch(tmp_path: Path) -> None:
    import hook_zoo

    torch.save(hook_zoo.ZOO["fused_qkv"]().state_dict(), tmp_path / "in.pt")
    plan, source = str(tmp_path / "plan.json"), str(tmp_path / "in.pt")
    line = ["remap", source, "--model", f"{hook_zoo.__file__}:fused_qkv", "--to", "runtime", "--save-plan", plan]
    assert main([*line, "-o", str(tmp_path / "one.pt")]) == 0
    again = ["remap", source, "--rules", plan, "-o", str(tmp_path / "two.pt")]
    code = (
        f"import sys; from ckpttool.cli.app import main; assert main({again!r}) == 0; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert same(torch.load(tmp_path / "one.pt"), torch.load(tmp_path / "two.pt"))


def trained_under(names: dict[str, str], wrapper: str = "") -> dict[str, Any]:
    """Train two layers; return state with wrapped keys and an optimizer by names, replaced as in `names`."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    saved = optimizer.state_dict()
    called = [names.get(name, name) for name, _ in model.named_parameters()]
    state = {name: saved["state"][at] for at, name in enumerate(called) if name}
    groups = [{**saved["param_groups"][0], "params": list(state)}]
    weights = {wrapper + key: value for key, value in model.state_dict().items()}
    return {"model": weights, "optimizer": {"state": state, "param_groups": groups}}


JOINED = """join = ["0.weight", "1.weight"]\ninto = "both.weight\""""


@pytest.mark.parametrize(
    ("names", "rule", "problems"),
    [
        ({"0.bias": "x"}, 'rename = "0.weight => z"', {"is not a tensor of the model that the rules change @ x"}),
        ({"1.weight": ""}, JOINED, {"is made of 1.weight too, which the optimizer has not @ both.weight"}),
        (
            {"1.weight": "", "0.bias": "x"},
            JOINED,
            {
                "is made of 1.weight too, which the optimizer has not @ both.weight",
                "is not a tensor of the model that the rules change @ x",
            },
        ),
        (dict.fromkeys(("0.weight", "1.weight"), ""), JOINED, set()),  # no trained parameter is involved
        ({}, JOINED, set()),
    ],
)
def test_optimizer_that_does_not_match_the_rules_is_refused(
    names: dict[str, str], rule: str, problems: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(trained_under(names), tmp_path / "in.pt")
    (tmp_path / "r.toml").write_text(f"[[rule]]\n{rule}\n")
    words = ("--rules", str(tmp_path / "r.toml"), "-o", str(tmp_path / "out.pt"), "--format", "json")
    assert main(["remap", str(tmp_path / "in.pt"), *words]) == bool(problems)
    report = json.loads(capsys.readouterr().out)
    assert {f"{one['problem']} @ {one['key']}" for one in report.get("problems", ())} == problems
    if not problems:
        saved = torch.load(tmp_path / "out.pt")
        trained = ["0.bias", "1.bias", *([] if names else ["both.weight"])]
        assert sorted(saved["optimizer"]["state"]) == trained
        assert all(saved["optimizer"]["state"][name]["exp_avg"].shape == saved["model"][name].shape for name in trained)


@pytest.mark.parametrize("wrapper", ["", "module.", "_orig_mod."])
def test_names_without_wrappers_follow_rules_for_wrapped_keys(wrapper: str, tmp_path: Path) -> None:
    torch.save(trained_under({}, wrapper), tmp_path / "in.pt")
    (tmp_path / "r.toml").write_text(f'[[rule]]\nrename = "{wrapper}0.{{x}} => {wrapper}body.{{x}}"\n')
    words = ("--rules", str(tmp_path / "r.toml"), "-o", str(tmp_path / "out.pt"))
    assert main(["remap", str(tmp_path / "in.pt"), *words]) == 0
    found = torch.load(tmp_path / "out.pt")
    assert [key.removeprefix(wrapper) for key in found["model"]] == list(found["optimizer"]["state"])
    assert list(found["optimizer"]["state"]) == ["body.weight", "body.bias", "1.weight", "1.bias"]


def test_colliding_parameter_names_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """This includes the case that the model has only one of them, so that its keys do not collide."""
    saved = trained_under({})
    del saved["model"]["1.weight"]
    torch.save(saved, tmp_path / "in.pt")
    assert main(["remap", str(tmp_path / "in.pt"), "--rule", "0.weight => 1.weight", "-o", str(tmp_path / "o.pt")]) == 1
    assert "is not a tensor of the model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("saved", "words", "status", "message"),
    [
        ({"w": torch.ones(1)}, ("--optimizer-keys", "fqn"), 1, "holds no optimizer"),
        (
            {"model": {"w": torch.ones(1)}, "optimizer": {"state": {}, "param_groups": []}},
            ("--optimizer-keys", "fqn"),
            0,
            "",
        ),
        (
            trained_under({}),
            ("--to-model", "torch.nn:Module"),
            1,
            "none of its parameters has a name of torch.nn:Module",
        ),
    ],
)
def test_optimizers_in_the_file_are_looked_up_first(
    saved: Any, words: tuple[str, ...], status: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(saved, tmp_path / "in.pt")
    assert main(["remap", str(tmp_path / "in.pt"), *words, "-o", str(tmp_path / "out.pt")]) == status
    assert message in capsys.readouterr().err
    assert (tmp_path / "out.pt").exists() == (status == 0)
