"""Tied weights: one tensor with several names, in models and in files that have all of the names or
only one.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
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


UNTIED = """
from torch import nn
class Net(nn.Module):
    def __init__(self, embed="embed", block="block", head="head", tied=False):
        super().__init__()
        self.add_module(embed, nn.Embedding(10, 4))
        self.add_module(block, nn.Linear(4, 4))
        self.norm = nn.LayerNorm(4)
        self.add_module(head, nn.Linear(4, 10, bias=False))
        if tied:
            getattr(self, head).weight = getattr(self, embed).weight
"""


def net(*arguments: Any) -> torch.nn.Module:
    names: dict[str, Any] = {}
    exec(UNTIED, names)
    model: torch.nn.Module = names["Net"](*arguments)
    return model


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(UNTIED)
    return tmp_path


@pytest.mark.parametrize(
    "names", [("tokens", "block", "head"), ("embed", "layer", "out"), ("tokens", "layer", "head")]
)
def test_a_second_name_is_renamed_for_a_model_that_does_not_tie_it(
    names: tuple[str, str, str], nets: Path, run: Run
) -> None:
    """The other name of the tensor is in the model under the same name."""
    torch.manual_seed(0)
    state = net("embed", "block", "head", True).state_dict()
    torch.save(state, "tied.pt")
    untied = net(*names)
    torch.save(untied.state_dict(), "untied.pt")
    embed, block, head = names
    model = f"nets.py:Net(embed='{embed}', block='{block}', head='{head}')"
    for words in (("--model", model), ("untied.pt",)):
        status, diff = answer(run, "diff", "tied.pt", *words)
        assert status == 1
        paste(fixes_in(diff)[-1])
        untied.load_state_dict(torch.load("tied.renamed.pt"))
        for old, new in zip(("embed", "block", "head"), names):
            assert torch.equal(untied.state_dict()[f"{new}.weight"], state[f"{old}.weight"])
        Path("tied.renamed.pt").unlink()


def test_no_second_name_is_renamed_if_nothing_is_missing(nets: Path, run: Run) -> None:
    torch.save(net("embed", "block", "head", True).state_dict(), "tied.pt")
    state = net("embed", "layer", "head").state_dict()
    del state["head.weight"]
    torch.save(state, "one.pt")
    _, diff = answer(run, "diff", "tied.pt", "one.pt")
    paste(fixes_in(diff)[-1])
    assert list(torch.load("tied.renamed.pt")) == list(state)


def test_second_names_that_the_metadata_records_are_restored(nets: Path, run: Run) -> None:
    """`save_model` of safetensors writes one name of a tensor, and records the others."""
    tied = net("embed", "block", "head", True)
    save_model(tied, "one.safetensors")
    untied = net("embed", "block", "head")
    model = ("--model", "nets.py:Net")
    status, diff = answer(run, "diff", "one.safetensors", *model)
    assert status == 1
    paste(fixes_in(diff)[0])
    done = run("fix", "one.safetensors", *model, "-o", "fixed.pt")
    assert "1 second name added" in done.out.splitlines()[0]
    for file in ("one.converted.pt", "fixed.pt"):
        untied.load_state_dict(torch.load(file))
        assert torch.equal(untied.state_dict()["head.weight"], tied.state_dict()["embed.weight"])
        assert answer(run, "diff", file, *model)[0] == 0
    done = run("fix", "one.safetensors", *model, "-o", "fixed.safetensors")
    assert done.status == 1
    assert "no place for two names" in done.err
    assert run("fix", "one.safetensors", *model, "--in-place").status == 1


def test_a_second_name_that_is_missing_after_a_rename_is_not_called_lost(
    nets: Path, run: Run
) -> None:
    save_model(net("embed", "block", "head", True), "one.safetensors")
    model = "nets.py:Net(block='layer', tied=True)"
    status, diff = answer(run, "diff", "one.safetensors", "--model", model)
    assert status == 1
    assert diff["unfixed"] == [{"code": "tied", "keys": ["head.weight"]}]
    paste(fixes_in(diff)[0])
    words = ("remap", "one.renamed.safetensors", "--model", model, "--to", "serialized")
    assert run(*words, "-o", "all.pt").status == 0
    net("embed", "layer", "head", True).load_state_dict(torch.load("all.pt"))
