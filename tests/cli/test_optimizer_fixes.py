"""Optimizer state that does not fit: diff fails if and only if torch does, and the suggested fix
works.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import optimizer_models as models
from command import HARMLESS, Run, fixes_in, main, notes_in
from optimizer_support import save, steps, train

# Another class's state

ALL = os.environ.get("CKPTTOOL_SUITES") == "all"
CLASSES = (
    *("adamw", "amsgrad", "fused_in_order", "sgd", "plain_sgd", "nadam", "radam"),
    *("adagrad", "rmsprop", "adafactor", "adamax", "lbfgs"),
)
NO_REMAP = (
    "no remap makes this state fit: load the model only, and start the optimizer from scratch"
)


def resume_error(
    path: str, model: type[nn.Module], make: Callable[[nn.Module], torch.optim.Optimizer]
) -> str | None:
    net = model()
    optimizer = make(net)
    saved = torch.load(path, weights_only=True)
    try:
        net.load_state_dict(saved["model"])
        if "optimizer" in saved:
            optimizer.load_state_dict(saved["optimizer"])
        steps(net, optimizer, 3, 1)
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def answer(run: Run, *args: object) -> tuple[int, Any]:
    done = run(*args, "--format", "json")
    return done.status, done.data


def paste(command: str, old: str = "", optimizer: str = "") -> str:
    placeholders = {
        "OLD": f"optimizer_models:{old}",
        "OLD_OPTIMIZER": f"optimizer_models:{optimizer}",
    }
    words = [placeholders.get(word, word) for word in shlex.split(command)[1:]]
    assert main(words) == 0
    return words[-1]


@pytest.mark.parametrize("saved", CLASSES)
def test_pytorch_7499_143828_state_of_another_class(saved: str, tmp_path: Path, run: Run) -> None:
    """Try each class with 4 of the 12, or with all if ``CKPTTOOL_SUITES=all``."""
    path = save(tmp_path / "old.pt", *train(models.Net, getattr(models, saved), 1))
    first = CLASSES.index(saved)
    for target in (
        CLASSES if ALL else [CLASSES[(first + step) % len(CLASSES)] for step in (0, 1, 4, 9)]
    ):
        make = getattr(models, target)
        new = ("--model", "optimizer_models:Net", "--optimizer", f"optimizer_models:{target}")
        status, data = answer(run, "diff", *new, path)
        error = resume_error(path, models.Net, make)
        assert (status == 0) == (error is None), (target, error, notes_in(data))
        if status == 0:
            continue
        assert (fixes_in(data), NO_REMAP in notes_in(data)) == ([], True)


@pytest.mark.parametrize(
    ("layout", "picked"),
    [(("model", "a", "b"), "a"), (("model", "a"), "a"), (("model", "a"), None), (("a",), None)],
)
def test_incompatible_optimizer_has_no_fix(
    layout: tuple[str, ...], picked: str | None, tmp_path: Path, run: Run
) -> None:
    model, optimizer = train(models.Net, models.adamw, 1)
    states = {"model": model.state_dict(), "a": optimizer.state_dict(), "b": optimizer.state_dict()}
    torch.save({name: states[name] for name in layout}, path := str(tmp_path / "old.pt"))
    new = ("--model", "optimizer_models:Net", "--optimizer", "optimizer_models:sgd")
    status, data = answer(run, "diff", *new, f"{path}::{picked}" if picked else path)
    assert status == 1
    assert (fixes_in(data), NO_REMAP in notes_in(data)) == ([], True)


def test_group_order_is_fixed_in_the_selected_optimizer(tmp_path: Path, run: Run) -> None:
    """The other optimizer in the file is not compared."""
    model, optimizer = train(models.Net, models.in_order, 1)
    other = train(models.Net, models.decayed_named, 1)[1]
    path = str(tmp_path / "old.pt")
    torch.save(
        {"model": model.state_dict(), "a": optimizer.state_dict(), "b": other.state_dict()}, path
    )
    new = ("--model", "optimizer_models:Net", "--optimizer", "optimizer_models:decayed_named")
    assert answer(run, "diff", *new, f"{path}::b")[0] == 0
    status, data = answer(run, "diff", *new, f"{path}::a")
    assert status == 1
    out = paste(fixes_in(data)[0])
    assert answer(run, "diff", *new, f"{out}::a")[0] == 0


def test_remap_refuses_state_of_another_optimizer_class(tmp_path: Path, run: Run) -> None:
    path, out = save(tmp_path / "sgd.pt", *train(models.Net, models.sgd, 1)), tmp_path / "out.pt"
    words = (
        "remap",
        path,
        "--model",
        "optimizer_models:Net",
        "--to-optimizer",
        "optimizer_models:adamw",
    )
    status, data = answer(run, *words, "-o", str(out))
    assert status == 1
    assert "this is the state of SGD" in data["error"]
    assert {"betas", "step", "exp_avg"} <= {problem["key"] for problem in data["problems"]}
    assert not out.exists()
    assert (
        data["hint"]
        == "leave its state out (--drop optimizer), and start the optimizer from scratch"
    )
    assert main([*words, "--drop", "optimizer", "-o", str(out)]) == 0
    assert "optimizer" not in torch.load(out, weights_only=True)
    alone = tmp_path / "optimizer.pt"
    torch.save(torch.load(path, weights_only=True)["optimizer"], alone)
    status, data = answer(run, "remap", str(alone), *words[2:], "-o", str(tmp_path / "more.pt"))
    assert (status, data["hint"]) == (1, "start the optimizer from scratch")


# Param groups


def save_tagged(
    path: Path, model: type[nn.Module], make: Callable[[nn.Module], torch.optim.Optimizer]
) -> str:
    net, optimizer = train(model, make, 1)
    for name, parameter in net.named_parameters():
        optimizer.state[parameter]["exp_avg"].fill_(_tag(name))
    return save(path, net, optimizer)


def _tag(name: str) -> float:
    return float(1 + sorted(name for name, _ in models.Grown().named_parameters()).index(name))


def loads_correctly(
    path: str, model: type[nn.Module], make: Callable[[nn.Module], torch.optim.Optimizer]
) -> bool:
    net = model()
    optimizer = make(net)
    optimizer.load_state_dict(torch.load(path, weights_only=True)["optimizer"])
    return all(
        bool((optimizer.state[p]["exp_avg"] == _tag(name)).all())
        for name, p in net.named_parameters()
        if optimizer.state.get(p)
    )


# old model, old optimizer, new model, new optimizer, whether the model loads with the fix
GROUPS = [
    ("Net", "adamw", "Net", "decayed", True),
    ("Net", "in_order", "Net", "decayed_named", True),
    ("Net", "in_order", "Net", "named", True),
    ("Net", "adamw", "Net", "halves", True),
    ("Net", "halves", "Net", "adamw", True),
    ("Net", "adamw", "Reordered", "decayed", True),
    ("Shrunk", "adamw", "Net", "adamw", False),
    ("Shrunk", "in_order", "Net", "in_order", False),
    ("Shrunk", "decayed", "Net", "decayed", False),
    ("Net", "decayed_named", "Grown", "decayed_named", False),
    ("Net", "adamw", "Net", "backwards", True),
    ("Net", "backwards", "Net", "adamw", True),
]


@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize(("old", "saved", "new", "target", "loads"), GROUPS)
def test_pytorch_3852_other_param_groups(
    old: str, saved: str, new: str, target: str, loads: bool, prefix: str, tmp_path: Path, run: Run
) -> None:
    """torch: loaded state dict contains a parameter group that doesn't match the size of
    optimizer's group.

    One command fixes the keys of the model too, unless it has placeholders.
    """
    path = save_tagged(tmp_path / "old.pt", getattr(models, old), getattr(models, saved))
    file = torch.load(path)
    torch.save(
        {**file, "model": {prefix + key: value for key, value in file["model"].items()}}, path
    )
    words = (
        "diff",
        "--model",
        f"optimizer_models:{new}",
        "--optimizer",
        f"optimizer_models:{target}",
    )
    status, data = answer(run, *words, path)
    assert status == 1
    (command,) = fixes_in(data)
    out = paste(command, old, saved)
    assert loads_correctly(out, getattr(models, new), getattr(models, target))
    status, data = answer(run, *words, out)
    if "--optimizer OLD_OPTIMIZER" in command and prefix and loads:
        assert status == 1
        out = paste(fixes_in(data)[0])
        status, data = answer(run, *words, out)
    assert status == (0 if loads else 1)
    if loads:
        getattr(models, new)().load_state_dict(torch.load(out)["model"])
    assert any("does not load as it is" in note for note in notes_in(data)) != loads


FOREIGN = "the new model does not have these keys, and a remap would lose their values"
NO_FIX = [  # model and optimizer of the file, new model and optimizer, what the note says
    *(("Net", make, "Shrunk", make, FOREIGN) for make in ("adamw", "in_order", "decayed")),
    ("Net", "lbfgs_named", "Reordered", "lbfgs_named", "belongs to all parameters together"),
]


@pytest.mark.parametrize(("old", "saved", "new", "target", "reason"), NO_FIX)
def test_state_that_cannot_be_kept_gets_a_reason_instead_of_a_fix(
    old: str, saved: str, new: str, target: str, reason: str, tmp_path: Path, run: Run
) -> None:
    path = save(tmp_path / "old.pt", *train(getattr(models, old), getattr(models, saved), 2))
    words = (
        "diff",
        "--model",
        f"optimizer_models:{new}",
        "--optimizer",
        f"optimizer_models:{target}",
    )
    status, data = answer(run, *words, path)
    assert (status, fixes_in(data)) == (1, [])
    assert any(reason in note for note in notes_in(data))
    assert (NO_REMAP in notes_in(data)) == (reason != FOREIGN)


def test_fix_says_once_that_the_state_is_of_another_class(tmp_path: Path, run: Run) -> None:
    """torch: KeyError: 'step', in the step after the load."""
    path = save(tmp_path / "sgd.pt", *train(models.Net, models.sgd, 2))
    words = ("--model", "optimizer_models:Net", "--optimizer", "optimizer_models:adamw")
    done = run("fix", path, *words, "-o", tmp_path / "out.pt")
    assert done.status == 1
    why = "the state is from SGD, the optimizer is Adam or AdamW"
    assert done.err.startswith(f"error: no command fixes {path} completely: {why}")
    assert done.err.count("the next optimizer step needs it") == 1
    assert "load the model only, and start the optimizer from scratch" in done.err
    assert "Error" not in done.err
    out = run("diff", path, *words).out
    assert out.splitlines()[1].startswith(f"reason: {why}")
    assert out.count(why) == 1
    assert "Error" not in out


@pytest.mark.parametrize("target", ["backwards", "adamw"])
def test_other_order_is_read_in_the_model_order_only_if_the_shapes_and_the_keys_confirm_it(
    target: str, tmp_path: Path, run: Run
) -> None:
    saved = "adamw" if target == "backwards" else "backwards"
    path = save_tagged(tmp_path / "old.pt", models.Net, getattr(models, saved))
    words = ("diff", "--model", "optimizer_models:Net", "--optimizer", f"optimizer_models:{target}")
    is_certain = target == "backwards"
    (command,) = fixes_in(answer(run, *words, path)[1])
    assert ("OLD_OPTIMIZER" in command) != is_certain
    assert run("fix", path, *words[1:], "-o", tmp_path / "fixed.pt").status == (
        0 if is_certain else 1
    )
    file = torch.load(path)
    torch.save({"optimizer": file["optimizer"]}, path)
    (command,) = fixes_in(answer(run, *words, path)[1])
    assert "--model OLD" in command
    torch.save({**file, "model": dict(reversed(file["model"].items()))}, path)
    (command,) = fixes_in(answer(run, *words, path)[1])
    assert "--model OLD" in command


def test_missing_parameters_are_named_if_the_file_has_only_ids(tmp_path: Path, run: Run) -> None:
    path = save_tagged(tmp_path / "old.pt", models.Shrunk, models.adamw)
    _, data = answer(
        run,
        "diff",
        "--model",
        "optimizer_models:Net",
        "--optimizer",
        "optimizer_models:adamw",
        path,
    )
    missing = [entry["right"] for entry in data["entries"] if entry["status"] == "missing"]
    assert missing == [[f"param_groups.0.params.second.{name}"] for name in ("weight", "bias")]


# Order


def test_optimizer_with_a_hook_that_loads_by_name(tmp_path: Path, run: Run) -> None:
    """A pre-hook reorders the saved state, as the documentation of Optimizer.load_state_dict
    shows.
    """
    path = save_tagged(tmp_path / "old.pt", models.Net, models.in_order)
    chosen = ("diff", "--model", "optimizer_models:Reordered", "--optimizer")
    assert not loads_correctly(path, models.Reordered, models.in_order)
    assert answer(run, *chosen, "optimizer_models:in_order", path)[0] == 1
    assert loads_correctly(path, models.Reordered, models.by_name)
    assert answer(run, *chosen, "optimizer_models:by_name", path)[0] == 0


def test_reordered_parameters_are_found_without_optimizer(tmp_path: Path, run: Run) -> None:
    path, names = (
        save_tagged(tmp_path / "old.pt", models.Net, models.in_order),
        str(tmp_path / "names.json"),
    )
    operands = ("optimizer_models:Reordered", "--optimizer", "optimizer_models:in_order")
    assert main(["trace", *operands, "-o", names]) == 0
    for model in (names, "optimizer_models:Reordered"):
        status, data = answer(run, "diff", "--model", model, f"{path}::optimizer")
        assert (status, data["summary"]["order"]) == (1, 9)
        out = paste(data["fix"][0]["command"])
        assert loads_correctly(out, models.Reordered, models.in_order)
        Path(out).unlink()
    status, data = answer(run, "diff", "--model", "optimizer_models:Reordered", path)
    assert status == 0  # the model loads; a note says that the optimizer was not compared
    assert any("registers its parameters in another order" in note for note in notes_in(data))


@pytest.mark.parametrize("saved", ["in_order", "adamw"])
def test_state_of_a_renamed_layer_is_not_dropped(saved: str, tmp_path: Path, run: Run) -> None:
    path, out = (
        save_tagged(tmp_path / "old.pt", models.Net, getattr(models, saved)),
        str(tmp_path / "out.pt"),
    )
    words = (
        "diff",
        "--model",
        "optimizer_models:Renamed",
        "--optimizer",
        "optimizer_models:in_order",
    )
    status, data = answer(run, *words, path)
    assert status == 1
    assert fixes_in(data) == []
    expected = (
        "the model in this file does not load as it is"
        if saved == "adamw"
        else "--rule 'FROM => TO' --to-model optimizer_models:Renamed --to-optimizer OPTIMIZER"
    )
    assert any(expected in note for note in notes_in(data))
    old = () if saved == "in_order" else ("--model", "optimizer_models:Net")
    rule = ("--rule", "first.{x} => body.{x}", "--optimizer-keys", "fqn")
    assert main(["remap", path, *old, *rule, "-o", out]) == 0
    status, data = answer(run, *words, out)
    assert status == 0, notes_in(data)


@pytest.mark.parametrize(
    ("new", "keys", "status"),
    [("Net", "id", 0), ("Net", "fqn", 0), ("Grown", "id", 1), ("Grown", "fqn", 0)],
)
def test_group_of_a_new_parameter_is_not_guessed(
    new: str, keys: str, status: int, tmp_path: Path, run: Run
) -> None:
    path = save_tagged(tmp_path / "old.pt", models.Net, models.halves)
    old = ("--model", "optimizer_models:Net", "--optimizer", "optimizer_models:halves")
    to = (
        "--to-model",
        f"optimizer_models:{new}",
        "--optimizer-keys",
        keys,
        "--partial",
        "-o",
        str(tmp_path / "out.pt"),
    )
    done, data = answer(run, "remap", path, *old, *to)
    assert done == status
    problems = [(one["problem"], one["key"]) for one in data.get("problems", ())]
    assert problems == (
        [("its group is unknown", f"extra.{leaf}") for leaf in ("weight", "bias")] if status else []
    )
    if (new, keys) == ("Net", "id"):
        assert loads_correctly(str(tmp_path / "out.pt"), models.Net, models.halves)


@pytest.mark.parametrize("saved", ["trained", "all"])
def test_fqn_state_is_not_converted_to_ids_of_other_parameters(
    saved: str, tmp_path: Path, run: Run
) -> None:
    path, named = str(tmp_path / "old.pt"), str(tmp_path / "named.pt")
    save(
        Path(path),
        *train(models.Frozen, models.in_order if saved == "all" else models.trainable, 1),
    )
    target = {"all": "in_order", "trained": "trainable"}
    model = ("--model", "optimizer_models:Frozen", "--optimizer")
    assert (
        main(
            [
                "remap",
                path,
                *model,
                f"optimizer_models:{target[saved]}",
                "--optimizer-keys",
                "fqn",
                "-o",
                named,
            ]
        )
        == 0
    )
    (other,) = set(target) - {saved}
    back = ("--optimizer-keys", "id", "-o", str(tmp_path / "back.pt"))
    status, data = answer(run, "remap", named, *model, f"optimizer_models:{target[other]}", *back)
    frozen = {
        name
        for name, parameter in models.Frozen().named_parameters()
        if not parameter.requires_grad
    }
    assert (status, {problem["key"] for problem in data["problems"]}) == (1, frozen)
    assert main(["remap", named, *model, f"optimizer_models:{target[saved]}", *back]) == 0


# Two saved optimizers


@pytest.mark.parametrize("saved", CLASSES)
def test_fix_between_saved_optimizers_reduces_the_differences(
    saved: str, tmp_path: Path, run: Run
) -> None:
    """If remap would be refused, a note is printed instead of a fix."""
    left = save(tmp_path / "old.pt", *train(models.Net, getattr(models, saved), 1))
    right = save(tmp_path / "new.pt", *train(models.Net, models.decayed, 1))
    words = ("--model", "optimizer_models:Net", "--optimizer", "optimizer_models:decayed")
    status, data = answer(run, "diff", *words, f"{left}::optimizer", f"{right}::optimizer")
    assert status == 1
    if not fixes_in(data):
        assert NO_REMAP in notes_in(data)
        return
    out = paste(fixes_in(data)[0])
    _, after = answer(run, "diff", *words, f"{out}::optimizer", f"{right}::optimizer")
    assert _count_differences(after) < _count_differences(data)


def test_file_without_a_model_may_keep_a_difference_after_the_fix(tmp_path: Path, run: Run) -> None:
    """Adagrad does not step without the state of the first parameter."""
    net = models.Net()
    optimizer = torch.optim.Adagrad([*net.named_parameters()][::-1], 0.01)
    steps(net, optimizer, 0, 1)
    state = optimizer.state_dict()
    state["state"][8] = {}
    torch.save(state, path := tmp_path / "optimizer.pt")
    words = ("diff", "--model", "optimizer_models:Net", "--optimizer", "optimizer_models:adagrad")
    status, data = answer(run, *words, path)
    assert status == 1
    assert not any(fix["complete"] for fix in data["fix"])
    for command in fixes_in(data):
        after = answer(run, *words, paste(command))[1]
        assert _count_differences(after) < _count_differences(data)


def test_optimizer_next_to_two_models_gets_a_fix(tmp_path: Path, run: Run) -> None:
    """It is unclear which of the two is the model, so their keys stay as they are."""
    net, optimizer = train(models.Net, models.in_order, 1)
    weights = {f"module.{key}": value for key, value in net.state_dict().items()}
    file = {
        "generator": weights,
        "critic": nn.Linear(2, 2).state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    torch.save(file, path := tmp_path / "two.pt")
    words = (
        "diff",
        "--model",
        "optimizer_models:Net",
        "--optimizer",
        "optimizer_models:decayed_named",
    )
    status, data = answer(run, *words, f"{path}::optimizer")
    assert status == 1
    (command,) = fixes_in(data)
    out = paste(command)
    assert answer(run, *words, f"{out}::optimizer")[0] == 0
    assert torch.load(out)["generator"].keys() == weights.keys()


def test_remap_of_a_file_without_a_model_says_that_it_has_optimizer_state_only(
    tmp_path: Path, run: Run
) -> None:
    torch.save(train(models.Net, models.in_order, 1)[1].state_dict(), tmp_path / "optimizer.pt")
    done = run(
        "remap", tmp_path / "optimizer.pt", "--optimizer-keys", "fqn", "-o", tmp_path / "out.pt"
    )
    answer = "out.pt: optimizer state of 9 parameters by name"
    assert (done.status, done.out.splitlines()[0].endswith(answer)) == (0, True), done.out


@pytest.mark.parametrize("with_model", [False, True])
@pytest.mark.parametrize("folder", [False, True])
def test_fix_of_one_section_is_a_command_for_the_complete_file(
    folder: bool, with_model: bool, tmp_path: Path, run: Run
) -> None:
    model, optimizer = train(models.Net, models.adamw, 1)
    ids = save(tmp_path / "ids.pt", model, optimizer)
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    named = str(tmp_path / ("named" if folder else "named.pt"))
    if folder:
        dcp.save(state, checkpoint_id=named)
    else:
        torch.save(state, named)
    words = ("--model", "optimizer_models:Net") if with_model else ()
    status, data = answer(run, "diff", f"{named}::optim", f"{ids}::optimizer", *words)
    assert (status, data["summary"]["renamed"]) == (1, 1)
    (command,) = fixes_in(data)
    out = paste(command)
    assert (
        answer(run, "diff", f"{out.rstrip('/')}::optim", f"{ids}::optimizer", "--values", *words)[0]
        == 0
    )


def _count_differences(data: dict[str, Any]) -> int:
    return sum(entry["status"] not in HARMLESS for entry in data["entries"])


@pytest.mark.parametrize(("old", "new"), [("Split", "Fused"), ("Fused", "Split")])
def test_split_or_fused_parameters_are_not_missing(
    old: str, new: str, tmp_path: Path, run: Run
) -> None:
    """A different number of keys does not justify --partial, which would hide missing keys."""
    path = save(tmp_path / "old.pt", *train(getattr(models, old), models.in_order, 1))
    status, data = answer(
        run,
        "diff",
        "--model",
        f"optimizer_models:{new}",
        "--optimizer",
        "optimizer_models:in_order",
        path,
    )
    assert status == 1
    (command,) = fixes_in(data)
    assert "--partial" not in command
    out = paste(command, old, "in_order")
    written = torch.load(out)
    saved = torch.load(path)
    assert torch.equal(written["model"]["qkv.weight"], saved["model"]["qkv.weight"])
    before, after = moments(saved["optimizer"]), moments(written["optimizer"])
    assert torch.equal(before, after)
    assert resume_error(out, getattr(models, new), models.in_order) is None


def moments(optimizer: dict[str, Any]) -> torch.Tensor:
    """Return the first moments of q, k and v, below each other."""
    return torch.cat([slots["exp_avg"] for slots in optimizer["state"].values()])


# Frozen parameters


def test_state_of_frozen_parameters_is_left_out_by_remap_only(tmp_path: Path, run: Run) -> None:
    """The suggested remap leaves their state out, with a note; `fix` does not."""
    old_model, old = train(models.Net, models.adamw, 1)
    path = save(tmp_path / "old.pt", old_model, old)
    words = ("--model", "optimizer_models:Frozen", "--optimizer", "optimizer_models:trainable")
    status, data = answer(run, "diff", *words, path)
    assert status == 1
    model = models.Frozen()
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert any(
        "leaves out the state of" in note and frozen <= {*note.split()}
        for note in _notes_without_commas(data)
    )
    (line,) = fixes_in(data)
    out = paste(line)
    assert answer(run, "diff", *words, out)[0] == 0
    optimizer = models.trainable(model)
    optimizer.load_state_dict(torch.load(out)["optimizer"])
    names = {parameter: name for name, parameter in model.named_parameters()}
    before = {name: old.state[parameter] for name, parameter in old_model.named_parameters()}
    assert len(optimizer.state) == len(before) - len(frozen)
    for parameter, state in optimizer.state.items():
        assert torch.equal(state["exp_avg"], before[names[parameter]]["exp_avg"])
    assert run("fix", path, *words, "-o", tmp_path / "fixed.pt").status == 1


def _notes_without_commas(data: dict[str, Any]) -> list[str]:
    return [note.replace(",", " ") for note in notes_in(data)]
