"""Every command that a diff prints is run as it stands; afterwards the two are the same, or the
diff has said why not.

``CKPTTOOL_COMMANDS=2000`` runs as many printed commands.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import small_models
from command import fixes_in, main, notes_in
from hook_zoo import ZOO

torch.set_num_threads(1)
COMMANDS = int(os.environ.get("CKPTTOOL_COMMANDS", "30"))
SUPPORT = Path(small_models.__file__).parent
State = dict[str, Any]
KEEPS_ITS_NAMES = "swap-weights gives the program all of the weights; the program keeps its names"

OWN = ("net", "hooked", "lifted", "tied", "fused")
MODELS: dict[str, Callable[[], nn.Module]] = {
    **{f"small_models.py:{name}": getattr(small_models, name) for name in OWN},
    **{f"hook_zoo.py:{name}": build for name, build in ZOO.items()},
}


def prefixed(prefix: str) -> Callable[[State], State]:
    return lambda state: {prefix + key: value for key, value in state.items()}


def beside_a_loss(state: State) -> State:
    return {**prefixed("net.")(state), "loss.weight": torch.ones(3)}


def adapted(state: State) -> State:
    """As PEFT saves a model with LoRA on its linear layers called `fc`."""
    made = {}
    for key, value in state.items():
        module, _, leaf = key.rpartition(".")
        inside = module.endswith("fc")
        made[f"base_model.model.{module + '.base_layer.' + leaf if inside else key}"] = value
        if inside and leaf == "weight":
            for name in ("lora_A", "lora_B"):
                made[f"base_model.model.{module}.{name}.default.weight"] = torch.ones(2, 2)
    return made


def beside_a_head(state: State) -> State:
    """As a part of a larger model."""
    return {
        **prefixed("backbone.")(state),
        "head.weight": torch.ones(5, 2),
        "head.bias": torch.ones(5),
    }


def twice(state: State) -> State:
    return {**prefixed("student.")(state), **prefixed("teacher.")(state)}


def reversed_modules(state: State) -> State:
    """Rename every module: only shapes and the last segments tell what is what."""
    result = {}
    for key, value in state.items():
        *modules, leaf = key.split(".")
        result[
            ".".join([*(part if part.isdigit() else part[::-1] + "x" for part in modules), leaf])
        ] = value
    return result


def renamed_tree(state: State) -> State:
    return {
        key.replace("layers.", "transformer.h.").replace("0.", "first."): value
        for key, value in state.items()
    }


WRAPPERS: dict[str, Callable[[State], State]] = {
    "none": dict,
    "ddp": prefixed("module."),
    "compile": prefixed("_orig_mod."),
    "ddp(compile)": prefixed("module._orig_mod."),
    "backbone": prefixed("backbone."),
    "lightning": beside_a_loss,
    "peft": adapted,
    "tree": renamed_tree,
    "head": beside_a_head,
    "ddp(head)": lambda state: prefixed("module.")(beside_a_head(state)),
    "twice": twice,
    "reversed": reversed_modules,
}


def tensors(state: State) -> list[str]:
    return [key for key, value in state.items() if isinstance(value, torch.Tensor)]


def without_one(state: State, rng: random.Random) -> State:
    gone = rng.choice(list(state)) if state else None
    return {key: value for key, value in state.items() if key != gone}


def with_more(state: State, rng: random.Random) -> State:
    more = {
        "ema.decay": torch.ones(1),
        "extra.0.weight": torch.ones(2),
        "extra.1.weight": torch.ones(2),
    }
    return {**state, **dict(rng.sample(list(more.items()), rng.randint(1, 3)))}


def misshapen(state: State, rng: random.Random) -> State:
    keys = tensors(state)
    return {**state, rng.choice(keys): torch.ones(7, 3, 1)} if keys else state


def halved(state: State, rng: random.Random) -> State:
    return {
        key: value.half() if key in tensors(state) and value.dtype.is_floating_point else value
        for key, value in state.items()
    }


def other_values(state: State, rng: random.Random) -> State:
    keys = [
        key
        for key in tensors(state)
        if state[key].dtype.is_floating_point and state[key].layout == torch.strided
    ]
    return (
        {**state, key: torch.full_like(state[key], 7)}
        if keys and (key := rng.choice(keys))
        else state
    )


DAMAGE: dict[str, Callable[[State, random.Random], State]] = {
    "none": lambda state, rng: state,
    "missing": without_one,
    "extra": with_more,
    "shape": misshapen,
    "dtype": halved,
    "value": other_values,
    "value, missing": lambda state, rng: without_one(other_values(state, rng), rng),
    "value, extra": lambda state, rng: with_more(other_values(state, rng), rng),
}


class Called:
    """An object whose pickle calls a function, as in mmengine's message hub."""

    def __reduce__(self) -> Any:
        return getattr, (OrderedDict, "fromkeys")


def numbered_state(model: nn.Module, count: int) -> State:
    """Return the state of an optimizer of as many parameters, in their order."""
    parameters = [nn.Parameter(torch.ones_like(parameter)) for parameter in model.parameters()]
    optimizer = torch.optim.Adam(parameters[:count] or [nn.Parameter(torch.ones(1))])
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return dict(optimizer.state_dict())


