"""Pickled mappings and their items, with `torch.load` of the same file as the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttool.formats.pickle_read import Call, Global
from ckpttool.formats.torch.nodes import text_of
from ckpttool.formats.torch.zip_file import read
from crafted_zip import GOOD, crafted, tensor_node

KINDS = {kind: Global("collections", kind) for kind in ("OrderedDict", "Counter", "defaultdict")}
KINDS["dict"] = Global("builtins", "dict")
A, B, C = (tensor_node() for _ in range(3))
PAIRS = [("a", A), ("b", B)]


def nested(kind: str) -> Call:
    return Call(KINDS[kind], (PAIRS,))


def with_pairs(node: Call, **pairs: Any) -> Call:
    node.pairs = pairs
    return node


# The arguments of the mapping, and the opcode
CALLS: dict[str, tuple[tuple[Any, ...], str]] = {
    "nothing": ((), "REDUCE"),
    "a list of pairs": ((PAIRS,), "REDUCE"),
    "a tuple of lists": ((tuple(map(list, PAIRS)),), "OBJ"),
    "a dict": ((dict(PAIRS),), "REDUCE"),
    "another mapping": ((nested("OrderedDict"),), "REDUCE"),
    # torch fails, or makes another object: it is copied unchanged
    "a pair of one": (([("a",)],), "REDUCE"),
    "a pair of three": (([("a", A, B)],), "REDUCE"),
    "two lists": ((PAIRS, PAIRS), "REDUCE"),
    "a list without a call": ((PAIRS,), "NEWOBJ"),
    "a list without a call, with keywords": ((PAIRS,), "NEWOBJ_EX"),
}

KNOWN = list(CALLS)[:5]


@pytest.mark.parametrize("more", [{}, {"c": C}, {"a": C}])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CALLS)
def test_mappings_are_read_as_in_torch(tmp_path: Path, name: str, kind: str, more: dict[str, Any]) -> None:
    args, how = CALLS[name]
    args = (None, *args) if kind == "defaultdict" and args else args
    node = with_pairs(Call(KINDS[kind], args, how, {} if how == "NEWOBJ_EX" else None), **more)
    path = crafted(tmp_path, {"m": node, "other": {"w": tensor_node()}}, GOOD)
    found = {section.path: [entry.key for entry in section.tensors] for section in read(path).sections}
    is_known = name in KNOWN and not (kind == "Counter" and type(args[0] if args else None) in (list, tuple))
    assert found.get("m", []) == (list(torch.load(path, weights_only=False)["m"]) if is_known else [])


@pytest.mark.parametrize(("key", "text"), [("a", "a"), (b"a", "a"), ("ü".encode(), "ü"), (b"\xff", "ÿ"), (3, None)])
def test_keys_are_converted_to_text(key: Any, text: str | None) -> None:
    assert text_of(key) == text
