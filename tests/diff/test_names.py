"""Differences of keys that a model's names explain. The names are in a file, without the model's
code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpttool
from names_files import hook, names_file, operator, ref, runtime, serialized

State = dict[str, Any]
Difference = tuple[str, str, str, str]

IN_DDP = "left is wrapped in DistributedDataParallel or DataParallel or AveragedModel (`module`)"


@pytest.fixture
def names(tmp_path: Path) -> str:
    """Return a names file in which `w` is saved under two keys, `v` has two runtime names,
    `b.zin.w` is saved as `b.w`, `q` and `k` are saved as `qk`, and `mean` is saved inside an
    entry that is not a tensor.
    """
    first, second = (
        operator("getitem", operator("aten.chunk.default", ref("qk"), 2), part) for part in (0, 1)
    )
    fused = operator("aten.cat.default", [ref("q"), ref("k")])
    return names_file(
        tmp_path / "names.json",
        [
            *(runtime("w"), runtime("v"), runtime("v2", alias_of="v"), runtime("b.zin.w")),
            *(runtime("q"), runtime("k"), runtime("mean", kind="buffer")),
            runtime("seen", kind="buffer", persistent=False),
            *(runtime("lost"), runtime("lost2", alias_of="lost")),
        ],
        [
            *(serialized("w", ref("w")), serialized("twin", ref("w")), serialized("v", ref("v"))),
            serialized("b.w", ref("b.zin.w"), hook=hook("hide", 1)),
            serialized("qk", fused, size=4, hook=hook("fuse", 2)),
            serialized("version", None, hook=hook("add", 3)),
        ],
        {"w": ref("twin"), "b.zin.w": ref("b.w"), "q": first, "k": second},
        not_serialized=["seen", "lost", "lost2"],
        extra_state=["_extra_state"],
        roundtrip_problems=["saved, but not loaded again @ lost"],
    )


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def state(*keys: str, **changed: Any) -> State:
    """Return a value of the model's size for each key; `changed` are other entries."""
    values: State = {}
    for key in keys:
        is_extra = key.endswith("_extra_state")
        values[key] = 3 if is_extra else torch.ones(4 if key.endswith("qk") else 2)
    return {**values, **changed}


def differences(*sides: State, model: str | nn.Module, values: bool = False) -> list[Difference]:
    """Return status, keys and reason of each entry that is not the same, and check that each key
    of a checkpoint is in one entry.
    """
    diff = ckpttool.diff(*sides, model=model, values=values)
    if sides:
        assert sorted(key for entry in diff.entries for key in entry.left) == sorted(sides[0])
    return [
        (
            entry.status,
            " ".join(entry.left),
            " ".join(entry.right),
            ": ".join(filter(None, (entry.why(), entry.detail))),
        )
        for entry in diff.entries
        if entry.status != "same"
    ]


def test_keys_are_compared_with_runtime_names(names: str) -> None:
    diff = ckpttool.diff(model=names)
    assert [entry.left for entry in diff.entries if entry.status == "same"] == [("w",), ("v",)]
    assert differences(model=names) == [
        ("renamed", "b.w", "b.zin.w", "state_dict hook hides the segment `zin`: hide (net.py:1)"),
        ("transformed", "qk", "q k", "computed: cat: fuse (net.py:2)"),
        ("alias", "twin", "", "second name of a tensor that both sides have: same as w"),
        (
            "unexpected",
            "version",
            "",
            "added by a hook: no runtime tensor is its source: add (net.py:3)",
        ),
        ("extra_state", "_extra_state", "", "extra state"),
        ("alias", "", "v2", "second name of a tensor that both sides have: same as v"),
        ("missing", "", "mean", "saved inside an entry that is not a tensor"),
        ("not_serialized", "", "seen", "non-persistent buffer, which the model does not save"),
        (
            "not_serialized",
            "",
            "lost",
            "state_dict() leaves it out: saved, but not loaded again @ lost",
        ),
        ("not_serialized", "", "lost2", "state_dict() leaves it out"),
    ]


