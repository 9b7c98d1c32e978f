"""The commands as functions: operands are paths or objects, and no argument is silently ignored."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import ckpttool
from ckpttool import CkptError, plugin

STATE = {"weight": torch.ones(1, 1)}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda path: ckpttool.inspect(cast(Any, 3)), "an int is not a checkpoint"),
        (lambda path: ckpttool.remap(cast(Any, {1, 2})), "a set is not a checkpoint"),
        (lambda path: ckpttool.trace(3), "an int is not a model"),
        (
            lambda path: cast(Any, ckpttool.swap_weights)(
                nn.Linear(1, 1, bias=False), STATE, str(path)
            ),
            "a Linear is in memory: the swap writes no out.pt",
        ),
    ],
)
def test_wrong_arguments_are_refused(call: Callable[[Any], object], message: str) -> None:
    with pytest.raises(CkptError) as raised:
        call(Path("out.pt"))
    assert raised.value.message == message
    assert not Path("out.pt").exists()


def test_a_path_may_be_a_pathlib_path(tmp_path: Path) -> None:
    """This holds for every operand and option that is a path, in every function."""
    left, right, rules = (tmp_path / name for name in ("left.pt", "right.pt", "rules.toml"))
    out, names = (tmp_path / name for name in ("out.pt", "names.json"))
    torch.save({"a.weight": torch.ones(1, 1)}, left)
    torch.save(STATE, right)
    rules.write_text('[[rule]]\nrename = "a.{x*} => {x*}"\n')
    names.write_text(json.dumps(ckpttool.trace(nn.Linear(1, 1, bias=False)).to_json()))
    calls: tuple[Callable[[], Any], ...] = (
        lambda: ckpttool.open_checkpoint(left).source == str(left),
        lambda: ckpttool.inspect(left).checkpoint.source == str(left),
        lambda: not ckpttool.diff(left, right).identical,
        lambda: ckpttool.diff(right, model=names).identical,
        lambda: ckpttool.explain("weight", names).name == "weight",
        lambda: ckpttool.remap(left, cast(Any, out), rules=cast(Any, rules)).dropped == [],
        lambda: ckpttool.diff(out, right, values=True).identical,
        lambda: (
            ckpttool.write(ckpttool.open_checkpoint(left), cast(Any, tmp_path / "copy.pt")) is None
        ),
        lambda: ckpttool.remap(left, in_place=True, rules=cast(Any, rules)).output == str(left),
        lambda: ckpttool.undo(cast(Any, left)).path == str(left),
        lambda: ckpttool.check(cast(Any, [left, rules])).ok,
    )
    for number, call in enumerate(calls):
        assert call(), number


def test_a_call_may_overwrite_a_file_of_an_earlier_call_but_not_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that earlier calls of the process have read are not sources of this call."""
    monkeypatch.chdir(tmp_path)
    for name, value in (("a.pt", 1.0), ("b.pt", 2.0)):
        torch.save({"weight": torch.full((1, 1), value)}, name)
    ckpttool.inspect("a.pt", stats=True)
    opened = ckpttool.open_checkpoint("a.pt")
    cases: tuple[tuple[Any, str, dict[str, Any]], ...] = (
        ("a.pt", "a.pt", {}),
        (opened, "a.pt", {}),
        ("b.pt", "a.pt", {"like": "a.pt"}),
    )
    for ckpt, out, options in cases:
        before = Path(out).read_bytes()
        with pytest.raises(CkptError, match="the source itself"):
            ckpttool.remap(ckpt, out, force=True, **options)
        assert Path(out).read_bytes() == before
    ckpttool.remap("b.pt", "a.pt", to="serialized", force=True)
    assert torch.load("a.pt")["weight"].item() == 2
    with pytest.raises(CkptError, match="no longer the file that was opened"):
        ckpttool.write(opened, "c.pt")
    assert not Path("c.pt").exists()


