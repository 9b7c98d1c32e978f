from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import ckpttool
import optimizer_models as models
import optimizer_support
from ckpttool import Refused, open_checkpoint
from command import Run
from optimizer_support import equal_weights, remapped, same, save, steps, train
from torch_version import needs_torch

names_of = cache(optimizer_support.names_of)
OPTIMIZERS = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), 0.01, momentum=0.9),
    "SGD without momentum": lambda m: torch.optim.SGD(m.parameters(), 0.01),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), 0.01, amsgrad=True),
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), 0.01),
    "AdamW, capturable lr": lambda m: torch.optim.AdamW(
        m.parameters(), torch.tensor(0.01), foreach=False
    ),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters(), 0.01),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), 0.01),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), 0.01, momentum=0.5, centered=True),
    "NAdam": lambda m: torch.optim.NAdam(m.parameters(), 0.01),
    "RAdam": lambda m: torch.optim.RAdam(m.parameters(), 0.01),
    "Adamax": lambda m: torch.optim.Adamax(m.parameters(), 0.01),
    "Adadelta": lambda m: torch.optim.Adadelta(m.parameters(), 0.01),
    "ASGD": lambda m: torch.optim.ASGD(m.parameters(), 0.01),
    "Rprop": lambda m: torch.optim.Rprop(m.parameters(), 0.01),
    "two groups": models.decayed,
}


def options_of(keys: str) -> StateDictOptions:
    return StateDictOptions(flatten_optimizer_state_dict=keys == "flat")


def resumed(checkpoint: dict, model, make, keys: str):
    resumed_model = model()
    resumed_model.load_state_dict(checkpoint["model"])
    optimizer = make(resumed_model)
    if keys == "id":
        optimizer.load_state_dict(checkpoint["optimizer"])
    else:
        set_optimizer_state_dict(
            resumed_model, optimizer, checkpoint["optimizer"], options=options_of(keys)
        )
    return resumed_model, optimizer


