"""Tied weights: one tensor with several names, in models and in files that have all of the names or
only one.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing._internal.two_tensor import TwoTensor

import hook_zoo
import real_models
from command import Run, fixes_in, main
from places import SUPPORT

TIED = ["tied_llama", "t5", "bert"]


def answer(run: Run, *args: object) -> tuple[int, Any]:
    done = run(*args, "--format", "json")
    return done.status, done.data


def paste(command: str) -> None:
    assert main(shlex.split(command)[1:]) == 0, command


def test_a_tied_name_on_one_side_only_is_a_difference(tmp_path: Path, run: Run) -> None:
    """A model that strictly loads one of the files refuses the other."""
    state = hook_zoo.tied().state_dict()
    torch.save(state, tmp_path / "all.pt")
    torch.save({"embed.weight": state["embed.weight"]}, tmp_path / "one.pt")
    for left, right in (("all", "one"), ("one", "all")):
        status, diff = answer(run, "diff", tmp_path / f"{left}.pt", tmp_path / f"{right}.pt")
        assert (status, diff["identical"]) == (1, False)
        assert diff["summary"] == {"same": 1, "alias": 1}
        shown = run("diff", tmp_path / f"{left}.pt", tmp_path / f"{right}.pt")
        assert (shown.status, shown.out.splitlines()[0].partition(": ")[2]) == (1, "1 second name")
        paste(fixes_in(diff)[0].replace("MODEL", f"{SUPPORT}/hook_zoo.py:tied"))
        fixed = tmp_path / ("all.without.pt" if left == "all" else "one.serialized.pt")
        assert answer(run, "diff", fixed, tmp_path / f"{right}.pt")[0] == 0


@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
@pytest.mark.parametrize("name", TIED)
def test_missing_tied_names_are_explained_and_restored(
    name: str, ending: str, tmp_path: Path, run: Run
) -> None:
    """`save_pretrained` keeps one name; the diff explains the missing names, and its command
    restores them.
    """
    model, operand = real_models.build(name, seed=1), f"{SUPPORT}/real_models.py:{name}"
    model.save_pretrained(tmp_path / "saved")
    state = load_file(tmp_path / "saved" / "model.safetensors")
    path = tmp_path / f"kept{ending}"
    (torch.save if ending == ".pt" else save_file)(state, path)
    status, diff = answer(run, "diff", "--model", operand, path)
    assert status == 1
    missing = [entry for entry in diff["entries"] if entry["status"] == "missing"]
    assert {entry["right"][0] for entry in missing} == set(model.state_dict()) - set(state)
    assert all("tied" in entry["reason"] and entry["detail"] for entry in missing)
    paste(fixes_in(diff)[0])
    fixed = tmp_path / "kept.serialized.pt"
    assert answer(run, "diff", "--model", operand, fixed)[0] == 0
    target = real_models.build(name, seed=2)
    target.load_state_dict(torch.load(fixed), strict=True)
    assert all(
        torch.equal(value, model.state_dict()[key]) for key, value in target.state_dict().items()
    )
    # one more name, not one more tensor
    assert fixed.stat().st_size < 1.3 * path.stat().st_size + 20_000


def test_safetensors_refuses_tied_names_and_names_two_alternatives(
    tmp_path: Path, run: Run
) -> None:
    """The format cannot store them; both alternatives in the message work."""
    operand = f"{SUPPORT}/hook_zoo.py:tied"
    save_file({"embed.weight": torch.ones(5, 3)}, tmp_path / "one.safetensors")
    arguments = (
        "remap",
        tmp_path / "one.safetensors",
        "--model",
        operand,
        "--to",
        "serialized",
        "-o",
    )
    refused = run(*arguments, tmp_path / "out.safetensors")
    assert (refused.status, "--keep-aliases" in refused.err) == (1, True)
    assert run(*arguments, tmp_path / "kept.safetensors", "--keep-aliases").status == 0
    assert run(*arguments, tmp_path / "out.pt").status == 0
    hook_zoo.tied().load_state_dict(torch.load(tmp_path / "out.pt"), strict=True)


def test_different_values_under_tied_names_are_reported(tmp_path: Path, run: Run) -> None:
    """torch loads the file and loses the values of one name, so the status is 1."""
    torch.save(
        {"embed.weight": torch.ones(5, 3), "head.weight": torch.zeros(5, 3)}, tmp_path / "two.pt"
    )
    status, diff = answer(
        run, "diff", "--model", f"{SUPPORT}/hook_zoo.py:tied", tmp_path / "two.pt"
    )
    assert (status, diff["identical"]) == (1, False)
    (lost,) = [entry for entry in diff["entries"] if entry["status"] == "value"]
    assert "tied" in lost["reason"]
    assert lost["left"] == ["embed.weight"]  # the tensor that is copied last is kept
    model = hook_zoo.tied()
    model.load_state_dict(torch.load(tmp_path / "two.pt"), strict=True)
    assert torch.equal(model["embed"].weight, torch.zeros(5, 3))


@pytest.mark.parametrize("other", ["embed.weight", "head.weight"])
def test_a_tied_name_with_another_shape_is_a_shape_difference(
    tmp_path: Path, run: Run, other: str
) -> None:
    """Lost values are not reported, because torch refuses the file."""
    state = {**hook_zoo.tied().state_dict(), other: torch.ones(4, 3)}
    with pytest.raises(RuntimeError, match=f"size mismatch for {other}"):
        hook_zoo.tied().load_state_dict(state)
    torch.save(state, tmp_path / "two.pt")
    status, diff = answer(
        run, "diff", "--model", f"{SUPPORT}/hook_zoo.py:tied", tmp_path / "two.pt"
    )
    assert status == 1
    assert {entry["status"] for entry in diff["entries"] if entry["left"] == [other]} == {"shape"}


def test_equal_copies_under_tied_names_are_the_same(tmp_path: Path, run: Run) -> None:
    torch.save(
        {"embed.weight": torch.ones(5, 3), "head.weight": torch.ones(5, 3)}, tmp_path / "two.pt"
    )
    assert (
        answer(run, "diff", "--model", f"{SUPPORT}/hook_zoo.py:tied", tmp_path / "two.pt")[0] == 0
    )


VARIANT = """
import torch
class Net(torch.nn.Module):
    def __init__(self, *names):
        super().__init__()
        for name in names:
            self.add_module(name, torch.nn.Linear(2, 2))