@pytest.mark.parametrize("url", ["{tmp}/w.safetensors", "memory://api/w.safetensors"])
def test_an_index_of_a_replaced_file_is_not_read(tmp_path: Path, url: str) -> None:
    """The new file has the same size and is opened too, so reading it would return wrong bytes."""
    path, out = url.format(tmp=tmp_path), str(tmp_path / "out.pt")
    ckpttool.remap({"a": torch.zeros(4), "b": torch.ones(4)}, path)
    opened = ckpttool.open_checkpoint(path)
    remapped = ckpttool.remap(opened, rule=["a => c"]).result
    ckpttool.write(opened, out)
    ckpttool.remap({"b": torch.zeros(4), "c": torch.ones(4)}, path, force=True)
    ckpttool.inspect(path, stats=True)
    for old in (opened, remapped):
        with pytest.raises(CkptError, match="no longer the file that was opened"):
            ckpttool.write(old, out, force=True)
        with pytest.raises(CkptError, match="no longer the file that was opened"):
            ckpttool.diff(old, out, values=True)
    assert torch.load(out)["b"].tolist() == [1] * 4
    assert ckpttool.diff(ckpttool.open_checkpoint(path), path, values=True).identical


def test_a_repeatable_option_accepts_a_single_string(tmp_path: Path) -> None:
    state: dict[str, Any] = {"model": {"a.w": torch.ones(2), "b": torch.ones(1)}, "epoch": 3}
    torch.save(state, tmp_path / "a.pt")
    (tmp_path / "size.toml").write_text(
        '[[rule]]\nreshape = "b"\nshape = ["{n}"]\nfrom_shape = [1]\n'
    )
    path = str(tmp_path / "a.pt")
    for option, value in (("rule", "a.w => c"), ("drop", "epoch")):
        option_forms: list[dict[str, Any]] = [{option: value}, {option: [value]}]
        single, listed = (ckpttool.remap(path, **options) for options in option_forms)
        assert single.plan == listed.plan
        assert single.counts["renamed"] or single.dropped == ["epoch"]
    resized = ckpttool.remap({"b": torch.ones(1)}, rules=f"{tmp_path}/size.toml(n=1)")
    assert resized.result.sections[0].tensors[0].shape == (1,)
    reshaped = {"a.w": torch.ones(2), "b": torch.ones(2)}
    result = ckpttool.diff(state["model"], reshaped, ignore="shape b # two elements are expected")
    assert result.accepted
    assert [file.path for file in ckpttool.check(path, allow="os.*").files] == [path]


def test_whole_does_not_remove_the_fix(tmp_path: Path) -> None:
    """`whole` also compares other entries, while a fix changes only the models."""
    torch.save({"old.weight": torch.ones(2, 3)}, tmp_path / "old.pt")
    torch.save({"new.weight": torch.ones(2, 3)}, tmp_path / "new.pt")
    for whole in (False, True):
        assert ckpttool.diff(str(tmp_path / "old.pt"), str(tmp_path / "new.pt"), whole=whole).fix, (
            whole
        )


def test_an_uninstalled_copy_has_an_unknown_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", not_installed)
    monkeypatch.setattr(ckpttool, "__file__", str(Path("nowhere/__init__.py")))
    assert ckpttool.__getattr__("__version__") == "0+unknown"


def test_an_unknown_dtype_is_an_error() -> None:
    """A package that adds a format may know more dtypes."""
    data = plugin.Storage(plugin.Span("a.pt", 0, 4))
    tensor = plugin.TensorEntry("w", "float3", (1,), (1,), 0, data)
    checkpoint = plugin.Checkpoint(
        "a.pt", "torch_zip", 4, (plugin.Section("", "state_dict", (tensor,)),)
    )
    with pytest.raises(CkptError, match="unknown dtype 'float3'") as raised:
        ckpttool.inspect(checkpoint).to_json()
    assert "pip install -U ckpttool" in raised.value.hint