@pytest.mark.parametrize("keys", ["fqn", "flat"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_continues_bit_for_bit(kind: str, keys: str, tmp_path: Path) -> None:
    make = OPTIMIZERS[kind]
    model, optimizer = train(models.Net, make)
    path = save(tmp_path / "id.pt", model, optimizer)
    names = names_of("Net")
    there, done = remapped(path, tmp_path / "there.pt", keys=keys, names=names)
    back, _ = remapped(str(tmp_path / "there.pt"), tmp_path / "back.pt", keys="id", names=names)

    assert (done.was, done.to, done.params) == ("id", keys, 9)
    assert there["epoch"] == back["epoch"] == 3
    if kind != "two groups" or keys == "fqn":
        assert same(back, torch.load(path))
    continued = resumed(there, models.Net, make, keys), resumed(back, models.Net, make, "id")
    steps(model, optimizer, 3, 5)
    for other in continued:
        steps(other[0], other[1], 3, 5)
        assert equal_weights(other[0], model)


def test_muon_continues_bit_for_bit(tmp_path: Path) -> None:
    needs_torch("2.9", "Muon")

    def make(m):
        return torch.optim.Muon(m.parameters(), 0.01)

    model, optimizer = train(models.Matrices, make)
    path = save(tmp_path / "id.pt", model, optimizer)
    there, _ = remapped(path, tmp_path / "fqn.pt", keys="fqn", names=names_of("Matrices"))
    other = resumed(there, models.Matrices, make, "fqn")
    steps(model, optimizer, 3, 5)
    steps(other[0], other[1], 3, 5)
    assert equal_weights(other[0], model)


@pytest.mark.parametrize("make", ["adamw", "decayed", "sgd", "named"])
@pytest.mark.parametrize("keys", ["fqn", "flat"])
def test_named_forms_equal_torchs(keys: str, make: str, tmp_path: Path) -> None:
    model, optimizer = train(models.Net, getattr(models, make))
    path = save(tmp_path / "id.pt", model, optimizer)
    expected = get_optimizer_state_dict(model, optimizer, options=options_of(keys))
    found, _ = remapped(path, tmp_path / "out.pt", keys=keys, names=names_of("Net"))
    assert same(found["optimizer"], expected)


def test_integer_steps_stay_integers(tmp_path: Path) -> None:
    _, optimizer = train(models.Net, models.adamw)
    state = optimizer.state_dict()
    for own in state["state"].values():
        own["step"] = 3  # as in torch before 1.12
    torch.save(state, tmp_path / "old.pt")
    found, _ = remapped(
        str(tmp_path / "old.pt"), tmp_path / "out.pt", keys="flat", names=names_of("Net")
    )
    assert found["state.embed.weight.step"] == 3
    back, _ = remapped(str(tmp_path / "out.pt"), tmp_path / "back.pt", keys="id")
    assert same(back, state)


def test_other_entries_are_kept(tmp_path: Path) -> None:
    _, optimizer = train(models.Net, models.adamw)
    state = {**optimizer.state_dict(), "version": 2}
    state["state"]["global"] = {"loss": torch.ones(2)}
    state["param_groups"][0]["note"] = {"why": (1, None)}
    path = tmp_path / "o.pt"
    torch.save({"optimizer_states": [state], "lr_schedulers": [{"last_epoch": 3}]}, path)
    found, done = remapped(str(path), tmp_path / "out.pt", keys="fqn", names=names_of("Net"))
    (named,) = found["optimizer_states"]
    assert done.section == "optimizer_states.0"
    assert found["lr_schedulers"] == [{"last_epoch": 3}]
    assert named["version"] == 2
    assert same(named["state"]["global"], {"loss": torch.ones(2)})
    assert named["param_groups"][0]["note"] == {"why": (1, None)}


def adafactor(model):
    return torch.optim.Adafactor(model.parameters(), 0.01)


def for_the_head(model):
    return torch.optim.AdamW(model.head.parameters(), 0.01)


def lbfgs(model):
    return torch.optim.LBFGS(model.parameters(), 0.01)


# model and optimizer of the file, names, other model's names, message, part of a problem or of the
# hint
REFUSED = {
    "no names": (
        "Net",
        models.adamw,
        (),
        (),
        "nothing says which parameters the ids are",
        "model=",
    ),
    "some parameters": (
        "Net",
        for_the_head,
        ("Net",),
        (),
        "has 1 parameters, and the model 9, 9 of them trainable",
        "",
    ),
    "factored moments": (
        *("Split", adafactor, ("Split",), ("Fused",), "cannot follow"),
        "row_var: it does not have the shape of its parameter @ qkv.weight",
    ),
    "different steps": (
        *("Split", models.adamw, ("Split",), ("Fused",), "cannot follow"),
        "step: not the same in q.weight, k.weight, v.weight @ qkv.weight",
    ),
    "LBFGS": (
        "Net",
        lbfgs,
        ("Net",),
        ("Reordered",),
        "cannot follow",
        "belongs to all parameters together",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_state_that_cannot_follow_is_refused(case: str, tmp_path: Path) -> None:
    name, make, names, to_names, message, more = REFUSED[case]
    model, optimizer = train(getattr(models, name), make, 2)
    if case == "different steps":
        optimizer.state[model.k.weight]["step"] += 1
    path = save(tmp_path / "o.pt", model, optimizer)
    options: dict[str, Any] = {"names": names_of(*names)} if names else {}
    options |= {"to_names": names_of(*to_names)} if to_names else {"keys": "fqn"}
    with pytest.raises(Refused, match=message) as refused:
        remapped(f"{path}::optimizer", tmp_path / "out.pt", **options)
    assert any(more in text for text in (refused.value.hint, *map(str, refused.value.problems)))


# Ids


def test_names_in_the_groups_need_no_model(tmp_path: Path) -> None:
    model, optimizer = train(models.Net, models.named)
    path = save(tmp_path / "o.pt", model, optimizer)
    found, done = remapped(path, tmp_path / "out.pt", keys="fqn")
    assert done.evidence == "param_names"
    assert same(found["optimizer"], get_optimizer_state_dict(model, optimizer))


def test_groups_in_model_order_are_identified_by_shapes(tmp_path: Path) -> None:
    path = save(tmp_path / "o.pt", *train(models.Net, models.decayed))
    _, done = remapped(path, tmp_path / "out.pt", keys="fqn", names=names_of("Net"))
    assert "for which the shapes allow one way" in str(done.evidence)


def test_groups_of_equal_shapes_are_refused_without_the_optimizer(tmp_path: Path) -> None:
    model, optimizer = train(models.Net, models.by_layer)
    path = save(tmp_path / "o.pt", model, optimizer)
    with pytest.raises(Refused, match="cannot be told apart") as refused:
        remapped(path, tmp_path / "out.pt", keys="fqn", names=names_of("Net"))
    assert "pass optimizer=" in refused.value.hint
    found, _ = remapped(path, tmp_path / "out.pt", keys="fqn", names=names_of("Net", "by_layer"))
    assert same(found["optimizer"], get_optimizer_state_dict(model, optimizer))


@pytest.mark.parametrize("make", ["backwards", "fused", "valued"])
def test_other_order_is_detected_by_shapes_and_resolved_by_the_optimizer(
    make: str, tmp_path: Path
) -> None:
    model, optimizer = train(models.Net, getattr(models, make))
    path = save(tmp_path / "o.pt", model, optimizer)
    with pytest.raises(Refused, match="the shapes in its state contradict") as refused:
        remapped(path, tmp_path / "out.pt", keys="fqn", names=names_of("Net"))
    assert "exp_avg is [2, 4], the parameter [4, 3]" in str(refused.value.problems[0])
    found, done = remapped(path, tmp_path / "out.pt", keys="fqn", names=names_of("Net", make))
    assert done.evidence == "optimizer"
    assert same(found["optimizer"], get_optimizer_state_dict(model, optimizer))


@pytest.mark.parametrize("make", [models.adamw, models.trainable], ids=["all", "trainable"])
def test_optimizer_may_include_frozen_parameters_or_not(make, tmp_path: Path) -> None:
    model, optimizer = train(models.Frozen, make)
    path = save(tmp_path / "o.pt", model, optimizer)
    found, done = remapped(path, tmp_path / "out.pt", keys="fqn", names=names_of("Frozen"))
    assert done.params == (9 if make is models.adamw else 5)
    assert found["optimizer"]["state"].keys() == {
        name for name, p in model.named_parameters() if p.requires_grad
    }


def test_unknown_optimizer_is_checked_by_its_state_shapes(tmp_path: Path) -> None:
    model = models.Net()
    params = list(model.parameters())[::-1]
    state = {i: {"trace": torch.zeros_like(p), "count": 1} for i, p in enumerate(params)}
    path = str(tmp_path / "o.pt")
    torch.save({"state": state, "param_groups": [{"lr": 1.0, "params": list(range(9))}]}, path)
    with pytest.raises(Refused, match="the shapes in its state contradict"):
        remapped(path, tmp_path / "out.pt", keys="fqn", names=names_of("Net"))


# Another model, another order


@pytest.mark.parametrize("keys", [None, "fqn"])
def test_pytorch_1489_reordered_parameters(keys: str | None, tmp_path: Path) -> None:
    """torch loads them by position without a warning, even if the file has param_names."""
    model, optimizer = train(models.Net, models.adamw)
    path = save(tmp_path / "o.pt", model, optimizer)
    options: dict[str, Any] = {
        "names": names_of("Net"),
        "to_names": names_of("Reordered", "adamw"),
        "keys": keys,
    }
    found, done = remapped(path, tmp_path / "out.pt", **options)
    assert (done.new, done.dropped) == ((), ())
    other = resumed(found, models.Reordered, models.adamw, keys or "id")
    steps(model, optimizer, 3, 5)
    steps(other[0], other[1], 3, 5)
    by_name = dict(other[0].named_parameters())
    assert all(torch.equal(p, by_name[name]) for name, p in model.named_parameters())


def test_a_group_split_into_two_has_the_hyperparameters_of_the_code(tmp_path: Path) -> None:
    model, optimizer = train(models.Net, models.adamw)
    optimizer.param_groups[0]["lr"] = 0.5
    path = save(tmp_path / "o.pt", model, optimizer)
    found, done = remapped(
        path, tmp_path / "out.pt", names=names_of("Net"), to_names=names_of("Net", "halves")
    )
    assert "a saved learning-rate scheduler" in done.notes[0]
    groups = found["optimizer"]["param_groups"]
    assert [group["params"] for group in groups] == [[0, 1, 2, 3, 4, 5], [6, 7, 8]]
    other = models.Net()
    target = models.halves(other)
    assert [group["lr"] for group in groups] == [group["lr"] for group in target.param_groups]
    assert "lr 0.01 (0.5 in the file)" in done.notes[1]
    target.load_state_dict(found["optimizer"])
    state = {name: target.state[p] for name, p in other.named_parameters()}
    assert all(same(state[name], optimizer.state[p]) for name, p in model.named_parameters())


def test_pytorch_3852_a_removed_layer(tmp_path: Path) -> None:
    """torch: loaded state dict contains a parameter group that doesn't match the size of
    optimizer's group.
    """
    path = save(tmp_path / "o.pt", *train(models.Net, models.adamw))
    optimizer = models.adamw(models.Shrunk())
    with pytest.raises(ValueError, match="doesn't match the size"):
        optimizer.load_state_dict(torch.load(path)["optimizer"])
    found, done = remapped(
        path,
        tmp_path / "out.pt",
        names=names_of("Net"),
        to_names=names_of("Shrunk"),
        drop="second.*",
    )
    assert done.dropped == ("second.weight", "second.bias")
    assert any("state of 2 parameters left out: second.weight" in note for note in done.notes)
    optimizer.load_state_dict(found["optimizer"])


def test_unchanged_optimizers_are_kept(tmp_path: Path) -> None:
    path = save(tmp_path / "o.pt", *train(models.Net, models.named))
    named = str(tmp_path / "named.pt")
    remapped(path, tmp_path / "named.pt", keys="fqn")
    same_keys: dict[str, Any] = {"optimizer_keys": "id"}
    same_names: dict[str, Any] = {"rule": "{x*} => {x*}"}
    for source, options in ((path, same_keys), (named, same_names)):
        done = ckpttool.remap(source, dry_run=True, **options)
        assert done.optimizers == ()
        places = [
            [(entry.key, entry.span) for entry in checkpoint.section("optimizer").tensors]
            for checkpoint in (done.result, open_checkpoint(source))
        ]
        assert places[0] == places[1]


def test_a_resized_layer_is_refused_by_name(tmp_path: Path) -> None:
    path = save(tmp_path / "o.pt", *train(models.Net, models.named))
    net, swapped = names_of("Net"), ["first.{x*} => embed.{x*}", "embed.{x*} => first.{x*}"]
    with pytest.raises(Refused) as refused:
        remapped(path, tmp_path / "out.pt", names=net, to_names=net, rule=swapped)
    assert "exp_avg is [4, 3], the parameter [4, 4]" in "".join(map(str, refused.value.problems))


# Transforms


def test_moments_of_a_fused_projection_are_fused(tmp_path: Path) -> None:
    model, optimizer = train(models.Split, models.adamw)
    path = save(tmp_path / "o.pt", model, optimizer)
    state, _ = remapped(
        f"{path}::optimizer",
        tmp_path / "out.pt",
        names=names_of("Split"),
        to_names=names_of("Fused"),
    )
    found = {"model": torch.load(path)["model"], "optimizer": state}
    other, target = resumed(found, models.Fused, models.adamw, "id")
    steps(model, optimizer, 3, 5)
    steps(other, target, 3, 5)
    parts = other.qkv.weight.detach().chunk(3)
    assert all(
        torch.allclose(part, getattr(model, name).weight) for name, part in zip("qkv", parts)
    )
    moments = [optimizer.state[getattr(model, name).weight]["exp_avg"] for name in "qkv"]
    assert torch.allclose(torch.cat(moments), target.state[other.qkv.weight]["exp_avg"])


def test_moments_roundtrip_through_serialized_keys(tmp_path: Path) -> None:
    model, optimizer = train(models.Split, models.adamw)
    path = save(tmp_path / "o.pt", model, optimizer)
    names = names_of("Split")
    there, _ = remapped(path, tmp_path / "there.pt", names=names, keys="fqn", to="serialized")
    assert list(there["optimizer"]["state"]) == ["qkv.weight"]
    assert torch.equal(
        there["optimizer"]["state"]["qkv.weight"]["exp_avg"],
        torch.cat([optimizer.state[getattr(model, name).weight]["exp_avg"] for name in "qkv"]),
    )
    back, _ = remapped(str(tmp_path / "there.pt"), tmp_path / "back.pt", names=names, keys="id")
    assert same(back["optimizer"], optimizer.state_dict())


# Wrappers: ids do not depend on them, and their segments are removed from names

WRAPPERS = {
    "compile": torch.compile,
    "DataParallel": torch.nn.DataParallel,
    "checkpoint": checkpoint_wrapper,
    "compile of checkpoint": lambda model: torch.compile(checkpoint_wrapper(model)),
    "checkpoint of compile": lambda model: checkpoint_wrapper(cast(Any, torch.compile(model))),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_pytorch_101107_113422_names_with_wrapper_segments(wrapper: str, tmp_path: Path) -> None:
    """The param_names of an optimizer for a wrapped model contain the wrapper's segments."""
    _, optimizer = train(models.Net, models.named)
    state = optimizer.state_dict()
    plain = state["param_groups"][0]["param_names"]
    wrapped = [name for name, _ in WRAPPERS[wrapper](models.Net()).named_parameters()][::-1]
    state["param_groups"][0]["param_names"] = wrapped
    torch.save(state, tmp_path / "o.pt")
    found, _ = remapped(
        str(tmp_path / "o.pt"), tmp_path / "out.pt", keys="fqn", names=names_of("Net")
    )
    assert found["param_groups"][0]["params"] == found["param_groups"][0]["param_names"] == plain
    assert found["state"].keys() == set(plain)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("keys", ["fqn", "flat"])
def test_a_wrapped_model_resumes_from_names(keys: str, wrapper: str, tmp_path: Path) -> None:
    model, optimizer = train(models.Net, models.adamw)
    path = save(tmp_path / "id.pt", model, optimizer)
    found, _ = remapped(path, tmp_path / "out.pt", keys=keys, names=names_of("Net"))
    other = models.Net()
    other.load_state_dict(found["model"])
    wrapped = WRAPPERS[wrapper](other)
    target = models.adamw(wrapped)
    # torch leaves their segments in (torchtitan#2622)
    if wrapper in ("DataParallel", "checkpoint of compile"):
        with pytest.raises((RuntimeError, KeyError)):
            set_optimizer_state_dict(wrapped, target, found["optimizer"], options=options_of(keys))
        return
    set_optimizer_state_dict(wrapped, target, found["optimizer"], options=options_of(keys))
    steps(model, optimizer, 3, 5)
    steps(other, target, 3, 5)
    assert equal_weights(other, model)


def test_names_of_tied_parameters(tmp_path: Path) -> None:
    model, optimizer = train(models.Tied, models.adamw)
    path = save(tmp_path / "o.pt", model, optimizer)
    found, done = remapped(path, tmp_path / "out.pt", keys="fqn", names=names_of("Tied"))
    assert done.params == 3
    assert same(found["optimizer"], get_optimizer_state_dict(model, optimizer))


def test_two_optimizers_for_one_section_are_refused(tmp_path: Path, run: Run) -> None:
    path = save(tmp_path / "run.pt", *train(models.Net, models.adamw))
    names = [f"optimizer=optimizer_models:{name}" for name in ("sgd", "adamw")]
    options = ("--model", "optimizer_models:Net", "--optimizer", names[0], "--optimizer", names[1])
    done = run("remap", path, *options, "--optimizer-keys", "fqn", "-o", tmp_path / "out.pt")
    assert (done.status, "optimizer has two optimizers" in done.err) == (2, True), done.err


def test_several_optimizers_use_their_own_names(tmp_path: Path) -> None:
    model = models.Net()
    parts = [
        [(n, p) for n, p in model.named_parameters() if n.startswith("head") == head]
        for head in (True, False)
    ]
    optimizers = [torch.optim.AdamW(part, 0.01) for part in parts]
    path = tmp_path / "last.ckpt"
    torch.save(
        {
            "state_dict": model.state_dict(),
            "optimizer_states": [o.state_dict() for o in optimizers],
        },
        path,
    )
    remap = ckpttool.remap(path, optimizer_keys="fqn", model=names_of("Net"))
    result, done = remap.result, remap.optimizers
    assert [(one.section, one.params) for one in done] == [
        ("optimizer_states.0", 1),
        ("optimizer_states.1", 8),
    ]
    assert [section.kind for section in result.sections].count("optimizer") == 2
