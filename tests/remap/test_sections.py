"""Several sections of one model are changed together, in any wrapper or form, unless --sections
selects some.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import hook_zoo
from command import Run, notes_in
from hook_zoo import ZOO
from zoo import randomized

torch.set_num_threads(1)
CODE = str(Path(hook_zoo.__file__))
HOOKED = ("strip_layer", "tied", "batch_norm", "fused_qkv")


def _two(name: str) -> tuple[nn.Module, nn.Module]:
    return randomized(ZOO[name](), 1), randomized(ZOO[name](), 2)


def _runtime(model: nn.Module) -> dict[str, torch.Tensor]:
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return {key: tensor.detach() for key, tensor in named}


def _equal(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


@pytest.mark.parametrize("name", HOOKED)
def test_both_sections_load_after_a_remap_with_a_model(name: str, tmp_path: Path, run: Run) -> None:
    """The weights are in one form, their average in another or under a wrapper; torch loads both
    afterwards.
    """
    model, average = _two(name)
    wrapped = {f"module.{key}": value for key, value in average.state_dict().items()}
    for word, ema in (
        ("same", average.state_dict()),
        ("runtime", _runtime(average)),
        ("ddp", wrapped),
        ("averaged", {"n_averaged": torch.tensor(3), **wrapped}),
    ):
        source, out = tmp_path / f"{word}.pt", tmp_path / f"{word}-out.pt"
        torch.save({"model": model.state_dict(), "ema": ema, "epoch": 3}, source)
        words = ("--model", f"{CODE}:{name}", "--to", "serialized", "--format", "json")
        done = run("remap", source, "-o", out, *words)
        assert done.status == 0, done.err
        assert done.data["sections"] == ["model", "ema"]
        found = torch.load(out)
        assert found["epoch"] == 3
        for section, expected in (("model", model), ("ema", average)):
            fresh = randomized(ZOO[name](), 3)
            fresh.load_state_dict(found[section], strict=True)
            assert _equal(fresh.state_dict(), expected.state_dict()), (word, section)


def test_rules_apply_to_an_average_but_not_to_another_model(tmp_path: Path, run: Run) -> None:
    weights = {"encoder.weight": torch.ones(3, 2), "head.weight": torch.ones(2, 3)}
    other = {"encoder.weight": torch.ones(5, 2), "head.weight": torch.ones(2, 5)}
    ema = {key: 2 * value for key, value in weights.items()}
    torch.save({"model": weights, "ema": ema, "critic": other, "lr": 0.1}, tmp_path / "a.pt")
    done = run(
        "remap", tmp_path / "a.pt", "-o", tmp_path / "b.pt", "--rule", "encoder.{x*} => body.{x*}"
    )
    assert done.status == 0
    assert "sections  model, ema" in done.out
    assert (
        "critic has 2 of the 2 names of model and stays as it is"
        " (`remap --sections model,ema,critic` takes it too)" in done.said[1]
    )
    found = torch.load(tmp_path / "b.pt")
    assert _equal(
        found["model"],
        {"body.weight": weights["encoder.weight"], "head.weight": weights["head.weight"]},
    )
    assert _equal(
        found["ema"], {"body.weight": ema["encoder.weight"], "head.weight": ema["head.weight"]}
    )
    assert _equal(found["critic"], other)
    assert found["lr"] == 0.1


def test_only_selected_sections_are_changed(tmp_path: Path, run: Run) -> None:
    states = ({"a.w": torch.ones(2)}, {"a.w": torch.zeros(2)}, {"b.w": torch.ones(2)})
    torch.save(dict(zip(("one", "two", "three"), states)), tmp_path / "a.pt")
    words = (
        "remap",
        tmp_path / "a.pt",
        "--force",
        "-o",
        tmp_path / "b.pt",
        "--rule",
        "{x*}.w => {x*}.v",
    )
    assert run(*words, "--sections", "two").status == 0
    assert [list(part) for part in torch.load(tmp_path / "b.pt").values()] == [
        ["a.w"],
        ["a.v"],
        ["b.w"],
    ]
    assert run(*words, "--sections", "two, three").status == 0
    assert [list(part) for part in torch.load(tmp_path / "b.pt").values()] == [
        ["a.w"],
        ["a.v"],
        ["b.v"],
    ]
    refused = run(*words, "--sections", "two,four")
    assert (refused.status, refused.err.count("'four'")) == (2, 1)
    assert "its state dicts are: one, two, three" in refused.err
    assert run(*words).status == 2  # three state dicts of different models


@pytest.mark.parametrize("from_file", [False, True])
def test_rules_apply_to_a_wrapped_average(tmp_path: Path, run: Run, from_file: bool) -> None:
    """Rules match the model's keys; the average's keys have an additional prefix, which is kept."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
    average = AveragedModel(model)
    average.update_parameters(model)
    names = {"0.weight": "a.weight", "0.bias": "a.bias", "1.weight": "1.weight", "1.bias": "1.bias"}
    rules = ["--rule", "0.{x} => a.{x}"]
    if from_file:
        (tmp_path / "r.toml").write_text('[[rule]]\nrename = "0.{x} => a.{x}"\n')
        rules = ["--rules", str(tmp_path / "r.toml")]
    ddp = {f"module.{key}": value for key, value in model.state_dict().items()}
    torch.save({"model": model.state_dict(), "ema": average.state_dict()}, tmp_path / "a.pt")
    assert run("remap", tmp_path / "a.pt", "-o", tmp_path / "b.pt", *rules).status == 0
    found = torch.load(tmp_path / "b.pt")
    assert list(found["model"]) == list(names.values())
    assert list(found["ema"]) == ["n_averaged", *(f"module.{name}" for name in names.values())]
    torch.save({"model": ddp, "ema": model.state_dict()}, tmp_path / "c.pt")
    unwrap = ("--rule", "module.{x*} => {x*}")
    assert run("remap", tmp_path / "c.pt", "-o", tmp_path / "d.pt", *unwrap).status == 0
    assert [list(part) for part in torch.load(tmp_path / "d.pt").values()] == [
        list(names),
        list(names),
    ]