CONTAINERS: dict[str, Callable[[State, nn.Module], Any]] = {
    "root": lambda state, model: state,
    "mmengine": lambda state, model: {
        "meta": {"epoch": 1},
        "state_dict": state,
        "message_hub": {"lr": Called()},
    },
    "lightning": lambda state, model: {
        "state_dict": state,
        "pytorch-lightning_version": "2.4.0",
        "epoch": 1,
        "optimizer_states": [numbered_state(model, 99)],
        "lr_schedulers": [],
        "hyper_parameters": {"lr": 0.1},
    },
    "nested": lambda state, model: {
        "run": {"net": {"model": state}, "step": 3},
        "args": {"lr": 0.1, "w": [1, 2]},
    },
    "code": lambda state, model: {"model": state, "args": {"hooks": [Called()]}, "epoch": 3},
    "optimizer": lambda state, model: {"model": state, "optimizer": numbered_state(model, 99)},
    "average": lambda state, model: {
        "model": state,
        "ema": {f"module.{k}": v for k, v in state.items()},
        "step": 1,
    },
}


def accelerate_folder(state: State, model: nn.Module, path: Path) -> str | None:
    """Write a folder as `Accelerator.save_state` does."""
    folder = path.with_name(f"{path.name}_run")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    if saved(state, folder / "model", "safetensors") is None:
        return None
    torch.save(numbered_state(model, 99), folder / "optimizer.bin")
    torch.save({"last_epoch": 1}, folder / "scheduler.bin")
    return str(folder)


@dataclass(frozen=True)
class Pair:
    """Arguments of a diff; a remap reads `left`. `model` is the model if the arguments name
    none.
    """

    args: tuple[str, ...]
    left: str
    model: str
    words: str


def saved(state: State, path: Path, form: str) -> str | None:
    """Save the state; return its operand, or None if the format cannot hold it."""
    if form == "safetensors":
        plain = all(
            type(v) is torch.Tensor and v.layout == torch.strided and not v.is_quantized
            for v in state.values()
        )
        if not plain:
            return None
        try:
            save_file(
                {key: value.contiguous() for key, value in state.items()}, f"{path}.safetensors"
            )
        except (RuntimeError, ValueError):  # tied
            return None
        return f"{path}.safetensors"
    where = f"{path}.pt"
    try:
        torch.save({"model": state, "epoch": 3} if form == "section" else state, where)
    except RuntimeError:  # the same data as different types
        return None
    return f"{where}::model" if form == "section" else where


def contained(content: Any, path: Path) -> str | None:
    try:
        torch.save(content, path)
    except RuntimeError:  # the same data as different types
        return None
    return str(path)


def program(model: nn.Module, path: Path) -> str:
    """Export the model once, and return the path."""
    if not path.exists():
        sample = (
            torch.ones(1, 4)
            if isinstance(model, (small_models.Lifted, small_models.Fused))
            else torch.ones(1, dtype=torch.int64)
        )
        torch.export.save(torch.export.export(model, (sample,)), path)
    return str(path)


