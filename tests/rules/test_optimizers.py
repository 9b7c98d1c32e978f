"""Rules apply to optimizers: train, convert, load into the other model's optimizer and continue
training.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from command import Done, Run
from optimizer_support import same

torch.set_num_threads(1)
Make = Callable[[nn.Module], torch.optim.Optimizer]
EXPERTS = 3


class Fused(nn.Module):
    """Query, key and value in one transposed weight, experts in one tensor, scalar scales in one
    tensor.
    """

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
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(4, 4) for _ in range(3))
        self.expert = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(EXPERTS))
        self.ln = nn.LayerNorm(4)
        self.scale = nn.ParameterList([torch.tensor(0.0), torch.tensor(0.0)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.ln(
            torch.sigmoid(self.q(x)) * self.k(x) * self.scale[0] + self.v(x) * self.scale[1]
        )
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


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


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


def resumed(
    kind: type[nn.Module], make: Make, form: str, path: Path
) -> tuple[nn.Module, torch.optim.Optimizer]:
    found = torch.load(path, weights_only=True)
    model = kind()
    model.load_state_dict(found["model"])
    optimizer = make(model)
    if form == "id":
        optimizer.load_state_dict(found["optimizer"])
    else:
        set_optimizer_state_dict(model, optimizer, found["optimizer"], options=options(form))
    return model, optimizer


def saved(form: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.save(
        {"model": model.state_dict(), "optimizer": state_in(form, model, optimizer), "epoch": 3},
        "in.pt",
    )


def remap(run: Run, rules: str, *options: str) -> Done:
    """Apply the rules to in.pt."""
    Path("rules.toml").write_text(rules)
    return run("remap", "in.pt", "--rules", "rules.toml", "-o", "out.pt", *options)


def close(left: nn.Module, right: nn.Module) -> bool:
    """Return whether weights are equal up to rounding, since sums are in another order."""
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(99))
    return torch.allclose(left(x), right(x), rtol=1e-4, atol=1e-5)


def load_by(form: str, kind: str, old: str, new: str) -> list[str]:
    """Return the options that ids need: the model that loads them, and with several groups both
    optimizers.
    """
    if form != "id":
        return []
    whose = ["--model", f"{__file__}:{old}"] if kind == "groups" else []
    return [*whose, "--to-model", f"{__file__}:{new}"]


@pytest.mark.parametrize("form", ["id", "fqn", "flat"])
@pytest.mark.parametrize("kind", MAKERS)
def test_training_continues_in_the_other_model(run: Run, kind: str, form: str) -> None:
    make = MAKERS[kind]
    model, optimizer = trained(Fused, make)
    saved(form, model, optimizer)
    assert remap(run, RULES, "--verify", *load_by(form, kind, "Fused", "Apart")).status == 0
    other = resumed(Apart, make, form, Path("out.pt"))
    x = torch.randn(8, 4)
    assert torch.allclose(model(x), other[0](x), atol=1e-5)
    train(model, optimizer, 3, 4)
    train(*other, 3, 4)
    assert close(model, other[0])

    options = ("--rules", "rules.toml", "--reverse", *load_by(form, kind, "Apart", "Fused"))
    assert run("remap", "out.pt", *options, "--verify", "-o", "back.pt").status == 0
    again, before = torch.load("back.pt"), torch.load("in.pt")
    assert again["epoch"] == 3
    assert same(again["model"], before["model"])
    if form == "flat":
        assert same(again["optimizer"], before["optimizer"])
    else:
        assert same(again["optimizer"]["state"], before["optimizer"]["state"])
        assert same(again["optimizer"]["param_groups"], before["optimizer"]["param_groups"])


def test_each_parameter_gets_its_own_step_tensor(run: Run) -> None:
    """Adam increments it in place."""
    saved("id", *trained(Fused, MAKERS["amsgrad"]))
    assert remap(run, RULES, "--to-model", f"{__file__}:Apart").status == 0
    state = torch.load("out.pt")["optimizer"]["state"]
    assert (
        len({own["step"].untyped_storage().data_ptr() for own in state.values()})
        == len(state)
        == 13
    )


def test_moments_are_cast_with_their_parameters(run: Run) -> None:
    saved("fqn", *trained(Fused, MAKERS["amsgrad"]))
    assert remap(run, '[[rule]]\ncast = "*"\ndtype = "bfloat16"').status == 0
    found, before = (torch.load(path)["optimizer"]["state"] for path in ("out.pt", "in.pt"))
    for name, own in found.items():
        assert own["step"].dtype == torch.float32
        assert torch.equal(own["exp_avg"], before[name]["exp_avg"].bfloat16())


def test_state_of_a_dropped_parameter_is_dropped(run: Run) -> None:
    saved("fqn", *trained(Fused, MAKERS["momentum"]))
    assert remap(run, '[[rule]]\ndrop = "norm.{p}"').status == 0
    optimizer = torch.load("out.pt")["optimizer"]
    names = ["c_attn", "c_bias", "experts", "scales"]
    assert sorted(optimizer["state"]) == sorted(optimizer["param_groups"][0]["params"]) == names


def test_rules_do_not_turn_other_tensors_into_parameters(run: Run) -> None:
    model, optimizer = trained(Fused, MAKERS["momentum"])
    model.register_buffer("seen", torch.ones(3))
    saved("fqn", model, optimizer)
    rules = (
        'constant = "made"\nvalue = 1\nshape = [2]',
        'rename = ["seen => been", "norm.{p} => ln.{p}"]',
    )
    assert remap(run, "\n".join(f"[[rule]]\n{rule}" for rule in rules)).status == 0
    found = torch.load("out.pt")
    assert {"made", "been"} < found["model"].keys()
    assert sorted(found["optimizer"]["state"]) == [
        "c_attn",
        "c_bias",
        "experts",
        "ln.bias",
        "ln.weight",
        "scales",
    ]


def test_ids_of_unknown_parameters_are_refused(run: Run) -> None:
    model, optimizer = trained(Fused, MAKERS["momentum"])
    model.register_buffer("seen", torch.ones(3))
    saved("id", model, optimizer)
    done = remap(run, RULES)
    assert (done.status, "--model" in done.err, Path("out.pt").exists()) == (1, True, False)
    assert remap(run, RULES, "--drop", "optimizer").status == 0


def test_factored_moments_are_left_out_on_request(run: Run) -> None:
    saved("id", *trained(Fused, lambda model: torch.optim.Adafactor(model.parameters(), 0.01)))
    options = ("--to-model", f"{__file__}:Apart")
    done = remap(run, RULES, *options)
    assert done.status == 1
    assert "row_var: it does not have the shape of its parameter" in done.err
    assert "q.weight" in done.err
    assert "start the optimizer from scratch" in done.err
    assert "(--drop optimizer)" in done.err
    assert remap(run, RULES, *options, "--drop", "optimizer").status == 0


def test_optimizer_with_names_of_another_model_is_not_ignored(run: Run) -> None:
    model, optimizer = trained(Fused, MAKERS["momentum"])
    state = get_optimizer_state_dict(nn.Sequential(model), optimizer)
    torch.save({"model": model.state_dict(), "optimizer": state}, "in.pt")
    assert remap(run, RULES).status == 1
    assert remap(run, RULES, "--drop", "optimizer").status == 0


def trained_under(names: dict[str, str], wrapper: str = "") -> dict[str, Any]:
    """Train two layers; return state with wrapped keys and an optimizer by names, replaced as in
    `names`.
    """
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
        (
            {"0.bias": "x"},
            'rename = "0.weight => z"',
            {"is not a tensor of the model that the rules change @ x"},
        ),
        (
            {"1.weight": ""},
            JOINED,
            {"is made of 1.weight too, which the optimizer has not @ both.weight"},
        ),
        (
            {"1.weight": "", "0.bias": "x"},
            JOINED,
            {
                "is made of 1.weight too, which the optimizer has not @ both.weight",
                "is not a tensor of the model that the rules change @ x",
            },
        ),
        # no trained parameter is involved
        (dict.fromkeys(("0.weight", "1.weight"), ""), JOINED, set()),
        ({}, JOINED, set()),
    ],
)
def test_optimizer_that_does_not_match_the_rules_is_refused(
    names: dict[str, str], rule: str, problems: set[str], run: Run
) -> None:
    torch.save(trained_under(names), "in.pt")
    done = remap(run, f"[[rule]]\n{rule}\n", "--format", "json")
    assert done.status == bool(problems)
    assert {f"{one['problem']} @ {one['key']}" for one in done.data.get("problems", ())} == problems
    if not problems:
        saved = torch.load("out.pt")
        trained = ["0.bias", "1.bias", *([] if names else ["both.weight"])]
        assert sorted(saved["optimizer"]["state"]) == trained
        assert all(
            saved["optimizer"]["state"][name]["exp_avg"].shape == saved["model"][name].shape
            for name in trained
        )


@pytest.mark.parametrize("wrapper", ["", "module.", "_orig_mod."])
def test_names_without_wrappers_follow_rules_for_wrapped_keys(wrapper: str, run: Run) -> None:
    torch.save(trained_under({}, wrapper), "in.pt")
    assert remap(run, f'[[rule]]\nrename = "{wrapper}0.{{x}} => {wrapper}body.{{x}}"\n').status == 0
    found = torch.load("out.pt")
    assert [key.removeprefix(wrapper) for key in found["model"]] == list(
        found["optimizer"]["state"]
    )
    assert list(found["optimizer"]["state"]) == ["body.weight", "body.bias", "1.weight", "1.bias"]


def test_colliding_parameter_names_are_refused(run: Run) -> None:
    """This includes the case that the model has only one of them, so that its keys do not
    collide.
    """
    saved = trained_under({})
    del saved["model"]["1.weight"]
    torch.save(saved, "in.pt")
    done = run("remap", "in.pt", "--rule", "0.weight => 1.weight", "-o", "out.pt")
    assert (done.status, "is not a tensor of the model" in done.err) == (1, True)


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
    saved: Any, words: tuple[str, ...], status: int, message: str, run: Run
) -> None:
    torch.save(saved, "in.pt")
    done = run("remap", "in.pt", *words, "-o", "out.pt")
    assert (done.status, message in done.err, Path("out.pt").exists()) == (
        status,
        True,
        status == 0,
    )
