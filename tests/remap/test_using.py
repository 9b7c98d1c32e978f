"""`remap --using`: a converter's plan gives what the converter itself gives, bit for bit, and what
cannot be a plan is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import ckpttool
from ckpttool import CkptError, Refused
from command import Run

State = dict[str, torch.Tensor]
HEADS, EXPERTS = 2, 3


def decoder() -> State:
    torch.manual_seed(0)
    state = {"tok_embeddings.weight": torch.randn(10, 8)}
    for layer in range(2):
        prefix = f"layers.{layer}"
        state[f"{prefix}.attention.wqkv.weight"] = torch.randn(24, 8)
        state[f"{prefix}.attention.wq.weight"] = torch.randn(8, 8)
        state[f"{prefix}.norm.weight"] = torch.randn(8).bfloat16()
        for expert in range(EXPERTS):
            for name in ("w1", "w3"):
                state[f"{prefix}.experts.{expert}.{name}"] = torch.randn(6, 8)
    state["steps"] = torch.tensor(7)
    return state


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_file(decoder(), "a.safetensors")
    torch.save(decoder(), "a.pt")


# Converters


def renamed(state: State) -> State:
    return {f"model.{key.replace('tok_', '')}": value for key, value in state.items()}


def fused_experts(state: State) -> State:
    result = {key: value for key, value in state.items() if ".experts." not in key}
    for layer in range(2):
        both = []
        for expert in range(EXPERTS):
            prefix = f"layers.{layer}.experts.{expert}"
            both.append(torch.cat([state[f"{prefix}.w1"], state[f"{prefix}.w3"]]))
        result[f"layers.{layer}.experts"] = torch.stack(both).transpose(1, 2)
    return result


def experts_filled_in_place(state: State) -> State:
    result = {key: value for key, value in state.items() if ".experts." not in key}
    for layer in range(2):
        filled = torch.zeros(EXPERTS, 2, 6, 8)
        for expert in range(EXPERTS):
            for place, name in enumerate(("w1", "w3")):
                filled[expert, place] = state[f"layers.{layer}.experts.{expert}.{name}"]
        result[f"layers.{layer}.experts"] = filled
    return result


def rotary(state: State) -> State:
    result = dict(state)
    for key, weight in state.items():
        if key.endswith("wq.weight"):
            rows = weight.view(HEADS, -1, 2, weight.shape[1]).transpose(1, 2)
            result[key] = rows.reshape(weight.shape)
    return result


def split(state: State) -> State:
    result = {}
    for key, value in state.items():
        if "wqkv" in key:
            for name, part in zip("qkv", value.chunk(3)):
                result[key.replace("wqkv", f"w_{name}")] = part
        else:
            result[key] = value
    return result


def cast(state: State) -> State:
    return {
        key: value.half() if value.dtype.is_floating_point else value
        for key, value in state.items()
    }


def cuts(state: State) -> State:
    state["tok_embeddings.weight"] = state["tok_embeddings.weight"][:7]
    state["layers.0.attention.wqkv.weight"] = state["layers.0.attention.wqkv.weight"].float()[:16]
    query = state["layers.1.attention.wq.weight"]
    state["layers.1.attention.wq.weight"] = torch.stack([query[torch.tensor([1])], query[2:3]])
    return state


def computed(state: State) -> State:
    state["tok_embeddings.weight"].mul_(2.0)
    state["steps"] = state["steps"] + 1
    scale = torch.tensor([0.5, 2.0]).repeat(4)
    for layer in range(2):
        key = f"layers.{layer}.attention.wq.weight"
        state[key] = state[key].float() * scale[:, None]
    return state


def in_pairs(state: State) -> Iterator[tuple[str, torch.Tensor]]:
    for key in list(state):
        yield key.upper(), state.pop(key)


def doubled(state: State) -> State:
    weight = state["tok_embeddings.weight"]
    return {**state, "output.weight": weight.clone(), "third.weight": weight.clone()}


CONVERTERS: list[Callable[[State], Any]] = [
    renamed, fused_experts, experts_filled_in_place, rotary, split, cast, cuts, computed, in_pairs, doubled,
]  # fmt: skip


def same(left: State, right: State) -> bool:
    return left.keys() == right.keys() and all(
        value.dtype == right[key].dtype and torch.equal(value, right[key])
        for key, value in left.items()
    )


@pytest.mark.parametrize("ending", ["safetensors", "pt"])
@pytest.mark.parametrize("function", CONVERTERS)
def test_the_plan_gives_what_the_function_gives(
    function: Callable[[State], Any], ending: str
) -> None:
    ckpttool.remap(f"a.{ending}", f"b.{ending}", using=function)
    result = load_file("b.safetensors") if ending == "safetensors" else torch.load("b.pt")
    assert same(result, dict(function(decoder())))


def test_renames_and_experts_move_bytes() -> None:
    done = ckpttool.remap("a.safetensors", using=fused_experts)
    assert done.counts == {"renamed": 0, "second_names": 0, "transformed": 2, "unchanged": 8}
    assert ckpttool.remap("a.safetensors", using=renamed).counts["transformed"] == 0


@pytest.mark.parametrize("clones", [False, True])
def test_tied_weights_stay_tied_unless_the_function_copies_them(clones: bool) -> None:
    weight = torch.randn(3, 2)
    torch.save({"a": weight, "b": weight}, "tied.pt")

    def function(state: State) -> State:
        return {"x": state["a"], "y": state["b"].clone() if clones else state["b"]}

    ckpttool.remap("tied.pt", "out.pt", using=function)
    result = torch.load("out.pt")
    assert (result["x"].data_ptr() == result["y"].data_ptr()) is not clones
    assert torch.equal(result["x"], weight)
    assert torch.equal(result["y"], weight)


def test_one_name_of_a_tied_weight_is_enough() -> None:
    weight = torch.randn(3, 2)
    torch.save({"a": weight, "b": weight}, "tied.pt")
    done = ckpttool.remap("tied.pt", "out.pt", using=lambda state: {"x": state["b"]})
    assert same(torch.load("out.pt"), {"x": weight})
    assert done.dropped == ["a"]


def test_arguments_and_the_way_back(run: Run) -> None:
    Path("adapter.py").write_text(
        "def there(state, prefix):\n"
        "    return {f'{prefix}.{key}': value.t() if value.dim() == 2 else value for key, value in"
        " state.items()}\n"
        "def back(state):\n"
        "    return {key.partition('.')[2]: value.t() if value.dim() == 2 else value for key,"
        " value in state.items()}\n"
    )
    there = run(
        "remap", "a.safetensors", "-o", "b.safetensors", "--using", "adapter.py:there(prefix='m')"
    )
    assert there.status == 0, there.err
    back = run("remap", "b.safetensors", "-o", "c.dcp", "--using", "adapter.py:back")
    assert back.status == 0, back.err
    assert run("diff", "a.safetensors", "c.dcp", "--values").status == 0


def test_rules_and_select_come_after_the_function() -> None:
    ckpttool.remap(
        "a.safetensors", "b.safetensors", using=renamed, select="model", rule="steps => count"
    )
    keys = [key.removeprefix("model.") for key in renamed(decoder())]
    assert {*load_file("b.safetensors")} == {"count" if key == "steps" else key for key in keys}


def test_all_state_dicts_of_the_model_are_converted() -> None:
    torch.save({"model": decoder(), "ema": decoder(), "epoch": 1}, "train.pt")
    ckpttool.remap("train.pt", "out.pt", using=split)
    result = torch.load("out.pt")
    assert same(result["model"], split(decoder()))
    assert same(result["ema"], split(decoder()))


def test_optimizer_state_follows() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(2, 2)})
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.1)
    model["b"](model["a"](torch.ones(1, 3))).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "train.pt")

    def function(state: State) -> State:
        return {key.replace("a.", "first."): value for key, value in state.items()}

    ckpttool.remap("train.pt", "out.pt", using=function, optimizer_keys="fqn")
    result = torch.load("out.pt")["optimizer"]["state"]
    expected = optimizer.state_dict()["state"][0]["exp_avg"]
    assert torch.equal(result["first.weight"]["exp_avg"], expected)


class Fused(nn.Module):
    """Saves the rows of one tensor under two keys."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.zeros(4, 3))

    def state_dict(self, **options: Any) -> State:
        first, second = self.both.detach().chunk(2)
        return {"first": first, "second": second}