def both():
    return Net("enc", "enc@1")
def other():
    return Net("enc@1")
"""


@pytest.mark.parametrize("model", ["both", "other"])
def test_a_module_named_like_a_call_variant_is_not_an_alias(
    tmp_path: Path, run: Run, model: str
) -> None:
    """A key that torch does not load is missing, even if it looks like a call variant."""
    (tmp_path / "net.py").write_text(VARIANT)
    state = torch.nn.ModuleDict({"enc": torch.nn.Linear(2, 2)}).state_dict()
    torch.save(state, tmp_path / "w.pt")
    assert main(["trace", f"{tmp_path}/net.py:{model}", "-o", f"{tmp_path}/names.json"]) == 0
    for operand in (f"{tmp_path}/net.py:{model}", tmp_path / "names.json"):
        status, diff = answer(run, "diff", tmp_path / "w.pt", "--model", operand)
        result = {key: entry["status"] for entry in diff["entries"] for key in entry["right"]}
        assert status == 1
        assert {result["enc@1.weight"], result["enc@1.bias"]} == {"missing"}, operand


def test_equal_values_at_the_other_path_of_a_module_are_not_lost(tmp_path: Path, run: Run) -> None:
    """The parts that a hook joins have the same storage at both paths; only the kind of one
    differs.
    """
    state = hook_zoo.fused_twice().state_dict()
    state["0.q.weight"] = TwoTensor(state["0.q.weight"], state["0.q.weight"])
    torch.save(state, tmp_path / "state.pt")
    model = hook_zoo.fused_twice()
    model.load_state_dict(state)
    for key in ("2.k.weight", "2.v.weight"):
        assert torch.equal(model.state_dict()[key], state[key])
    status, diff = answer(
        run, "diff", "--model", f"{SUPPORT}/hook_zoo.py:fused_twice", tmp_path / "state.pt"
    )
    changed = [
        (entry["left"], entry["code"]) for entry in diff["entries"] if entry["status"] == "value"
    ]
    assert (status, changed) == (1, [(["2.q.weight"], "tied-value")])


TIED_UNDER = """
from torch import nn
def build(name):
    model = nn.Module()
    setattr(model, name, nn.ModuleDict({"wte": nn.Embedding(6, 4), "h": nn.Linear(4, 4)}))
    model.lm_head = nn.Linear(4, 6, bias=False)
    model.lm_head.weight = getattr(model, name)["wte"].weight
    return model
def old():
    return build("model")
def new():
    return build("transformer")
"""


@pytest.fixture
def tied_under_other_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """One of the two names of a weight is the same in both models."""
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(TIED_UNDER)
    code: dict[str, Any] = {}
    exec(TIED_UNDER, code)
    torch.manual_seed(0)
    for name in ("old", "new"):
        torch.save(code[name]().state_dict(), f"{name}.pt")
    return code


@pytest.mark.parametrize("right", [["--model", "net.py:new"], ["new.pt"]])
def test_a_renamed_second_name_is_renamed_with_its_module(
    tied_under_other_names: dict[str, Any], right: list[str], run: Run
) -> None:
    status, diff = answer(run, "diff", "old.pt", *right)
    assert status == 1
    first_line = run("diff", "old.pt", *right).out.splitlines()[0]
    assert "3 keys" in first_line or first_line.endswith("differ: 3 likely renames")
    assert [fix["complete"] for fix in diff["fix"]] == [True]
    paste(fixes_in(diff)[0])
    model = tied_under_other_names["new"]()
    state = torch.load("old.pt")
    model.load_state_dict(torch.load("old.renamed.pt"))
    for key in state:
        assert torch.equal(model.state_dict()[key.replace("model.", "transformer.")], state[key])


def test_no_load_hook_is_blamed_for_a_second_name(
    tied_under_other_names: dict[str, Any], run: Run
) -> None:
    """torch lists both names, and no code takes one for the other."""
    with pytest.raises(RuntimeError) as refused:
        tied_under_other_names["new"]().load_state_dict(torch.load("old.pt"))
    data = run("diff", "old.pt", "--model", "net.py:new", "--format", "json").data
    names = {(entry["status"], *entry["left"], *entry["right"]) for entry in data["entries"]}
    for entry in (("unexpected", "model.wte.weight"), ("missing", "transformer.wte.weight")):
        assert entry in names
        assert entry[1] in str(refused.value)


def test_two_names_of_one_tensor_are_one_candidate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    table = torch.arange(24.0).reshape(6, 4)
    torch.save({"x.weight": table, "y.weight": table, "z.bias": torch.ones(3)}, "two.pt")
    torch.save({"q.weight": table, "z.bias": torch.ones(3)}, "one.pt")
    for left, right in (("two.pt", "one.pt"), ("one.pt", "two.pt")):
        assert "Ambiguous" not in run("diff", left, right).out
    paste(fixes_in(answer(run, "diff", "two.pt", "one.pt")[1])[0])
    assert answer(run, "diff", "two.renamed.pt", "one.pt", "--values")[0] == 0
