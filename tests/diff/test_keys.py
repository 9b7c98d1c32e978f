"""Two state dicts compared key by key, and the entries next to them, with hand-made entries."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from ckpttool import Checkpoint
from ckpttool.core.checkpoint import (
    ExtraEntry,
    Lazy,
    Section,
    Span,
    Storage,
    TensorEntry,
    Unreached,
)
from ckpttool.diffing.options import DiffOptions
from ckpttool.diffing.others import compare_outside
from ckpttool.diffing.result import Entry
from ckpttool.diffing.sections import compare

Entries = TensorEntry | ExtraEntry

VALUES = DiffOptions(values=True).comparison


def storage(*values: int) -> Storage:
    return Storage(Lazy(len(values), lambda: [bytes(values)]))


def tensor(key: str, *values: int, dtype: str = "uint8", of: Storage | None = None) -> TensorEntry:
    return TensorEntry(key, dtype, (len(values),), (1,), 0, of or storage(*values))


def section(*entries: Entries, path: str = "", kind: str = "state_dict") -> Section:
    tensors = tuple(one for one in entries if isinstance(one, TensorEntry))
    return Section(
        path, kind, tensors, tuple(one for one in entries if isinstance(one, ExtraEntry))
    )


def differences(entries: Iterable[Entry]) -> list[tuple[str, str, str, str]]:
    return [
        (
            one.status,
            " ".join(one.left),
            " ".join(one.right),
            ": ".join(filter(None, (one.reason, one.detail))),
        )
        for one in entries
        if one.status != "same"
    ]


def differences_of(
    left: list[Entries], right: list[Entries], values: bool = True
) -> list[tuple[str, str, str, str]]:
    compare_values = VALUES if values else None
    return differences(compare(section(*left), section(*right), compare_values))


PAIRS: dict[str, tuple[list[Entries], list[Entries], list[tuple[str, str, str, str]]]] = {
    "values": (
        [tensor("a", 1, 2), tensor("b", 1, 2)],
        [tensor("a", 1, 3), tensor("b", 1, 2)],
        [("value", "a", "a", "different values: 1 of 2 elements differ, by 1 at most")],
    ),
    "shapes and dtypes": (
        [tensor("a", 1, 2), tensor("b", 1, 2), tensor("c", 1)],
        [tensor("a", 1, 2, 3), tensor("b", 1, 2, dtype="int8"), ExtraEntry("c", value=1)],
        [
            ("shape", "a", "a", "different shape: [2] instead of [3]"),
            ("dtype", "b", "b", "uint8 instead of int8"),
            ("shape", "c", "c", "a tensor on one side only"),
        ],
    ),
    "shapes, and a dtype or a wrapper too": (
        [tensor("a", 1, 2), tensor("module.b", 1)],
        [tensor("a", 1, dtype="int8"), tensor("b", 1, 2)],
        [
            ("shape", "a", "a", "different shape: [2] instead of [1]"),
            ("shape", "module.b", "b", "different shape; IN: [1] instead of [2]"),
        ],
    ),
    "two wrapped names of one name": (
        [tensor("module.a", 1), tensor("_orig_mod.a", 1)],
        [tensor("a", 1)],
        [
            ("unexpected", "module.a", "", "not in right"),
            ("unexpected", "_orig_mod.a", "", "not in right"),
            ("missing", "", "a", "missing from left"),
        ],
    ),
    "a wrapper": (
        [tensor("module.a", 1), tensor("module.b", 1), tensor("c", 1)],
        [tensor("a", 1), tensor("b", 2), tensor("d", 1)],
        [
            ("renamed", "module.a", "a", "IN"),
            (
                "value",
                "module.b",
                "b",
                "different values; IN: 1 of 1 elements differ, by 1 at most",
            ),
            ("unexpected", "c", "", "not in right"),
            ("missing", "", "d", "missing from left"),
        ],
    ),
    "objects": (
        [
            ExtraEntry("a", value=1),
            ExtraEntry("b", value=1),
            ExtraEntry("c", tensors=(tensor("0", 1), tensor("1", 2))),
        ],
        [
            ExtraEntry("a", value=1),
            ExtraEntry("b", value=2),
            ExtraEntry("c", tensors=(tensor("0", 1), tensor("1", 3))),
        ],
        [
            ("value", "b", "b", "not a tensor, and a different object"),
            (
                "value",
                "c",
                "c",
                "INSIDE; different values: c.1: 1 of 1 elements differ, by 1 at most",
            ),
        ],
    ),
    "other tensors inside": (
        [ExtraEntry("a", tensors=(tensor("x", 1),)), ExtraEntry("b", tensors=(tensor("x", 1),))],
        [ExtraEntry("a", tensors=(tensor("y", 1),)), ExtraEntry("b")],
        [
            ("shape", "a", "a", "not a tensor, and contains different tensors: a.x: only in left"),
            ("shape", "b", "b", "not a tensor, and contains different tensors: b.x: only in left"),
        ],
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_differences_of_two_state_dicts(name: str) -> None:
    left, right, expected_entries = PAIRS[name]
    ddp = "left is wrapped in DistributedDataParallel or DataParallel or AveragedModel (`module`)"
    inside = "not a tensor, and a tensor inside it differs"
    expected = [
        (*entry[:3], entry[3].replace("INSIDE", inside).replace("IN", ddp))
        for entry in expected_entries
    ]
    assert differences_of(left, right) == expected
    back = {(status, right_key, left_key) for status, left_key, right_key, _ in expected_entries}
    swap = {"unexpected": "missing", "missing": "unexpected"}
    assert {entry[:3] for entry in differences_of(right, left)} == {
        (swap.get(s, s), *keys) for s, *keys in back
    }


def test_objects_are_not_compared_without_values() -> None:
    one: list[Entries] = [ExtraEntry("a", value=1), tensor("w", 1)]
    other: list[Entries] = [ExtraEntry("a", value=2), tensor("w", 2)]
    assert differences_of(one, other, values=False) == [
        ("extra_state", "a", "a", "not a tensor: copied, not compared")
    ]


def test_a_second_name_of_a_common_tensor_is_an_alias() -> None:
    shared = storage(1, 2)
    tied = [tensor("b", 1, 2, of=shared), tensor("a", 1, 2, of=shared), tensor("c", 1, 2)]
    alias = "second name of a tensor that both sides have: same as"
    for kept, dropped in (("a", "b"), ("b", "a")):
        assert differences_of([*tied], [tensor(kept, 1, 2)]) == [
            ("alias", dropped, "", f"{alias} {kept}"),
            ("unexpected", "c", "", "not in right"),
        ]
        assert differences_of([tensor(kept, 1, 2)], [*tied])[0] == (
            "alias",
            "",
            dropped,
            f"{alias} {kept}",
        )
    assert [entry[0] for entry in differences_of([*tied], [tensor("x", 9, 9)])] == [
        "unexpected"
    ] * 3 + ["missing"]


# Outside the models


def checkpoint(
    *sections: Section, unreached: tuple[Unreached, ...] = (), format: str = "torch_zip"
) -> Checkpoint:
    return Checkpoint(f"{format}.pt", format, 0, sections, unreached=unreached)


def test_the_spread_of_values_is_kept() -> None:
    (entry,) = compare(section(tensor("a", 1, 9)), section(tensor("a", 1, 1)), VALUES)
    assert entry.spread == ((3, 1),)


def test_tensors_outside_state_dicts_are_compared_if_both_have_them() -> None:
    model = section(tensor("w", 1))
    left = checkpoint(
        model,
        section(tensor("a", 1), tensor("b", 1), tensor("left_only", 1), path="more", kind="other"),
    )
    right = checkpoint(
        model, section(tensor("b", 2), tensor("a", 1), kind="other"), section(path="ema")
    )
    assert [entry[:3] for entry in differences(compare_outside(left, right, VALUES))] == [
        ("value", "b", "b")
    ]


def test_storages_without_a_known_tensor_are_compared_by_their_bytes() -> None:
    def storages(*values: int) -> tuple[Unreached, ...]:
        return tuple(Unreached(f"data/{at}", storage(value)) for at, value in enumerate(values))

    def outside(*pair: tuple[Unreached, ...]) -> tuple[Entry, ...]:
        left, right = (checkpoint(unreached=one) for one in pair)
        return compare_outside(left, right, None)

    assert not differences(outside(storages(1, 2, 2), storages(2, 1, 2)))
    reason = "a storage that belongs to no known tensor; {}"
    assert differences(outside(storages(1, 1, 2), storages(1, 3))) == [
        ("unexpected", "data/1", "", reason.format("not in right")),
        ("unexpected", "data/2", "", reason.format("not in right")),
        ("missing", "", "data/1", reason.format("missing from left")),
    ]
    unreadable = (Unreached("data/0", Storage(Span("no such file", 0, 1))),)
    assert [status for status, *_ in differences(outside(unreadable, unreadable))] == [
        "unexpected",
        "missing",
    ]
    script = checkpoint(unreached=storages(1), format="torchscript")
    assert not differences(compare_outside(script, checkpoint(), None))
    assert [
        status
        for status, *_ in differences(
            compare_outside(script, checkpoint(format="torchscript"), None)
        )
    ] == ["unexpected"]
