"""Flat keys and their paths, with torch's flattening and unflattening of random state dicts as the
oracle.
"""

from __future__ import annotations

import io
import zipfile
from functools import reduce
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict

from ckpttool import Refused
from ckpttool.containers.pickle_read import loads
from ckpttool.containers.tensors import is_tensor
from ckpttool.formats.dcp import flattened, nested

KEYS = st.sampled_from(["a", "b", "a.b", "", "x"]) | st.integers(-1, 2)
LEAVES = st.sampled_from([torch.ones(2), 3, None, "text", (1, torch.ones(1)), True])
TREES = st.recursive(
    LEAVES,
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(KEYS, inside, max_size=3),
    max_leaves=8,
)


def pickled(value: Any) -> Any:
    """Return the tree of the pickle that torch.save writes."""
    torch.save(value, out := io.BytesIO())
    with zipfile.ZipFile(out) as archive:
        return loads(archive.read("archive/data.pkl")).root


@settings(max_examples=150)
@given(state=st.dictionaries(KEYS, TREES, max_size=4))
def test_flattening_matches_torch(state: dict[Any, Any]) -> None:
    try:
        flat, paths = flatten_state_dict(state)
    except ValueError:
        with pytest.raises(Refused) as caught:
            flattened(pickled(state))
        assert {problem.problem for problem in caught.value.problems} == {
            "two entries have this flat key"
        }
        return
    found = flattened(pickled(state))
    assert {key: path for key, (path, _) in found.items()} == paths
    assert [key for key, (_, node) in found.items() if is_tensor(node)] == [
        key for key, value in flat.items() if isinstance(value, torch.Tensor)
    ]
    assert nested({paths[key]: key for key in flat}) == unflatten_state_dict(
        {key: key for key in flat}, paths
    )


@pytest.mark.parametrize("root", [torch.ones(2), [torch.ones(2)], {(1, 2): torch.ones(2)}])
def test_objects_without_flat_keys_are_refused(root: Any) -> None:
    with pytest.raises(Refused, match="cannot hold this") as caught:
        flattened(pickled(root))
    message = (
        "a dict key that is neither text nor a number @ "
        if isinstance(root, dict)
        else "the file does not hold a dict @ (root)"
    )
    assert message in list(map(str, caught.value.problems))


@pytest.mark.parametrize(
    ("flat", "state"),
    [
        ({("a", 10_000): 1}, {"a": [None] * 10_000 + [1]}),
        ({("param_groups",): [5]}, {"state": {}, "param_groups": [5]}),
        ({("param_groups",): [{"params": 5}]}, {"state": {}, "param_groups": [{"params": 5}]}),
        (
            {("state",): 5, ("param_groups",): [{"params": [0]}]},
            {"state": 5, "param_groups": [{"params": [0]}]},
        ),
        (
            {
                ("state", "0", "x"): 1,
                ("state", "1", "x"): 2,
                ("param_groups",): [{"params": [0]}, {"params": ["1"]}],
            },
            {
                "state": {0: {"x": 1}, "1": {"x": 2}},
                "param_groups": [{"params": [0]}, {"params": ["1"]}],
            },
        ),
    ],
)
def test_flat_keys_are_nested_again(flat: Any, state: Any) -> None:
    assert nested(flat) == state


def inside(depth: int, container: Any) -> Any:
    return reduce(lambda inner, _: container(inner), range(depth), 1)


def test_deep_nesting_is_refused_at_the_limit() -> None:
    assert list(flattened(inside(200, lambda inner: {"a": inner}))) == [".".join("a" * 200)]
    with pytest.raises(Refused) as caught:
        flattened(inside(201, lambda inner: {"a": inner}))
    assert [str(problem) for problem in caught.value.problems] == [
        "nested too deep @ a.a.a.a.a.a.a.a.a.a"
    ]
    node = inside(5_000, lambda inner: [inner])
    assert flattened({"a": node}) == {"a": (("a",), node)}