def test_a_function_may_trace_a_model() -> None:
    def split(state: State) -> State:
        keys = [entry.key for entry in ckpttool.trace(Fused).serialized]
        return dict(zip(keys, state["both"].chunk(2)))

    save_file({"both": torch.randn(4, 3)}, "both.safetensors")
    ckpttool.remap("both.safetensors", "out.safetensors", using=split)
    out = load_file("out.safetensors")
    assert torch.cat([out["first"], out["second"]]).equal(load_file("both.safetensors")["both"])
    assert "data_ptr" not in vars(torch.UntypedStorage)


def test_the_output_is_checked_with_the_model_that_loads_it(run: Run) -> None:
    torch.save(nn.Linear(3, 2).state_dict(), "linear.pt")
    Path("model.py").write_text(
        "from torch import nn\n"
        "def build(): return nn.Sequential(nn.Linear(3, 2))\n"
        "def to(state): return {f'0.{key}': value for key, value in state.items()}\n"
        "def wrong(state): return {f'1.{key}': value for key, value in state.items()}\n"
    )
    line = ("remap", "linear.pt", "-o", "out.pt", "--to-model", "model.py:build", "--using")
    assert run(*line, "model.py:wrong").status == 1
    assert run(*line, "model.py:to").status == 0


# Errors

