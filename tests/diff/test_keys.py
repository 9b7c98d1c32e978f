"""Two state_dicts compared key by key, and the entries next to them."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpttool

State = dict[str, Any]
Difference = tuple[str, str, str, str]


def tensor(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def differences(left: State, right: State, values: bool = True) -> list[Difference]:
    """Save both states and return status, keys and reason of each entry that is not the same."""
    torch.save(left, "left.pt")
    torch.save(right, "right.pt")
    return differences_of_files(values)


def differences_of_files(values: bool) -> list[Difference]:
    diff = ckpttool.diff("left.pt", "right.pt", values=values)
    return [
        (
            entry.status,
            " ".join(entry.left),
            " ".join(entry.right),
            ": ".join(filter(None, (entry.reason, entry.detail))),
        )
        for entry in diff.entries
        if entry.status != "same"
    ]


SAME = {"w.x": tensor(1), "w.y": tensor(2)}
DDP = "left is wrapped in DistributedDataParallel or DataParallel or AveragedModel (`module`)"
ONE_DIFFERS = "1 of 1 elements differ, by 1 at most"
PAIRS: dict[str, tuple[State, State, list[Difference]]] = {
    "values": (
        {"a": tensor(1, 2), "b": tensor(1, 2)},
        {"a": tensor(1, 3), "b": tensor(1, 2)},
        [("value", "a", "a", "different values: 1 of 2 elements differ, by 1 at most")],
    ),
    "shapes and dtypes": (
        {"a": tensor(1, 2), "b": tensor(1, 2), "c": tensor(1)},
        {"a": tensor(1, 2, 3), "b": tensor(1, 2).view(torch.int8), "c": 1},
        [
            ("shape", "a", "a", "different shape: [2] instead of [3]"),
            ("dtype", "b", "b", "uint8 instead of int8"),
            ("shape", "c", "c", "a tensor on one side only"),
        ],
    ),
    "shapes, and a dtype or a wrapper too": (
        {"a": tensor(1, 2), "module.b": tensor(1)},
        {"a": tensor(1).view(torch.int8), "b": tensor(1, 2)},
        [
            ("shape", "a", "a", "different shape: [2] instead of [1]"),
            ("shape", "module.b", "b", f"different shape; {DDP}: [1] instead of [2]"),
        ],
    ),
    "two wrapped names of one name": (
        {"module.a": tensor(1), "_orig_mod.a": tensor(1)},
        {"a": tensor(1)},
        [
            ("unexpected", "module.a", "", "not in right"),
            ("unexpected", "_orig_mod.a", "", "not in right"),
            ("missing", "", "a", "missing from left"),
        ],
    ),
    "a wrapper": (
        {"module.a": tensor(1), "module.b": tensor(1), "c": tensor(1)},
        {"a": tensor(1), "b": tensor(2), "d": tensor(1)},
        [
            ("renamed", "module.a", "a", DDP),
            ("value", "module.b", "b", f"different values; {DDP}: {ONE_DIFFERS}"),
            ("unexpected", "c", "", "not in right"),
            ("missing", "", "d", "missing from left"),
        ],
    ),
    "objects": (
        {**SAME, "w.a": 1, "w.b": 1, "w.c": [tensor(1), tensor(2)]},
        {**SAME, "w.a": 1, "w.b": 2, "w.c": [tensor(1), tensor(3)]},
        [
            ("value", "w.b", "w.b", "not a tensor, and a different object"),
            (
                "value",
                "w.c",
                "w.c",
                "not a tensor, and a tensor inside it differs; different values:"
                f" w.c.1: {ONE_DIFFERS}",
            ),
        ],
    ),
    "other tensors inside": (
        {**SAME, "w.a": {"x": tensor(1)}, "w.b": [tensor(1), 3]},
        {**SAME, "w.a": {"y": tensor(1)}, "w.b": [3]},
        [
            (
                "shape",
                key,
                key,
                f"not a tensor, and contains different tensors: {place}: only in left",
            )
            for key, place in (("w.a", "w.a.x"), ("w.b", "w.b.0"))
        ],
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_each_different_key_is_reported_with_its_reason(name: str) -> None:
    left, right, expected = PAIRS[name]
    assert differences(left, right) == expected
    swapped = {"unexpected": "missing", "missing": "unexpected"}
    assert {entry[:3] for entry in differences(right, left)} == {
        (swapped.get(status, status), right_key, left_key)
        for status, left_key, right_key, _ in expected
    }


def test_objects_are_not_compared_without_values() -> None:
    assert differences({**SAME, "w.a": 1}, {**SAME, "w.a": 2}, values=False) == [
        ("extra_state", "w.a", "w.a", "not a tensor: copied, not compared")
    ]


def test_a_second_name_of_a_common_tensor_is_an_alias() -> None:
    shared = tensor(1, 2)
    tied = {"b": shared, "a": shared, "c": tensor(1, 2)}
    alias = "second name of a tensor that both sides have: same as"
    for kept, dropped in (("a", "b"), ("b", "a")):
        one = {kept: tensor(1, 2)}
        assert differences(tied, one) == [
            ("alias", dropped, "", f"{alias} {kept}"),
            ("unexpected", "c", "", "not in right"),
        ]
        assert differences(one, tied)[0] == ("alias", "", dropped, f"{alias} {kept}")
    statuses = [status for status, *_ in differences(tied, {"x": tensor(9, 9)})]
    assert statuses == ["unexpected"] * 3 + ["missing"]


# Outside the models


def test_tensors_outside_state_dicts_are_compared_if_both_have_them() -> None:
    model = {"w": tensor(1)}
    assert differences(
        {"model": model, "more": tensor(1), "b": tensor(1), "left_only": tensor(1)},
        {"model": model, "b": tensor(2), "more": tensor(1), "ema": 3},
    ) == [("value", "b", "b", f"different values: {ONE_DIFFERS}")]


def save_with_storages(path: str, storages: Iterable[bytes]) -> None:
    """Save a tensor, and add storages to the archive that no tensor refers to."""
    torch.save({"w": tensor(1)}, path)
    with zipfile.ZipFile(path, "a") as archive:
        for number, data in enumerate(storages, 5):
            archive.writestr(f"{Path(path).stem}/data/{number}", data)


def test_storages_without_a_known_tensor_are_compared_by_their_bytes() -> None:
    save_with_storages("left.pt", [b"1", b"2", b"2"])
    save_with_storages("right.pt", [b"2", b"1", b"2"])
    assert differences_of_files(values=False) == []
    save_with_storages("left.pt", [b"1", b"1", b"2"])
    save_with_storages("right.pt", [b"1", b"3"])
    reason = "a storage that belongs to no known tensor"
    assert differences_of_files(values=False) == [
        ("unexpected", "data/6", "", f"{reason}; not in right"),
        ("unexpected", "data/7", "", f"{reason}; not in right"),
        ("missing", "", "data/6", f"{reason}; missing from left"),
    ]
