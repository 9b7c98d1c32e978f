"""JSON input files: all faults are reported together, each with its JSON path."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ckpttool
from ckpttool import CkptError, Names, Plan
from surroundings import limited
from zoo import traced

NAMES = json.loads(json.dumps(traced("fused_qkv").to_json()))
PLAN = {
    "schema": "ckpttool.plan/1",
    "outputs": [
        {
            "section": "",
            "key": "x",
            "from": {"op": "aten.cat.default", "args": [[{"ref": "a"}, {"ref": "b"}], 0]},
        },
        {"section": "", "key": "y", "from": {"ref": "a"}},
    ],
    "dropped": [{"section": "", "key": "c", "reason": "not wanted"}],
    "modules": [{"section": "", "old": "m", "new": "n"}],
}
READERS = {
    "names": (NAMES, lambda value: Names.from_json(value, "f.json")),
    "plan": (PLAN, Plan.from_json),
}


def changed(value: Any, path: str, new: Any) -> Any:
    """Return a copy in which the value at `path` is `new`."""
    result = copy.deepcopy(value)
    place = result
    *steps, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    for step in steps:
        place = place[step]
    place[last] = new
    return result


def problems(name: str, value: Any) -> list[str]:
    with pytest.raises(CkptError) as refused:
        READERS[name][1](value)
    assert refused.value.exit_status == 2
    return [str(problem) for problem in refused.value.problems]


FAULTS: list[tuple[str, str, Any, str]] = [
    ("names", "runtime.0.shape", [-1], "-1 is not an integer from 0 on @ $.runtime[0].shape[0]"),
    (
        "names",
        "runtime.0.shape",
        [True],
        "true is not an integer from 0 on @ $.runtime[0].shape[0]",
    ),
    ("names", "serialized.1.shape", "33", "'33' is not a list @ $.serialized[1].shape"),
    (
        "names",
        "runtime.1.dtype",
        "float33",
        "'float33' is not a dtype that ckpttool knows @ $.runtime[1].dtype",
    ),
    ("names", "runtime.0.persistent", "no", "'no' is not true or false @ $.runtime[0].persistent"),
    (
        "names",
        "runtime.0.kind",
        "tensor",
        "'tensor' is not 'parameter' or 'buffer' @ $.runtime[0].kind",
    ),
    ("names", "runtime.0.alias_of", "x", "'x' is not a name in this file @ $.runtime[0].alias_of"),
    (
        "names",
        "serialized.0.from",
        {"ref": "x"},
        "'x' is not a name in this file @ $.serialized[0].from",
    ),
    ("names", "serialized.0.hook", "h", "'h' is not an object @ $.serialized[0].hook"),
    ("names", "extra_state", "abc", "'abc' is not a list @ $.extra_state"),
    ("names", "optimizer.0.id", "0", "'0' is not an integer from 0 on @ $.optimizer[0].id"),
    ("names", "torch", 2.6, "2.6 is not a string @ $.torch"),
    ("plan", "outputs.1.key", 1, "1 is not a string @ $.outputs[1].key"),
    ("plan", "outputs.0.from", 3, "not an expression @ $.outputs[0].from"),
    (
        "plan",
        "outputs.0.from.args.0.1",
        {"rf": "b"},
        "not an expression: {'rf': 'b'} @ $.outputs[0].from.args[0][1]",
    ),
    ("plan", "dropped.0.reason", None, "null is not a string @ $.dropped[0].reason"),
    ("plan", "modules", None, "null is not a list @ $.modules"),
]


@pytest.mark.parametrize(("reader", "path", "new", "expected"), FAULTS)
def test_fault_is_reported_with_its_json_path(
    reader: str, path: str, new: Any, expected: str
) -> None:
    assert problems(reader, changed(READERS[reader][0], path, new)) == [expected]


def test_all_faults_are_reported_together() -> None:
    value = changed(changed(NAMES, "runtime.0.shape", [-1]), "torch", None)
    del value["load"]
    assert problems("names", value) == [
        "null is not a string @ $.torch",
        "-1 is not an integer from 0 on @ $.runtime[0].shape[0]",
        "is missing @ $.load",
    ]


def test_repeated_name_is_reported() -> None:
    twice = {**NAMES, "serialized": [*NAMES["serialized"], NAMES["serialized"][0]]}
    first, last = NAMES["serialized"][0]["key"], len(NAMES["serialized"])
    assert problems("names", twice) == [
        f"'{first}' stands 2 times @ $.serialized[{place}].key" for place in (0, last)
    ]


def test_only_the_first_100_faults_are_reported() -> None:
    messages = problems("plan", {**PLAN, "dropped": [7] * 100_000})
    assert len(messages) == 101
    assert messages[0] == "7 is not an object @ $.dropped[0]"
    assert "more than 100" in messages[-1]


def test_repeated_member_is_refused(tmp_path: Path) -> None:
    text = json.dumps(NAMES).replace('"runtime":', '"load": [], "runtime":')
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(CkptError, match="'load' is there twice"):
        ckpttool.trace(str(tmp_path / "p.json"))


def test_file_over_the_size_limit_names_the_limit(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(json.dumps(NAMES))
    with (
        limited(json_bytes=100),
        pytest.raises(
            CkptError,
            match=r"max-memory 200 raises"
            r" it",
        ),
    ):
        ckpttool.trace(str(tmp_path / "p.json"))


def places(value: Any, path: str = "") -> Iterator[str]:
    """Yield the path of every value in the file."""
    for step, inner in (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    ):
        yield f"{path}{step}"
        yield from places(inner, f"{path}{step}.")


JUNK = st.sampled_from(
    [None, True, -1, 0, 1, 2**70, 1.5, "", "x", [], {}, [1], {"ref": "x"}, {"op": "aten.t.default"}]
)


@pytest.mark.parametrize("reader", READERS)
@settings(max_examples=150)
@given(data=st.data())
def test_junk_at_any_path_round_trips_or_is_refused(reader: str, data: st.DataObject) -> None:
    value, read = READERS[reader]
    path = data.draw(st.sampled_from(list(places(value))))
    broken = changed(value, path, data.draw(JUNK))
    refused = None
    try:
        result = read(broken)
    except CkptError as error:
        refused = error
    if refused is None:
        assert read(result.to_json()) == result
    else:
        assert all(problem.key.startswith("$") for problem in refused.problems)
        assert refused.problems or "schema" in refused.message


def test_names_file_round_trip(tmp_path: Path) -> None:
    names = ckpttool.trace(lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    (tmp_path / "n.json").write_text(json.dumps(names.to_json()))
    assert ckpttool.trace(str(tmp_path / "n.json")).to_json() == names.to_json()


@pytest.mark.parametrize(
    ("member", "value", "expected"),
    [
        ("modules", None, []),
        ("modules", ["a"], []),
        ("modules", 5, ["5 is not a list @ $.modules"]),
        ("modules", [5], ["5 is not a string @ $.modules[0]"]),
        ("notes", ["a note"], []),
        ("notes", [{"code": "a", "text": "a note"}], []),
        ("notes", [5], ["5 is not an object @ $.notes[0]"]),
    ],
)
def test_member_may_have_values_of_several_kinds(
    member: str, value: Any, expected: list[str]
) -> None:
    changed_names = {**NAMES, member: value}
    if expected:
        assert problems("names", changed_names) == expected
    else:
        assert (
            Names.from_json(changed_names, "f.json").to_json()["serialized"] == NAMES["serialized"]
        )


def test_member_with_a_space_has_a_quoted_path() -> None:
    options = {"plain": [], "not plain": {"rf": "b"}, "lr": {"rf": "b"}}
    groups: list[Any] = [{"params": [], "like": None, "options": options}]
    move = {"section": "o", "form": "id", "params": [], "groups": groups}
    assert problems("plan", {**PLAN, "optimizers": [move]}) == [
        "not an expression: {'rf': 'b'} @ $.optimizers[0].groups[0].options['not plain']",
        "not an expression: {'rf': 'b'} @ $.optimizers[0].groups[0].options.lr",
    ]


def test_unknown_param_group_is_refused(tmp_path: Path) -> None:
    names_json = ckpttool.trace(
        "torch.nn:Linear(in_features=2, out_features=2)", optimizer=torch.optim.SGD
    ).to_json()
    for group, problems in ((0, []), (1, ["$.optimizer[0].group"]), (7, ["$.optimizer[0].group"])):
        names_json["optimizer"][0]["group"] = group
        (tmp_path / "names.json").write_text(json.dumps(names_json))
        if not problems:
            ckpttool.trace(str(tmp_path / "names.json"))
            continue
        with pytest.raises(CkptError) as raised:
            ckpttool.trace(str(tmp_path / "names.json"))
        assert [problem.key for problem in raised.value.problems] == problems