CODE = """
import torch
import numpy
def fails(state):
    return {"a": state["absent"]}
def none(state):
    state.clear()
def nested(state):
    return {"model": state, "epoch": 3, 4: state["steps"]}
def twice(state):
    for key, value in state.items():
        yield key.replace("w1", "w3"), value
def loses(state):
    return {"w": state["tok_embeddings.weight"]}
def random(state):
    return {**state, "r": torch.randn(3), "e": torch.empty(2)}
def sparse(state):
    return {**state, "steps": state["tok_embeddings.weight"].to_sparse()}
def unknown(state):
    return {**state, "steps": torch.lgamma(state["layers.0.attention.wq.weight"])}
def asks(state):
    return {key: value * 2 if value.float().sum() > 0 else value for key, value in state.items()}
def masks(state):
    weight = state["tok_embeddings.weight"]
    return {**state, "tok_embeddings.weight": weight[weight.sum(1) != 0]}
def asks_item(state):
    return {key: value + state["steps"].item() for key, value in state.items()}
def asks_quietly(state):
    try:
        state["steps"].item()
    except Exception:
        pass
    return {**state, "more": state["steps"] + 1}
def by_numpy(state):
    weight = state["tok_embeddings.weight"]
    return {**state, "more": torch.from_numpy(numpy.tile(weight.numpy(), (999, 1)))}
value = 3
"""
EXPERT_KEYS = [key for key in decoder() if "w1" in key or "w3" in key]


@pytest.mark.parametrize(
    ("operand", "status", "words"),
    [
        ("absent.py:f", 2, ["absent.py: no such file"]),
        ("code.py:absent", 2, ["code.py has no attribute 'absent'", "takes a state dict"]),
        ("code.py", 2, ["names no Python object", "file.py:to_hf"]),
        ("code.py:value", 2, ["code.py:value is not a function but an int"]),
        ("code.py:fails", 2, ["code.py:fails fails: KeyError: 'absent' (code.py:"]),
        ("code.py:fails(a=1)", 2, ["unexpected keyword argument 'a'"]),
        ("code.py:none", 2, ["code.py:none returns None, not a state dict"]),
        ("code.py:nested", 1, ["a dict, not a tensor @ model", "an int, not a tensor @ epoch",
                               "a name that is an int, not a text @ 4"]),
        ("code.py:twice", 1, ["written 2 times @ layers.{0-1}.experts.{0-2}.w3"]),
        ("code.py:random", 1, ["random or not filled @ r", "random or not filled @ e"]),
        ("code.py:unknown", 1, ["is not an operator that a plan may hold @ steps"]),
        ("code.py:asks", 2, ["code.py:asks reads the values of tensors (code.py:", "--materialize"]),
        ("code.py:asks_item", 2, ["reads the values of tensors", "--materialize"]),
        ("code.py:asks_quietly", 2, ["reads the values of tensors", "--materialize"]),
        ("code.py:by_numpy", 2, ["reads the values of tensors (code.py:", "--materialize"]),
    ],
)  # fmt: skip
def test_what_cannot_be_a_plan(run: Run, operand: str, status: int, words: list[str]) -> None:
    Path("code.py").write_text(CODE)
    done = run("remap", "a.safetensors", "-o", "b.safetensors", "--using", operand)
    assert done.status == status, done.err
    for text in words:
        assert text in done.err
    assert not Path("b.safetensors").exists()


def test_tensors_that_no_output_reads_are_named_and_dropped_on_purpose(run: Run) -> None:
    Path("code.py").write_text(CODE)
    line = ("remap", "a.safetensors", "-o", "b.safetensors", "--using", "code.py:loses")
    done = run(*line)
    assert done.status == 1
    unread = [key for key in decoder() if key != "tok_embeddings.weight"]
    assert done.err.startswith("error: code.py:loses does not convert (root): 19 problems\n")
    assert "no output reads it (19):" in done.err
    assert f"    {unread[-1]}\n" in done.err
    assert f"hint: leave them out on purpose: --drop {unread[-1]}" in done.err
    assert run(*line, "--drop", "layers.*", "--drop", "steps").status == 0
    assert same(load_file("b.safetensors"), {"w": decoder()["tok_embeddings.weight"]})