WRAPPED = ("--to", "ddp")
LIKE = ("--like", "wrapped.pt")
SELECTED = ("--select", "enc")


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ((), "enc.{x*} => bb.{x*}"),
        (WRAPPED, "module.enc.{x*} => module.bb.{x*}"),
        (LIKE, "module.enc.{x*} => module.bb.{x*}"),
        (SELECTED, "0.{x} => first.{x}"),
    ],
)
@pytest.mark.parametrize("first_is_wrapped", [False, True])
def test_rules_for_several_sections_read_the_names_before_them(
    options: tuple[str, ...],
    rule: str,
    first_is_wrapped: bool,
    tmp_path: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both sections get the names that the first section gets, whatever wrappers they begin
    with.
    """
    monkeypatch.chdir(tmp_path)
    model = nn.Module()
    model.add_module("enc", nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3)))
    plain = model.state_dict()
    wrapped = {f"module.{key}": value for key, value in plain.items()}
    both = (wrapped, plain) if first_is_wrapped else (plain, wrapped)
    torch.save({"model": both[0], "ema": both[1]}, "a.pt")
    torch.save(wrapped, "wrapped.pt")
    if first_is_wrapped and not options:
        rule = "module.enc.{x*} => module.bb.{x*}"
    words = ("remap", "a.pt", *options, "--sections", "model,ema", "--rule", rule, "-o", "b.pt")
    done = run(*words)
    assert done.status == 0, done.err
    written = torch.load("b.pt")
    inner = {key.replace("enc.", "bb."): value for key, value in plain.items()}
    if options == SELECTED:
        inner = {
            key.removeprefix("enc.").replace("0.", "first."): value for key, value in plain.items()
        }
    below_module = {f"module.{key}": value for key, value in inner.items()}
    expected = {"model": inner, "ema": inner}
    if options in (WRAPPED, LIKE):
        expected = {"model": below_module, "ema": below_module}
    elif not options:
        expected["model" if first_is_wrapped else "ema"] = below_module
    torch.testing.assert_close(written, expected, rtol=0, atol=0)


def test_rule_that_matches_no_key_of_a_section_is_refused(tmp_path: Path, run: Run) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    wrapped = {
        key.replace("0.", "0._orig_mod."): value for key, value in model.state_dict().items()
    }
    torch.save({"model": model.state_dict(), "ema": wrapped}, tmp_path / "a.pt")
    words = ("remap", tmp_path / "a.pt", "-o", tmp_path / "b.pt", "--rule", "0.weight => w")
    refused = run(*words)
    assert refused.status == 1
    assert refused.err.startswith("error: ema: ")
    assert "--sections 'model' changes that one alone" in refused.err
    assert not (tmp_path / "b.pt").exists()
    assert run(*words, "--sections", "model").status == 0
    assert list(torch.load(tmp_path / "b.pt")["model"]) == ["w", "0.bias"]


def test_a_lightning_average_follows_its_model(tmp_path: Path, run: Run) -> None:
    """``current_model_state`` holds the weights and ``state_dict`` their average; optimizers stay
    correct.
    """
    net = nn.ModuleDict({"net": nn.Linear(2, 2)})
    optimizer = torch.optim.Adam(net.parameters())
    net["net"](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = {key: value.clone() for key, value in net.state_dict().items()}
    content = {
        "state_dict": state, "current_model_state": copy.deepcopy(state), "pytorch-lightning_version": "2.6.0",
        "optimizer_states": [optimizer.state_dict()], "averaging_state": {"n_averaged": torch.tensor(2)},
    }  # fmt: skip
    torch.save(content, tmp_path / "a.ckpt")
    assert (
        run("remap", tmp_path / "a.ckpt", "-o", tmp_path / "c.ckpt", "--to", "serialized").status
        == 0
    )
    found = torch.load(tmp_path / "c.ckpt")
    assert list(found["state_dict"]) == list(found["current_model_state"]) == ["weight", "bias"]
    fresh = torch.optim.Adam(net.parameters())
    fresh.load_state_dict(found["optimizer_states"][0])
    assert torch.equal(
        fresh.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"]
    )


def test_diff_reports_other_sections_with_the_same_model(tmp_path: Path, run: Run) -> None:
    model, average = _two("strip_layer")
    torch.save({"model": model.state_dict(), "ema": _runtime(average)}, tmp_path / "a.pt")
    done = run("diff", "--model", f"{CODE}:strip_layer", tmp_path / "a.pt", "--format", "json")
    assert done.status == 0
    (note,) = [
        note for note in notes_in(done.data) if note.startswith("ema holds the same model as model")
    ]
    printed = note.rpartition(": ")[2].split()
    answer = run(*printed[1:], "--format", "json")
    assert (answer.status, answer.data["left"]) == (0, f"{tmp_path / 'a.pt'}::ema")
