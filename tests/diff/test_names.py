"""Differences of keys that a model's names explain: hand-made names and checkpoints, without the
model's code.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from ckpttool import Names, Problem
from ckpttool.core.checkpoint import ExtraEntry, Lazy, Section, Storage, TensorEntry
from ckpttool.core.expression import Expression, Op, Ref
from ckpttool.core.names import Hook, LoadedTensor, RuntimeTensor, SerializedKey
from ckpttool.diffing.causes import Code
from ckpttool.diffing.loading import compare_load, loads
from ckpttool.diffing.names import compare_names
from ckpttool.diffing.one_model import compare_through
from ckpttool.diffing.result import Entry
from ckpttool.evaluate.compare import difference
from ckpttool.tracing.loading import Verdict

HIDE, FUSE, ADD = (
    Hook(name, "net.py", line, "") for line, name in enumerate(("hide", "fuse", "add"), 1)
)
FUSED = Op("aten.cat.default", ((Ref("q"), Ref("k")),))
HALVES: list[Expression] = [
    Op("getitem", (Op("aten.chunk.default", (Ref("qk"), 2)), at)) for at in range(2)
]


def runtime(
    fqn: str, kind: str = "parameter", persistent: bool = True, alias_of: str | None = None
) -> RuntimeTensor:
    return RuntimeTensor(fqn, fqn, kind, persistent, kind == "parameter", "float32", (2,), alias_of)


def saved(
    key: str, source: Expression | None, hook: Hook | None = None, size: int = 2
) -> SerializedKey:
    return SerializedKey(key, "float32", (size,), source, hook)


# `w` is saved under two keys, `v` has two runtime names, `b.zin.w` is saved as `b.w`, `q` and `k`
# are saved as `qk`, and `mean` is saved inside an entry that is not a tensor.
IN_DDP = "left is wrapped in DistributedDataParallel or DataParallel or AveragedModel (`module`)"
NAMES = Names(
    "net.py:Net",
    "2.6",
    (
        *(
            runtime("w"),
            runtime("v"),
            runtime("v2", alias_of="v"),
            runtime("b.zin.w"),
            runtime("q"),
            runtime("k"),
        ),
        *(runtime("mean", "buffer"), runtime("seen", "buffer", persistent=False), runtime("lost")),
        runtime("lost2", alias_of="lost"),
    ),
    (
        *(
            saved("w", Ref("w")),
            saved("twin", Ref("w")),
            saved("v", Ref("v")),
            saved("b.w", Ref("b.zin.w"), HIDE),
        ),
        *(saved("qk", FUSED, FUSE, 4), saved("version", None, ADD)),
    ),
    tuple(
        LoadedTensor(fqn, source)
        for fqn, source in {
            "w": Ref("twin"),
            "b.zin.w": Ref("b.w"),
            **dict(zip("qk", HALVES)),
        }.items()
    ),
    ("seen", "lost", "lost2"),
    ("_extra_state",),
    roundtrip_problems=(Problem("saved, but not loaded again", "lost"),),
)


def tensor(key: str, *values: int, dtype: str = "uint8") -> TensorEntry:
    return TensorEntry(
        key, dtype, (len(values),), (1,), 0, Storage(Lazy(len(values), lambda: [bytes(values)]))
    )


def section(*entries: TensorEntry | ExtraEntry | str) -> Section:
    """Return a section; a string becomes a tensor with the model's size and dtype."""
    filled = [
        TensorEntry(e, "float32", (4 if e.endswith("qk") else 2,), (1,), 0, None)
        if isinstance(e, str)
        else e
        for e in entries
    ]
    tensors = tuple(one for one in filled if isinstance(one, TensorEntry))
    return Section(
        "", "state_dict", tensors, tuple(one for one in filled if isinstance(one, ExtraEntry))
    )


def differences(entries: Iterable[Entry]) -> list[tuple[str, str, str, str]]:
    return [
        (
            one.status,
            " ".join(one.left),
            " ".join(one.right),
            ": ".join(filter(None, (one.why(), one.detail))),
        )
        for one in entries
        if one.status != "same"
    ]


