"""Flat keys of a DCP folder, with torch's flattening and unflattening of random state dicts as the
oracle.
"""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict

import ckpttool
from ckpttool import Refused

KEYS = st.sampled_from(["a", "b", "a.b", "", "x"]) | st.integers(-1, 2)
LEAVES = st.sampled_from([torch.ones(2), 3, None, "text", (1, torch.ones(1)), True])
TREES = st.recursive(
    LEAVES,
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(KEYS, inside, max_size=3),
    max_leaves=8,
)


def converted(state: Any, out: Path) -> Path:
    torch.save(state, out.with_suffix(".pt"))
    ckpttool.convert(str(out.with_suffix(".pt")), str(out), force=True, no_fsync=True)
    return out


def paths_in(folder: Path) -> dict[str, Any]:
    metadata = dcp.FileSystemReader(folder).read_metadata()
    assert metadata.planner_data.keys() == metadata.state_dict_metadata.keys()
    return dict(metadata.planner_data)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(state=st.dictionaries(KEYS, TREES, max_size=4))
def test_flattening_and_its_inverse_are_those_of_torch(state: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.dcp"
    state = {**state, "weight": torch.ones(2)}
    try:
        flat, paths = flatten_state_dict(state)
    except ValueError:
        with pytest.raises(Refused) as refused:
            converted(state, out)
        assert {problem.problem for problem in refused.value.problems} == {
            "two entries have this flat key"
        }
        return
    converted(state, out)
    assert paths_in(out) == paths
    ckpttool.convert(str(out), str(tmp_path / "back.pt"), force=True, no_fsync=True)
    back = torch.load(tmp_path / "back.pt", weights_only=False)
    assert repr(back) == repr(unflatten_state_dict(flat, paths))


@pytest.mark.parametrize(
    ("root", "problem"),
    [
        ([torch.ones(2)], "the file does not hold a dict @ (root)"),
        (
            {"w": torch.ones(1), (1, 2): torch.ones(2)},
            "a dict key that is neither text nor a number @ ",
        ),
    ],
)
def test_objects_without_flat_keys_are_refused(root: Any, problem: str, tmp_path: Path) -> None:
    with pytest.raises(Refused) as refused:
        converted(root, tmp_path / "out.dcp")
    assert any(problem in str(one) for one in refused.value.problems), refused.value.problems


def inside(depth: int, container: Any) -> Any:
    return reduce(lambda inner, _: container(inner), range(depth), 1)


def test_deep_nesting_is_refused_at_the_limit(tmp_path: Path) -> None:
    def nested(depth: int) -> Any:
        return {"w": torch.ones(1), **inside(depth, lambda inner: {"a": inner})}

    assert ".".join("a" * 200) in paths_in(converted(nested(200), tmp_path / "out.dcp"))
    with pytest.raises(Refused) as refused:
        converted(nested(201), tmp_path / "more.dcp")
    assert [str(problem) for problem in refused.value.problems] == [
        "nested too deep @ a.a.a.a.a.a.a.a.a.a"
    ]
