"""`explain` against the names themselves: what a name names in any form is told."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ckpttool import expression as ex
from ckpttool.errors import CkptError
from ckpttool.naming.name_tables import NameTables
from ckpttool.operands.model import ModelOperand
from ckpttool.queries.explanation import explain
from ckpttool.tracing.load_model import of_object
from ckpttool.tracing.trace import trace
from command import Run
from hook_zoo import ZOO


@pytest.mark.parametrize("name", ZOO)
def test_every_name_is_explained_by_all_that_it_names(name: str) -> None:
    names = trace(of_object(ZOO[name]))
    tables = NameTables(names)
    made = {s.key: {tables.first[fqn] for fqn in ex.refs(s.source)} for s in names.serialized if s.source is not None}
    called = {t.fqn for t in names.runtime} | {t.canonical for t in names.runtime} | set(made)
    for one in called:
        named = {tables.first[t.fqn] for t in names.runtime if one in (t.fqn, t.canonical)} | made.get(one, set())
        if not named:
            with pytest.raises(CkptError, match="has no tensor"):
                explain(names, one)
            continue
        found = explain(names, one)
        assert {tables.first[fqn] for fqn in (found.tensor.fqn, *found.also)} == named
        assert one not in tables.first or found.tensor.fqn == one
        assert {tables.first[fqn] for fqn in found.aliases} <= {tables.first[found.tensor.fqn]}
        assert found.tensor.fqn not in found.aliases
    for first, group in tables.groups.items():
        of_group = [explain(names, fqn) for fqn in group]
        assert {key for found in of_group for key in found.serialized} == {key for key in made if first in made[key]}
        assert all(found.serialized for found in of_group) or not any(found.serialized for found in of_group)


class Fused(nn.Module):
    """`k` and `q` are saved as one, twice, `a` and `b` under each other's name; a number is added."""

    def __init__(self) -> None:
        super().__init__()
        for name, size in {"q": 2, "k": 2, "a": 3, "b": 4}.items():
            setattr(self, name, nn.Parameter(torch.zeros(size)))
        self.register_buffer("steps", torch.zeros(1))
        self._register_state_dict_hook(self._save)

    @staticmethod
    def _save(module: nn.Module, state: dict[str, torch.Tensor], *_: object) -> None:
        state["qk"] = state["copy"] = torch.cat([state.pop("q"), state.pop("k")])
        state["a"], state["b"] = state["b"], state["a"]
        state["added"] = torch.ones(1)


TOLD = {
    "q": (["qk", "copy"], [], 0),
    "qk": (["qk", "copy"], ["k"], 0),
    "a": ("b", ["b"], 2),
    "b": ("a", ["a"], 3),
    "steps": ("steps", [], None),
}


@pytest.mark.parametrize("name", TOLD)
def test_what_else_a_name_names_is_said(name: str, run: Run) -> None:
    line = ("explain", name, "--model", f"{__file__}:Fused")
    done = run(*line, "--format", "json")
    assert (done.data["serialized"], done.data["also"], done.data["optimizer_id"]) == TOLD[name]
    assert done.data["optimizer_group"] == (None if name == "steps" else 0)
    assert done.data["forms"].get("serialized") == (TOLD[name][0] if isinstance(TOLD[name][0], str) else None)
    assert ("another's name" in run(*line).out) == bool(TOLD[name][1])


def test_what_is_no_tensors_name_is_refused_with_names_that_are_like_it() -> None:
    names = ModelOperand(Fused).names()
    every = "list them: ckpttool trace Fused --all"
    for name, hint in ("step", "names that are like it: steps"), ("added", every), ("xyz", every):
        with pytest.raises(CkptError, match=f"has no tensor '{name}'") as refused:
            explain(names, name)
        assert refused.value.hint == hint
