"""Two checkpoints of one model with different wrappers: matching keys, and the command that renames
them.
"""

from __future__ import annotations

import json
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

import ckpttool
from command import fixes_in, main, notes_in
from wrapped_ranks import Net, net, wrap

PLAIN = list(Net().state_dict())
CYCLE = (
    "plain",
    "compile",
    "dp",
    "dp(compile)",
    "block: compile",
    "compile, block: compile",
    "plain",
)


def save(form: str, path: Path) -> str:
    torch.save(wrap(form, net(0)).state_dict(), path)
    return str(path)


def aligned(left: list[str], right: list[str]) -> dict[str, str]:
    """Return the pairs of keys that `diff` takes for the same tensor, up to wrappers."""
    states = [{key: torch.ones(1) for key in keys} for keys in (left, right)]
    pairs: dict[str, str] = {}
    for entry in ckpttool.diff(*states).entries:
        if entry.status in ("same", "renamed"):
            pairs |= zip(entry.left, entry.right)
    return pairs


def test_equal_and_wrapped_keys_are_aligned() -> None:
    left, right = ["module.a.w", "module.b._orig_mod.w"], ["a._checkpoint_wrapped_module.w", "b.w"]
    assert aligned(left, right) == dict(zip(left, right))
    assert aligned(left, left) == dict(zip(left, left))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (["module.a.w", "_orig_mod.a.w"], ["a.w"]),  # both would be `a.w`
        (["module.w", "head.w"], ["v", "head.w"]),
        (["a.layer.w"], ["a.w"]),  # not a wrapper segment
    ],
)
def test_ambiguous_keys_are_not_paired(left: list[str], right: list[str]) -> None:
    assert aligned(left, right) == {key: key for key in left if key in right}


def test_a_common_prefix_is_removed() -> None:
    assert aligned([f"net.{key}" for key in PLAIN], PLAIN) == {f"net.{key}": key for key in PLAIN}
    assert aligned(PLAIN, [f"net.{key}" for key in PLAIN]) == {key: f"net.{key}" for key in PLAIN}


@pytest.mark.parametrize(
    ("left", "right"), [("dp", "dp"), *pairwise(CYCLE), *pairwise(CYCLE[::-1])]
)
def test_the_command_that_diff_suggests_can_be_pasted(
    left: str, right: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = save(left, tmp_path / "left.pt"), save(right, tmp_path / "right.pt")
    status = main(["diff", *paths, "--format", "json"])
    result = json.loads(capsys.readouterr().out)
    if left == right:
        assert (status, fixes_in(result)) == (0, [])
        return
    assert (status, result["summary"].keys() - {"same"}) == (1, {"renamed"})
    (command,) = fixes_in(result)
    assert "MODEL" not in command
    assert main(shlex.split(command)[1:]) == 0
    wrap(right, net(1)).load_state_dict(torch.load(tmp_path / "left.renamed.pt"))


@pytest.mark.parametrize("form", ["compile", "dp", "block: compile"])
def test_pytorch_101107_113422_a_checkpoint_of_a_compiled_model_is_explained(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch: Missing key(s) in state_dict: "embed.weight" ... Unexpected key(s):
    "_orig_mod.embed.weight".
    """
    ckpt, out = save(form, tmp_path / "train.pt"), tmp_path / "out.pt"
    with pytest.raises(RuntimeError, match="Unexpected key"):
        Net().load_state_dict(torch.load(ckpt))
    assert main(["diff", ckpt, save("plain", tmp_path / "plain.pt")]) == 1
    output = capsys.readouterr().out
    title = (
        "DistributedDataParallel or DataParallel"
        if form == "dp"
        else ("torch.compile (`_orig_mod`)")
    )
    assert f"{ckpt} is wrapped in {title}" in output
    assert main(["remap", ckpt, "--to", "serialized", "-o", str(out)]) == 0
    Net().load_state_dict(torch.load(out))


def test_like_reports_keys_without_a_counterpart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    averaged, plain = save("averaged", tmp_path / "ema.pt"), save("compile", tmp_path / "plain.pt")
    assert (
        main(
            ["remap", averaged, "--like", plain, "-o", str(tmp_path / "out.pt"), "--format", "json"]
        )
        == 0
    )
    result = json.loads(capsys.readouterr().out)
    assert result["from"] == "averaged"
    assert notes_in(result) == ["the other checkpoint has no name for 1 key: n_averaged"]
    assert list(torch.load(tmp_path / "out.pt")) == [
        "n_averaged",
        *(f"_orig_mod.{key}" for key in PLAIN),
    ]


def test_a_peft_wrapper_is_given_as_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import LoraConfig, get_peft_model

    torch.save(
        get_peft_model(
            nn.Sequential(nn.Linear(2, 2)), LoraConfig(target_modules=["0"])
        ).state_dict(),
        tmp_path / "a.pt",
    )
    torch.save(nn.Sequential(nn.Linear(2, 2)).state_dict(), tmp_path / "b.pt")
    assert main(["diff", str(tmp_path / "a.pt"), str(tmp_path / "b.pt"), "--format", "json"]) == 1
    entries = json.loads(capsys.readouterr().out)["entries"]
    reasons = {entry["reason"] for entry in entries if entry["status"] == "renamed"}
    assert reasons == {
        "left is wrapped in PEFT (`base_model.model`) and a PEFT adapter (`base_layer`)"
    }
    assert [entry["left"] for entry in entries if entry["status"] == "unexpected"] == [
        ["base_model.model.0.lora_A.default.weight"],
        ["base_model.model.0.lora_B.default.weight"],
    ]