ALL_KEYS = ("w", "twin", "v", "b.w", "qk", "version", "_extra_state")
EXTRA = ("extra_state", "_extra_state", "_extra_state", "extra state")
CHECKPOINTS: dict[str, tuple[State, list[Difference]]] = {
    "what the model saves": (state(*ALL_KEYS), [EXTRA]),
    "runtime names": (
        state("w", "v2", "b.zin.w", "q", "k", "twin", "version", "_extra_state"),
        [
            EXTRA,
            (
                "renamed",
                "v2",
                "v",
                "left has the runtime name; the state_dict hook turns `v2` into `v`",
            ),
            (
                "renamed",
                "b.zin.w",
                "b.w",
                "left has the runtime name; the state_dict hook hides the segment `zin`: hide"
                " (net.py:1)",
            ),
            (
                "transformed",
                "q k",
                "qk",
                "left has the runtime tensors; computed: cat: fuse (net.py:2)",
            ),
        ],
    ),
    "a wrapper's names": (
        state(*(f"module.{key}" for key in ALL_KEYS)),
        [
            ("renamed", f"module.{key}", key, IN_DDP)
            for key in ("w", "twin", "v", "b.w", "qk", "version", "_extra_state")
        ],
    ),
    "runtime names, wrapped": (
        state("module.b.zin.w", "module.w", "twin", "v", "qk", "version", "_extra_state"),
        [
            EXTRA,
            ("renamed", "module.w", "w", IN_DDP),
            (
                "renamed",
                "module.b.zin.w",
                "b.w",
                "left has the runtime name; the state_dict hook hides the segment `zin`;"
                f" {IN_DDP}: hide (net.py:1)",
            ),
        ],
    ),
    "missing and unexpected keys": (
        state("w", "v", "b.w", "other", "seen", "version", "_flat_param"),
        [
            ("unexpected", "other", "", "not in right"),
            (
                "unexpected",
                "seen",
                "",
                "not in right; non-persistent buffer, which the model does not save",
            ),
            (
                "unexpected",
                "_flat_param",
                "",
                "FSDP1 flat parameter: all parameters of its module end to end, split over the"
                " files of all ranks",
            ),
            (
                "missing",
                "",
                "twin",
                "tied: saved under only one of its names, as save_pretrained does: same as w",
            ),
            ("missing", "", "qk", "missing from left"),
            ("missing", "", "_extra_state", "missing from left"),
        ],
    ),
    "other shapes, dtypes and kinds": (
        state(*ALL_KEYS, w=torch.ones(3), qk=3) | {"b.w": torch.ones(2).half()},
        [
            ("shape", "w", "w", "different shape: [3] instead of [2]"),
            ("dtype", "b.w", "b.w", "float16 instead of float32"),
            ("shape", "qk", "qk", "not a tensor, but the model expects one"),
            EXTRA,
        ],
    ),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_is_compared_with_the_keys_of_the_model(name: str, names: str) -> None:
    checkpoint, expected = CHECKPOINTS[name]
    assert differences(checkpoint, model=names) == expected
    identical = ckpttool.diff(checkpoint, model=names).identical
    assert identical == (name == "what the model saves")


class Tied(nn.Module):
    """Has one parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.w = self.twin = nn.Parameter(torch.ones(2))


def test_different_values_under_a_tied_name_are_reported_as_lost(tmp_path: Path) -> None:
    names = names_file(
        tmp_path / "names.json",
        [runtime("w"), runtime("twin", alias_of="w")],
        [serialized("w", ref("w")), serialized("twin", ref("w"))],
    )
    different = {"w": tensor(1, 2), "twin": tensor(1, 3)}
    model = Tied()
    model.load_state_dict(different)
    assert torch.equal(model.w, different["twin"])
    for operand in (names, Tied()):  # without the model's code, the last key is assumed to stay
        assert differences(different, model=operand) == [
            (
                "value",
                "w",
                "w",
                "tied, but the file has different values under another of its names: loading loses"
                " one: loading keeps twin",
            )
        ]
        assert not differences({"w": tensor(1, 2), "twin": tensor(1, 2)}, model=operand)


class ReadsOldKeys(nn.Module):
    """Reads `w` under its old name too, and removes a key that it does not need."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        self.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(_: nn.Module, state: State, prefix: str, *__: Any) -> None:
        if f"{prefix}old" in state:
            state[f"{prefix}w"] = state.pop(f"{prefix}old")
        state.pop(f"{prefix}removed", None)


def test_keys_that_load_hooks_accept_are_explained() -> None:
    model = ReadsOldKeys()
    renamed = ("renamed", "old", "w", "a load hook accepts the keys of left")
    assert differences(state("old", "removed", "v"), model=model) == [
        renamed,
        ("unexpected", "removed", "", "not in right; a load hook removes it without an error"),
    ]
    # the load fails
    assert differences(state("old", "bad", "removed", "v"), model=model) == [
        renamed,
        ("unexpected", "bad", "", "not in right"),
        ("unexpected", "removed", "", "not in right"),
    ]


def test_call_variants_of_an_unflattened_program_are_aliases(tmp_path: Path) -> None:
    """`f@1.w` is `f.w` if it has the same bytes or the model says that it is an alias."""
    model = [runtime("f.w"), runtime("f@1.w", alias_of="f.w"), runtime("g.w"), runtime("g@1.w")]
    keys = [serialized(one["fqn"], ref(one["alias_of"] or one["fqn"])) for one in model]
    both = names_file(tmp_path / "both.json", model, keys)
    plain = names_file(tmp_path / "plain.json", model[:1], keys[:1])
    assert differences({"f.w": tensor(1, 2), "g.w": tensor(1, 2)}, model=both) == [
        ("alias", "", "f@1.w", "call variant of a tensor that both sides have: same as f.w"),
        ("missing", "", "g@1.w", "missing from left"),
    ]
    variant = "call variant of a tensor that both sides have: same as f.w"
    for key, value, expected in (
        ("f@1.w", tensor(1, 2), ("alias", "f@1.w", "", variant)),
        ("f@1.w", tensor(1, 3), ("unexpected", "f@1.w", "", "not in right")),
        ("h@1.w", tensor(1, 2), ("unexpected", "h@1.w", "", "not in right")),
    ):
        assert differences({"f.w": tensor(1, 2), key: value}, model=plain) == [expected]
    unknown = {"x.w": tensor(1, 2), "x@1.w": tensor(1, 2)}
    assert [entry[:3] for entry in differences(unknown, model=plain)] == [
        ("unexpected", "x.w", ""),
        ("unexpected", "x@1.w", ""),
        ("missing", "", "f.w"),
    ]


def test_names_without_hooks_or_shapes_are_compared(tmp_path: Path) -> None:
    tensors = [runtime("a"), runtime("b")]
    keys = [serialized("c", ref("a")), serialized("b", ref("b"))]
    names = names_file(tmp_path / "names.json", tensors, keys)
    assert differences(model=names) == [("renamed", "c", "a", "saving turns `a` into `c`")]
    loose = [{**key, "shape": None} for key in keys]
    names = names_file(tmp_path / "loose.json", tensors, loose)
    assert ckpttool.diff({"c": tensor(1, 2), "b": tensor(1, 2, 3)}, model=names).identical


def test_two_checkpoints_are_compared_through_the_names(names: str) -> None:
    saved = {
        "w": tensor(1, 2),
        "b.w": tensor(3, 4),
        "qk": tensor(5, 6, 7, 8),
        "version": tensor(9, 9),
    }
    in_memory = {
        "w": tensor(1, 2),
        "b.zin.w": tensor(3, 4),
        "q": tensor(5, 6),
        "k": tensor(7, 8),
        "version": tensor(9, 9),
    }
    hides = "state_dict hook hides the segment `zin`: hide (net.py:1)"
    computed = "computed by a state_dict hook"
    assert differences(saved, in_memory, model=names, values=True) == [
        ("renamed", "b.w", "b.zin.w", hides),
        ("transformed", "qk", "q k", computed),
    ]
    assert differences(in_memory, saved, model=names, values=True) == [
        ("renamed", "b.zin.w", "b.w", hides),
        ("transformed", "q k", "qk", computed),
    ]
    assert not differences(saved, saved, model=names, values=True)
    changed = saved | {"w": tensor(1, 3), "qk": tensor(5, 6, 7, 9)}
    entries = differences(saved, changed, model=names, values=True)
    assert [entry[:3] for entry in entries] == [("value", "w", "w"), ("value", "qk", "qk")]
    without = {key: value for key, value in saved.items() if key != "qk"}
    assert differences({**saved, "x": tensor(1, 1)}, without, model=names, values=True) == [
        ("unexpected", "qk", "", "not in right"),
        ("unexpected", "x", "", "not in right"),
    ]