def test_tensors_that_are_read_in_part_are_named(run: Run) -> None:
    """A slice or an index leaves elements out, also after a cast."""
    Path("code.py").write_text(f"import torch\nState = dict\n{inspect.getsource(cuts)}")
    done = run("remap", "a.safetensors", "-o", "b.safetensors", "--using", "code.py:cuts")
    assert done.status == 0
    assert (
        "code.py:cuts leaves out a part of 3 tensors: layers.0.attention.wqkv.weight (64 of 192"
        " elements), layers.1.attention.wq.weight (48 of 64 elements), tok_embeddings.weight (24"
        " of 80 elements)"
    ) in done.err
    assert same(load_file("b.safetensors"), cuts(decoder()))
    assert not ckpttool.remap("a.safetensors", using=fused_experts).notes


def test_a_dropped_tensor_that_an_output_reads_is_refused(run: Run) -> None:
    Path("code.py").write_text(CODE)
    drops = ("--drop", "layers.*", "--drop", "steps", "--drop", "tok*")
    done = run("remap", "a.pt", "-o", "b.pt", "--using", "code.py:loses", *drops)
    assert done.status == 1
    assert "--drop names it, and w reads it @ tok_embeddings.weight" in done.err


@pytest.mark.parametrize("name", ["asks", "asks_item", "asks_quietly", "masks"])
def test_a_function_that_reads_values_runs_on_real_tensors(run: Run, name: str) -> None:
    Path("code.py").write_text(CODE)
    line = ("remap", "a.safetensors", "-o", "b.safetensors", "--using", f"code.py:{name}")
    assert run(*line, "--materialize").status == 0
    namespace: dict[str, Any] = {}
    exec(CODE, namespace)
    assert same(load_file("b.safetensors"), namespace[name](decoder()))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("by_numpy", "computed outside of torch's operators, random or not filled @ more"),
        ("sparse", "not a dense tensor (sparse_coo) @ steps"),
    ],
)
def test_real_values_that_no_plan_computes_are_refused(run: Run, name: str, problem: str) -> None:
    Path("code.py").write_text(CODE)
    line = ("remap", "a.safetensors", "-o", "b.safetensors", "--using", f"code.py:{name}")
    done = run(*line, "--materialize")
    assert done.status == 1
    assert problem in done.err


def test_entries_without_dense_tensors_are_named(run: Run) -> None:
    Path("code.py").write_text(CODE)
    torch.save({"w": torch.ones(2), "s": torch.eye(3).to_sparse(), "_extra_state": 3}, "b.pt")
    done = run("remap", "b.pt", "-o", "c.pt", "--using", "code.py:twice")
    assert done.status == 1
    assert "not a dense tensor (sparse_coo) @ s" in done.err
    assert "not a tensor @ _extra_state" in done.err


@pytest.mark.parametrize("option", ["--model m.py:m", "--to serialized", "--like a.pt"])
def test_options_about_other_names_exclude_it(run: Run, option: str) -> None:
    done = run("remap", "a.pt", "-o", "b.pt", "--using", "code.py:twice", *option.split())
    assert done.status == 2
    assert f"--using excludes {option.split()[0]}" in done.err


def test_errors_in_python() -> None:
    with pytest.raises(Refused) as caught:
        ckpttool.remap("a.pt", using=lambda state: {"w": state["steps"]})
    assert caught.value.problems[0].problem == "no output reads it"
    with pytest.raises(CkptError, match="is not a function"):
        ckpttool.remap("a.pt", using=3)


@pytest.mark.parametrize("named", [True, False])
def test_state_never_stays_with_parameters_that_the_function_changes(named: bool) -> None:
    """By names the state is split as its parameter; ids have no place for the new parameters."""
    model = torch.nn.Linear(4, 6, bias=False)
    params = model.named_parameters() if named else model.parameters()
    optimizer = torch.optim.AdamW(params, lr=0.1)
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "ids.pt")

    def halves(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        first, second = state["weight"].chunk(2)
        return {"first": first, "second": second}

    with pytest.raises(ckpttool.Refused, match="the model gets other parameters"):
        ckpttool.remap("ids.pt", "refused.pt", using=halves)
    ckpttool.remap("ids.pt", "named.pt", using=halves, optimizer_keys="fqn")
    expected = optimizer.state_dict()["state"][0]["exp_avg"].chunk(2)
    state = torch.load("named.pt")["optimizer"]["state"]
    assert torch.equal(state["first"]["exp_avg"], expected[0])
    assert torch.equal(state["second"]["exp_avg"], expected[1])
