"""Hyperparameters of a resumed run: saved groups keep the file's, new groups take the code's, and
each is listed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ckpttool
from command import Run, notes_in

torch.set_num_threads(1)
STEPS = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 3)
        self.head = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def groups_of(model: nn.Module, *names: list[str], **options: list[float]) -> list[dict[str, Any]]:
    parameters = dict(model.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [parameters[name] for name in group]} for group in names
    ]
    for option, values in options.items():
        for group, value in zip(groups, values):
            group[option] = value
    return groups


ALL = ["body.weight", "body.bias", "head.weight", "head.bias"]
WEIGHTS, BIASES = ["body.weight", "head.weight"], ["body.bias", "head.bias"]
BODY, HEAD = ["body.weight", "body.bias"], ["head.weight", "head.bias"]


def one(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups_of(model, ALL, lr=[0.1], weight_decay=[0.01]))


def by_kind(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        groups_of(model, WEIGHTS, BIASES, lr=[0.2, 0.3], weight_decay=[0.02, 0.0])
    )


def by_layer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups_of(model, BODY, HEAD, lr=[0.4, 0.5], weight_decay=[0.04, 0.05]))


def head_first(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups_of(model, HEAD, BODY, lr=[0.6, 0.7], weight_decay=[0.06, 0.07]))


def tensor_rate(model: nn.Module) -> torch.optim.Optimizer:
    groups = groups_of(model, WEIGHTS, BIASES, weight_decay=[0.02, 0.0])
    return torch.optim.AdamW(groups, lr=torch.tensor(0.25, device="cpu"))


BUILDERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    build.__name__: build for build in (one, by_kind, by_layer, head_first, tensor_rate)
}


def trained(
    build: Callable[[nn.Module], torch.optim.Optimizer], scheduled: bool
) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    optimizer = build(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5) if scheduled else None
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return model, optimizer


def membership(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[frozenset[str]]:
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    return [
        frozenset(name_of[id(parameter)] for parameter in group["params"])
        for group in optimizer.param_groups
    ]


def check_groups(
    old: tuple[nn.Module, Any], new: tuple[nn.Module, Any], code: list[dict[str, Any]]
) -> None:
    """Check `new`, which loaded the state of `old`; `code` are its groups before."""
    saved = dict(zip(membership(*old), old[1].param_groups))
    factors = {group["lr"] / group.get("initial_lr", group["lr"]) for group in old[1].param_groups}
    for members, group, before in zip(membership(*new), new[1].param_groups, code):
        if members in saved:
            assert float(group["lr"]) == float(saved[members]["lr"])
            assert group["weight_decay"] == saved[members]["weight_decay"]
            continue
        assert group["weight_decay"] == before["weight_decay"]
        (factor,) = {round(float(factor), 6) for factor in factors}
        assert float(group["lr"]) == pytest.approx(float(before["lr"]) * factor)
        if factor != 1:
            assert group["initial_lr"] == pytest.approx(float(before["lr"]))


CASES = [
    (old, new, scheduled) for old in BUILDERS for new in BUILDERS for scheduled in (False, True)
]


@pytest.mark.parametrize(("old", "new", "scheduled"), CASES)
def test_new_groups_have_the_hyperparameters_of_the_code(
    tmp_path: Path, run: Run, old: str, new: str, scheduled: bool
) -> None:
    model, optimizer = trained(BUILDERS[old], scheduled)
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "old.pt"
    )
    words = (
        "--model",
        f"{__file__}:Net",
        "--optimizer",
        f"{__file__}:{old}",
        "--to-optimizer",
        f"{__file__}:{new}",
    )
    done = run("remap", tmp_path / "old.pt", *words, "-o", tmp_path / "new.pt", "--format", "json")
    assert done.status == 0, done.err
    fresh = Net()
    target = BUILDERS[new](fresh)
    code = [dict(group) for group in target.param_groups]
    target.load_state_dict(torch.load(tmp_path / "new.pt")["optimizer"])
    check_groups((model, optimizer), (fresh, target), code)

    # Every difference that a new group makes is listed with both values.
    saved = membership(model, optimizer)
    new_groups = [
        index for index, members in enumerate(membership(fresh, target)) if members not in saved
    ]
    text = " ".join(note for note in notes_in(done.data) if "new param groups" in note)
    for index in new_groups:
        assert f"param group {index}: " in text
    assert bool(text) is bool(new_groups)


@pytest.mark.parametrize(
    ("old", "new"), [("one", "by_kind"), ("by_layer", "head_first"), ("one", "one")]
)
def test_load_says_which_hyperparameters_it_changes(old: str, new: str) -> None:
    model, optimizer = trained(BUILDERS[old], True)
    file = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    fresh = Net()
    target = BUILDERS[new](fresh)
    before = [dict(group) for group in target.param_groups]
    loaded = ckpttool.load(file, fresh, target)
    check_groups((model, optimizer), (fresh, target), before)
    expected = []
    for index, (group, was) in enumerate(zip(target.param_groups, before)):
        for name, value in group.items():
            if name != "params" and value != was.get(name):
                expected.append((index, name, was.get(name), value))
    assert [
        (item.group, item.name, item.before, item.after) for item in loaded.hyperparameters
    ] == expected
    assert expected


@pytest.mark.parametrize("is_equal", [True, False])
def test_load_compares_options_that_are_tensors(is_equal: bool) -> None:
    model, optimizer = trained(BUILDERS["one"], True)
    nan = float("nan")
    saved = [torch.ones(2), torch.tensor([nan, 1])]
    optimizer.param_groups[0]["scales"] = saved
    fresh = Net()
    target = BUILDERS["one"](fresh)
    target.param_groups[0]["scales"] = [torch.ones(2), torch.tensor([nan, 1 if is_equal else 2])]
    file = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    loaded = ckpttool.load(file, fresh, target)
    changed = [change.name for change in loaded.hyperparameters]
    assert ("scales" in changed) is not is_equal
    torch.testing.assert_close(target.param_groups[0]["scales"], saved, equal_nan=True)


def group_per_layer(make: Callable[..., torch.optim.Optimizer], **options: Any) -> Any:
    def build(model: Net) -> torch.optim.Optimizer:
        return make(groups_of(model, BODY, HEAD), **options)

    return build


@pytest.mark.parametrize(
    ("make", "options", "lacks"),
    [
        (torch.optim.Adam, {"amsgrad": True}, {"max_exp_avg_sq"}),
        (torch.optim.Adam, {"amsgrad": False}, set()),
        (torch.optim.RMSprop, {"centered": True}, {"grad_avg"}),
        (torch.optim.RMSprop, {"momentum": 0.5}, {"momentum_buffer"}),
        (torch.optim.SGD, {"momentum": 0.5, "lr": 0.1}, set()),
    ],
)
def test_new_groups_ask_for_no_state_that_the_file_lacks(
    make: Callable[..., torch.optim.Optimizer], options: dict[str, Any], lacks: set[str]
) -> None:
    model, optimizer = trained(lambda net: make(net.parameters(), lr=0.1), False)
    file = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    fresh, build = Net(), group_per_layer(make, **options)
    target = build(fresh)
    if lacks:
        with pytest.raises(ckpttool.Refused) as caught:
            ckpttool.remap(file, model=Net, to_optimizer=build)
        assert {problem.key for problem in caught.value.problems} == lacks
        with pytest.raises(ckpttool.Refused):
            ckpttool.load(file, fresh, target)
        assert not target.state
        return
    assert ckpttool.remap(file, model=Net, to_optimizer=build).optimizers
    ckpttool.load(file, fresh, target)
    fresh(torch.ones(1, 2)).sum().backward()
    target.step()


def test_an_option_of_one_group_is_not_needed_in_the_others() -> None:
    """Rprop has no weight decay: the user's code adds it to a group."""

    def build(model: nn.Module) -> torch.optim.Optimizer:
        groups = groups_of(model, WEIGHTS, BIASES)
        groups[1]["weight_decay"] = 0.0
        return torch.optim.Rprop(groups)

    model, optimizer = trained(build, False)
    file = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    fresh = Net()
    target = build(fresh)
    ckpttool.load(file, fresh, target)
    assert target.state[fresh.head.bias]["prev"] == optimizer.state[model.head.bias]["prev"]
    done = ckpttool.remap(file, model=Net, optimizer=build, to_optimizer=build)
    assert done.optimizers


def test_a_new_optimizer_for_a_file_without_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was ignored without a word."""
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    torch.save(model.state_dict(), "weights.pt")
    folder = tmp_path / "run"
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    for source in ("weights.pt", "run"):
        with pytest.raises(ckpttool.Refused, match="holds no optimizer") as refused:
            ckpttool.remap(source, "out.pt", model=model, to_optimizer=optimizer)
        assert not (tmp_path / "out.pt").exists()
    assert refused.value.hint == "it is in a separate file: name run/optimizer.bin as CKPT"