def plain(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def runtime_state(model: nn.Module) -> State:
    held = dict(model.named_parameters(remove_duplicate=False)) | dict(
        model.named_buffers(remove_duplicate=False)
    )
    return {key: plain(value) for key, value in held.items()}


def pair(seed: int, folder: Path) -> Pair | None:
    """Return a random pair: a model, the wrappers of its keys, a fault in the file, and the other
    side.
    """
    rng = random.Random(seed)
    name = rng.choice(list(MODELS)) if rng.random() < 0.5 else f"small_models.py:{rng.choice(OWN)}"
    try:
        model = MODELS[name]()
        state = {key: plain(value) for key, value in model.state_dict().items()}
        runtime = runtime_state(model)
    except Exception:  # a model whose code fails if it runs with real tensors
        return None
    words = (
        rng.choice(list(WRAPPERS)),
        rng.choice(list(DAMAGE)),
        rng.choice(["pt", "safetensors", "section"]),
    )
    own = rng.choice([state, runtime])
    made = WRAPPERS[words[0]](DAMAGE[words[1]](own, rng))
    container = rng.choice([*CONTAINERS, "accelerate"]) if rng.random() < 0.5 else ""
    operand = f"{SUPPORT / name.split(':')[0]}:{name.split(':')[1]}"
    if container:
        words = (*words[:2], container)
    if container == "accelerate":
        left = accelerate_folder(made, model, folder / "left")
    elif container:
        left = contained(CONTAINERS[container](made, model), folder / "left.pt")
    else:
        left = saved(made, folder / "left", words[2])
    if left is None:
        return None
    how = rng.choice(
        ["load", "load", "alone", "two", "two with model", "program", "program with model"]
    )
    shown = (
        f"{seed}: {name}, {'runtime' if own is runtime else 'serialized'}, {', '.join(words)},"
        f" {how}"
    )
    if how == "alone":
        return Pair(("--model", operand), left, operand, shown)
    if how == "load":
        return Pair(("--model", operand, left), left, operand, shown)
    right = saved(
        rng.choice([state, runtime]), folder / "right", rng.choice(["pt", "safetensors", "section"])
    )
    if how.startswith("program"):
        right = (
            program(model, folder / f"{name.split(':')[1]}.pt2")
            if name.startswith("small_models")
            else None
        )
    if right is None:
        return None
    model_words = ("--model", operand) if how.endswith("model") else ()
    values = ("--values",) if how.startswith("two") and rng.random() < 0.5 else ()
    return Pair((*model_words, left, right, *values), left, operand, f"{shown} {' '.join(values)}")


class Runs:
    """Run command lines in this process, and count the printed ones."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys, self.count = capsys, 0

    def __call__(self, *args: str) -> tuple[int, str, str]:
        status = main(list(args))
        out, err = self.capsys.readouterr()
        return status, out, err

    def diff(self, args: tuple[str, ...], words: str) -> dict[str, Any] | None:
        """Return the diff as JSON, or None if it failed."""
        status, out, err = self("diff", *args, "--format", "json")
        assert "Traceback" not in err, words
        found = json.loads(out)
        assert status == 2 or found["identical"] is (status == 0), words
        return None if status == 2 else found

    def printed(self, command: str, words: str) -> str:
        """Run a printed command, which must work, and return its output path."""
        self.count += 1
        line = shlex.split(command)
        assert line[0] == "ckpttool", words
        status, _, err = self(*line[1:])
        # diff --suggest
        assert status == (1 if line[1] == "diff" else 0), f"{words}\n{command}\n{err}"
        return line[line.index("-o") + 1] if "-o" in line else ""


def check(case: Pair, run: Runs) -> None:
    """Check that each printed command works and fixes what the diff says."""
    found = run.diff(case.args, case.words)
    if found is None or found["identical"]:
        return
    assert fixes_in(found) or notes_in(found) or "--model" in case.args[:1], (
        f"{case.words}: no fix and no note"
    )
    alone = case.left not in case.args
    complete = {fix["command"]: fix["complete"] for fix in found["fix"]}
    for command in fixes_in(found):
        words = shlex.split(command)
        if words[1] == "diff":  # writes the rules file that the next command reads
            run.printed(command, case.words)
            continue
        known = {"MODEL": "--model" in case.args, "CKPT": not alone, "PROGRAM.pt2": not alone}
        assert not any(known.get(word) for word in words), f"{case.words}: {command}"
        if "PROGRAM.pt2" in words:
            continue
        filled = [{"MODEL": case.model, "CKPT": case.left}.get(word, word) for word in words]
        unsure = filled != words  # the command has placeholders
        if unsure and not fitting(case, alone):
            continue
        out = run.printed(shlex.join(filled), case.words)
        if not unsure and words[1] == "remap":
            after = run.diff(
                tuple(out if arg == case.left else arg for arg in case.args), case.words
            )
            assert after is not None, case.words
            assert after["identical"] or not complete[command], (
                f"{case.words}\n{command}\n{after['summary']}"
            )
            assert after["identical"] or to_fix(after) < to_fix(found), f"{case.words}\n{command}"
        elif words[1] == "swap-weights":
            assert KEEPS_ITS_NAMES in notes_in(found) or unsure, case.words
        if Path(out).is_dir():
            shutil.rmtree(out)
        else:
            Path(out).unlink()


def fitting(case: Pair, alone: bool) -> bool:
    """Return True if the model saved the file and it is undamaged: then a command with placeholders
    must work.
    """
    return alone and "none, none" in case.words and "serialized" in case.words


def to_fix(found: dict[str, Any]) -> int:
    """Return how much a remap could fix: a name counts more than a shape or dtype, and values do
    not count.

    Nor do names that a load hook accepts.
    """
    done = {"same", "extra_state", "load-hook"}
    entries = [
        entry for entry in found["entries"] if not {entry["status"], entry.get("code")} & done
    ]
    under_one_name = {"value": 0, "dtype": 1, "shape": 1}
    return sum(
        under_one_name.get(e["status"], 2) if e["left"] == e["right"] else 2 for e in entries
    )


def cases(folder: Path) -> Iterator[Pair]:
    seed = 0
    while True:
        made = pair(seed, folder)
        if made is not None:
            yield made
        seed += 1


def test_every_printed_command_works(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    record_property: Callable[[str, object], None],
) -> None:
    run, failures = Runs(capsys), []
    for case in cases(tmp_path):
        try:
            check(case, run)
        except AssertionError as error:
            failures.append(str(error))
        if run.count >= COMMANDS:
            break
    record_property("cases", run.count)
    assert not failures, "\n\n".join(failures)


def test_command_for_a_model_that_does_not_save_all_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    operand = f"{SUPPORT / 'hook_zoo.py'}:merges_lora"
    torch.save(MODELS["hook_zoo.py:merges_lora"]().state_dict(), tmp_path / "left.pt")
    run = Runs(capsys)
    check(Pair(("--model", operand), "left.pt", operand, "serialized, none, none"), run)
    assert run.count == 1


@pytest.fixture(autouse=True)
def _in_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