def test_differences_of_keys_and_runtime_names() -> None:
    result = compare_names(NAMES)
    assert [entry.left for entry in result if entry.status == "same"] == [("w",), ("v",)]
    assert differences(result) == [
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
    assert {key for entry in result for key in entry.right} == {
        tensor.fqn for tensor in NAMES.runtime
    }


ALL_KEYS = ("w", "twin", "v", "b.w", "qk", "version", ExtraEntry("_extra_state"))
CHECKPOINTS: dict[str, tuple[Section, list[tuple[str, str, str, str]]]] = {
    "what the model saves": (
        section(*ALL_KEYS),
        [("extra_state", "_extra_state", "_extra_state", "extra state")],
    ),
    "runtime names": (
        section("w", "v2", "b.zin.w", "q", "k", "twin", "version", ExtraEntry("_extra_state")),
        [
            ("extra_state", "_extra_state", "_extra_state", "extra state"),
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
        section(
            *(f"module.{key}" for key in ALL_KEYS[:-2]),
            "module.version",
            ExtraEntry("module._extra_state"),
        ),
        [
            ("renamed", f"module.{key}", key, IN_DDP)
            for key in ("w", "twin", "v", "b.w", "qk", "version", "_extra_state")
        ],
    ),
    "runtime names, wrapped": (
        section(
            "module.b.zin.w", "module.w", "twin", "v", "qk", "version", ExtraEntry("_extra_state")
        ),
        [
            ("extra_state", "_extra_state", "_extra_state", "extra state"),
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
        section("w", "v", "b.w", "other", "seen", "version", "_flat_param"),
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
            ("missing", "", "twin", f"{Code.TIED.words}: same as w"),
            ("missing", "", "qk", "missing from left"),
            ("missing", "", "_extra_state", "missing from left"),
        ],
    ),
    "other shapes, dtypes and kinds": (
        section(
            TensorEntry("w", "float32", (3,), (1,), 0, None),
            TensorEntry("twin", "float32", (2,), (1,), 0, None),
            TensorEntry("b.w", "float16", (2,), (1,), 0, None),
            *("v", "version", ExtraEntry("qk"), ExtraEntry("_extra_state")),
        ),
        [
            ("shape", "w", "w", "different shape: [3] instead of [2]"),
            ("dtype", "b.w", "b.w", "float16 instead of float32"),
            ("shape", "qk", "qk", "not a tensor, but the model expects one"),
            ("extra_state", "_extra_state", "_extra_state", "extra state"),
        ],
    ),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_differences_of_a_checkpoint_and_the_names(name: str) -> None:
    checkpoint, expected = CHECKPOINTS[name]
    result = compare_load(NAMES, checkpoint, None)
    assert differences(result) == expected
    assert loads(result) == (name == "what the model saves")
    assert sorted(key for entry in result for key in entry.left) == sorted(checkpoint.by_key())


def test_different_values_under_a_tied_name_are_reported_as_lost() -> None:
    """Without the model's code, loading is assumed to keep the last key."""
    sized = Names(
        "n",
        "2",
        (runtime("w"), runtime("twin", alias_of="w")),
        (saved("w", Ref("w")), saved("twin", Ref("w"))),
        (),
    )
    entries = [tensor("w", 1, 2, dtype="float32"), tensor("twin", 1, 3, dtype="float32")]
    entries = [TensorEntry(e.key, "uint8", (2,), (1,), 0, e.storage) for e in entries]
    keys = tuple(SerializedKey(key, "uint8", (2,), Ref("w"), None) for key in ("w", "twin"))
    names = Names(sized.model, sized.torch, sized.runtime, keys, ())
    reason = "tied, but the file has different values under another of its names: loading loses one"
    assert differences(compare_load(names, section(*entries), None)) == [
        ("value", "w", "w", f"{reason}: loading keeps twin")
    ]
    verdict = Verdict(True, (), (), (), (), {"w": Ref("w")})
    assert differences(compare_load(names, section(*entries), verdict)) == [
        ("value", "twin", "twin", f"{reason}: loading keeps w")
    ]
    assert not differences(compare_load(names, section(entries[0], tensor("twin", 1, 2)), None))


def test_keys_that_load_hooks_accept_are_explained() -> None:
    """A hook reads one key under its old name and removes another; a third is not needed."""
    verdict = Verdict(True, (), ("bad",), (), (), {"w": Ref("old"), "q": HALVES[0], "k": HALVES[1]})
    result = compare_load(NAMES, section("old", "bad", "removed", *ALL_KEYS[1:]), verdict)
    assert differences(result) == [
        ("extra_state", "_extra_state", "_extra_state", "extra state"),
        ("renamed", "old", "w", "a load hook accepts the keys of left"),
        ("unexpected", "bad", "", "not in right"),
        ("unexpected", "removed", "", "not in right; a load hook removes it without an error"),
    ]
    verdict = replace(verdict, ok=False, reads={})
    assert ("unexpected", "removed", "", "not in right") in differences(
        compare_load(NAMES, section("removed", *ALL_KEYS), verdict)
    )


def test_call_variants_of_an_unflattened_program_are_aliases() -> None:
    """`f@1.w` is `f.w` if it has the same bytes or the model says that it is an alias."""
    model = (runtime("f.w"), runtime("f@1.w", alias_of="f.w"), runtime("g.w"), runtime("g@1.w"))
    keys = [
        SerializedKey(one.fqn, "uint8", (2,), Ref(one.alias_of or one.fqn), None) for one in model
    ]
    both, plain = (Names("n", "2", model[:n], tuple(keys[:n]), ()) for n in (4, 1))
    assert differences(
        compare_load(both, section(tensor("f.w", 1, 2), tensor("g.w", 1, 2)), None)
    ) == [
        ("alias", "", "f@1.w", "call variant of a tensor that both sides have: same as f.w"),
        ("missing", "", "g@1.w", "missing from left"),
    ]
    base = tensor("f.w", 1, 2)
    for variant, expected in (
        (
            tensor("f@1.w", 1, 2),
            ("alias", "f@1.w", "", "call variant of a tensor that both sides have: same as f.w"),
        ),
        (tensor("f@1.w", 1, 3), ("unexpected", "f@1.w", "", "not in right")),
        (tensor("h@1.w", 1, 2), ("unexpected", "h@1.w", "", "not in right")),
    ):
        assert differences(compare_load(plain, section(base, variant), None)) == [expected]
    lone = compare_load(plain, section(tensor("x.w", 1, 2), tensor("x@1.w", 1, 2)), None)
    assert [entry[:3] for entry in differences(lone)] == [
        ("unexpected", "x.w", ""),
        ("unexpected", "x@1.w", ""),
        ("missing", "", "f.w"),
    ]


def compare_by_names(left: Section, right: Section) -> list[tuple[str, str, str, str]]:
    return differences(compare_through(NAMES, left, right, lambda a, b: difference(a, b, 0, 0)))


def test_names_without_hooks_or_shapes_are_compared() -> None:
    names = Names(
        "n", "2", (runtime("a"), runtime("b")), (saved("c", Ref("a")), saved("b", Ref("b"))), ()
    )
    assert differences(compare_names(names)) == [("renamed", "c", "a", "saving turns `a` into `c`")]
    loose = replace(names, serialized=tuple(replace(key, shape=None) for key in names.serialized))
    assert loads(compare_load(loose, section("c", tensor("b", 1, 2, 3, dtype="float32")), None))


def test_two_checkpoints_are_compared_through_the_names() -> None:
    serialized = [
        tensor("w", 1, 2),
        tensor("b.w", 3, 4),
        tensor("qk", 5, 6, 7, 8),
        tensor("version", 9, 9),
    ]
    runtime_entries = [
        tensor("w", 1, 2),
        tensor("b.zin.w", 3, 4),
        tensor("q", 5, 6),
        tensor("k", 7, 8),
    ]
    renamed = (
        "renamed",
        "b.w",
        "b.zin.w",
        "state_dict hook hides the segment `zin`: hide (net.py:1)",
    )
    computed = ("transformed", "qk", "q k", "computed by a state_dict hook")
    assert compare_by_names(
        section(*serialized), section(*runtime_entries, tensor("version", 9, 9))
    ) == [
        renamed,
        computed,
    ]
    assert compare_by_names(
        section(*runtime_entries, tensor("version", 9, 9)), section(*serialized)
    ) == [
        ("renamed", "b.zin.w", "b.w", renamed[3]),
        ("transformed", "q k", "qk", computed[3]),
    ]
    assert not compare_by_names(section(*serialized), section(*serialized))
    other = [tensor("w", 1, 3), *serialized[1:2], tensor("qk", 5, 6, 7, 9), tensor("version", 9, 9)]
    assert [entry[:3] for entry in compare_by_names(section(*serialized), section(*other))] == [
        ("value", "w", "w"),
        ("value", "qk", "qk"),
    ]
    assert compare_by_names(
        section(*serialized, tensor("x", 1, 1)), section(*serialized[:2], serialized[3])
    ) == [
        ("unexpected", "qk", "", "not in right"),
        ("unexpected", "x", "", "not in right"),
    ]
